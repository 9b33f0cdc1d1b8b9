//! Growing pauses between tries. Pure: the caller sleeps.

use std::time::Duration;

use elasticdl_spec::mix::Rng;

/// Pauses that double from `first` to `longest`, each shortened at random by up to a quarter so that
/// many waiting processes do not come back in one instant.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    tries: u32,
    rng: Rng,
}

impl Backoff {
    /// Pauses from `first` to `longest`; the seed only spreads them.
    pub fn new(first: Duration, longest: Duration, seed: u64) -> Self {
        Backoff { first, longest, tries: 0, rng: Rng::new(seed) }
    }

    /// How long to wait before the next try.
    pub fn pause(&mut self) -> Duration {
        let doubled = self.first.saturating_mul(1 << self.tries.min(20)).min(self.longest);
        self.tries += 1;
        doubled.mul_f64(1.0 - 0.25 * self.rng.uniform())
    }

    /// How many pauses there were since the last success.
    pub fn tries(&self) -> u32 {
        self.tries
    }

    /// Something worked: begin with the shortest pause again.
    pub fn reset(&mut self) {
        self.tries = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_start_over() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(10), ms(100), 1);
        let pauses: Vec<_> = (0..8).map(|_| backoff.pause()).collect();
        for (pause, expected) in pauses.iter().zip([10, 20, 40, 80, 100, 100, 100, 100]) {
            assert!(*pause <= ms(expected) && *pause >= ms(expected * 3 / 4), "{pause:?} {expected}");
        }
        backoff.reset();
        assert!(backoff.pause() <= ms(10));
    }
}
