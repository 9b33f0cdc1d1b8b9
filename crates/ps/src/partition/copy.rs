//! A partition moves to another server while it is trained on.
//!
//! The other server copies rows, and copies again those that changed meanwhile, until few are left. Then the
//! partition is handed over: it is served here no more, so that what is copied last is all there is.

use elasticdl_wire::ps::Status;

use super::Partition;
use crate::checkpoint::Head;
use crate::error::Result;
use crate::marks::Marks;
use crate::table::{Bounds, Table};

/// Room for more rows than this is not made on the word of another server.
const ROWS_MAX: usize = 1 << 28;

/// Some rows of one table as they are at this moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Copied {
    /// Which table.
    pub table: usize,
    /// Ids of the rows.
    pub ids: Vec<u64>,
    /// Their numbers, where the table has a bound in bytes: an id may have made room for another one, which has its
    /// number then.
    pub numbers: Vec<u32>,
    /// Weights and slots of each, one after the other.
    pub rows: Vec<f32>,
    /// How many rows the whole table has.
    pub rows_of_all: usize,
}

impl Partition {
    /// Another server begins to copy this partition: it has nothing yet. Whoever began before is done with it. Returns a
    /// number for the copy.
    pub fn begin_copy(&mut self) -> u64 {
        self.tables.iter_mut().for_each(Table::begin_copy);
        self.copy += 1;
        self.copy
    }

    /// This copy is over; one that began later goes on.
    pub fn end_copy(&mut self, copy: u64) {
        if self.copy == copy {
            self.tables.iter_mut().for_each(Table::end_copy);
        }
    }

    /// How many rows whoever copies it has not got as they are now.
    pub fn unsent(&self) -> usize {
        self.tables.iter().map(Table::unsent).sum()
    }

    /// The same, and how many floats they are.
    pub fn unsent_floats(&self) -> (usize, usize) {
        let floats = |table: &Table| table.unsent() * (table.shape().width() + table.slots());
        (self.unsent(), self.tables.iter().map(floats).sum())
    }

    /// Some of them: at most so many rows, and no more floats than that where one row has not more already.
    pub fn copy_next(&mut self, rows_max: usize, floats_max: usize) -> Copied {
        let Some(table) = self.tables.iter().position(|table| table.unsent() > 0) else {
            return Copied::default();
        };
        let place = &mut self.tables[table];
        let fitting = floats_max / (place.shape().width() + place.slots());
        let mut rows = Vec::new();
        let (ids, numbers) = place.copy_next(rows_max.min(fitting.max(1)), &mut rows);
        Copied { table, ids, numbers, rows, rows_of_all: place.len() }
    }

    /// Serves nobody from now on but who copies it, and tells what there is beside rows and tensors. `None`: a batch
    /// is staged, which the other server would not have.
    pub fn hand_over(&mut self) -> Option<Head> {
        if self.is_staging() {
            return None;
        }
        self.handed_over = true;
        Some(Head::of(self))
    }

    /// What there is beside rows and tensors.
    pub fn head(&self) -> Head {
        Head::of(self)
    }

    /// It is not handed over after all.
    pub fn keep(&mut self) {
        self.handed_over = false;
    }

    /// Whether another server has taken it over.
    pub fn is_handed_over(&self) -> bool {
        self.handed_over
    }

    /// Whether a request of this copy of this life of it is meant for it; `NotHere` where another copy has begun since,
    /// or this one has not (0).
    pub fn admit_copy(&self, incarnation: u64, copy: u64) -> Status {
        match incarnation == self.incarnation {
            true if copy == self.copy && copy > 0 => Status::Ok,
            true => Status::NotHere,
            false => Status::WrongIncarnation,
        }
    }

