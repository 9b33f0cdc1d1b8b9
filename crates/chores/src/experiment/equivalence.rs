//! Whether two ways of training come to the same: a test of equivalence, not a look. Pure.
//!
//! Two one-sided t-tests on differences between paired runs: the ways are equivalent within a margin where the 90 %
//! confidence interval of the mean difference lies inside it. Runs that scatter much make the interval wide, so that
//! noise speaks against equivalence and not for it.

/// The 95 % quantile of Student's t for 1, 2, 3 and so on degrees of freedom.
const T95: [f64; 9] = [6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833];

/// What the differences say.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// The mean difference.
    pub mean: f64,
    /// The 90 % confidence interval reaches so far to both sides of it.
    pub reach: f64,
}

impl Interval {
    /// From the differences of up to 10 pairs. One pair says nothing of how much they scatter: then there is no
    /// interval, and what is left is a look.
    pub fn of(differences: &[f64]) -> Interval {
        let n = differences.len();
        assert!((1..=T95.len() + 1).contains(&n), "{n} pairs");
        let mean = differences.iter().sum::<f64>() / n as f64;
        if n == 1 {
            return Interval { mean, reach: 0.0 };
        }
        let variance = differences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / (n - 1) as f64;
        Interval { mean, reach: T95[n - 2] * (variance / n as f64).sqrt() }
    }

    /// How far from zero the difference may be.
    pub fn farthest(&self) -> f64 {
        self.mean.abs() + self.reach
    }

    /// Whether the difference is less than that, with 95 % confidence on either side.
    pub fn is_within(&self, margin: f64) -> bool {
        self.farthest() < margin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_pairs_that_differ_little_are_equivalent_and_scatter_speaks_against_it() {
        let little = Interval::of(&[0.0001, -0.0002, 0.0003]);
        // Mean 0.0000667, deviation 0.0002517: 2.920 × 0.0002517 / √3.
        assert!(
            (little.mean - 6.667e-5).abs() < 1e-7 && (little.reach - 4.243e-4).abs() < 1e-6,
            "{little:?}"
        );
        assert!(little.is_within(0.0017) && !little.is_within(0.0004));
        assert!(
            !Interval::of(&[0.002, -0.002, 0.0]).is_within(0.0017),
            "its mean is zero, and that says nothing"
        );
        assert!(!Interval::of(&[0.0018, 0.0018, 0.0018]).is_within(0.0017));
    }
}
