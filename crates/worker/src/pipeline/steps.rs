//! What a worker has staged and what is not committed yet, where several batches make a step.
//!
//! A batch is done when its step is committed on every partition, and a task when all of its batches are. Until
//! then they wait here, and the stages go on with other batches: the step may need them. Whoever learns that a
//! step is committed says so here, and what waited for it is told.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_channel::Sender;
use elasticdl_wire::gate::Batch;
use elasticdl_wire::ps::Status;

use super::{Common, Event, Outcome};
use crate::error::Result;
use crate::stop::Level;
use crate::store::{Gated, Generation, Permit, Pushed, Store};
use crate::task::LeasedTask;

/// Batches and ends that wait for a commit; shared by the puller and the pusher.
#[derive(Clone)]
pub(super) struct Steps {
    inner: Arc<Mutex<Inner>>,
    redo: Sender<Arc<LeasedTask>>,
    common: Common,
}

#[derive(Default)]
struct Inner {
    /// In these lives every partition has committed all steps up to this version.
    generation: Generation,
    committed: u64,
    staged: Vec<Staged>,
    ends: Vec<Waiting>,
}

/// A batch that is staged on all partitions.
pub(super) struct Staged {
    pub task: Arc<LeasedTask>,
    pub attempt: u64,
    /// The version it was computed from.
    pub version: u64,
    pub generation: Generation,
    pub records: u64,
    pub loss_sum: f64,
}

/// A task whose every batch is staged.
struct Waiting {
    task: Arc<LeasedTask>,
    attempt: u64,
    outcome: Outcome,
}

/// What the gate said to whoever asked, when all that was decided is committed.
pub(super) enum Settled {
    /// It gave a permit.
    Granted(Permit),
    /// Not yet.
    NotYet,
    /// The batch that was asked for is in a step that was decided, or its lives are over: begin at the marks.
    Redo,
}

impl Steps {
    pub fn new(redo: Sender<Arc<LeasedTask>>, common: Common) -> Self {
        Steps { inner: Arc::default(), redo, common }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the gate to admit a batch, and first commits what was decided.
    pub fn admit(&self, store: &mut dyn Store, batch: Batch, within: Generation) -> Result<Settled> {
        let said = match store.admit(batch, within, self.committed(within))? {
            Gated::OtherGeneration => return Ok(Settled::Redo),
            Gated::Said(said) => said,
        };
        if let Some(decision) = &said.decision {
            if store.commit_step(decision, within, Level::Draining)? == Pushed::Redo {
                return Ok(Settled::Redo);
            }
            self.commit(within, decision.end());
            if decision.batches.iter().any(|b| (b.task, b.batch) == (batch.task, batch.batch)) {
                return Ok(Settled::Redo);
            }
        }
        Ok(match said.status {
            Status::Ok => Settled::Granted(Permit { number: said.permit, version: said.version }),
            _ => Settled::NotYet,
        })
    }

    /// Asks what was decided, where something waits for it, and commits that.
    pub fn settle(&self, store: &mut dyn Store, until: Level) -> Result<()> {
        let Some(within) = self.waits_in() else { return Ok(()) };
        let said = match store.look(within, self.committed(within), until)? {
            Gated::OtherGeneration => {
                self.give_up(within);
                return Ok(());
            }
            Gated::Said(said) => said,
        };
        if let Some(decision) = &said.decision {
            match store.commit_step(decision, within, until)? {
                Pushed::Redo => self.give_up(within),
                _ => self.commit(within, decision.end()),
            }
        }
        Ok(())
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.lock().staged.is_empty()
    }

    /// A batch is staged on all partitions, and the gate knows it.
    pub fn staged(&self, staged: Staged) {
        let mut inner = self.lock();
        inner.staged.push(staged);
        self.tell(&mut inner);
    }

    /// The last batch of a task went before; the task is done when all of them are.
    pub fn end(&self, task: Arc<LeasedTask>, attempt: u64, outcome: Outcome) {
        let mut inner = self.lock();
        inner.ends.push(Waiting { task, attempt, outcome });
        self.tell(&mut inner);
    }

    fn committed(&self, within: Generation) -> u64 {
        let inner = self.lock();
        if inner.generation == within { inner.committed } else { 0 }
    }

    /// The oldest lives that something waits in.
    fn waits_in(&self) -> Option<Generation> {
        self.lock().staged.iter().map(|staged| staged.generation).min()
    }

    /// Every partition has committed all steps up to a version.
    fn commit(&self, within: Generation, version: u64) {
        let mut inner = self.lock();
        if within > inner.generation {
            (inner.generation, inner.committed) = (within, version);
        } else if within == inner.generation {
            inner.committed = inner.committed.max(version);
        }
        self.tell(&mut inner);
    }

    /// Tells of what is committed by now.
    fn tell(&self, inner: &mut Inner) {
        let (generation, committed) = (inner.generation, inner.committed);
        let done = |s: &mut Staged| s.generation == generation && s.version < committed;
        for staged in inner.staged.extract_if(.., done) {
            let Staged { task, records, loss_sum, .. } = staged;
            self.common.gauges.batch_done(records);
            self.common.tell(Event::Applied { claim: task.claim, records, loss_sum });
        }
        let waits = |task: &LeasedTask| inner.staged.iter().any(|staged| staged.task.claim == task.claim);
        for ended in inner.ends.extract_if(.., |end| !waits(&end.task)) {
            if ended.task.wants(ended.attempt) {
                self.common.tell(Event::Ended { claim: ended.task.claim, outcome: ended.outcome });
            }
        }
    }

    /// What was staged in these lives is lost with them: its tasks begin again at their marks.
    fn give_up(&self, within: Generation) {
        let mut inner = self.lock();
        let lost: Vec<Staged> = inner.staged.extract_if(.., |s| s.generation <= within).collect();
        for Staged { task, attempt, .. } in lost {
            inner.ends.retain(|end| end.task.claim != task.claim);
            if task.wants(attempt) {
                self.common.gauges.task_redone();
                task.begin_again();
                // A reader that has ended does so because the worker does.
                let _ = self.redo.send(task);
            }
        }
    }
}