    /// Makes rows what they are at another server.
    pub fn put_rows(&mut self, copied: &Copied) -> Result<()> {
        let Copied { table, ids, numbers, rows, rows_of_all } = copied;
        let Some(place) = self.tables.get_mut(*table) else {
            return Err(self.misfit(format!("rows of table number {table}, which there is not")));
        };
        let due = ids.len() * (place.shape().width() + place.slots());
        if rows.len() != due {
            let name = place.shape().name.clone();
            return Err(self.misfit(format!("{} floats of rows of {name:?}, {due} due", rows.len())));
        }
        let (numbered, rows_max) = (place.is_numbered(), (*rows_of_all).min(ROWS_MAX));
        let due = if numbered { ids.len() } else { 0 };
        if numbers.len() != due || numbers.iter().any(|number| *number as usize >= rows_max) {
            let name = place.shape().name.clone();
            return Err(self.misfit(format!("{} numbers of rows of {name:?}, {due} due", numbers.len())));
        }
        self.check_ids(*table, ids)?;
        if numbered {
            self.tables[*table].put_numbered(ids, numbers, rows);
            return Ok(());
        }
        if self.tables[*table].is_empty() {
            // They may come in the order of their hashes, which a growing index takes badly.
            self.tables[*table].make_room((*rows_of_all).max(ids.len()).min(ROWS_MAX));
        }
        self.tables[*table].put_rows(ids, rows);
        Ok(())
    }

    /// A backup takes the partition's place: all that was done to it is done here.
    pub fn begin_life(&mut self, incarnation: u64) {
        self.incarnation = incarnation;
        self.load = 0;
    }

    /// Values and slots of each tensor, one after the other.
    pub fn tensor_floats(&self) -> Vec<f32> {
        let floats = self.tensors.iter().flat_map(|tensor| [tensor.values(), tensor.slots()]);
        floats.collect::<Vec<_>>().concat()
    }

