//! The stages of a worker: read, pull, compute, push, each on threads of its own, with batches flowing
//! from one to the next and the buffers flowing back.
//!
//! A batch between its pull and its acknowledged push holds one of `depth` flights, so no gradient is
//! computed from weights that lack more than `depth - 1` of this worker's own batches; with a depth of 1
//! all goes strictly one after the other. Reading runs ahead of that, across the border to the next task:
//! it sees no weights. Nothing here talks to the master: what happens goes out as [`Event`]s.

mod clip;
mod compute;
mod finite;
mod flight;
mod puller;
mod pusher;
mod reader;
mod steps;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, bounded, unbounded};
use elasticdl_nn::Model;
use elasticdl_spec::job::ClipSpec;
use elasticdl_spec::{ModelShape, Schedule};
use tokio::sync::mpsc::UnboundedSender;

use self::compute::{Compute, Helper};
use self::flight::Flight;
use self::puller::Puller;
use self::pusher::Pusher;
use self::reader::Reader;
use self::steps::Steps;
use crate::error::{Error, Result};
use crate::gauges::Gauges;
use crate::source::Source;
use crate::stop::Stop;
use crate::store::Store;
use crate::task::{Claim, LeasedTask};

/// What a pipeline is made of.
pub struct Config {
    /// The model as the servers see it.
    pub shape: Arc<ModelShape>,
    /// How many partitions the job has.
    pub partitions: u32,
    /// Batches between their pull and their acknowledged push.
    pub depth: usize,
    /// Batches read and not yet pulled.
    pub read_ahead: usize,
    /// How batches of several workers come together.
    pub together: Together,
    /// Malformed records of one task that may be set aside.
    pub bad_records_max: u64,
    /// How the learning rate goes.
    pub schedule: Schedule,
    /// How large a batch's gradient may be.
    pub clip: ClipSpec,
    /// One model per compute thread; a batch is cut into as many parts.
    pub models: Vec<Box<dyn Model>>,
    /// Where records come from.
    pub source: Box<dyn Source>,
    /// Where rows come from.
    pub pulls: Box<dyn Store>,
    /// Where gradients go.
    pub pushes: Box<dyn Store>,
    /// Ends it.
    pub stop: Stop,
    /// Counts what it does.
    pub gauges: Arc<Gauges>,
    /// What happens. The channel closes when the last stage has ended.
    pub events: UnboundedSender<Event>,
}

/// How batches of several workers come together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Together {
    /// As they come.
    Freely,
    /// A batch is pulled only when the gate admits it.
    Gated,
    /// And is staged, to be applied with the others of its step.
    InSteps,
}

/// What happens in the pipeline.
#[derive(Debug)]
pub enum Event {
    /// The reader has nothing to read: another task, please.
    Wanted,
    /// A batch was applied by all partitions, or evaluated.
    Applied {
        /// Whose batch.
        claim: Claim,
        /// Its records.
        records: u64,
        /// The sum of their losses; 0 for an evaluation, whose scores have it.
        loss_sum: f64,
    },
    /// The first rows of a task that was leased before have been pulled.
    Began {
        /// Which task.
        claim: Claim,
    },
    /// Records had to be set aside.
    Bad {
        /// Whose records.
        claim: Claim,
        /// All of the task's, as far as read.
        total: u64,
        /// The first of them.
        examples: Vec<String>,
    },
    /// Nothing more happens to this task.
    Ended {
        /// Which task.
        claim: Claim,
        /// How it ended.
        outcome: Outcome,
    },
    /// A stage cannot go on, so the worker cannot.
    Broken(Error),
}

/// How a task ended in this worker.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// All batches are done.
    Done {
        /// Good records of the whole task.
        records: u64,
        /// Batches of the whole task, the quarantined ones included.
        batches: u64,
        /// By partition: the life that has acknowledged every batch; empty for an evaluation.
        incarnations: Vec<u64>,
        /// `spec::scores::Scores` as JSON; evaluation only.
        scores: Option<String>,
    },
    /// A newer lease holds it; there is nobody to tell.
    Lost,
    /// It cannot be done.
    Failed {
        /// Why; the report names the task and the batch beside it.
        error: String,
        /// Where.
        batch: u64,
        /// Whether going on with other batches would be wrong.
        fatal: bool,
    },
}

