//! Batches are a pure function of the task, the seed and the shard.

use elasticdl_data::{BadRecord, Batch, BatchesConfig};
use elasticdl_spec::{Shard, TaskId};
use proptest::prelude::*;

use crate::made::{Made, all, in_order, plain};

/// Every seventh record is bad where `bad`.
fn lines(records: usize, bad: bool) -> String {
    (0..records)
        .map(|n| if bad && n % 7 == 3 { "broken\n".into() } else { format!("{},{n},x\n", n % 2) })
        .collect()
}

fn one_shard(made: &Made, records: usize, bad: bool) -> Shard {
    let file = made.file("some.csv", lines(records, bad));
    made.shards(&file, &plain(), 1 << 30).expect("the file is fine").pop().expect("one shard")
}

fn config(shard: &Shard, batch: usize, batches_per_block: u32) -> BatchesConfig {
    BatchesConfig { batch, batches_per_block, shuffle: true, ..in_order(shard, &plain()) }
}

fn sorted(batches: &[(u64, Batch, Vec<BadRecord>)]) -> Vec<u32> {
    let mut numbers: Vec<u32> =
        batches.iter().flat_map(|(_, batch, _)| &batch.numeric).map(|n| *n as u32).collect();
    numbers.sort_unstable();
    numbers
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn starting_at_a_batch_yields_the_tail_of_all_batches(
        records in 1..300usize,
        batch in 1..40usize,
        batches_per_block in 1..6u32,
        first in 0..20u64,
        bad: bool,
        shuffle: bool,
        seed: u64,
    ) {
        let made = Made::new();
        let config = BatchesConfig {
            shuffle, seed, ..config(&one_shard(&made, records, bad), batch, batches_per_block)
        };
        let whole = all(config.clone()).expect("it can be read");
        let tail = all(BatchesConfig { first_batch: first, ..config }).expect("it can be read");
        prop_assert_eq!(&tail[..], whole.get(first as usize..).unwrap_or_default());
        prop_assert_eq!(whole.len(), records.div_ceil(batch));
        let expected: Vec<u32> = (0..records as u32).filter(|n| !bad || n % 7 != 3).collect();
        prop_assert_eq!(sorted(&whole), expected);
        let set_aside: usize = whole.iter().map(|(.., bad)| bad.len()).sum();
        prop_assert_eq!(set_aside, (0..records).filter(|n| bad && n % 7 == 3).count());
    }
}

#[test]
fn batches_are_numbered_and_the_last_may_be_smaller() {
    let made = Made::new();
    let batches = all(config(&one_shard(&made, 25, false), 4, 3)).expect("it can be read");
    let sizes: Vec<(u64, usize)> = batches.iter().map(|(at, batch, _)| (*at, batch.records)).collect();
    assert_eq!(sizes, [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4), (5, 4), (6, 1)]);
}

#[test]
fn shuffling_depends_on_task_seed_and_block_and_stays_inside_the_block() {
    let made = Made::new();
    let config = config(&one_shard(&made, 200, false), 10, 10);
    let order = |config: BatchesConfig| -> Vec<u32> {
        let batches = all(config).expect("it can be read");
        batches.iter().flat_map(|(_, batch, _)| &batch.numeric).map(|n| *n as u32).collect()
    };
    let first = order(config.clone());
    assert_eq!(first, order(config.clone()));
    assert_ne!(first, order(BatchesConfig { seed: 2, ..config.clone() }));
    assert_ne!(first, order(BatchesConfig { task: TaskId::train(1, 0), ..config.clone() }));
    assert_ne!(first, order(BatchesConfig { shuffle: false, ..config }));
    assert!(first[..100].iter().all(|n| *n < 100) && first[100..].iter().all(|n| *n >= 100));
    let shifted: Vec<u32> = first[..100].iter().map(|n| n + 100).collect();
    assert_ne!(first[100..], shifted);
}

#[test]
fn in_order_means_file_order() {
    let made = Made::new();
    let batches = all(in_order(&one_shard(&made, 5000, false), &plain())).expect("it can be read");
    let numbers: Vec<f32> = batches.into_iter().flat_map(|(_, batch, _)| batch.numeric).collect();
    assert_eq!(numbers, (0..5000).map(|n| n as f32).collect::<Vec<_>>());
}

#[test]
fn bad_records_shorten_the_last_batches_of_their_block_and_are_told_with_its_first() {
    let made = Made::new();
    let file = made.file("some.csv", "0,0,x\nbad\nbad\nbad\n0,4,x\n0,5,x\n0,6,x\n0,7,x\n");
    let shard = made.shards(&file, &plain(), 100).expect("it can be cut").pop().expect("one shard");
    let batches = all(BatchesConfig { shuffle: false, ..config(&shard, 2, 2) }).expect("it can be read");
    let told: Vec<(u64, Vec<f32>, usize)> =
        batches.into_iter().map(|(at, batch, bad)| (at, batch.numeric, bad.len())).collect();
    assert_eq!(told, [(0, vec![0.0], 3), (1, vec![], 0), (2, vec![4.0, 5.0], 0), (3, vec![6.0, 7.0], 0)]);
}

#[test]
fn batches_without_records_are_refused() {
    let made = Made::new();
    let shard = one_shard(&made, 5, false);
    assert!(all(config(&shard, 0, 1)).is_err());
    assert!(all(config(&shard, 1, 0)).is_err());
    assert!(all(config(&shard, usize::MAX / 2, 2)).is_err());
    assert!(all(config(&shard, 1 << 20, 1 << 20)).is_err());
}
