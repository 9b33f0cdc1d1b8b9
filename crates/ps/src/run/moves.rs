//! Partitions that the master wants moved to this server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use elasticdl_spec::{Kind, PartitionId};
use elasticdl_wire::client::{self, Client};
use elasticdl_wire::control::{CopiedRequest, Move, copied_reply};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::{Link, refuse_below, unknown_to_master};
use crate::error::{Error, Result};
use crate::moving;
use crate::partition::Partition;
use crate::partitions::Partitions;

/// How often a master that does not answer is asked whether partitions are ours, and after what pause.
const TRIES: u32 = 40;
const PAUSE: Duration = Duration::from_millis(250);

/// Partitions on their way here.
pub(super) struct Moving {
    pub(super) command: u64,
    cancelled: Arc<AtomicBool>,
    pub(super) work: JoinHandle<Result<Option<Vec<Partition>>>>,
}

impl Moving {
    /// Gives up what is under way; nothing of it is served.
    pub(super) async fn cancel(self) {
        self.cancelled.store(true, Ordering::Relaxed);
        if self.work.await.is_err() {
            warn!("copying partitions has panicked");
        }
    }
}

impl Link {
    /// Begins to copy partitions from another server.
    pub(super) fn start_move(&self, command: u64, order: Move, partitions: &Arc<Partitions>) -> Moving {
        let (client, member) = (self.client.clone(), self.member);
        let model = Arc::clone(partitions.model());
        let caller = self.caller.clone();
        let cancelled = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&cancelled);
        let runtime = Handle::current();
        info!(from = order.from, partitions = order.partitions.len(), "copying partitions");
        let work = tokio::task::spawn_blocking(move || {
            let request = CopiedRequest { member: Some(member), command, error: String::new(), backup: None };
            let ask = || runtime.block_on(ask(client.clone(), request.clone()));
            let floors: Vec<_> = order.partitions.iter().map(|a| a.floor).collect();
            let mut fetched = moving::fetch(&to_order(order), &model, &caller, &flag, ask)?;
            for (partition, floor) in fetched.iter_mut().flatten().zip(floors) {
                refuse_below(partition, floor);
            }
            Ok(fetched)
        });
        Moving { command, cancelled, work }
    }

    /// Copied partitions are served, or the master hears why not.
    pub(super) async fn fetched(
        &mut self,
        command: u64,
        fetched: Result<Option<Vec<Partition>>>,
        partitions: &Arc<Partitions>,
    ) -> Result<()> {
        match fetched {
            Ok(None) => {
                info!("the partitions stay where they are");
                Ok(())
            }
            Ok(Some(fetched)) => {
                fetched.into_iter().for_each(|partition| partitions.open(partition));
                self.ready(partitions).await
            }
            Err(error) => {
                warn!(error = %error.chain(), "partitions could not be copied");
                let (member, error) = (Some(self.member), error.chain());
                self.tell_copied(CopiedRequest { member, command, error, backup: None }).await
            }
        }
    }
}

fn to_order(order: Move) -> moving::Order {
    let ids = order.partitions.iter().map(|a| PartitionId(a.partition));
    moving::Order {
        partitions: ids.zip(order.incarnations).collect(),
        next: order.partitions.iter().map(|a| a.incarnation).collect(),
        from: order.from,
    }
}

/// Asks the master what is to become of what is copied. One that does not answer has not said that it is ours.
pub(super) async fn ask(mut client: Client, request: CopiedRequest) -> Result<moving::Word> {
    let mut tries = 0;
    let reply = loop {
        match client::answer("Copied", client.copied(request.clone()).await).map_err(Error::from) {
            Err(error) if unknown_to_master(&error) => return Ok(moving::Word::Forget),
            // Asked again it says the same, and one that has just begun says that it knows nothing of it.
            Err(error) if error.kind() == Kind::Retry && tries < TRIES => {
                tries += 1;
                tokio::time::sleep(PAUSE).await;
            }
            answer => break answer?,
        }
    };
    Ok(match reply.what {
        Some(copied_reply::What::Take(true)) => moving::Word::Take,
        Some(copied_reply::What::WaitMs(ms)) => moving::Word::Wait(Duration::from_millis(ms.into())),
        _ => moving::Word::Forget,
    })
}
