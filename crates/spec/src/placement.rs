//! Where rows and tensors live: a pure function of the id and the number of partitions.
//!
//! The number of partitions is fixed for the life of a job and its checkpoints; the number of
//! servers is not. Workers and servers compute the same answer without asking anyone.

use crate::ids::{PartitionId, ServerId};
use crate::mix::{hash_text, mix64};

/// The partition that holds the row with this id.
///
/// Ids whose hashes are neighbours are in one partition. A table inside it goes by the rest of the hash.
#[inline]
pub fn partition_of_row(id: u64, partitions: u32) -> PartitionId {
    PartitionId(((u128::from(mix64(id)) * u128::from(partitions)) >> 64) as u32)
}

/// The partition that holds the dense tensor with this name.
pub fn partition_of_tensor(name: &str, partitions: u32) -> PartitionId {
    partition_of_row(hash_text(name), partitions)
}

/// The server that holds a partition at first, with `servers` servers: partitions are dealt round-robin.
pub fn server_of_partition(partition: PartitionId, servers: u32) -> ServerId {
    ServerId(partition.0 % servers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_ids_spread_evenly() {
        let mut counts = [0u32; 16];
        for id in 0..160_000 {
            counts[partition_of_row(id, 16).0 as usize] += 1;
        }
        assert!(counts.iter().all(|&c| (9_500..10_500).contains(&c)), "{counts:?}");
    }
}
