//! Real data: UCI's Adult census, where it is.

use std::path::Path;

use elasticdl_data::discover;
use elasticdl_spec::Layout;

use crate::made::{Made, read_file};

#[test]
fn the_adult_census_is_read_whole() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/census-adult");
    if !directory.is_dir() {
        println!("skipped: {} is not there", directory.display());
        return;
    }
    let made = Made::new();
    let layout = Layout::known("adult").expect("known by name");
    for (name, records, positive) in [("adult.data.gz", 32_561, 7_841.0), ("adult.test.gz", 16_281, 3_846.0)]
    {
        let files = discover(&[directory.join(name).display().to_string()], None).expect("it is there");
        let (batch, bad) = read_file(&made, &files[0], &layout).expect("it can be read");
        assert_eq!(bad, []);
        assert_eq!(batch.records, records, "{name}");
        assert_eq!(batch.labels.iter().sum::<f32>(), positive, "{name}");
        let ages: Vec<f32> = batch.numeric.chunks(6).map(|numbers| numbers[0]).collect();
        let mean = ages.iter().sum::<f32>() / ages.len() as f32;
        assert!(mean.abs() < 0.02, "ages are standardized: {mean}");
    }
}
