//! Backups that the master wants this server to have, and those of its own partitions that are lost.

use std::sync::Arc;

use elasticdl_spec::PartitionId;
use elasticdl_wire::client::Client;
use elasticdl_wire::control::{AloneRequest, Assignment, CopiedRequest, Forget, Move, Promote};
use tokio::runtime::Handle;
use tracing::{info, warn};

use super::moves::ask;
use super::{Link, in_background, refuse_below, unknown_to_master};
use crate::backups::Order;
use crate::error::Result;
use crate::feed::Feed;
use crate::moving::Word;
use crate::partition::Partition;
use crate::partitions::Partitions;

impl Link {
    /// Begins to back a partition up.
    pub(super) fn start_backup(&self, command: u64, order: Move, partitions: &Arc<Partitions>) {
        let Some(assignment) = order.partitions.into_iter().next() else { return };
        let part = part(&assignment);
        let order = Order { from: order.from, part };
        let (client, member, runtime) = (self.client.clone(), self.member, Handle::current());
        let backups = Arc::clone(&self.backups);
        let outcome = move |outcome: Result<()>| {
            let error = outcome.err().map(|error| error.chain()).unwrap_or_default();
            if !error.is_empty() {
                warn!(partition = %part.0, error, "a partition could not be backed up");
            }
            let request = CopiedRequest { member: Some(member), command, error, backup: Some(assignment) };
            // What is done meanwhile must not wait for the master.
            runtime.spawn(async move {
                if !matches!(ask(client, request).await, Ok(Word::Take)) {
                    backups.forget(part);
                }
            });
        };
        // The master sees in the next beats that there is none.
        if let Err(error) = self.backups.start(order, partitions.model(), &self.caller, outcome) {
            warn!(partition = %part.0, error = %error.chain(), "a partition could not be backed up");
        }
    }

    /// Backups take the place of partitions whose server is gone.
    pub(super) async fn promote(
        &mut self,
        command: u64,
        order: Promote,
        partitions: &Arc<Partitions>,
    ) -> Result<()> {
        let backups = Arc::clone(&self.backups);
        let taken = in_background("taking over", partitions, move |partitions| {
            let taken = order.partitions.iter().zip(&order.incarnations).map(|(a, before)| {
                let mut partition = backups.take((PartitionId(a.partition), *before))?;
                partition.begin_life(a.incarnation);
                refuse_below(&mut partition, a.floor);
                Some(partition)
            });
            let taken: Option<Vec<Partition>> = taken.collect();
            let count = taken.as_ref().map(Vec::len);
            taken.into_iter().flatten().for_each(|partition| partitions.open(partition));
            count
        });
        match taken.await? {
            Some(count) => {
                info!(partitions = count, "backups have taken the place of partitions");
                self.ready(partitions).await
            }
            None => {
                let error = "a backup is not there".to_string();
                self.tell_copied(CopiedRequest { member: Some(self.member), command, error, backup: None })
                    .await
            }
        }
    }

    /// Backups that are none any more.
    pub(super) fn forget(&self, order: &Forget) {
        order.partitions.iter().for_each(|assignment| self.backups.forget(part(assignment)));
    }

    /// Asks whether a partition may go on without the backup that it has lost. `false`: the master does not know this
    /// server.
    pub(super) async fn go_alone(&mut self, feed: &Arc<Feed>, partitions: &Partitions) -> Result<bool> {
        warn!(partition = %feed.partition, backup = feed.backup, "a backup does not answer");
        let request = AloneRequest {
            member: Some(self.member),
            partition: feed.partition.0,
            incarnation: feed.incarnation,
            backup: feed.backup,
        };
        let call = |mut client: Client, request| async move { client.alone(request).await };
        match self.persist("Alone", call, request).await {
            Ok(reply) => {
                info!(partition = %feed.partition, alone = reply.alone, "the master knows that a backup is lost");
                partitions.lost_settled(feed, reply.alone);
                Ok(true)
            }
            Err(error) if unknown_to_master(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Tells the master that something could not be copied.
    pub(super) async fn tell_copied(&mut self, request: CopiedRequest) -> Result<()> {
        let call = |mut client: Client, request| async move { client.copied(request).await };
        match self.persist("Copied", call, request).await {
            Ok(_) => Ok(()),
            // The next beat will hear the same and join again.
            Err(error) if unknown_to_master(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn part(assignment: &Assignment) -> (PartitionId, u64) {
    (PartitionId(assignment.partition), assignment.incarnation)
}
