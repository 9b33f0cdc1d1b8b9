//! A server that asks for the job's certificate, over real loopback, and those who have none.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test may fail by panic, and is of today"
)]

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use elasticdl_ps::server::{Options, Server};
use elasticdl_ps::{Model, Partition, Partitions};
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{Initializer, ModelShape, OptimizerSpec, PartitionId, TableShape};
use elasticdl_wire::connection::Who;
use elasticdl_wire::frame::{Frame, Limits};
use elasticdl_wire::ps::{self, PullMode, Status, kind};
use elasticdl_wire::{Error, Identity, Result, Stream, Token};

const SECRET: &str = "0123456789abcdef";
const PATIENCE: Duration = Duration::from_secs(20);
const LIMITS: Limits = Limits { words_max: 1 << 16 };

fn identity() -> Identity {
    Identity::make(SystemTime::now()).unwrap()
}

fn server(identity: &Identity, hello_deadline: Duration) -> (Server, Arc<Partitions>) {
    let parts = vec![RowPart { width: 3, init: Initializer::Uniform { bound: 0.5 } }];
    let shape = ModelShape { tables: vec![TableShape { name: "t".into(), parts }], tensors: vec![] };
    let model = Arc::new(Model::new("test", shape, OptimizerSpec::Sgd { learning_rate: 1.0 }, 7, 1));
    let partitions = Arc::new(Partitions::new(Arc::clone(&model)));
    partitions.open(Partition::new(model, PartitionId(0), 1));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = Options { limits: LIMITS, hello_deadline };
    let token = Token::new(SECRET).unwrap();
    let server = Server::start(listener, token, Some(identity.clone()), Arc::clone(&partitions), options);
    (server.unwrap(), partitions)
}

fn dial(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn shaken(server: &Server, identity: &Identity) -> Result<Stream> {
    let mut stream = Stream::connected(dial(server), Some(identity))?;
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
    let (server, partitions) = server(&identity, PATIENCE);
    worker(&server, &identity, SECRET).unwrap();
    let error = worker(&server, &identity, "fedcba9876543210").unwrap_err();
    assert_eq!(error.to_string(), "refused: wrong token: it is not the one of this job");
    assert_eq!(partitions.gauges().unwrap().pulls, 1);
}

/// Reads to the end. A server that closes may reset the connection of who has not read its last words.
fn is_closed(stream: &mut impl Read) -> bool {
    match stream.read_to_end(&mut Vec::new()) {
        Ok(_) => true,
        Err(e) => !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
}

#[test]
fn strangers_are_closed_and_others_are_served_on() {
    let (ours, theirs) = (identity(), identity());
    let (server, partitions) = server(&ours, PATIENCE);
    let mut bystander = worker(&server, &ours, SECRET).unwrap();

    let error = worker(&server, &theirs, SECRET).unwrap_err();
    assert_eq!(error.to_string(), "TLS handshake failed: the peer's certificate is not of this job");
    let mut frame = Frame::default();
    ps::hello(&mut frame, SECRET, Who::Worker(1));
    let mut plain = dial(&server);
    frame.write(&mut plain).unwrap();
    assert!(is_closed(&mut plain), "a plain hello with the right token");
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
        let mut stranger = dial(&server);
        let _ = stranger.write_all(&bytes);
        let _ = stranger.shutdown(std::net::Shutdown::Write);
        assert!(is_closed(&mut stranger), "round {round}");
    }
    pull(&mut bystander).unwrap();
    assert_eq!(partitions.gauges().unwrap().pulls, 2);
}

/// One byte at a time would keep a deadline away for ever that began anew with each.
fn drips_until_cut(mut tcp: &TcpStream, byte: u8, since: Instant) {
    tcp.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    loop {
        match tcp.read(&mut [0; 64]) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Ok(n) if n > 0 => {}
            _ => break,
        }
        if tcp.write_all(&[byte]).is_err() {
            break;
        }
        assert!(since.elapsed() < PATIENCE, "it is served for ever");
    }
}

#[test]
fn the_deadline_for_hello_holds_for_the_handshake_and_behind_it() {
    let identity = identity();
    let (server, _) = server(&identity, Duration::from_millis(300));
    let since = Instant::now();
    let (mut silent, before) = (dial(&server), dial(&server));
    // The beginning of a record that takes long to come.
    (&before).write_all(&[0x16, 3, 1, 0x20, 0]).unwrap();
    drips_until_cut(&before, 1, since);
    assert!(is_closed(&mut silent));

    let behind = shaken(&server, &identity).unwrap();
    let mut tcp = behind.tcp();
    tcp.write_all(&[0x17, 3, 3, 0x20, 0]).unwrap();
    drips_until_cut(behind.tcp(), 1, Instant::now());

    // Nobody who is through has a deadline any more.
    let mut worker = worker(&server, &identity, SECRET).unwrap();
    let mut late = dial(&server);
    assert!(is_closed(&mut late), "a deadline has passed");
    pull(&mut worker).unwrap();
}

#[test]
fn a_frame_over_the_limit_is_not_taken() {
    let identity = identity();
    let (server, _) = server(&identity, PATIENCE);
    let mut worker = worker(&server, &identity, SECRET).unwrap();
    let header = [u64::from(kind::PULL) | ((LIMITS.words_max as u64 + 1) << 32), 0];
    let bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
    worker.write_all(&bytes).and_then(|()| worker.flush()).unwrap();
    assert!(is_closed(&mut worker));
}

#[test]
fn a_dropped_server_cuts_its_connections() {
    let identity = identity();
    let (server, _) = server(&identity, PATIENCE);
    let mut worker = worker(&server, &identity, SECRET).unwrap();
    drop(server);
    assert!(pull(&mut worker).is_err());
}
