//! A set of ids.

use super::index::Index;

/// Ids of one partition that were met.
#[derive(Debug)]
pub(crate) struct Ids {
    index: Index,
    count: u32,
}

impl Ids {
    /// None yet; about so many will come, of a job with so many partitions.
    pub(crate) fn with_room(ids: usize, partitions: u32) -> Self {
        Ids { index: Index::new(partitions).emptied(ids), count: 0 }
    }

    /// Whether an id was met.
    pub(crate) fn contains(&self, id: u64) -> bool {
        self.index.find(id).is_some()
    }

    /// Takes an id in; it may be there.
    pub(crate) fn insert(&mut self, id: u64) {
        let number = self.index.find_or_insert(id, self.count);
        self.count += u32::from(number == self.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_in_once_it_was_taken_in() {
        let mut ids = Ids::with_room(100, 1);
        for id in (0..1000).chain(500..1500) {
            ids.insert(id * 3);
        }
        assert_eq!(ids.count, 1500);
        assert!(ids.contains(0) && ids.contains(4497) && !ids.contains(4498) && !ids.contains(4500));
    }
}
