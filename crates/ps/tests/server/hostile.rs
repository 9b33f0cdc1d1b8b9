//! Peers who send what is no frame, or no request: the server closes each of them by itself and says why, to it and in the
//! log; nothing of what is malformed is done, and others are served on.

use std::collections::BTreeMap;
use std::time::SystemTime;

use elasticdl_ps::requests::Requests;
use elasticdl_spec::mix::Rng;
use elasticdl_wire::gate::{self, Ask, Batch, Decision};

use super::*;

/// A life that no partition here has: whatever is asked of it changes nothing.
const OTHER_LIFE: u64 = 0x0123_4567;
const MORE: u64 = 1 << 31;
const KINDS: [u32; 12] = [
    kind::PULL,
    kind::PUSH,
    kind::STAGE,
    kind::COMMIT,
    kind::FENCE,
    kind::COPY,
    kind::HAND_OVER,
    kind::TENSORS,
    kind::FOLLOW,
    kind::NEXT,
    kind::GATE,
    kind::STEP,
];

/// How a connection ends after what was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    /// All was answered.
    Between,
    /// The rest of a frame is due.
    Amid,
    /// With this reason.
    Refused(String),
}

/// What becomes of some bytes.
struct Outcome {
    /// All that is sent back.
    told: Vec<u8>,
    end: End,
    /// Requests that may have changed weights.
    changes: usize,
    /// The kind of the last one.
    last: u32,
}

/// What a server with these partitions makes of the bytes, without a socket.
fn outcome_of(partitions: &Partitions, who: Who, mut bytes: &[u8]) -> Outcome {
    let mut requests = Requests::new(partitions, LIMITS).of(who);
    let (mut request, mut reply) = (Frame::default(), Frame::default());
    let (mut told, mut changes) = (Vec::new(), 0);
    let end = loop {
        match request.read(&mut bytes, LIMITS) {
            Ok(true) => {}
            Ok(false) => break End::Between,
            Err(Error::Truncated { .. }) => break End::Amid,
            Err(error) => break End::Refused(error.chain()),
        }
        let answered = requests.answer_in_parts(&request, &mut reply, &mut |part| part.write_part(&mut told));
        // A refusal of one partition comes after what others have done.
        if !matches!(&answered, Err(elasticdl_ps::Error::Wire(_))) {
            changes += usize::from(matches!(request.kind(), kind::PUSH | kind::COMMIT | kind::STEP));
            // Harm may make it one of a life that is there, and that goes with whoever has taken it over.
            let handed = request.kind() == kind::HAND_OVER && reply.payload().rest().get(1) == Some(&1);
            changes += usize::from(handed);
        }
        match answered {
            Ok(()) => reply.write(&mut told).unwrap(),
            Err(error) => break End::Refused(error.chain()),
        }
    };
    if let End::Refused(reason) = &end {
        ps::refused(&mut reply, request.request(), reason);
        reply.write(&mut told).unwrap();
    }
    Outcome { told, end, changes, last: request.kind() }
}

/// The ids whose rows are looked at.
fn known(place: PartitionId) -> Vec<u64> {
    ids_of(place, 6)
}

/// By partition: its version, the rows that are known, and its tensors.
fn weights(partitions: &Partitions) -> Vec<Option<(u64, Vec<f32>)>> {
    let of = |place| {
        partitions.with(place, |partition| {
            let mut all = vec![0.0; known(place).len() * WIDTH];
            partition.read(0, &known(place), &mut all);
            partition.tensors().iter().for_each(|tensor| all.extend(tensor.values()));
            (partition.version(), all)
        })
    };
    (0..PARTITIONS).map(PartitionId).map(of).collect()
}

