//! A whole worker against a master and servers on loopback that answer by script.

use std::io::Write;
use std::sync::Mutex;

use elasticdl_spec::job::Format;
use elasticdl_spec::layout::*;
use elasticdl_spec::resolve::{Inputs, resolve};
use elasticdl_spec::scores::Scores;
use elasticdl_spec::{JobSpec, ModelShape, PartitionId, Shard, TaskId};
use elasticdl_wire::control::master_server::{Master as Service, MasterServer};
use elasticdl_wire::control::{self, *};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use super::*;
use crate::tests::{FakeServer, PARTITIONS, World};

const TOKEN: &str = "0123456789abcdef";
const BATCH: usize = 8;

/// What the master has heard and has to give.
#[derive(Default)]
struct Script {
    tasks: Vec<TaskId>,
    leases: u64,
    /// The master's term.
    term: u64,
    joins: u32,
    /// Whether the worker is forgotten until it joins again.
    forgetful: bool,
    send_away: bool,
    /// Whether there is no master, as far as the worker can tell.
    away: bool,
    reports: Vec<ReportRequest>,
    /// Leases that the worker said it had, each time it asked.
    held: Vec<Vec<LeaseNumber>>,
    /// What every lease says besides its task.
    again: bool,
    quarantined: Vec<u64>,
}

struct FakeMaster {
    plan: String,
    shard: Shard,
    /// Where the servers are; partitions are dealt to them in turn.
    addresses: Vec<String>,
    world: Arc<Mutex<World>>,
    script: Mutex<Script>,
    /// Rises with every report.
    heard: tokio::sync::watch::Sender<usize>,
}

type Reply<T> = std::result::Result<Response<T>, Status>;

impl FakeMaster {
    fn script(&self) -> std::sync::MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    fn known(&self) -> std::result::Result<(), Status> {
        let script = self.script();
        if script.away {
            return Err(Status::unavailable("nobody is here"));
        }
        if script.forgetful {
            return Err(Status::failed_precondition("join first"));
        }
        Ok(())
    }

    /// Waits until the reports satisfy a condition.
    async fn until(&self, holds: impl Fn(&[ReportRequest]) -> bool) {
        let mut heard = self.heard.subscribe();
        let wait = heard.wait_for(|_| holds(&self.script().reports));
        tokio::time::timeout(Duration::from_secs(60), wait).await.expect("the reports come").unwrap();
    }
}

#[tonic::async_trait]
impl Service for FakeMaster {
    async fn join(&self, _: Request<JoinRequest>) -> Reply<JoinReply> {
        self.script().forgetful = false;
        self.known()?;
        self.script().joins += 1;
        Ok(Response::new(JoinReply { plan: self.plan.clone(), ..Default::default() }))
    }

    async fn ready(&self, _: Request<ReadyRequest>) -> Reply<ReadyReply> {
        Err(Status::unimplemented("workers do not call this"))
    }

    async fn beat(&self, request: Request<BeatRequest>) -> Reply<BeatReply> {
        self.known()?;
        let gauges: serde_json::Value = serde_json::from_str(&request.into_inner().gauges).unwrap();
        assert!(gauges["batches"].is_u64());
        if self.script().send_away {
            return Ok(Response::new(BeatReply { command: 1, what: Some(beat_reply::What::Leave(true)) }));
        }
        Ok(Response::new(BeatReply { command: 0, what: None }))
    }

    async fn topology(&self, _: Request<TopologyRequest>) -> Reply<TopologyReply> {
        self.known()?;
        let world = self.world.lock().unwrap();
        let place = |p: u32| Place {
            partition: p,
            incarnation: world.partitions[p as usize].incarnation,
            address: self.addresses[p as usize % self.addresses.len()].clone(),
        };
        Ok(Response::new(TopologyReply { places: (0..PARTITIONS).map(place).collect() }))
    }

