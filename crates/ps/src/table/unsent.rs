//! Rows that another server has not got as they are now, while it copies the table.

use std::collections::VecDeque;

/// A queue of rows, each in it at most once.
#[derive(Debug)]
pub(super) struct Unsent {
    queue: VecDeque<u64>,
    /// By row number: whether its id is in the queue.
    queued: Vec<u64>,
}

impl Unsent {
    /// All rows, given by their ids, or by their numbers where those are what counts.
    pub(super) fn all(ids: Vec<u64>) -> Self {
        let mut queued = vec![u64::MAX; ids.len().div_ceil(64)];
        if let (Some(last), rest @ 1..) = (queued.last_mut(), ids.len() % 64) {
            *last = (1 << rest) - 1;
        }
        Unsent { queue: ids.into(), queued }
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// A row is born or about to change.
    #[inline]
    pub(super) fn changed(&mut self, id: u64, number: u32) {
        let (word, bit) = (number as usize / 64, 1 << (number % 64));
        if word >= self.queued.len() {
            self.queued.resize(word + 1, 0);
        }
        if self.queued[word] & bit == 0 {
            self.queued[word] |= bit;
            self.queue.push_back(id);
        }
    }

    /// The ids that have waited longest; each is to be taken out by [`Unsent::sent`].
    pub(super) fn next(&mut self, most: usize) -> Vec<u64> {
        self.queue.drain(..most.min(self.queue.len())).collect()
    }

    /// The row is sent as it is now.
    #[inline]
    pub(super) fn sent(&mut self, number: u32) {
        self.queued[number as usize / 64] &= !(1 << (number % 64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_waits_once_however_often_it_changes() {
        let mut unsent = Unsent::all((100..165).collect());
        assert_eq!(unsent.len(), 65);
        unsent.changed(100, 0);
        unsent.changed(165, 65);
        unsent.changed(165, 65);
        assert_eq!(unsent.len(), 66);
        assert_eq!(unsent.next(2), [100, 101]);
        unsent.sent(0);
        unsent.changed(100, 0);
        unsent.changed(101, 1);
        let rest = unsent.next(1000);
        assert_eq!(rest.len(), 65, "row 101 is taken out and not sent yet: it does not wait again");
        assert_eq!(rest.last(), Some(&100));
        assert_eq!(unsent.len(), 0);
    }
}
