//! How work in the background gives way to whoever trains. While nobody does it goes as fast as it can.

#![expect(clippy::disallowed_methods, reason = "an edge: it reads clocks and rests")]

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
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

/// A stretch of time, and the pushes that were applied in it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Stretch {
    pub time: Duration,
    pub pushes: u64,
}

/// A stretch that has not ended yet.
#[derive(Debug)]
pub(crate) struct Watch<F> {
    began: Duration,
    /// Tells how many pushes were applied by now, counted from any number.
    pushes: F,
    pushes_before: Option<u64>,
}

impl<F: Fn() -> Option<u64>> Watch<F> {
    pub(crate) fn begin(pushes: F) -> Self {
        Watch { began: of_the_clock(), pushes_before: pushes(), pushes }
    }

    /// What was seen so far.
    pub(crate) fn seen(&self) -> Stretch {
        // Where a partition began another life meanwhile, fewer may have been applied to it.
        let pushes = self.pushes_before.zip((self.pushes)()).map_or(0, |(from, to)| to.saturating_sub(from));
        Stretch { time: of_the_clock() - self.began, pushes }
    }
}

/// How long to rest from pieces of work, by what training is seen to lose to them.
#[derive(Debug)]
pub(crate) struct Toll {
    /// Training is to lose one part of so many.
    share: u32,
    /// Whatever it seems to lose, a rest is so many times as long as the work took of a processor: what is seen of
    /// one piece says little, for others come and go on a machine.
    rest: RangeInclusive<u32>,
    /// All that was seen of training while nothing else was done.
    alone: Stretch,
}

impl Toll {
    /// Nothing was seen yet.
    pub(crate) fn new(share: u32, rest: RangeInclusive<u32>) -> Self {
        Toll { share, rest, alone: Stretch::default() }
    }

    /// A rest is over.
    pub(crate) fn rested(&mut self, rest: Stretch) {
        self.alone.time += rest.time;
        self.alone.pushes += rest.pushes;
    }

    /// How long to rest from work that took so much of a processor. Training did this meanwhile, and that in what was
    /// rested so far.
    pub(crate) fn rest(&self, processor: Duration, worked: Stretch, rested: Stretch) -> Duration {
        let (least, most) = (processor * *self.rest.start(), processor * *self.rest.end());
        let (time, pushes) = (self.alone.time + rested.time, self.alone.pushes + rested.pushes);
        if pushes == 0 {
            return most;
        }
        // The time in which training alone does as much.
        let alone = time.mul_f64(worked.pushes as f64 / pushes as f64);
        let lost = worked.time.saturating_sub(alone);
        (lost * self.share).saturating_sub(worked.time).clamp(least, most)
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
    fn a_rest_is_as_long_as_what_training_loses_calls_for() {
        let stretch = |ms, pushes| Stretch { time: Duration::from_millis(ms), pushes };
        let none = Stretch::default();
        let mut toll = Toll::new(10, 2..=8);
        let processor = Duration::from_millis(100);
        let rest = |toll: &Toll, worked, rested| toll.rest(processor, worked, rested).as_millis();
        assert_eq!(rest(&toll, stretch(200, 10), none), 800, "nobody knows what training does alone");
        assert_eq!(
            rest(&toll, stretch(200, 14), stretch(10, 1)),
            400,
            "60 ms are lost: ten times that, less the work"
        );
        toll.rested(stretch(100, 10));
        assert_eq!(rest(&toll, stretch(200, 14), none), 400);
        assert_eq!(rest(&toll, stretch(200, 19), none), 200, "so little is lost that the least will do");
        assert_eq!(rest(&toll, stretch(200, 40), none), 200, "it did more than alone, as it seems");
        assert_eq!(rest(&toll, stretch(200, 0), none), 800);
        toll.rested(stretch(300, 10));
        assert_eq!(
            rest(&toll, stretch(200, 7), none),
            400,
            "alone it does half as much as it seemed at first"
        );
        assert_eq!(Toll::new(10, 2..=8).rest(Duration::ZERO, stretch(9, 1), stretch(1, 1)), Duration::ZERO);
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
