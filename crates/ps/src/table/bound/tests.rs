//! Tables with a bound against a map and a clock that do the same the slow way.

use std::collections::BTreeMap;

use elasticdl_spec::mix::mix64;
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{Evict, Initializer, OptimizerSpec, TableShape};
use proptest::prelude::*;

use super::*;
use crate::table::pages::{LITTLE, counted};
use crate::table::{Order, Rows};

const ADAGRAD: OptimizerSpec =
    OptimizerSpec::Adagrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-10 };
const WIDTH: usize = 3;

fn shape() -> TableShape {
    let init = Initializer::Uniform { bound: 0.5 };
    TableShape { name: "t".into(), parts: vec![RowPart { width: WIDTH, init }] }
}

fn spec(memory_max: Option<u64>, admit_after: u8, evict: Evict) -> TableSpec {
    TableSpec { memory_max, admit_after, evict, ..TableSpec::default() }
}

fn table(spec: TableSpec) -> Table {
    Table::new(shape(), 7, &Optimizer::new(ADAGRAD)).with(spec, 1)
}

/// Pushes a gradient that tells one push from another.
fn push(table: &mut Table, ids: &[u64], value: f32) {
    let gradients: Vec<f32> = (0..ids.len() * WIDTH).map(|i| value + i as f32 / 8.0).collect();
    table.push(ids, &gradients, &Optimizer::new(ADAGRAD), 1.0);
}

fn pulled(table: &mut Table, ids: &[u64]) -> Vec<f32> {
    let mut out = vec![9.0; ids.len() * WIDTH];
    table.pull(ids, &mut out);
    out
}

/// All that a table is: its rows in the order of their numbers, and all of its bound.
fn all(table: &Table) -> (Vec<u64>, Vec<f32>, Vec<f32>, Bounds) {
    let (mut weights, mut slots) = (Vec::new(), Vec::new());
    table.copy_rows(0..table.len(), &mut weights, &mut slots);
    (table.ids(), weights, slots, table.whole_bounds())
}

/// A table that looks at one id after the other.
struct Slow {
    rows: BTreeMap<u64, (Vec<f32>, Vec<f32>)>,
    ids: Vec<u64>,
    used: Vec<bool>,
    hand: usize,
    rows_max: usize,
    spec: TableSpec,
    sketch: Option<Sketch>,
    counts: Counts,
}

impl Slow {
    fn of(table: &Table, spec: TableSpec) -> Self {
        let bound = table.bound.as_ref().unwrap();
        Slow {
            rows: BTreeMap::new(),
            ids: Vec::new(),
            used: Vec::new(),
            hand: 0,
            rows_max: bound.clock.as_ref().map_or(usize::MAX, Clock::rows_max),
            spec,
            sketch: bound.sketch.clone(),
            counts: Counts::default(),
        }
    }

    fn born(id: u64) -> (Vec<f32>, Vec<f32>) {
        let mut weights = vec![0.0; WIDTH];
        shape().init_row(7, id, &mut weights);
        (weights, vec![0.1; WIDTH])
    }

    fn push(&mut self, ids: &[u64], value: f32) {
        for (place, id) in ids.iter().enumerate() {
            if !self.rows.contains_key(id) && !self.admit(*id) {
                continue;
            }
            let number = self.ids.iter().position(|held| held == id).unwrap();
            self.used[number] = true;
            let gradient: Vec<f32> = (0..WIDTH).map(|i| value + (place * WIDTH + i) as f32 / 8.0).collect();
            let (weights, slots) = self.rows.get_mut(id).unwrap();
            Optimizer::new(ADAGRAD).apply(weights, slots, &gradient, 1.0);
        }
    }

    fn admit(&mut self, id: u64) -> bool {
        if self.sketch.as_mut().is_some_and(|sketch| sketch.count(id) < self.spec.admit_after) {
            self.counts.refused += 1;
            return false;
        }
        self.rows.insert(id, Slow::born(id));
        if self.ids.len() < self.rows_max {
            self.ids.push(id);
            self.used.push(false);
            return true;
        }
        while self.spec.evict == Evict::Use && std::mem::take(&mut self.used[self.hand]) {
            self.hand = (self.hand + 1) % self.ids.len();
        }
        let gone = std::mem::replace(&mut self.ids[self.hand], id);
        self.rows.remove(&gone);
        self.counts.evicted += 1;
        self.hand = (self.hand + 1) % self.ids.len();
        true
    }
}

fn batches() -> impl Strategy<Value = Vec<(Vec<u64>, bool)>> {
    let id = prop_oneof![3 => 0..12u64, 2 => 0..90u64, 1 => any::<u64>()];
    let ids = proptest::collection::vec(id, 0..150);
    proptest::collection::vec((ids, proptest::bool::weighted(0.8)), 1..20)
}

