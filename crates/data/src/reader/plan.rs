//! A layout meets the columns of a file: which column feeds which field, and how a value becomes it.

use std::sync::LazyLock;

use elasticdl_spec::Layout;
use elasticdl_spec::layout::{Bucket, Scale};

use crate::batch::Batch;
use crate::error::{BadRecord, Column, Error, Place, Result};
use crate::field::FieldIds;
use crate::lines::Style;
use crate::near;
use crate::number;

/// What a column's values are used for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Use {
    Label,
    Number { slot: usize, scaler: Scaler },
    Id { slot: usize, ids: FieldIds, bucket: Bucket },
}

/// Why a value cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrong {
    NoNumber,
    TooLarge,
    NoLabel,
    NotZeroOrOne,
}

/// Which columns of a file feed which fields.
#[derive(Debug)]
pub(crate) struct Plan {
    path: String,
    /// Names of the columns, in file order.
    pub names: Vec<String>,
    /// What each column is used for; nothing for most columns of some files.
    pub uses: Vec<Box<[Use]>>,
    pub numeric: usize,
    pub categorical: usize,
    positive: Vec<Vec<u8>>,
    missing: Vec<Vec<u8>>,
    /// Whether a typed value (a number, a boolean) can be one of the words for "missing".
    pub missing_typed: bool,
}

/// Where one record goes in a batch.
pub(crate) struct RowMut<'a> {
    pub label: &'a mut f32,
    pub numeric: &'a mut [f32],
    pub ids: &'a mut [u64],
}

impl Plan {
    /// Finds the layout's columns among those of a file.
    pub fn new(path: &str, names: Vec<String>, layout: &Layout) -> Result<Plan> {
        let mut uses: Vec<Vec<Use>> = vec![Vec::new(); names.len()];
        let mut add = |column: &str, what: Use| match names.iter().position(|name| name == column) {
            Some(at) => {
                uses[at].push(what);
                Ok(())
            }
            None => Err(Error::MissingColumn {
                path: path.to_string(),
                column: column.to_string(),
                nearest: near::nearest(column, names.iter().map(String::as_str)).map(String::from),
                columns: names.clone(),
            }),
        };
        if let Some(label) = &layout.label {
            add(&label.column, Use::Label)?;
        }
        for (slot, field) in layout.numeric.iter().enumerate() {
            add(&field.column, Use::Number { slot, scaler: Scaler::new(field.scale) })?;
        }
        for (slot, field) in layout.categorical.iter().enumerate() {
            add(&field.column, Use::Id { slot, ids: FieldIds::new(&field.name), bucket: field.bucket })?;
        }
        let bytes = |texts: &[String]| texts.iter().map(|text| text.clone().into_bytes()).collect();
        let missing: Vec<Vec<u8>> = bytes(&layout.text.missing);
        let typed = |word: &Vec<u8>| number::parse(word).is_some() || matches!(&word[..], b"true" | b"false");
        Ok(Plan {
            path: path.to_string(),
            uses: uses.into_iter().map(Vec::into_boxed_slice).collect(),
            numeric: layout.numeric.len(),
            categorical: layout.categorical.len(),
            positive: layout.label.as_ref().map_or_else(Vec::new, |label| bytes(&label.positive)),
            missing_typed: missing.iter().any(typed),
            missing,
            names,
        })
    }

    /// The plan for a text file without a header, whose columns only the layout names.
    pub fn without_header(path: &str, layout: &Layout) -> Result<Plan> {
        if layout.columns.is_empty() {
            return Err(Error::File {
                path: path.into(),
                reason: "it has no header and the layout names no columns; \
                         say which there are, or that there is a header",
            });
        }
        Plan::new(path, layout.columns.clone(), layout)
    }

    /// Room for `records` more records in `batch`; what is not filled is cut off by [`Plan::truncate`].
    pub fn extend(&self, batch: &mut Batch, records: usize) {
        let records = batch.records + records;
        batch.labels.resize(records, 0.0);
        batch.numeric.resize(records * self.numeric, 0.0);
        batch.ids.resize(records * self.categorical, 0);
    }

    /// Ends `batch` after `records` records.
    pub fn truncate(&self, batch: &mut Batch, records: usize) {
        batch.records = records;
        batch.labels.truncate(records);
        batch.numeric.truncate(records * self.numeric);
        batch.ids.truncate(records * self.categorical);
    }

