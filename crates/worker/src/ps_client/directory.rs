//! Which partition is served where: the master's word, kept until a server says otherwise.
//!
//! Pulls and pushes run on two threads and share one directory, so that what one of them learns the other
//! knows. It asks when told to and never by itself.

use std::sync::{Arc, Mutex, PoisonError};

use elasticdl_spec::PartitionId;

use crate::store::Generation;

/// Where a partition is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Which life of it.
    pub incarnation: u64,
    /// Host and port; empty while no server serves it.
    pub address: String,
}

/// Whoever knows the places: the master, or a test.
pub trait Places: Send + Sync {
    /// The partitions that are known, in any order. May wait for the call, not for a master to come back.
    fn places(&self) -> elasticdl_wire::Result<Vec<(PartitionId, Place)>>;
}

/// The places of all partitions at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Grows when an incarnation changes, not when a mere address does.
    pub generation: Generation,
    /// By partition.
    pub places: Vec<Place>,
}

/// The last topology heard of, shared by a worker's threads.
pub struct Directory {
    source: Box<dyn Places>,
    known: Mutex<Arc<Topology>>,
}

impl Directory {
    /// Knows nothing yet: every partition is unserved until [`Directory::refresh`].
    pub fn new(partitions: u32, source: Box<dyn Places>) -> Self {
        let nowhere = Place { incarnation: 0, address: String::new() };
        let places = vec![nowhere; partitions as usize];
        Directory { source, known: Mutex::new(Arc::new(Topology { generation: Generation(0), places })) }
    }

    /// The topology heard of last.
    pub fn known(&self) -> Arc<Topology> {
        Arc::clone(&self.known.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Asks again. Where nothing changed, the topology stays the very same one.
    pub fn refresh(&self) -> elasticdl_wire::Result<Arc<Topology>> {
        // Asked without the lock: the other thread may read on meanwhile.
        let heard = self.source.places()?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut places = known.places.clone();
        for (partition, place) in heard {
            // Two answers may overtake each other. A partition's incarnation only grows, so the older
            // answer shows itself and is dropped.
            match places.get_mut(partition.0 as usize) {
                Some(old) if place.incarnation >= old.incarnation => *old = place,
                Some(_) => {}
                None => {
                    return Err(elasticdl_wire::Error::Malformed(format!("{partition} in the topology")));
                }
            }
        }
        if places != known.places {
            let lives = |places: &[Place]| places.iter().map(|p| p.incarnation).collect::<Vec<_>>();
            let reborn = lives(&places) != lives(&known.places);
            let generation = Generation(known.generation.0 + u64::from(reborn));
            *known = Arc::new(Topology { generation, places });
        }
        Ok(Arc::clone(&known))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Script(Mutex<Vec<Vec<(PartitionId, Place)>>>);

    impl Places for Script {
        fn places(&self) -> elasticdl_wire::Result<Vec<(PartitionId, Place)>> {
            Ok(self.0.lock().unwrap().remove(0))
        }
    }

    fn place(partition: u32, incarnation: u64, address: &str) -> (PartitionId, Place) {
        (PartitionId(partition), Place { incarnation, address: address.into() })
    }

    fn directory(answers: Vec<Vec<(PartitionId, Place)>>) -> Directory {
        Directory::new(2, Box::new(Script(Mutex::new(answers))))
    }

    #[test]
    fn the_generation_grows_with_incarnations_and_not_with_addresses() {
        let directory = directory(vec![
            vec![place(0, 1, "a"), place(1, 1, "b")],
            vec![place(0, 1, "c"), place(1, 1, "b")],
            vec![place(0, 1, "c"), place(1, 2, "b")],
        ]);
        let first = directory.refresh().unwrap();
        let moved = directory.refresh().unwrap();
        assert_eq!(moved.generation, first.generation);
        assert_eq!(moved.places[0].address, "c");
        let reborn = directory.refresh().unwrap();
        assert!(reborn.generation > moved.generation);
    }

    #[test]
    fn an_answer_that_was_overtaken_changes_nothing() {
        let directory = directory(vec![
            vec![place(0, 3, "new"), place(1, 1, "b")],
            vec![place(0, 2, "old"), place(1, 1, "b")],
        ]);
        let new = directory.refresh().unwrap();
        let late = directory.refresh().unwrap();
        assert!(Arc::ptr_eq(&new, &late));
    }

    #[test]
    fn a_partition_that_cannot_be_is_refused() {
        assert!(directory(vec![vec![place(2, 1, "a")]]).refresh().is_err());
    }
}
