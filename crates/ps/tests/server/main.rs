//! A server over real loopback, spoken to in frames as a worker does. The modules: peers who send what is no frame, who
//! stand still, and who have no certificate.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test may fail by panic, and has a deadline, in its helpers too"
)]

mod hostile;
mod log;
mod stalled;
mod tls;

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use elasticdl_ps::checkpoint::{Layer, Order};
use elasticdl_ps::server::{Options, Server};
use elasticdl_ps::{Model, Partition, Partitions};
use elasticdl_spec::placement::partition_of_row;
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{
    Initializer, LeaseId, ModelShape, OptimizerSpec, PartitionId, TableShape, TaskId, TensorShape,
};
use elasticdl_wire::connection::Who;
use elasticdl_wire::frame::{Frame, Limits};
use elasticdl_wire::ps::{self, Answer, PullMode, PushHeader, Status, kind};
use elasticdl_wire::{Error, Result, Token};
use rustix::net::{self, AddressFamily, SocketType, sockopt};

const SECRET: &str = "0123456789abcdef";
const PARTITIONS: u32 = 3;
/// The partition that the server of these tests does not hold.
const ELSEWHERE: PartitionId = PartitionId(2);
const WIDTH: usize = 3;
const BIRTHS: PullMode = PullMode { births: true, tensors: true };
const LIMITS: Limits = Limits { words_max: 1 << 16 };
/// How long a test waits for what is to happen at once.
const PATIENCE: Duration = Duration::from_secs(20);

fn table() -> TableShape {
    let init = Initializer::Uniform { bound: 0.5 };
    TableShape { name: "t".into(), parts: vec![RowPart { width: WIDTH, init }] }
}

fn model() -> Arc<Model> {
    let tensor = |name: &str| TensorShape { name: name.into(), shape: vec![5], init: Initializer::Zeros };
    let shape = ModelShape { tables: vec![table()], tensors: ["a", "b", "c", "d"].map(tensor).into() };
    Arc::new(Model::new("test", shape, OptimizerSpec::Sgd { learning_rate: 1.0 }, 7, PARTITIONS))
}

fn partitions() -> Arc<Partitions> {
    let partitions = Arc::new(Partitions::new(model()));
    for id in (0..PARTITIONS).map(PartitionId).filter(|id| *id != ELSEWHERE) {
        partitions.open(Partition::new(model(), id, 1));
    }
    partitions
}

fn options() -> Options {
    Options { limits: LIMITS, ..Options::default() }
}

fn server() -> (Server, Arc<Partitions>) {
    server_with(options())
}

fn server_with(options: Options) -> (Server, Arc<Partitions>) {
    let partitions = partitions();
    (server_of(&partitions, options), partitions)
}

fn server_of(partitions: &Arc<Partitions>, options: Options) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let token = Token::new(SECRET).unwrap();
    Server::start(listener, token, None, Arc::clone(partitions), options).unwrap()
}

/// A connection of an address that no other one of these tests has, so that the log tells them apart. About so many bytes
/// are on their way in each direction at most, where that is not left to the system.
fn dial(server: &Server, room: Option<usize>) -> TcpStream {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let [high, low] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::new(127, 1, high, low), 0)).unwrap();
    if let Some(room) = room {
        sockopt::set_socket_recv_buffer_size(&socket, room).unwrap();
        sockopt::set_socket_send_buffer_size(&socket, room).unwrap();
    }
    net::connect(&socket, &server.address()).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Reads to the end. A server that closes may reset the connection of who has not read its last words.
