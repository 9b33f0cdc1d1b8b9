//! A table while another server copies it, and one that is the copy.

use super::work::{Replacing, copy};
use super::{AHEAD, Table, Unsent};

impl Table {
    /// Another server begins to copy the table: it has nothing yet.
    pub fn begin_copy(&mut self) {
        // Rows of a table with a bound are known by their numbers, for their ids may change.
        if self.is_numbered() {
            self.unsent = Some(Unsent::all((0..self.len() as u64).collect()));
            return;
        }
        // Others go in the order of their hashes: the copy puts them in one behind the other.
        let mut all = Vec::with_capacity(self.len());
        self.index.for_each(|id, _| all.push(id));
        self.unsent = Some(Unsent::all(all));
    }

    /// Nobody copies the table any more.
    pub fn end_copy(&mut self) {
        self.unsent = None;
    }

    /// How many rows whoever copies the table has not got as they are now.
    pub fn unsent(&self) -> usize {
        self.unsent.as_ref().map_or(0, Unsent::len)
    }

    /// Some of those rows, at most so many: their ids, where the table has a bound in bytes their numbers, and appended
    /// to `rows` weights and slots of each.
    pub fn copy_next(&mut self, most: usize, rows: &mut Vec<f32>) -> (Vec<u64>, Vec<u32>) {
        let Some(unsent) = &mut self.unsent else { return Default::default() };
        if let Some(clock) = self.bound.as_ref().and_then(|bound| bound.clock.as_ref()) {
            let numbers: Vec<u32> = unsent.next(most).into_iter().map(|number| number as u32).collect();
            for number in &numbers {
                unsent.sent(*number);
                rows.extend_from_slice(self.rows.row(*number));
            }
            return (numbers.iter().map(|number| clock.ids()[*number as usize]).collect(), numbers);
        }
        let ids = unsent.next(most);
        rows.reserve(ids.len() * (self.width + self.slots_born.len()));
        let mut numbers = [0; AHEAD];
        for ids in ids.chunks(AHEAD) {
            ids.iter().for_each(|id| self.index.ask_for(*id));
            for (id, number) in ids.iter().zip(&mut numbers) {
                *number = self.index.find(*id).expect("a row that waits is born");
                self.rows.ask_for(*number, self.width);
            }
            for number in &numbers[..ids.len()] {
                unsent.sent(*number);
                rows.extend_from_slice(self.rows.row(*number));
            }
        }
        (ids, Vec::new())
    }

    /// Makes these rows, weights and slots of each, what they are elsewhere; unknown ones are added.
    pub fn put_rows(&mut self, ids: &[u64], rows: &[f32]) {
        let floats = self.width + self.slots_born.len();
        assert_eq!(rows.len(), ids.len() * floats, "there are floats for every row");
        self.visit(ids, floats, Replacing { floats, rows });
    }

    /// The same where the rows have numbers of their own.
    pub(crate) fn put_numbered(&mut self, ids: &[u64], numbers: &[u32], rows: &[f32]) {
        let floats = self.width + self.slots_born.len();
        assert_eq!((rows.len(), numbers.len()), (ids.len() * floats, ids.len()), "every row is whole");
        for ((id, number), row) in ids.iter().zip(numbers).zip(rows.chunks_exact(floats)) {
            self.place(*number, *id);
            copy(row, self.rows.row_mut(*number));
        }
    }

    /// Rows are about to change.
    #[cold]
    pub(super) fn about_to_change(&mut self, ids: &[u64], numbers: &[u32]) {
        let by_number = self.is_numbered();
        if let Some(unsent) = &mut self.unsent {
            let key = |id: u64, number: u32| if by_number { u64::from(number) } else { id };
            ids.iter().zip(numbers).for_each(|(id, number)| unsent.changed(key(*id, *number), *number));
        }
    }
}
