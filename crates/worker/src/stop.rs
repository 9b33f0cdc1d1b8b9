//! How a worker is told to end: one level that every stage watches, and pauses that end when it rises.
//!
//! It only rises. Nothing here decides when.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How urgently the worker is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Not at all.
    Running,
    /// Finish what was pulled, begin nothing.
    Draining,
    /// Leave everything where it is. Safe at any moment: the marks say what was applied.
    Stopped,
}

/// The level, shared by all stages; cheap to clone.
#[derive(Debug, Clone)]
pub struct Stop {
    shared: Arc<(Mutex<Level>, Condvar)>,
}

impl Default for Stop {
    fn default() -> Self {
        Stop { shared: Arc::new((Mutex::new(Level::Running), Condvar::new())) }
    }
}

impl Stop {
    /// The level now.
    pub fn level(&self) -> Level {
        *self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is at least this.
    pub fn reached(&self, level: Level) -> bool {
        self.level() >= level
    }

    /// Raises the level; a lower one changes nothing.
    pub fn raise(&self, level: Level) {
        let mut now = self.shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        *now = level.max(*now);
        self.shared.1.notify_all();
    }

    /// Waits so long, or until the level is reached. Returns whether it is.
    pub fn pause(&self, time: Duration, until: Level) -> bool {
        let now = self.shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.shared.1.wait_timeout_while(now, time, |level| *level < until);
        *waited.unwrap_or_else(PoisonError::into_inner).0 >= until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_only_rises() {
        let stop = Stop::default();
        stop.raise(Level::Stopped);
        stop.raise(Level::Draining);
        assert_eq!(stop.level(), Level::Stopped);
    }

    #[test]
    fn a_pause_ends_when_its_level_is_reached_and_not_before() {
        let stop = Stop::default();
        assert!(!stop.pause(Duration::ZERO, Level::Draining));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| stop.pause(Duration::from_secs(60), Level::Stopped));
            stop.raise(Level::Draining);
            stop.raise(Level::Stopped);
            assert!(waiting.join().unwrap());
        });
    }
}
