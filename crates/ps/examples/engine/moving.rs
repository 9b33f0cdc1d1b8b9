//! A third server takes its share of 2 GiB over from two: at rest, beside as many bytes over a connection, and while rows
//! are pulled and pushed as fast as can be.

#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock and waits")]

use std::error::Error;
use std::net::TcpListener;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use elasticdl_ps::audit::Tally;
use elasticdl_ps::moving::{Order, Word, fetch};
use elasticdl_ps::server::{Options, Server};
use elasticdl_ps::{Model, Partition, Partitions};
use elasticdl_spec::PartitionId;
use elasticdl_wire::Token;
use elasticdl_wire::connection::{Caller, Who};
use serde_json::{Value, json};

use crate::checkpoint::{DIM, bear};
use crate::memory::ADAGRAD;
use crate::raw::Raw;
use crate::served::hold;
use crate::table::{PARTITIONS, median};
use crate::trainers::{Served, Stretch, Trainers};

const TOKEN: &str = "engine-0123456789";
/// Weights and slots of a row, and its id.
const ROW_BYTES: usize = 2 * DIM * 4 + 8;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A server with what it holds.
struct Place {
    partitions: Arc<Partitions>,
    server: Server,
}

impl Place {
    fn start(partitions: Arc<Partitions>) -> Result<Arc<Place>> {
        let (listener, token) = (TcpListener::bind("127.0.0.1:0")?, Token::new(TOKEN)?);
        let server = Server::start(listener, token, None, Arc::clone(&partitions), Options::default())?;
        Ok(Arc::new(Place { partitions, server }))
    }
}

/// Where each partition is, and in which life.
type Places = RwLock<Vec<(Arc<Place>, u64)>>;

/// A move under load: its seconds, and what trainers did before, during and after it.
type Loaded = (f64, Stretch, Stretch, Stretch);

/// Moves so many times there and back at rest, and then so many times under load.
pub fn run(pairs: usize, rows: usize, rounds: usize) -> Result<Value> {
    let (model, all) = hold(DIM, ADAGRAD);
    bear(&all, rows)?;
    let servers = dealt(&model, all)?;
    let third = Place::start(Arc::new(Partitions::new(Arc::clone(&model))))?;
    let places: Vec<_> = (0..PARTITIONS).map(|p| (Arc::clone(&servers[p as usize % 2]), 1)).collect();
    let places = Arc::new(RwLock::new(places));
    // A share of eight partitions for three: one from each.
    let share = [0, 1].map(PartitionId);
    let bytes: usize = rows_of(&places, share)? * ROW_BYTES;
    let mut raw = Raw::connect(1 << 20)?;
    raw.receive(bytes)?;
    let mut idle = Vec::new();
    for _ in 0..pairs {
        let there = move_all(&model, &places, share, |_| Arc::clone(&third))?;
        idle.push((there, bytes as f64 / raw.receive(bytes)?));
        move_all(&model, &places, share, |p| Arc::clone(&servers[p.0 as usize % 2]))?;
    }
    let of = |f: &dyn Fn(&(f64, f64)) -> f64| median(idle.iter().map(f).collect());
    let (seconds, loopback, times) = (of(&|i| i.0), of(&|i| i.1), of(&|i| i.0 / i.1));

    let trainers = Trainers::start(&places, rows)?;
    let mut loaded: Vec<Loaded> = Vec::new();
    for _ in 0..rounds {
        let before = trainers.alone();
        let mut moved = Ok(0.0);
        let during = trainers.during(|| moved = move_all(&model, &places, share, |_| Arc::clone(&third)));
        let after = trainers.alone();
        loaded.push((moved?, before, during, after));
        move_all(&model, &places, share, |p| Arc::clone(&servers[p.0 as usize % 2]))?;
    }
    let due = trainers.end();
    let wrong = wrong(&places, due)?;
    let of = |f: &dyn Fn(&Loaded) -> f64| median(loaded.iter().map(f).collect());
    let most = |f: &dyn Fn(&Loaded) -> f64| loaded.iter().map(f).fold(0.0, f64::max);
    Ok(json!({
        "rows": rows, "pairs": pairs, "rounds": rounds, "megabytes": bytes as f64 / 1e6,
        "idle": { "seconds": seconds, "loopback_seconds": loopback, "times_loopback": times },
        "loaded": {
            "seconds": of(&|l| l.0),
            "training_lost": of(&|l| 1.0 - 2.0 * l.2.rows_per_second / (l.1.rows_per_second + l.3.rows_per_second)),
            "longest_pull_ms": most(&|l| l.2.longest_ms),
            "longest_pull_ms_alone": most(&|l| l.1.longest_ms.max(l.3.longest_ms)),
            "longest_pull_ms_more": most(&|l| l.2.longest_ms - l.1.longest_ms.max(l.3.longest_ms)),
            "batches": due.batches, "partitions_wrong": wrong,
        },
    }))
}

