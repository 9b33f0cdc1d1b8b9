//! A server's whole life against a scripted master: real calls, real sockets, real files.

#![allow(clippy::unwrap_used, reason = "a test may fail by panic, in its helpers too")]

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use elasticdl_ps::{Config, Error, run};
use elasticdl_spec::placement::partition_of_row;
use elasticdl_spec::resolve::{Inputs, resolve};
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{
    Initializer, Kind, LeaseId, ModelShape, PartitionId, Plan, ServerId, TableShape, TaskId,
};
use elasticdl_wire::Token;
use elasticdl_wire::connection::Who;
use elasticdl_wire::control::beat_reply::What;
use elasticdl_wire::control::master_server::{Master, MasterServer};
use elasticdl_wire::control::*;
use elasticdl_wire::frame::{Frame, Limits};
use elasticdl_wire::ps::{self, PullMode, PushHeader, kind};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

const SECRET: &str = "0123456789abcdef";
const PARTITIONS: u32 = 4;
const DEADLINE: Duration = Duration::from_secs(30);

/// What the master is to say, and what it was told.
#[derive(Default)]
struct Script {
    /// Assigned partitions with their files, if any.
    assignments: Vec<Assignment>,
    restore_from: String,
    /// Commands by number, given until they are seen.
    orders: BTreeMap<u64, What>,
    /// Whether the server has joined this life of the master.
    joined: bool,
    joins: Vec<JoinRequest>,
    readies: Vec<ReadyRequest>,
    beats: Vec<BeatRequest>,
    written: Vec<CheckpointWrittenRequest>,
    copied: Vec<CopiedRequest>,
    alone: Vec<AloneRequest>,
    /// What those hear that have lost a backup; `None`: nothing yet.
    lets_alone: Option<bool>,
    /// What is said to those that have copied partitions, one after the other.
    words: VecDeque<copied_reply::What>,
}

#[derive(Clone)]
struct Scripted {
    plan: String,
    script: Arc<Mutex<Script>>,
    changed: Arc<watch::Sender<()>>,
}

impl Scripted {
    fn new(orphan: &str) -> Self {
        let assignment = |partition| Assignment { partition, incarnation: 1, ..Assignment::default() };
        let script = Script { assignments: (0..2).map(assignment).collect(), ..Script::default() };
        Scripted {
            plan: serde_json::to_string(&plan(orphan)).unwrap(),
            script: Arc::new(Mutex::new(script)),
            changed: Arc::new(watch::channel(()).0),
        }
    }

    fn edit<T>(&self, edit: impl FnOnce(&mut Script) -> T) -> T {
        let result = edit(&mut self.script.lock().unwrap());
        self.changed.send_replace(());
        result
    }

    /// Waits until the script says so.
    async fn until<T>(&self, what: &str, mut seen: impl FnMut(&Script) -> Option<T>) -> T {
        let mut changes = self.changed.subscribe();
        let waiting = async {
            loop {
                if let Some(result) = seen(&self.script.lock().unwrap()) {
                    return result;
                }
                changes.changed().await.unwrap();
            }
        };
        tokio::time::timeout(DEADLINE, waiting).await.unwrap_or_else(|_| panic!("waited for {what}"))
    }

    /// Serves on `address` in a runtime of its own, so that dropping it cuts every connection.
    fn start(&self, address: SocketAddr) -> Life {
        let listener = std::net::TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let service = MasterServer::new(self.clone());
        runtime.spawn(async move {
            let incoming = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(incoming)
                .await
                .unwrap();
        });
        Life { address, runtime: Some(runtime) }
    }
}

/// One life of the master.
struct Life {
    address: SocketAddr,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Life {
    fn drop(&mut self) {
        self.runtime.take().expect("dropped once").shutdown_background();
    }
}

fn authorized<T>(request: Request<T>) -> Result<T, Status> {
    let header = request.metadata().get("authorization").map(|v| v.as_bytes().to_vec());
    match Token::new(SECRET).unwrap().matches_header(header.as_deref()) {
        true => Ok(request.into_inner()),
        false => Err(Status::unauthenticated("the token is not the one of this job")),
    }
}

#[tonic::async_trait]
impl Master for Scripted {
    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        let request = authorized(request)?;
        Ok(Response::new(self.edit(|script| {
            script.joined = true;
            script.joins.push(request);
            JoinReply {
                plan: self.plan.clone(),
                partitions: script.assignments.clone(),
                restore_from: script.restore_from.clone(),
                term: 1,
            }
        })))
    }