fn specs() -> impl Strategy<Value = TableSpec> {
    let memory = prop_oneof![Just(None), (400..4000u64).prop_map(Some)];
    let evict = prop_oneof![Just(Evict::Use), Just(Evict::Age)];
    let some = (memory, 1..4u8, evict).prop_map(|(memory, admit, evict)| spec(memory, admit, evict));
    some.prop_filter("it has a bound", |spec| spec.memory_max.is_some() || spec.admit_after > 1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_bounded_table_behaves_like_a_map_and_a_clock(batches in batches(), spec in specs()) {
        let mut fast = table(spec);
        let mut slow = Slow::of(&fast, spec);
        let mut again = table(spec);
        for (value, (ids, pushes)) in batches.into_iter().enumerate() {
            if pushes {
                push(&mut fast, &ids, value as f32);
                push(&mut again, &ids, value as f32);
                slow.push(&ids, value as f32);
            } else {
                let before = all(&fast);
                for (id, row) in ids.iter().zip(pulled(&mut fast, &ids).chunks(WIDTH)) {
                    let born = Slow::born(*id).0;
                    prop_assert_eq!(slow.rows.get(id).map_or(&born, |row| &row.0), row);
                }
                prop_assert_eq!(all(&fast), before, "a pull changes nothing");
            }
            prop_assert_eq!(&fast.ids(), &slow.ids);
            prop_assert_eq!(fast.counts(), Some(slow.counts));
        }
        for (number, id) in slow.ids.iter().enumerate() {
            let (mut weights, mut slots) = (Vec::new(), Vec::new());
            fast.copy_rows(number..number + 1, &mut weights, &mut slots);
            prop_assert_eq!(&slow.rows[id], &(weights, slots));
        }
        let mut seen = vec![9.0; WIDTH];
        fast.read(&[u64::MAX - 7], &mut seen);
        prop_assert!(slow.rows.contains_key(&(u64::MAX - 7)) || seen == [0.0; WIDTH]);
        prop_assert_eq!(all(&again), all(&fast), "pulls do not matter");
    }

    /// Goal: what a cut holds is the table at its moment, whoever goes and comes while it is taken away.
    #[test]
    fn a_cut_is_of_one_moment_while_rows_go(
        batches in batches(),
        memory in 400..3000u64,
        at in 0..20usize,
    ) {
        let spec = spec(Some(memory), 1, Evict::Use);
        let mut table = table(spec);
        let (mut rows, mut expected) = (Rows::default(), None);
        let order = Order { checkpoint: 1, base: None, is_basis: true };
        for (value, (ids, takes)) in batches.into_iter().enumerate() {
            if value == at {
                expected = Some(all(&table));
                let due = table.all();
                table.cut(order, due);
            }
            push(&mut table, &ids, value as f32);
            if takes && expected.is_some() {
                table.take(1, &mut rows);
            }
        }
        let Some((ids, weights, slots, _)) = expected else { return Ok(()) };
        loop {
            let mut more = Rows::default();
            let goes_on = table.take(1, &mut more);
            rows.ids.append(&mut more.ids);
            rows.numbers.append(&mut more.numbers);
            rows.weights.append(&mut more.weights);
            rows.slots.append(&mut more.slots);
            if !goes_on {
                break;
            }
        }
        prop_assert_eq!(rows.len(), ids.len());
        prop_assert_eq!(rows.numbers.len(), ids.len());
        for (i, number) in rows.numbers.iter().enumerate() {
            let number = *number as usize;
            prop_assert_eq!(rows.ids[i], ids[number]);
            prop_assert_eq!(&rows.weights[i * WIDTH..][..WIDTH], &weights[number * WIDTH..][..WIDTH]);
            prop_assert_eq!(&rows.slots[i * WIDTH..][..WIDTH], &slots[number * WIDTH..][..WIDTH]);
        }
    }

    /// Goal: rows that come by number in whatever order, some twice and some under ids that have gone since, make the
    /// same table, which then evicts the same rows.
    #[test]
    fn a_copy_made_while_rows_go_is_exact_and_goes_on_alike(batches in batches(), spec in specs(), at in 0..10usize) {
        let (mut from, mut to) = (table(spec), table(spec));
        let put = |from: &mut Table, to: &mut Table, most| {
            let mut rows = Vec::new();
            let (ids, numbers) = from.copy_next(most, &mut rows);
            match from.is_numbered() {
                true => to.put_numbered(&ids, &numbers, &rows),
                false => to.put_rows(&ids, &rows),
            }
        };
        for (value, (ids, copies)) in batches.iter().enumerate() {
            if value == at {
                from.begin_copy();
            }
            push(&mut from, ids, value as f32);
            if *copies && value >= at {
                put(&mut from, &mut to, ids.len() / 2);
            }
        }
        if batches.len() <= at {
            from.begin_copy();
        }
        while from.unsent() > 0 {
            prop_assert!(!from.is_numbered() || from.len() != to.len() || from.unsent() > 0);
            put(&mut from, &mut to, 7);
        }
        prop_assert!(to.restore_bound(&from.whole_bounds()));
        let sorted = |table: &Table| {
            let mut ids = table.ids();
            ids.sort_unstable();
            ids
        };
        prop_assert_eq!(sorted(&to), sorted(&from));
        if spec.memory_max.is_some() {
            prop_assert_eq!(all(&to), all(&from));
            for (value, (ids, _)) in batches.iter().enumerate() {
                push(&mut from, ids, value as f32);
                push(&mut to, ids, value as f32);
            }
            prop_assert_eq!(all(&to), all(&from));
        }
    }
}

/// Goal: the promise itself. However many ids come and go, a table takes no more than its share, and most of it; and no
/// more is ever got for it, not even while it grows, but for little things that are copied then.
#[test]
fn a_table_takes_its_share_and_no_more() {
    for (memory, admit_after) in [(1 << 16, 1), (4 << 20, 2), (8 << 20, 1), (9_000_001, 1)] {
        let (before, _) = (counted::now(), counted::most());
        let mut table = table(spec(Some(memory), admit_after, Evict::Use));
        let mut ids = Vec::new();
        for batch in 0..200u64 {
            ids.clear();
            ids.extend((0..1000).map(|i| mix64(1 + batch / u64::from(admit_after) * 1000 + i)));
            push(&mut table, &ids, batch as f32);
            assert!(table.bytes() <= memory, "{} of {memory} bytes at batch {batch}", table.bytes());
            let (got, most) = (counted::now() - before, counted::most() - before);
            let told = table.bytes() - table.bound.as_ref().unwrap().sketch.as_ref().map_or(0, Sketch::bytes);
            assert!(
                got <= memory as i64 && most <= (memory as usize + LITTLE) as i64,
                "{got}, {most} of {memory} bytes"
            );
            assert!(got as u64 + (4 << 10) >= told, "{told} of {got} bytes are told");
        }
        let counts = table.counts().unwrap();
        assert!(counts.evicted > 10_000, "{counts:?}");
        assert!(admit_after == 1 || counts.refused > 80_000 && counts.refused <= 100_000, "{counts:?}");
        assert!(table.bytes() as f64 > 0.75 * memory as f64, "{} of {memory} bytes", table.bytes());
        assert!(table.rows.bytes() as f64 > 0.35 * memory as f64, "{} bytes of rows", table.rows.bytes());
    }
}

#[test]
fn the_least_memory_has_room_for_the_least_rows() {
    for (width, admit_after, partitions) in [(1, 1, 1), (3, 3, 8), (17, 1, 4), (256, 255, 1)] {
        let mut spec = spec(None, admit_after, Evict::Use);
        let least = memory_min(width, &Optimizer::new(ADAGRAD), &spec, partitions);
        spec.memory_max = Some(least);
        let rows = |spec: &TableSpec| {
            Bound::new(spec, 2 * width, partitions).unwrap().clock.unwrap().rows_max() as u64
        };
        assert!(rows(&spec) >= ROWS_MIN, "{} rows", rows(&spec));
        spec.memory_max = Some(least * 7 / 8);
        assert!(rows(&spec) < ROWS_MIN, "{} rows", rows(&spec));
    }
}

#[test]
fn a_table_without_settings_has_no_bound() {
    assert!(table(TableSpec::default()).counts().is_none());
    assert!(table(TableSpec { evict: Evict::Age, ..TableSpec::default() }).counts().is_none());
    let mut counting = table(spec(None, 2, Evict::Use));
    push(&mut counting, &[5, 6, 5], 1.0);
    assert_eq!((counting.ids(), counting.limit()), (vec![5], None));
    assert_eq!(counting.counts(), Some(Counts { refused: 2, evicted: 0 }));
}

/// Goal: rows of a table that had no bound come without numbers, and one that gets a bound takes them.
#[test]
fn rows_without_numbers_get_some() {
    let mut table = table(spec(Some(2000), 1, Evict::Age));
    assert!(table.restore(7, &[1.0; 3], &[2.0; 3]) && table.restore(9, &[3.0; 3], &[4.0; 3]));
    assert!(!table.restore(7, &[5.0; 3], &[6.0; 3]));
    assert!(table.restore_bound(&Bounds::default()));
    assert_eq!((table.ids(), table.is_renumbered()), (vec![7, 9], true));
    table.is_as_in(3);
    assert!(table.changed_since(3).is_none(), "the next checkpoint is a whole one");
    assert_eq!(pulled(&mut table, &[9, 7])[..4], [3.0, 3.0, 3.0, 5.0]);
}