/// A request of this kind as a peer may well send it.
fn believable(rng: &mut Rng, request: u32, life: u64, shard: u32, frame: &mut Frame) {
    let number = rng.below(1000);
    let place = PartitionId(rng.below(PARTITIONS.into()) as u32);
    let (part, count) = ((place, life), rng.below(6) as usize);
    let PushHeader { task, batch, lease, .. } = header(shard, 0);
    match request {
        kind::PULL => {
            let mode = PullMode { births: rng.below(2) == 1, tensors: rng.below(2) == 1 };
            ps::begin_pull(frame, number, mode, 2);
            for place in [place, PartitionId(0)] {
                ps::put_part(frame, place, life);
                ps::put_ids(frame, &known(place));
            }
        }
        kind::PUSH | kind::STAGE => {
            let begin = if request == kind::PUSH { ps::begin_push } else { ps::begin_stage };
            begin(frame, number, header(shard, 0), 2);
            for place in [place, PartitionId(1)] {
                let ids = &known(place)[..count];
                ps::put_part(frame, place, life);
                frame.put(0);
                ps::put_ids(frame, ids);
                frame.put_floats(&vec![0.25; ids.len() * WIDTH]);
                model().tensors_of(place).unwrap().iter().for_each(|_| frame.put_floats(&[0.25; 5]));
            }
        }
        kind::COMMIT => ps::commit(frame, number, ps::Commit { task, batch, lease }, &[part]),
        kind::FENCE => ps::fence(frame, number, task, lease, &[part]),
        kind::COPY => ps::copy(frame, number, part, true, 4),
        // These would take partitions away.
        kind::HAND_OVER => ps::hand_over(frame, number, &[(place, OTHER_LIFE)]),
        kind::TENSORS => ps::tensors(frame, number, place, count),
        kind::FOLLOW => ps::follow(frame, number, (place, OTHER_LIFE)),
        kind::NEXT => ps::next(frame, number, 0),
        kind::GATE => gate::ask(frame, number, life, Ask::Look, 0),
        kind::STEP => {
            let decision = Decision { version: 0, batches: vec![Batch { task, batch, lease }] };
            gate::step(frame, number, &decision, &[part]);
        }
        other => unreachable!("{other:#x} is no request"),
    }
}

/// Some requests, sent whole or in parts; also where their headers are.
fn stream(rng: &mut Rng, who: Who, shard: u32) -> (Vec<u64>, Vec<usize>) {
    let (mut bytes, mut headers) = (Vec::new(), Vec::new());
    let (mut frame, mut sent) = (Frame::default(), Frame::default());
    for _ in 0..1 + rng.below(4) {
        // A server might come to follow what it copies, and a partition that has lost a backup waits.
        let life = if who == Who::Server(1) || rng.below(4) == 0 { OTHER_LIFE } else { 1 };
        let any = KINDS[rng.below(KINDS.len() as u64) as usize];
        let request = if rng.below(2) == 0 { kind::PUSH } else { any };
        believable(rng, request, life, shard, &mut frame);
        let words = frame.payload().rest();
        let mut pieces = words.chunks(words.len() / (1 + rng.below(3) as usize) + 1).peekable();
        sent.begin(frame.kind(), frame.request());
        while let Some(piece) = pieces.next() {
            headers.push(bytes.len() / 8);
            sent.put_all(piece);
            let part = if pieces.peek().is_some() { Frame::write_part } else { Frame::write };
            part(&mut sent, &mut bytes).unwrap();
        }
    }
    (words_of(&bytes), headers)
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Does one thing to a stream that may happen on its way.
fn harm(rng: &mut Rng, words: &mut Vec<u64>, headers: &[usize]) {
    let all = words.len();
    if all == 0 {
        return;
    }
    let mut place = || rng.below(all as u64) as usize;
    let (at, other) = (place(), place());
    let header = headers[at % headers.len()] % all;
    let count = (1 + rng.below(8) as usize).min(all - at.max(other));
    match rng.below(7) {
        0 => words[at] ^= 1 << rng.below(64),
        1 => drop(words.drain(at..at + count)),
        2 => drop(words.splice(at..at, [rng.below(4), rng.next_u64()])),
        // What belongs to one frame stands in another.
        3 => words.copy_within(at..at + count, other),
        4 => {
            let less = (words[header] >> 32).saturating_sub(1 + rng.below(4));
            let lengths = [less, less, rng.below(40), LIMITS.words_max as u64 + 1, rng.next_u64() >> 32];
            words[header] = words[header] & 0xffff_ffff | lengths[other % lengths.len()] << 32;
        }
        5 => words[header] = (words[header] >> 32 << 32) | (u64::from(kind::HELLO) + rng.below(0x2A)),
        _ => words[header] ^= MORE,
    }
}

/// Draws a stream that may have come to harm.
fn harmed_stream(rng: &mut Rng, who: Who, shard: u32) -> Vec<u8> {
    let (mut words, headers) = stream(rng, who, shard);
    (0..rng.below(4)).for_each(|_| harm(rng, &mut words, &headers));
    let mut bytes = bytes_of(&words);
    if rng.below(4) == 0 {
        bytes.truncate(bytes.len().saturating_sub(rng.below(40) as usize));
    }
    bytes
}

/// A seed that nobody has tried.
fn fresh_seed() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64
}

