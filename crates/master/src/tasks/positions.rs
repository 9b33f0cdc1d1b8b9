//! Where tasks stand in the nominal order of a job: a pure function of shards, order and epoch, so that a task
//! that is leased again stands where it stood, whoever leads the job by then.

use elasticdl_spec::{Shard, TaskId};

/// Positions of the tasks of one epoch. Another epoch takes the room of this one when it is asked for: tasks of one are leased
/// before those of the next, and what is replayed is little.
#[derive(Debug, Default)]
pub(super) struct Positions {
    epoch: Option<u32>,
    /// By shard: batches of the epoch before the first one of its task.
    before: Vec<u64>,
    per_epoch: u64,
}

impl Positions {
    /// Batches of the job before the first one of `task`; `key` orders the tasks of an epoch.
    pub fn first(&mut self, task: TaskId, shards: &[Shard], batch: u64, key: impl Fn(TaskId) -> u64) -> u64 {
        if self.epoch != Some(task.epoch) {
            self.begin(task.epoch, shards, batch, key);
        }
        u64::from(task.epoch) * self.per_epoch + self.before[task.shard as usize]
    }

    /// Batches of an epoch, known once a position was asked for.
    pub fn per_epoch(&self) -> u64 {
        self.per_epoch
    }

    fn begin(&mut self, epoch: u32, shards: &[Shard], batch: u64, key: impl Fn(TaskId) -> u64) {
        let mut order: Vec<u32> = (0..shards.len() as u32).collect();
        order.sort_unstable_by_key(|shard| (key(TaskId::train(epoch, *shard)), *shard));
        self.before = vec![0; shards.len()];
        self.per_epoch = 0;
        for shard in order.into_iter().map(|shard| shard as usize) {
            self.before[shard] = self.per_epoch;
            // Shards of unknown length are refused when they are found (see `shards.rs`).
            self.per_epoch += shards[shard].records.unwrap_or(0).div_ceil(batch);
        }
        self.epoch = Some(epoch);
    }
}
