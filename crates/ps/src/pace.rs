//! How work in the background gives way to whoever trains. While nobody does it goes as fast as it can.

#![expect(clippy::disallowed_methods, reason = "an edge: it reads clocks and rests")]

use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use elasticdl_spec::PartitionId;

/// Nobody trains if nobody has for so long.
const IDLE: Duration = Duration::from_millis(200);
/// How often somebody who rests looks whether that is so.
const LOOK: Duration = Duration::from_millis(10);

/// The pace of one thread.
#[derive(Debug)]
pub(crate) struct Pace {
    /// It rests so many times as long as it has worked.
    rest: u32,
    /// Work that is rested from at once, at most.
    work_max: Duration,
    /// What its work is measured by.
    clock: fn() -> Duration,
    /// Pushes that were seen.
    pushes: Option<u64>,
    /// Whether there were some since the last rest.
    trained: bool,
    rested_at: Duration,
}

impl Pace {
    /// One that has just rested.
    pub(crate) fn new(rest: u32, work_max: Duration, clock: fn() -> Duration) -> Self {
        Pace { rest, work_max, clock, pushes: None, trained: false, rested_at: clock() }
    }

    /// So many pushes were applied by now, counted from any number.
    pub(crate) fn saw(&mut self, pushes: u64) {
        self.trained |= self.pushes.replace(pushes).is_some_and(|before| before != pushes);
    }

    /// Rests where somebody has trained since the last time.
    pub(crate) fn rest(&mut self) {
        if std::mem::take(&mut self.trained) {
            let work = (self.clock)().saturating_sub(self.rested_at);
            thread::sleep(work.min(self.work_max) * self.rest);
            self.rested_at = (self.clock)();
        }
    }
}

/// Whether somebody trains, as threads that work together see it.
#[derive(Debug)]
pub(crate) struct Trained {
    clock: fn() -> Duration,
    began: Duration,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    pushes: BTreeMap<PartitionId, u64>,
    /// When there were more of them than before.
    last: Option<Duration>,
}

impl Trained {
    /// Nothing was seen yet.
    pub(crate) fn new(clock: fn() -> Duration) -> Self {
        Trained { clock, began: clock(), seen: Mutex::default() }
    }

    /// Where this partition is, so many pushes were applied by now, counted from any number.
    pub(crate) fn saw(&self, partition: PartitionId, pushes: u64) {
        let mut seen = self.seen();
        if seen.pushes.insert(partition, pushes).is_some_and(|before| before != pushes) {
            seen.last = Some((self.clock)());
        }
    }

    /// Whether somebody has trained, and not long ago.
    pub(crate) fn lately(&self) -> bool {
        let last = self.seen().last;
        last.is_some_and(|last| (self.clock)().saturating_sub(last) < IDLE)
    }

    /// Whether nobody has for so long that nobody does.
    pub(crate) fn is_idle(&self) -> bool {
        let last = self.seen().last.unwrap_or(self.began);
        (self.clock)().saturating_sub(last) >= IDLE
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for a short while, between two looks at something.
pub(crate) fn between_looks() {
    thread::sleep(LOOK);
}

/// Processor time of the calling thread, without what it waits for disks; zero where the system does not tell.
pub(crate) fn of_this_thread() -> Duration {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = told.split_whitespace().next().and_then(|first| first.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or(0))
}

/// Time as it passes for everybody.
pub(crate) fn of_the_clock() -> Duration {
    static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
    BEGAN.elapsed()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Each look at the clock is a second of work.
    fn busy() -> Duration {
        static LOOKS: AtomicU64 = AtomicU64::new(0);
        Duration::from_secs(LOOKS.fetch_add(1, Ordering::Relaxed))
    }

    #[test]
    fn who_was_seen_to_train_does_so_for_a_while() {
        static NOW: AtomicU64 = AtomicU64::new(1000);
        let at = |time: Duration| NOW.store(1000 + time.as_millis() as u64, Ordering::Relaxed);
        let trained = Trained::new(|| Duration::from_millis(NOW.load(Ordering::Relaxed)));
        let (one, other) = (PartitionId(1), PartitionId(2));
        trained.saw(one, 7);
        trained.saw(other, 8);
        trained.saw(one, 7);
        assert!(!trained.lately() && !trained.is_idle(), "nothing to compare with, and too early to tell");
        at(IDLE);
        assert!(!trained.lately() && trained.is_idle());
        trained.saw(other, 9);
        assert!(trained.lately() && !trained.is_idle());
        at(2 * IDLE - LOOK);
        trained.saw(other, 9);
        assert!(trained.lately() && !trained.is_idle());
        at(2 * IDLE);
        assert!(!trained.lately() && trained.is_idle());
    }

    #[test]
    fn it_rests_only_while_somebody_trains() {
        const WORK_MAX: Duration = Duration::from_millis(20);
        let mut pace = Pace::new(1, WORK_MAX, busy);
        let rests = |pace: &mut Pace, pushes: u64| {
            let began = Instant::now();
            pace.saw(pushes);
            pace.rest();
            began.elapsed() >= WORK_MAX
        };
        assert!(!rests(&mut pace, 7), "nothing to compare with");
        assert!(!rests(&mut pace, 7));
        assert!(rests(&mut pace, 8));
        assert!(!rests(&mut pace, 8));
    }
}
