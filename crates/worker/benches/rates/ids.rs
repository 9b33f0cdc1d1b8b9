//! Ids of batches, as click logs have them.

use elasticdl_spec::mix::{Rng, mix2};

/// Records of a batch.
pub const RECORDS: usize = 4096;
/// Categorical fields of a record.
pub const FIELDS: usize = 26;

/// The ids of one batch: fields of very different size, a few values everywhere.
pub fn ids(rng: &mut Rng) -> Vec<u64> {
    let sizes = [50.0f64, 500.0, 5e3, 5e4, 1e6];
    let mut draw = |field: usize| {
        let value = sizes[field % 5].powf(rng.uniform().powf(0.8));
        mix2(field as u64, value as u64)
    };
    (0..RECORDS * FIELDS).map(|i| draw(i % FIELDS)).collect()
}
