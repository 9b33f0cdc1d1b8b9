//! Requests of a server that has a backup of a partition here, and what it makes of the answers.

use std::sync::Arc;
use std::time::Duration;

use elasticdl_spec::PartitionId;
use elasticdl_wire as wire;
use elasticdl_wire::connection::Who;
use elasticdl_wire::failpoint;
use elasticdl_wire::frame::{Frame, Payload};
use elasticdl_wire::ps::{self, Status, kind};

use super::Requests;
use super::copy::{put_copied, take_head, take_some_rows};
use crate::checkpoint::Head;
use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::partition::copy::Copied;

/// With more rows than this left to copy a partition is not followed yet: it is locked while they are put into the
/// answer.
const ROWS_MAX: usize = 1 << 16;
/// And no more floats than that, 64 MiB.
const FLOATS_MAX: usize = 1 << 24;
/// How long a backup that has done everything waits for more before it hears that there is nothing.
const PATIENCE: Duration = Duration::from_millis(500);

impl Requests<'_> {
    /// What a backup lacks still, in one moment; from then on it is told what is done.
    pub(super) fn follow(&mut self, request: &Frame, reply: &mut Frame) -> Result<()> {
        let Some(Who::Server(backup)) = self.who else {
            return Err(wire::Error::Malformed("only a server has a backup".into()).into());
        };
        let mut payload = request.payload();
        let (id, incarnation) = ps::take_part(&mut payload)?;
        payload.end()?;
        reply.begin(kind::FOLLOWED, request.request());
        let (_, copy) = self.copies.get(id);
        let feed = Arc::new(Feed::new(id, incarnation, backup));
        let followed = self.partitions.with_held(id, |held| {
            let partition = &mut held.partition;
            match partition.admit_copy(incarnation, copy) {
                Status::Ok if !partition.is_handed_over() => {}
                Status::Ok => return (Status::NotHere, false),
                other => return (other, false),
            }
            let (rows, floats) = partition.unsent_floats();
            let large = rows > ROWS_MAX || floats > FLOATS_MAX.min(self.limits.words_max);
            // Without the master's leave no other server takes the place of the one that the ledger knows of.
            let taken = held.feed.as_ref().is_some_and(|feed| feed.backup != backup);
            if partition.is_staging() || large || taken {
                return (Status::Ok, false);
            }
            reply.put_all(&[Status::Ok.word(), 1]);
            self.copies.put_head(reply, partition, &partition.head());
            let count = reply.position();
            reply.put(0);
            while partition.unsent() > 0 {
                put_copied(reply, &partition.copy_next(rows, floats));
                reply.set(count, reply.word(count) + 1);
            }
            partition.end_copy(copy);
            let before = held.feed.replace(Arc::clone(&feed));
            before.iter().for_each(|feed| self.partitions.backup_lost(feed));
            (Status::Ok, true)
        });
        match followed.unwrap_or((Status::NotHere, false)) {
            (_, true) => self.backed.push(feed),
            (status, false) => reply.put_all(&[status.word(), 0]),
        }
        Ok(())
    }

    /// What a backup is to do next.
    pub(super) fn next(&mut self, request: &Frame, reply: &mut Frame) -> Result<()> {
        let mut payload = request.payload();
        let done = payload.take()?;
        payload.end()?;
        // A connection follows one partition at a time.
        let words_max = self.limits.words_max / 2;
        let did = self.backed.last().and_then(|feed| feed.fetch(done, words_max, PATIENCE));
        ps::did(reply, request.request(), did.as_deref());
        Ok(())
    }

    /// Nobody is told of anything that a backup does not have.
    pub(super) fn wait_for_backups(&mut self) -> Result<()> {
        if self.due.is_empty() {
            return Ok(());
        }
        point("ps.before_backup")?;
        for (feed, number) in self.due.drain(..) {
            self.partitions.wait_for_backup(&feed, number)?;
        }
        point("ps.after_backup")
    }
}

fn point(name: &str) -> Result<()> {
    failpoint::pass(name).map_err(|e| Error::io("waiting for a backup", e))
}

/// What became of a request to follow a partition.
#[derive(Debug)]
pub(crate) enum Followed {
    /// All that was lacking but tensors.
    Yes(Box<(Head, Vec<Copied>)>),
    /// Not at this moment.
    NotNow,
    /// It is not there in this life.
    NotThere,
}

/// Reads an answer to a FOLLOW of this partition.
pub(crate) fn take_followed(mut payload: Payload<'_>, id: PartitionId) -> wire::Result<Followed> {
    let (status, given) = (Status::from_word(payload.take()?)?, payload.take()?);
    if status != Status::Ok || given == 0 {
        payload.end()?;
        return Ok(if status == Status::Ok { Followed::NotNow } else { Followed::NotThere });
    }
    let head = take_head(&mut payload, id)?;
    let mut rows = Vec::new();
    for _ in 0..payload.take_count(4)? {
        let mut some = Copied::default();
        take_some_rows(&mut payload, &mut some)?;
        rows.push(some);
    }
    payload.end()?;
    Ok(Followed::Yes(Box::new((head, rows))))
}
