//! The first stage: records become batches with their keys.
//!
//! It asks for a task when it has nothing to read, which is while the batches of the task before are still
//! on their way. A task that must be redone comes back here and goes first.

use std::error::Error as _;
use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, select};
use elasticdl_data::{BadRecord, Batch};

use super::flight::{Body, End, Parcel, Read};
use super::{Common, Event, Outcome};
use crate::dedup::{Deduper, Keys};
use crate::error::Result;
use crate::gauges::Stage;
use crate::source::{Source, Stream};
use crate::stop::Level;
use crate::task::LeasedTask;

/// How many bad records are shown to a person.
const EXAMPLES_MAX: usize = 5;

pub(super) struct Reader {
    pub source: Box<dyn Source>,
    pub partitions: u32,
    pub bad_records_max: u64,
    pub work: Receiver<Arc<LeasedTask>>,
    pub redo: Receiver<Arc<LeasedTask>>,
    pub spare_keys: Receiver<Keys>,
    pub read: Sender<Parcel<Read>>,
    pub common: Common,
}

/// A task being read.
struct Open {
    task: Arc<LeasedTask>,
    attempt: u64,
    stream: Box<dyn Stream>,
    /// Good records so far.
    records: u64,
    /// Malformed records so far.
    malformed: u64,
    /// Good records of quarantined batches so far.
    quarantined: u64,
    examples: Vec<String>,
    next_batch: u64,
}

enum Step {
    Continue,
    /// The task is read to its end, or given up.
    Close,
    /// The next stage is gone.
    End,
}

impl Reader {
    pub fn run(&mut self) -> Result<()> {
        let mut deduper = Deduper::new(self.partitions);
        // The last one is read first: a task that is redone goes before the one read ahead.
        let mut open: Vec<Open> = Vec::new();
        let mut wanted = false;
        while !self.common.stop.reached(Level::Draining) {
            while let Ok(task) = self.redo.try_recv() {
                open.extend(self.open(task));
            }
            let Some(top) = open.last_mut() else {
                if !wanted {
                    self.common.tell(Event::Wanted);
                    wanted = true;
                }
                select! {
                    recv(self.work) -> task => match task {
                        Ok(task) => {
                            wanted = false;
                            open.extend(self.open(task));
                        }
                        Err(_) => return Ok(()),
                    },
                    recv(self.redo) -> task => match task {
                        Ok(task) => open.extend(self.open(task)),
                        Err(_) => return Ok(()),
                    },
                }
                continue;
            };
            match self.step(top, &mut deduper) {
                Step::Continue => {}
                Step::Close => drop(open.pop()),
                Step::End => return Ok(()),
            }
        }
        Ok(())
    }

    fn open(&mut self, task: Arc<LeasedTask>) -> Option<Open> {
        let attempt = task.attempt();
        let opened = self.common.gauges.time(Stage::Reading, || self.source.open(&task));
        match opened {
            Ok(stream) => {
                let examples = Vec::new();
                let (records, malformed, quarantined, next_batch) = (0, 0, 0, 0);
                Some(Open { task, attempt, stream, records, malformed, quarantined, examples, next_batch })
            }
            Err(error) => {
                self.fail_reading(&task, 0, &error);
                None
            }
        }
    }

    /// Reads one batch and hands it on.
    fn step(&mut self, open: &mut Open, deduper: &mut Deduper) -> Step {
        if !open.task.wants(open.attempt) {
            return Step::Close;
        }
        let (index, mut batch, bad) = match self.common.gauges.time(Stage::Reading, || open.stream.next()) {
            Ok(Some(next)) => next,
            Ok(None) => {
                let end = End { records: open.records, batches: open.next_batch, ..End::default() };
                return self.hand_on(open, Body::End(end), Step::Close);
            }
            Err(error) => {
                self.fail_reading(&open.task, open.next_batch, &error);
                return Step::Close;
            }
        };
        assert_eq!(index, open.next_batch, "batches of {} come in order", open.task.claim);
        open.next_batch += 1;
        if !bad.is_empty() && !self.set_aside(open, index, &bad) {
            return Step::Close;
        }
        if open.task.is_quarantined(index) {
            self.quarantine(open, index, batch.records);
            batch = Batch::default();
        }
        open.records += batch.records as u64;
        let mut keys = self.spare_keys.try_recv().unwrap_or_default();
        self.common.gauges.time(Stage::Reading, || deduper.dedup(&batch.ids, &mut keys));
        self.hand_on(open, Body::Batch(Read { index, batch, keys }), Step::Continue)
    }

    fn hand_on(&self, open: &Open, body: Body<Read>, then: Step) -> Step {
        let parcel = Parcel { task: Arc::clone(&open.task), attempt: open.attempt, body };
        if self.read.send(parcel).is_ok() { then } else { Step::End }
    }

    /// Counts malformed records; `false` where they are too many and the task has failed.
    fn set_aside(&self, open: &mut Open, batch: u64, bad: &[BadRecord]) -> bool {
        open.malformed += bad.len() as u64;
        let room = EXAMPLES_MAX.saturating_sub(open.examples.len());
        open.examples.extend(bad.iter().take(room).map(ToString::to_string));
        self.tell_bad(open);
        if open.malformed <= self.bad_records_max {
            return true;
        }
        let error = format!(
            "{} malformed records in this task, and data.bad_records_max is {}: {}",
            open.malformed,
            self.bad_records_max,
            open.examples.join("; ")
        );
        let claim = open.task.claim;
        open.task.drop_all();
        self.common.tell(Event::Ended { claim, outcome: Outcome::Failed { error, batch, fatal: true } });
        false
    }

    /// Counts the records of a batch that is not to be trained on. How many of them are too many is judged
    /// when the job ends, not here: the rest of the task trains.
    fn quarantine(&self, open: &mut Open, batch: u64, records: usize) {
        open.quarantined += records as u64;
        if open.examples.len() < EXAMPLES_MAX {
            open.examples.push(format!("batch {batch} is quarantined"));
        }
        self.tell_bad(open);
    }

    fn tell_bad(&self, open: &Open) {
        let (total, examples) = (open.malformed + open.quarantined, open.examples.clone());
        self.common.tell(Event::Bad { claim: open.task.claim, total, examples });
    }

    fn fail_reading(&self, task: &LeasedTask, batch: u64, error: &elasticdl_data::Error) {
        let claim = task.claim;
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            text.push_str(&format!(": {cause}"));
            source = cause.source();
        }
        task.drop_all();
        // A disk may read what it did not before. What is wrong with a file as such stays wrong, and
        // setting aside the batch has helped no other.
        let of_the_disk = matches!(error, elasticdl_data::Error::Io { .. });
        let fatal = !of_the_disk || task.is_quarantined(batch);
        self.common.tell(Event::Ended { claim, outcome: Outcome::Failed { error: text, batch, fatal } });
    }
}
