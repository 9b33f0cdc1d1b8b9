//! How an online service grows and shrinks over a day, as the original project published it. Pure.

use super::Cpus;

/// Replicas of the service over time.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// From when on how many, in seconds; in order.
    pub steps: Vec<(f64, u32)>,
    /// When it is over.
    pub end: f64,
}

impl Trace {
    /// The published ones. Of the larger, plateaus that swayed have their bounds as steps.
    pub fn published(cpus: Cpus) -> Trace {
        let (steps, end): (&[(f64, u32)], f64) = match cpus {
            Cpus::Small => (&[(85.0, 3), (172.0, 8), (286.0, 14), (375.0, 8), (470.0, 3)], 540.0),
            Cpus::Large => (
                &[(170.0, 60), (690.0, 114), (900.0, 130), (1200.0, 195), (1665.0, 130), (2165.0, 60)],
                2400.0,
            ),
        };
        Trace { steps: steps.to_vec(), end }
    }

    /// The same, so many times as fast.
    pub fn compressed(&self, times: f64) -> Trace {
        let steps = self.steps.iter().map(|&(at, replicas)| (at / times, replicas)).collect();
        Trace { steps, end: self.end / times }
    }

    /// When the step after this one begins, or the end.
    pub fn until(&self, step: usize) -> f64 {
        self.steps.get(step + 1).map_or(self.end, |&(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compressed_trace_has_the_same_steps_sooner() {
        let trace = Trace::published(Cpus::Small).compressed(2.0);
        assert_eq!(trace.steps[0], (42.5, 3));
        assert_eq!((trace.until(0), trace.until(4), trace.end), (86.0, 270.0, 270.0));
        for cpus in [Cpus::Small, Cpus::Large] {
            let trace = Trace::published(cpus);
            assert!(trace.steps.windows(2).all(|pair| pair[0].0 < pair[1].0), "{trace:?}");
        }
    }
}
