//! Typed values of a column become labels, numbers and ids.

use elasticdl_spec::layout::Bucket;

use super::plan::{Plan, Use, Wrong, bucketed, zero_or_one};
use crate::batch::Batch;
use crate::field::FieldIds;

/// A value that is not text.
pub(crate) trait Value: Copy {
    /// It as a number; `None` where that is the way of saying "missing".
    fn number(self) -> Option<f64>;
    /// Its id: that of the text which a text file would hold.
    fn id(self, ids: &FieldIds) -> u64;
    /// It as a text file would hold it.
    fn text(self) -> String;
}

impl Value for i64 {
    #[inline]
    fn number(self) -> Option<f64> {
        Some(self as f64)
    }

    #[inline]
    fn id(self, ids: &FieldIds) -> u64 {
        ids.of_integer(self)
    }

    fn text(self) -> String {
        self.to_string()
    }
}

impl Value for u64 {
    #[inline]
    fn number(self) -> Option<f64> {
        Some(self as f64)
    }

    #[inline]
    fn id(self, ids: &FieldIds) -> u64 {
        ids.of_unsigned(self)
    }

    fn text(self) -> String {
        self.to_string()
    }
}

/// Writers without nulls say NaN for a value that is not there.
macro_rules! float {
    ($float:ty) => {
        impl Value for $float {
            #[inline]
            fn number(self) -> Option<f64> {
                (!self.is_nan()).then_some(f64::from(self))
            }

            #[inline]
            fn id(self, ids: &FieldIds) -> u64 {
                if self.is_nan() { ids.missing() } else { ids.of_float(self) }
            }

            fn text(self) -> String {
                self.to_string()
            }
        }
    };
}

float!(f32);
float!(f64);

impl Value for bool {
    #[inline]
    fn number(self) -> Option<f64> {
        Some(f64::from(u8::from(self)))
    }

    #[inline]
    fn id(self, ids: &FieldIds) -> u64 {
        ids.of_text(if self { b"true" } else { b"false" })
    }

    fn text(self) -> String {
        self.to_string()
    }
}

/// Puts a column's values into `records` records from `at` on, and names those that are wrong.
///
/// `value` gives the value of each, counted from 0. Plain loops over an index: chained iterators with
/// an optional value cost more than the decoding.
#[inline]
pub(crate) fn put<V: Value>(
    plan: &Plan,
    what: &Use,
    records: usize,
    value: impl Fn(usize) -> Option<V>,
    batch: &mut Batch,
    at: usize,
    wrong: &mut impl FnMut(usize, Wrong),
) {
    if plan.missing_typed {
        return put_as_text(plan, what, records, value, batch, at, wrong);
    }
    match *what {
        Use::Label => {
            let labels = &mut batch.labels[at..at + records];
            for (row, label) in labels.iter_mut().enumerate() {
                match label_of(plan, value(row)) {
                    Ok(read) => *label = read,
                    Err(why) => wrong(row, why),
                }
            }
        }
        Use::Number { slot, scaler } => {
            let numbers = &mut batch.numeric[at * plan.numeric..(at + records) * plan.numeric];
            for (row, record) in numbers.chunks_exact_mut(plan.numeric).enumerate() {
                match value(row).and_then(Value::number).map_or(Ok(0.0), |number| scaler.apply(number)) {
                    Ok(number) => record[slot] = number,
                    Err(why) => wrong(row, why),
                }
            }
        }
        Use::Id { slot, ids, bucket } => {
            let all = &mut batch.ids[at * plan.categorical..(at + records) * plan.categorical];
            for (row, record) in all.chunks_exact_mut(plan.categorical).enumerate() {
                match id_of(value(row), &ids, bucket) {
                    Ok(id) => record[slot] = id,
                    Err(why) => wrong(row, why),
                }
            }
        }
    }
}

/// The slow way, for layouts in which a number such as -1 means "missing".
#[cold]
fn put_as_text<V: Value>(
    plan: &Plan,
    what: &Use,
    records: usize,
    value: impl Fn(usize) -> Option<V>,
    batch: &mut Batch,
    at: usize,
    wrong: &mut impl FnMut(usize, Wrong),
) {
    for row in 0..records {
        // NaN is no text that a text file may hold, but a way of saying that there is none.
        let value = value(row).filter(|value| value.number().is_some());
        let text = value.map(Value::text).unwrap_or_default();
        if let Err(why) = plan.put_text(what, text.as_bytes(), &mut plan.row(batch, at + row)) {
            wrong(row, why);
        }
    }
}

#[inline]
fn label_of<V: Value>(plan: &Plan, value: Option<V>) -> Result<f32, Wrong> {
    let value = value.ok_or(Wrong::NoLabel)?;
    if plan.lists_positive() {
        return plan.label(value.text().as_bytes());
    }
    zero_or_one(value.number().ok_or(Wrong::NoLabel)?)
}

#[inline]
fn id_of<V: Value>(value: Option<V>, ids: &FieldIds, bucket: Bucket) -> Result<u64, Wrong> {
    let Some(value) = value else { return Ok(ids.missing()) };
    if bucket == Bucket::Value {
        return Ok(value.id(ids));
    }
    match value.number() {
        Some(number) => bucketed(number, ids, bucket),
        None => Ok(ids.missing()),
    }
}
