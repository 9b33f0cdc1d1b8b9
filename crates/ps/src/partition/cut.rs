//! A partition cut at one moment between two pushes, and taken away in pieces while it goes on.

use super::Partition;
use crate::table::{Bits, Order, Rows, Table};

/// A file that adds to another one holds at most this part of the rows: beyond it a whole one is hardly longer, and
/// is read back faster.
const CHANGED_MOST: f64 = 0.5;

impl Partition {
    /// Cuts the rows as they are now. Returns the checkpoint that the cut adds to, `None` where it holds all rows, and
    /// how many rows of each table are in it.
    ///
    /// A cut before this one that was not taken away to its end is given up.
    pub(crate) fn begin_cut(&mut self, order: Order) -> (Option<u64>, Vec<u64>) {
        self.cutting.take().into_iter().for_each(|earlier| self.give_up(earlier));
        let changed =
            |base| self.tables.iter().map(|table| table.changed_since(base)).collect::<Option<Vec<_>>>();
        let all: usize = self.tables.iter().map(Table::len).sum();
        let few = |changed: &Vec<_>| {
            let changed: usize = changed.iter().map(Bits::count).sum();
            changed as f64 <= all as f64 * CHANGED_MOST
        };
        let changed = order.base.filter(|_| all > 0).and_then(changed).filter(few);
        let base = order.base.filter(|_| changed.is_some());
        let due = changed.unwrap_or_else(|| self.tables.iter().map(Table::all).collect());
        let rows = due.iter().map(|due| due.count() as u64).collect();
        for (table, due) in self.tables.iter_mut().zip(due) {
            table.cut(order, due);
        }
        self.cutting = Some(order.checkpoint);
        (base, rows)
    }

    /// Appends the next rows of a table in the cut of `checkpoint` to `out`, and tells whether there are more. `None`:
    /// there is no such cut.
    pub fn take_rows(&mut self, checkpoint: u64, table: usize, out: &mut Rows) -> Option<bool> {
        self.cutting.filter(|cutting| *cutting == checkpoint)?;
        Some(self.tables[table].take(checkpoint, out))
    }

    /// The file of a cut is written.
    pub fn end_cut(&mut self, checkpoint: u64) {
        self.cutting.take_if(|cutting| *cutting == checkpoint);
    }

    /// The file of a cut will not be written.
    pub fn abandon_cut(&mut self, checkpoint: u64) {
        if self.cutting.take_if(|cutting| *cutting == checkpoint).is_some() {
            self.give_up(checkpoint);
        }
    }

    /// The partition is what the files of `checkpoint` hold, so that the next one may add to them.
    pub fn is_as_in(&mut self, checkpoint: u64) {
        self.tables.iter_mut().for_each(|table| table.is_as_in(checkpoint));
    }

    fn give_up(&mut self, checkpoint: u64) {
        self.tables.iter_mut().for_each(|table| table.abandon(checkpoint));
    }
}
