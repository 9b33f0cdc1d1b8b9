//! Old checkpoints are removed beside all else: one removal at a time, because two would meet at the same files, and each
//! for the newest commit there is, which takes the place of those before it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::store;

/// Removes what `checkpoint.keep` has no room for.
pub struct Pruner {
    dir: PathBuf,
    committed: watch::Sender<u64>,
    work: JoinHandle<()>,
}

impl Pruner {
    /// Of the checkpoints in `dir`, of which so many stay.
    pub fn start(dir: &Path, keep: u32) -> Self {
        let (committed, commits) = watch::channel(0);
        let work = tokio::spawn(remove(dir.to_path_buf(), keep, commits));
        Pruner { dir: dir.to_path_buf(), committed, work }
    }

    /// A checkpoint is committed, and earlier ones may go.
    pub fn prune(&self, committed: u64) {
        self.committed.send_replace(committed);
    }

    /// Waits until what is to go is gone, for there is no next time; a disk that is slow is left alone with it.
    pub async fn finish(self, patience: Duration) {
        drop(self.committed);
        if tokio::time::timeout(patience, self.work).await.is_err() {
            let dir = self.dir.display();
            tracing::warn!(%dir, "removing old checkpoints takes too long: some stay until the job is resumed");
        }
    }
}

/// Until nobody commits any more and all is done.
async fn remove(dir: PathBuf, keep: u32, mut commits: watch::Receiver<u64>) {
    while commits.changed().await.is_ok() {
        let (dir, committed) = (dir.clone(), *commits.borrow_and_update());
        match tokio::task::spawn_blocking(move || store::prune(&dir, committed, keep)).await {
            Ok(Err(error)) => tracing::warn!(%error, "old checkpoints stay where they are"),
            Ok(Ok(())) => {}
            Err(error) => tracing::error!(%error, "removing old checkpoints broke off"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: of many commits in a row the last one counts, and it is done with when that is waited for.
    #[tokio::test]
    async fn what_is_too_many_is_gone_when_the_last_removal_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        for id in 1..=40 {
            store::tests::committed(dir.path(), id);
        }
        let pruner = Pruner::start(dir.path(), 2);
        (1..=40).for_each(|id| pruner.prune(id));
        pruner.finish(Duration::from_secs(60)).await;
        let mut left: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().flatten().map(|e| e.file_name()).collect();
        left.sort();
        assert_eq!(left, ["checkpoint-000039", "checkpoint-000040"]);
    }
}
