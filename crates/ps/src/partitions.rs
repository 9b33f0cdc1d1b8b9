//! The partitions that a server holds, each behind its own lock.
//!
//! Only one of these locks is held at a time, and none while anything is read, written or waited for, so
//! that a slow disk or a stopped worker holds up nobody.

mod checkpoint;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use elasticdl_spec::{PartitionId, TaskId};
use elasticdl_wire::frame::Frame;
use elasticdl_wire::ps::{self, kind};
use serde::Serialize;
use tokio::sync::Notify;

use crate::checkpoint::Sum;
use crate::closed::Closed;
use crate::error::{Error, Result};
use crate::feed::{Feed, Stuck};
use crate::gatekeeper::Gatekeeper;
use crate::model::Model;
use crate::partition::Partition;
use crate::staleness::Staleness;
use crate::table::{Counts, Table};

/// All partitions of a server. Shared by its connections.
#[derive(Debug)]
pub struct Partitions {
    model: Arc<Model>,
    held: RwLock<Map>,
    /// Backups that do not answer, until the master has said what is to become of them.
    lost: Mutex<Vec<Arc<Feed>>>,
    news_of_lost: Notify,
    /// Admits batches, where the job has that and partition 0 is here.
    gatekeeper: Option<Gatekeeper>,
    pulls: AtomicU64,
    pushes: AtomicU64,
}

type Map = BTreeMap<PartitionId, Arc<Mutex<Held>>>;

/// A partition, and what goes to its backup.
#[derive(Debug)]
pub(crate) struct Held {
    pub partition: Partition,
    pub feed: Option<Arc<Feed>>,
}

/// What a server tells of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Gauges {
    /// Rows born, over all tables and partitions.
    pub rows: u64,
    /// Bytes of rows, slots, index and tensors.
    pub bytes: u64,
    /// Bytes of the tables alone.
    pub table_bytes: u64,
    /// Rows that their indexes have places for.
    pub places: u64,
    /// Pushes applied by the partition that applied the most.
    pub version: u64,
    /// How many pushes were 0, 1, 2 to 3, 4 to 7… pushes late.
    pub staleness: Staleness,
    /// Pull requests answered.
    pub pulls: u64,
    /// Push requests answered.
    pub pushes: u64,
    /// By partition: floats that were read or changed in its present life.
    pub loads: BTreeMap<u32, u64>,
    /// By partition: which life of it this server has a backup of.
    pub backs: BTreeMap<u32, u64>,
    /// Bytes of those.
    pub backup_bytes: u64,
    /// Tables that have a bound, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub bounded: BTreeMap<String, Bounded>,
}

/// What there is to tell of a table that has a bound, over the partitions here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Bounded {
    /// Its rows.
    pub rows: u64,
    /// Their bytes, with slots, index, and counts of ids without a row.
    pub bytes: u64,
    /// Bytes that it may take; 0: as many as it needs.
    pub limit: u64,
    /// Gradients that were dropped in all lives of the partitions because their ids had no row.
    pub refused: u64,
    /// Rows that made room for others in all lives of the partitions.
    pub evicted: u64,
}

impl Bounded {
    /// `None`: the table has no bound.
    fn of(table: &Table) -> Option<Self> {
        let Counts { refused, evicted } = table.counts()?;
        let (rows, bytes, limit) = (table.len() as u64, table.bytes(), table.limit().unwrap_or(0));
        Some(Bounded { rows, bytes, limit, refused, evicted })
    }

    fn add(&mut self, other: &Bounded) {
        self.rows += other.rows;
        self.bytes += other.bytes;
        self.limit += other.limit;
        self.refused += other.refused;
        self.evicted += other.evicted;
    }
}

/// A partition's file as it is on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The partition.
    pub partition: PartitionId,
    /// Which life of it was cut.
    pub incarnation: u64,
    /// The checkpoint whose file it adds to; `None`: it is whole.
    pub base: Option<u64>,
    /// Length and checksum.
    pub sum: Sum,
    /// Open tasks with their marks, as the file has them.
    pub marks: Vec<(TaskId, u64)>,
}

