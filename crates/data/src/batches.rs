//! A shard becomes batches: the same ones for whoever reads it.

use std::sync::Arc;

use elasticdl_spec::job::Format;
use elasticdl_spec::mix::{Rng, mix2};
use elasticdl_spec::{Layout, Shard, TaskId};

use crate::batch::Batch;
use crate::error::{BadRecord, Error, Result};
use crate::reader::ShardReader;

/// What a task's batches are made from.
#[derive(Debug, Clone)]
pub struct BatchesConfig {
    /// The task; it seeds the shuffle.
    pub task: TaskId,
    /// Its records.
    pub shard: Shard,
    /// What the columns mean.
    pub layout: Arc<Layout>,
    /// `data.format`; `None`: by file name.
    pub format: Option<Format>,
    /// Records per batch.
    pub batch: usize,
    /// Batches per block: a block is what is held in memory and shuffled at once.
    pub batches_per_block: u32,
    /// Whether records are permuted inside a block.
    pub shuffle: bool,
    /// The job's seed.
    pub seed: u64,
    /// The first batch to yield: blocks before its own are skipped without being decoded.
    pub first_batch: u64,
}

/// The batches of one task, in order.
///
/// Batch `k` is a pure function of (task, seed, shard): block `k / batches_per_block` is the next
/// `batch · batches_per_block` records of the file, permuted when `shuffle`, cut into batches. A
/// shard of n records has exactly ⌈n / batch⌉ batches, bad records or not: records set aside make
/// the last batches of their block short, even empty, and never move a record to another block.
#[derive(Debug)]
pub struct Batches {
    config: BatchesConfig,
    reader: ShardReader,
    /// The block in hand: its good records, and the order in which they are handed out.
    block: Batch,
    order: Vec<u32>,
    /// The next batch, and the one behind the last of the block in hand.
    next: u64,
    block_end: u64,
    at_end: bool,
}

impl Batches {
    /// Opens the shard at its first record. A file that changed since the shard was cut is an error.
    pub fn open(config: BatchesConfig) -> Result<Self> {
        if config.batch == 0 || config.batches_per_block == 0 {
            return Err(Error::Options(
                "a batch needs at least one record, a block at least one batch".into(),
            ));
        }
        let block_records = config.batch as u64 * u64::from(config.batches_per_block);
        if block_records > u64::from(u32::MAX) {
            return Err(Error::Options(format!("a block of {block_records} records is too large")));
        }
        let block = config.first_batch / u64::from(config.batches_per_block);
        let skip = block.saturating_mul(block_records);
        let reader = ShardReader::open(&config.shard, &config.layout, config.format, skip)?;
        let block_end = block * u64::from(config.batches_per_block);
        Ok(Batches {
            next: config.first_batch,
            config,
            reader,
            block: Batch::default(),
            order: Vec::new(),
            block_end,
            at_end: false,
        })
    }

    /// The next batch: its index in the task, its records, and the records of its block that had to
    /// be set aside (told once, with the first batch of the block). `None` at the end of the shard.
    ///
    /// Where `first_batch` is not the first of its block, that block's bad records are not told: whoever
    /// had the first batch was told.
    #[expect(
        clippy::should_implement_trait,
        reason = "a failed read ends the shard; no iterator adapters wanted"
    )]
    pub fn next(&mut self) -> Result<Option<(u64, Batch, Vec<BadRecord>)>> {
        let mut bad = Vec::new();
        while self.next >= self.block_end {
            if self.at_end {
                return Ok(None);
            }
            bad = self.read_block()?;
        }
        let at = self.next;
        self.next += 1;
        let in_block = (at % u64::from(self.config.batches_per_block)) as usize;
        if in_block != 0 {
            bad.clear();
        }
        let from = (in_block * self.config.batch).min(self.order.len());
        let to = (from + self.config.batch).min(self.order.len());
        let layout = &self.config.layout;
        let batch = self.block.gather(&self.order[from..to], layout.numeric.len(), layout.categorical.len());
        Ok(Some((at, batch, bad)))
    }

    /// Reads the block that starts at batch `block_end`, and permutes it.
    fn read_block(&mut self) -> Result<Vec<BadRecord>> {
        let config = &self.config;
        let records = config.batch * config.batches_per_block as usize;
        let mut bad = Vec::new();
        self.block.clear();
        let taken = self.reader.read(records, &mut self.block, &mut bad)?;
        self.at_end = taken < records;
        self.order.clear();
        self.order.extend(0..self.block.records as u32);
        if config.shuffle {
            let block = self.block_end / u64::from(config.batches_per_block);
            let seed = mix2(mix2(config.seed, config.task.as_u64()), block);
            Rng::new(seed).shuffle(&mut self.order);
        }
        self.block_end += taken.div_ceil(config.batch) as u64;
        Ok(bad)
    }
}
