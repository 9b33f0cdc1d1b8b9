//! Checkpoints: one directory each, on disk or in object storage, a checkpoint only once its manifest is there.
//!
//! The servers write partition files into the directory; the manifest is written last and is there as a whole or
//! not at all, so that a half-written checkpoint is never read.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elasticdl_spec::Plan;
use elasticdl_storage as storage;

use crate::checkpoint::{FORMAT, Manifest};
use crate::error::{Error, Result};

const MANIFEST: &str = "manifest.json";
/// The file of the claimed term; in object storage, the directory of all that ever were.
const TERM: &str = "term";

/// The directory of checkpoint `id`.
pub fn checkpoint_path(dir: &str, id: u64) -> String {
    format!("{}/checkpoint-{id:06}", dir.trim_end_matches('/'))
}

/// The newest complete checkpoint in `dir`, if there is one. A master goes by its ledger instead.
pub fn newest(dir: &Path) -> Result<Option<Manifest>> {
    for (_, path) in checkpoints(dir)?.into_iter().rev() {
        if is_complete(&path)? {
            return read(&path).map(Some);
        }
    }
    Ok(None)
}

/// The checkpoint with this number.
pub fn load(dir: &Path, id: u64) -> Result<Manifest> {
    read(Path::new(&checkpoint_path(&dir.display().to_string(), id)))
}

/// How long ago a checkpoint was written; where that cannot be told, too long.
pub fn age(dir: &Path, id: u64) -> Duration {
    let manifest = Path::new(&checkpoint_path(&dir.display().to_string(), id)).join(MANIFEST);
    storage::modified(manifest).ok().and_then(|time| time.elapsed().ok()).unwrap_or(Duration::MAX)
}

fn read(path: &Path) -> Result<Manifest> {
    let error = |reason: String| Error::Checkpoint { path: path.display().to_string(), reason };
    let text =
        storage::read(path.join(MANIFEST)).map_err(|e| error(format!("its manifest cannot be read: {e}")))?;
    let manifest: Manifest =
        serde_json::from_slice(&text).map_err(|e| error(format!("its manifest is damaged: {e}")))?;
    if manifest.format != FORMAT {
        return Err(error(format!("it has format {}, this program reads {FORMAT}", manifest.format)));
    }
    Ok(manifest)
}

/// The number that the next checkpoint gets: no directory, committed or not, has it.
pub fn next_id(dir: &Path) -> Result<u64> {
    Ok(checkpoints(dir)?.last().map_or(1, |(id, _)| id + 1))
}

/// Claims the next term, durably: every lease of this master is above all leases that the ledger or any
/// checkpoint in `dir` remembers. On disk the caller holds the directory's lock, in object storage of several who
/// claim a term one gets it: no two masters claim one.
///
/// The term is claimed before the ledger is read. A master that finds its own term still there after a write
/// knows by that: whoever claims a later one will read what was written.
pub fn claim_term(dir: &Path) -> Result<u64> {
    let failed = |e| Error::io(format!("claiming a term in {}", dir.display()), e);
    loop {
        let term = claimed_term(dir)? + 1;
        let text = format!("{term}\n");
        if !storage::is_url(dir) {
            return storage::replace(dir.join(TERM), text.as_bytes()).map(|()| term).map_err(failed);
        }
        match storage::create_new(dir.join(term_name(term)), text.as_bytes()) {
            Ok(()) => return Ok(term),
            // Somebody else has it: the next one, then.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(failed(e)),
        }
    }
}