/// Sends these bytes to the server and to its twin, and takes what is told. The connection, and how it is to end.
fn send(server: &Server, twin: &Partitions, who: Who, bytes: &[u8], seed: &str) -> (Worker, Outcome) {
    let expected = outcome_of(twin, who, bytes);
    let mut worker = Worker::over(dial(server, None), SECRET, who).unwrap();
    // The server may close before it has seen them all.
    let _ = worker.stream.write_all(bytes);
    let mut told = vec![0; expected.told.len()];
    let read = worker.stream.read_exact(&mut told);
    assert!(read.is_ok() && told == expected.told, "{seed}: {read:?}, {:?}", expected.end);
    (worker, expected)
}

/// Goal: requests of all kinds, in one frame or several parts, harmed on their way, do over a socket what they do without
/// one. The server closes by itself whoever sends what is malformed, tells why, and serves the next one.
#[test]
fn harmed_requests_close_their_own_connection_and_change_nothing() {
    log::keep();
    let options = Options { stall_deadline: Duration::from_millis(300), ..options() };
    let ((server, live), twin) = (server_with(options), partitions());
    for place in [PartitionId(0), PartitionId(1)] {
        let bear = |partition: &mut Partition| partition.pull(0, &known(place), &mut [0.0; 6 * WIDTH]);
        for partitions in [&live, &twin] {
            partitions.with(place, bear).unwrap().unwrap();
        }
    }
    let (mut met, mut unfinished, first) = (BTreeMap::<&str, usize>::new(), Vec::new(), fresh_seed());
    for round in 0..400 {
        let (mut rng, seed) = (Rng::new(first + round), format!("seed {}", first + round));
        let who = if rng.below(4) == 0 { Who::Server(1) } else { Who::Worker(1) };
        let bytes = harmed_stream(&mut rng, who, round as u32);
        let before = weights(&live);
        let (mut worker, Outcome { end, changes, last, .. }) = send(&server, &twin, who, &bytes, &seed);
        let peer = worker.stream.local_addr().unwrap();
        *met.entry(kind_of(&end, last)).or_default() += 1;
        match end {
            End::Between => {
                drop(worker);
                let line = log::end_of(peer);
                assert!(line.contains("DEBUG") && line.contains(": connection closed"), "{seed}: {line}");
            }
            End::Amid => unfinished.push((worker, seed.clone())),
            End::Refused(reason) => {
                // Nothing on our side has ended.
                assert!(is_closed(&mut worker.stream), "{seed}: {reason}");
                drop(worker);
                let line = log::end_of(peer);
                let told = format!("connection closed for a reason peer={peer} who={who} error={reason}");
                assert!(line.contains(" WARN ") && line.ends_with(&told), "{seed}: {line}");
            }
        }
        assert!(changes > 0 || weights(&live) == before, "{seed}: rows have changed");
        let mut pull = Frame::default();
        believable(&mut rng, kind::PULL, 1, 0, &mut pull);
        let mut bytes = Vec::new();
        pull.write(&mut bytes).unwrap();
        assert_eq!(send(&server, &twin, Who::Worker(2), &bytes, &seed).1.end, End::Between);
    }
    for (mut worker, seed) in unfinished {
        let peer = worker.stream.local_addr().unwrap();
        assert!(is_closed(&mut worker.stream), "{seed}");
        let line = log::end_of(peer);
        let reason = line.contains("error=a frame broke off: ") && line.ends_with("nothing came for 300ms");
        assert!(line.contains(" WARN ") && reason, "{seed}: {line}");
    }
    assert_eq!(weights(&live), weights(&twin), "first seed {first}");
    assert!(met.len() == 5 && met.values().all(|times| *times >= 10), "{met:?}");
}

