//! A model as the servers see it: named tables and tensors with initializers, nothing else.

use serde::{Deserialize, Serialize};

use crate::mix::{Rng, hash_text, mix2};

/// How fresh weights are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Initializer {
    /// All zero.
    Zeros,
    /// Uniform in [-bound, bound).
    Uniform {
        /// Half the width.
        bound: f32,
    },
    /// Normal with mean 0.
    Normal {
        /// The standard deviation.
        deviation: f32,
    },
}

impl Initializer {
    /// Fills `out` from `rng`.
    #[inline(always)]
    pub fn fill(self, rng: &mut Rng, out: &mut [f32]) {
        match self {
            Initializer::Zeros => out.fill(0.0),
            Initializer::Uniform { bound } => {
                rng.uniforms(out, |x| (x as f32 * 2.0 - 1.0) * bound);
            }
            Initializer::Normal { deviation } => {
                out.iter_mut().for_each(|x| *x = rng.normal() as f32 * deviation);
            }
        }
    }
}

/// A run of columns of a row that share an initializer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RowPart {
    /// How many columns.
    pub width: usize,
    /// How they are born.
    pub init: Initializer,
}

/// An embedding table: rows by 64-bit id, all of one width.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TableShape {
    /// Its name, unique in the model.
    pub name: String,
    /// The columns of a row, in order.
    pub parts: Vec<RowPart>,
}

impl TableShape {
    /// Weights per row.
    pub fn width(&self) -> usize {
        self.parts.iter().map(|p| p.width).sum()
    }

    /// Writes the weights that the row `id` is born with: a pure function of (job seed, table, id).
    pub fn init_row(&self, seed: u64, id: u64, row: &mut [f32]) {
        self.init_row_from(self.row_seed(seed), id, row);
    }

    /// What [`TableShape::init_row_from`] needs, worth computing once per table.
    pub fn row_seed(&self, seed: u64) -> u64 {
        mix2(seed, hash_text(&self.name))
    }

    /// [`TableShape::init_row`] with the table's part of the seed computed before.
    #[inline(always)]
    pub fn init_row_from(&self, row_seed: u64, id: u64, row: &mut [f32]) {
        assert_eq!(row.len(), self.width(), "a row is as wide as its table says");
        let mut rng = Rng::new(mix2(row_seed, id));
        let mut rest = row;
        for part in &self.parts {
            let (columns, tail) = rest.split_at_mut(part.width);
            part.init.fill(&mut rng, columns);
            rest = tail;
        }
    }
}

/// A dense tensor of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorShape {
    /// Its name, unique in the model.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// How it is born.
    pub init: Initializer,
}

impl TensorShape {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values it is born with: a pure function of (job seed, name).
    pub fn init_values(&self, seed: u64) -> Vec<f32> {
        let mut values = vec![0.0; self.len()];
        self.init.fill(&mut Rng::new(mix2(seed, hash_text(&self.name))), &mut values);
        values
    }
}

/// All tables and tensors of a model, in a fixed order that every role shares.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelShape {
    /// Embedding tables.
    pub tables: Vec<TableShape>,
    /// Dense tensors.
    pub tensors: Vec<TensorShape>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str) -> TableShape {
        TableShape {
            name: name.into(),
            parts: vec![
                RowPart { width: 1, init: Initializer::Zeros },
                RowPart { width: 4, init: Initializer::Uniform { bound: 0.1 } },
            ],
        }
    }

    /// Defect 5 of the original: a name that it did not know meant zeros, so that a term never learned.
    #[test]
    fn an_unknown_initializer_is_an_error_that_names_the_known_ones() {
        let read = |text: &str| serde_json::from_str::<Initializer>(text);
        assert_eq!(read(r#"{"kind":"uniform","bound":0.5}"#).unwrap(), Initializer::Uniform { bound: 0.5 });
        let error = read(r#"{"kind":"glorot_uniform"}"#).unwrap_err().to_string();
        assert!(
            error.contains("glorot_uniform") && error.contains("`zeros`, `uniform`, `normal`"),
            "{error}"
        );
        assert!(read(r#"{"kind":"uniform"}"#).is_err(), "and one without its bound is none");
    }

    #[test]
    fn a_row_depends_on_seed_table_and_id_alone() {
        let born = |name, seed, id| {
            let mut row = [9.0; 5];
            table(name).init_row(seed, id, &mut row);
            row
        };
        assert_eq!(born("a", 1, 7), born("a", 1, 7));
        assert_eq!(born("a", 1, 7)[0], 0.0);
        assert!(born("a", 1, 7)[1..].iter().all(|x| x.abs() <= 0.1 && *x != 0.0));
        assert_ne!(born("a", 1, 7), born("b", 1, 7));
        assert_ne!(born("a", 1, 7), born("a", 2, 7));
        assert_ne!(born("a", 1, 7), born("a", 1, 8));
    }
}
