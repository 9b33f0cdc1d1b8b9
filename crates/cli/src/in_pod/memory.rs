//! What the masters of a person's own program remember, in an annotation of the object that owns the job. So the job
//! needs no volume, and whichever pod leads next goes on.

use std::time::Duration;

use anyhow::Context;
use elasticdl_master::gang::Book;
use elasticdl_master::gang::run::Memory;
use elasticdl_operator::cluster::Cluster;
use elasticdl_wire::retry::Backoff;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::TERMINATED;
use crate::tether;

/// Between two tries to write.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_LONGEST: Duration = Duration::from_secs(5);

/// Hands on the newest book; those before it need not be written.
pub struct Annotation {
    recalled: Option<Book>,
    newest: watch::Sender<Option<Book>>,
}

/// What is remembered of a job, and the task that writes: it ends when all is written and the memory dropped.
pub async fn open(cluster: Cluster, job: &str) -> anyhow::Result<(Annotation, JoinHandle<()>)> {
    let text = cluster.recall(job).await.map_err(tether::api)?;
    let recalled = text.map(|text| serde_json::from_str(&text)).transpose();
    let recalled = recalled.context("reading what earlier masters remember")?;
    let (newest, books) = watch::channel(None);
    let writing = tokio::spawn(write(cluster, job.to_string(), books));
    Ok((Annotation { recalled, newest }, writing))
}

impl Memory for Annotation {
    fn recall(&mut self) -> elasticdl_master::Result<Book> {
        Ok(self.recalled.take().unwrap_or_default())
    }

    fn remember(&mut self, book: &Book) -> elasticdl_master::Result<()> {
        self.newest.send_replace(Some(book.clone()));
        Ok(())
    }
}

async fn write(cluster: Cluster, job: String, mut books: watch::Receiver<Option<Book>>) {
    let mut backoff = Backoff::new(PAUSE_FIRST, PAUSE_LONGEST, 0);
    while books.changed().await.is_ok() {
        loop {
            let Some(book) = books.borrow_and_update().clone() else { break };
            let Ok(text) = serde_json::to_string(&book) else { break };
            let term = |known: &str| serde_json::from_str::<Book>(known).map_or(0, |known| known.term);
            match cluster.remember(&job, &text, |known| term(known) <= book.term).await {
                Ok(true) => {
                    backoff.reset();
                    break;
                }
                Ok(false) => {
                    tracing::warn!(term = book.term, "a later master leads the job; this one ends");
                    std::process::exit(TERMINATED);
                }
                Err(error) => {
                    tracing::warn!(error = error.chain(), "nothing is remembered yet");
                    tokio::time::sleep(backoff.pause()).await;
                }
            }
        }
    }
}
