//! A checkpoint is of partitions, and says nothing of servers: it restores onto any number of them.

use elasticdl_spec::placement::{partition_of_row, server_of_partition};

use super::*;
use crate::closed::Closed;
use crate::partitions::Partitions;

/// So that some servers get more than others, and some nothing at all.
const MANY: u32 = 7;
/// Records that each push says it is of.
const RECORDS: u64 = 5;

/// A job's servers, and where its checkpoints are.
struct Fleet {
    model: Arc<Model>,
    servers: Vec<Partitions>,
    dir: tempfile::TempDir,
    /// By partition, the files of the newest checkpoint.
    chains: BTreeMap<PartitionId, Vec<Layer>>,
    checkpoints: u64,
    lives: u64,
}

impl Fleet {
    fn new(model: &Arc<Model>, servers: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (servers, chains) = (empty(model, servers), BTreeMap::new());
        let fleet = Fleet { model: Arc::clone(model), servers, dir, chains, checkpoints: 0, lives: 1 };
        fleet.all().for_each(|id| fleet.server_of(id).open(Partition::new(Arc::clone(model), id, 1)));
        fleet
    }

    fn all(&self) -> impl Iterator<Item = PartitionId> + use<> {
        (0..self.model.partitions).map(PartitionId)
    }

    /// Where workers look for a partition.
    fn server_of(&self, id: PartitionId) -> &Partitions {
        &self.servers[server_of_partition(id, self.servers.len() as u32).0 as usize]
    }

    /// Pushes a batch to every partition, whether it has rows of it or not.
    fn push(&self, task: TaskId, batch: u64, ids: &[u64]) {
        for id in self.all() {
            let ours = ids.iter().copied().filter(|row| partition_of_row(*row, self.model.partitions) == id);
            let ids: Vec<u64> = ours.collect();
            let value = |i: usize| ((i as u64 + 3 * batch + ids.len() as u64) % 11) as f32 * 0.25 - 1.25;
            let floats = |n: usize| (0..n).map(value).collect::<Vec<f32>>();
            let (users, items) = (floats(3 * ids.len()), floats(2 * ids.len()));
            let lease = LeaseId { term: 1, n: 1 + u64::from(task.shard) };
            let header = PushHeader { task, batch, lease, records: RECORDS, factor: 0.5 };
            let tables = [
                RowGradients { ids: &ids, gradients: &users },
                RowGradients { ids: &ids, gradients: &items },
            ];
            let pushed = self.server_of(id).with(id, |partition| {
                let tensors: Vec<_> = partition.tensors().iter().map(|t| floats(t.values().len())).collect();
                let tensors: Vec<&[f32]> = tensors.iter().map(Vec::as_slice).collect();
                let (incarnation, version) = (partition.incarnation(), partition.version());
                partition.push(&Push { header, incarnation, version, tables: &tables, tensors: &tensors })
            });
            assert_eq!(pushed.expect("it is there").unwrap().mark, batch + 1);
        }
    }

    /// Nothing of this task can change any more.
    fn close(&self, task: TaskId) {
        let mut covered = Closed::default();
        covered.insert(task.epoch, task.shard);
        self.servers.iter().for_each(|server| server.close(&covered));
    }

    /// Every server writes what it has, for the next checkpoint; so many are whole or add to the one before.
    fn checkpoint(&mut self, full_every: u64) {
        let base = Some(self.checkpoints).filter(|before| before % full_every > 0);
        self.checkpoints += 1;
        let order = Order { checkpoint: self.checkpoints, base, is_basis: true };
        let dir = self.dir.path().join(self.checkpoints.to_string());
        fs::create_dir(&dir).unwrap();
        for server in &self.servers {
            for written in server.write_checkpoint(&dir, order).unwrap() {
                let chain = self.chains.entry(written.partition).or_default();
                if written.base.is_none() {
                    chain.clear();
                }
                chain.push(Layer { checkpoint: order.checkpoint, dir: dir.clone(), sum: written.sum });
            }
        }
        assert!(self.chains.values().all(|chain| chain.last().unwrap().checkpoint == self.checkpoints));
    }

    /// All servers are gone; so many others open what the checkpoint holds.
    fn restart(&mut self, servers: u32) {
        self.lives += 1;
        self.servers = empty(&self.model, servers);
        for id in self.all() {
            let restored = super::super::restore(&self.model, id, self.lives, &self.chains[&id]).unwrap();
            self.server_of(id).open(restored);
        }
    }

    /// All that there is by partition, wherever it is; each is at one server.
    fn contents(&self) -> BTreeMap<PartitionId, String> {
        let all = self.servers.iter().flat_map(|server| {
            let held = server.held().into_iter();
            held.map(|(id, _)| (id, server.with(id, |partition| bits(partition)).unwrap()))
        });
        let all: Vec<_> = all.collect();
        assert_eq!(all.len(), self.model.partitions as usize, "each at one server");
        all.into_iter().collect()
    }
}

fn empty(model: &Arc<Model>, servers: u32) -> Vec<Partitions> {
    (0..servers).map(|_| Partitions::new(Arc::clone(model))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Goal: rows, slots, tensors, marks, closed tasks, counters and versions are what they were, however many servers
    /// there are each time, and go on as in a job that was never stopped.
    #[test]
    fn a_checkpoint_restores_onto_any_number_of_servers(
        fleets in proptest::collection::vec(1..=MANY + 2, 2..6),
        rows in proptest::collection::vec(0..400u64, 1..60),
        full_every in 1..4u64,
        optimizer in proptest::sample::select(&crate::optimizer::tests::ALL[..]),
    ) {
        let model = Arc::new(Model::new("test", shape(), optimizer, SEED, MANY));
        let (mut fleet, steady) = (Fleet::new(&model, fleets[0]), Fleet::new(&model, 1));
        let mut ids: Vec<u64> = rows;
        ids.sort_unstable();
        ids.dedup();
        for (life, servers) in (0..).zip(&fleets[1..]) {
            // One task ends with the life, another one is open through all of them.
            for fleet in [&fleet, &steady] {
                (0..3).for_each(|batch| fleet.push(TaskId::train(0, life), batch, &ids[batch as usize % ids.len()..]));
                fleet.push(TaskId::train(1, 99), life.into(), &ids);
                fleet.close(TaskId::train(0, life));
            }
            fleet.checkpoint(full_every);
            let before = fleet.contents();
            fleet.restart(*servers);
            prop_assert_eq!(&fleet.contents(), &before);
            prop_assert_eq!(&before, &steady.contents());
            // What is born next is the same, too.
            ids.push(1_000 + u64::from(life));
        }
        let rows: u64 = fleet.servers.iter().map(|server| server.gauges().unwrap().rows).sum();
        prop_assert_eq!(rows, steady.servers[0].gauges().unwrap().rows);
    }
}
