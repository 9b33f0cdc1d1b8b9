//! How stale gradients are: how many pushes a partition has applied between the pull that a batch was computed from and
//! the push of its gradients.

use serde::{Serialize, Serializer};

/// Classes of staleness: 0, 1, 2 to 3, 4 to 7 and so on, twice as wide each.
const CLASSES: usize = 24;

/// How many pushes were how stale.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Staleness {
    classes: [u64; CLASSES],
}

impl Staleness {
    /// Counts a push.
    pub(crate) fn count(&mut self, staleness: u64) {
        let class = (u64::BITS - staleness.leading_zeros()) as usize;
        self.classes[class.min(CLASSES - 1)] += 1;
    }

    /// Adds what another partition has counted.
    pub(crate) fn add(&mut self, other: &Staleness) {
        self.classes.iter_mut().zip(other.classes).for_each(|(sum, count)| *sum += count);
    }
}

/// A list of counts by class, as far as there are any.
impl Serialize for Staleness {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let used = self.classes.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
        serializer.collect_seq(&self.classes[..used])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_twice_as_wide_each_and_the_last_takes_the_rest() {
        let mut staleness = Staleness::default();
        assert_eq!(serde_json::to_string(&staleness).unwrap(), "[]");
        [0, 0, 1, 2, 3, 4, 7, 8].iter().for_each(|n| staleness.count(*n));
        assert_eq!(serde_json::to_string(&staleness).unwrap(), "[2,1,2,2,1]");
        let mut sum = staleness;
        sum.add(&staleness);
        assert_eq!(serde_json::to_string(&sum).unwrap(), "[4,2,4,4,2]");
        staleness.count(u64::MAX);
        assert_eq!(staleness.classes[CLASSES - 1], 1);
    }
}
