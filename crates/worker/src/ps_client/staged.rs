//! Steps in two halves, for jobs whose outcome must be the same to the bit: a batch is staged on every
//! partition, and then committed on every partition. Each half is safe to repeat.
//!
//! Whoever dies in between leaves marks that are all the same (nothing is committed: the batch is computed
//! again from rows that do not hold it) or that differ by one (some have committed, so all had it staged:
//! the others commit too).

use elasticdl_wire::failpoint;
use elasticdl_wire::ps::{self, Answer, Commit, Status, kind};

use super::{Asking, PsClient};
use crate::error::{Error, Result};
use crate::stop::Level;
use crate::store::{Generation, Push, Pushed};

/// The batch that some partitions have committed and others have not. A partition that has closed the task
/// has all of it, and so have the others: a task is closed when it is covered.
pub(super) fn half_committed(answers: &[Answer]) -> Option<u64> {
    let open = || answers.iter().map(|answer| answer.mark).filter(|mark| *mark != u64::MAX);
    let (lowest, highest) = (open().min()?, open().max()?);
    (lowest < highest).then_some(lowest)
}

impl PsClient {
    /// Stages a batch on every partition, then commits it on every partition.
    pub(super) fn push_staged(&mut self, push: &Push<'_>) -> Result<Pushed> {
        let (codec, header) = (std::sync::Arc::clone(&self.codec), push.header);
        let staged = self.land("staging", push.generation, &mut |frame, request, parts| {
            ps::begin_stage(frame, request, header, parts.len());
            codec.put_gradients(frame, parts, push);
        })?;
        if staged != Pushed::Applied {
            return Ok(staged);
        }
        if failpoint::reached("worker.staged") {
            return Ok(Pushed::Redo);
        }
        let commit = Commit { task: header.task, batch: header.batch, lease: header.lease };
        self.land("committing", push.generation, &mut |frame, request, parts| {
            ps::commit(frame, request, commit, parts);
        })
    }

    /// Commits a batch that is committed somewhere on every partition. Redo: there are new lives by now.
    pub(super) fn finish(&mut self, commit: Commit, within: Generation) -> Result<Pushed> {
        let asking = Asking {
            attempt: "committing what is committed elsewhere",
            answer: kind::PUSHED,
            until: Level::Draining,
            within,
        };
        let fill = &mut |frame: &mut _, request, parts: &[_]| ps::commit(frame, request, commit, parts);
        let Some(answers) = self.answers(asking, fill)? else { return Ok(Pushed::Redo) };
        if answers.iter().any(|answer| answer.status == Status::Fenced) {
            return Ok(Pushed::Lost);
        }
        // After this every mark is past the batch, and by one only: a step begins when the one before it is
        // committed everywhere.
        let wrong = |a: &&Answer| {
            !matches!(a.status, Status::Ok | Status::Duplicate)
                || (a.mark != u64::MAX && a.mark != commit.batch + 1)
        };
        match answers.iter().find(wrong) {
            None => Ok(Pushed::Applied),
            Some(answer) => {
                let Commit { task, batch, .. } = commit;
                Err(Error::HalfCommitted { task, batch, partition: answer.partition })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use elasticdl_spec::PartitionId;

    use super::*;

    #[test]
    fn marks_that_differ_tell_the_step_to_finish() {
        let half = |marks: &[u64]| {
            let answer = |mark: &u64| Answer {
                partition: PartitionId(0),
                status: Status::Ok,
                mark: *mark,
                version: 0,
            };
            half_committed(&marks.iter().map(answer).collect::<Vec<_>>())
        };
        assert_eq!(half(&[4, 4, 4]), None);
        assert_eq!(half(&[5, 4, 5]), Some(4));
        assert_eq!(half(&[u64::MAX, 7, 7]), None, "closed somewhere, and at its end elsewhere");
        assert_eq!(half(&[u64::MAX, u64::MAX]), None);
    }
}
