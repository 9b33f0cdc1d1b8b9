//! A server that asks for the job's certificate, over real loopback, and those who have none.

use std::time::SystemTime;

use elasticdl_wire::{Identity, Stream};

use super::hostile::part;
use super::*;

fn identity() -> Identity {
    Identity::make(SystemTime::now()).unwrap()
}

fn server(identity: &Identity, options: Options) -> (Server, Arc<Partitions>) {
    let parts = vec![RowPart { width: 3, init: Initializer::Uniform { bound: 0.5 } }];
    let shape = ModelShape { tables: vec![TableShape { name: "t".into(), parts }], tensors: vec![] };
    let model = Arc::new(Model::new("test", shape, OptimizerSpec::Sgd { learning_rate: 1.0 }, 7, 1));
    let partitions = Arc::new(Partitions::new(Arc::clone(&model)));
    partitions.open(Partition::new(model, PartitionId(0), 1));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let token = Token::new(SECRET).unwrap();
    let server = Server::start(listener, token, Some(identity.clone()), Arc::clone(&partitions), options);
    (server.unwrap(), partitions)
}

fn shaken(server: &Server, identity: &Identity) -> Result<Stream> {
    let mut stream = Stream::connected(dial(server, None), Some(identity))?;
    loop {
        match stream.handshake() {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            outcome => return outcome.map_err(Error::shaking).map(|()| stream),
        }
    }
}

/// Sends what is in `frame` and takes the answer into it.
fn exchange(stream: &mut Stream, frame: &mut Frame, due: u32) -> Result<()> {
    let request = frame.request();
    frame.write(stream).map_err(|e| Error::io("sending", e))?;
    if !frame.read(stream, Limits::default())? {
        return Err(Error::Malformed("closed".into()));
    }
    ps::expect(frame, due, request)
}

/// A worker that was let in and has pulled a row.
fn worker(server: &Server, identity: &Identity, token: &str) -> Result<Stream> {
    let (mut stream, mut frame) = (shaken(server, identity)?, Frame::default());
    ps::hello(&mut frame, token, Who::Worker(1));
    exchange(&mut stream, &mut frame, kind::WELCOME)?;
    pull(&mut stream)?;
    Ok(stream)
}

fn pull(stream: &mut Stream) -> Result<()> {
    let mut frame = Frame::default();
    ps::begin_pull(&mut frame, 5, PullMode { births: true, tensors: false }, 1);
    ps::put_part(&mut frame, PartitionId(0), 1);
    ps::put_ids(&mut frame, &[42]);
    exchange(stream, &mut frame, kind::PULLED)?;
    let mut payload = frame.payload();
    payload.take_all(2)?;
    assert_eq!(Status::from_word(payload.take()?)?, Status::Ok);
    payload.take()?;
    assert!(payload.take_floats(3)?.iter().all(|weight| *weight != 0.0 && weight.abs() <= 0.5));
    payload.end()
}

#[test]
fn a_worker_needs_the_certificate_and_the_token() {
    let identity = identity();
    let (server, partitions) = server(&identity, options());
    worker(&server, &identity, SECRET).unwrap();
    let error = worker(&server, &identity, "fedcba9876543210").unwrap_err();
    assert_eq!(error.to_string(), "refused: wrong token: it is not the one of this job");
    assert_eq!(partitions.gauges().unwrap().pulls, 1);
}

