//! What a seed stands for: the job, its data, how good network and disks are, and which faults come when.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use elasticdl_ps::Model;
use elasticdl_spec::mix::Rng;
use elasticdl_spec::resolve::{Inputs, resolve};
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{
    Consistency, Initializer, JobSpec, ModelShape, OptimizerSpec, Plan, Shard, TableShape, TablesSpec,
    TaskId, TensorShape,
};
use serde_json::json;

/// A world before anything has happened in it.
#[derive(Debug)]
pub struct Scenario {
    /// The seed.
    pub seed: u64,
    /// The job.
    pub plan: Plan,
    /// Its model, as the servers see it.
    pub model: Arc<Model>,
    /// Training shards.
    pub shards: Vec<Shard>,
    /// Validation shards.
    pub validation: Vec<Shard>,
    /// Batches that no worker can compute.
    pub poisoned: BTreeSet<(TaskId, u64)>,
    /// How long a worker computes on a batch.
    pub compute: Duration,
    /// Whether workers pull rows before they push; they need none to count.
    pub pulls: bool,
    /// How often time passes for the master.
    pub tick: Duration,
    /// The network.
    pub net: Net,
    /// The disks.
    pub disk: DiskRates,
    /// What goes wrong when, in order.
    pub faults: Vec<(Duration, Fault)>,
    /// From here on nothing goes wrong any more.
    pub heal: Duration,
    /// By then the job must be done.
    pub limit: Duration,
}

/// Which worlds are drawn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Kind {
    /// Many workers, each batch pushed as soon as it is computed.
    #[default]
    Usual,
    /// One worker whose steps are staged, so that the outcome depends on nothing that dies.
    Staged,
    /// Many workers whose batches are admitted by a gate, so that none is too stale.
    Bounded,
    /// Many workers whose batches are applied together, several in a step.
    Synchronous,
    /// Many workers whose rows' gradients are applied as they come and whose tensors' gradients are gathered.
    Hybrid,
}

/// How messages travel until the faults stop.
#[derive(Debug, Clone, Copy)]
pub struct Net {
    /// The least that a message takes.
    pub base: Duration,
    /// Added at random; messages overtake each other by that.
    pub jitter: Duration,
    /// The share that is lost.
    pub loss: f64,
    /// The share that comes twice.
    pub twice: f64,
    /// The share that is very late.
    pub late: f64,
    /// How late at most.
    pub late_max: Duration,
    /// The share of pushes whose connection breaks between two partitions.
    pub cut: f64,
    /// The share of pushes that another one, of the next batch, goes along with.
    pub stray: f64,
    /// Whether a server that is started again has the address of the one before.
    pub same_address: bool,
}

/// How disks behave until the faults stop.
#[derive(Debug, Clone, Copy)]
pub struct DiskRates {
    /// How long a sync takes.
    pub sync: Duration,
    /// The share of operations that fail, beside those in a time of failures.
    pub fail: f64,
    /// The share of master crashes that lose what was not synced.
    pub loses: f64,
}

/// Something that goes wrong. Who is hit is drawn when it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A worker dies.
    CrashWorker,
    /// A server dies.
    CrashServer,
    /// The master dies.
    CrashMaster,
    /// A worker is stopped for this long.
    PauseWorker(Duration),
    /// A server is stopped for this long.
    PauseServer(Duration),
    /// The master is stopped for this long.
    PauseMaster(Duration),
    /// The master is stopped for this long, and another one begins meanwhile.
    SecondMaster(Duration),
    /// A worker is cut off from the master for this long.
    CutWorker(Duration),
    /// A server is cut off from the master for this long.
    CutServer(Duration),
    /// Another number of workers is wanted.
    Scale,
    /// The job is stopped, after a checkpoint or at once.
    Stop,
    /// Disks take long for this long.
    DiskSlow(Duration),
    /// Disks fail for this long.
    DiskFails(Duration),
    /// The next write of the ledger fails.
    LedgerFails,
}

const FILE: &str = "{apiVersion: elasticdl.org/v1, kind: ElasticJob, metadata: {name: sim}, spec: {model: {zoo: counting}, \
                    data: {train: t, layout: criteo}, train: {optimizer: sgd, learning_rate: 1}, servers: {count: 2, partitions: 4}}}";

fn base_job() -> JobSpec {
    static JOB: OnceLock<JobSpec> = OnceLock::new();
    JOB.get_or_init(|| {
        let inputs = Inputs { file: Some(FILE), environment: vec![], flags: vec![] };
        resolve(&inputs).expect("the simulator's job file is valid").job
    })
    .clone()
}