fn kind_of(end: &End, last: u32) -> &'static str {
    let of_frames = ["bytes announced", "parts of two frames", "without anything in it"];
    match end {
        End::Between => "all answered",
        End::Amid => "truncated",
        End::Refused(reason) if of_frames.iter().any(|of| reason.contains(of)) => "no frame",
        End::Refused(_) if last == kind::PUSH => "no push",
        End::Refused(_) => "no request",
    }
}

/// Goal: who has not said hello is closed as well, at once or when the deadline has passed, and is served nothing.
#[test]
fn harmed_hellos_are_closed() {
    log::keep();
    let (server, partitions) =
        server_with(Options { hello_deadline: Duration::from_millis(300), ..options() });
    let (first, mut strangers) = (fresh_seed(), Vec::new());
    for round in 0..60 {
        let mut rng = Rng::new(first + round);
        let mut hello = Frame::default();
        ps::hello(&mut hello, SECRET, Who::Worker(1));
        let mut bytes = Vec::new();
        hello.write(&mut bytes).unwrap();
        let mut words = words_of(&bytes);
        (0..1 + rng.below(3)).for_each(|_| harm(&mut rng, &mut words, &[0]));
        let bytes = bytes_of(&words);
        if !is_hello(&bytes) {
            let mut stranger = dial(&server, None);
            let _ = stranger.write_all(&bytes);
            strangers.push((stranger, first + round));
        }
    }
    assert!(strangers.len() > 30);
    for (mut stranger, seed) in strangers {
        let peer = stranger.local_addr().unwrap();
        assert!(is_closed(&mut stranger), "seed {seed}");
        drop(stranger);
        let line = log::end_of(peer);
        assert!(line.contains(" WARN ") && !line.contains("who="), "seed {seed}: {line}");
    }
    Worker::connect(&server).pull((PartitionId(0), 1), &known(PartitionId(0)), BIRTHS).unwrap();
    assert_eq!(partitions.gauges().unwrap().pulls, 1);
}

/// Whether these bytes begin with a hello that holds.
fn is_hello(mut bytes: &[u8]) -> bool {
    let mut frame = Frame::default();
    let read = frame.read(&mut bytes, LIMITS).is_ok_and(|read| read) && frame.kind() == kind::HELLO;
    let mut payload = frame.payload();
    let token = payload.take_bytes().is_ok_and(|token| token == SECRET.as_bytes());
    read && token && payload.take().is_ok_and(|who| Who::from_word(who).is_ok()) && payload.end().is_ok()
}

/// A part's header and so many words behind it.
pub(super) fn part(kind: u64, announced: usize, words: usize) -> Vec<u8> {
    bytes_of(&[&[kind | (announced as u64) << 32, 7], &vec![0; words][..]].concat())
}