impl Partitions {
    /// None yet, of this model.
    pub fn new(model: Arc<Model>) -> Self {
        let (pulls, pushes) = (AtomicU64::new(0), AtomicU64::new(0));
        let gatekeeper = model.policy.map(|policy| Gatekeeper::new(policy, model.permit_timeout));
        let (held, lost, news_of_lost) = (RwLock::default(), Mutex::default(), Notify::new());
        Partitions { model, held, lost, news_of_lost, gatekeeper, pulls, pushes }
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Who admits batches.
    pub(crate) fn gatekeeper(&self) -> Option<&Gatekeeper> {
        self.gatekeeper.as_ref()
    }

    /// Holds `partition` from now on, in place of an earlier life of it.
    pub fn open(&self, partition: Partition) {
        assert_eq!(**partition.model(), *self.model, "a server holds one model");
        let (id, one) = (partition.id(), Arc::new(Mutex::new(Held { partition, feed: None })));
        drop(self.change(|held| held.insert(id, one)));
    }

    /// Changes what is held. What goes is the caller's to drop: to give back so much memory takes a moment, and everybody
    /// waits for this lock.
    fn change<T>(&self, change: impl FnOnce(&mut Map) -> T) -> T {
        change(&mut self.held.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Gives up a partition. `None`: it is not here, or not fit for use.
    pub fn take(&self, id: PartitionId) -> Option<Partition> {
        let mut held = self.change(|held| held.remove(&id))?;
        // Whoever still looks at it is done in a moment, and nobody else finds it.
        loop {
            match Arc::try_unwrap(held) {
                Ok(one) => return Some(one.into_inner().ok()?.partition),
                Err(again) => held = again,
            }
            std::thread::yield_now();
        }
    }

    /// Lets go of this life of a partition: another server has it.
    pub fn let_go(&self, id: PartitionId, incarnation: u64) {
        if self.with(id, |p| p.incarnation()) != Some(incarnation) {
            return;
        }
        drop(self.change(|held| held.remove(&id)));
    }

    /// Lets go of all partitions but these.
    pub fn retain(&self, keep: &[PartitionId]) {
        drop(self.change(|held| held.extract_if(.., |id, _| !keep.contains(id)).collect::<Map>()));
    }

    /// Works on one partition with its lock held. `None`: it is not here, or not fit for use.
    pub fn with<T>(&self, id: PartitionId, work: impl FnOnce(&mut Partition) -> T) -> Option<T> {
        self.with_held(id, |held| work(&mut held.partition))
    }

    /// The same, with what goes to its backup.
    pub(crate) fn with_held<T>(&self, id: PartitionId, work: impl FnOnce(&mut Held) -> T) -> Option<T> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        let one = Arc::clone(held.get(&id)?);
        drop(held);
        // A poisoned lock means half a push: nobody may see those rows. `gauges` tells the owner.
        let mut one = one.lock().ok()?;
        Some(work(&mut one))
    }

    /// A backup does not answer: the master is to hear of it.
    pub(crate) fn backup_lost(&self, feed: &Arc<Feed>) {
        if feed.lose() {
            self.lost.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(feed));
            self.news_of_lost.notify_one();
        }
    }

    /// Waits for a backup that does not answer.
    pub(crate) async fn next_lost(&self) -> Arc<Feed> {
        loop {
            let lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner).first().cloned();
            match lost {
                Some(feed) => return feed,
                None => self.news_of_lost.notified().await,
            }
        }
    }

