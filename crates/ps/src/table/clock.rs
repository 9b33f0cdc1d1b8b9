//! Which row makes room for another one in a table that is full: a hand goes round over the rows.
//!
//! By *use* it passes over a row that was trained since it came by last, once (the second chance). By *age* it takes row
//! after row: one that is replaced is the youngest then, so that the one at the hand is always the eldest.
//!
//! It is a function of the pushes alone, so that whoever applies the same pushes evicts the same rows.

use elasticdl_spec::Evict;

use super::pages::Pages;

/// Room for so many rows is made at first.
const FIRST_ROWS: usize = 64;
/// Where there are more rows than fit, room is made for such a part of them more.
const BEYOND_PART: usize = 8;

/// The ids of a table's rows by their numbers, and whose turn it is to go.
#[derive(Debug)]
pub(super) struct Clock {
    /// By row number, with room for more.
    ids: Pages<u64>,
    /// One bit for each row that was trained since the hand came by.
    used: Pages<u64>,
    /// How many rows there are.
    len: usize,
    /// The row that is looked at next.
    hand: usize,
    rows_max: usize,
    evict: Evict,
}

impl Clock {
    /// Of a table without a row, which takes so many.
    pub(super) fn new(rows_max: usize, evict: Evict) -> Self {
        let room = rows_max.clamp(1, FIRST_ROWS);
        Clock { ids: Pages::small(room), used: Pages::small(words(room)), len: 0, hand: 0, rows_max, evict }
    }