#[test]
fn a_frame_over_the_limit_is_refused_though_it_comes_in_parts() {
    let (server, _) = server();
    let (pull, half) = (u64::from(kind::PULL), LIMITS.words_max / 2);
    let whole = part(pull, LIMITS.words_max + 1, 0);
    let parts = [part(pull | MORE, half, half), part(pull, half + 1, 0)].concat();
    for bytes in [whole, parts] {
        let mut worker = Worker::connect(&server);
        worker.stream.write_all(&bytes).unwrap();
        assert!(worker.frame.read(&mut worker.stream, LIMITS).unwrap());
        let error = ps::expect(&worker.frame, kind::PULLED, 7).unwrap_err().to_string();
        assert_eq!(error, "refused: malformed frame: 524296 bytes announced, 524288 is the limit");
        assert!(is_closed(&mut worker.stream));
    }
}

/// What happens to a connection, and what is said of its end.
struct Case {
    /// Sent after a hello; or in its place.
    bytes: Vec<u8>,
    greets: bool,
    /// Whether the connection is reset, as that of a killed process may be, or closed.
    resets: bool,
    expected: &'static str,
}

/// Goal: what a peer leaves half done is a warning with its name and how far it came; that it leaves is none.
#[test]
fn a_connection_that_ends_in_the_middle_of_a_frame_is_a_warning_and_others_are_not() {
    log::keep();
    let (server, _) = server();
    let push = u64::from(kind::PUSH);
    let case = |bytes: Vec<u8>, resets, expected| Case { bytes, greets: true, resets, expected };
    let cases = [
        case(vec![], false, "DEBUG connection closed PEER who=worker-1"),
        case(
            vec![],
            true,
            "DEBUG connection lost PEER who=worker-1 attempt=waiting for a frame error=Connection",
        ),
        case(
            vec![1; 5],
            false,
            "WARN a frame broke off: 5 of 16 bytes of its header had come: unexpected end",
        ),
        case(
            vec![1; 5],
            true,
            "WARN a frame broke off: 5 of 16 bytes of its header had come: Connection reset",
        ),
        case(
            part(push, 100, 9),
            false,
            "WARN a frame broke off: 72 of 800 bytes of 0xed06, request 7, had come: unex",
        ),
        case(
            [part(push | MORE, 2, 2), part(push | MORE, 3, 1)].concat(),
            false,
            "WARN a frame broke off: 24 of 40 bytes of 0xed06, request 7, had come: unexpected end",
        ),
        case(
            [part(push | MORE, 2, 2), vec![6; 3]].concat(),
            false,
            "WARN a frame broke off: 3 of 16 bytes of the next header of 0xed06, request 7, had come: unexpected end",
        ),
        case(part(0x77, 0, 0), false, "WARN malformed frame: 0x77 is no request"),
        case(
            part(push, 1 << 17, 0),
            false,
            "WARN malformed frame: 1048576 bytes announced, 524288 is the limit",
        ),
        Case {
            greets: false,
            ..case(part(kind::HELLO.into(), 4, 3), false, "WARN a frame broke off: 24 of 32 bytes of 0xed01")
        },
        Case { greets: false, ..case(vec![], false, "DEBUG connection lost PEER attempt=waiting for HELLO") },
    ];
    for Case { bytes, greets, resets, expected } in cases {
        let mut stream = dial(&server, None);
        if greets {
            stream = Worker::over(stream, SECRET, Who::Worker(1)).unwrap().stream;
        }
        let peer = stream.local_addr().unwrap();
        stream.write_all(&bytes).unwrap();
        if resets {
            sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
        }
        drop(stream);
        let line = log::end_of(peer);
        let who = if greets { " who=worker-1" } else { "" };
        let expected = match expected.split_once(' ').unwrap() {
            ("WARN", reason) => {
                format!(
                    " WARN elasticdl_ps::server: connection closed for a reason peer={peer}{who} error={reason}"
                )
            }
            (_, rest) => {
                format!("DEBUG elasticdl_ps::server: {}", rest.replace("PEER", &format!("peer={peer}")))
            }
        };
        assert!(line.contains(&expected), "{line}, and not {expected}");
    }
}