    /// The master's word on a backup that was lost: the partition goes on alone, or, where it is another server's now, not
    /// at all.
    pub(crate) fn lost_settled(&self, feed: &Arc<Feed>, alone: bool) {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).retain(|lost| !Arc::ptr_eq(lost, feed));
        if alone {
            self.with_held(feed.partition, |held| {
                held.feed.take_if(|current| Arc::ptr_eq(current, feed));
            });
            feed.go_alone();
        } else {
            feed.end();
        }
    }

    /// A server does not get on with its backups: all of them are lost at once, and not one after the other.
    fn backups_hang(&self, backup: u32) {
        let feeds = self.each_held(|held| held.feed.clone().filter(|feed| feed.backup == backup));
        feeds.iter().filter_map(|(_, feed)| feed.as_ref()?.as_ref()).for_each(|feed| self.backup_lost(feed));
    }

    /// Waits until the backup has done what has this number.
    pub(crate) fn wait_for_backup(&self, feed: &Arc<Feed>, number: u64) -> Result<()> {
        loop {
            match feed.wait(number) {
                Ok(()) => return Ok(()),
                Err(Stuck::Backup) => {
                    self.backup_lost(feed);
                    self.backups_hang(feed.backup);
                }
                Err(Stuck::Master) => return Err(Error::NoLeave { partition: feed.partition }),
            }
        }
    }

    /// The partitions held, with their incarnations.
    pub fn held(&self) -> Vec<(PartitionId, u64)> {
        let lives = self.each(|p| (!p.is_handed_over()).then(|| (p.id(), p.incarnation())));
        lives.into_iter().filter_map(|(_, held)| held.flatten()).collect()
    }

    /// Closes tasks in every partition: committed checkpoints cover them.
    pub fn close(&self, covered: &Closed) {
        let json = serde_json::to_vec(covered).expect("ranges are JSON");
        let noted = |frame: &mut Frame| frame.put_bytes(&json);
        self.each_held(|held| held.also(kind::CLOSE, |p| p.close_all(covered), noted));
    }

    /// No more batches come: what is gathered and not applied is applied now.
    pub fn settle(&self) {
        self.each_held(|held| held.also(kind::SETTLE, Partition::settle, |_| {}));
    }

    /// What there is to tell.
    ///
    /// # Errors
    ///
    /// [`Error::Torn`] where a panic left a partition half-changed: the process must not go on.
    pub fn gauges(&self) -> Result<Gauges> {
        let mut gauges = Gauges {
            pulls: self.pulls.load(Ordering::Relaxed),
            pushes: self.pushes.load(Ordering::Relaxed),
            ..Gauges::default()
        };
        for (partition, sizes) in self.each(sizes) {
            let one = sizes.ok_or(Error::Torn { partition })?;
            gauges.rows += one.rows;
            gauges.bytes += one.bytes;
            gauges.table_bytes += one.table_bytes;
            gauges.places += one.places;
            gauges.version = gauges.version.max(one.version);
            gauges.staleness.add(&one.staleness);
            gauges.loads.extend(one.loads);
            for (name, bounded) in one.bounded {
                gauges.bounded.entry(name).or_default().add(&bounded);
            }
        }
        Ok(gauges)
    }

    pub(crate) fn count_pull(&self) {
        self.pulls.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_push(&self) {
        self.pushes.fetch_add(1, Ordering::Relaxed);
    }

    fn ids(&self) -> Vec<PartitionId> {
        self.held.read().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
    }

    fn each<T>(&self, mut work: impl FnMut(&mut Partition) -> T) -> Vec<(PartitionId, Option<T>)> {
        self.each_held(|held| work(&mut held.partition))
    }

    fn each_held<T>(&self, mut work: impl FnMut(&mut Held) -> T) -> Vec<(PartitionId, Option<T>)> {
        self.ids().into_iter().map(|id| (id, self.with_held(id, &mut work))).collect()
    }
}

impl Held {
    /// Does something to the partition that its backup is to do as well.
    fn also(&mut self, kind: u32, work: impl FnOnce(&mut Partition), put: impl FnOnce(&mut Frame)) {
        work(&mut self.partition);
        if let Some(feed) = &self.feed {
            let mut frame = Frame::default();
            frame.begin(kind, self.partition.version());
            ps::put_part(&mut frame, self.partition.id(), self.partition.incarnation());
            put(&mut frame);
            feed.add(frame);
        }
    }
}