    async fn ready(&self, request: Request<ReadyRequest>) -> Result<Response<ReadyReply>, Status> {
        let request = authorized(request)?;
        self.edit(|script| script.readies.push(request));
        Ok(Response::new(ReadyReply::default()))
    }

    async fn beat(&self, request: Request<BeatRequest>) -> Result<Response<BeatReply>, Status> {
        let request = authorized(request)?;
        let seen = request.command_seen;
        let order = self.edit(|script| {
            script.beats.push(request);
            let next = script.orders.range(seen + 1..).next();
            script.joined.then(|| next.map(|(command, what)| (*command, what.clone())))
        });
        match order {
            None => Err(Status::failed_precondition("join first")),
            Some(None) => {
                tokio::time::sleep(Duration::from_millis(20)).await;
                Ok(Response::new(BeatReply::default()))
            }
            Some(Some((command, what))) => Ok(Response::new(BeatReply { command, what: Some(what) })),
        }
    }

    async fn checkpoint_written(
        &self,
        request: Request<CheckpointWrittenRequest>,
    ) -> Result<Response<CheckpointWrittenReply>, Status> {
        let request = authorized(request)?;
        self.edit(|script| script.written.push(request));
        Ok(Response::new(CheckpointWrittenReply::default()))
    }

    async fn alone(&self, request: Request<AloneRequest>) -> Result<Response<AloneReply>, Status> {
        let request = authorized(request)?;
        let alone = self.edit(|script| {
            script.alone.push(request);
            script.lets_alone
        });
        match alone {
            Some(alone) => Ok(Response::new(AloneReply { alone })),
            None => Err(Status::unavailable("not now")),
        }
    }

    async fn copied(&self, request: Request<CopiedRequest>) -> Result<Response<CopiedReply>, Status> {
        let request = authorized(request)?;
        let what = self.edit(|script| {
            script.copied.push(request);
            script.words.pop_front()
        });
        Ok(Response::new(CopiedReply { what: what.or(Some(copied_reply::What::Forget(true))) }))
    }

    async fn topology(&self, _: Request<TopologyRequest>) -> Result<Response<TopologyReply>, Status> {
        Err(Status::unimplemented("for workers"))
    }

    async fn lease(&self, _: Request<LeaseRequest>) -> Result<Response<LeaseReply>, Status> {
        Err(Status::unimplemented("for workers"))
    }

    async fn report(&self, _: Request<ReportRequest>) -> Result<Response<ReportReply>, Status> {
        Err(Status::unimplemented("for workers"))
    }
}

fn plan(orphan: &str) -> Plan {
    let flag = |path: &str, value: &str| (path.to_string(), value.to_string());
    let flags = vec![
        flag("name", "test"),
        flag("model.zoo", "lr"),
        flag("data.train", "nowhere.csv"),
        flag("data.layout", "criteo"),
        flag("train.seed", "7"),
        flag("servers.partitions", &PARTITIONS.to_string()),
        flag("servers.count", "2"),
        flag("limits.orphan", orphan),
    ];
    let job = resolve(&Inputs { flags, ..Inputs::default() }).unwrap_or_else(|e| panic!("{e:?}")).job;
    let parts = vec![RowPart { width: 1, init: Initializer::Zeros }];
    let shape = ModelShape { tables: vec![TableShape { name: "t".into(), parts }], tensors: vec![] };
    Plan { job, shape }
}

fn start_server(master: SocketAddr, token: &str) -> JoinHandle<elasticdl_ps::Result<()>> {
    tokio::spawn(run(Config {
        master: master.to_string(),
        token: Token::new(token).unwrap(),
        identity: None,
        id: ServerId(1),
        process: std::process::id(),
        listen: "127.0.0.1:0".into(),
    }))
}

async fn ended(server: JoinHandle<elasticdl_ps::Result<()>>) -> elasticdl_ps::Result<()> {
    tokio::time::timeout(DEADLINE, server).await.expect("the server ends").unwrap()
}

fn local() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// One request of a worker.
async fn exchange(address: &str, fill: impl FnOnce(&mut Frame) + Send + 'static) -> Frame {
    let address = address.to_string();
    tokio::task::spawn_blocking(move || blocking_exchange(&address, fill)).await.unwrap()
}

