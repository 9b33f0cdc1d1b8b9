//! Committed checkpoints as the client sees them: which there are, whose they are, out of the way with them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use elasticdl_master::checkpoint::Manifest;
use elasticdl_master::store;

use crate::fault::Fault;

/// The directories of all checkpoints in `dir`, finished or not.
pub fn all(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.with_context(|| format!("listing the checkpoints in {}", dir.display()))?,
    };
    let ours = |name: &str| name.strip_prefix("checkpoint-").is_some_and(|n| n.parse::<u64>().is_ok());
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok())
        .filter(|entry| entry.file_name().to_str().is_some_and(ours))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    Ok(found)
}

/// Removes all checkpoints from `dir`, and nothing else that may lie there.
pub fn clear(dir: &Path) -> anyhow::Result<()> {
    for path in all(dir)? {
        fs::remove_dir_all(&path).with_context(|| format!("removing {}", path.display()))?;
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
