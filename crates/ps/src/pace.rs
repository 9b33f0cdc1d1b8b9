//! How work in the background gives way to whoever trains. While nobody does it goes as fast as it can.

#![expect(clippy::disallowed_methods, reason = "an edge: it reads clocks and rests")]

use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Nobody trains if nobody has for so long.
pub(crate) const IDLE: Duration = Duration::from_millis(200);
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

    /// So many pushes were applied by now, counted from any number. Tells whether there were some since it was told so
    /// last.
    pub(crate) fn saw(&mut self, pushes: u64) -> bool {
        let some = self.pushes.replace(pushes).is_some_and(|before| before != pushes);
        self.trained |= some;
        some
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

/// When somebody was last seen to train, for threads that see it together.
#[derive(Debug, Default)]
pub(crate) struct Trained(Mutex<Option<Duration>>);

impl Trained {
    /// Somebody does.
    pub(crate) fn again(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(of_the_clock());
    }

    /// Whether that was not long ago.
    pub(crate) fn lately(&self) -> bool {
        let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.is_some_and(|last| of_the_clock().saturating_sub(last) < IDLE)
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
    use super::*;

    /// Each look at the clock is a second of work.
    fn busy() -> Duration {
        use std::sync::atomic::{AtomicU64, Ordering};
        static LOOKS: AtomicU64 = AtomicU64::new(0);
        Duration::from_secs(LOOKS.fetch_add(1, Ordering::Relaxed))
    }

    #[test]
    fn who_trains_does_so_for_a_while() {
        let trained = Trained::default();
        assert!(!trained.lately(), "nobody has");
        trained.again();
        assert!(trained.lately());
        let began = of_the_clock();
        while trained.lately() {
            between_looks();
        }
        assert!(of_the_clock() - began >= IDLE / 2);
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
