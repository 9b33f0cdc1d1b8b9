//! What the pipeline asks of the parameter servers, so that it can be tested without any.
//!
//! A store waits for servers that are away, as long as it takes: what comes back is an answer of all
//! partitions, or the reason to let go of the task.

use std::sync::Arc;

use elasticdl_nn::Gradients;
use elasticdl_spec::{LeaseId, TaskId};
use elasticdl_wire::gate::{Batch, Decision, Said};
use elasticdl_wire::ps::{PullMode, PushHeader};

use crate::dedup::Keys;
use crate::error::Result;
use crate::stop::Level;

/// Which lives of the partitions a fence was raised in: the same number, the same incarnations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Generation(pub u64);

/// What the partitions say to a new lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fence {
    /// The task is ours.
    Held {
        /// The lowest mark: the first batch that some partition lacks. `u64::MAX` for a closed task.
        mark: u64,
        /// For the pushes that follow.
        generation: Generation,
        /// By partition: its life in this generation.
        incarnations: Arc<[u64]>,
    },
    /// A newer lease holds the task.
    Lost,
}

/// What became of a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    /// Every partition has applied the batch, now or before.
    Applied,
    /// A partition came back without batches that it had, or the batch is too stale: fence again and begin at the
    /// lowest mark.
    Redo,
    /// A newer lease holds the task.
    Lost,
}

/// Leave to pull a batch, from the gate of a job that bounds staleness. It must be given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permit {
    /// Its number.
    pub number: u64,
    /// The version that the batch is to be computed from, where several batches make a step.
    pub version: u64,
}

/// What the gate says, or that partitions have other lives than were asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gated {
    /// This.
    Said(Said),
    /// A partition has another life.
    OtherGeneration,
}

/// The rows and tensors of one batch; reused, it only grows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pulled {
    /// By table: unique ids × width, in the order of [`Keys::ids`].
    pub rows: Vec<Vec<f32>>,
    /// By tensor.
    pub tensors: Vec<Vec<f32>>,
    /// By partition: how many pushes it had applied.
    pub versions: Vec<u64>,
}

/// One batch's gradients on their way.
#[derive(Debug, Clone, Copy)]
pub struct Push<'a> {
    /// Which batch, and by what right.
    pub header: PushHeader,
    /// Of the fence under which it was computed.
    pub generation: Generation,
    /// Whose gradients.
    pub keys: &'a Keys,
    /// By partition: the version that was pulled.
    pub versions: &'a [u64],
    /// The gradients, in the order of the keys and of the model's shape.
    pub gradients: &'a Gradients,
}

/// The parameter servers, as one thread of a worker sees them.
pub trait Store: Send {
    /// Raises the fence of a task in every partition and asks for its marks. Where steps are staged, one
    /// that is committed in some partitions only is committed in all before this returns.
    fn fence(&mut self, task: TaskId, lease: LeaseId) -> Result<Fence>;

    /// Asks whether a batch may be pulled, and waits for a moment. Whoever asks knows that all steps up to a version
    /// are committed.
    fn admit(&mut self, batch: Batch, within: Generation, committed: u64) -> Result<Gated>;

    /// Asks which step was decided last, and waits for a moment.
    fn look(&mut self, within: Generation, committed: u64, until: Level) -> Result<Gated>;

    /// Stages a batch on every partition, where several make a step; `Applied`: all have it, and the gate knows.
    fn stage(&mut self, push: &Push<'_>, permit: Permit) -> Result<Pushed>;

    /// Has every partition apply a step; `Redo`: one has another life.
    fn commit_step(&mut self, step: &Decision, within: Generation, until: Level) -> Result<Pushed>;

    /// Gives a permit back: its batch has become this, or nothing.
    fn give_back(&mut self, permit: Permit, became: Option<Pushed>) -> Result<()>;

    /// Rows of the keys, and the tensors where the mode asks for them.
    fn pull(&mut self, keys: &Keys, mode: PullMode, into: &mut Pulled) -> Result<()>;

    /// Pushes to every partition; a partition that the batch does not touch moves its mark all the same.
    fn push(&mut self, push: &Push<'_>) -> Result<Pushed>;
}
