//! A server's life: join the master, open partitions, serve them, and do what the master asks for.
//!
//! The master may go away and come back: workers are served all the while, and calls are tried again with
//! growing pauses. Only when no master was heard of for `limits.orphan` does the server end by itself.

#![expect(clippy::disallowed_methods, reason = "an edge: it keeps deadlines")]

mod backups;
mod moves;

use std::future::Future;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticdl_spec::{Kind, LeaseId, PartitionId, Plan, ServerId, TaskId};
use elasticdl_wire::client::{self, Client};
use elasticdl_wire::connection::{Caller, Who};
use elasticdl_wire::control::beat_reply::What;
use elasticdl_wire::control::{
    Assignment, BeatReply, BeatRequest, CheckpointWrittenRequest, File, JoinReply, JoinRequest, LeaseNumber,
    Mark, Member, ReadyRequest, Role, WriteCheckpoint,
};
use elasticdl_wire::failpoint;
use elasticdl_wire::retry::Backoff;
use elasticdl_wire::{self as wire, Identity, Token};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{JoinError, JoinHandle};
use tonic::{Code, Response, Status};
use tracing::{info, warn};

use crate::backups::Backups;
use crate::checkpoint::{self, Layer, Order, Sum};
use crate::closed::Closed;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::partition::Partition;
use crate::partitions::{Partitions, Written};
use crate::server::{Options, Server};
use moves::Moving;

/// How long to look for a master before the plan has told `limits.orphan`.
const FIRST_JOIN: Duration = Duration::from_secs(30);
/// The master holds a beat for about a second. Where it does not, beats come no faster than this.
const BEAT_PAUSE: Duration = Duration::from_millis(200);

/// What a server needs to begin.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where the master is: host:port.
    pub master: String,
    /// The job's token.
    pub token: Token,
    /// The job's certificate; without one everything is plain, and only this machine can be served.
    pub identity: Option<Identity>,
    /// Which server this is.
    pub id: ServerId,
    /// Tells it apart from others of its number.
    pub process: u32,
    /// Where to listen for workers; port 0: any that is free.
    pub listen: String,
}

/// Serves until the master says that it is enough, SIGTERM comes, or no master is left.
///
/// # Errors
///
/// The address cannot or must not be listened on, the partitions cannot be opened, the master refuses the token,
/// [`Error::Orphaned`], or [`Error::Torn`].
pub async fn run(config: Config) -> Result<()> {
    let failed = |e| Error::io("listening for SIGTERM", e);
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let id = config.id;
    tokio::select! {
        outcome = serve(config) => outcome,
        _ = terminate.recv() => {
            info!(server = %id, "told to terminate");
            Ok(())
        }
    }
}

async fn serve(config: Config) -> Result<()> {
    let failed = |e| Error::io(format!("listening on {}", config.listen), e);
    let listener = TcpListener::bind(&config.listen).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    wire::tls::may_listen(address, config.identity.as_ref())?;
    let mut link = Link::new(&config, address.to_string())?;

    let joined = link.join().await?;
    let model = Arc::new(Model::of(&joined.plan));
    let partitions = Arc::new(Partitions::new(model));
    link.open(&partitions, joined).await?;
    // Whoever connected meanwhile has waited for this moment.
    let (token, identity) = (config.token.clone(), config.identity.clone());
    let server = Server::start(listener, token, identity, Arc::clone(&partitions), Options::default())?;
    info!(server = %config.id, address = %server.address(), "serving");
    link.ready(&partitions).await?;
    beat(&mut link, &partitions).await
}