const TABLE: &str = "counts";

/// A table that counts, one row per record, and a tensor that counts batches in one partition.
fn shape() -> ModelShape {
    let zeros = Initializer::Zeros;
    let table = TableShape { name: TABLE.into(), parts: vec![RowPart { width: 1, init: zeros }] };
    let tensor = TensorShape { name: "batches".into(), shape: vec![2], init: zeros };
    ModelShape { tables: vec![table], tensors: vec![tensor] }
}

impl Scenario {
    /// The world of a seed.
    pub fn draw(seed: u64, kind: Kind) -> Self {
        let mut rng = Rng::new(elasticdl_spec::mix::mix2(seed, 0x51a1));
        let mut job = base_job();
        let deterministic = kind == Kind::Staged;
        let workers = if deterministic { 1 } else { draw_workers(&mut rng) };
        job.train.staleness = draw_staleness(seed, kind);
        if matches!(kind, Kind::Synchronous | Kind::Hybrid) {
            let synchronous = kind == Kind::Synchronous;
            job.train.consistency = if synchronous { Consistency::Synchronous } else { Consistency::Hybrid };
            job.train.grads_to_wait = draw_size(seed);
        }
        job.workers.count = (deterministic || !draws_automatic(seed)).then_some(workers);
        job.workers.max = if deterministic { 1 } else { (workers + workers / 4 + 1).min(300) };
        job.data.bad_records_max = 1000;
        job.servers.count = 1 + rng.below(4) as u32;
        job.servers.partitions = (4 + rng.below(13) as u32).max(job.servers.count);
        job.train.epochs = 1 + rng.below(3) as u32;
        job.train.batch = 1 + rng.below(3) as usize;
        job.train.seed = seed;
        job.train.optimizer = OptimizerSpec::Sgd { learning_rate: 1.0 };
        job.data.batches_per_task = 1 + rng.below(4) as u32;
        let shards = 10 + rng.below(50);
        let shards = draw_shards(&mut rng, &job, "train", shards);
        let poisoned = draw_poisoned(&mut rng, &job, &shards);
        let validation = if rng.below(4) == 0 { 1 + rng.below(3) } else { 0 };
        let validation = draw_shards(&mut rng, &job, "validate", validation);
        job.evaluate.every = (rng.below(2) == 0).then(|| seconds(&mut rng, 1.0, 4.0));
        let often = [0.3, 1.0, 3.0][rng.below(3) as usize];
        job.checkpoint.every = (rng.below(8) > 0).then(|| seconds(&mut rng, 0.1, often));
        job.checkpoint.keep = 1 + rng.below(3) as u32;
        job.checkpoint.full_every = draw_full_every(seed);
        job.servers.replicas = draw_replicas(seed, &job);
        job.tables = draw_tables(seed, kind);
        let compute = draw_compute(&mut rng, &job, workers, &shards);
        job.limits.lease = seconds(&mut rng, 0.5, 3.0) + 3 * compute;
        if matches!(kind, Kind::Bounded | Kind::Synchronous | Kind::Hybrid) {
            // Whoever waits at the gate gets no batch done meanwhile, and all may wait for all.
            job.limits.lease += 2 * workers * (compute + Duration::from_millis(100));
        }
        job.limits.silence = seconds(&mut rng, 3.0, 14.0);
        job.limits.orphan = seconds(&mut rng, 8.0, 20.0);
        job.limits.restarts = 1000;
        let heal = seconds(&mut rng, 4.0, 14.0);
        // A job that was scaled down to one worker on a slow network needs some seconds for a task.
        let tasks = job.train.epochs * shards.len() as u32;
        let limit = heal + Duration::from_secs(240) + tasks * Duration::from_secs(10);
        let mut faults = draw_faults(&mut rng, heal);
        faults.extend(draw_crashes(seed, &job, heal));
        faults.sort_by_key(|(at, _)| *at);
        let plan = Plan { job, shape: shape() };
        Scenario {
            seed,
            model: Arc::new(Model::of(&plan)),
            plan,
            shards,
            validation,
            poisoned,
            compute,
            pulls: rng.below(3) == 0 || matches!(kind, Kind::Bounded | Kind::Synchronous | Kind::Hybrid),
            tick: Duration::from_millis(50 + rng.below(100)),
            net: draw_net(&mut rng, workers),
            disk: draw_disk(&mut rng),
            faults,
            heal,
            limit,
        }
    }

    /// How many batches a shard has.
    pub fn batches(&self, shard: &Shard) -> u64 {
        shard.records.unwrap_or(0).div_ceil(self.plan.job.train.batch as u64)
    }