    async fn lease(&self, request: Request<LeaseRequest>) -> Reply<LeaseReply> {
        self.known()?;
        let mut script = self.script();
        let request = request.into_inner();
        script.held.push(request.held);
        let answer = |what| Ok(Response::new(LeaseReply { what: Some(what), ended: vec![] }));
        match script.tasks.is_empty() {
            true if request.ahead => return answer(lease_reply::What::WaitMs(10)),
            true => return answer(lease_reply::What::Finished(true)),
            false => {}
        }
        let task = script.tasks.remove(0).to_string();
        script.leases += 1;
        let shard = serde_json::to_string(&self.shard).unwrap();
        let (again, quarantined) = (script.again, script.quarantined.clone());
        let leased = control::Leased {
            task,
            term: script.term,
            lease: script.leases,
            shard,
            again,
            quarantined,
            ..Default::default()
        };
        answer(lease_reply::What::Leased(leased))
    }

    async fn report(&self, request: Request<ReportRequest>) -> Reply<ReportReply> {
        self.known()?;
        self.script().reports.push(request.into_inner());
        self.heard.send_modify(|n| *n += 1);
        Ok(Response::new(ReportReply { held: true }))
    }

    async fn checkpoint_written(
        &self,
        _: Request<CheckpointWrittenRequest>,
    ) -> Reply<CheckpointWrittenReply> {
        Err(Status::unimplemented("workers do not call this"))
    }

    async fn alone(&self, _: Request<AloneRequest>) -> Reply<AloneReply> {
        Err(Status::unimplemented("workers do not call this"))
    }

    async fn copied(&self, _: Request<CopiedRequest>) -> Reply<CopiedReply> {
        Err(Status::unimplemented("workers do not call this"))
    }
}

/// A comma-separated file with two numbers and two ids.
fn layout() -> Layout {
    let number = |column: &str| NumericField { column: column.into(), scale: Scale::Identity };
    let id =
        |column: &str| CategoricalField { name: column.into(), column: column.into(), bucket: Bucket::Value };
    Layout {
        name: "custom".into(),
        columns: ["label", "x", "y", "a", "b"].map(String::from).into(),
        text: TextStyle { delimiter: ',', header: false, quotes: false, trim: false, missing: vec![] },
        label: Some(Label { column: "label".into(), positive: vec![] }),
        numeric: vec![number("x"), number("y")],
        categorical: vec![id("a"), id("b")],
    }
}

fn job(orphan: Duration) -> JobSpec {
    let flags = [
        ("name", "test".into()),
        ("model.zoo", "lr".into()),
        ("data.train", "t".into()),
        ("data.layout", "criteo".into()),
        ("data.format", "text".into()),
        ("data.batches_per_task", "4".into()),
        ("train.batch", BATCH.to_string()),
        ("train.optimizer", "sgd".into()),
        ("train.learning_rate", "1".into()),
        ("workers.threads", "2".into()),
        ("workers.pipeline", "3".into()),
        ("servers.count", "2".into()),
        ("servers.partitions", PARTITIONS.to_string()),
        ("limits.orphan", format!("{}ms", orphan.as_millis())),
    ];
    let flags = flags.map(|(path, value)| (path.to_string(), value)).into();
    let mut job = resolve(&Inputs { flags, ..Inputs::default() }).unwrap().job;
    job.data.layout = layout();
    job
}

/// A master with these tasks, all over one file of 30 records, and its servers.
struct Rig {
    master: Arc<FakeMaster>,
    life: Option<Life>,
    address: String,
    _servers: Vec<FakeServer>,
    _file: tempfile::NamedTempFile,
}

