//! The table against a plain map that does the same the slow way.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_spec::mix::mix64;
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{Initializer, OptimizerSpec, TableShape, TableSpec};
use proptest::prelude::*;

use super::*;
use crate::optimizer::tests::ALL;

const ADAGRAD: OptimizerSpec =
    OptimizerSpec::Adagrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-10 };
const ADAM: OptimizerSpec =
    OptimizerSpec::Adam { learning_rate: 0.1, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
const SGD: OptimizerSpec = OptimizerSpec::Sgd { learning_rate: 0.1 };

fn shape(name: &str) -> TableShape {
    TableShape {
        name: name.into(),
        parts: vec![
            RowPart { width: 1, init: Initializer::Zeros },
            RowPart { width: 2, init: Initializer::Uniform { bound: 0.1 } },
            RowPart { width: 2, init: Initializer::Normal { deviation: 0.5 } },
        ],
    }
}

/// Weights and slots of a row that nobody has pushed to.
fn born(shape: &TableShape, seed: u64, id: u64, optimizer: &Optimizer) -> (Vec<f32>, Vec<f32>) {
    let mut weights = vec![0.0; shape.width()];
    shape.init_row(seed, id, &mut weights);
    let mut slots = vec![0.0; optimizer.slots(weights.len())];
    optimizer.begin(&mut slots);
    (weights, slots)
}

fn pulled(table: &mut Table, ids: &[u64]) -> Vec<f32> {
    let mut out = vec![9.0; ids.len() * table.width];
    table.pull(ids, &mut out);
    out
}

fn read(table: &Table, ids: &[u64]) -> Vec<f32> {
    let mut out = vec![9.0; ids.len() * table.width];
    table.read(ids, &mut out);
    out
}

#[test]
fn a_pulled_row_is_what_the_initializer_says() {
    let optimizer = Optimizer::new(ADAGRAD);
    let mut table = Table::new(shape("a"), 7, &optimizer);
    let ids: Vec<u64> = (0..1000).chain([u64::MAX, u64::MAX - 1, 1 << 63]).collect();
    let expected: Vec<f32> = ids.iter().flat_map(|id| born(&shape("a"), 7, *id, &optimizer).0).collect();
    assert_eq!(pulled(&mut table, &ids), expected);
    assert_eq!(table.len(), ids.len());
    assert_eq!(read(&table, &ids), expected);
}

/// Goal: an id that found its bucket full, and those after it, is looked for there, around the end of the buckets too;
/// and one that is nowhere is born, however many were passed.
#[test]
fn ids_that_crowd_are_found_however_far_they_lie() {
    // A single segment tells buckets by the last 32 bits of a hash: all of these belong to the last one of many.
    let crowded: Vec<u64> = (0..).filter(|id| mix64(*id) as u32 >> 20 == 0xfff).take(120).collect();
    let others = (0..4000).map(|i| 1 << 40 | i);
    let ids: Vec<u64> =
        others.zip(crowded.iter().flat_map(|id| [*id; 33])).flat_map(|(a, b)| [a, b]).collect();
    let optimizer = Optimizer::new(SGD);
    let mut table = Table::new(shape("a"), 7, &optimizer);
    let (early, late) = crowded.split_at(100);
    pulled(&mut table, early);
    let expected: Vec<f32> = ids.iter().flat_map(|id| born(&shape("a"), 7, *id, &optimizer).0).collect();
    for _ in 0..2 {
        assert_eq!(pulled(&mut table, &ids), expected);
    }
    let unique: BTreeSet<u64> = ids.iter().copied().collect();
    assert!(late.iter().all(|id| unique.contains(id)));
    assert_eq!((table.len(), BTreeSet::from_iter(table.ids())), (unique.len(), unique));
}

/// Defect 6 of the original: the n-th row of every table was the same vector, whatever its id.
#[test]
fn rows_do_not_depend_on_the_order_of_birth_nor_on_other_tables() {
    let optimizer = Optimizer::new(SGD);
    let mut forward = Table::new(shape("a"), 7, &optimizer);
    let mut backward = Table::new(shape("a"), 7, &optimizer);
    let mut other = Table::new(shape("b"), 7, &optimizer);
    let ids: Vec<u64> = (0..500).collect();
    let reversed: Vec<u64> = ids.iter().rev().copied().collect();
    pulled(&mut backward, &reversed);
    assert_eq!(pulled(&mut forward, &ids), pulled(&mut backward, &ids));
    let differing =
        pulled(&mut other, &ids).chunks(5).zip(pulled(&mut forward, &ids).chunks(5)).all(|(a, b)| a != b);
    assert!(differing, "two tables share a row");
}

#[test]
fn reading_an_unknown_row_gives_zeros_and_bears_nothing() {
    let mut table = Table::new(shape("a"), 7, &Optimizer::new(ADAM));
    pulled(&mut table, &[3]);
    let out = read(&table, &[2, 3, 4]);
    assert!(out[..5].iter().chain(&out[10..]).all(|x| *x == 0.0));
    assert!(out[6..10].iter().any(|x| *x != 0.0));
    assert_eq!(table.len(), 1);
}

#[test]
fn pushing_to_an_unknown_row_moves_it_from_its_birth() {
    let optimizer = Optimizer::new(SGD);
    let mut table = Table::new(shape("a"), 7, &optimizer);
    table.push(&[42], &[1.0; 5], &optimizer, 1.0);
    let expected: Vec<f32> = born(&shape("a"), 7, 42, &optimizer).0.iter().map(|w| w - 0.1).collect();
    assert_eq!(pulled(&mut table, &[42]), expected);
}

/// Goal: exact figures, so that weights and not slots or older weights are what is added.
#[test]
fn l2_adds_so_much_of_the_weight_to_its_gradient() {
    let optimizer = Optimizer::new(SGD);
    let shape = TableShape { name: "t".into(), parts: vec![RowPart { width: 2, init: Initializer::Zeros }] };
    let mut table = Table::new(shape, 7, &optimizer).with(TableSpec { l2: 0.5, ..TableSpec::default() }, 1);
    table.push(&[1, 2], &[10.0, -20.0, 0.0, 1.0], &optimizer, 1.0);
    assert_eq!(pulled(&mut table, &[1, 2]), [-1.0, 2.0, 0.0, -0.1]);
    table.push(&[1], &[0.0, 0.0], &optimizer, 1.0);
    let expected = [-1.0f32 + 0.05, 2.0 - 0.1, 0.0, -0.1];
    let got = pulled(&mut table, &[1, 2]);
    assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "only touched rows: {got:?}");
}

