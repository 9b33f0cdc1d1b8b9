//! The third stage: the model. A batch is cut into as many parts as there are threads, by records; the
//! gradients of the parts are summed in order, so that the outcome does not depend on who is faster.

use std::ops::Range;
use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, bounded};
use elasticdl_nn::{Gradients, Input, Model, TableInput};
use elasticdl_spec::job::ClipSpec;
use elasticdl_spec::scores::Scores;
use elasticdl_spec::{ModelShape, Purpose};
use elasticdl_wire::failpoint;

use super::clip::clip;
use super::finite::non_finite;
use super::flight::{Body, End, Flight, Inputs, Parcel};
use super::{Common, Event, Outcome};
use crate::error::Result;
use crate::gauges::Stage;
use crate::stop::Level;
use crate::task::{Claim, LeasedTask};

pub(super) struct Compute {
    pub shape: Arc<ModelShape>,
    pub model: Box<dyn Model>,
    pub helpers: Vec<Helper>,
    pub clip: ClipSpec,
    pub pulled: Receiver<Parcel<Box<Flight>>>,
    pub computed: Sender<Parcel<Box<Flight>>>,
    pub common: Common,
}

/// What one thread computes of a batch.
#[derive(Default)]
struct Part {
    gradients: Gradients,
    loss_sum: f64,
    probabilities: Vec<f32>,
}

/// The scores of the evaluation under way: tasks come one after the other, each attempt whole.
struct Evaluation {
    claim: Claim,
    scores: Scores,
}

impl Compute {
    pub fn run(&mut self) -> Result<()> {
        let mut own = Part::default();
        let mut evaluation: Option<Evaluation> = None;
        while let Ok(mut parcel) = self.common.gauges.time(Stage::Waiting, || self.pulled.recv()) {
            if self.common.stop.reached(Level::Stopped) {
                break;
            }
            if parcel.is_wanted() {
                let gauges = Arc::clone(&self.common.gauges);
                gauges.time(Stage::Computing, || match &mut parcel.body {
                    Body::Batch(flight) => match parcel.task.purpose() {
                        Purpose::Train => self.train(&parcel.task, flight, &mut own),
                        Purpose::Evaluate => self.evaluate(&parcel.task, flight, &mut own, &mut evaluation),
                    },
                    Body::End(end) => finish(&parcel.task, end, &mut evaluation),
                });
            }
            // Also what is not wanted: the pusher lets go of it and sends its flight back.
            if self.computed.send(parcel).is_err() {
                break;
            }
        }
        Ok(())
    }

    fn train(&mut self, task: &LeasedTask, flight: &mut Flight, own: &mut Part) {
        // The sum is built in the flight's buffers; the first part goes straight there.
        std::mem::swap(&mut own.gradients, &mut flight.gradients);
        self.work(&flight.inputs, Purpose::Train, own, |own, part| {
            own.gradients.add(&part.gradients);
            own.loss_sum += part.loss_sum;
        });
        std::mem::swap(&mut own.gradients, &mut flight.gradients);
        flight.loss_sum = own.loss_sum;
        let Flight { inputs, gradients, loss_sum, .. } = flight;
        if let Some(what) = non_finite(&self.shape, &inputs.keys, *loss_sum, gradients) {
            let failed = Outcome::Failed { error: what, batch: inputs.index, fatal: true };
            self.fail(task, failed);
            return;
        }
        clip(gradients, self.clip);
        let place = || format!("{}:{}", task.claim.task, inputs.index);
        if inputs.batch.records > 0 && failpoint::reached_at("worker.compute", place) {
            let error = "a failpoint says so".to_string();
            self.fail(task, Outcome::Failed { error, batch: inputs.index, fatal: false });
        }
    }

    fn evaluate(
        &mut self,
        task: &LeasedTask,
        flight: &mut Flight,
        own: &mut Part,
        evaluation: &mut Option<Evaluation>,
    ) {
        flight.loss_sum = 0.0;
        self.work(&flight.inputs, Purpose::Evaluate, own, |own, part| {
            own.probabilities.extend_from_slice(&part.probabilities);
        });
        if let Some(at) = own.probabilities.iter().position(|p| !p.is_finite()) {
            let error = format!("a prediction is {}", own.probabilities[at]);
            return self.fail(task, Outcome::Failed { error, batch: flight.inputs.index, fatal: true });
        }
        let claim = task.claim;
        if evaluation.as_ref().is_none_or(|e| e.claim != claim) {
            *evaluation = Some(Evaluation { claim, scores: Scores::default() });
        }
        if let Some(evaluation) = evaluation {
            let labels = &flight.inputs.batch.labels;
            own.probabilities.iter().zip(labels).for_each(|(p, label)| evaluation.scores.add(*p, *label));
        }
    }