/// The running stages.
pub struct Pipeline {
    work: Option<Sender<Arc<LeasedTask>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Pipeline {
    /// Starts all stages.
    pub fn start(config: Config) -> Result<Self> {
        let Config { shape, partitions, depth, read_ahead, bad_records_max, source, pulls, pushes, .. } =
            config;
        let (schedule, clip, together) = (config.schedule, config.clip, config.together);
        assert!(depth > 0 && !config.models.is_empty(), "at least one batch in flight and one model");
        let common = Common { stop: config.stop, gauges: config.gauges, events: config.events };
        let mut threads = Threads { running: vec![], common: common.clone() };
        let (work, work_queue) = bounded(1);
        let (redo, redo_queue) = unbounded();
        let (read, read_queue) = bounded(read_ahead);
        let (pulled, pulled_queue) = bounded(depth);
        let (computed, computed_queue) = bounded(depth);
        let (spare_keys, spare_keys_queue) = unbounded();
        let (landed, flights) = unbounded();
        for _ in 0..depth {
            landed.send(Box::<Flight>::default()).expect("the other end is in hand");
        }

        let mut reader = Reader {
            source,
            partitions,
            bad_records_max,
            work: work_queue,
            redo: redo_queue,
            spare_keys: spare_keys_queue,
            read,
            common: common.clone(),
        };
        threads.start("reader", move || reader.run())?;
        let common_too = common.clone();
        let steps = Steps::new(redo.clone(), common.clone());
        let mut puller = Puller {
            store: pulls,
            together,
            steps: steps.clone(),
            read: read_queue,
            redo: redo.clone(),
            spare_keys,
            flights,
            pulled,
            common: common_too,
        };
        threads.start("puller", move || puller.run())?;
        let mut models = config.models.into_iter();
        let model = models.next().expect("asserted above");
        let helpers = models.map(|model| threads.help(model)).collect::<Result<_>>()?;
        let common_too = common.clone();
        let mut compute =
            Compute { shape, model, helpers, clip, pulled: pulled_queue, computed, common: common_too };
        threads.start("compute", move || compute.run())?;
        let mut pusher = Pusher {
            store: pushes,
            together,
            steps,
            schedule,
            computed: computed_queue,
            landed,
            redo,
            common,
        };
        threads.start("pusher", move || pusher.run())?;
        Ok(Pipeline { work: Some(work), threads: threads.running })
    }

    /// Hands the reader a task; for each [`Event::Wanted`] one may be given.
    pub fn give(&self, task: Arc<LeasedTask>) {
        if let Some(work) = &self.work {
            // A reader that has ended takes nothing, and the one who gives hears of the end by event.
            let _ = work.try_send(task);
        }
    }

    /// No more tasks: the stages end when what is under way is done, or dropped where the worker drains.
    pub fn close(&mut self) {
        self.work = None;
    }

    /// Waits for all stages to end.
    pub fn join(mut self) {
        self.close();
        for thread in self.threads {
            // A panic inside was caught and told as an event.
            let _ = thread.join();
        }
    }
}

/// What every stage has.
#[derive(Clone)]
struct Common {
    stop: Stop,
    gauges: Arc<Gauges>,
    events: UnboundedSender<Event>,
}

impl Common {
    fn tell(&self, event: Event) {
        // Nobody listens any more only where the worker has ended already.
        let _ = self.events.send(event);
    }
}

struct Threads {
    running: Vec<JoinHandle<()>>,
    common: Common,
}

impl Threads {
    /// A thread for a stage. What ends it early is told.
    fn start(
        &mut self,
        stage: &'static str,
        body: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let common = self.common.clone();
        let run = move || match catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(()) | Err(Error::Stopped { .. })) => {}
            Ok(Err(error)) => common.tell(Event::Broken(error)),
            Err(_) => common.tell(Event::Broken(Error::Panicked { stage })),
        };
        let thread = std::thread::Builder::new()
            .name(stage.into())
            .spawn(run)
            .map_err(|source| Error::System { what: "a thread", source })?;
        self.running.push(thread);
        Ok(())
    }

    /// A further compute thread.
    fn help(&mut self, model: Box<dyn Model>) -> Result<Helper> {
        let (helper, mut thread) = Helper::pair(model);
        self.start("compute", move || {
            thread.run();
            Ok(())
        })?;
        Ok(helper)
    }
}

#[cfg(test)]
mod tests;