#[test]
fn an_id_that_comes_twice_in_a_push_gets_both_gradients() {
    let optimizer = Optimizer::new(ADAGRAD);
    let mut together = Table::new(shape("a"), 7, &optimizer);
    let mut apart = Table::new(shape("a"), 7, &optimizer);
    let gradients: Vec<f32> = (0..15).map(|x| x as f32 - 7.0).collect();
    together.push(&[8, 0, 8], &gradients, &optimizer, 1.0);
    for (id, gradient) in [8, 0, 8].iter().zip(gradients.chunks(5)) {
        apart.push(&[*id], gradient, &optimizer, 1.0);
    }
    assert_eq!(pulled(&mut together, &[0, 8]), pulled(&mut apart, &[0, 8]));
    assert_eq!(together.len(), 2);
}

#[test]
fn rows_come_back_by_birth_with_their_slots() {
    let optimizer = Optimizer::new(ADAM);
    let mut table = Table::new(shape("a"), 7, &optimizer);
    let ids: Vec<u64> = (0..200).map(|i| i * i).collect();
    table.push(&ids, &vec![0.5; 5 * ids.len()], &optimizer, 1.0);
    assert_eq!(table.ids(), ids);

    let mut copied = Table::new(shape("a"), 7, &optimizer);
    let (mut weights, mut slots) = (Vec::new(), Vec::new());
    table.copy_rows(0..100, &mut weights, &mut slots);
    table.copy_rows(100..200, &mut weights, &mut slots);
    for (i, id) in ids.iter().enumerate() {
        assert!(copied.restore(*id, &weights[i * 5..][..5], &slots[i * 11..][..11]));
    }
    assert!(!copied.restore(0, &weights[..5], &slots[..11]), "a row that is there is told");
    copied.push(&ids, &vec![-0.25; 5 * ids.len()], &optimizer, 1.0);
    table.push(&ids, &vec![-0.25; 5 * ids.len()], &optimizer, 1.0);
    assert_eq!(pulled(&mut copied, &ids), pulled(&mut table, &ids));
}

/// Goal: at most 1.25 × (8 + 128) bytes a row, at any fill of the index, but for what is left of the last huge page.
#[test]
fn a_row_of_sixteen_with_adagrad_takes_170_bytes_at_most() {
    let shape = TableShape { name: "t".into(), parts: vec![RowPart { width: 16, init: Initializer::Zeros }] };
    let mut table = Table::new(shape, 7, &Optimizer::new(ADAGRAD));
    let mut out = vec![0.0; 16 * 1000];
    for thousand in 0..300u64 {
        let ids: Vec<u64> = (thousand * 1000..(thousand + 1) * 1000).collect();
        table.pull(&ids, &mut out);
        let per_row = table.bytes().saturating_sub(2 << 20) as f64 / table.len() as f64;
        assert!(per_row <= 170.0, "{per_row} bytes at {} rows", table.len());
    }
}

