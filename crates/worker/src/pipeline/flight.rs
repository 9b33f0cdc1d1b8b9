//! What moves between the stages.

use std::sync::Arc;

use elasticdl_data::Batch;
use elasticdl_nn::Gradients;

use crate::dedup::Keys;
use crate::store::{Generation, Permit, Pulled};
use crate::task::LeasedTask;

/// Something of a task, on its way to the next stage.
pub(super) struct Parcel<B> {
    pub task: Arc<LeasedTask>,
    /// The attempt it belongs to: after a redo, what is left of the attempt before is let go.
    pub attempt: u64,
    pub body: Body<B>,
}

pub(super) enum Body<B> {
    /// A batch.
    Batch(B),
    /// The task's last batch went before; this passes every stage after it.
    End(End),
}

/// What is known at a task's end.
#[derive(Default)]
pub(super) struct End {
    /// Good records of the whole task.
    pub records: u64,
    /// Batches of the whole task.
    pub batches: u64,
    /// By partition: the life that the task's fence was raised in; added by the puller to a training task.
    pub incarnations: Vec<u64>,
    /// Scores as JSON, added by the compute stage to an evaluation.
    pub scores: Option<String>,
}

impl<B> Parcel<B> {
    /// Whether it is still to be worked on.
    pub fn is_wanted(&self) -> bool {
        self.task.wants(self.attempt)
    }
}

/// A batch that was read.
pub(super) struct Read {
    pub index: u64,
    pub batch: Batch,
    pub keys: Keys,
}

/// A batch from its pull to its acknowledged push, and the buffers it needs. There are as many as the
/// pipeline is deep, and whoever has none waits: that bounds staleness and memory in one.
#[derive(Default)]
pub(super) struct Flight {
    /// Shared with the helpers while they compute; otherwise there is one owner.
    pub inputs: Arc<Inputs>,
    pub gradients: Gradients,
    pub loss_sum: f64,
    /// Of the fence under which it was pulled; training only.
    pub generation: Generation,
    /// What it was pulled by; training in a job with a gate only.
    pub permit: Option<Permit>,
}

/// What a model computes from.
#[derive(Default)]
pub(super) struct Inputs {
    pub index: u64,
    pub batch: Batch,
    pub keys: Keys,
    pub pulled: Pulled,
}

impl Flight {
    /// The inputs, to be changed.
    pub fn inputs_mut(&mut self) -> &mut Inputs {
        Arc::get_mut(&mut self.inputs).expect("helpers let go of the inputs before they answer")
    }
}
