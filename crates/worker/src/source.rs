//! Where a task's batches come from: the job's files, or a test.

use std::sync::Arc;

use elasticdl_data::{BadRecord, Batch, Batches, BatchesConfig, Result};
use elasticdl_spec::{Layout, Plan, Purpose};

use crate::task::LeasedTask;

/// The batches of one task, in order.
pub trait Stream {
    /// The next batch: its index, its records, and records set aside. See [`Batches::next`].
    fn next(&mut self) -> Result<Option<(u64, Batch, Vec<BadRecord>)>>;
}

/// Opens tasks.
pub trait Source: Send {
    /// The task's batches from the first one.
    fn open(&mut self, task: &LeasedTask) -> Result<Box<dyn Stream>>;
}

impl Stream for Batches {
    fn next(&mut self) -> Result<Option<(u64, Batch, Vec<BadRecord>)>> {
        Batches::next(self)
    }
}

/// The files of the job.
#[derive(Debug)]
pub struct Files {
    plan: Arc<Plan>,
    layout: Arc<Layout>,
}

impl Files {
    /// The files of the plan's job.
    pub fn new(plan: Arc<Plan>) -> Self {
        let layout = Arc::new(plan.job.data.layout.clone());
        Files { plan, layout }
    }
}

impl Source for Files {
    fn open(&mut self, task: &LeasedTask) -> Result<Box<dyn Stream>> {
        let job = &self.plan.job;
        let batches = Batches::open(BatchesConfig {
            task: task.claim.task,
            shard: task.shard.clone(),
            layout: Arc::clone(&self.layout),
            format: job.data.format,
            batch: job.train.batch,
            batches_per_block: job.data.batches_per_task,
            // Whoever evaluates wants the same records, and in no particular order.
            shuffle: job.data.shuffle && task.purpose() == Purpose::Train,
            seed: job.train.seed,
            // From the first one even where marks are further on: the good records of the whole task are
            // reported when it is done, and only reading tells them from the bad ones.
            first_batch: 0,
        })?;
        Ok(Box::new(batches))
    }
}