/// Two servers, each with half of the partitions.
fn dealt(model: &Arc<Model>, all: Arc<Partitions>) -> Result<[Arc<Place>; 2]> {
    let first = Place::start(all)?;
    let second = Place::start(Arc::new(Partitions::new(Arc::clone(model))))?;
    let order = Order {
        from: first.server.address().to_string(),
        partitions: (0..PARTITIONS).filter(|p| p % 2 == 1).map(|p| (PartitionId(p), 1)).collect(),
        next: vec![1; PARTITIONS as usize / 2],
    };
    fetched(&order, model)?.into_iter().for_each(|partition| second.partitions.open(partition));
    Ok([first, second])
}

/// How many partitions have not counted each batch once, wherever they were meanwhile.
fn wrong(places: &Places, due: Tally) -> Result<usize> {
    let places = places.read().unwrap_or_else(PoisonError::into_inner);
    let counted = (0..PARTITIONS).map(PartitionId).zip(&*places).map(|(id, (place, _))| {
        place.partitions.with(id, |partition| partition.memory().audit.epochs().get(&0).copied())
    });
    let counted: Option<Vec<_>> = counted.collect();
    let counted = counted.ok_or("a partition is gone")?;
    Ok(counted.into_iter().filter(|counted| *counted != Some(due)).count())
}

fn rows_of(places: &Places, share: [PartitionId; 2]) -> Result<usize> {
    let places = places.read().unwrap_or_else(PoisonError::into_inner);
    let rows = |id: PartitionId| {
        places[id.0 as usize].0.partitions.with(id, |p| p.tables()[0].len()).ok_or("a partition is gone")
    };
    Ok(rows(share[0])? + rows(share[1])?)
}

fn fetched(order: &Order, model: &Arc<Model>) -> Result<Vec<Partition>> {
    let caller = Caller { token: Token::new(TOKEN)?, identity: None, who: Who::Server(2) };
    let fetched = fetch(order, model, &caller, &AtomicBool::new(false), || Ok(Word::Take))?;
    Ok(fetched.ok_or("the master has said take")?)
}

/// Seconds that it takes to move these, one after the other.
fn move_all(
    model: &Arc<Model>,
    places: &Places,
    share: [PartitionId; 2],
    to: impl Fn(PartitionId) -> Arc<Place>,
) -> Result<f64> {
    let start = Instant::now();
    for id in share {
        let (from, life) = places.read().unwrap_or_else(PoisonError::into_inner)[id.0 as usize].clone();
        let order = Order {
            from: from.server.address().to_string(),
            partitions: vec![(id, life)],
            next: vec![life + 1],
        };
        let place = to(id);
        fetched(&order, model)?.into_iter().for_each(|partition| place.partitions.open(partition));
        places.write().unwrap_or_else(PoisonError::into_inner)[id.0 as usize] = (place, life + 1);
    }
    Ok(start.elapsed().as_secs_f64())
}

impl Served for Places {
    /// After a pause where the partition has gone elsewhere.
    fn on<T>(&self, id: PartitionId, mut work: impl FnMut(&mut Partition, u64) -> Option<T>) -> T {
        loop {
            let (place, life) = self.read().unwrap_or_else(PoisonError::into_inner)[id.0 as usize].clone();
            if let Some(Some(done)) = place.partitions.with(id, |partition| work(partition, life)) {
                return done;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}
