//! Backups of partitions that other servers serve.
//!
//! A thread for each: it copies the partition while that is trained on, then follows it: whatever was done to it is
//! done here in the same order, and only then does the other server tell anybody of it. A backup is kept, whatever
//! becomes of the other server, until the master says what it is to be: the partition itself, or nothing.

#![expect(clippy::disallowed_methods, reason = "an edge: it waits for another server and keeps deadlines")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use elasticdl_spec::PartitionId;
use elasticdl_wire as wire;
use elasticdl_wire::connection::Caller;
use elasticdl_wire::failpoint;
use elasticdl_wire::frame::{Frame, Limits};
use elasticdl_wire::ps::{self, kind};
use tracing::{info, warn};

use crate::closed::Closed;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::moving::{Copy, PATIENCE, Peer, catch_up};
use crate::partition::Partition;
use crate::partitions::{Gauges, Partitions};
use crate::requests::Requests;
use crate::requests::follow::Followed;

/// Before a partition that cannot be followed now is asked for again: nobody waits for it, unlike for one that moves.
const PAUSE: Duration = Duration::from_millis(50);

/// What is to be backed up.
#[derive(Debug, Clone)]
pub struct Order {
    /// Where the partition is.
    pub from: String,
    /// The partition, with its incarnation.
    pub part: (PartitionId, u64),
}

/// The backups that a server has.
#[derive(Debug, Default)]
pub struct Backups {
    held: Mutex<BTreeMap<PartitionId, Backup>>,
}