    /// The records of a batch.
    pub fn records(&self, shard: &Shard, batch: u64) -> Range<u64> {
        let size = self.plan.job.train.batch as u64;
        let end = shard.first + shard.records.unwrap_or(0);
        let first = (shard.first + batch * size).min(end);
        first..(first + size).min(end)
    }

    /// The records of a batch of a task that are to be counted: none where it cannot be computed.
    pub fn taught(&self, task: TaskId, shard: &Shard, batch: u64) -> Range<u64> {
        let records = self.records(shard, batch);
        if self.poisoned.contains(&(task, batch)) { records.end..records.end } else { records }
    }

    /// Whether steps are staged and outcomes do not depend on what dies.
    pub fn is_deterministic(&self) -> bool {
        self.plan.job.is_deterministic()
    }

    /// Whether several batches make a step.
    pub fn is_synchronous(&self) -> bool {
        self.plan.job.is_synchronous()
    }

    /// Whether rows are refused, or make room for others.
    pub fn is_bounded(&self) -> bool {
        let table = self.plan.job.tables.of(TABLE);
        table.admit_after > 1 || table.memory_max.is_some()
    }

    /// How many partitions there are.
    pub fn partitions(&self) -> u32 {
        self.plan.job.servers.partitions
    }
}

fn draw_staleness(seed: u64, kind: Kind) -> Option<u32> {
    match kind {
        Kind::Usual | Kind::Synchronous | Kind::Hybrid => None,
        Kind::Staged => Some(0),
        Kind::Bounded => Some(draw_size(seed)),
    }
}

/// A bound of staleness, or the size of a step. It is drawn apart, like all that other worlds do not have.
fn draw_size(seed: u64) -> u32 {
    1 + Rng::new(elasticdl_spec::mix::mix2(seed, 0xb0d)).below(8) as u32
}

/// Mostly few workers, often dozens, now and then hundreds.
fn draw_workers(rng: &mut Rng) -> u32 {
    if rng.below(100) < 6 {
        return 101 + rng.below(200) as u32;
    }
    let most = (100.0f64 / 2.0).ln();
    (2.0 * (most * rng.uniform().powf(1.7)).exp()) as u32
}

/// Whether the master finds out how many workers are of use. It is drawn apart, so that all else in a world is
/// what it would be with a fixed number.
fn draws_automatic(seed: u64) -> bool {
    Rng::new(elasticdl_spec::mix::mix2(seed, 0xa070)).below(4) == 0
}

/// How many checkpoints there are for one that is whole. Drawn apart, so that all else stays what it was.
fn draw_full_every(seed: u64) -> u32 {
    let mut rng = Rng::new(elasticdl_spec::mix::mix2(seed, 0xf011));
    [1, 2, 4, 8][rng.below(4) as usize]
}

/// Where partitions have backups servers crash more often.
fn draw_crashes(seed: u64, job: &JobSpec, heal: Duration) -> Vec<(Duration, Fault)> {
    let mut rng = Rng::new(elasticdl_spec::mix::mix2(seed, 0xc4a5));
    let count = if job.servers.replicas > 1 { 1 + rng.below(3) } else { 0 };
    (0..count).map(|_| (heal.mul_f64(rng.uniform() * 0.95), Fault::CrashServer)).collect()
}

/// Whether partitions have backups. Drawn apart, so that all else stays what it was.
fn draw_replicas(seed: u64, job: &JobSpec) -> u32 {
    let mut rng = Rng::new(elasticdl_spec::mix::mix2(seed, 0xbac2));
    let could = job.servers.count > 1 && !job.is_staged();
    if could && rng.below(3) == 0 { 2 } else { 1 }
}

/// Who gets a row, and how much room there is for rows: for all there are, or for some of them. What several gradients
/// come to where they make a step together cannot be told apart from what was refused. Drawn apart, so that all else
/// stays what it was.
fn draw_tables(seed: u64, kind: Kind) -> TablesSpec {
    let mut rng = Rng::new(elasticdl_spec::mix::mix2(seed, 0xad41));
    if kind == Kind::Synchronous || rng.below(4) > 0 {
        return TablesSpec::default();
    }
    let memory_max = ["24Ki", "1Mi"][rng.below(2) as usize];
    let said = json!({ TABLE: { "admit_after": 1 + rng.below(3), "memory_max": memory_max } });
    serde_json::from_value(said).expect("these are settings of a table")
}

