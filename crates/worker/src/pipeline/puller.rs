//! The second stage: a batch takes off with its rows and tensors.
//!
//! It raises a task's fence before its first pull and lets go of batches that every partition has.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use elasticdl_spec::Purpose;
use elasticdl_wire::gate::Batch;
use elasticdl_wire::ps::PullMode;
use tracing::info;

use super::flight::{Body, Flight, Parcel, Read};
use super::steps::{Settled, Steps};
use super::{Common, Event, Outcome, Together};
use crate::dedup::Keys;
use crate::error::{Error, Result};
use crate::gauges::Stage;
use crate::stop::Level;
use crate::store::{Fence, Generation, Permit, Store};
use crate::task::{Claim, LeasedTask};

/// How long it waits for something to pull before it looks what became of what was staged.
const IDLE: Duration = Duration::from_millis(5);

pub(super) struct Puller {
    pub store: Box<dyn Store>,
    pub together: Together,
    pub steps: Steps,
    pub read: Receiver<Parcel<Read>>,
    pub redo: Sender<Arc<LeasedTask>>,
    pub spare_keys: Sender<Keys>,
    pub flights: Receiver<Box<Flight>>,
    pub pulled: Sender<Parcel<Box<Flight>>>,
    pub common: Common,
}

/// A fence that was raised.
struct Fenced {
    task: Arc<LeasedTask>,
    attempt: u64,
    mark: u64,
    generation: Generation,
    incarnations: Arc<[u64]>,
}

impl Puller {
    pub fn run(&mut self) -> Result<()> {
        let mut fences: BTreeMap<Claim, Fenced> = BTreeMap::new();
        while let Some(parcel) = self.next()? {
            let wanted = parcel.is_wanted() && !self.common.stop.reached(Level::Draining);
            let Parcel { task, attempt, body } = parcel;
            let body = match body {
                Body::Batch(read) if wanted => match self.take_off(&task, attempt, read, &mut fences)? {
                    Some(flight) => Body::Batch(flight),
                    None => continue,
                },
                Body::End(mut end) if wanted => {
                    // A task without a single batch has no fence yet, and whoever hears that it is done
                    // wants to know in which lives.
                    if task.purpose() == Purpose::Train {
                        let Some(fenced) = self.fence(&task, attempt, &mut fences)? else { continue };
                        end.incarnations = fenced.incarnations.to_vec();
                    }
                    fences.remove(&task.claim);
                    Body::End(end)
                }
                Body::Batch(read) => {
                    self.recycle(read.keys);
                    continue;
                }
                Body::End(_) => continue,
            };
            if self.pulled.send(Parcel { task, attempt, body }).is_err() {
                break;
            }
        }
        Ok(())
    }