fn is_closed(stream: &mut impl Read) -> bool {
    match stream.read_to_end(&mut Vec::new()) {
        Ok(_) => true,
        Err(e) => !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
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

fn ids_of(partition: PartitionId, count: usize) -> Vec<u64> {
    (0..).filter(|id| partition_of_row(*id, PARTITIONS) == partition).take(count).collect()
}

fn born(id: u64) -> Vec<f32> {
    let mut row = vec![0.0; WIDTH];
    table().init_row(7, id, &mut row);
    row
}

/// A connection that has said hello.
struct Worker {
    stream: TcpStream,
    frame: Frame,
    requests: u64,
}

impl Worker {
    fn connect(server: &Server) -> Self {
        Worker::with_token(server, SECRET).unwrap()
    }

    fn with_token(server: &Server, token: &str) -> Result<Self> {
        Worker::over(dial(server, None), token, Who::Worker(1))
    }

    fn over(stream: TcpStream, token: &str, who: Who) -> Result<Self> {
        let mut worker = Worker { stream, frame: Frame::default(), requests: 0 };
        ps::hello(&mut worker.frame, token, who);
        worker.exchange(kind::WELCOME)?;
        Ok(worker)
    }

    fn exchange(&mut self, due: u32) -> Result<()> {
        self.frame.write(&mut self.stream).map_err(|e| Error::io("sending", e))?;
        let request = self.frame.request();
        if !self.frame.read(&mut self.stream, Limits::default())? {
            return Err(Error::Malformed("closed".into()));
        }
        ps::expect(&self.frame, due, request)
    }

    fn next(&mut self) -> u64 {
        self.requests += 1;
        self.requests
    }

    /// Pulls ids from one partition: status, rows and tensors.
    fn pull(
        &mut self,
        part: (PartitionId, u64),
        ids: &[u64],
        mode: PullMode,
    ) -> Result<(Status, Vec<f32>, Vec<f32>)> {
        let request = self.next();
        ps::begin_pull(&mut self.frame, request, mode, 1);
        ps::put_part(&mut self.frame, part.0, part.1);
        ps::put_ids(&mut self.frame, ids);
        self.exchange(kind::PULLED)?;
        let mut payload = self.frame.payload();
        assert_eq!(payload.take()?, 1);
        assert_eq!(ps::take_partition(&mut payload)?, part.0);
        let status = Status::from_word(payload.take()?)?;
        let _version = payload.take()?;
        let (mut rows, mut tensors) = (Vec::new(), Vec::new());
        if status == Status::Ok {
            rows.extend_from_slice(payload.take_floats(ids.len() * WIDTH)?);
            for _ in model().tensors_of(part.0).unwrap().iter().filter(|_| mode.tensors) {
                tensors.extend_from_slice(payload.take_floats(5)?);
            }
        }
        payload.end()?;
        Ok((status, rows, tensors))
    }

    /// Pushes the same value everywhere to one partition.
    fn push(
        &mut self,
        part: (PartitionId, u64),
        header: PushHeader,
        ids: &[u64],
        value: f32,
    ) -> Result<Answer> {
        let request = self.next();
        ps::begin_push(&mut self.frame, request, header, 1);
        ps::put_part(&mut self.frame, part.0, part.1);
        self.frame.put(0);
        ps::put_ids(&mut self.frame, ids);
        self.frame.put_floats(&vec![value; ids.len() * WIDTH]);
        for _ in model().tensors_of(part.0).unwrap() {
            self.frame.put_floats(&[value; 5]);
        }
        self.exchange(kind::PUSHED)?;
        Ok(ps::take_answers(self.frame.payload())?[0])
    }
}

fn header(shard: u32, batch: u64) -> PushHeader {
    PushHeader {
        task: TaskId::train(0, shard),
        batch,
        lease: LeaseId { term: 1, n: 1 },
        records: 8,
        factor: 1.0,
    }
}

#[test]
fn a_wrong_token_is_refused_and_nothing_is_served() {
    let (server, partitions) = server();
    for token in ["fedcba9876543210", "", "0123456789abcde"] {
        let error = Worker::with_token(&server, token).err().expect("refused");
        assert_eq!(error.to_string(), "refused: wrong token: it is not the one of this job");
    }
    // A request without a hello is refused as well.
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let mut frame = Frame::default();
    ps::begin_pull(&mut frame, 1, BIRTHS, 0);
    frame.write(&mut stream).unwrap();
    assert!(frame.read(&mut stream, LIMITS).unwrap());
    assert_eq!(frame.kind(), kind::REFUSED);
    assert!(!frame.read(&mut stream, LIMITS).unwrap(), "the server closes after a refusal");
    assert_eq!(partitions.gauges().unwrap().pulls, 0);
}

#[test]
fn who_does_not_say_hello_in_time_is_cut_off_however_it_drips() {
    let (server, _) = server_with(Options { hello_deadline: Duration::from_millis(200), ..options() });
    let mut silent = dial(&server, None);
    drips_until_cut(&dial(&server, None), 0, Instant::now());
    assert!(is_closed(&mut silent));
    Worker::connect(&server);
}

#[test]
fn pushed_gradients_show_in_the_next_pull() {
    let (server, partitions) = server();
    let mut worker = Worker::connect(&server);
    let part = (PartitionId(1), 1);
    let ids = ids_of(part.0, 5);
    let (status, rows, tensors) = worker.pull(part, &ids, BIRTHS).unwrap();
    assert_eq!(status, Status::Ok);
    assert_eq!(rows, ids.iter().flat_map(|id| born(*id)).collect::<Vec<_>>());
    assert!(!tensors.is_empty() && tensors.iter().all(|x| *x == 0.0), "{tensors:?}");

    let answer = worker.push(part, header(0, 0), &ids, 0.5).unwrap();
    let expected = Answer { partition: part.0, status: Status::Ok, mark: 1, version: 1 };
    assert_eq!(answer, expected);
    let again = worker.push(part, header(0, 0), &ids, 0.5).unwrap();
    assert_eq!(again, Answer { status: Status::Duplicate, ..expected });
    let (_, moved, tensors) = worker.pull(part, &ids, BIRTHS).unwrap();
    assert_eq!(moved, rows.iter().map(|w| w - 0.5).collect::<Vec<_>>());
    assert!(tensors.iter().all(|x| *x == -0.5), "{tensors:?}");
    let gauges = partitions.gauges().unwrap();
    assert_eq!((gauges.rows, gauges.version, gauges.pulls, gauges.pushes), (5, 1, 2, 2));
}

#[test]
fn evaluation_bears_no_rows() {
    let (server, partitions) = server();
    let part = (PartitionId(0), 1);
    let mode = PullMode { births: false, tensors: false };
    let (status, rows, tensors) = Worker::connect(&server).pull(part, &ids_of(part.0, 4), mode).unwrap();
    assert_eq!((status, rows, tensors), (Status::Ok, vec![0.0; 4 * WIDTH], vec![]));
    assert_eq!(partitions.gauges().unwrap().rows, 0);
}

#[test]
fn partitions_elsewhere_and_of_another_life_are_told_apart() {
    let (server, _) = server();
    let mut worker = Worker::connect(&server);
    let (here, old) = (PartitionId(0), 99);
    for (part, expected) in [((ELSEWHERE, 1), Status::NotHere), ((here, old), Status::WrongIncarnation)] {
        let ids = ids_of(part.0, 2);
        assert_eq!(worker.pull(part, &ids, BIRTHS).unwrap().0, expected);
        assert_eq!(worker.push(part, header(0, 0), &ids, 1.0).unwrap().status, expected);
    }
    let task = TaskId::train(0, 0);
    let parts = [(here, 1), (here, old), (ELSEWHERE, 1)];
    ps::fence(&mut worker.frame, 77, task, LeaseId { term: 1, n: 4 }, &parts);
    worker.exchange(kind::FENCED).unwrap();
    let answers = ps::take_answers(worker.frame.payload()).unwrap();
    let statuses: Vec<_> = answers.iter().map(|a| (a.partition, a.status, a.mark)).collect();
    let expected =
        [(here, Status::Ok, 0), (here, Status::WrongIncarnation, 0), (ELSEWHERE, Status::NotHere, 0)];
    assert_eq!(statuses, expected);
    assert_eq!(worker.push((here, 1), header(0, 0), &[], 1.0).unwrap().status, Status::Fenced);
}

#[test]
fn several_requests_may_be_under_way_and_are_answered_in_order() {
    let (server, _) = server();
    let mut worker = Worker::connect(&server);
    let part = PartitionId(0);
    let ids = ids_of(part, 100);
    for request in 0..50 {
        ps::begin_pull(&mut worker.frame, request, PullMode { births: true, tensors: false }, 1);
        ps::put_part(&mut worker.frame, part, 1);
        ps::put_ids(&mut worker.frame, &ids[request as usize..][..1]);
        worker.frame.write(&mut worker.stream).unwrap();
    }
    for request in 0..50 {
        assert!(worker.frame.read(&mut worker.stream, LIMITS).unwrap());
        ps::expect(&worker.frame, kind::PULLED, request).unwrap();
        let mut payload = worker.frame.payload();
        payload.take_all(4).unwrap();
        assert_eq!(payload.take_floats(WIDTH).unwrap(), born(ids[request as usize]));
    }
}

/// Asks for many rows of one partition, which go out before the rest of the answer is made, and for this id of another.
fn ask_for_much(worker: &mut Worker, other: u64) -> Result<Vec<u64>> {
    let (first, second, request) = (PartitionId(0), PartitionId(1), worker.next());
    let many = ids_of(first, 9000);
    ps::begin_pull(&mut worker.frame, request, PullMode { births: true, tensors: false }, 2);
    for (place, ids) in [(first, &many[..]), (second, &[other])] {
        ps::put_part(&mut worker.frame, place, 1);
        ps::put_ids(&mut worker.frame, ids);
    }
    worker.exchange(kind::PULLED)?;
    Ok(many)
}

#[test]
fn a_long_answer_comes_whole_and_one_that_fails_in_the_middle_is_a_refusal() {
    let (server, _) = server();
    let mut worker = Worker::connect(&server);
    let other = ids_of(PartitionId(1), 1)[0];
    let many = ask_for_much(&mut worker, other).unwrap();
    let mut payload = worker.frame.payload();
    assert_eq!(payload.take_all(4).unwrap(), [2, 0, Status::Ok.word(), 0]);
    let rows: Vec<f32> = many.iter().flat_map(|id| born(*id)).collect();
    assert!(payload.take_floats(rows.len()).unwrap() == rows);
    assert_eq!(payload.take_all(3).unwrap(), [1, Status::Ok.word(), 0]);
    assert_eq!(payload.take_floats(WIDTH).unwrap(), born(other));
    payload.end().unwrap();

    let error = ask_for_much(&mut worker, many[0]).unwrap_err().to_string();
    assert!(error.starts_with("refused: ") && error.contains("partition-0"), "{error}");
}

#[test]
fn gradients_that_are_not_finite_are_refused_with_the_reason() {
    let (server, _) = server();
    let mut worker = Worker::connect(&server);
    let part = (PartitionId(1), 1);
    let error = worker.push(part, header(3, 0), &ids_of(part.0, 1), f32::NAN).unwrap_err();
    let expected =
        "refused: push of train/0/3 batch 0 to partition-1: the gradient of table \"t\" is not finite";
    assert_eq!(error.to_string(), expected);
    // The mark has not moved: a sane push of the same batch is applied.
    let answer = Worker::connect(&server).push(part, header(3, 0), &[], 0.0).unwrap();
    assert_eq!((answer.status, answer.mark), (Status::Ok, 1));
}

#[test]
fn malformed_requests_name_their_fault() {
    let (server, partitions) = server();
    let refused = |fill: &dyn Fn(&mut Frame), expected: &str| {
        let mut worker = Worker::connect(&server);
        fill(&mut worker.frame);
        let error = worker.exchange(kind::PULLED).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(&|f| f.begin(0x1234, 9), "0x1234 is no request");
    refused(&|f| ps::begin_pull(f, 1, BIRTHS, 7), "7 items announced");
    refused(
        &|f| {
            ps::begin_pull(f, 1, BIRTHS, 1);
            ps::put_part(f, PartitionId(9), 1);
            ps::put_ids(f, &[]);
        },
        "request to partition-9 does not fit: the model has 3 partitions",
    );
    refused(
        &|f| {
            ps::begin_pull(f, 1, BIRTHS, 1);
            ps::put_part(f, PartitionId(0), 1);
            ps::put_ids(f, &ids_of(PartitionId(1), 1));
        },
        "lives in partition-1",
    );
    refused(
        &|f| {
            ps::begin_pull(f, 1, BIRTHS, 1);
            ps::put_part(f, PartitionId(0), 1);
            ps::put_ids(f, &vec![0; LIMITS.words_max - 100]);
        },
        "bytes, 524288 is the limit",
    );
    // The second partition's part is cut short: the first one's must not be applied either.
    refused(
        &|f| {
            ps::begin_push(f, 1, header(0, 0), 2);
            ps::put_part(f, PartitionId(0), 1);
            f.put(0);
            ps::put_ids(f, &[]);
            model().tensors_of(PartitionId(0)).unwrap().iter().for_each(|_| f.put_floats(&[1.0; 5]));
            ps::put_part(f, PartitionId(1), 1);
            f.put(0);
        },
        "malformed frame",
    );
    assert_eq!(partitions.gauges().unwrap().version, 0);
}

/// Defect 6 of the original: racing first reads made a row twice and lost an update.
#[test]
fn racing_workers_bear_each_row_once_and_lose_no_update() {
    let (server, partitions) = server();
    let part = (PartitionId(0), 1);
    let ids = ids_of(part.0, 200);
    let (workers, batches) = (4u32, 25u64);
    std::thread::scope(|scope| {
        for shard in 0..workers {
            let (server, ids) = (&server, &ids);
            scope.spawn(move || {
                let mut worker = Worker::connect(server);
                for batch in 0..batches {
                    worker.pull(part, ids, BIRTHS).unwrap();
                    let answer = worker.push(part, header(shard, batch), ids, -1.0).unwrap();
                    assert_eq!((answer.status, answer.mark), (Status::Ok, batch + 1));
                }
            });
        }
    });
    assert_eq!(partitions.gauges().unwrap().rows, 200);
    let pushes = f32::from(workers as u16) * batches as f32;
    let (_, rows, tensors) = Worker::connect(&server).pull(part, &ids, BIRTHS).unwrap();
    for (row, id) in rows.chunks(WIDTH).zip(&ids) {
        for (got, born) in row.iter().zip(born(*id)) {
            assert!((got - born - pushes).abs() < 1e-3, "{id}: {got} from {born}");
        }
    }
    assert!(tensors.iter().all(|x| *x == pushes), "{tensors:?}");
}

#[test]
fn a_checkpoint_while_workers_push_is_cut_between_two_pushes() {
    let (server, partitions) = server();
    let dir = tempfile::tempdir().unwrap();
    let part = (PartitionId(0), 1);
    let ids = ids_of(part.0, 300);
    std::thread::scope(|scope| {
        let (server, ids) = (&server, &ids);
        let pushing = scope.spawn(move || {
            let mut worker = Worker::connect(server);
            for batch in 0..200 {
                worker.push(part, header(0, batch), ids, -1.0).unwrap();
            }
        });
        while !pushing.is_finished() {
            let order = Order { checkpoint: 1, base: None, is_basis: false };
            let written = partitions.write_checkpoint(dir.path(), order).unwrap();
            let sum = written.iter().find(|w| w.partition == part.0).unwrap().sum;
            let chain = [Layer { checkpoint: 1, dir: dir.path().into(), sum }];
            let cut = elasticdl_ps::checkpoint::restore(&model(), part.0, 2, &chain).unwrap();
            let applied = cut.version() as f32;
            let mut rows = vec![0.0; ids.len() * WIDTH];
            cut.read(0, ids, &mut rows);
            for (got, born) in rows.iter().zip(ids.iter().flat_map(|id| born(*id))) {
                assert!(applied == 0.0 || (got - born - applied).abs() < 1e-3, "{got} {born} {applied}");
            }
            assert!(cut.tensors().iter().all(|t| t.values().iter().all(|x| *x == applied)));
        }
    });
}

#[test]
fn a_dropped_server_cuts_its_connections() {
    let (server, _) = server();
    let mut worker = Worker::connect(&server);
    let address = server.address();
    drop(server);
    assert!(worker.pull((PartitionId(0), 1), &[], BIRTHS).is_err());
    assert!(TcpStream::connect(address).is_err(), "nobody listens any more");
}