/// Tells the master that the server lives, and does what it asks for, until it says leave.
async fn beat(link: &mut Link, partitions: &Arc<Partitions>) -> Result<()> {
    let (mut seen, mut seen_move, mut seen_promotion) = (0, 0, 0);
    let mut checkpoint: Option<Checkpoint> = None;
    let mut moving: Option<Moving> = None;
    loop {
        let begun = Instant::now();
        let request = link.beat_request(gauges(&link.backups, partitions).await?, seen);
        let reply = tokio::select! {
            reply = link.persist("Beat", move |mut client, request| async move { client.beat(request).await }, request) => reply,
            written = finished(checkpoint.as_mut().map(|running| &mut running.work)) => {
                let running = checkpoint.take().expect("what finished was running");
                let written = written.map_err(|_| Error::Panicked("writing a checkpoint"))?;
                link.checkpoint_written(running.checkpoint, written).await?;
                seen = running.command;
                continue;
            }
            fetched = finished(moving.as_mut().map(|running| &mut running.work)) => {
                let running = moving.take().expect("what finished was running");
                let fetched = fetched.map_err(|_| Error::Panicked("copying partitions"))?;
                link.fetched(running.command, fetched, partitions).await?;
                continue;
            }
            feed = partitions.next_lost() => {
                if !link.go_alone(&feed, partitions).await? {
                    link.join_again(&mut moving, partitions).await?;
                }
                continue;
            }
        };
        match reply {
            Ok(BeatReply { what: Some(What::Leave(true)), .. }) => {
                info!("told to leave");
                return Ok(());
            }
            Ok(BeatReply { command, what: Some(What::WriteCheckpoint(order)) })
                if command > seen && checkpoint.is_none() =>
            {
                checkpoint = Some(Checkpoint::start(command, order, partitions));
            }
            Ok(BeatReply { command, what: Some(What::Move(order)) })
                if command > seen_move && order.backup =>
            {
                seen_move = command;
                link.start_backup(command, order, partitions);
            }
            Ok(BeatReply { command, what: Some(What::Promote(order)) }) if command > seen_promotion => {
                seen_promotion = command;
                link.promote(command, order, partitions).await?;
            }
            Ok(BeatReply { what: Some(What::Forget(order)), .. }) => link.forget(&order),
            Ok(BeatReply { command, what: Some(What::Move(order)) }) if command > seen_move => {
                seen_move = command;
                // The master knows nothing of an earlier one any more.
                if let Some(running) = moving.take() {
                    running.cancel().await;
                }
                moving = Some(link.start_move(command, order, partitions));
            }
            Ok(_) => tokio::time::sleep(BEAT_PAUSE.saturating_sub(begun.elapsed())).await,
            Err(error) if unknown_to_master(&error) => {
                link.join_again(&mut moving, partitions).await?;
            }
            Err(error) => return Err(error),
        }
    }
}

/// What there is to tell of a server, as JSON.
async fn gauges(backups: &Arc<Backups>, partitions: &Arc<Partitions>) -> Result<String> {
    let backups = Arc::clone(backups);
    let read = move |partitions: &Partitions| {
        let mut gauges = partitions.gauges()?;
        backups.add_to(&mut gauges);
        Ok(serde_json::to_string(&gauges)?)
    };
    in_background("reading gauges", partitions, read).await?
}

/// A checkpoint being written.
struct Checkpoint {
    command: u64,
    checkpoint: u64,
    work: JoinHandle<Result<Vec<Written>>>,
}

impl Checkpoint {
    fn start(command: u64, order: WriteCheckpoint, partitions: &Arc<Partitions>) -> Self {
        let partitions = Arc::clone(partitions);
        let checkpoint = order.checkpoint;
        let work = tokio::task::spawn_blocking(move || write(&partitions, &order));
        Checkpoint { command, checkpoint, work }
    }
}

/// Waits for background work, for ever where there is none.
async fn finished<T>(work: Option<&mut JoinHandle<T>>) -> std::result::Result<T, JoinError> {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}

/// Closes what earlier checkpoints cover, then writes this one.
fn write(partitions: &Partitions, order: &WriteCheckpoint) -> Result<Vec<Written>> {
    if !order.covered.is_empty() {
        let covered: Closed = serde_json::from_str(&order.covered).map_err(Error::Covered)?;
        partitions.close(&covered);
    }
    if order.last {
        partitions.settle();
    }
    let base = (order.base != 0).then_some(order.base);
    let cut = Order { checkpoint: order.checkpoint, base, is_basis: order.is_basis };
    let written = partitions.write_checkpoint(Path::new(&order.dir), cut)?;
    failpoint::pass("ps.durable").map_err(|e| Error::io("telling the master of a checkpoint", e))?;
    Ok(written)
}

/// What a join has told.
struct Joined {
    plan: Plan,
    assignments: Vec<Assignment>,
    restore_from: Option<PathBuf>,
}

/// The connection to the master.
struct Link {
    master: String,
    client: Client,
    member: Member,
    /// Who this server is to others.
    caller: Caller,
    /// Where workers find this server.
    address: String,
    backoff: Backoff,
    /// Since when calls fail; `None` while the master answers.
    silent_since: Option<Instant>,
    orphan: Duration,
    /// How long it took to open the partitions last time.
    loading: Duration,
    /// What this server has of partitions that others serve.
    backups: Arc<Backups>,
}