fn blocking_exchange(address: &str, fill: impl FnOnce(&mut Frame)) -> Frame {
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    let mut frame = Frame::default();
    ps::hello(&mut frame, SECRET, Who::Worker(1));
    frame.write(&mut stream).unwrap();
    frame.read(&mut stream, Limits::default()).unwrap();
    assert_eq!(frame.kind(), kind::WELCOME);
    fill(&mut frame);
    frame.write(&mut stream).unwrap();
    frame.read(&mut stream, Limits::default()).unwrap();
    frame
}

fn some_id() -> u64 {
    (0..).find(|id| partition_of_row(*id, PARTITIONS) == PartitionId(0)).unwrap()
}

/// Pushes one batch to partition 0.
async fn push_one(address: &str, incarnation: u64) -> ps::Answer {
    let lease = LeaseId { term: 1, n: 1 };
    let header = PushHeader { task: TaskId::train(0, 0), batch: 0, lease, records: 4, factor: 1.0 };
    let frame = exchange(address, move |frame| {
        ps::begin_push(frame, 1, header, 1);
        ps::put_part(frame, PartitionId(0), incarnation);
        frame.put(0);
        ps::put_ids(frame, &[some_id()]);
        frame.put_floats(&[1.0]);
    })
    .await;
    ps::take_answers(frame.payload()).unwrap()[0]
}

/// Bears a thousand rows in partition 0, that of [`push_one`] among them.
async fn bear_some(address: &str, incarnation: u64) {
    let ids: Vec<u64> =
        (0..).filter(|id| partition_of_row(*id, PARTITIONS) == PartitionId(0)).take(1000).collect();
    exchange(address, move |frame| {
        ps::begin_pull(frame, 1, PullMode { births: true, tensors: false }, 1);
        ps::put_part(frame, PartitionId(0), incarnation);
        ps::put_ids(frame, &ids);
    })
    .await;
}

/// The weight that [`push_one`] has changed.
async fn pull_one(address: &str, incarnation: u64) -> f32 {
    let frame = exchange(address, move |frame| {
        ps::begin_pull(frame, 1, PullMode { births: false, tensors: false }, 1);
        ps::put_part(frame, PartitionId(0), incarnation);
        ps::put_ids(frame, &[some_id()]);
    })
    .await;
    let mut payload = frame.payload();
    payload.take_all(4).unwrap();
    payload.take_floats(1).unwrap()[0]
}

fn order_checkpoint(master: &Scripted, command: u64, dir: &Path, covered: &str) {
    let (dir, covered) = (dir.display().to_string(), covered.into());
    let order = WriteCheckpoint { checkpoint: command, dir, covered, ..WriteCheckpoint::default() };
    master.edit(|s| s.orders.insert(command, What::WriteCheckpoint(order)));
}

/// A file as the partition's next life is to find it.
fn in_next_life(checkpoint: u64, file: &File) -> Assignment {
    let &File { partition, incarnation, bytes, crc32, .. } = file;
    Assignment { partition, incarnation: incarnation + 1, checkpoint, bytes, crc32, ..Assignment::default() }
}

async fn written(master: &Scripted, checkpoint: u64) -> CheckpointWrittenRequest {
    let find = |s: &Script| s.written.iter().find(|w| w.checkpoint == checkpoint).cloned();
    master.until("a checkpoint", find).await
}

