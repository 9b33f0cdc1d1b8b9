//! Edge: one small runtime for all calls to object storage, behind a face that blocks.
//!
//! Workers and servers are threads, and the master's loop waits for its ledger as it waits for a disk; so a
//! call is spawned here and waited for there, which works inside another runtime too.

use std::future::Future;
use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::sync_channel;

use tokio::runtime::{Builder, Runtime};

/// Calls wait for the network nearly all the time.
const THREADS: usize = 2;

static RUNTIME: OnceLock<Result<Runtime, String>> = OnceLock::new();

/// Begins a call that nobody waits for yet.
pub fn spawn(work: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
    runtime()?.spawn(work);
    Ok(())
}

/// Waits for a call.
pub fn wait<T: Send + 'static>(work: impl Future<Output = io::Result<T>> + Send + 'static) -> io::Result<T> {
    let (tell, told) = sync_channel(1);
    spawn(async move {
        // Whoever waited may have panicked.
        let _ = tell.send(work.await);
    })?;
    told.recv().unwrap_or_else(|_| Err(io::Error::other("a call to object storage panicked")))
}

fn runtime() -> io::Result<&'static Runtime> {
    let make = || {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(THREADS).thread_name("storage").enable_all().build().map_err(|e| e.to_string())
    };
    let failed =
        |e: &String| io::Error::other(format!("threads for object storage could not be started: {e}"));
    RUNTIME.get_or_init(make).as_ref().map_err(failed)
}