    /// How many those are.
    pub fn tensor_floats_due(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.values().len() + tensor.slots().len()).sum()
    }

    /// All rows are put: this partition goes on where the other server's has ended, with these floats of tensors.
    pub fn take_over(&mut self, head: Head, mut tensors: &[f32]) -> Result<()> {
        let rows: Vec<u64> = self.tables.iter().map(|table| table.len() as u64).collect();
        let floats = self.tensor_floats_due();
        if rows != head.rows || tensors.len() != floats {
            let due = (&head.rows, floats);
            return Err(
                self.misfit(format!("{rows:?} rows and {} floats of tensors, {due:?} due", tensors.len()))
            );
        }
        for tensor in &mut self.tensors {
            let (values, rest) = tensors.split_at(tensor.values().len());
            let (slots, rest) = rest.split_at(tensor.slots().len());
            let fits = tensor.restore(values.to_vec(), slots.to_vec());
            assert!(fits, "they were split by its lengths");
            tensors = rest;
        }
        let untold = Bounds::default();
        for i in 0..self.tables.len() {
            if !self.tables[i].restore_bound(head.bounds.get(i).unwrap_or(&untold)) {
                let name = self.tables[i].shape().name.clone();
                return Err(self.misfit(format!("rows of table {name:?}, or their bits, are missing")));
            }
        }
        let memory = &mut self.memory;
        (memory.marks, memory.audit, memory.version) =
            (Marks::new(head.marks, head.closed), head.audit, head.version);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use elasticdl_spec::{LeaseId, PartitionId, TaskId};
    use elasticdl_wire::ps::PushHeader;
    use proptest::prelude::*;

    use super::*;
    use crate::partition::{Push, RowGradients};
    use crate::test_model::{bounded_model, ids_of, model};

    const HERE: PartitionId = PartitionId(2);
    const LEASE: LeaseId = LeaseId { term: 1, n: 1 };

    fn push(partition: &mut Partition, batch: u64, incarnation: u64, users: &[u64], items: &[u64]) -> Status {
        let header = PushHeader { task: TaskId::train(0, 3), batch, lease: LEASE, records: 5, factor: 1.0 };
        let floats = |n: usize| (0..n).map(|i| i as f32 / 7.0 - batch as f32).collect::<Vec<f32>>();
        let (users_gradients, items_gradients) = (floats(3 * users.len()), floats(2 * items.len()));
        let tables = [
            RowGradients { ids: users, gradients: &users_gradients },
            RowGradients { ids: items, gradients: &items_gradients },
        ];
        let gradients: Vec<Vec<f32>> = partition.tensors().iter().map(|t| floats(t.values().len())).collect();
        let tensors: Vec<&[f32]> = gradients.iter().map(Vec::as_slice).collect();
        let push = Push { header, incarnation, version: batch, tables: &tables, tensors: &tensors };
        partition.push(&push).unwrap().status
    }

    /// Weights and slots of every row, by table and id.
    fn rows(partition: &Partition) -> Vec<Vec<(u64, Vec<f32>)>> {
        let of = |table: &Table| {
            let (mut weights, mut slots) = (Vec::new(), Vec::new());
            table.copy_rows(0..table.len(), &mut weights, &mut slots);
            let width = table.shape().width();
            let row = |(i, id): (usize, u64)| {
                let (w, s) = (&weights[i * width..][..width], &slots[i * table.slots()..][..table.slots()]);
                (id, [w, s].concat())
            };
            let mut rows: Vec<_> = table.ids().into_iter().enumerate().map(row).collect();
            rows.sort_by_key(|(id, _)| *id);
            rows
        };
        partition.tables().iter().map(of).collect()
    }

    proptest! {
        /// Goal: whatever is pulled and pushed while a partition is copied, what arrives is what was there when it
        /// was handed over, and goes on from the same mark.
        #[test]
        fn a_copy_made_while_rows_change_is_exact(
            events in proptest::collection::vec((0..4u8, 0..40usize, 1..12usize), 1..60),
            bounded in any::<bool>(),
        ) {
            let ids = ids_of(HERE, 52);
            let model = if bounded { bounded_model(model().optimizer) } else { model() };
            let mut old = Partition::new(Arc::clone(&model), HERE, 4);
            let mut new = Partition::new(model, HERE, 5);
            let mut batch = 0;
            for (users, items) in [(0..9, 3..20), (5..30, 0..4)] {
                push(&mut old, batch, 4, &ids[users], &ids[items]);
                batch += 1;
            }
            old.begin_copy();
            for (what, from, count) in events {
                let some = &ids[from..from + count];
                match what {
                    0 => {
                        push(&mut old, batch, 4, some, &some[..count / 2]);
                        batch += 1;
                    }
                    1 => old.pull(1, some, &mut vec![0.0; 2 * count]).unwrap(),
                    _ => new.put_rows(&old.copy_next(count, 1000)).unwrap(),
                }
            }
            let head = old.hand_over().unwrap();
            prop_assert_eq!(push(&mut old, batch, 4, &ids[..1], &[]), Status::WrongIncarnation);
            while old.unsent() > 0 {
                new.put_rows(&old.copy_next(7, 1000)).unwrap();
            }
            // It travels as text.
            let head = serde_json::from_str(&serde_json::to_string(&head).unwrap()).unwrap();
            new.take_over(head, &old.tensor_floats()).unwrap();
            prop_assert_eq!(rows(&new), rows(&old));
            let bounds = |of: &Partition| of.tables().iter().map(Table::whole_bounds).collect::<Vec<_>>();
            prop_assert_eq!(bounds(&new), bounds(&old));
            prop_assert_eq!(new.tensors(), old.tensors());
            prop_assert_eq!(new.memory(), old.memory());
            prop_assert_eq!(push(&mut new, batch - 1, 5, &ids[..1], &[]), Status::Duplicate);
            prop_assert_eq!(push(&mut new, batch, 5, &ids[..1], &[]), Status::Ok);
            // Both go on alike, whoever has to go.
            old.keep();
            push(&mut old, batch, 4, &ids[..1], &[]);
            for (batch, some) in (batch + 1..).zip([&ids[..40], &ids[10..], &ids[..40]]) {
                push(&mut old, batch, 4, some, some);
                push(&mut new, batch, 5, some, some);
            }
            prop_assert_eq!(rows(&new), rows(&old));
            prop_assert_eq!(bounds(&new), bounds(&old));
        }
    }

    #[test]
    fn rows_without_their_numbers_and_numbers_without_a_row_are_refused() {
        let model = bounded_model(model().optimizer);
        let mut old = Partition::new(Arc::clone(&model), HERE, 4);
        let ids = ids_of(HERE, 3);
        for batch in 0..2 {
            push(&mut old, batch, 4, &ids, &ids);
        }
        old.begin_copy();
        let users = old.copy_next(10, 1000);
        assert_eq!(users.numbers, [0, 1, 2]);
        let mut new = Partition::new(Arc::clone(&model), HERE, 5);
        assert!(new.put_rows(&Copied { numbers: Vec::new(), ..users.clone() }).is_err());
        assert!(new.put_rows(&Copied { numbers: vec![0, 1, 3], ..users.clone() }).is_err());
        let head = old.hand_over().unwrap();
        let items = old.copy_next(10, 1000);
        new.put_rows(&items).unwrap();
        new.put_rows(&Copied { numbers: vec![0, 2, 2], ..users.clone() }).unwrap();
        assert!(new.take_over(head.clone(), &old.tensor_floats()).is_err(), "row 1 is missing");
        new.put_rows(&users).unwrap();
        new.take_over(head, &old.tensor_floats()).unwrap();
        assert_eq!(rows(&new), rows(&old));
        let mut plain = Partition::new(crate::test_model::model(), HERE, 5);
        assert!(plain.put_rows(&users).is_err());
    }

    #[test]
    fn what_does_not_fit_is_not_taken_over() {
        let mut old = Partition::new(model(), HERE, 4);
        let ids = ids_of(HERE, 3);
        push(&mut old, 0, 4, &ids, &ids);
        old.begin_copy();
        let mut new = Partition::new(model(), HERE, 5);
        let users = old.copy_next(10, 1000);
        new.put_rows(&users).unwrap();
        let head = old.hand_over().unwrap();
        assert!(new.take_over(head.clone(), &old.tensor_floats()).is_err(), "the items are missing");
        let items = old.copy_next(10, 1000);
        assert!(new.put_rows(&Copied { table: 0, ..items.clone() }).is_err());
        assert!(new.put_rows(&Copied { table: 2, ..items.clone() }).is_err());
        let elsewhere = Copied { ids: ids_of(PartitionId(1), 3), ..items.clone() };
        assert!(new.put_rows(&elsewhere).is_err());
        new.put_rows(&items).unwrap();
        let floats = old.tensor_floats();
        assert!(new.take_over(head.clone(), &floats[1..]).is_err());
        assert!(new.take_over(head.clone(), &[&floats[..], &[0.0]].concat()).is_err());
        new.take_over(head, &old.tensor_floats()).unwrap();
    }

    /// Goal: a server that is late with its goodbye must not end the copy that another one has begun since.
    #[test]
    fn of_two_that_copy_the_later_one_counts() {
        let mut partition = Partition::new(model(), HERE, 4);
        let ids = ids_of(HERE, 3);
        push(&mut partition, 0, 4, &ids, &ids);
        assert_eq!(
            partition.admit_copy(4, 0),
            Status::NotHere,
            "whoever has copied nothing takes nothing over"
        );
        let first = partition.begin_copy();
        let second = partition.begin_copy();
        assert_eq!(partition.admit_copy(4, first), Status::NotHere);
        assert_eq!(partition.admit_copy(4, second), Status::Ok);
        assert_eq!(partition.admit_copy(3, second), Status::WrongIncarnation);
        partition.end_copy(first);
        push(&mut partition, 1, 4, &ids, &[]);
        assert_eq!(partition.unsent(), 6, "changes are still noted");
        partition.end_copy(second);
        assert_eq!(partition.unsent(), 0);
    }

    #[test]
    fn what_is_copied_no_more_costs_nothing() {
        let mut partition = Partition::new(model(), HERE, 4);
        let ids = ids_of(HERE, 3);
        push(&mut partition, 0, 4, &ids, &ids);
        let copy = partition.begin_copy();
        assert_eq!(partition.unsent(), 6);
        assert_eq!(partition.copy_next(9, 13).ids.len(), 2, "a row of users is six floats");
        assert_eq!(partition.copy_next(9, 1).ids.len(), 1, "and one goes in any case");
        partition.end_copy(copy);
        push(&mut partition, 1, 4, &ids, &ids);
        assert_eq!((partition.unsent(), partition.copy_next(9, 1000)), (0, Copied::default()));
    }
}
