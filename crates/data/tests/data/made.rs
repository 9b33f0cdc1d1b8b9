//! What the tests share: small files, and their way through the crate.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use elasticdl_data::{BadRecord, Batch, Batches, BatchesConfig, DataFile, Result, cut, discover};
use elasticdl_spec::layout::{Bucket, CategoricalField, Label, NumericField, Scale, TextStyle};
use elasticdl_spec::{Layout, Shard, TaskId};
use tempfile::TempDir;

/// A directory with files in it, gone at the end of the test.
pub struct Made(TempDir);

impl Made {
    pub fn new() -> Made {
        Made(tempfile::tempdir().expect("a temporary directory"))
    }

    /// A directory with one file.
    pub fn with(name: &str, content: impl AsRef<[u8]>) -> (Made, DataFile) {
        let made = Made::new();
        let file = made.file(name, content);
        (made, file)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> DataFile {
        fs::write(self.path(name), content).expect("a file can be written");
        self.found(name)
    }

    pub fn found(&self, name: &str) -> DataFile {
        let mut files = discover(&[self.path(name).display().to_string()], None).expect("the file is there");
        files.pop().expect("a path that exists is one file")
    }

    pub fn shards(&self, file: &DataFile, layout: &Layout, records_per_shard: u64) -> Result<Vec<Shard>> {
        let mut shards = Vec::new();
        cut(file, layout, records_per_shard, &self.path("index"), &mut |shard| shards.push(shard))?;
        Ok(shards)
    }

    /// A message without the name of the temporary directory.
    pub fn message(&self, error: impl std::fmt::Display) -> String {
        error.to_string().replace(&format!("{}/", self.0.path().display()), "")
    }
}

/// A comma-separated layout with columns label, n (a number as it is) and c (an id).
pub fn plain() -> Layout {
    Layout {
        name: "custom".into(),
        columns: ["label", "n", "c"].map(String::from).into(),
        text: TextStyle { delimiter: ',', header: false, quotes: false, trim: false, missing: vec![] },
        label: Some(Label { column: "label".into(), positive: vec![] }),
        numeric: vec![NumericField { column: "n".into(), scale: Scale::Identity }],
        categorical: vec![CategoricalField { name: "c".into(), column: "c".into(), bucket: Bucket::Value }],
    }
}

/// Reading one shard in order, in one go.
pub fn in_order(shard: &Shard, layout: &Layout) -> BatchesConfig {
    BatchesConfig {
        task: TaskId::train(0, 0),
        shard: shard.clone(),
        layout: Arc::new(layout.clone()),
        format: None,
        batch: 1000,
        batches_per_block: 2,
        shuffle: false,
        seed: 1,
        first_batch: 0,
    }
}

/// All batches of a task.
pub fn all(config: BatchesConfig) -> Result<Vec<(u64, Batch, Vec<BadRecord>)>> {
    let mut batches = Batches::open(config)?;
    let mut all = Vec::new();
    while let Some(batch) = batches.next()? {
        all.push(batch);
    }
    Ok(all)
}

/// All records of some shards in one batch, in order, and those set aside.
pub fn read(shards: &[Shard], layout: &Layout) -> Result<(Batch, Vec<BadRecord>)> {
    let (mut whole, mut set_aside) = (Batch::default(), Vec::new());
    for shard in shards {
        for (_, batch, bad) in all(in_order(shard, layout))? {
            whole.records += batch.records;
            whole.labels.extend(batch.labels);
            whole.numeric.extend(batch.numeric);
            whole.ids.extend(batch.ids);
            set_aside.extend(bad);
        }
    }
    Ok((whole, set_aside))
}

/// All records of a file.
pub fn read_file(made: &Made, file: &DataFile, layout: &Layout) -> Result<(Batch, Vec<BadRecord>)> {
    read(&made.shards(file, layout, 1 << 20)?, layout)
}

/// The ids that texts have in the field `c`, learnt from a file that holds them quoted.
pub fn ids_of(texts: &[&str]) -> Vec<u64> {
    let mut layout = plain();
    layout.text.quotes = true;
    let lines: Vec<String> =
        texts.iter().map(|text| format!("0,0,\"{}\"\n", text.replace('"', "\"\""))).collect();
    let (made, file) = Made::with("ids.csv", lines.concat());
    let (batch, bad) = read_file(&made, &file, &layout).expect("the file is fine");
    assert!(bad.is_empty(), "{bad:?}");
    batch.ids
}
