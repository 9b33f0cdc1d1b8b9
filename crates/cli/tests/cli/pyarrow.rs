//! Checkpoints are read with pyarrow, by the very lines that docs/checkpoints.md has for it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use elasticdl_ps::checkpoint::{Piece, Reader};
use serde_json::Value;

use super::chaos::{chains, counting};
use super::world::{World, said};

/// Rows by their ids, over all partitions.
type Rows = BTreeMap<u64, Vec<f32>>;

/// A Python that has pyarrow; `None` says aloud that a test is skipped.
fn python() -> Option<PathBuf> {
    let python = std::env::var_os("ELASTICDL_TEST_PYTHON").map(PathBuf::from);
    if python.is_none() {
        eprintln!("skipped: ELASTICDL_TEST_PYTHON names no Python with pyarrow; `cargo xtask test` does");
    }
    python
}

/// The function `rows` of the document.
fn recipe() -> &'static str {
    let document = include_str!("../../../../docs/checkpoints.md");
    let block = document.split("```python\n").nth(1).and_then(|rest| rest.split("```").next());
    block.expect("the document has lines of Python")
}

/// What the document's lines find in a checkpoint.
fn by_pyarrow(world: &World, python: &Path, dir: &Path, checkpoint: u64) -> Rows {
    let call = "import sys\n\
                ckpt, number = sys.argv[1], int(sys.argv[2])\n\
                found = [rows(ckpt, number, partition) for partition in range(4)]\n\
                print(json.dumps([[id, weights] for part in found for (_, id), weights in part.items()]))\n";
    world.write("read.py", &format!("{}\n{call}", recipe()));
    let mut command = Command::new(python);
    command.arg(world.path("read.py")).arg(dir).arg(checkpoint.to_string());
    let read: Vec<(u64, Vec<f32>)> = serde_json::from_str(&said(&mut command).ok()).unwrap();
    let (ids, rows) = (read.len(), Rows::from_iter(read));
    assert_eq!(rows.len(), ids, "an id is in one partition");
    rows
}

/// What is restored from it.
fn by_us(dir: &Path) -> Rows {
    let mut rows = Rows::new();
    let visited = Reader::open(chains(dir)).unwrap().visit(|piece| {
        if let Piece::Rows { ids, weights, .. } = piece {
            let each = weights.chunks_exact(weights.len() / ids.len()).map(<[f32]>::to_vec);
            rows.extend(ids.iter().copied().zip(each));
        }
        Ok::<(), elasticdl_ps::Error>(())
    });
    visited.unwrap();
    rows
}

/// A checkpoint that adds to earlier ones is to both what it is to the other. Tells its rows.
fn reads_the_same(more: &str) -> Option<Rows> {
    let python = python()?;
    let (world, file) = counting(30, more);
    let often = [
        "--set",
        "checkpoint.every=100ms",
        "--set",
        "checkpoint.full_every=9",
        "--set",
        "checkpoint.keep=99",
    ];
    let mut job = world.start(&[&["train", &file][..], &often].concat());
    let adds = |e: &Value| e["event"] == "checkpoint" && e["adding"].as_u64() > Some(0);
    let checkpoint = job.until("a checkpoint that adds to others", adds)["checkpoint"].as_u64().unwrap();
    job.end();
    let dir = world.job_dir("count").join("checkpoint");
    let ours = by_us(&dir.join(format!("checkpoint-{checkpoint:06}")));
    assert_eq!(by_pyarrow(&world, &python, &dir, checkpoint), ours);
    Some(ours)
}

#[test]
fn a_chain_of_files_is_read_as_the_document_says() {
    if let Some(rows) = reads_the_same("") {
        assert!(!rows.is_empty() && rows.values().all(|weights| weights.len() == 1), "{rows:?}");
    }
}

/// Goal: rows that make room for others go by their numbers, and counts are no rows.
#[test]
fn a_chain_of_a_table_with_a_bound_is_read_as_the_document_says() {
    if let Some(rows) = reads_the_same("tables: { '*': { memory_max: 256Ki, admit_after: 2 } }") {
        assert!(!rows.is_empty());
    }
}