    /// Bytes that it takes with so many rows, where there may be no more.
    pub(super) fn bytes_of(rows: usize) -> u64 {
        Pages::<u64>::bytes_small(rows) + Pages::<u64>::bytes_small(words(rows))
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> u64 {
        self.ids.bytes_of_first(self.len) + self.used.bytes_of_first(words(self.len))
    }

    /// Whether a row must go before another one comes.
    pub(super) fn is_full(&self) -> bool {
        self.len >= self.rows_max
    }

    /// How many rows there may be.
    pub(super) fn rows_max(&self) -> usize {
        self.rows_max
    }

    /// The ids of all rows, by number.
    pub(super) fn ids(&self) -> &[u64] {
        &self.ids[..self.len]
    }

    /// Where the hand is.
    pub(super) fn hand(&self) -> usize {
        self.hand
    }

    /// The bits of rows that were trained since the hand came by.
    pub(super) fn used(&self) -> &[u64] {
        &self.used[..words(self.len)]
    }

    /// Makes room for the numbers below `len`; what they are is told by [`Clock::set`].
    pub(super) fn reach(&mut self, len: usize) {
        if len > self.ids.len() {
            let room = if len <= self.rows_max {
                // Twice as much as before, but never more than will be needed.
                (2 * self.ids.len()).min(self.rows_max).max(len)
            } else {
                // What was written when more rows fitted comes row by row as well.
                len + len / BEYOND_PART
            };
            self.ids.grow(room);
            self.used.grow(words(room));
        }
        self.len = self.len.max(len);
    }

    /// The row `number` is that of `id` now.
    pub(super) fn set(&mut self, number: u32, id: u64) {
        self.ids[number as usize] = id;
    }

    /// A row is trained.
    #[inline(always)]
    pub(super) fn touch(&mut self, number: u32) {
        self.used[number as usize / 64] |= 1 << (number % 64);
    }

    /// The row that goes.
    pub(super) fn victim(&mut self) -> u32 {
        if self.evict == Evict::Use {
            self.pass_over();
        }
        let victim = self.hand;
        self.hand = (self.hand + 1) % self.len;
        u32::try_from(victim).expect("a row's number is below 2^32")
    }

    /// Moves the hand to the first row from it on that was not trained, and takes the bits of those in between. Each
    /// bit that is taken was set by a push, so that a push pays for the way.
    fn pass_over(&mut self) {
        let len = self.len;
        loop {
            let (word, first) = (self.hand / 64, self.hand % 64);
            let end = (len - 64 * word).min(64);
            let bits = self.used[word];
            let next = ((!bits >> first).trailing_zeros() as usize + first).min(end);
            // Those from the hand on, up to the one that was found.
            let passed = (u64::MAX << first) & if next == 64 { u64::MAX } else { (1 << next) - 1 };
            self.used[word] = bits & !passed;
            self.hand = (64 * word + next) % len;
            if next < end {
                return;
            }
        }
    }

    /// Becomes what another one was, which has the same rows. Without its bits (files of old have none) every row counts
    /// as trained. `false`: they are the bits of more rows, or of fewer.
    pub(super) fn restore(&mut self, hand: usize, used: &[u64]) -> bool {
        self.hand = if hand < self.len { hand } else { 0 };
        let words = words(self.len);
        match used.len() {
            0 => (0..self.len).for_each(|number| self.touch(number as u32)),
            given if given == words => self.used[..words].copy_from_slice(used),
            _ => return false,
        }
        true
    }
}

/// Words of the bits of so many rows.
fn words(rows: usize) -> usize {
    rows.div_ceil(64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn full(rows: usize, evict: Evict) -> Clock {
        let mut clock = Clock::new(rows, evict);
        clock.reach(rows);
        clock
    }

    #[test]
    fn by_age_rows_go_in_the_order_of_their_birth() {
        let mut clock = full(3, Evict::Age);
        clock.touch(0);
        assert_eq!([(); 7].map(|()| clock.victim()), [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn by_use_a_trained_row_gets_a_second_chance_and_no_third() {
        let mut clock = full(3, Evict::Use);
        clock.touch(0);
        clock.touch(1);
        assert_eq!(clock.victim(), 2);
        assert_eq!(clock.victim(), 0);
        [0, 1, 2].into_iter().for_each(|number| clock.touch(number));
        assert_eq!(clock.victim(), 1, "all have their chance, and the hand is back where it was");
        assert_eq!(clock.victim(), 2);
    }

    /// Goal: the memory is what the plan of a table says, at the end and on the way there.
    #[test]
    fn it_takes_no_more_than_was_said() {
        for rows in [1, 63, 64, 65, 1000, 5000, 200_000] {
            let mut clock = Clock::new(rows, Evict::Use);
            for len in 1..=rows {
                clock.reach(len);
                assert!(clock.bytes() <= Clock::bytes_of(rows), "{len} of {rows}");
                assert_eq!(clock.is_full(), len == rows);
            }
            assert_eq!(clock.bytes(), Clock::bytes_of(rows), "{rows}");
        }
    }

    /// Goal: a table that was written when more rows fitted is restored without a copy of all for each of them.
    #[test]
    fn rows_beyond_those_that_fit_are_not_made_room_for_one_by_one() {
        let mut clock = full(1000, Evict::Use);
        let mut rooms: Vec<usize> = (1001..=20_000)
            .map(|len| {
                clock.reach(len);
                clock.ids.len()
            })
            .collect();
        rooms.dedup();
        assert!(rooms.len() < 40 && *rooms.last().unwrap() >= 20_000, "{rooms:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Goal: words of bits are gone over as if they were looked at one by one.
        #[test]
        fn the_hand_goes_as_over_single_bits(
            rows in 1..200usize,
            events in proptest::collection::vec(proptest::option::of(0..200usize), 0..300),
        ) {
            let mut clock = full(rows, Evict::Use);
            let (mut used, mut hand) = (vec![false; rows], 0);
            for event in events {
                match event {
                    Some(number) => {
                        used[number % rows] = true;
                        clock.touch((number % rows) as u32);
                    }
                    None => {
                        while std::mem::take(&mut used[hand]) {
                            hand = (hand + 1) % rows;
                        }
                        prop_assert_eq!(clock.victim() as usize, hand);
                        hand = (hand + 1) % rows;
                    }
                }
            }
        }
    }
}
