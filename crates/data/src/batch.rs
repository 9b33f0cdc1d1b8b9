//! The decoded form of records, ready for a model. It holds no text and knows no file.

/// Records side by side, row-major: record `r` has `numeric[r * fields ..][.. fields]`, and so on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// How many records.
    pub records: usize,
    /// One label per record: 0 or 1.
    pub labels: Vec<f32>,
    /// Records × numeric fields, scaled; a missing value is 0.
    pub numeric: Vec<f32>,
    /// Records × categorical fields: a well-mixed function of field and value.
    pub ids: Vec<u64>,
}

impl Batch {
    /// Copies record `from` over record `to`.
    pub(crate) fn copy_record(&mut self, from: usize, to: usize, numeric: usize, categorical: usize) {
        if from != to {
            self.labels[to] = self.labels[from];
            self.numeric.copy_within(from * numeric..(from + 1) * numeric, to * numeric);
            self.ids.copy_within(from * categorical..(from + 1) * categorical, to * categorical);
        }
    }

    /// The records at `order`, in that order.
    pub(crate) fn gather(&self, order: &[u32], numeric: usize, categorical: usize) -> Batch {
        let mut batch = Batch {
            records: order.len(),
            labels: Vec::with_capacity(order.len()),
            numeric: Vec::with_capacity(order.len() * numeric),
            ids: Vec::with_capacity(order.len() * categorical),
        };
        for at in order {
            let at = *at as usize;
            batch.labels.push(self.labels[at]);
            batch.numeric.extend_from_slice(&self.numeric[at * numeric..(at + 1) * numeric]);
            batch.ids.extend_from_slice(&self.ids[at * categorical..(at + 1) * categorical]);
        }
        batch
    }

    /// Forgets all records and keeps the room they had.
    pub(crate) fn clear(&mut self) {
        self.records = 0;
        self.labels.clear();
        self.numeric.clear();
        self.ids.clear();
    }
}
