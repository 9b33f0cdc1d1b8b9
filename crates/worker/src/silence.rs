//! How long nobody was heard, in time that this process lived through. Pure.

use std::time::Duration;

/// The longest time that one look can add. Looks come several times a second, so a longer gap means that
/// this process was stopped: a master that could not be heard meanwhile was not silent.
const LOOK_LONGEST: Duration = Duration::from_secs(1);

/// Measures a silence.
#[derive(Debug, Clone)]
pub struct Silence {
    limit: Duration,
    lasted: Duration,
}

impl Silence {
    /// A silence that is too long at `limit`.
    pub fn new(limit: Duration) -> Self {
        Silence { limit, lasted: Duration::ZERO }
    }

    /// Nobody was heard for this long since the last look.
    pub fn lasts(&mut self, elapsed: Duration) {
        self.lasted += elapsed.min(LOOK_LONGEST);
    }

    /// Somebody was heard.
    pub fn ends(&mut self) {
        self.lasted = Duration::ZERO;
    }

    /// Whether it is too long, and how long it lasted.
    pub fn too_long(&self) -> Option<Duration> {
        (self.lasted >= self.limit).then_some(self.lasted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_silence_is_too_long_at_its_limit_and_ends_when_somebody_is_heard() {
        let mut silence = Silence::new(3 * SECOND);
        for _ in 0..2 {
            silence.lasts(SECOND);
        }
        assert_eq!(silence.too_long(), None);
        silence.lasts(SECOND);
        assert_eq!(silence.too_long(), Some(3 * SECOND));
        silence.ends();
        assert_eq!(silence.too_long(), None);
    }

    #[test]
    fn a_process_that_was_stopped_does_not_take_it_for_silence() {
        let mut silence = Silence::new(30 * SECOND);
        silence.lasts(3600 * SECOND);
        assert_eq!(silence.too_long(), None);
    }
}