impl Link {
    fn new(config: &Config, address: String) -> Result<Self> {
        let pid = config.process;
        Ok(Link {
            master: config.master.clone(),
            client: client::connect(&config.master, config.token.clone(), config.identity.as_ref())?,
            member: Member { role: Role::Server.into(), id: config.id.0, pid },
            caller: Caller {
                token: config.token.clone(),
                identity: config.identity.clone(),
                who: Who::Server(config.id.0),
            },
            address,
            backoff: Backoff::new(Duration::from_millis(20), Duration::from_secs(1), pid.into()),
            silent_since: None,
            orphan: FIRST_JOIN,
            loading: Duration::ZERO,
            backups: Arc::default(),
        })
    }

    async fn join(&mut self) -> Result<Joined> {
        let request = JoinRequest { member: Some(self.member), address: self.address.clone() };
        let call = |mut client: Client, request| async move { client.join(request).await };
        let reply: JoinReply = self.persist("Join", call, request).await?;
        let plan: Plan = serde_json::from_str(&reply.plan)?;
        self.orphan = plan.job.limits.orphan;
        let restore_from = (!reply.restore_from.is_empty()).then(|| PathBuf::from(reply.restore_from));
        Ok(Joined { plan, assignments: reply.partitions, restore_from })
    }

    /// The master does not know this server, or wants it to hold something else.
    async fn join_again(&mut self, moving: &mut Option<Moving>, partitions: &Arc<Partitions>) -> Result<()> {
        info!("the master wants this server to join again");
        if let Some(running) = moving.take() {
            running.cancel().await;
        }
        let joined = self.join().await?;
        self.open(partitions, joined).await?;
        self.ready(partitions).await
    }

    /// Opens what the master has assigned and is not open yet; where that fails, tells the master why.
    async fn open(&mut self, partitions: &Arc<Partitions>, joined: Joined) -> Result<()> {
        if Model::of(&joined.plan) != **partitions.model() {
            return Err(Error::OtherJob { master: self.master.clone() });
        }
        let begun = Instant::now();
        let opening = in_background("opening partitions", partitions, move |p| open(p, &joined)).await?;
        self.loading = begun.elapsed();
        let Err(error) = opening else { return Ok(()) };
        let request = ReadyRequest {
            member: Some(self.member),
            error: error.chain(),
            user_error: error.kind() == Kind::User,
            ..ReadyRequest::default()
        };
        let call = |mut client: Client, request| async move { client.ready(request).await };
        if let Err(unheard) = self.persist("Ready", call, request).await {
            warn!(error = %unheard.chain(), "the master could not be told of the failure");
        }
        Err(error)
    }

    async fn ready(&mut self, partitions: &Partitions) -> Result<()> {
        let held = partitions.held().into_iter();
        let assignment = |(partition, incarnation): (PartitionId, u64)| Assignment {
            partition: partition.0,
            incarnation,
            ..Assignment::default()
        };
        let request = ReadyRequest {
            member: Some(self.member),
            partitions: held.map(assignment).collect(),
            load_ms: u32::try_from(self.loading.as_millis()).unwrap_or(u32::MAX),
            ..ReadyRequest::default()
        };
        let call = |mut client: Client, request| async move { client.ready(request).await };
        match self.persist("Ready", call, request).await {
            // The next beat will hear the same and join again.
            Err(error) if unknown_to_master(&error) => Ok(()),
            outcome => outcome.map(|_| ()),
        }
    }

    async fn checkpoint_written(&mut self, checkpoint: u64, written: Result<Vec<Written>>) -> Result<()> {
        let (files, error) = match written {
            Ok(files) => (files.into_iter().map(to_file).collect(), String::new()),
            Err(error) => {
                warn!(checkpoint, error = %error.chain(), "checkpoint failed");
                (Vec::new(), error.chain())
            }
        };
        let member = Some(self.member);
        let request = CheckpointWrittenRequest { member, checkpoint, files, error };
        let call = |mut client: Client, request| async move { client.checkpoint_written(request).await };
        match self.persist("CheckpointWritten", call, request).await {
            Ok(_) => Ok(()),
            Err(error @ (Error::Orphaned { .. } | Error::Torn { .. })) => Err(error),
            Err(error) => {
                // A master that has started anew knows nothing of it; the next one will be asked for.
                warn!(checkpoint, error = %error.chain(), "the master has no use for the checkpoint");
                Ok(())
            }
        }
    }

    fn beat_request(&self, gauges: String, command_seen: u64) -> BeatRequest {
        BeatRequest { member: Some(self.member), gauges, command_seen }
    }

