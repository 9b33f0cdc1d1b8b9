//! What is to happen, ordered by time and then by the order in which it was planned.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::Duration;

/// A queue of things to happen.
#[derive(Debug)]
pub struct Queue<T> {
    heap: BinaryHeap<Entry<T>>,
    planned: u64,
}

#[derive(Debug)]
struct Entry<T> {
    at: Duration,
    number: u64,
    what: T,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Queue { heap: BinaryHeap::new(), planned: 0 }
    }
}

impl<T> Queue<T> {
    /// Plans something.
    pub fn plan(&mut self, at: Duration, what: T) {
        self.planned += 1;
        self.heap.push(Entry { at, number: self.planned, what });
    }

    /// The next thing, and when it happens.
    pub fn pop(&mut self) -> Option<(Duration, T)> {
        self.heap.pop().map(|entry| (entry.at, entry.what))
    }

    /// How many things were ever planned.
    pub fn planned(&self) -> u64 {
        self.planned
    }
}

impl<T> Ord for Entry<T> {
    /// The heap gives the greatest first: the earliest is the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for Entry<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_comes_first_and_equals_in_the_order_of_planning() {
        let mut queue = Queue::default();
        for (at, what) in [(5, "c"), (1, "a"), (5, "d"), (2, "b")] {
            queue.plan(Duration::from_secs(at), what);
        }
        let order: Vec<&str> = std::iter::from_fn(|| queue.pop().map(|(_, what)| what)).collect();
        assert_eq!(order, ["a", "b", "c", "d"]);
    }
}
