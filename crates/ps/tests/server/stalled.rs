//! Peers who stand still, in the middle of a frame or before an answer that they do not take; and those who may be silent,
//! or slow.

use super::hostile::part;
use super::*;

const STALL_DEADLINE: Duration = Duration::from_millis(200);
const MORE: u64 = 1 << 31;
/// So many floats has a row of the wide model, and so many rows are asked for: an answer is 400 KiB, a request of it none.
const WIDE: usize = 1024;
const ROWS: u64 = 100;
/// About so many bytes are on their way to a peer who does not read them.
const ROOM: usize = 64 << 10;

fn impatient() -> Options {
    Options { stall_deadline: STALL_DEADLINE, ..options() }
}

fn wide_server(options: Options) -> (Server, Arc<Partitions>) {
    let parts = vec![RowPart { width: WIDE, init: Initializer::Uniform { bound: 0.5 } }];
    let shape = ModelShape { tables: vec![TableShape { name: "t".into(), parts }], tensors: vec![] };
    let model = Arc::new(Model::new("test", shape, OptimizerSpec::Sgd { learning_rate: 1.0 }, 7, 1));
    let partitions = Arc::new(Partitions::new(Arc::clone(&model)));
    partitions.open(Partition::new(model, PartitionId(0), 1));
    (server_of(&partitions, options), partitions)
}

fn ask_for_rows(request: u64) -> Vec<u8> {
    let (mut frame, mut bytes) = (Frame::default(), Vec::new());
    ps::begin_pull(&mut frame, request, PullMode { births: true, tensors: false }, 1);
    ps::put_part(&mut frame, PartitionId(0), 1);
    ps::put_ids(&mut frame, &(0..ROWS).collect::<Vec<_>>());
    frame.write(&mut bytes).unwrap();
    bytes
}

/// A worker that has sent the beginning of a frame.
fn stalls(server: &Server, beginning: &[u8]) -> Worker {
    let mut worker = Worker::connect(server);
    worker.stream.write_all(beginning).unwrap();
    worker
}

#[test]
fn who_stands_still_in_the_middle_of_a_frame_is_closed() {
    log::keep();
    let (server, _) = server_with(impatient());
    let push = u64::from(kind::PUSH);
    let beginnings = [
        (vec![1; 5], "5 of 16 bytes of its header"),
        (part(push, 100, 9), "72 of 800 bytes of 0xed06, request 7,"),
        (part(push | MORE, 2, 2), "0 of 16 bytes of the next header of 0xed06, request 7,"),
    ];
    let stalled = beginnings.map(|(beginning, arrived)| (stalls(&server, &beginning), arrived));
    for (mut worker, arrived) in stalled {
        let peer = worker.stream.local_addr().unwrap();
        assert!(is_closed(&mut worker.stream), "{arrived}");
        let line = log::end_of(peer);
        let reason =
            format!("who=worker-1 error=a frame broke off: {arrived} had come: nothing came for 200ms");
        assert!(line.contains(" WARN ") && line.ends_with(&reason), "{line}");
    }
}

#[test]
fn who_is_silent_between_frames_is_served_however_long_it_takes() {
    let (server, _) = server_with(impatient());
    let (mut fresh, mut used) = (Worker::connect(&server), Worker::connect(&server));
    let (part, ids) = ((PartitionId(0), 1), ids_of(PartitionId(0), 3));
    used.pull(part, &ids, BIRTHS).unwrap();
    for _ in 0..3 {
        assert!(is_closed(&mut stalls(&server, &[1; 5]).stream), "a deadline has passed");
    }
    fresh.pull(part, &ids, BIRTHS).unwrap();
    used.pull(part, &ids, BIRTHS).unwrap();
}

/// Goal: the deadline is one for each step, not for a frame.
#[test]
fn who_goes_on_however_slowly_is_served() {
    let (server, _) = wide_server(Options { stall_deadline: STALL_DEADLINE * 10, ..options() });
    let (mut slow, bytes) = (Worker::connect(&server), ask_for_rows(1));
    slow.stream.write_all(&bytes[..1]).unwrap();
    // Whoever stands still from now on tells when a deadline has passed.
    let mut still = stalls(&server, &[1; 5]).stream;
    still.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let mut sent = 1;
    while matches!(still.read(&mut [0; 8]), Err(e) if e.kind() == ErrorKind::WouldBlock) {
        slow.stream.write_all(&bytes[sent..][..1]).unwrap();
        sent += 1;
    }
    assert!(sent > 5, "{sent} bytes took the time of a deadline");
    slow.stream.write_all(&bytes[sent..]).unwrap();
    assert!(slow.frame.read(&mut slow.stream, LIMITS).unwrap());
    ps::expect(&slow.frame, kind::PULLED, 1).unwrap();
}

#[test]
fn who_does_not_take_an_answer_is_closed() {
    log::keep();
    let (server, partitions) = wide_server(impatient());
    let mut worker = Worker::over(dial(&server, Some(ROOM)), SECRET, Who::Worker(3)).unwrap();
    let asked = 200;
    // The server may close before it has seen them all.
    let _ = worker.stream.write_all(&(0..asked).flat_map(ask_for_rows).collect::<Vec<_>>());
    let line = log::end_of(worker.stream.local_addr().unwrap());
    let reason = line.contains("who=worker-3 error=sending") && line.ends_with("nothing was taken for 200ms");
    assert!(line.contains(" WARN ") && reason, "{line}");
    assert!(is_closed(&mut worker.stream));
    assert!(partitions.gauges().unwrap().pulls < asked, "what nobody takes is not made");

    let mut other = Worker::connect(&server);
    other.stream.write_all(&ask_for_rows(1)).unwrap();
    assert!(other.frame.read(&mut other.stream, LIMITS).unwrap());
    ps::expect(&other.frame, kind::PULLED, 1).unwrap();
}

/// Goal: a peer that asks on and on without taking answers is not heard any more, so that what the server holds for it is one
/// request and one answer. When it takes them, each request is answered.
#[test]
fn who_does_not_take_answers_is_not_read_from() {
    let (server, partitions) = wide_server(options());
    let mut worker = Worker::over(dial(&server, Some(ROOM)), SECRET, Who::Worker(1)).unwrap();
    worker.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut asked = 0;
    let unsent = loop {
        let request = ask_for_rows(asked);
        asked += 1;
        if let Some(unsent) = send_some(&mut worker.stream, &request) {
            break unsent;
        }
        assert!(asked < 4000, "it is read from for ever");
    };
    let made = partitions.gauges().unwrap().pulls;
    assert!(made * 4 < asked, "{made} answers are made, {asked} asked for");

    let mut sending = worker.stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            sending.set_write_timeout(None).unwrap();
            sending.write_all(&unsent).unwrap();
        });
        for request in 0..asked {
            assert!(worker.frame.read(&mut worker.stream, LIMITS).unwrap());
            ps::expect(&worker.frame, kind::PULLED, request).unwrap();
        }
    });
    assert_eq!(partitions.gauges().unwrap().pulls, asked);
}

/// Sends bytes until all are on their way. What is not, where none goes any more.
fn send_some(stream: &mut TcpStream, mut bytes: &[u8]) -> Option<Vec<u8>> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Some(bytes.to_vec()),
            Err(e) => panic!("{e}"),
        }
    }
    None
}