#[tokio::test]
async fn a_server_joins_serves_writes_leaves_and_the_next_one_goes_on_from_there() {
    let dir = tempfile::tempdir().unwrap();
    let master = Scripted::new("20s");
    let life = master.start(local());

    let first = start_server(life.address, SECRET);
    let ready = master.until("ready", |s| s.readies.first().cloned()).await;
    assert_eq!(ready.error, "");
    let opened: Vec<_> = ready.partitions.iter().map(|a| (a.partition, a.incarnation)).collect();
    assert_eq!(opened, [(0, 1), (1, 1)]);
    let address = master.edit(|s| s.joins[0].address.clone());
    let push = push_one(&address, 1).await;
    assert_eq!((push.status, push.mark), (ps::Status::Ok, 1));
    let trained = pull_one(&address, 1).await;
    assert!(trained < 0.0, "{trained}");
    let gauges = |s: &Script| s.beats.last().map(|b| b.gauges.clone()).filter(|g| g.contains("\"pulls\":1"));
    let gauges = master.until("gauges", gauges).await;
    let told: serde_json::Value = serde_json::from_str(&gauges).unwrap();
    for (key, value) in [("rows", 1), ("version", 1), ("pulls", 1), ("pushes", 1)] {
        assert_eq!(told[key], value, "{key} of {gauges}");
    }
    assert_eq!(told["staleness"], serde_json::json!([1]), "one push, and none before it");
    assert!(told["bytes"].as_u64() >= told["table_bytes"].as_u64(), "{gauges}");
    assert!(told["places"].as_u64() > Some(1), "{gauges}");

    order_checkpoint(&master, 5, dir.path(), "");
    let files = written(&master, 5).await;
    assert_eq!((files.error.as_str(), files.files.len()), ("", 2));
    assert_eq!(files.files[0].marks, [Mark { epoch: 0, shard: 0, mark: 1 }]);
    assert!(files.files[1].marks.is_empty(), "partition 1 was never pushed to");
    master.until("the command seen", |s| s.beats.iter().any(|b| b.command_seen == 5).then_some(())).await;
    assert_eq!(master.edit(|s| s.written.len()), 1, "a command is carried out once");
    master.edit(|s| s.orders.insert(6, What::Leave(true)));
    ended(first).await.unwrap();

    master.edit(|s| {
        s.orders.clear();
        s.readies.clear();
        s.restore_from = dir.path().display().to_string();
        s.assignments = files.files.iter().map(|file| in_next_life(5, file)).collect();
    });
    let second = start_server(life.address, SECRET);
    let ready = master.until("ready", |s| s.readies.first().cloned()).await;
    assert_eq!((ready.error.as_str(), ready.partitions[0].incarnation), ("", 2));
    let address = master.edit(|s| s.joins[1].address.clone());
    let restored = pull_one(&address, 2).await;
    assert_eq!(restored, trained);
    let again = push_one(&address, 2).await;
    assert_eq!((again.status, again.mark), (ps::Status::Duplicate, 1), "marks are restored too");
    master.edit(|s| s.orders.insert(7, What::Leave(true)));
    ended(second).await.unwrap();
}

#[tokio::test]
async fn a_checkpoint_adds_to_the_committed_one_and_the_next_server_reads_both() {
    let dir = tempfile::tempdir().unwrap();
    let master = Scripted::new("20s");
    let life = master.start(local());
    let first = start_server(life.address, SECRET);
    let address = master.until("a beat", |s| s.beats.first().map(|_| s.joins[0].address.clone())).await;
    bear_some(&address, 1).await;
    let mut files = Vec::new();
    for (checkpoint, base) in [(1, 0), (2, 1), (3, 2)] {
        let at = dir.path().join(checkpoint.to_string());
        std::fs::create_dir(&at).unwrap();
        if checkpoint == 2 {
            push_one(&address, 1).await;
        }
        let order = WriteCheckpoint {
            checkpoint,
            dir: at.display().to_string(),
            base,
            is_basis: true,
            ..WriteCheckpoint::default()
        };
        master.edit(|s| s.orders.insert(checkpoint, What::WriteCheckpoint(order)));
        files.push(written(&master, checkpoint).await.files);
    }
    let trained = pull_one(&address, 1).await;
    let bases: Vec<u64> = files.iter().map(|files| files[0].base).collect();
    assert_eq!(bases, [0, 1, 2]);
    assert!(files[1][0].bytes < files[0][0].bytes, "{files:?}");
    master.edit(|s| s.orders.insert(4, What::Leave(true)));
    ended(first).await.unwrap();

    let earlier = |partition: usize, checkpoint: u64| {
        let File { bytes, crc32, .. } = files[checkpoint as usize - 1][partition];
        let dir = dir.path().join(checkpoint.to_string()).display().to_string();
        EarlierFile { checkpoint, dir, bytes, crc32 }
    };
    let assignment = |partition: usize| {
        let chain = match files[2][partition].base {
            0 => Vec::new(),
            _ => vec![earlier(partition, 1), earlier(partition, 2)],
        };
        Assignment { earlier: chain, is_basis: true, ..in_next_life(3, &files[2][partition]) }
    };
    master.edit(|s| {
        s.orders.clear();
        s.readies.clear();
        s.restore_from = dir.path().join("3").display().to_string();
        s.assignments = vec![assignment(0), assignment(1)];
    });
    let second = start_server(life.address, SECRET);
    let ready = master.until("ready", |s| s.readies.first().cloned()).await;
    assert_eq!((ready.error.as_str(), ready.partitions[0].incarnation), ("", 2));
    let address = master.edit(|s| s.joins[1].address.clone());
    assert_eq!(pull_one(&address, 2).await, trained);
    master.edit(|s| s.orders.insert(5, What::Leave(true)));
    ended(second).await.unwrap();
}

