//! The stages over sockets while connections break and partitions die and come back: whatever happens, every
//! partition applies every batch exactly once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use elasticdl_spec::mix::Rng;
use elasticdl_spec::{PartitionId, TablesSpec, TaskId};
use elasticdl_wire::Token;
use tokio::sync::mpsc::unbounded_channel;

use crate::gauges::Gauges;
use crate::pipeline::{Config, Event, Outcome, Pipeline};
use crate::ps_client::{self, Directory, Place, Places, PsClient};
use crate::stop::Stop;
use crate::tests::{
    self as fake, FakeServer, Fault, PARTITIONS, ToyModel, ToySource, Trouble, World, leased,
};

const TOKEN: &str = "0123456789abcdef";
const BATCHES: u64 = 7;
const TASKS: u32 = 6;

/// Partitions dealt to servers in turn, with the incarnations of the moment.
struct Now {
    world: Arc<Mutex<World>>,
    addresses: Vec<String>,
}

impl Places for Now {
    fn places(&self) -> elasticdl_wire::Result<Vec<(PartitionId, Place)>> {
        let world = self.world.lock().unwrap();
        let place = |p: u32| {
            let incarnation = world.partitions[p as usize].incarnation;
            let address = self.addresses[p as usize % self.addresses.len()].clone();
            (PartitionId(p), Place { incarnation, address })
        };
        Ok((0..PARTITIONS).map(place).collect())
    }
}

/// Connections that break in one of ten requests, and some saves and deaths.
fn trouble(rng: &mut Rng, world: &mut World, servers: &[FakeServer]) {
    for server in servers {
        let faults: Vec<Fault> = (0..100)
            .map(|_| match rng.below(30) {
                0 => Fault::CloseBefore,
                1 => Fault::CloseAfter,
                2 => Fault::NotHere,
                _ => Fault::None,
            })
            .collect();
        server.inject(&faults);
    }
    for _ in 0..4 {
        world.troubles.insert(1 + rng.below(120), Trouble::Save);
        world.troubles.insert(1 + rng.below(120), Trouble::Kill(rng.below(u64::from(PARTITIONS)) as usize));
    }
}

/// Tasks that some partition lacks a batch of: what a master leases again.
fn unfinished(world: &World) -> BTreeSet<TaskId> {
    let all = (0..TASKS).map(|shard| TaskId::train(0, shard));
    let lacks = |task: &TaskId| {
        world.partitions.iter().any(|p| p.marks.get(task).is_none_or(|(_, mark)| *mark < BATCHES))
    };
    all.filter(lacks).collect()
}

/// Runs all tasks, and those that a death undid, until no partition lacks anything.
fn train(world: &Arc<Mutex<World>>, servers: &[FakeServer], depth: usize) -> u64 {
    let addresses = servers.iter().map(|s| s.address.clone()).collect();
    let places = Now { world: Arc::clone(world), addresses };
    let stop = Stop::default();
    let client = ps_client::Config {
        shape: Arc::new(fake::shape()),
        tables: TablesSpec::default(),
        partitions: PARTITIONS,
        directory: Arc::new(Directory::new(PARTITIONS, Box::new(places))),
        token: Token::new(TOKEN).unwrap(),
        identity: None,
        worker: 1,
        staged: false,
        stop: stop.clone(),
    };
    let (events, mut happening) = unbounded_channel();
    let mut stages = Pipeline::start(Config {
        shape: Arc::new(fake::shape()),
        partitions: PARTITIONS,
        depth,
        together: crate::pipeline::Together::Freely,
        read_ahead: 3,
        bad_records_max: 0,
        schedule: elasticdl_spec::Schedule::default(),
        clip: elasticdl_spec::job::ClipSpec::default(),
        models: vec![ToyModel::boxed(), ToyModel::boxed()],
        source: Box::new(ToySource { batches: BATCHES, spoil: BTreeMap::new() }),
        pulls: Box::new(PsClient::new(client.clone())),
        pushes: Box::new(PsClient::new(client)),
        stop,
        gauges: Arc::new(Gauges::default()),
        events,
    })
    .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let mut waiting: Vec<TaskId> = unfinished(&world.lock().unwrap()).into_iter().collect();
    let (mut wanted, mut held, mut leases) = (false, 0, 0);
    while !(waiting.is_empty() && held == 0) {
        let deadline = Duration::from_secs(60);
        let event = runtime.block_on(async { tokio::time::timeout(deadline, happening.recv()).await });
        match event.expect("an event in time").expect("the stages run") {
            Event::Wanted => wanted = true,
            Event::Ended { outcome, .. } => {
                assert!(matches!(outcome, Outcome::Done { .. }), "{outcome:?}");
                held -= 1;
            }
            Event::Broken(error) => panic!("{error}"),
            _ => {}
        }
        if waiting.is_empty() && held == 0 {
            waiting.extend(unfinished(&world.lock().unwrap()));
        }
        if wanted && held < 2 && !waiting.is_empty() {
            leases += 1;
            stages.give(leased(waiting.remove(0), leases));
            (wanted, held) = (false, held + 1);
        }
    }
    stages.close();
    while happening.blocking_recv().is_some() {}
    stages.join();
    leases
}

#[test]
fn every_partition_applies_every_batch_once_whatever_breaks() {
    let mut leases = 0;
    for seed in 0..12 {
        let mut rng = Rng::new(seed);
        let world = World::shared();
        let servers = [FakeServer::start(&world, TOKEN), FakeServer::start(&world, TOKEN)];
        trouble(&mut rng, &mut world.lock().unwrap(), &servers);
        leases += train(&world, &servers, 1 + seed as usize % 4);
        let expected: Vec<(TaskId, u64)> =
            (0..TASKS).flat_map(|shard| (0..BATCHES).map(move |b| (TaskId::train(0, shard), b))).collect();
        for partition in &world.lock().unwrap().partitions {
            let mut applied = partition.applied.clone();
            applied.sort_unstable();
            assert_eq!(applied, expected, "seed {seed}");
        }
    }
    assert!(leases > 12 * u64::from(TASKS), "no death ever undid a finished task: the test is too tame");
}
