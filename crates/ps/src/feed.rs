//! A partition and its backup at another server: whoever is told that something was done waits here until the backup
//! has done it too.
//!
//! The backup fetches what was done ([`Log`]) and tells how far it is. One that is lost is given up only with the
//! master's leave: until then the master may put it in the partition's place, and it must lack nothing that
//! somebody was told of.

#![expect(clippy::disallowed_methods, reason = "an edge: it waits and keeps deadlines")]

pub mod log;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use elasticdl_spec::PartitionId;
use elasticdl_wire::frame::Frame;

pub use log::Log;

/// A backup that gets nothing done for so long is lost.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the master's leave is waited for.
const LEAVE: Duration = Duration::from_secs(60);

/// What goes from a partition to its backup.
#[derive(Debug)]
pub struct Feed {
    /// The partition.
    pub partition: PartitionId,
    /// Which life of it.
    pub incarnation: u64,
    /// The server that has the backup.
    pub backup: u32,
    log: Mutex<Log<Frame>>,
    changed: Condvar,
    /// How often the backup has fetched a part of what it must have before it can do anything.
    parts: AtomicU64,
}

/// Why somebody who waited was not let go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stuck {
    /// The backup gets nothing done.
    Backup,
    /// The master does not let the partition go on alone.
    Master,
}

impl Feed {
    /// To a backup that has all that was done so far.
    pub fn new(partition: PartitionId, incarnation: u64, backup: u32) -> Self {
        let (log, changed) = (Mutex::default(), Condvar::new());
        Feed { partition, incarnation, backup, log, changed, parts: AtomicU64::new(0) }
    }

    /// Something was done; returns its number. Called with the partition's lock held, so that the order is the same there
    /// and here.
    pub fn add(&self, what: Frame) -> u64 {
        let number = self.log().add(what);
        self.changed.notify_all();
        number
    }

    /// The backup has done so many, and fetches what comes next, at most so many words of it; waits for some for a while.
    /// `None`: it is a backup no more.
    pub fn fetch(&self, done: u64, words_max: usize, patience: Duration) -> Option<Vec<Frame>> {
        let mut log = self.log();
        if !log.done(done) {
            return None;
        }
        self.changed.notify_all();
        let waits = |log: &mut Log<Frame>| log.is_empty() && log.is_followed();
        log = self.changed.wait_timeout_while(log, patience, waits).unwrap_or_else(PoisonError::into_inner).0;
        let mut words = 0;
        let fetched = log.fetch(|frame| {
            // One goes in any case.
            let fits = words == 0 || words + frame.bytes() / 8 <= words_max;
            words += frame.bytes() / 8;
            fits
        });
        log.is_followed().then_some(fetched)
    }

    /// The backup fetches a part of what it must have before it can do anything: it is not lost, however many there are.
    pub fn gets_ready(&self) {
        self.parts.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Waits until the backup has done what has this number, or is needed no more.
    pub fn wait(&self, number: u64) -> Result<(), Stuck> {
        self.wait_for(number, PATIENCE)
    }

    fn wait_for(&self, number: u64, patience: Duration) -> Result<(), Stuck> {
        let so_far =
            |log: &Log<Frame>| (log.is_followed(), log.done_so_far(), self.parts.load(Ordering::Relaxed));
        let mut log = self.log();
        let (mut seen, mut since) = (so_far(&log), Instant::now());
        while !log.has(number) {
            let whole = if log.is_followed() { patience } else { LEAVE };
            let left = whole.saturating_sub(since.elapsed());
            if left.is_zero() || log.is_over() {
                return Err(if log.is_followed() { Stuck::Backup } else { Stuck::Master });
            }
            log = self.changed.wait_timeout(log, left).unwrap_or_else(PoisonError::into_inner).0;
            let now = so_far(&log);
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
        }
        Ok(())
    }

    /// The backup does not answer. Tells whether this is news.
    pub fn lose(&self) -> bool {
        let news = self.log().lose();
        self.changed.notify_all();
        news
    }

    /// The master has written down that it is no backup any more.
    pub fn go_alone(&self) {
        self.log().go_alone();
        self.changed.notify_all();
    }

    /// The partition is another server's now.
    pub fn end(&self) {
        self.log().end();
        self.changed.notify_all();
    }

    /// Whether a backup follows.
    pub fn is_followed(&self) -> bool {
        self.log().is_followed()
    }

    fn log(&self) -> MutexGuard<'_, Log<Frame>> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    const SOON: Duration = Duration::from_millis(10);

    fn frame(kind: u32) -> Frame {
        let mut frame = Frame::default();
        frame.begin(kind, 0);
        frame
    }

    #[test]
    fn whoever_waits_goes_on_when_the_backup_has_done_it() {
        let feed = Arc::new(Feed::new(PartitionId(1), 3, 2));
        let number = feed.add(frame(7));
        let waiting = {
            let feed = Arc::clone(&feed);
            thread::spawn(move || feed.wait(number))
        };
        let fetched = feed.fetch(0, 100, SOON).unwrap();
        assert_eq!(fetched.iter().map(Frame::kind).collect::<Vec<_>>(), [7]);
        assert!(!waiting.is_finished());
        assert!(feed.fetch(1, 100, SOON).unwrap().is_empty());
        assert_eq!(waiting.join().unwrap(), Ok(()));
    }

    /// Goal: a backup that fetches long tensors is not given up meanwhile.
    #[test]
    fn a_backup_that_gets_ready_is_waited_for() {
        let feed = Arc::new(Feed::new(PartitionId(1), 3, 2));
        let number = feed.add(frame(7));
        let waiting = {
            let feed = Arc::clone(&feed);
            thread::spawn(move || feed.wait_for(number, 50 * SOON))
        };
        for _ in 0..60 {
            thread::sleep(SOON);
            feed.gets_ready();
        }
        assert!(!waiting.is_finished(), "longer than one that does nothing is waited for");
        assert_eq!(waiting.join().unwrap(), Err(Stuck::Backup));
    }

    #[test]
    fn a_lost_backup_lets_nobody_go_on_until_the_master_does() {
        let feed = Arc::new(Feed::new(PartitionId(1), 3, 2));
        let number = feed.add(frame(7));
        assert!(feed.lose());
        assert!(feed.fetch(0, 100, SOON).is_none(), "it has missed something");
        let waiting = {
            let feed = Arc::clone(&feed);
            thread::spawn(move || feed.wait(number))
        };
        thread::sleep(SOON);
        assert!(!waiting.is_finished());
        feed.go_alone();
        assert_eq!(waiting.join().unwrap(), Ok(()));
    }

    #[test]
    fn a_fetch_takes_what_fits_and_one_in_any_case() {
        let feed = Feed::new(PartitionId(1), 3, 2);
        for kind in 0..3 {
            let mut long = frame(kind);
            long.put_all(&[0; 10]);
            feed.add(long);
        }
        let fetched = |done| feed.fetch(done, 24, SOON).unwrap().len();
        assert_eq!((fetched(0), fetched(2), fetched(3)), (2, 1, 0));
    }
}