    /// The next parcel. While there is none, what was staged is seen to: nobody else may come to do it.
    fn next(&mut self) -> Result<Option<Parcel<Read>>> {
        if self.together != Together::InSteps {
            return Ok(self.read.recv().ok());
        }
        loop {
            match self.read.recv_timeout(IDLE) {
                Ok(parcel) => return Ok(Some(parcel)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {
                    let store = &mut *self.store;
                    self.common.gauges.time(Stage::Pulling, || self.steps.settle(store, Level::Draining))?;
                }
            }
        }
    }

    /// Pulls for a batch; `None` where it needs no work here, or cannot have any.
    fn take_off(
        &mut self,
        task: &Arc<LeasedTask>,
        attempt: u64,
        read: Read,
        fences: &mut BTreeMap<Claim, Fenced>,
    ) -> Result<Option<Box<Flight>>> {
        let births = task.purpose() == Purpose::Train;
        let mut generation = Generation::default();
        if births {
            let Some(fenced) = self.fence(task, attempt, fences)? else {
                self.recycle(read.keys);
                return Ok(None);
            };
            if read.index < fenced.mark {
                self.recycle(read.keys);
                return Ok(None);
            }
            generation = fenced.generation;
        }
        // No flight can come back any more where the pusher has ended.
        let mut flight =
            self.flights.recv().map_err(|_| Error::Stopped { attempt: "waiting for a push to end" })?;
        flight.generation = generation;
        let inputs = flight.inputs_mut();
        inputs.index = read.index;
        inputs.batch = read.batch;
        let used = std::mem::replace(&mut inputs.keys, read.keys);
        self.recycle(used);
        if births && self.together != Together::Freely {
            flight.permit = self.admitted(task, attempt, flight.inputs.index, generation)?;
            if flight.permit.is_none() {
                // The stages after this one let go of it.
                return Ok(Some(flight));
            }
        }
        let mode = PullMode { births, tensors: true };
        let inputs = flight.inputs_mut();
        let store = &mut self.store;
        self.common.gauges.time(Stage::Pulling, || store.pull(&inputs.keys, mode, &mut inputs.pulled))?;
        if let (Together::InSteps, Some(permit)) = (self.together, flight.permit)
            && flight.inputs.pulled.versions.iter().any(|version| *version != permit.version)
        {
            // The gate took us for lost, and the step went on without this batch.
            self.begin_again(task);
            return Ok(Some(flight));
        }
        if task.begins_again() {
            self.common.tell(Event::Began { claim: task.claim });
        }
        Ok(Some(flight))
    }

    /// Waits for a permit; `None` where the batch is not wanted any more, or its task begins again.
    fn admitted(
        &mut self,
        task: &Arc<LeasedTask>,
        attempt: u64,
        batch: u64,
        within: Generation,
    ) -> Result<Option<Permit>> {
        let batch = Batch { task: task.claim.task, batch, lease: task.claim.lease };
        while task.wants(attempt) {
            let (store, steps) = (&mut *self.store, &self.steps);
            match self.common.gauges.time(Stage::Pulling, || steps.admit(store, batch, within))? {
                Settled::Granted(permit) => return Ok(Some(permit)),
                Settled::NotYet => {}
                Settled::Redo => self.begin_again(task),
            }
        }
        Ok(None)
    }

    /// The task begins again at its marks.
    fn begin_again(&self, task: &Arc<LeasedTask>) {
        info!(task = %task.claim.task, "task begins again at its marks");
        self.common.gauges.task_redone();
        task.begin_again();
        // A reader that has ended does so because the worker does: the marks keep what was done.
        let _ = self.redo.send(Arc::clone(task));
    }

    /// The task's fence, raised now where it is not; `None` where another lease holds the task.
    fn fence<'f>(
        &mut self,
        task: &Arc<LeasedTask>,
        attempt: u64,
        fences: &'f mut BTreeMap<Claim, Fenced>,
    ) -> Result<Option<&'f Fenced>> {
        let claim = task.claim;
        if fences.get(&claim).is_none_or(|fenced| fenced.attempt != attempt) {
            // Tasks that ended early never reach their end here.
            fences.retain(|_, fenced| fenced.task.wants(fenced.attempt));
            let store = &mut self.store;
            match self.common.gauges.time(Stage::Pulling, || store.fence(claim.task, claim.lease))? {
                Fence::Held { mark, generation, incarnations } => {
                    if mark > 0 {
                        info!(task = %claim.task, lease = %claim.lease, mark, "task goes on from its mark");
                    }
                    let task = Arc::clone(task);
                    fences.insert(claim, Fenced { task, attempt, mark, generation, incarnations });
                }
                Fence::Lost => {
                    task.drop_all();
                    self.common.tell(Event::Ended { claim, outcome: Outcome::Lost });
                    return Ok(None);
                }
            }
        }
        Ok(fences.get(&claim))
    }

    fn recycle(&self, keys: Keys) {
        // The reader may have ended: then nobody needs them.
        let _ = self.spare_keys.send(keys);
    }
}
