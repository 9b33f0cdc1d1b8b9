//! What the columns of the data mean, and the layouts that are known by name.

use serde::{Deserialize, Serialize};

/// The columns of a data set and the fields made from them.
///
/// Text without a header is read by position in `columns`; text with a header and Parquet by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Layout {
    /// Its name, for messages: `criteo`, `adult` or `custom`.
    pub name: String,
    /// Column names in file order; empty where the file's header tells.
    pub columns: Vec<String>,
    /// How text is cut into columns.
    pub text: TextStyle,
    /// The label; `None` for records that have none, of which only predictions can be made.
    pub label: Option<Label>,
    /// Inputs used as numbers.
    pub numeric: Vec<NumericField>,
    /// Inputs used as ids of embedding rows.
    pub categorical: Vec<CategoricalField>,
}

/// How a line becomes columns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextStyle {
    /// Between columns; one byte.
    pub delimiter: char,
    /// Whether the first line of each file names the columns.
    pub header: bool,
    /// Whether `"` quotes (RFC 4180: quotes may hold delimiters and line ends, `""` is a quote).
    pub quotes: bool,
    /// Whether blanks around a value are dropped.
    pub trim: bool,
    /// Values that mean "missing", beside the empty one.
    pub missing: Vec<String>,
}

/// The column that is to be predicted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Label {
    /// Its column.
    pub column: String,
    /// Values that mean 1, every other one meaning 0; empty: the column holds 0 and 1.
    pub positive: Vec<String>,
}

/// A column used as a number. A missing value becomes 0 after the transform.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NumericField {
    /// Its column.
    pub column: String,
    /// What happens to the number.
    pub scale: Scale,
}

/// What happens to a number before the model sees it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Scale {
    /// Nothing.
    Identity,
    /// sign(x) · ln(1 + |x|), for counts and money.
    Log,
    /// (x − mean) / deviation.
    Standard {
        /// Subtracted.
        mean: f32,
        /// Divided by; never 0.
        deviation: f32,
    },
}

impl Scale {
    /// Applies it.
    #[inline]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Scale::Identity => x,
            Scale::Log => x.signum() * x.abs().ln_1p(),
            Scale::Standard { mean, deviation } => (x - mean) / deviation,
        }
    }
}

/// A column used as an id. A missing value is an id of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CategoricalField {
    /// The field's name; it salts the ids, so that equal values of two fields are two rows.
    pub name: String,
    /// Its column.
    pub column: String,
    /// How the value becomes an id.
    pub bucket: Bucket,
}

/// How a value becomes an id.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Bucket {
    /// The value itself. The integer 7 and the text "7" are the same value.
    Value,
    /// A number, cut into steps of this width: floor(x / width).
    Width {
        /// The step.
        width: f32,
    },
    /// A number, rounded on a logarithmic scale: round(steps · Scale::Log(x)).
    Log {
        /// Steps per factor of e.
        steps: f32,
    },
}

impl Layout {
    /// Layouts known by name.
    pub const KNOWN: [&'static str; 2] = ["criteo", "adult"];

    /// The layout known by this name.
    pub fn known(name: &str) -> Option<Layout> {
        match name {
            "criteo" => Some(criteo()),
            "adult" => Some(adult()),
            _ => None,
        }
    }

    /// The same layout for records that come without the label's column.
    pub fn without_label(&self) -> Layout {
        let mut layout = self.clone();
        if let Some(label) = layout.label.take() {
            layout.columns.retain(|column| *column != label.column);
        }
        layout
    }
}

/// Criteo's click logs: label, 13 counts, 26 ids, tab-separated, no header.
fn criteo() -> Layout {
    let counts: Vec<String> = (1..=13).map(|i| format!("I{i}")).collect();
    let ids: Vec<String> = (1..=26).map(|i| format!("C{i}")).collect();
    let columns = std::iter::once("label".to_string()).chain(counts.clone()).chain(ids.clone()).collect();
    Layout {
        name: "criteo".into(),
        columns,
        text: TextStyle { delimiter: '\t', header: false, quotes: false, trim: false, missing: vec![] },
        label: Some(Label { column: "label".into(), positive: vec![] }),
        numeric: counts.into_iter().map(|column| NumericField { column, scale: Scale::Log }).collect(),
        categorical: ids.into_iter().map(value_field).collect(),
    }
}

/// UCI's Adult census: 14 columns and the income, comma and blank between them, no header.
fn adult() -> Layout {
    const COLUMNS: [&str; 15] = [
        "age",
        "workclass",
        "fnlwgt",
        "education",
        "education-num",
        "marital-status",
        "occupation",
        "relationship",
        "race",
        "sex",
        "capital-gain",
        "capital-loss",
        "hours-per-week",
        "native-country",
        "income",
    ];
    let number = |column: &str, scale| NumericField { column: column.into(), scale };
    let steps = |column: &str, bucket| CategoricalField {
        name: format!("{column}-step"),
        column: column.into(),
        bucket,
    };
    let mut categorical: Vec<CategoricalField> = [
        "workclass",
        "education",
        "marital-status",
        "occupation",
        "relationship",
        "race",
        "sex",
        "native-country",
    ]
    .map(|column| value_field(column.into()))
    .into();
    categorical.extend([
        steps("age", Bucket::Width { width: 5.0 }),
        steps("hours-per-week", Bucket::Width { width: 5.0 }),
        steps("capital-gain", Bucket::Log { steps: 4.0 }),
        steps("capital-loss", Bucket::Log { steps: 8.0 }),
    ]);
    Layout {
        name: "adult".into(),
        columns: COLUMNS.map(String::from).into(),
        text: TextStyle {
            delimiter: ',',
            header: false,
            quotes: false,
            trim: true,
            missing: vec!["?".into()],
        },
        label: Some(Label { column: "income".into(), positive: vec![">50K".into(), ">50K.".into()] }),
        numeric: vec![
            number("age", Scale::Standard { mean: 38.6, deviation: 13.6 }),
            number("fnlwgt", Scale::Standard { mean: 189_800.0, deviation: 105_500.0 }),
            number("education-num", Scale::Standard { mean: 10.1, deviation: 2.6 }),
            number("capital-gain", Scale::Log),
            number("capital-loss", Scale::Log),
            number("hours-per-week", Scale::Standard { mean: 40.4, deviation: 12.3 }),
        ],
        categorical,
    }
}

/// A field whose values are ids as they stand.
fn value_field(column: String) -> CategoricalField {
    CategoricalField { name: column.clone(), column, bucket: Bucket::Value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_layouts_refer_to_their_own_columns() {
        for name in Layout::KNOWN {
            let layout = Layout::known(name).expect("KNOWN lists what known() knows");
            let used = layout
                .numeric
                .iter()
                .map(|f| &f.column)
                .chain(layout.categorical.iter().map(|f| &f.column))
                .chain(layout.label.iter().map(|label| &label.column));
            for column in used {
                assert!(layout.columns.contains(column), "{name}: {column}");
            }
        }
        let criteo = criteo();
        assert_eq!((criteo.columns.len(), criteo.numeric.len(), criteo.categorical.len()), (40, 13, 26));
    }

    #[test]
    fn log_scale_is_odd_and_zero_at_zero() {
        assert_eq!(Scale::Log.apply(0.0), 0.0);
        assert_eq!(Scale::Log.apply(-3.0), -Scale::Log.apply(3.0));
    }
}
