//! How fast records are made, indexed and decoded on one core:
//! `cargo run --release -p elasticdl-data --example decode [ROWS]`.
//!
//! Rates are per second of CPU time, so that other work on the machine matters little.

use std::sync::Arc;

use elasticdl_data::synth::{SynthFormat, SynthOptions, criteo};
use elasticdl_data::{Batches, BatchesConfig, cut, discover};
use elasticdl_spec::{Layout, TaskId};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rows = std::env::args().nth(1).map_or(Ok(1_000_000), |rows| rows.parse())?;
    let directory = tempfile::tempdir()?;
    for format in [SynthFormat::Tsv, SynthFormat::Parquet] {
        let out = directory.path().join(format.extension());
        let options = SynthOptions { rows, test_rows: 0, files: 1, seed: 1, out, format, threads: 1 };
        let start = cpu_seconds();
        let truth = criteo(&options, &mut |_| {})?;
        rate(&format!("made, {}", format.extension()), rows, start);
        let pattern = options.out.join("train-*").display().to_string();
        let files = discover(&[pattern], None)?;
        let layout = Arc::new(Layout::known("criteo").expect("known by name"));
        let bytes = files.iter().map(|file| file.bytes).sum::<u64>();
        println!("  {} MB, {} distinct ids", bytes / 1_000_000, truth.distinct_ids);

        let start = cpu_seconds();
        let mut shards = Vec::new();
        cut(&files[0], &layout, 65_536, &options.out.join("index"), &mut |shard| shards.push(shard))?;
        rate("  indexed", rows, start);

        for shuffle in [false, true] {
            for round in 0..2 {
                let start = cpu_seconds();
                let (mut records, mut check) = (0, 0u64);
                for (n, shard) in shards.iter().enumerate() {
                    let config = BatchesConfig {
                        task: TaskId::train(0, n as u32),
                        shard: shard.clone(),
                        layout: layout.clone(),
                        format: None,
                        batch: 4096,
                        batches_per_block: 16,
                        shuffle,
                        seed: 1,
                        first_batch: 0,
                    };
                    let mut batches = Batches::open(config)?;
                    while let Some((_, batch, _)) = batches.next()? {
                        records += batch.records as u64;
                        check ^= batch.ids.iter().fold(0, |a, b| a ^ b);
                    }
                }
                if round > 0 {
                    rate(if shuffle { "  decoded, shuffled" } else { "  decoded, in order" }, records, start);
                }
                std::hint::black_box(check);
            }
        }
    }
    Ok(())
}

fn rate(what: &str, rows: u64, start: f64) {
    println!("{what:24} {:>6} k records/s", (rows as f64 / (cpu_seconds() - start) / 1e3).round());
}

/// CPU time of this process so far, in steps of 10 ms (fields 14 and 15 of the line, counted from 1).
fn cpu_seconds() -> f64 {
    let line = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    line.split(" ").skip(13).take(2).filter_map(|word| word.parse::<f64>().ok()).sum::<f64>() / 100.0
}
