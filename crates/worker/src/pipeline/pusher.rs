//! The last stage: gradients go to every partition, in order, and what is acknowledged counts.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender};
use elasticdl_spec::{Purpose, Schedule};
use elasticdl_wire::failpoint;
use elasticdl_wire::ps::PushHeader;
use tracing::info;

use super::flight::{Body, End, Flight, Parcel};
use super::steps::{Staged, Steps};
use super::{Common, Event, Outcome, Together};
use crate::error::Result;
use crate::gauges::Stage;
use crate::stop::Level;
use crate::store::{Permit, Push, Pushed, Store};
use crate::task::LeasedTask;

pub(super) struct Pusher {
    pub store: Box<dyn Store>,
    pub together: Together,
    pub steps: Steps,
    pub schedule: Schedule,
    pub computed: Receiver<Parcel<Box<Flight>>>,
    pub landed: Sender<Box<Flight>>,
    pub redo: Sender<Arc<LeasedTask>>,
    pub common: Common,
}

impl Pusher {
    pub fn run(&mut self) -> Result<()> {
        while let Ok(parcel) = self.computed.recv() {
            let wanted = parcel.is_wanted();
            match parcel.body {
                Body::Batch(mut flight) => {
                    let became =
                        if wanted { Some(self.land(&parcel.task, parcel.attempt, &flight)?) } else { None };
                    let staged = self.together == Together::InSteps && became == Some(Pushed::Applied);
                    if let Some(permit) = flight.permit.take().filter(|_| !staged) {
                        self.store.give_back(permit, became)?;
                    }
                    // The puller may have ended: then nobody needs it.
                    let _ = self.landed.send(flight);
                }
                Body::End(end) if wanted => {
                    let outcome = ending(&parcel.task, end);
                    match self.together {
                        Together::InSteps => self.steps.end(parcel.task, parcel.attempt, outcome),
                        _ => self.common.tell(Event::Ended { claim: parcel.task.claim, outcome }),
                    }
                }
                Body::End(_) => {}
            }
        }
        // The puller has ended before, so that this is the last who can see to what was staged.
        while !self.steps.is_empty() {
            self.steps.settle(&mut *self.store, Level::Stopped)?;
        }
        Ok(())
    }

    /// Pushes a batch, or counts it where there is nothing to push.
    fn land(&mut self, task: &Arc<LeasedTask>, attempt: u64, flight: &Flight) -> Result<Pushed> {
        let claim = task.claim;
        let records = flight.inputs.batch.records as u64;
        let pushed = match task.purpose() {
            Purpose::Evaluate => Pushed::Applied,
            Purpose::Train => {
                let push = Push {
                    header: PushHeader {
                        task: claim.task,
                        batch: flight.inputs.index,
                        lease: claim.lease,
                        records,
                        factor: self.schedule.factor(task.position, flight.inputs.index),
                    },
                    generation: flight.generation,
                    keys: &flight.inputs.keys,
                    versions: &flight.inputs.pulled.versions,
                    gradients: &flight.gradients,
                };
                let store = &mut self.store;
                self.common.gauges.time(Stage::Pushing, || match (self.together, flight.permit) {
                    (Together::InSteps, Some(permit)) => store.stage(&push, permit),
                    _ => store.push(&push),
                })?
            }
        };
        match (pushed, flight.permit) {
            (Pushed::Applied, Some(Permit { version, .. })) if self.together == Together::InSteps => {
                let (task, generation, loss_sum) = (Arc::clone(task), flight.generation, flight.loss_sum);
                self.steps.staged(Staged { task, attempt, version, generation, records, loss_sum });
            }
            (Pushed::Applied, _) => {
                self.common.gauges.batch_done(records);
                self.common.tell(Event::Applied { claim, records, loss_sum: flight.loss_sum });
            }
            (Pushed::Redo, _) => {
                info!(task = %claim.task, batch = flight.inputs.index, "task begins again at its marks");
                self.common.gauges.task_redone();
                task.begin_again();
                // A reader that has ended does so because the worker does: the marks keep what was done.
                let _ = self.redo.send(Arc::clone(task));
            }
            (Pushed::Lost, _) => {
                task.drop_all();
                self.common.tell(Event::Ended { claim, outcome: Outcome::Lost });
            }
        }
        Ok(pushed)
    }
}

/// How a task ends whose every batch is acknowledged.
fn ending(task: &LeasedTask, end: End) -> Outcome {
    let End { records, batches, incarnations, scores } = end;
    if task.purpose() == Purpose::Train && failpoint::reached("worker.before_done") {
        let error = "a failpoint says so".to_string();
        return Outcome::Failed { error, batch: batches, fatal: false };
    }
    Outcome::Done { records, batches, incarnations, scores }
}