/// One life of the master's process, in a runtime of its own: dropping it cuts every connection.
struct Life {
    address: std::net::SocketAddr,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Life {
    fn start(master: &Arc<FakeMaster>, address: std::net::SocketAddr) -> Self {
        let listener = std::net::TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let token = Token::new(TOKEN).unwrap();
        let authenticate = move |request: Request<()>| {
            let header = request.metadata().get("authorization").map(|h| h.as_bytes());
            let known = token.matches_header(header);
            if known { Ok(request) } else { Err(Status::unauthenticated("wrong token")) }
        };
        let service = tonic::service::interceptor::InterceptedService::new(
            MasterServer::from_arc(Arc::clone(master)),
            authenticate,
        );
        runtime.spawn(async move {
            let incoming = TcpListenerStream::new(TcpListener::from_std(listener).unwrap());
            let server = tonic::transport::Server::builder().add_service(service);
            server.serve_with_incoming(incoming).await.unwrap();
        });
        Life { address, runtime: Some(runtime) }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.runtime.take().expect("dropped once").shutdown_background();
    }
}

async fn rig(tasks: Vec<TaskId>, orphan: Duration) -> Rig {
    rig_with(30, tasks, orphan).await
}

/// The same with so many records in a task.
async fn rig_with(records: u64, tasks: Vec<TaskId>, orphan: Duration) -> Rig {
    let job = job(orphan);
    let shape = shape_of(&job);
    let world = Arc::new(Mutex::new(World::new(shape)));
    let servers = vec![FakeServer::start(&world, TOKEN), FakeServer::start(&world, TOKEN)];
    let addresses = servers.iter().map(|server| server.address.clone()).collect();
    Rig { _servers: servers, ..rig_of(job, records, tasks, world, addresses) }
}

fn shape_of(job: &JobSpec) -> ModelShape {
    elasticdl_nn::build(&job.model, 2, 2).unwrap().shape().clone()
}

/// A master of this job, with servers at these addresses.
fn rig_of(
    job: JobSpec,
    records: u64,
    tasks: Vec<TaskId>,
    world: Arc<Mutex<World>>,
    addresses: Vec<String>,
) -> Rig {
    let shape = shape_of(&job);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for i in 0..records {
        writeln!(file, "{},{}.5,{},a{},b{}", u8::from(i % 3 == 0), i % 5, i % 2, i % 7, i % 4).unwrap();
    }
    file.flush().unwrap();
    let found = elasticdl_data::discover(&[file.path().display().to_string()], Some(Format::Text)).unwrap();
    let path = found[0].path.clone();
    let shard =
        Shard { path, first: 0, records: Some(records), offset: 0, fingerprint: found[0].fingerprint };
    let master = Arc::new(FakeMaster {
        plan: serde_json::to_string(&Plan { job, shape }).unwrap(),
        shard,
        addresses,
        world,
        script: Mutex::new(Script { tasks, term: 1, ..Script::default() }),
        heard: tokio::sync::watch::Sender::new(0),
    });
    let life = Life::start(&master, "127.0.0.1:0".parse().unwrap());
    let address = life.address.to_string();
    Rig { master, life: Some(life), address, _servers: vec![], _file: file }
}

impl Rig {
    fn worker(&self, token: &str) -> (UnboundedSender<()>, impl Future<Output = Result<()>> + Send + use<>) {
        let (terminate, terminations) = unbounded_channel();
        let token = Token::new(token).unwrap();
        let config =
            Config { master: self.address.clone(), token, identity: None, id: WorkerId(4), process: 77 };
        let deadline = Duration::from_secs(60);
        let life = async move {
            tokio::time::timeout(deadline, live(config, terminations)).await.expect("a worker ends")
        };
        (terminate, life)
    }
}

fn trains(n: u32) -> Vec<TaskId> {
    (0..n).map(|shard| TaskId::train(0, shard)).collect()
}

/// Long enough for nobody to be an orphan.
const NEVER: Duration = Duration::from_secs(3600);

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_trains_and_evaluates_what_it_is_given_and_leaves_when_the_job_is_finished() {
    let tasks = [trains(3), vec![TaskId::evaluate(0, 0)], vec![TaskId::train(0, 9)]].concat();
    let rig = rig(tasks.clone(), NEVER).await;
    let (_terminate, life) = rig.worker(TOKEN);
    life.await.unwrap();

    let reports = rig.master.script().reports.clone();
    let done: Vec<(TaskId, Done)> = reports
        .iter()
        .filter_map(|r| match &r.outcome {
            Some(Told::Done(done)) => Some((r.task.parse().unwrap(), done.clone())),
            _ => None,
        })
        .collect();
    // Ends that wait to be told together are told in no certain order.
    assert_eq!(done.iter().map(|(task, _)| *task).collect::<BTreeSet<_>>(), tasks.into_iter().collect());
    assert_eq!(done.len(), 5);
    assert!(done.iter().all(|(_, done)| (done.task_records, done.batches) == (30, 4)));
    for (task, done) in &done {
        let lives = if *task == TaskId::evaluate(0, 0) { vec![] } else { vec![1; PARTITIONS as usize] };
        assert_eq!(done.incarnations, lives);
    }
    assert!(reports.iter().all(|r| !r.began), "nothing was leased before");
    let held = rig.master.script().held.clone();
    assert!(held[0].is_empty());
    assert!(held.iter().any(|held| held.contains(&LeaseNumber { term: 1, n: 1 })), "{held:?}");
    let evaluated = done.iter().find(|(task, _)| *task == TaskId::evaluate(0, 0)).unwrap();
    let scores: Scores = serde_json::from_str(&evaluated.1.scores).unwrap();
    assert_eq!(scores.records(), 30);
    assert_eq!(reports.iter().map(|r| r.records).sum::<u64>(), 5 * 30, "each record is reported once");
    let trained: Vec<&ReportRequest> = reports.iter().filter(|r| r.task.starts_with("train")).collect();
    let loss = trained.iter().map(|r| r.loss_sum).sum::<f64>() / (4.0 * 30.0);
    assert!((0.1..5.0).contains(&loss), "{loss}");
    for partition in &rig.master.world.lock().unwrap().partitions {
        assert_eq!(partition.records, 4 * 30);
        assert_eq!(partition.version, 4 * 4, "30 records are 4 batches");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deterministic_job_counts_every_record_once_and_has_one_task_at_a_time() {
    let mut job = job(NEVER);
    job.train.staleness = Some(0);
    let model = Arc::new(elasticdl_ps::Model::of(&Plan { job: job.clone(), shape: shape_of(&job) }));
    let partitions = Arc::new(elasticdl_ps::Partitions::new(Arc::clone(&model)));
    for id in (0..PARTITIONS).map(PartitionId) {
        partitions.open(elasticdl_ps::Partition::new(Arc::clone(&model), id, 1));
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (token, options) = (Token::new(TOKEN).unwrap(), Default::default());
    let server =
        elasticdl_ps::Server::start(listener, token, None, Arc::clone(&partitions), options).unwrap();
    let world = Arc::new(Mutex::new(World::new(shape_of(&job))));
    let rig = rig_of(job, 30, trains(3), world, vec![server.address().to_string()]);
    let (_terminate, life) = rig.worker(TOKEN);
    life.await.unwrap();

    let batch = |p: &mut elasticdl_ps::Partition| p.memory().audit.epochs()[&0];
    for id in (0..PARTITIONS).map(PartitionId) {
        let tally = partitions.with(id, batch).unwrap();
        assert_eq!((tally.batches, tally.records), (3 * 4, 3 * 30));
    }
    let script = rig.master.script();
    assert_eq!(script.reports.iter().filter(|r| matches!(r.outcome, Some(Told::Done(_)))).count(), 3);
    assert!(script.held.iter().all(Vec::is_empty), "{:?}", script.held);
}

/// Servers that know nothing of staging show that it is what they are asked for.
#[tokio::test(flavor = "multi_thread")]
async fn a_deterministic_job_never_pushes_in_one_go() {
    let mut job = job(NEVER);
    job.train.staleness = Some(0);
    let world = Arc::new(Mutex::new(World::new(shape_of(&job))));
    let server = FakeServer::start(&world, TOKEN);
    let rig = rig_of(job, 30, trains(1), world, vec![server.address.clone()]);
    let (_terminate, life) = rig.worker(TOKEN);
    let error = life.await.unwrap_err();
    assert!(matches!(error, Error::Wire { attempt: "staging", .. }), "{error:?}");
    assert!(!server.seen().contains(&elasticdl_wire::ps::kind::PUSH));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_worker_gives_back_what_it_holds_and_ends_well() {
    let rig = rig_with(30_000, trains(100), NEVER).await;
    let (terminate, life) = rig.worker(TOKEN);
    let life = tokio::spawn(life);
    rig.master.until(|reports| reports.iter().map(|r| r.batches).sum::<u64>() > 10).await;
    terminate.send(()).unwrap();
    life.await.unwrap().unwrap();

    let script = rig.master.script();
    let mut open: std::collections::BTreeSet<u64> = (1..=script.leases).collect();
    let mut returned = 0;
    for report in &script.reports {
        match report.outcome {
            Some(Told::Done(_)) => assert!(open.remove(&report.lease)),
            Some(Told::Returned(_)) => {
                assert!(open.remove(&report.lease));
                returned += 1;
            }
            _ => {}
        }
    }
    assert!(open.is_empty(), "leases that nobody gave back: {open:?}");
    assert!((1..=2).contains(&returned), "{returned}");
    let reported: u64 = script.reports.iter().map(|r| r.records).sum();
    for partition in &rig.master.world.lock().unwrap().partitions {
        assert_eq!(partition.records, reported, "what was applied was reported, and the reverse");
    }
}

/// Goal: a kill and a restart of the master cost no batch: what is held goes on being trained, and is
/// reported when somebody listens again.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_trains_on_while_its_master_is_killed_and_started_again() {
    // So many that the task in hand lasts longer than the master is away.
    let mut rig = rig_with(60_000, trains(100), NEVER).await;
    let (terminate, life) = rig.worker(TOKEN);
    let life = tokio::spawn(life);
    rig.master.until(|reports| reports.iter().map(|r| r.batches).sum::<u64>() > 10).await;

    let at = rig.life.take().expect("it runs").address;
    let applied = |rig: &Rig| rig.master.world.lock().unwrap().partitions[0].version;
    let before = applied(&rig);
    let deadline = Instant::now() + Duration::from_secs(60);
    while applied(&rig) < before + 100 {
        assert!(Instant::now() < deadline, "nothing is trained without a master");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let leases = rig.master.script().leases;
    let reported = rig.master.script().reports.len();
    rig.master.script().term = 2;
    rig.life = Some(Life::start(&rig.master, at));
    rig.master.until(|reports| reports.len() > reported).await;
    rig.master.until(|reports| reports.iter().any(|r| r.term == 2)).await;
    terminate.send(()).unwrap();
    life.await.unwrap().unwrap();

    let mut script = rig.master.script();
    assert_eq!(script.joins, 1, "the master still knows the worker");
    assert!(script.leases > leases);
    // One may have been heard by the master that died before it could answer.
    script.reports.dedup();
    let reported: u64 = script.reports.iter().map(|r| r.records).sum();
    for partition in &rig.master.world.lock().unwrap().partitions {
        assert_eq!(partition.records, reported, "what was applied was reported, and the reverse");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_leased_again_tells_its_beginning_and_sets_its_quarantined_batches_aside() {
    let rig = rig(trains(2), NEVER).await;
    (rig.master.script().again, rig.master.script().quarantined) = (true, vec![0, 3]);
    let (_terminate, life) = rig.worker(TOKEN);
    life.await.unwrap();
    let script = rig.master.script();
    for task in ["train/0/0", "train/0/1"] {
        let reports: Vec<_> = script.reports.iter().filter(|r| r.task == task).collect();
        assert_eq!(reports.iter().filter(|r| r.began).count(), 1, "{reports:?}");
        let last = reports.last().expect("it ended");
        let Some(Told::Done(done)) = &last.outcome else { panic!("{last:?}") };
        // 30 records are batches of 8, 8, 8 and 6.
        assert_eq!((done.task_records, done.batches, last.bad_records), (16, 4, 14));
        assert_eq!(last.bad_examples, ["batch 0 is quarantined", "batch 3 is quarantined"]);
    }
    for partition in &rig.master.world.lock().unwrap().partitions {
        assert_eq!((partition.version, partition.records), (8, 32));
    }
}

/// The master is away, so that the drain cannot end by itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_sigterm_ends_the_worker_at_once() {
    let rig = rig_with(30_000, trains(100), NEVER).await;
    let (terminate, life) = rig.worker(TOKEN);
    let life = tokio::spawn(life);
    rig.master.until(|reports| !reports.is_empty()).await;
    rig.master.script().away = true;
    terminate.send(()).unwrap();
    terminate.send(()).unwrap();
    assert!(matches!(life.await.unwrap(), Err(Error::Killed)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_sent_away_leaves() {
    let rig = rig(trains(100_000), NEVER).await;
    rig.master.script().send_away = true;
    let (_terminate, life) = rig.worker(TOKEN);
    life.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_forgot_the_worker_is_joined_again() {
    let rig = rig(trains(1000), NEVER).await;
    let (terminate, life) = rig.worker(TOKEN);
    let life = tokio::spawn(life);
    rig.master.until(|reports| !reports.is_empty()).await;
    let before = {
        let mut script = rig.master.script();
        script.forgetful = true;
        script.reports.len()
    };
    rig.master.until(|reports| reports.len() > before).await;
    terminate.send(()).unwrap();
    life.await.unwrap().unwrap();
    assert!(rig.master.script().joins >= 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_master_is_gone_ends_as_an_orphan() {
    let limit = Duration::from_millis(300);
    let rig = rig(trains(100_000), limit).await;
    let (_terminate, life) = rig.worker(TOKEN);
    let life = tokio::spawn(life);
    rig.master.until(|reports| !reports.is_empty()).await;
    rig.master.script().away = true;
    let error = life.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Orphaned { silence, .. } if silence >= limit), "{error}");
    assert_eq!(error.kind(), elasticdl_spec::Kind::Retry);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_with_a_wrong_token_ends_and_says_why() {
    let rig = rig(trains(1), NEVER).await;
    let (_terminate, life) = rig.worker("another-token-of-16");
    let error = life.await.unwrap_err();
    assert_eq!(error.kind(), elasticdl_spec::Kind::User);
    assert!(matches!(error, Error::Wire { attempt: "joining the job", .. }), "{error:?}");
}

#[test]
fn a_lease_that_makes_no_sense_is_refused() {
    let leased = |task: &str, shard: &str| {
        let leased = control::Leased {
            task: task.into(),
            term: 1,
            lease: 2,
            shard: shard.into(),
            ..Default::default()
        };
        understand(LeaseReply { what: Some(lease_reply::What::Leased(leased)), ended: vec![] })
    };
    let shard = r#"{"path":"a","first":0,"records":9,"offset":0,"fingerprint":1}"#;
    let reply = control::Leased {
        task: "train/1/2".into(),
        shard: shard.into(),
        first_step: 7,
        steps: 21,
        ..Default::default()
    };
    let reply = LeaseReply { what: Some(lease_reply::What::Leased(reply)), ended: vec![] };
    let (_, Input::Leased(held)) = understand(reply).unwrap() else { panic!("a task") };
    assert_eq!(held.position, Position { first: 7, total: 21 });
    assert!(leased("train/0/x", "{}").unwrap_err().to_string().contains("train/0/17"));
    assert!(leased("train/0/1", "{}").unwrap_err().to_string().contains("missing field"));
    assert!(understand(LeaseReply { what: None, ended: vec![] }).is_err());
}