/// The gauges of one partition.
fn sizes(partition: &mut Partition) -> Gauges {
    let sum = |of: fn(&Table) -> u64| partition.tables().iter().map(of).sum::<u64>();
    let floats: usize = partition.tensors().iter().map(|t| t.values().len() + t.slots().len()).sum();
    let table_bytes = sum(Table::bytes);
    let bounded = |table: &Table| Some((table.shape().name.clone(), Bounded::of(table)?));
    Gauges {
        rows: sum(|table| table.len() as u64),
        bytes: table_bytes + 4 * floats as u64,
        table_bytes,
        places: sum(Table::places),
        version: partition.version(),
        staleness: *partition.staleness(),
        loads: BTreeMap::from([(partition.id().0, partition.load())]),
        bounded: partition.tables().iter().filter_map(bounded).collect(),
        ..Gauges::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Order;
    use crate::test_model::{self, model};
    use std::path::Path;

    const ORDER: Order = Order { checkpoint: 1, base: None, is_basis: false };

    #[test]
    fn a_panic_in_the_middle_of_a_push_takes_the_partition_out_of_service() {
        let partitions = Partitions::new(model());
        partitions.open(Partition::new(model(), PartitionId(0), 1));
        partitions.open(Partition::new(model(), PartitionId(1), 1));
        let hit = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            partitions.with(PartitionId(1), |_| panic!("half-way"))
        }));
        assert!(hit.is_err());
        assert_eq!(partitions.with(PartitionId(1), |p| p.version()), None);
        assert_eq!(partitions.with(PartitionId(0), |p| p.version()), Some(0));
        let error = partitions.gauges().unwrap_err();
        assert!(matches!(error, Error::Torn { partition: PartitionId(1) }), "{error}");
        assert!(partitions.write_checkpoint(Path::new("/nowhere"), ORDER).is_err());
    }

    #[test]
    fn what_is_written_tells_the_marks_of_open_tasks_and_none_of_closed_ones() {
        let dir = tempfile::tempdir().unwrap();
        let partitions = Partitions::new(model());
        partitions.open(Partition::new(model(), PartitionId(1), 4));
        let lease = elasticdl_spec::LeaseId { term: 1, n: 1 };
        for shard in 0..3 {
            partitions.with(PartitionId(1), |p| p.fence(TaskId::train(2, shard), lease, 4).unwrap());
        }
        let mut covered = Closed::default();
        covered.insert(2, 1);
        partitions.close(&covered);
        let written = partitions.write_checkpoint(dir.path(), ORDER).unwrap();
        assert_eq!(written.len(), 1);
        assert_eq!((written[0].partition, written[0].incarnation), (PartitionId(1), 4));
        assert_eq!(written[0].marks, [(TaskId::train(2, 0), 0), (TaskId::train(2, 2), 0)]);
    }

    #[test]
    fn a_new_life_replaces_the_old_one() {
        let partitions = Partitions::new(model());
        partitions.open(Partition::new(model(), PartitionId(0), 1));
        partitions.open(Partition::new(model(), PartitionId(2), 1));
        partitions.open(Partition::new(model(), PartitionId(0), 5));
        assert_eq!(partitions.held(), [(PartitionId(0), 5), (PartitionId(2), 1)]);
        partitions.retain(&[PartitionId(2)]);
        assert_eq!(partitions.held(), [(PartitionId(2), 1)]);
        assert_eq!(partitions.with(PartitionId(0), |p| p.version()), None);
    }

    #[test]
    fn first_reads_that_race_give_birth_to_a_row_once() {
        let partitions = Partitions::new(model());
        partitions.open(Partition::new(model(), PartitionId(1), 1));
        let ids = test_model::ids_of(PartitionId(1), 500);
        let read = || {
            let mut rows = vec![0.0; 3 * ids.len()];
            for (id, row) in ids.iter().zip(rows.chunks_exact_mut(3)) {
                partitions.with(PartitionId(1), |p| p.pull(0, &[*id], row).unwrap()).unwrap();
            }
            rows
        };
        let rows: Vec<Vec<f32>> = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..4).map(|_| scope.spawn(read)).collect();
            readers.into_iter().map(|reader| reader.join().unwrap()).collect()
        });
        assert!(rows.iter().all(|other| *other == rows[0]));
        assert_eq!(partitions.gauges().unwrap().rows, 500);
        assert_ne!(rows[0][1..3], rows[0][4..6], "and no two rows are one vector");
    }

    #[test]
    fn gauges_add_up_over_partitions() {
        let partitions = Partitions::new(model());
        for id in 0..test_model::PARTITIONS {
            partitions.open(Partition::new(model(), PartitionId(id), 1));
        }
        for id in 0..30u64 {
            let place = elasticdl_spec::placement::partition_of_row(id, test_model::PARTITIONS);
            partitions.with(place, |p| p.pull(0, &[id], &mut [0.0; 3]).unwrap()).unwrap();
        }
        let gauges = partitions.gauges().unwrap();
        assert_eq!((gauges.rows, gauges.version), (30, 0));
        assert!(gauges.bytes > 30 * 24, "{gauges:?}");
        let json = serde_json::to_string(&gauges).unwrap();
        assert!(json.starts_with(r#"{"rows":30,"bytes":"#), "{json}");
        assert!(!json.contains("bounded"), "{json}");
    }

    #[test]
    fn gauges_tell_what_bounds_have_done_over_all_partitions() {
        let bounded = test_model::bounded_model(model().optimizer);
        let partitions = Partitions::new(Arc::clone(&bounded));
        for id in [PartitionId(0), PartitionId(1)] {
            let mut partition = Partition::new(Arc::clone(&bounded), id, 1);
            let ids = test_model::ids_of(id, 100);
            let (tables, ..) = partition.restoring();
            for table in tables {
                let gradients = vec![1.0; ids.len() * table.shape().width()];
                table.push(&ids, &gradients, &crate::Optimizer::new(bounded.optimizer), 1.0);
            }
            partitions.open(partition);
        }
        let gauges = partitions.gauges().unwrap();
        let (users, items) = (&gauges.bounded["users"], &gauges.bounded["items"]);
        assert_eq!((users.limit, items.limit), (4096, 4096), "two shares of four");
        assert!(users.refused > 100 && users.rows < 100, "{users:?}");
        assert_eq!((items.refused, items.evicted), (0, 200 - items.rows));
        assert!(items.evicted > 50 && items.bytes <= items.limit, "{items:?}");
    }
}