fn draw_shards(rng: &mut Rng, job: &JobSpec, path: &str, count: u64) -> Vec<Shard> {
    let most = job.train.batch as u64 * u64::from(job.data.batches_per_task);
    let mut first = 0;
    let mut shards = Vec::new();
    for _ in 0..count {
        // Like the end of a file, some are short.
        let records = if rng.below(5) == 0 { 1 + rng.below(most) } else { most };
        shards.push(Shard { path: path.into(), first, records: Some(records), offset: 0, fingerprint: 7 });
        first += records;
    }
    shards
}

fn draw_poisoned(rng: &mut Rng, job: &JobSpec, shards: &[Shard]) -> BTreeSet<(TaskId, u64)> {
    let count = if rng.below(4) == 0 { 1 + rng.below(3) } else { 0 };
    let mut poisoned = BTreeSet::new();
    for _ in 0..count {
        let shard = rng.below(shards.len() as u64) as u32;
        let records = shards[shard as usize].records.unwrap_or(1);
        let batch = rng.below(records.div_ceil(job.train.batch as u64));
        poisoned.insert((TaskId::train(rng.below(job.train.epochs.into()) as u32, shard), batch));
    }
    poisoned
}

/// So long that the job lasts for some seconds.
fn draw_compute(rng: &mut Rng, job: &JobSpec, workers: u32, shards: &[Shard]) -> Duration {
    let batches = shards.len() as f64 * f64::from(job.data.batches_per_task) * f64::from(job.train.epochs);
    let wanted = 2.0 + 8.0 * rng.uniform();
    Duration::from_secs_f64((wanted * f64::from(workers) / batches).clamp(0.002, 0.6))
}

fn draw_net(rng: &mut Rng, workers: u32) -> Net {
    let slow = if workers > 60 { 40 } else { 1 };
    let mut share = |most: f64| if rng.below(3) == 0 { 0.0 } else { most * rng.uniform().powi(2) };
    let (loss, twice, late) = (share(0.06), share(0.08), share(0.03));
    let (cut, stray) = (share(0.04), share(0.1));
    Net {
        base: Duration::from_micros(slow * (200 + rng.below(800))),
        jitter: Duration::from_micros(slow * (100 + rng.below(4000))),
        loss,
        twice,
        late,
        late_max: seconds(rng, 0.5, 8.0),
        cut,
        stray,
        same_address: rng.below(2) == 0,
    }
}

fn draw_disk(rng: &mut Rng) -> DiskRates {
    DiskRates {
        sync: Duration::from_micros(300 + rng.below(15_000)),
        fail: if rng.below(3) == 0 { 0.2 * rng.uniform() } else { 0.0 },
        loses: rng.uniform(),
    }
}

fn draw_faults(rng: &mut Rng, heal: Duration) -> Vec<(Duration, Fault)> {
    // Each seed has its own taste, so that some combinations come often.
    let weights: Vec<u64> = (0..14).map(|_| [0, 0, 1, 2, 6][rng.below(5) as usize]).collect();
    let total: u64 = weights.iter().sum();
    let count = if rng.below(20) == 0 { 0 } else { 1 + rng.below(16) };
    let mut faults = Vec::new();
    for _ in 0..count {
        let at = heal.mul_f64(rng.uniform() * 0.95);
        let mut draw = rng.below(total.max(1));
        let kind = weights.iter().position(|weight| {
            let hit = draw < *weight;
            draw = draw.saturating_sub(*weight);
            hit
        });
        faults.push((at, fault(rng, kind.unwrap_or(0))));
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}

fn fault(rng: &mut Rng, kind: usize) -> Fault {
    let long = |rng: &mut Rng| seconds(rng, 0.2, 9.0);
    match kind {
        0 => Fault::CrashWorker,
        1 => Fault::CrashServer,
        2 => Fault::CrashMaster,
        3 => Fault::PauseWorker(long(rng)),
        4 => Fault::PauseServer(long(rng)),
        5 => Fault::PauseMaster(seconds(rng, 0.1, 5.0)),
        6 => Fault::SecondMaster(long(rng)),
        7 => Fault::CutWorker(seconds(rng, 1.0, 14.0)),
        8 => Fault::CutServer(long(rng)),
        9 => Fault::Scale,
        10 => Fault::Stop,
        11 => Fault::DiskSlow(long(rng)),
        12 => Fault::DiskFails(seconds(rng, 0.1, 2.0)),
        _ => Fault::LedgerFails,
    }
}

/// A time between two, in seconds.
pub fn seconds(rng: &mut Rng, least: f64, most: f64) -> Duration {
    Duration::from_secs_f64(least + (most - least) * rng.uniform())
}