#[tokio::test]
async fn covered_tasks_are_closed_before_a_checkpoint_is_cut_and_nonsense_fails_it() {
    let dir = tempfile::tempdir().unwrap();
    let master = Scripted::new("20s");
    let life = master.start(local());
    let server = start_server(life.address, SECRET);
    let address = master.until("a beat", |s| s.beats.first().map(|_| s.joins[0].address.clone())).await;
    push_one(&address, 1).await;
    order_checkpoint(&master, 1, dir.path(), "all of them");
    let failed = written(&master, 1).await;
    assert!(
        failed.error.starts_with("reading which tasks the last checkpoint covers: expected value"),
        "{}",
        failed.error
    );
    order_checkpoint(&master, 2, dir.path(), r#"{"0":[[0,9]]}"#);
    let files = written(&master, 2).await;
    assert_eq!(files.error, "");
    assert!(files.files.iter().all(|file| file.marks.is_empty()), "{files:?}");
    let again = push_one(&address, 1).await;
    assert_eq!((again.status, again.mark), (ps::Status::Duplicate, u64::MAX), "the task is closed");
    master.edit(|s| s.orders.insert(3, What::Leave(true)));
    ended(server).await.unwrap();
}

#[tokio::test]
async fn a_damaged_checkpoint_is_reported_as_the_users_to_solve() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("partition-000.arrow"), b"ARROW1 but not really").unwrap();
    let master = Scripted::new("20s");
    master.edit(|s| {
        s.restore_from = dir.path().display().to_string();
        s.assignments[0].bytes = 5000;
    });
    let life = master.start(local());
    let server = start_server(life.address, SECRET);
    let ready = master.until("ready", |s| s.readies.first().cloned()).await;
    assert!(
        ready.error.ends_with("partition-000.arrow is truncated: 21 of 5000 bytes are there"),
        "{}",
        ready.error
    );
    assert!(ready.user_error && ready.partitions.is_empty());
    assert!(matches!(ended(server).await, Err(Error::Truncated { .. })));
}

#[tokio::test]
async fn a_checkpoint_that_cannot_be_written_is_an_error_and_the_server_lives_on() {
    let dir = tempfile::tempdir().unwrap();
    let master = Scripted::new("20s");
    let life = master.start(local());
    let server = start_server(life.address, SECRET);
    order_checkpoint(&master, 1, &dir.path().join("missing"), "");
    let failed = written(&master, 1).await;
    // Both files are begun at once, and either may be the first to fail.
    let named = |n| failed.error.contains(&format!("missing/partition-00{n}.arrow: No such file"));
    assert!(named(0) || named(1), "{}", failed.error);
    assert!(failed.files.is_empty());
    order_checkpoint(&master, 2, dir.path(), "");
    assert_eq!(written(&master, 2).await.files.len(), 2);
    master.edit(|s| s.orders.insert(3, What::Leave(true)));
    ended(server).await.unwrap();
}

#[tokio::test]
async fn a_server_keeps_its_rows_and_joins_again_when_the_master_comes_back() {
    let master = Scripted::new("20s");
    let life = master.start(local());
    let server = start_server(life.address, SECRET);
    let address = master.until("a beat", |s| s.beats.first().map(|_| s.joins[0].address.clone())).await;
    push_one(&address, 1).await;

    let at = life.address;
    drop(life);
    // Without a master it serves on.
    let alone = pull_one(&address, 1).await;
    master.edit(|s| {
        s.joined = false;
        s.readies.clear();
    });
    let _life = master.start(at);
    let ready = master.until("ready again", |s| s.readies.first().cloned()).await;
    let opened: Vec<_> = ready.partitions.iter().map(|a| (a.partition, a.incarnation)).collect();
    assert_eq!(opened, [(0, 1), (1, 1)]);
    assert_eq!(master.edit(|s| s.joins[1].address.clone()), address);
    let kept = pull_one(&address, 1).await;
    assert_eq!(kept, alone);
    assert!(kept < 0.0);
    master.edit(|s| s.orders.insert(1, What::Leave(true)));
    ended(server).await.unwrap();
}

#[tokio::test]
async fn a_server_without_a_master_ends_itself() {
    let master = Scripted::new("400ms");
    let life = master.start(local());
    let server = start_server(life.address, SECRET);
    master.until("a beat", |s| s.beats.first().map(|_| ())).await;
    drop(life);
    let error = ended(server).await.unwrap_err();
    let Error::Orphaned { after, .. } = &error else { panic!("{error}") };
    assert!(*after >= Duration::from_millis(400), "{after:?}");
}