    /// Calls the master until it answers. Tries again for as long as another try can help and a master
    /// may still come back.
    async fn persist<Q, A, F>(
        &mut self,
        name: &'static str,
        call: impl Fn(Client, Q) -> F,
        request: Q,
    ) -> Result<A>
    where
        Q: Clone,
        F: Future<Output = std::result::Result<Response<A>, Status>>,
    {
        loop {
            let begun = Instant::now();
            let error = match client::answer(name, call(self.client.clone(), request.clone()).await) {
                Ok(answer) => {
                    if self.silent_since.take().is_some() {
                        info!(master = %self.master, call = name, "the master answers again");
                    }
                    self.backoff.reset();
                    return Ok(answer);
                }
                Err(error) => Error::from(error),
            };
            if error.kind() != Kind::Retry || unknown_to_master(&error) {
                return Err(error);
            }
            let silent = self.silent_since.get_or_insert(begun).elapsed();
            if silent > self.orphan {
                warn!(master = %self.master, error = %error.chain(), "no master for too long");
                return Err(Error::Orphaned { master: self.master.clone(), after: silent });
            }
            if self.backoff.tries() == 0 {
                warn!(master = %self.master, error = %error.chain(), "the master does not answer");
            }
            let left = self.orphan.saturating_sub(silent) + Duration::from_millis(1);
            tokio::time::sleep(self.backoff.pause().min(left)).await;
        }
    }
}

/// Opens the partitions of `joined` that are not open in this incarnation, and lets go of all others.
fn open(partitions: &Partitions, joined: &Joined) -> Result<()> {
    let held = partitions.held();
    let mut keep = Vec::new();
    for assignment in &joined.assignments {
        let id = PartitionId(assignment.partition);
        if id.0 >= partitions.model().partitions {
            return Err(Error::Misfit { partition: id, reason: "the model has no such partition".into() });
        }
        keep.push(id);
        if !held.contains(&(id, assignment.incarnation)) {
            partitions.open(opened(partitions.model(), assignment, joined.restore_from.as_deref())?);
        }
    }
    partitions.retain(&keep);
    let rows = partitions.gauges()?.rows;
    info!(partitions = keep.len(), rows, restored = joined.restore_from.is_some(), "partitions open");
    Ok(())
}

fn opened(model: &Arc<Model>, assignment: &Assignment, restore_from: Option<&Path>) -> Result<Partition> {
    let &Assignment { partition, incarnation, checkpoint, is_basis, floor, .. } = assignment;
    let id = PartitionId(partition);
    let mut opened = match restore_from {
        None => Partition::new(Arc::clone(model), id, incarnation),
        Some(dir) => checkpoint::restore(model, id, incarnation, &chain(assignment, dir))?,
    };
    if restore_from.is_some() && is_basis {
        opened.is_as_in(checkpoint);
    }
    refuse_below(&mut opened, floor);
    Ok(opened)
}

fn refuse_below(partition: &mut Partition, floor: Option<LeaseNumber>) {
    if let Some(floor) = floor {
        partition.refuse_leases_below(LeaseId { term: floor.term, n: floor.n });
    }
}

/// The files of a partition, the last of which is in `dir`.
fn chain(assignment: &Assignment, dir: &Path) -> Vec<Layer> {
    let &Assignment { checkpoint, bytes, crc32, ref earlier, .. } = assignment;
    let earlier = earlier.iter().map(|file| Layer {
        checkpoint: file.checkpoint,
        dir: PathBuf::from(&file.dir),
        sum: Sum { bytes: file.bytes, crc32: file.crc32 },
    });
    earlier.chain([Layer { checkpoint, dir: dir.into(), sum: Sum { bytes, crc32 } }]).collect()
}

fn to_file(written: Written) -> File {
    let Written { partition, incarnation, base, sum, marks } = written;
    let mark = |(task, mark): (TaskId, u64)| Mark { epoch: task.epoch, shard: task.shard, mark };
    File {
        partition: partition.0,
        incarnation,
        bytes: sum.bytes,
        crc32: sum.crc32,
        marks: marks.into_iter().map(mark).collect(),
        base: base.unwrap_or_default(),
    }
}

/// Whether the master says that it has never heard of this server, so that it must join again.
fn unknown_to_master(error: &Error) -> bool {
    let Error::Wire(wire::Error::Call { status, .. }) = error else { return false };
    matches!(status.code(), Code::NotFound | Code::FailedPrecondition)
}

/// Does something that takes locks or waits for disks, without holding up the calls to the master.
async fn in_background<T: Send + 'static>(
    what: &'static str,
    partitions: &Arc<Partitions>,
    work: impl FnOnce(&Partitions) -> T + Send + 'static,
) -> Result<T> {
    let partitions = Arc::clone(partitions);
    tokio::task::spawn_blocking(move || work(&partitions)).await.map_err(|_| Error::Panicked(what))
}
