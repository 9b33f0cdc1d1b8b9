//! Checkpoints: one directory each, on disk or in object storage, a checkpoint only once its manifest is there.
//!
//! The servers write partition files into the directory; the manifest is written last and is there as a whole or
//! not at all, so that a half-written checkpoint is never read.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elasticdl_spec::Plan;
use elasticdl_storage as storage;

use crate::checkpoint::{FORMAT, FORMAT_OLDEST, Manifest};
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
    if !(FORMAT_OLDEST..=FORMAT).contains(&manifest.format) {
        let found = manifest.format;
        return Err(error(format!("it has format {found}, this program reads {FORMAT_OLDEST} to {FORMAT}")));
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
/// ledger goes by, and what was left unfinished before it. Files that a kept one adds to stay.
pub fn prune(dir: &Path, committed: u64, keep: u32) -> Result<()> {
    assert!(keep >= 1, "the committed checkpoint is kept");
    let (mut kept, mut needed) = (0, BTreeSet::new());
    for (id, path) in checkpoints(dir)?.into_iter().rev().filter(|(id, _)| *id <= committed) {
        if kept < keep && is_complete(&path)? {
            kept += 1;
            needed.extend(read(&path)?.needs());
            continue;
        }
        let needed =
            needed.iter().filter(|(checkpoint, _)| *checkpoint == id).map(|(_, partition)| *partition);
        remove_but(&path, &needed.collect())
            .map_err(|e| Error::io(format!("removing {}", path.display()), e))?;
    }
    Ok(())
}

/// Makes a directory no checkpoint any more, and removes the files in it but those of some partitions.
fn remove_but(path: &Path, partitions: &BTreeSet<u32>) -> io::Result<()> {
    // The manifest first: what is left of it must not look like a checkpoint.
    storage::remove(path.join(MANIFEST))?;
    if partitions.is_empty() {
        return storage::remove_all(path);
    }
    let names = storage::list(path)?.into_iter();
    let stays = |name: &String| partition_of(name).is_some_and(|partition| partitions.contains(&partition));
    let gone: Vec<PathBuf> = names.filter(|name| !stays(name)).map(|name| path.join(name)).collect();
    storage::remove_each(&gone)
}

/// The partition whose file has this name.
fn partition_of(name: &str) -> Option<u32> {
    name.strip_prefix("partition-")?.strip_suffix(".arrow")?.parse().ok()
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
pub(crate) mod tests {
    use std::fs;

    use super::*;
    use crate::checkpoint::{EarlierFile, PartitionFile};
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
        storage::make_dir(checkpoint_path(&dir.display().to_string(), id)).unwrap();
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

    /// A checkpoint of two partitions with their files; those of each add to what is said.
    fn write(dir: &Path, id: u64, earlier: [&[u64]; 2]) {
        begin(dir, id);
        let path = PathBuf::from(checkpoint_path(&dir.display().to_string(), id));
        let mut manifest = manifest(id);
        for (partition, earlier) in (0..).zip(earlier) {
            storage::replace(path.join(format!("partition-{partition:03}.arrow")), b"rows").unwrap();
            let earlier = earlier.iter().map(|id| EarlierFile { checkpoint: *id, bytes: 4, crc32: 1 });
            let file = PartitionFile { bytes: 4, crc32: 1, incarnation: 1, earlier: earlier.collect() };
            manifest.partitions.insert(partition, file);
        }
        commit(dir, &manifest).unwrap();
    }

    /// A checkpoint that is committed and adds to no other.
    pub(crate) fn committed(dir: &Path, id: u64) {
        write(dir, id, [&[], &[]]);
    }

    /// All files of all checkpoints, without manifests.
    fn files(dir: &Path) -> Vec<(u64, u32)> {
        let of = |(id, path): (u64, PathBuf)| {
            let mut names = storage::list(path).unwrap();
            names.sort_unstable();
            names.into_iter().filter_map(move |name| Some((id, partition_of(&name)?))).collect::<Vec<_>>()
        };
        checkpoints(dir).unwrap().into_iter().flat_map(of).collect()
    }

    #[test]
    fn files_that_a_kept_checkpoint_adds_to_stay_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        keeps_what_is_needed(dir.path());
        match std::env::var_os("ELASTICDL_TEST_S3") {
            None => eprintln!("skipped in object storage: ELASTICDL_TEST_S3 names no bucket"),
            Some(base) => {
                keeps_what_is_needed(&Path::new(&base).join("store").join(dir.path().file_name().unwrap()))
            }
        }
    }

    fn keeps_what_is_needed(dir: &Path) {
        write(dir, 1, [&[], &[]]);
        write(dir, 2, [&[1], &[1]]);
        write(dir, 3, [&[1, 2], &[]]);
        prune(dir, 3, 1).unwrap();
        assert_eq!(files(dir), [(1, 0), (2, 0), (3, 0), (3, 1)]);
        assert_eq!(newest(dir).unwrap().unwrap().id, 3);
        assert!(load(dir, 2).is_err(), "what lacks a file is no checkpoint any more");
        prune(dir, 3, 1).unwrap();
        assert_eq!(files(dir).len(), 4, "once more changes nothing");
        // An unfinished one, and then one that adds to neither of its files.
        begin(dir, 4);
        write(dir, 5, [&[1, 2, 3], &[3]]);
        prune(dir, 5, 1).unwrap();
        assert_eq!(files(dir), [(1, 0), (2, 0), (3, 0), (3, 1), (5, 0), (5, 1)]);
        assert_eq!(ids(dir), [1, 2, 3, 5]);
        write(dir, 6, [&[], &[3, 5]]);
        prune(dir, 6, 1).unwrap();
        assert_eq!(files(dir), [(3, 1), (5, 1), (6, 0), (6, 1)]);
        write(dir, 7, [&[], &[]]);
        prune(dir, 7, 2).unwrap();
        assert_eq!(files(dir), [(3, 1), (5, 1), (6, 0), (6, 1), (7, 0), (7, 1)], "two are kept");
        write(dir, 8, [&[7], &[7]]);
        prune(dir, 8, 2).unwrap();
        assert_eq!(files(dir), [(7, 0), (7, 1), (8, 0), (8, 1)]);
    }

    /// Goal: where it cannot be known which files a kept checkpoint needs, none goes.
    #[test]
    fn nothing_is_removed_below_a_manifest_that_cannot_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        write(dir, 1, [&[], &[]]);
        write(dir, 2, [&[1], &[1]]);
        fs::write(dir.join("checkpoint-000002/manifest.json"), "{").unwrap();
        assert!(prune(dir, 2, 1).is_err());
        assert_eq!(files(dir).len(), 4);
    }

    #[test]
    fn a_manifest_of_the_format_before_is_read() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), 1, [&[], &[]]);
        let path = dir.path().join("checkpoint-000001/manifest.json");
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains("earlier"), "{text}");
        fs::write(&path, text.replace("\"format\": 3", "\"format\": 2")).unwrap();
        let manifest = load(dir.path(), 1).unwrap();
        assert_eq!((manifest.format, manifest.chain(1).len(), manifest.chain(2).len()), (2, 1, 0));
        fs::write(&path, text.replace("\"format\": 3", "\"format\": 4")).unwrap();
        let error = load(dir.path(), 1).unwrap_err().to_string();
        assert!(error.ends_with("it has format 4, this program reads 2 to 3"), "{error}");
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