#[test]
fn strangers_are_closed_and_others_are_served_on() {
    let (ours, theirs) = (identity(), identity());
    let (server, partitions) = server(&ours, Options { hello_deadline: Duration::from_secs(1), ..options() });
    let mut bystander = worker(&server, &ours, SECRET).unwrap();

    let error = worker(&server, &theirs, SECRET).unwrap_err();
    assert_eq!(error.to_string(), "TLS handshake failed: the peer's certificate is not of this job");
    let mut frame = Frame::default();
    ps::hello(&mut frame, SECRET, Who::Worker(1));
    // A plain hello with the right token.
    let mut strangers = vec![dial(&server, None)];
    frame.write(&mut strangers[0]).unwrap();
    let mut rng = elasticdl_spec::mix::Rng::new(5);
    for round in 0..40usize {
        let mut bytes: Vec<u8> = (0..rng.below(600)).map(|_| rng.next_u64() as u8).collect();
        if round % 2 == 0 && bytes.len() > 9 {
            // Garbage behind a believable header gets further in: a client's first message of that length.
            let length = (bytes.len() - 5) as u16;
            bytes[..3].copy_from_slice(&[0x16, 3, 1]);
            bytes[3..5].copy_from_slice(&length.to_be_bytes());
            bytes[5..9].copy_from_slice(&[1, 0, ((length - 4) >> 8) as u8, (length - 4) as u8]);
        }
        let mut stranger = dial(&server, None);
        let _ = stranger.write_all(&bytes);
        strangers.push(stranger);
    }
    // Nothing on their side has ended.
    for (round, stranger) in strangers.iter_mut().enumerate() {
        assert!(is_closed(stranger), "stranger {round}");
    }
    pull(&mut bystander).unwrap();
    assert_eq!(partitions.gauges().unwrap().pulls, 2);
}

#[test]
fn the_deadline_for_hello_holds_for_the_handshake_and_behind_it() {
    let identity = identity();
    let deadlines = Duration::from_millis(300);
    let (server, _) =
        server(&identity, Options { hello_deadline: deadlines, stall_deadline: deadlines / 2, ..options() });
    let since = Instant::now();
    let (mut silent, before) = (dial(&server, None), dial(&server, None));
    // The beginning of a record that takes long to come.
    (&before).write_all(&[0x16, 3, 1, 0x20, 0]).unwrap();
    drips_until_cut(&before, 1, since);
    assert!(is_closed(&mut silent));

    let behind = shaken(&server, &identity).unwrap();
    let mut tcp = behind.tcp();
    tcp.write_all(&[0x17, 3, 3, 0x20, 0]).unwrap();
    drips_until_cut(behind.tcp(), 1, Instant::now());

    // Whoever is through may be silent between two frames as long as it likes.
    let mut worker = worker(&server, &identity, SECRET).unwrap();
    let mut late = dial(&server, None);
    assert!(is_closed(&mut late), "both deadlines have passed");
    pull(&mut worker).unwrap();
}

/// Goal: nobody holds a thread with a record that it does not finish, though the server can read nothing of it.
#[test]
fn who_stands_still_in_the_middle_of_a_frame_or_a_record_is_closed() {
    log::keep();
    let identity = identity();
    let (server, _) = server(&identity, Options { stall_deadline: Duration::from_millis(200), ..options() });
    let mut idle = worker(&server, &identity, SECRET).unwrap();
    let [mut framed, recorded] = [(); 2].map(|()| worker(&server, &identity, SECRET).unwrap());
    framed.write_all(&part(kind::PUSH.into(), 100, 9)).and_then(|()| framed.flush()).unwrap();
    recorded.tcp().write_all(&[0x17, 3, 3, 0x20, 0]).unwrap();
    let reasons =
        ["a frame broke off: 72 of 800 bytes of 0xed06, request 7, had come", "waiting for a frame"];
    for (mut stream, reason) in [framed, recorded].into_iter().zip(reasons) {
        let peer = stream.tcp().local_addr().unwrap();
        assert!(is_closed(&mut stream), "{reason}");
        let line = log::end_of(peer);
        let reason = format!("who=worker-1 error={reason}: nothing came for 200ms");
        assert!(line.contains(" WARN ") && line.ends_with(&reason), "{line}");
    }
    pull(&mut idle).unwrap();
}

#[test]
fn a_frame_over_the_limit_is_not_taken() {
    let identity = identity();
    let (server, _) = server(&identity, options());
    let mut worker = worker(&server, &identity, SECRET).unwrap();
    let header = [u64::from(kind::PULL) | ((LIMITS.words_max as u64 + 1) << 32), 0];
    let bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
    worker.write_all(&bytes).and_then(|()| worker.flush()).unwrap();
    assert!(is_closed(&mut worker));
}

#[test]
fn a_dropped_server_cuts_its_connections() {
    let identity = identity();
    let (server, _) = server(&identity, options());
    let mut worker = worker(&server, &identity, SECRET).unwrap();
    drop(server);
    assert!(pull(&mut worker).is_err());
}