    /// The place of record `at`.
    #[inline]
    pub fn row<'a>(&self, batch: &'a mut Batch, at: usize) -> RowMut<'a> {
        RowMut {
            label: &mut batch.labels[at],
            numeric: &mut batch.numeric[at * self.numeric..][..self.numeric],
            ids: &mut batch.ids[at * self.categorical..][..self.categorical],
        }
    }

    /// Whether a text means that there is no value.
    #[inline]
    pub fn is_missing(&self, value: &[u8]) -> bool {
        value.is_empty() || self.missing.iter().any(|missing| missing == value)
    }

    /// Puts a text where it belongs.
    #[inline]
    pub fn put_text(&self, what: &Use, value: &[u8], row: &mut RowMut<'_>) -> std::result::Result<(), Wrong> {
        match *what {
            Use::Label => *row.label = self.label(value)?,
            Use::Number { slot, scaler } => row.numeric[slot] = self.number(value, &scaler)?,
            Use::Id { slot, ids, bucket } => row.ids[slot] = self.id(value, &ids, bucket)?,
        }
        Ok(())
    }

    /// The label that a text is.
    #[inline]
    pub fn label(&self, value: &[u8]) -> std::result::Result<f32, Wrong> {
        match value {
            _ if self.is_missing(value) => Err(Wrong::NoLabel),
            _ if !self.positive.is_empty() => Ok(f32::from(u8::from(self.is_positive(value)))),
            b"0" => Ok(0.0),
            b"1" => Ok(1.0),
            _ => zero_or_one(number::parse(value).ok_or(Wrong::NotZeroOrOne)?),
        }
    }

    /// Whether the layout lists the values that mean 1.
    pub fn lists_positive(&self) -> bool {
        !self.positive.is_empty()
    }

    fn is_positive(&self, value: &[u8]) -> bool {
        self.positive.iter().any(|positive| positive == value)
    }

    #[inline]
    fn number(&self, value: &[u8], scaler: &Scaler) -> std::result::Result<f32, Wrong> {
        if self.is_missing(value) {
            return Ok(0.0);
        }
        scaler.apply(number::parse(value).ok_or(Wrong::NoNumber)?)
    }

    #[inline]
    fn id(&self, value: &[u8], ids: &FieldIds, bucket: Bucket) -> std::result::Result<u64, Wrong> {
        if self.is_missing(value) {
            return Ok(ids.missing());
        }
        if bucket == Bucket::Value {
            return Ok(ids.of_text(value));
        }
        bucketed(number::parse(value).ok_or(Wrong::NoNumber)?, ids, bucket)
    }

    /// A record to be set aside because of the value in one column.
    #[cold]
    pub fn bad_value(&self, place: Place, column: usize, value: &[u8], wrong: Wrong) -> BadRecord {
        let value = shown(value);
        let reason = match wrong {
            Wrong::NoNumber => format!("{value} is no finite number"),
            Wrong::TooLarge => format!("{value} is too large a number"),
            Wrong::NoLabel => "the label is missing".to_string(),
            Wrong::NotZeroOrOne => format!("the label is {value}, neither 0 nor 1"),
        };
        let column = Column { number: column + 1, name: self.names[column].clone() };
        BadRecord { path: self.path.clone(), place, column: Some(column), reason }
    }

    /// A record to be set aside as a whole.
    #[cold]
    pub fn bad_record(&self, place: Place, reason: String) -> BadRecord {
        BadRecord { path: self.path.clone(), place, column: None, reason }
    }
}

/// The names in a header line.
pub(crate) fn header_names(line: &[u8], style: Style) -> Vec<String> {
    let mut names = Vec::new();
    let mut scratch = Vec::new();
    // A header with broken quotes yields odd names, and those are told where they are not found.
    let _ = super::text::split(line, style, &mut scratch, &mut |_, name| {
        names.push(String::from_utf8_lossy(name).into_owned());
        Ok(())
    });
    names
}

/// [`Scale`], faster: counts are mostly small, and a logarithm costs as much as the rest of a value.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scaler {
    scale: Scale,
    /// What becomes of 0, 1, 2, …; empty where computing is as fast as looking up.
    small: &'static [f32],
}

impl Scaler {
    fn new(scale: Scale) -> Self {
        static LOGS: LazyLock<Vec<f32>> =
            LazyLock::new(|| (0..1024u16).map(|n| Scale::Log.apply(n.into())).collect());
        Scaler { scale, small: if scale == Scale::Log { &LOGS } else { &[] } }
    }

    /// A number as the model sees it.
    #[inline]
    pub fn apply(&self, value: f64) -> std::result::Result<f32, Wrong> {
        let whole = value as usize;
        if whole < self.small.len() && whole as f64 == value {
            return Ok(self.small[whole]);
        }
        let scaled = self.scale.apply(value as f32);
        if scaled.is_finite() { Ok(scaled) } else { Err(Wrong::TooLarge) }
    }
}

/// The id of the step that a number falls on.
#[inline]
pub(crate) fn bucketed(value: f64, ids: &FieldIds, bucket: Bucket) -> std::result::Result<u64, Wrong> {
    let value = value as f32;
    let step = match bucket {
        Bucket::Value => return Ok(ids.of_float(value)),
        Bucket::Width { width } => (value / width).floor(),
        Bucket::Log { steps } => (steps * Scale::Log.apply(value)).round(),
    };
    // Beyond i64 all numbers would share a step.
    if step.abs() < 9e18 { Ok(ids.of_integer(step as i64)) } else { Err(Wrong::TooLarge) }
}

/// A label that is a number.
#[inline]
pub(crate) fn zero_or_one(value: f64) -> std::result::Result<f32, Wrong> {
    if value == 0.0 || value == 1.0 { Ok(value as f32) } else { Err(Wrong::NotZeroOrOne) }
}

/// A value for a message: quoted, and not longer than a person wants to see.
fn shown(value: &[u8]) -> String {
    const BYTES_MAX: usize = 60;
    let text = String::from_utf8_lossy(&value[..value.len().min(BYTES_MAX)]);
    let more = if value.len() > BYTES_MAX { "…" } else { "" };
    format!("{:?}{more}", text)
}