#[derive(Debug, Clone)]
enum Op {
    Pull(Vec<u64>),
    Read(Vec<u64>),
    Push(Vec<u64>, i8),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let id = prop_oneof![0..40u64, any::<u64>(), Just(u64::MAX)];
    let ids = proptest::collection::vec(id, 0..150);
    let op = prop_oneof![
        ids.clone().prop_map(Op::Pull),
        ids.clone().prop_map(Op::Read),
        (ids, any::<i8>()).prop_map(|(ids, g)| Op::Push(ids, g)),
    ];
    proptest::collection::vec(op, 0..20)
}

/// Goal: rows of every width that is copied in a way of its own come as they were born, and ids that come again in the
/// next block of the same call are the same rows.
#[test]
fn rows_of_every_width_come_as_they_were_born() {
    let optimizer = Optimizer::new(ALL[0]);
    for width in [1, 5, 8, 9, 16, 17, 32, 33] {
        let init = Initializer::Uniform { bound: 0.5 };
        let shape = TableShape { name: "t".into(), parts: vec![RowPart { width, init }] };
        let mut table = Table::new(shape.clone(), 3, &optimizer);
        let ids: Vec<u64> = (0..2500).map(|n| n % 1500).collect();
        let expected: Vec<f32> = ids.iter().flat_map(|id| born(&shape, 3, *id, &optimizer).0).collect();
        for _ in 0..2 {
            let mut out = vec![f32::NAN; ids.len() * width];
            table.pull(&ids, &mut out);
            assert!(out == expected, "width {width}");
        }
        assert_eq!(table.len(), 1500, "width {width}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_table_behaves_like_a_map(
        ops in ops(),
        spec in proptest::sample::select(&ALL[..]),
        l2 in prop_oneof![Just(0.0f32), Just(0.125)],
    ) {
        let optimizer = Optimizer::new(spec);
        let shape = shape("t");
        let mut table = Table::new(shape.clone(), 3, &optimizer).with(TableSpec { l2, ..TableSpec::default() }, 1);
        let mut model: BTreeMap<u64, (Vec<f32>, Vec<f32>)> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Pull(ids) => {
                    let out = pulled(&mut table, &ids);
                    for (id, out) in ids.iter().zip(out.chunks(5)) {
                        let row = model.entry(*id).or_insert_with(|| born(&shape, 3, *id, &optimizer));
                        prop_assert_eq!(&row.0, out);
                    }
                }
                Op::Read(ids) => {
                    let out = read(&table, &ids);
                    for (id, out) in ids.iter().zip(out.chunks(5)) {
                        prop_assert_eq!(model.get(id).map_or(&[0.0; 5][..], |row| &row.0), out);
                    }
                }
                Op::Push(ids, g) => {
                    let gradients: Vec<f32> = (0..ids.len() * 5).map(|i| (i % 7) as f32 * f32::from(g)).collect();
                    let factor = if g % 2 == 0 { 1.0 } else { 0.25 };
                    table.push(&ids, &gradients, &optimizer, factor);
                    for (id, gradient) in ids.iter().zip(gradients.chunks(5)) {
                        let row = model.entry(*id).or_insert_with(|| born(&shape, 3, *id, &optimizer));
                        let gradient: Vec<f32> = gradient.iter().zip(&row.0).map(|(g, w)| g + l2 * w).collect();
                        optimizer.apply(&mut row.0, &mut row.1, &gradient, factor);
                    }
                }
            }
            prop_assert_eq!(table.len(), model.len());
        }
        let ids = table.ids();
        let (mut weights, mut slots) = (Vec::new(), Vec::new());
        table.copy_rows(0..ids.len(), &mut weights, &mut slots);
        let per_row = optimizer.slots(5);
        for (i, id) in ids.iter().enumerate() {
            prop_assert_eq!(&model[id].0, &weights[i * 5..][..5]);
            prop_assert_eq!(&model[id].1, &slots[i * per_row..][..per_row]);
        }
    }
}

/// Goal: whoever copies a table puts rows in one behind the other, and so do those that ask for them later.
#[test]
fn rows_are_copied_in_the_order_of_their_hashes() {
    let optimizer = Optimizer::new(SGD);
    let mut table = Table::new(shape("t"), 7, &optimizer);
    let ids: Vec<u64> = (0..200_000).collect();
    pulled(&mut table, &ids);
    table.begin_copy();
    let mut copied = Vec::new();
    while table.unsent() > 0 {
        copied.extend(table.copy_next(8192, &mut Vec::new()).0);
    }
    // Some hundred stretches of hashes; what found no room in its bucket may be in the next one.
    let stretches: Vec<u64> = copied.iter().map(|id| elasticdl_spec::mix::mix64(*id) >> 55).collect();
    let ascending = stretches.windows(2).filter(|pair| pair[0] <= pair[1]).count();
    assert!(ascending * 1000 > ids.len() * 999, "{ascending}");
    copied.sort_unstable();
    assert_eq!(copied, ids);
}