#[tokio::test]
async fn a_wrong_token_ends_the_server_at_once() {
    let master = Scripted::new("20s");
    let life = master.start(local());
    let error = ended(start_server(life.address, "fedcba9876543210")).await.unwrap_err();
    assert_eq!(error.kind(), Kind::User);
    assert!(error.to_string().contains("the token is not the one of this job"), "{error}");
    assert_eq!(master.edit(|s| s.joins.len()), 0);
}

#[tokio::test]
async fn an_address_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap().to_string();
    let error = run(lonely(&listen)).await.unwrap_err();
    assert_eq!(error.kind(), Kind::User);
    assert!(
        error.chain().starts_with(&format!("listening on {listen}: Address already in use")),
        "{}",
        error.chain()
    );
}

/// A server that listens there and has no master.
fn lonely(listen: &str) -> Config {
    let token = Token::new(SECRET).unwrap();
    Config {
        master: "127.0.0.1:1".into(),
        token,
        identity: None,
        id: ServerId(0),
        process: std::process::id(),
        listen: listen.into(),
    }
}

#[tokio::test]
async fn a_server_that_all_the_world_could_call_needs_a_certificate() {
    let error = run(lonely("0.0.0.0:0")).await.unwrap_err();
    assert_eq!(error.kind(), Kind::User);
    let text = error.to_string();
    assert!(text.starts_with("not listening at 0.0.0.0:"), "{text}");
    assert!(text.ends_with("listening beyond this machine needs TLS"), "{text}");
}

/// Goal: a partition goes from one server to another with what it has learned, when the master says so and not before.
#[tokio::test]
async fn a_partition_moves_when_the_master_says_so() {
    let (here, there) = (Scripted::new("20s"), Scripted::new("20s"));
    there.edit(|s| s.assignments.clear());
    let (life, other_life) = (here.start(local()), there.start(local()));
    let (first, second) = (start_server(life.address, SECRET), start_server(other_life.address, SECRET));
    here.until("ready", |s| s.readies.first().cloned()).await;
    there
        .until("ready with nothing", |s| s.readies.first().filter(|r| r.partitions.is_empty()).cloned())
        .await;
    let (old, new) = (here.edit(|s| s.joins[0].address.clone()), there.edit(|s| s.joins[0].address.clone()));
    assert_eq!(push_one(&old, 1).await.status, ps::Status::Ok);
    let trained = pull_one(&old, 1).await;

    let order = |command, incarnation: u64| {
        let partitions =
            vec![Assignment { partition: 0, incarnation: incarnation + 1, ..Assignment::default() }];
        let order = Move { from: old.clone(), partitions, incarnations: vec![incarnation], backup: false };
        there.edit(|s| s.orders.insert(command, What::Move(order)));
    };
    // The master has changed its mind: nothing happens.
    order(5, 1);
    let asked = there.until("copied", |s| s.copied.first().cloned()).await;
    assert_eq!((asked.command, asked.error.as_str()), (5, ""));
    assert_eq!(pull_one(&old, 1).await, trained, "it is served where it was");

    // Another life than the one that is there cannot be copied.
    there.edit(|s| s.orders.remove(&5));
    order(6, 7);
    let failed = there.until("a failure", |s| s.copied.iter().find(|c| c.command == 6).cloned()).await;
    assert!(
        failed.error.contains("it is not at the server that it was to be copied from"),
        "{}",
        failed.error
    );

    there.edit(|s| {
        s.orders.remove(&6);
        s.words.extend([copied_reply::What::WaitMs(1), copied_reply::What::Take(true)]);
    });
    order(7, 1);
    let ready = there.until("ready with it", |s| s.readies.get(1).cloned()).await;
    assert_eq!(ready.partitions.iter().map(|a| (a.partition, a.incarnation)).collect::<Vec<_>>(), [(0, 2)]);
    assert_eq!(pull_one(&new, 2).await, trained);
    assert_eq!(push_one(&new, 2).await.status, ps::Status::Duplicate, "what was applied stays applied");
    assert!(matches!(push_one(&old, 1).await.status, ps::Status::WrongIncarnation | ps::Status::NotHere));
    there.edit(|s| s.orders = BTreeMap::from([(8, What::Leave(true))]));
    here.edit(|s| s.orders.insert(8, What::Leave(true)));
    ended(first).await.unwrap();
    ended(second).await.unwrap();
}