#[derive(Debug)]
struct Backup {
    incarnation: u64,
    /// Nothing but the backup.
    shadow: Arc<Partitions>,
    /// Whether it follows the partition, or is still being copied.
    follows: bool,
    cancelled: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Backups {
    /// Begins to back a partition up. `outcome` hears when all that was done is here too, or why that cannot be.
    pub fn start(
        self: &Arc<Self>,
        order: Order,
        model: &Arc<Model>,
        caller: &Caller,
        outcome: impl FnOnce(Result<()>) + Send + 'static,
    ) -> Result<()> {
        let (id, incarnation) = order.part;
        let (cancelled, shadow) =
            (Arc::new(AtomicBool::new(false)), Arc::new(Partitions::new(Arc::clone(model))));
        let work = Work {
            order,
            shadow: Arc::clone(&shadow),
            caller: caller.clone(),
            cancelled: Arc::clone(&cancelled),
            backups: Arc::clone(self),
        };
        let mut held = self.held();
        if let Some(before) = held.remove(&id) {
            before.cancelled.store(true, Ordering::Relaxed);
        }
        let thread = Builder::new().name(format!("ps-backup-{}", id.0)).spawn(move || work.run(outcome));
        let thread = Some(thread.map_err(|e| Error::io("starting to back a partition up", e))?);
        held.insert(id, Backup { incarnation, shadow, follows: false, cancelled, thread });
        Ok(())
    }

    /// The backup of this life of a partition, which follows it no more from now on. `None`: there is none.
    pub fn take(&self, part: (PartitionId, u64)) -> Option<Partition> {
        let mut backup = self.remove(part)?;
        if let Some(thread) = backup.thread.take()
            && thread.join().is_err()
        {
            return None;
        }
        backup.shadow.take(part.0).filter(|_| backup.follows)
    }

    /// A backup is none any more.
    pub fn forget(&self, part: (PartitionId, u64)) {
        drop(self.remove(part));
    }

    /// Adds what there is to tell of them. One that a panic left half-changed is dropped.
    pub fn add_to(&self, gauges: &mut Gauges) {
        self.held().retain(|id, backup| {
            let told = backup.shadow.gauges();
            if let Ok(told) = &told {
                gauges.backs.insert(id.0, backup.incarnation);
                gauges.backup_bytes += told.bytes;
            }
            told.is_ok()
        });
    }

    fn remove(&self, (id, incarnation): (PartitionId, u64)) -> Option<Backup> {
        let mut held = self.held();
        held.get(&id).filter(|backup| backup.incarnation == incarnation)?;
        let backup = held.remove(&id)?;
        backup.cancelled.store(true, Ordering::Relaxed);
        Some(backup)
    }

    fn forget_one(&self, id: PartitionId, shadow: &Arc<Partitions>) {
        let mut held = self.held();
        if held.get(&id).is_some_and(|backup| Arc::ptr_eq(&backup.shadow, shadow)) {
            held.remove(&id);
        }
    }

    /// A backup has all that was done. `false`: it is not wanted any more.
    fn follows(&self, id: PartitionId, shadow: &Arc<Partitions>) -> bool {
        let mut held = self.held();
        let ours = held.get_mut(&id).filter(|backup| Arc::ptr_eq(&backup.shadow, shadow));
        ours.map(|backup| backup.follows = true).is_some()
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<PartitionId, Backup>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Threads end by themselves.
impl Drop for Backup {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

/// What the thread of a backup has.
struct Work {
    order: Order,
    shadow: Arc<Partitions>,
    caller: Caller,
    cancelled: Arc<AtomicBool>,
    backups: Arc<Backups>,
}

impl Work {
    fn run(self, outcome: impl FnOnce(Result<()>)) {
        let Work { order, shadow, caller, cancelled, backups } = self;
        let (id, begun) = (order.part.0, Instant::now());
        let mut peer = match copy(&order, &shadow, &caller, &cancelled) {
            Ok(peer) => peer,
            Err(error) => {
                backups.forget_one(id, &shadow);
                return outcome(Err(error));
            }
        };
        if !backups.follows(id, &shadow) {
            return;
        }
        let rows = shadow.gauges().map_or(0, |gauges| gauges.rows);
        info!(from = order.from, %id, rows, seconds = begun.elapsed().as_secs_f64(), "backed up");
        outcome(Ok(()));
        match keep_up(&mut peer, id, &shadow, &cancelled) {
            Ok(()) => info!(from = order.from, %id, "backed up no more"),
            Err(error) => {
                warn!(from = order.from, %id, error = %error.chain(), "a partition cannot be followed");
                // A connection may end. Whoever cannot do what the other one did is nothing that may take its place,
                // not even for a promotion that waits for this very thread.
                if !matches!(
                    error,
                    Error::Io { .. } | Error::Wire(wire::Error::Io { .. } | wire::Error::Truncated { .. })
                ) {
                    drop(shadow.take(id));
                    backups.forget_one(id, &shadow);
                }
            }
        }
    }
}

/// Copies a partition until nothing is lacking; from then on the peer tells what is done.
fn copy<'c>(
    order: &Order,
    shadow: &Partitions,
    caller: &Caller,
    cancelled: &'c AtomicBool,
) -> Result<Peer<'c>> {
    let (id, incarnation) = order.part;
    let model = shadow.model();
    let mut peer = Peer::open(&order.from, caller, cancelled)?;
    let mut copy =
        Copy::new(Partition::new(Arc::clone(model), id, incarnation), order.part, "ps.copying_backup");
    let until = Instant::now() + PATIENCE;
    let (head, rows) = loop {
        catch_up(std::slice::from_mut(&mut copy), &mut peer)?;
        if cancelled.load(Ordering::Relaxed) {
            return Err(Error::Misfit { partition: id, reason: "it is not to be backed up any more".into() });
        }
        match peer.follow(order.part)? {
            Followed::Yes(lacking) => break *lacking,
            Followed::NotNow if Instant::now() < until => {
                std::thread::sleep(PAUSE);
            }
            refusal => {
                let reason = match refusal {
                    Followed::NotNow => "it has another backup still, or changes faster than it is copied",
                    _ => "it is not there any more",
                };
                return Err(Error::Misfit { partition: id, reason: reason.into() });
            }
        }
    };
    let mut partition = copy.into_partition();
    rows.iter().try_for_each(|some| partition.put_rows(some))?;
    let tensors = peer.take_tensors(&partition)?;
    partition.take_over(head, &tensors)?;
    shadow.open(partition);
    Ok(peer)
}

/// Does what is done to the partition, until the backup is none any more or the other server is gone.
fn keep_up(peer: &mut Peer<'_>, id: PartitionId, shadow: &Partitions, cancelled: &AtomicBool) -> Result<()> {
    let (mut requests, mut reply) = (Requests::new(shadow, Limits::default()), Frame::default());
    let mut done = 0;
    while !cancelled.load(Ordering::Relaxed) {
        let Some(frames) = peer.next(done)? else { break };
        for frame in &frames {
            also(shadow, &mut requests, frame, &mut reply)?;
            // Each tells how many pushes were applied when it was done.
            if shadow.with(id, |partition| partition.version()) != Some(frame.request()) {
                let reason = "the backup is not what the partition is".to_string();
                return Err(Error::Misfit { partition: id, reason });
            }
            done += 1;
        }
        if !frames.is_empty() {
            failpoint::pass("ps.backup_done")
                .map_err(|e| Error::io("telling what the backup has done", e))?;
        }
    }
    Ok(())
}

/// Does what was done.
pub(crate) fn also(
    shadow: &Partitions,
    requests: &mut Requests<'_>,
    frame: &Frame,
    reply: &mut Frame,
) -> Result<()> {
    let mut payload = frame.payload();
    match frame.kind() {
        kind::CLOSE => {
            ps::take_part(&mut payload)?;
            let covered: Closed = serde_json::from_slice(payload.take_bytes()?).map_err(Error::Covered)?;
            shadow.close(&covered);
            Ok(())
        }
        kind::SETTLE => {
            shadow.settle();
            Ok(())
        }
        kind::PUSH | kind::STAGE | kind::COMMIT | kind::STEP | kind::FENCE => requests.answer(frame, reply),
        other => Err(wire::Error::Malformed(format!("{other:#x} is nothing that a backup does")).into()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc;
    use std::thread;

    use elasticdl_spec::{LeaseId, OptimizerSpec, TaskId};
    use elasticdl_wire::Token;
    use elasticdl_wire::connection::{Connection, Who};
    use elasticdl_wire::ps::{PushHeader, Status};

    use super::*;
    use crate::server::{Options, Server};
    use crate::test_model::{bounded_model, ids_of, model};

    const HERE: PartitionId = PartitionId(2);
    const LIFE: u64 = 4;

    fn caller(who: Who) -> Caller {
        Caller { token: Token::new("0123456789abcdef").unwrap(), identity: None, who }
    }

    /// Its partitions, with one that is empty.
    fn holding(model: &Arc<Model>) -> Arc<Partitions> {
        let partitions = Arc::new(Partitions::new(Arc::clone(model)));
        partitions.open(Partition::new(Arc::clone(model), HERE, LIFE));
        partitions
    }

    fn serve(partitions: &Arc<Partitions>) -> Server {
        serve_with(partitions, Options::default())
    }

    fn serve_with(partitions: &Arc<Partitions>, options: Options) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let token = caller(Who::Worker(0)).token;
        Server::start(listener, token, None, Arc::clone(partitions), options).unwrap()
    }

    /// A worker that pushes one batch after the other.
    struct Pusher {
        connection: Connection,
        batch: u64,
    }

    impl Pusher {
        fn new(server: &Server) -> Self {
            let address = server.address().to_string();
            let connection = Connection::open(&address, &caller(Who::Worker(0)), &mut || true).unwrap();
            Pusher { connection, batch: 0 }
        }

        /// Pushes to some rows; which ones and what follows from the number of the batch.
        fn push(&mut self) -> Status {
            let ids = ids_of(HERE, 600);
            let from = (self.batch as usize * 7) % 580;
            let some = &ids[from..from + 1 + self.batch as usize % 19];
            let lease = LeaseId { term: 1, n: 1 };
            let (task, batch) = (TaskId::train(0, 3), self.batch);
            let header = PushHeader { task, batch, lease, records: 5, factor: 1.0 };
            let frame = &mut self.connection.out;
            ps::begin_push(frame, batch, header, 1);
            ps::put_part(frame, HERE, LIFE);
            frame.put(batch);
            let floats = |n: usize| (0..n).map(|i| i as f32 / 7.0 - batch as f32).collect::<Vec<f32>>();
            for width in [3, 2] {
                ps::put_ids(frame, some);
                frame.put_floats(&floats(width * some.len()));
            }
            for tensor in model().tensors_of(HERE).unwrap() {
                frame.put_floats(&floats(model().shape.tensors[*tensor].len()));
            }
            self.connection.send(&mut || true).unwrap();
            self.connection.receive(kind::PUSHED, batch, &mut || true).unwrap();
            self.batch += 1;
            ps::take_answers(self.connection.answer.payload()).unwrap()[0].status
        }
    }

    /// Every row with its slots, by table and id; tensors; marks and counters.
    fn all_of(partition: &Partition) -> impl PartialEq + std::fmt::Debug + use<> {
        let mut rows = Vec::new();
        for (number, table) in partition.tables().iter().enumerate() {
            for (place, id) in table.ids().into_iter().enumerate() {
                let (mut weights, mut slots) = (Vec::new(), Vec::new());
                table.copy_rows(place..place + 1, &mut weights, &mut slots);
                rows.push((number, id, [weights, slots].concat()));
            }
        }
        rows.sort_by_key(|(table, id, _)| (*table, *id));
        let tensors = partition.tensors().iter().map(|t| (t.values().to_vec(), t.slots().to_vec()));
        (rows, tensors.collect::<Vec<_>>(), partition.memory().clone())
    }

    fn backed_up(backups: &Arc<Backups>, server: &Server, model: &Arc<Model>) {
        let (tell, told) = mpsc::channel();
        let order = Order { from: server.address().to_string(), part: (HERE, LIFE) };
        let outcome = move |outcome| tell.send(outcome).unwrap();
        backups.start(order, model, &caller(Who::Server(7)), outcome).unwrap();
        told.recv().unwrap().unwrap();
    }

    /// Goal: a backup that is made while batches are pushed is the partition itself, to the bit, for whoever was
    /// told that a batch is applied.
    #[test]
    fn a_backup_is_the_partition_whatever_was_pushed_while_it_was_made() {
        is_the_same(&model());
    }

    /// Goal: the same where rows make room for others: a backup has the same rows go.
    #[test]
    fn a_backup_of_tables_with_a_bound_has_the_same_rows() {
        is_the_same(&bounded_model(OptimizerSpec::Adagrad {
            learning_rate: 0.1,
            initial_accumulator: 0.1,
            epsilon: 1e-7,
        }));
    }

    fn is_the_same(model: &Arc<Model>) {
        let partitions = holding(model);
        let server = serve(&partitions);
        let mut pusher = Pusher::new(&server);
        (0..50).for_each(|_| assert_eq!(pusher.push(), Status::Ok));
        let over = Arc::new(AtomicBool::new(false));
        let pushing = {
            let over = Arc::clone(&over);
            thread::spawn(move || {
                while !over.load(Ordering::Relaxed) || pusher.batch < 300 {
                    assert_eq!(pusher.push(), Status::Ok);
                }
                pusher
            })
        };
        let backups = Arc::new(Backups::default());
        backed_up(&backups, &server, model);
        let mut covered = Closed::default();
        covered.insert(0, 1);
        partitions.close(&covered);
        over.store(true, Ordering::Relaxed);
        let mut pusher = pushing.join().unwrap();
        let mut gauges = Gauges::default();
        backups.add_to(&mut gauges);
        assert!(gauges.backs == BTreeMap::from([(HERE.0, LIFE)]) && gauges.backup_bytes > 0, "{gauges:?}");
        // What is answered last waits for all before it.
        assert_eq!(pusher.push(), Status::Ok);
        assert!(backups.take((HERE, LIFE + 1)).is_none(), "another life");
        let backup = backups.take((HERE, LIFE)).unwrap();
        partitions.with(HERE, |partition| assert_eq!(all_of(&backup), all_of(partition))).unwrap();
        assert!(backup.memory().version > 300);
        assert!(backups.take((HERE, LIFE)).is_none(), "it was taken");
    }

    /// Goal: tensors that a frame has room for have slots, too, and with them it has not.
    #[test]
    fn a_partition_whose_tensors_are_longer_than_a_frame_is_backed_up_and_taken_over() {
        let partitions = holding(&model());
        let roomy = serve(&partitions);
        let mut pusher = Pusher::new(&roomy);
        (0..2).for_each(|_| assert_eq!(pusher.push(), Status::Ok));
        let limits = Limits { words_max: 4 };
        let server = serve_with(&partitions, Options { limits, ..Options::default() });
        let held = partitions.with(HERE, |partition| all_of(partition)).unwrap();
        let floats = partitions.with(HERE, |partition| partition.tensor_floats_due()).unwrap();
        assert!(floats > 2 * limits.words_max);

        let backups = Arc::new(Backups::default());
        backed_up(&backups, &server, &model());
        assert!(all_of(&backups.take((HERE, LIFE)).unwrap()) == held);

        let (from, partitions) = (server.address().to_string(), vec![(HERE, LIFE)]);
        let order = crate::moving::Order { from, partitions, next: vec![LIFE] };
        let word = || Ok(crate::moving::Word::Take);
        let taken =
            crate::moving::fetch(&order, &model(), &caller(Who::Server(7)), &AtomicBool::new(false), word);
        assert!(all_of(&taken.unwrap().unwrap()[0]) == held);
    }

    #[test]
    fn nobody_hears_of_a_batch_that_a_lost_backup_lacks_before_the_master_has_agreed() {
        let partitions = holding(&model());
        let server = serve(&partitions);
        let backups = Arc::new(Backups::default());
        backed_up(&backups, &server, &model());
        drop(backups.take((HERE, LIFE)).unwrap());
        let mut pusher = Pusher::new(&server);
        let pushing = thread::spawn(move || pusher.push());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let lost = runtime.block_on(partitions.next_lost());
        assert_eq!((lost.partition, lost.incarnation, lost.backup), (HERE, LIFE, 7));
        thread::sleep(Duration::from_millis(50));
        assert!(!pushing.is_finished(), "it waits for the master's leave");
        partitions.lost_settled(&lost, true);
        assert_eq!(pushing.join().unwrap(), Status::Ok);
        // And the next backup has it.
        backed_up(&backups, &server, &model());
        assert_eq!(backups.take((HERE, LIFE)).unwrap().memory().version, 1);
    }

    /// Goal: a backup that is not what its partition is never takes its place.
    #[test]
    fn a_backup_that_differs_is_dropped_before_anybody_is_told() {
        let partitions = holding(&model());
        let server = serve(&partitions);
        let backups = Arc::new(Backups::default());
        backed_up(&backups, &server, &model());
        let shadow = Arc::clone(&backups.held()[&HERE].shadow);
        shadow.with(HERE, |partition| partition.restoring().2.version += 1).unwrap();
        let mut pusher = Pusher::new(&server);
        let pushing = thread::spawn(move || pusher.push());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let lost = runtime.block_on(partitions.next_lost());
        assert!(backups.take((HERE, LIFE)).is_none());
        assert!(!pushing.is_finished());
        partitions.lost_settled(&lost, true);
        assert_eq!(pushing.join().unwrap(), Status::Ok);
    }
}
