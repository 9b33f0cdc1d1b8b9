//! How often ids were named that have no row, about: a count-min sketch.
//!
//! Every id has one counter in each of a few lines. Ids share counters, so that a count may be too high, and never is too
//! low: the least of an id's counters is its count, and only counters that are at the least go up. After so many counts
//! all are halved, and who came long ago is forgotten.

use elasticdl_spec::mix::mix2;

/// Lines of counters; each id has one in each.
const LINES: usize = 4;
/// All counters are halved after so many counts for each counter of a line. The more, the longer an id is remembered,
/// and the more often one is taken for another.
const COUNTS_EACH: u64 = 1;

/// Counts of ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sketch {
    /// Line after line.
    counters: Vec<u8>,
    /// Counters of a line.
    width: usize,
    /// Counts since all were halved.
    counted: u64,
}

impl Sketch {
    /// Nothing was counted yet; it takes at most so many bytes, and some in any case.
    pub(super) fn new(bytes: u64) -> Self {
        let width = Sketch::width(bytes);
        Sketch { counters: vec![0; LINES * width], width, counted: 0 }
    }

    /// Bytes of a sketch that may take so many.
    pub(super) fn bytes_of(bytes: u64) -> u64 {
        (LINES * Sketch::width(bytes)) as u64
    }

    /// Whole words of eight counters, of which checkpoints are made.
    fn width(bytes: u64) -> usize {
        (bytes as usize / LINES / 8 * 8).max(8)
    }

    /// Bytes in use.
    pub(super) fn bytes(&self) -> u64 {
        self.counters.len() as u64
    }

    /// Counts an id and tells how often it was, about; 255 is the most.
    pub(super) fn count(&mut self, id: u64) -> u8 {
        self.counted += 1;
        if self.counted > COUNTS_EACH * self.width as u64 {
            self.counters.iter_mut().for_each(|counter| *counter >>= 1);
            self.counted = 1;
        }
        let places = self.places(id);
        let least = places.iter().map(|place| self.counters[*place]).min().unwrap_or(0);
        let now = least.saturating_add(1);
        for place in places {
            self.counters[place] = self.counters[place].max(now);
        }
        now
    }

    /// All there is to it, as words: how many counts there were since all were halved, then eight counters a word.
    pub(super) fn words(&self) -> Vec<u64> {
        let counters = self.counters.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        std::iter::once(self.counted).chain(counters).collect()
    }

    /// Becomes what gave these words. `false`: that was larger or smaller, and nothing has changed.
    pub(super) fn restore(&mut self, words: &[u64]) -> bool {
        let Some((counted, words)) =
            words.split_first().filter(|(_, rest)| 8 * rest.len() == self.counters.len())
        else {
            return false;
        };
        self.counted = *counted;
        for (counters, word) in self.counters.as_chunks_mut().0.iter_mut().zip(words) {
            *counters = word.to_le_bytes();
        }
        true
    }

    /// The counters of an id.
    fn places(&self, id: u64) -> [usize; LINES] {
        // Ids of one partition have high bits of their plain hash in common.
        let hash = mix2(id, 0x5ce7c4);
        let (first, step) = (hash as u32, (hash >> 32) as u32 | 1);
        std::array::from_fn(|line| {
            let spread = first.wrapping_add(step.wrapping_mul(line as u32));
            line * self.width + ((u64::from(spread) * self.width as u64) >> 32) as usize
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use elasticdl_spec::mix::mix64;
    use proptest::prelude::*;

    use super::*;

    /// An id of a Zipf-like stream: the k-th most frequent comes about 1/k as often as the first.
    fn zipf(draw: u64, ids: f64) -> u64 {
        let even = (mix64(draw.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 11) as f64 / (1u64 << 53) as f64;
        ids.powf(even) as u64
    }

    /// Goal: an id that is named so often is admitted, whatever else comes; and hardly any before its time.
    #[test]
    fn counts_of_a_zipf_stream_are_never_too_low_and_seldom_too_high() {
        let mut sketch = Sketch::new(1 << 16);
        let (mut exact, mut high) = (BTreeMap::new(), 0);
        let counts = COUNTS_EACH * (1 << 14);
        for draw in 0..counts {
            let id = zipf(draw, 1e6);
            let due = exact.entry(id).or_insert(0u64);
            *due += 1;
            let told = u64::from(sketch.count(id));
            assert!(told >= (*due).min(255), "{told} of {due}");
            high += u64::from(told > *due + 1 && *due < 250);
        }
        assert!(exact.len() > 5_000, "{}", exact.len());
        assert!(high * 100 < counts, "{high} of {counts} counts are too high by two or more");
    }

    #[test]
    fn who_came_long_ago_is_forgotten() {
        let mut sketch = Sketch::new(1 << 12);
        for _ in 0..8 {
            sketch.count(7);
        }
        let period = COUNTS_EACH * (1 << 10);
        // Nobody else: counts of one other id disturb nothing.
        for _ in 0..4 * period {
            sketch.count(8);
        }
        assert_eq!(sketch.count(7), 1);
        assert!(sketch.count(8) > 100);
    }

    #[test]
    fn it_is_as_large_as_it_may_be_and_comes_back_from_its_words() {
        for (may, is) in [(0, 32), (100, 96), (1 << 18, 1 << 18)] {
            assert_eq!((Sketch::bytes_of(may), Sketch::new(may).bytes()), (is, is));
        }
        let mut sketch = Sketch::new(1000);
        for draw in 0..300 {
            sketch.count(zipf(draw, 50.0));
        }
        let mut other = Sketch::new(1000);
        assert!(!other.restore(&[]) && !other.restore(&[1, 2]) && other == Sketch::new(1000));
        assert!(other.restore(&sketch.words()));
        assert_eq!(other, sketch);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Goal: between two halvings no count is too low, in however small a sketch.
        #[test]
        fn no_count_is_too_low(ids in proptest::collection::vec(0..200u64, 0..64), bytes in 256..600u64) {
            let mut sketch = Sketch::new(bytes);
            let mut exact = BTreeMap::new();
            for id in ids {
                let due = exact.entry(id).or_insert(0u8);
                *due += 1;
                prop_assert!(sketch.count(id) >= *due);
            }
        }
    }
}
