//! For tests: tasks made up on the spot, and what can be wrong with them.

use std::collections::BTreeMap;

use elasticdl_data::{BadRecord, Batch, Place};
use elasticdl_spec::TaskId;

use crate::source::{Source, Stream};
use crate::task::LeasedTask;

/// Records in a batch.
pub(crate) const RECORDS: usize = 20;

/// Batches of tasks made up on the spot.
pub(crate) struct ToySource {
    pub batches: u64,
    /// What is wrong with which batch.
    pub spoil: BTreeMap<u64, Spoil>,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Spoil {
    NotANumber,
    BadRecords(usize),
    Unreadable,
    Empty,
}

struct ToyStream {
    task: TaskId,
    next: u64,
    batches: u64,
    spoil: BTreeMap<u64, Spoil>,
}

impl Source for ToySource {
    fn open(&mut self, task: &LeasedTask) -> elasticdl_data::Result<Box<dyn Stream>> {
        let (batches, spoil) = (self.batches, self.spoil.clone());
        Ok(Box::new(ToyStream { task: task.claim.task, next: 0, batches, spoil }))
    }
}

impl Stream for ToyStream {
    fn next(&mut self) -> elasticdl_data::Result<Option<(u64, Batch, Vec<BadRecord>)>> {
        let index = self.next;
        if index == self.batches {
            return Ok(None);
        }
        self.next += 1;
        let mut batch = super::batch(self.task, index, RECORDS);
        let mut bad = vec![];
        match self.spoil.get(&index) {
            Some(Spoil::NotANumber) => batch.numeric[3] = f32::NAN,
            Some(Spoil::Empty) => batch = Batch::default(),
            Some(Spoil::BadRecords(n)) => bad.extend((0..*n as u64).map(|line| BadRecord {
                path: "a.csv".into(),
                place: Place::Line(line),
                column: None,
                reason: "no label".into(),
            })),
            Some(Spoil::Unreadable) => {
                return Err(elasticdl_data::Error::Io {
                    attempt: "read",
                    path: "a.csv".into(),
                    source: std::io::ErrorKind::NotFound.into(),
                });
            }
            None => {}
        }
        Ok(Some((index, batch, bad)))
    }
}