    /// Bad numbers never leave the worker: nothing of the batch is pushed, nothing after it computed.
    fn fail(&self, task: &LeasedTask, outcome: Outcome) {
        task.drop_all();
        self.common.tell(Event::Ended { claim: task.claim, outcome });
    }

    /// Has all parts of a batch computed, the first one here, and gathers them in order into `own`.
    fn work(
        &mut self,
        inputs: &Arc<Inputs>,
        purpose: Purpose,
        own: &mut Part,
        mut gather: impl FnMut(&mut Part, &Part),
    ) {
        let records = inputs.batch.records;
        let parts = self.helpers.len() + 1;
        let cut = |part: usize| records * part / parts..records * (part + 1) / parts;
        for (i, helper) in self.helpers.iter_mut().enumerate() {
            helper.begin(Errand { inputs: Arc::clone(inputs), records: cut(i + 1), purpose });
        }
        compute(&mut *self.model, inputs, cut(0), purpose, own);
        for helper in &mut self.helpers {
            gather(own, helper.finish());
        }
    }
}

/// Adds the scores to the end of an evaluation.
fn finish(task: &LeasedTask, end: &mut End, evaluation: &mut Option<Evaluation>) {
    if task.purpose() == Purpose::Train {
        return;
    }
    let scores = evaluation.take().filter(|e| e.claim == task.claim).map(|e| e.scores).unwrap_or_default();
    let json = serde_json::to_string(&scores).expect("numbers become JSON");
    end.scores = Some(json);
}

/// Runs the model over some records of a batch.
fn compute(model: &mut dyn Model, inputs: &Inputs, records: Range<usize>, purpose: Purpose, part: &mut Part) {
    let Inputs { batch, keys, pulled, .. } = inputs;
    part.loss_sum = 0.0;
    part.probabilities.clear();
    if purpose == Purpose::Train {
        let shape = model.shape();
        part.gradients.reset(shape, &vec![keys.unique(); shape.tables.len()]);
    }
    if records.is_empty() {
        return;
    }
    let of = |per_batch: usize| {
        let per_record = per_batch / batch.records;
        records.start * per_record..records.end * per_record
    };
    let index = &keys.index()[of(keys.index().len())];
    let tables: Vec<_> = pulled.rows.iter().map(|rows| TableInput { rows, index }).collect();
    let tensors: Vec<&[f32]> = pulled.tensors.iter().map(Vec::as_slice).collect();
    let input = Input {
        records: records.len(),
        numeric: &batch.numeric[of(batch.numeric.len())],
        labels: &batch.labels[of(batch.labels.len())],
        tables: &tables,
    };
    model.load(&tensors);
    match purpose {
        Purpose::Train => part.loss_sum = model.train(&input, batch.records, &mut part.gradients),
        Purpose::Evaluate => model.predict(&input, &mut part.probabilities),
    }
}

/// One part of a batch, to be computed by a helper.
struct Errand {
    inputs: Arc<Inputs>,
    records: Range<usize>,
    purpose: Purpose,
}

/// A further compute thread, as the first one sees it.
pub(super) struct Helper {
    errands: Sender<(Errand, Part)>,
    parts: Receiver<Part>,
    /// Here between two batches.
    part: Option<Part>,
}

/// The other end of a [`Helper`]: a thread with a model of its own.
pub(super) struct HelperThread {
    model: Box<dyn Model>,
    errands: Receiver<(Errand, Part)>,
    parts: Sender<Part>,
}

impl Helper {
    pub fn pair(model: Box<dyn Model>) -> (Helper, HelperThread) {
        let (errands, errands_queue) = bounded(1);
        let (parts, parts_queue) = bounded(1);
        let helper = Helper { errands, parts: parts_queue, part: Some(Part::default()) };
        (helper, HelperThread { model, errands: errands_queue, parts })
    }

    fn begin(&mut self, errand: Errand) {
        let part = self.part.take().expect("a helper has one errand at a time");
        self.errands.send((errand, part)).expect("a helper lives as long as its errands come");
    }

    fn finish(&mut self) -> &Part {
        let part =
            self.parts.recv().expect("a helper that panicked has been told of, and ends this thread too");
        self.part.insert(part)
    }
}

impl HelperThread {
    pub fn run(&mut self) {
        while let Ok((errand, mut part)) = self.errands.recv() {
            compute(&mut *self.model, &errand.inputs, errand.records.clone(), errand.purpose, &mut part);
            // The inputs have one owner again before the part is known to be ready.
            drop(errand);
            if self.parts.send(part).is_err() {
                return;
            }
        }
    }
}
