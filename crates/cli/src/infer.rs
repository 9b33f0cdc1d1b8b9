//! Scores records with an exported model: any number of threads, the order of the input, bounded memory.
//!
//! Files are cut into shards; each shard has a short queue of its own that its thread fills and the caller
//! empties, shard by shard. A thread that is ahead waits at its queue, so that nothing piles up.

use std::num::NonZero;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::Context;
use elasticdl_data::{BadRecord, Batch, Batches, BatchesConfig, DataFile, cut, discover};
use elasticdl_nn::{Input, Model, TableInput};
use elasticdl_spec::job::Format;
use elasticdl_spec::{Layout, Shard, TaskId};

use crate::args::{self, ModelAndData};
use crate::fault::Fault;
use crate::model::Trained;

/// Records that are scored together.
const BATCH: usize = 4096;
/// Records of a shard: the unit that threads share out.
const SHARD: u64 = 16 * BATCH as u64;
/// Scored batches that wait in a shard's queue.
const QUEUE: usize = 8;

/// What happens to records that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bad {
    /// The first one is an error.
    Fail,
    /// They are counted.
    Skip,
    /// They are counted, and their place is kept with a NaN.
    Mark,
}

/// Some records, scored, in the order of the input.
#[derive(Debug, Default)]
pub struct Scored {
    /// How likely each record's label is 1.
    pub probabilities: Vec<f32>,
    /// The labels; not kept with [`Bad::Mark`].
    pub labels: Vec<f32>,
    /// Records that could not be read.
    pub bad: u64,
}

/// A model, the files to score, and how.
pub struct Job {
    /// The model.
    pub trained: Trained,
    /// The files, in order.
    pub files: Vec<DataFile>,
    layout: Arc<Layout>,
    format: Option<Format>,
    threads: usize,
    bad: Bad,
}

impl Job {
    /// Opens the model and finds the files.
    pub fn open(args: &ModelAndData, bad: Bad) -> anyhow::Result<Job> {
        let trained = Trained::open(&args.model)?;
        let format = args.format.map(args::Format::to_spec);
        // File by file, so that they stay in the order in which the person named them.
        let mut files = Vec::new();
        for pattern in &args.data {
            files.extend(discover(std::slice::from_ref(pattern), format)?);
        }
        let layout = Arc::new(trained.manifest.layout.clone());
        let cores = || thread::available_parallelism().map_or(1, NonZero::get);
        let threads = args.threads.unwrap_or_else(cores).max(1);
        Ok(Job { trained, files, layout, format, threads, bad })
    }

    /// The records come without the label's column.
    pub fn without_label(mut self) -> Job {
        self.layout = Arc::new(self.layout.without_label());
        self
    }

    /// Scores everything; `each` gets the batches in the order of the input.
    pub fn run(&self, each: &mut dyn FnMut(Scored) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let index = tempfile::tempdir().context("making a directory for the index")?;
        let (work_in, work) = sync_channel(2 * self.threads);
        let (order_in, order) = sync_channel(2 * self.threads);
        let work = Mutex::new(work);
        thread::scope(|scope| {
            scope.spawn(move || self.cut(index.path(), &work_in, &order_in));
            for _ in 0..self.threads {
                scope.spawn(|| self.work(&work));
            }
            // Where this ends early, the queues close and the threads end with their next batch.
            for shard in order {
                for scored in shard? {
                    each(scored?)?;
                }
            }
            Ok(())
        })
    }

    /// Hands out the shards of all files: to a thread with one end of a queue, to the caller with the other.
    fn cut(
        &self,
        index: &Path,
        work: &SyncSender<(Shard, Queue)>,
        order: &SyncSender<anyhow::Result<Receiver<anyhow::Result<Scored>>>>,
    ) {
        for file in &self.files {
            let mut wanted = true;
            let outcome = cut(file, &self.layout, SHARD, index, &mut |shard| {
                let (queue, scored) = sync_channel(QUEUE);
                wanted = wanted && order.send(Ok(scored)).is_ok() && work.send((shard, queue)).is_ok();
            });
            if let Err(error) = outcome {
                // Where nobody listens any more, somebody else has failed before.
                let _ = order.send(Err(error.into()));
                return;
            }
            if !wanted {
                return;
            }
        }
    }

