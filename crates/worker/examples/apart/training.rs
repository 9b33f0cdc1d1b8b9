//! A worker's stages on batches that are in memory, and how many records they train on in a second.

#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticdl_data::{BadRecord, Batch};
use elasticdl_spec::{LeaseId, Shard, TaskId};
use elasticdl_worker::gauges::Gauges;
use elasticdl_worker::pipeline::{Config, Event, Outcome, Pipeline, Together};
use elasticdl_worker::source::{Source, Stream};
use elasticdl_worker::stop::{Level, Stop};
use elasticdl_worker::store::Store;
use elasticdl_worker::task::{Claim, Leased, LeasedTask};
use tokio::sync::mpsc::unbounded_channel;

use crate::Result;
use crate::job::Job;

/// Batches that pass before the clock starts: until then not all stages have work.
const BEFORE: usize = 8;

/// Makes what pulls and what pushes, which may wait until they are told to stop.
pub type Stores = Box<dyn Fn(&Stop) -> [Box<dyn Store>; 2]>;

/// A job that goes on from stretch to stretch.
pub struct Training {
    job: Arc<Job>,
    batches: Arc<[Batch]>,
    stores: Stores,
    tasks: u32,
}

impl Training {
    pub fn new(job: &Arc<Job>, batches: &Arc<[Batch]>, stores: Stores) -> Training {
        Training { job: Arc::clone(job), batches: Arc::clone(batches), stores, tasks: 0 }
    }

    /// Trains on every batch once.
    pub fn once(&mut self) -> Result<()> {
        let mut left = self.batches.len();
        self.train(|_| {
            left -= 1;
            left > 0
        })
    }

    /// Trains for so long, and tells how fast.
    pub fn records_per_second(&mut self, time: Duration) -> Result<f64> {
        let (mut before, mut start, mut records, mut took) = (BEFORE, Instant::now(), 0, Duration::ZERO);
        self.train(|applied| {
            if before > 0 {
                before -= 1;
                start = Instant::now();
            } else {
                records += applied;
                took = start.elapsed();
            }
            took < time
        })?;
        Ok(records as f64 / took.as_secs_f64())
    }

    /// Trains until whoever hears of each batch's records has enough.
    fn train(&mut self, mut goes_on: impl FnMut(u64) -> bool) -> Result<()> {
        let (stop, (events, mut happening)) = (Stop::default(), unbounded_channel());
        let spec = &self.job.spec;
        let [pulls, pushes] = (self.stores)(&stop);
        let mut stages = Pipeline::start(Config {
            shape: Arc::clone(&self.job.shape),
            partitions: spec.servers.partitions,
            depth: spec.pipeline_depth(),
            read_ahead: spec.data.batches_per_task as usize,
            together: Together::Freely,
            bad_records_max: 0,
            schedule: spec.train.schedule,
            clip: spec.train.clip,
            models: self.job.models()?,
            source: Box::new(Memory(Arc::clone(&self.batches))),
            pulls,
            pushes,
            stop: stop.clone(),
            gauges: Arc::new(Gauges::default()),
            events,
        })?;
        loop {
            match happening.blocking_recv().ok_or("the stages have ended")? {
                Event::Wanted => {
                    self.tasks += 1;
                    stages.give(task(self.tasks));
                }
                Event::Applied { records, .. } if !goes_on(records) => break,
                Event::Ended { outcome: Outcome::Done { .. }, .. } | Event::Applied { .. } => {}
                Event::Broken(error) => return Err(error.into()),
                other => return Err(format!("training goes wrong: {other:?}").into()),
            }
        }
        // What is in flight lands, so that a batch that counts has been done as a whole.
        stop.raise(Level::Draining);
        stages.close();
        stages.join();
        Ok(())
    }
}

/// A task of its own for each time over the batches.
fn task(number: u32) -> Arc<LeasedTask> {
    let shard = Shard { path: String::new(), first: 0, records: None, offset: 0, fingerprint: 0 };
    let claim = Claim { task: TaskId::train(0, number), lease: LeaseId { term: 1, n: number.into() } };
    Arc::new(LeasedTask::new(Leased::new(claim, shard)))
}

/// Batches that are in memory already.
struct Memory(Arc<[Batch]>);

impl Source for Memory {
    fn open(&mut self, _: &LeasedTask) -> elasticdl_data::Result<Box<dyn Stream>> {
        Ok(Box::new(Batches { all: Arc::clone(&self.0), next: 0 }))
    }
}

struct Batches {
    all: Arc<[Batch]>,
    next: usize,
}

impl Stream for Batches {
    fn next(&mut self) -> elasticdl_data::Result<Option<(u64, Batch, Vec<BadRecord>)>> {
        let index = self.next;
        self.next += 1;
        Ok(self.all.get(index).map(|batch| (index as u64, batch.clone(), Vec::new())))
    }
}
