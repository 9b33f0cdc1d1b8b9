//! 2 GiB of rows to files and back, beside as many bytes that are only written.

#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use elasticdl_ps::checkpoint::{self, Layer, Order};
use elasticdl_ps::{Model, Partitions};
use elasticdl_spec::PartitionId;
use serde_json::{Value, json};

use crate::memory::ADAGRAD;
use crate::raw;
use crate::served::hold;
use crate::table::{BATCH, PARTITIONS, deal, id, median};

pub const DIM: usize = 16;
/// Whole files; what changes after them is noted.
pub const ORDER: Order = Order { checkpoint: 1, base: None, is_basis: true };

/// Writes so many rows in turn with plain bytes, so many times, below the system's directory for temporary files.
pub fn run(pairs: usize, rows: usize) -> Result<Value, Box<dyn Error>> {
    let (model, partitions) = hold(DIM, ADAGRAD);
    bear(&partitions, rows)?;
    let scratch = tempfile::tempdir()?;
    let file = scratch.path().join("raw");
    // The first raw write is as long as the first checkpoint, so that one comes before all pairs.
    let (_, bytes) = write(&partitions, &scratch.path().join("first"))?;
    let mut measured = Vec::new();
    for pair in 0..pairs {
        let dir = scratch.path().join(format!("checkpoint-{pair}"));
        let plain = |file: &Path| -> Result<f64, Box<dyn Error>> {
            let seconds = raw::write(file, bytes)?;
            std::fs::remove_file(file)?;
            Ok(seconds)
        };
        // Who comes second finds a disk that is busy with what the first has left.
        let (ours, plain) = if pair % 2 == 0 {
            (write(&partitions, &dir)?.0, plain(&file)?)
        } else {
            let plain = plain(&file)?;
            (write(&partitions, &dir)?.0, plain)
        };
        measured.push([ours, plain]);
    }
    let restored = restored(&model, &partitions, &scratch.path().join("restored"))?;
    let megabytes = bytes as f64 / 1e6;
    let of = |f: &dyn Fn(&[f64; 2]) -> f64| median(measured.iter().map(f).collect());
    Ok(json!({
        "rows": rows, "pairs": pairs, "partitions": PARTITIONS, "megabytes": megabytes,
        "megabytes_per_second": {
            "checkpoint": of(&|r| megabytes / r[0]), "raw": of(&|r| megabytes / r[1]), "restored": megabytes / restored,
        },
        "checkpoint_of_raw": of(&|r| r[1] / r[0]),
    }))
}

/// Bears so many rows.
pub fn bear(partitions: &Partitions, rows: usize) -> Result<(), Box<dyn Error>> {
    let mut floats = vec![0.0; BATCH * DIM];
    for from in (0..rows).step_by(BATCH) {
        let ids: Vec<u64> = (from..rows.min(from + BATCH)).map(|row| id(row as u64)).collect();
        for (ids, part) in deal(&ids).iter().zip(0..) {
            let floats = &mut floats[..ids.len() * DIM];
            partitions.with(PartitionId(part), |p| p.pull(0, ids, floats)).ok_or("a partition is gone")??;
        }
    }
    Ok(())
}

/// Seconds and bytes of a checkpoint, which is removed again.
fn write(partitions: &Partitions, dir: &Path) -> Result<(f64, u64), Box<dyn Error>> {
    std::fs::create_dir(dir)?;
    let start = Instant::now();
    let written = partitions.write_checkpoint(dir, ORDER)?;
    let seconds = start.elapsed().as_secs_f64();
    std::fs::remove_dir_all(dir)?;
    Ok((seconds, written.iter().map(|file| file.sum.bytes).sum()))
}

/// Seconds to read a checkpoint back.
fn restored(model: &Arc<Model>, partitions: &Partitions, dir: &Path) -> Result<f64, Box<dyn Error>> {
    std::fs::create_dir(dir)?;
    let written = partitions.write_checkpoint(dir, ORDER)?;
    let start = Instant::now();
    for file in &written {
        let chain = [Layer { checkpoint: ORDER.checkpoint, dir: dir.into(), sum: file.sum }];
        checkpoint::restore(model, file.partition, 2, &chain)?;
    }
    Ok(start.elapsed().as_secs_f64())
}