    fn work(&self, work: &Mutex<Receiver<(Shard, Queue)>>) {
        let mut scorer = match Scorer::new(&self.trained) {
            Ok(scorer) => Ok(scorer),
            Err(error) => Err(format!("{error:#}")),
        };
        loop {
            let next = work.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok((shard, queue)) = next else { return };
            let outcome = match &mut scorer {
                Ok(scorer) if self.bad == Bad::Mark => self.marked(shard, scorer, &queue),
                Ok(scorer) => self.shard(shard, scorer, &queue),
                Err(error) => Err(anyhow::anyhow!("{error}")),
            };
            if let Err(error) = outcome {
                let _ = queue.send(Err(error));
            }
        }
    }

    fn batches(&self, shard: Shard, batch: usize) -> anyhow::Result<Batches> {
        Ok(Batches::open(BatchesConfig {
            task: TaskId::evaluate(0, 0),
            shard,
            layout: self.layout.clone(),
            format: self.format,
            batch,
            batches_per_block: 1,
            shuffle: false,
            seed: 0,
            first_batch: 0,
        })?)
    }

    /// Scores a shard batch by batch.
    fn shard(&self, shard: Shard, scorer: &mut Scorer<'_>, queue: &Queue) -> anyhow::Result<()> {
        let mut batches = self.batches(shard, BATCH)?;
        while let Some((_, batch, bad)) = batches.next()? {
            if let (Some(first), Bad::Fail) = (bad.first(), self.bad) {
                return Err(refuse(first).into());
            }
            let mut scored = Scored { bad: bad.len() as u64, ..Scored::default() };
            scorer.score(&batch, &mut scored.probabilities);
            scored.labels = batch.labels;
            if queue.send(Ok(scored)).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Scores a shard record by record, so that each bad one has its place.
    fn marked(&self, shard: Shard, scorer: &mut Scorer<'_>, queue: &Queue) -> anyhow::Result<()> {
        let mut records = self.batches(shard, 1)?;
        let mut good = Batch::default();
        let mut places: Vec<bool> = Vec::new();
        loop {
            let next = records.next()?;
            if next.is_none() || places.len() == BATCH {
                let mut scores = Vec::new();
                scorer.score(&good, &mut scores);
                let mut scores = scores.into_iter();
                let mut fill = |good: &bool| if *good { scores.next() } else { None }.unwrap_or(f32::NAN);
                let probabilities: Vec<f32> = places.iter().map(&mut fill).collect();
                let bad = places.iter().filter(|good| !**good).count() as u64;
                if queue.send(Ok(Scored { probabilities, labels: Vec::new(), bad })).is_err() {
                    return Ok(());
                }
                good = Batch::default();
                places.clear();
            }
            let Some((_, record, _)) = next else { return Ok(()) };
            places.push(record.records == 1);
            good.records += record.records;
            good.labels.extend(record.labels);
            good.numeric.extend(record.numeric);
            good.ids.extend(record.ids);
        }
    }
}

/// Where a shard's scored batches go.
type Queue = SyncSender<anyhow::Result<Scored>>;

/// A record that cannot be read, as an error.
fn refuse(bad: &BadRecord) -> Fault {
    Fault::user(bad.to_string()).hint("mend the file, or pass --skip-bad to go on without such records")
}

/// A model in the hands of one thread.
struct Scorer<'a> {
    trained: &'a Trained,
    model: Box<dyn Model>,
    /// By table: the row of each id of the batch.
    positions: Vec<Vec<u32>>,
}

impl<'a> Scorer<'a> {
    fn new(trained: &'a Trained) -> anyhow::Result<Self> {
        let manifest = &trained.manifest;
        let (numeric, categorical) = (manifest.layout.numeric.len(), manifest.layout.categorical.len());
        let mut model = elasticdl_nn::build(&manifest.model, numeric, categorical)?;
        if *model.shape() != manifest.shape {
            let what =
                format!("this program's {} has other tensors than the exported one", manifest.model.zoo);
            return Err(Fault::user(what).hint("use the version that exported it, or train it again").into());
        }
        let tensors: Vec<&[f32]> = trained.tensors.iter().map(Vec::as_slice).collect();
        model.load(&tensors);
        Ok(Scorer { trained, model, positions: vec![Vec::new(); trained.tables.len()] })
    }

    fn score(&mut self, batch: &Batch, probabilities: &mut Vec<f32>) {
        let mut tables = Vec::with_capacity(self.positions.len());
        for (rows, positions) in self.trained.tables.iter().zip(&mut self.positions) {
            positions.clear();
            positions.extend(batch.ids.iter().map(|id| rows.position(*id)));
            tables.push(TableInput { rows: rows.weights(), index: positions });
        }
        let input = Input { records: batch.records, numeric: &batch.numeric, labels: &[], tables: &tables };
        self.model.predict(&input, probabilities);
    }
}