/// The newest term that was claimed; 0 where none ever was.
pub fn claimed_term(dir: &Path) -> Result<u64> {
    let failed = |e| Error::io(format!("reading the term in {}", dir.display()), e);
    if storage::is_url(dir) {
        let names = storage::list(dir.join(TERM)).map_err(failed)?;
        return Ok(names.iter().filter_map(|name| name.parse().ok()).max().unwrap_or(0));
    }
    match storage::read(dir.join(TERM)) {
        Ok(text) => {
            let text = String::from_utf8_lossy(&text);
            text.trim().parse::<u64>().map_err(|e| failed(io::Error::other(e)))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(e) => Err(failed(e)),
    }
}

/// The object of a term that was claimed. It is never removed: where it could be, a master that has looked and
/// then slept might claim its term once more.
fn term_name(term: u64) -> String {
    format!("{TERM}/{term:010}")
}

/// Whether a checkpoint fits a job's model; else what differs.
pub fn check_fits(dir: &str, manifest: &Manifest, plan: &Plan) -> Result<()> {
    let path = checkpoint_path(dir, manifest.id);
    let unfit = |reason: String| Error::Checkpoint { path: path.clone(), reason };
    let job = &plan.job;
    for (ours, theirs) in plan.shape.tables.iter().zip(&manifest.shape.tables) {
        if ours.name != theirs.name || ours.width() != theirs.width() {
            return Err(unfit(format!(
                "it is of another model: its table {} has rows of {}, the job's table {} rows of {}",
                theirs.name,
                theirs.width(),
                ours.name,
                ours.width()
            )));
        }
    }
    for (ours, theirs) in plan.shape.tensors.iter().zip(&manifest.shape.tensors) {
        if ours.name != theirs.name || ours.shape != theirs.shape {
            return Err(unfit(format!(
                "it is of another model: its tensor {} is {:?}, the job's tensor {} is {:?}",
                theirs.name, theirs.shape, ours.name, ours.shape
            )));
        }
    }
    let parts = |s: &elasticdl_spec::ModelShape| (s.tables.len(), s.tensors.len());
    if parts(&plan.shape) != parts(&manifest.shape) {
        return Err(unfit("it is of another model: the number of tables or tensors differs".into()));
    }
    if manifest.partitions.len() != job.servers.partitions as usize {
        return Err(unfit(format!(
            "it has {} partitions, the job {}; servers.partitions is fixed for the life of a job",
            manifest.partitions.len(),
            job.servers.partitions
        )));
    }
    let kind = std::mem::discriminant(&job.train.optimizer);
    if std::mem::discriminant(&manifest.optimizer) != kind {
        return Err(unfit(format!(
            "it holds the state of {:?}, the job trains with {:?}",
            manifest.optimizer, job.train.optimizer
        )));
    }
    if manifest.seed != job.train.seed {
        return Err(unfit(format!(
            "it was made with train.seed {}, the job has {}; batches would differ and records be lost or doubled",
            manifest.seed, job.train.seed
        )));
    }
    Ok(())
}

/// Writes the manifest durably. The checkpoint counts once the ledger says so too.
pub fn commit(dir: &Path, manifest: &Manifest) -> io::Result<()> {
    let path = PathBuf::from(checkpoint_path(&dir.display().to_string(), manifest.id));
    storage::replace(path.join(MANIFEST), &serde_json::to_vec_pretty(manifest)?)?;
    storage::sync_dir(dir)
}

/// Removes what is older than the `keep` newest complete checkpoints up to `committed`, the one that the
/// ledger goes by, and what was left unfinished before it.
pub fn prune(dir: &Path, committed: u64, keep: u32) -> Result<()> {
    assert!(keep >= 1, "the committed checkpoint is kept");
    let mut complete = 0;
    for (_, path) in checkpoints(dir)?.into_iter().rev().filter(|(id, _)| *id <= committed) {
        let whole = is_complete(&path)?;
        complete += u32::from(whole);
        if !whole || complete > keep {
            // The manifest first: what is left of it must not look like a checkpoint.
            let removed = storage::remove(path.join(MANIFEST)).and_then(|()| storage::remove_all(&path));
            removed.map_err(|e| Error::io(format!("removing {}", path.display()), e))?;
        }
    }
    Ok(())
}

fn is_complete(path: &Path) -> Result<bool> {
    storage::exists(path.join(MANIFEST)).map_err(|e| Error::io(format!("looking at {}", path.display()), e))
}

/// All checkpoint directories, committed or not, by number.
pub fn checkpoints(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let failed = |e| Error::io(format!("listing the checkpoints in {}", dir.display()), e);
    let number = |name: &String| name.strip_prefix("checkpoint-")?.parse::<u64>().ok();
    let names = storage::list(dir).map_err(failed)?;
    let mut found: Vec<(u64, PathBuf)> =
        names.iter().filter_map(|name| Some((number(name)?, dir.join(name)))).collect();
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::tasks::Done;
    use elasticdl_spec::{ModelShape, OptimizerSpec};

    fn manifest(id: u64) -> Manifest {
        Manifest {
            format: FORMAT,
            job: "j".into(),
            id,
            shape: ModelShape::default(),
            optimizer: OptimizerSpec::Sgd { learning_rate: 0.1 },
            seed: 1,
            partitions: Default::default(),
            done: Done::default(),
        }
    }

    fn begin(dir: &Path, id: u64) {
        fs::create_dir_all(checkpoint_path(&dir.display().to_string(), id)).unwrap();
    }

    fn ids(dir: &Path) -> Vec<u64> {
        checkpoints(dir).unwrap().into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn only_a_committed_checkpoint_is_found_and_numbers_are_not_reused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!((newest(dir.path()).unwrap(), next_id(dir.path()).unwrap()), (None, 1));
        begin(dir.path(), 1);
        commit(dir.path(), &manifest(1)).unwrap();
        begin(dir.path(), 2);
        fs::write(dir.path().join("checkpoint-000002/manifest.json.tmp"), "half").unwrap();
        assert_eq!(newest(dir.path()).unwrap().unwrap().id, 1);
        assert_eq!(next_id(dir.path()).unwrap(), 3);
    }

    #[test]
    fn the_newest_ones_are_kept_and_unfinished_ones_swept() {
        let dir = tempfile::tempdir().unwrap();
        for id in 1..=5 {
            begin(dir.path(), id);
            if id != 3 {
                commit(dir.path(), &manifest(id)).unwrap();
            }
        }
        begin(dir.path(), 6);
        prune(dir.path(), 4, 2).unwrap();
        assert_eq!(ids(dir.path()), [2, 4, 5, 6], "the ledger does not go by 5 yet, and 6 is being written");
        prune(dir.path(), 5, 2).unwrap();
        assert_eq!(ids(dir.path()), [4, 5, 6]);
    }

    #[test]
    fn each_master_claims_a_higher_term() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(claimed_term(dir.path()).unwrap(), 0);
        assert_eq!(claim_term(dir.path()).unwrap(), 1);
        assert_eq!(claim_term(dir.path()).unwrap(), 2);
        assert_eq!(claimed_term(dir.path()).unwrap(), 2);
        fs::write(dir.path().join("term"), "junk").unwrap();
        assert!(claim_term(dir.path()).is_err(), "a term is never guessed");
    }

    #[test]
    fn a_damaged_manifest_is_named() {
        let dir = tempfile::tempdir().unwrap();
        begin(dir.path(), 1);
        fs::write(dir.path().join("checkpoint-000001/manifest.json"), "{\"format\":").unwrap();
        let error = newest(dir.path()).unwrap_err().to_string();
        assert!(error.contains("checkpoint-000001: its manifest is damaged"), "{error}");
    }
}
