//! Committed checkpoints and the ledger beside them as the client sees them: which there are, whose they are,
//! out of the way with them.

use std::path::{Path, PathBuf};

use anyhow::Context;
use elasticdl_master::checkpoint::{EarlierFile, Manifest};
use elasticdl_master::ledger::{self, dir_of};
use elasticdl_master::store;
use elasticdl_ps::checkpoint::{Layer, Sum};

use crate::fault::Fault;

/// The directories of all checkpoints in `dir`, finished or not.
pub fn all(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    Ok(store::checkpoints(dir)?.into_iter().map(|(_, path)| path).collect())
}

/// Whether there is a ledger to go on from beside the checkpoints in `dir`.
pub fn has_begun(dir: &Path) -> bool {
    match ledger::read(dir) {
        Ok(book) => book.is_some_and(|book| !book.is_empty()),
        // There is one; the master that opens it says what is wrong with it.
        Err(_) => true,
    }
}

/// Removes the ledger from `dir`; without it nothing can go on.
pub fn clear_ledger(dir: &Path) -> anyhow::Result<()> {
    let path = dir_of(dir);
    elasticdl_storage::remove_all(&path).with_context(|| format!("removing {}", path.display()))
}

/// Removes the ledger and all checkpoints from `dir`, and nothing else that may lie there.
pub fn clear(dir: &Path) -> anyhow::Result<()> {
    // First the ledger: it must never speak of checkpoints that are gone.
    clear_ledger(dir)?;
    for path in all(dir)? {
        elasticdl_storage::remove_all(&path).with_context(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}

/// The newest committed checkpoint of job `name` and its directory.
pub fn newest(dir: &Path, name: &str) -> anyhow::Result<(Manifest, PathBuf)> {
    let manifest = store::newest(dir)?.ok_or_else(|| {
        Fault::user(format!("job {name:?} has no committed checkpoint in {}", dir.display()))
            .hint("a checkpoint is written on stop, at the end, and every checkpoint.every")
    })?;
    let path = PathBuf::from(store::checkpoint_path(&dir.display().to_string(), manifest.id));
    Ok((manifest, path))
}

/// The files of every partition of a checkpoint in `dir`, from partition 0 on.
pub fn chains(dir: &Path, manifest: &Manifest) -> Vec<Vec<Layer>> {
    let dir = dir.display().to_string();
    let layer = |file: EarlierFile| Layer {
        checkpoint: file.checkpoint,
        dir: PathBuf::from(store::checkpoint_path(&dir, file.checkpoint)),
        sum: Sum { bytes: file.bytes, crc32: file.crc32 },
    };
    let partitions = manifest.partitions.keys();
    partitions.map(|partition| manifest.chain(*partition).into_iter().map(layer).collect()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_checkpoints_and_the_ledger_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        clear(dir).unwrap();
        assert!(!has_begun(dir));
        for name in ["ledger", "checkpoint-000001", "checkpoint-mine"] {
            fs::create_dir(dir.join(name)).unwrap();
            fs::write(dir.join(name).join("file"), "x").unwrap();
        }
        clear(dir).unwrap();
        assert!(!dir.join("ledger").exists() && all(dir).unwrap().is_empty());
        assert!(dir.join("checkpoint-mine/file").exists());
    }
}
