//! Counting: each record adds exactly 1 to the row of its first categorical field.
//!
//! It learns nothing. It is there so that one can see that every record counted exactly once: trained with
//! plain gradient descent and a step of 1 on a column whose values occur once each, every row of that column
//! equals the number of epochs, whatever died on the way. Sums of ones are exact up to 2²⁴ in a row. Rows of
//! further fields, where there are any, stay 0.

use elasticdl_spec::ModelShape;

use super::embedding_table;
use crate::{Gradients, Input, Model};

/// What every record is predicted to be: there is nothing to know.
const PROBABILITY: f32 = 0.5;

/// A row is a count.
pub(super) struct Counting {
    shape: ModelShape,
    categorical: usize,
}

impl Counting {
    /// The model, for records with so many categorical fields.
    pub fn new(categorical: usize) -> Self {
        assert!(categorical > 0, "there is a field to count by");
        let shape = ModelShape { tables: vec![embedding_table(0)], tensors: vec![] };
        Counting { shape, categorical }
    }
}

impl Model for Counting {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn load(&mut self, _: &[&[f32]]) {}

    /// A gradient of −1 for each record, however large its batch: descent with a step of 1 adds 1.
    fn train(&mut self, input: &Input, _: usize, gradients: &mut Gradients) -> f64 {
        let index = input.tables[0].index;
        assert_eq!(index.len(), input.records * self.categorical, "a row per record and field");
        for record in index.chunks_exact(self.categorical) {
            gradients.tables[0][record[0] as usize] -= 1.0;
        }
        0.0
    }

    fn predict(&mut self, input: &Input, probabilities: &mut Vec<f32>) {
        probabilities.clear();
        probabilities.resize(input.records, PROBABILITY);
    }
}

#[cfg(test)]
mod tests {
    use elasticdl_spec::{Initializer, ModelSpec, Zoo};

    use crate::{Error, Gradients, Input, TableInput, build};

    fn spec() -> ModelSpec {
        ModelSpec { zoo: Zoo::Counting, embedding_dim: 16, hidden: vec![400] }
    }

    #[test]
    fn a_row_is_one_number_that_begins_at_zero_and_nothing_is_dense() {
        let model = build(&spec(), 2, 3).expect("a valid model");
        let [table] = &model.shape().tables[..] else { panic!("one table") };
        assert_eq!((table.width(), table.parts[0].init), (1, Initializer::Zeros));
        assert!(model.shape().tensors.is_empty());
    }

    #[test]
    fn each_record_takes_one_from_the_gradient_of_its_first_id_whatever_the_batch() {
        let mut model = build(&spec(), 1, 2).expect("a valid model");
        let (rows, numeric, labels) = ([7.0, 0.0, 3.0], [0.5; 4], [1.0, 0.0, 1.0, 1.0]);
        let tables = [TableInput { rows: &rows, index: &[0, 2, 1, 2, 0, 1, 0, 2] }];
        let input = Input { records: 4, numeric: &numeric, labels: &labels, tables: &tables };
        for batch_records in [4, 4096] {
            let mut gradients = Gradients::default();
            gradients.reset(model.shape(), &[3]);
            model.load(&[]);
            assert_eq!(model.train(&input, batch_records, &mut gradients), 0.0);
            assert_eq!(gradients.tables[0], [-3.0, -1.0, 0.0]);
            assert!(gradients.tensors.is_empty());
        }
        let mut probabilities = vec![9.0];
        model.predict(&Input { labels: &[], ..input }, &mut probabilities);
        assert_eq!(probabilities, [0.5; 4]);
    }

    #[test]
    fn there_must_be_something_to_count_by() {
        let error = build(&spec(), 3, 0).err().expect("nothing to count by");
        let what = "the number of categorical fields".into();
        assert_eq!(error, Error::Zero { zoo: Zoo::Counting, what });
    }
}
