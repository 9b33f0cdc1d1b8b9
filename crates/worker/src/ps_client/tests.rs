//! The client against servers on loopback that close, move and forget.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use elasticdl_nn::Gradients;
use elasticdl_spec::{TablesSpec, TaskId};
use elasticdl_wire::ps::PushHeader;
use proptest::prelude::*;

use super::*;
use crate::dedup::Deduper;
use crate::error::Error;
use crate::store::Generation;
use crate::tests::{FakeServer, Fault, PARTITIONS, World, batch, lease, shape};

const TOKEN: &str = "0123456789abcdef";
const TASK: TaskId = TaskId { purpose: elasticdl_spec::Purpose::Train, epoch: 0, shard: 3 };

/// Tells the world's incarnations, and which server has which partition.
#[derive(Clone)]
struct Map {
    world: Arc<Mutex<World>>,
    addresses: Arc<Mutex<Vec<String>>>,
    asked: Arc<Mutex<u32>>,
    /// A partition that is born again, as it was at the start, when the map is looked at next.
    reborn: Arc<Mutex<Option<usize>>>,
}

impl Places for Map {
    fn places(&self) -> elasticdl_wire::Result<Vec<(PartitionId, Place)>> {
        *self.asked.lock().unwrap() += 1;
        let mut world = self.world.lock().unwrap();
        if let Some(partition) = self.reborn.lock().unwrap().take() {
            let first = World::new(shape()).partitions.swap_remove(partition);
            world.restore(partition, &first);
        }
        let addresses = self.addresses.lock().unwrap();
        let place = |(p, address): (usize, &String)| {
            let place = Place { incarnation: world.partitions[p].incarnation, address: address.clone() };
            (PartitionId(p as u32), place)
        };
        Ok(addresses.iter().enumerate().map(place).collect())
    }
}

/// Two servers, the first with partitions 0 and 2; a client; one batch.
struct Rig {
    world: Arc<Mutex<World>>,
    servers: [FakeServer; 2],
    map: Map,
    stop: Stop,
    client: PsClient,
    keys: Keys,
    pulled: Pulled,
}

impl Rig {
    fn new() -> Self {
        let world = World::shared();
        let servers = [FakeServer::start(&world, TOKEN), FakeServer::start(&world, TOKEN)];
        let addresses = [0, 1, 0].map(|server: usize| servers[server].address.clone()).to_vec();
        let map = Map {
            world: Arc::clone(&world),
            addresses: Arc::new(Mutex::new(addresses)),
            asked: Arc::default(),
            reborn: Arc::default(),
        };
        let stop = Stop::default();
        let client = PsClient::new(Config {
            shape: Arc::new(shape()),
            tables: TablesSpec::default(),
            partitions: PARTITIONS,
            directory: Arc::new(Directory::new(PARTITIONS, Box::new(map.clone()))),
            token: Token::new(TOKEN).unwrap(),
            identity: None,
            worker: 1,
            staged: false,
            stop: stop.clone(),
        });
        let mut keys = Keys::default();
        Deduper::new(PARTITIONS).dedup(&batch(TASK, 0, 16).ids, &mut keys);
        Rig { world, servers, map, stop, client, keys, pulled: Pulled::default() }
    }

    fn fence(&mut self, n: u64) -> Fence {
        self.client.fence(TASK, lease(n)).unwrap()
    }

    fn hold(&mut self, n: u64) -> (u64, Generation) {
        match self.fence(n) {
            Fence::Held { mark, generation, .. } => (mark, generation),
            Fence::Lost => panic!("the task is ours"),
        }
    }

    fn pull(&mut self) {
        let mode = PullMode { births: true, tensors: true };
        self.client.pull(&self.keys, mode, &mut self.pulled).unwrap();
    }

    /// Pushes a gradient of 1 for every weight.
    fn push(&mut self, batch: u64, n: u64, generation: Generation) -> Pushed {
        let mut gradients = Gradients::default();
        gradients.reset(&shape(), &[self.keys.unique()]);
        gradients.tables.iter_mut().chain(&mut gradients.tensors).for_each(|g| g.fill(1.0));
        let push = Push {
            header: PushHeader { task: TASK, batch, lease: lease(n), records: 16, factor: 1.0 },
            generation,
            keys: &self.keys,
            versions: &self.pulled.versions,
            gradients: &gradients,
        };
        self.client.push(&push).unwrap()
    }

    fn applied(&self, partition: usize) -> Vec<u64> {
        self.world.lock().unwrap().partitions[partition].applied.iter().map(|(_, batch)| *batch).collect()
    }
}

#[test]
fn rows_come_in_the_order_of_the_keys_and_tensors_in_that_of_the_shape() {
    let mut rig = Rig::new();
    rig.pull();
    let (shape, keys) = (shape(), &rig.keys);
    assert!(keys.unique() > 10);
    for (id, row) in keys.ids().iter().zip(rig.pulled.rows[0].chunks_exact(2)) {
        let mut born = [0.0; 2];
        shape.tables[0].init_row(7, *id, &mut born);
        assert_eq!(row, born);
    }
    for (values, tensor) in rig.pulled.tensors.iter().zip(&shape.tensors) {
        assert_eq!(*values, tensor.init_values(7));
    }
}

#[test]
fn a_push_reaches_every_partition_and_what_is_pulled_next_has_it() {
    let mut rig = Rig::new();
    let (mark, generation) = rig.hold(5);
    assert_eq!(mark, 0);
    rig.pull();
    let before = rig.pulled.clone();
    assert_eq!(rig.push(0, 5, generation), Pushed::Applied);
    rig.pull();
    for (after, before) in rig.pulled.rows[0].iter().zip(&before.rows[0]) {
        assert_eq!(*after, before - 1.0);
    }
    assert_eq!(rig.pulled.tensors[1][0], before.tensors[1][0] - 1.0);
    assert_eq!(rig.pulled.versions, [1; PARTITIONS as usize]);
    assert_eq!(rig.hold(6).0, 1, "the next lease begins after it");
}

#[test]
fn a_pull_is_answered_after_the_server_closed_the_connection() {
    let mut rig = Rig::new();
    rig.pull();
    rig.servers[0].inject(&[Fault::CloseBefore, Fault::CloseAfter, Fault::NotHere]);
    let first = std::mem::take(&mut rig.pulled);
    rig.pull();
    assert_eq!(rig.pulled, first);
    let hellos = rig.servers[0].seen().iter().filter(|k| **k == kind::HELLO).count();
    assert_eq!(hellos, 3, "one connection, and one after each close");
}

/// Goal: what no answer is ends a connection, and is asked for again; who never gives another one is not asked for ever.
#[test]
fn a_malformed_answer_is_asked_for_again_over_another_connection() {
    let mut rig = Rig::new();
    let (_, generation) = rig.hold(1);
    rig.pull();
    let first = rig.pulled.clone();
    for kinds in [&[Fault::Malformed][..], &[Fault::Malformed, Fault::CloseAfter, Fault::Malformed]] {
        rig.servers[0].inject(kinds);
        rig.pull();
        assert_eq!(rig.pulled, first);
    }
    rig.servers[1].inject(&[Fault::Malformed; 3]);
    assert_eq!(rig.push(0, 1, generation), Pushed::Applied);
    rig.servers[0].inject(&[Fault::Malformed]);
    assert_eq!(rig.hold(1).0, 1);
    for partition in 0..3 {
        assert_eq!(rig.applied(partition), [0], "partition {partition}");
    }
    let connections = |server: &FakeServer| server.seen().iter().filter(|k| **k == kind::HELLO).count();
    assert_eq!(rig.servers.each_ref().map(connections), [1 + 5, 1 + 3]);

    rig.servers[1].inject(&[Fault::Malformed; 4]);
    let mode = PullMode { births: true, tensors: true };
    let failed = rig.client.pull(&rig.keys, mode, &mut rig.pulled).unwrap_err();
    assert_eq!(failed.kind(), elasticdl_spec::Kind::Bug, "{failed}");
    rig.pull();
}

#[test]
fn a_push_whose_answer_was_lost_is_applied_once() {
    let mut rig = Rig::new();
    let (_, generation) = rig.hold(1);
    rig.pull();
    rig.servers[0].inject(&[Fault::CloseAfter]);
    assert_eq!(rig.push(0, 1, generation), Pushed::Applied);
    assert_eq!(rig.push(1, 1, generation), Pushed::Applied);
    for partition in 0..3 {
        assert_eq!(rig.applied(partition), [0, 1], "partition {partition}");
    }
    let pushes = |server: &FakeServer| server.seen().iter().filter(|k| **k == kind::PUSH).count();
    assert_eq!((pushes(&rig.servers[0]), pushes(&rig.servers[1])), (3, 2), "only the unanswered one again");
}

#[test]
fn a_push_to_a_reborn_partition_is_redone_from_the_marks() {
    let mut rig = Rig::new();
    let saved = rig.world.lock().unwrap().partitions[1].clone();
    let (_, generation) = rig.hold(1);
    rig.pull();
    assert_eq!(rig.push(0, 1, generation), Pushed::Applied);
    rig.world.lock().unwrap().restore(1, &saved);
    assert_eq!(rig.push(1, 1, generation), Pushed::Redo);
    assert_eq!(rig.push(1, 1, generation), Pushed::Redo, "as long as it is of the old generation");
    let (mark, generation) = rig.hold(1);
    assert_eq!(mark, 0);
    rig.pull();
    assert_eq!(rig.push(0, 1, generation), Pushed::Applied);
    assert_eq!(rig.push(1, 1, generation), Pushed::Applied);
    assert_eq!((rig.applied(0), rig.applied(1)), (vec![0, 1], vec![0, 1]));
}

/// The first life of a partition has every batch and answers; before the others have answered, its second
/// one begins, which has none.
#[test]
fn a_fence_believes_no_mark_of_a_life_that_ended_before_all_had_answered() {
    let mut rig = Rig::new();
    let (_, generation) = rig.hold(1);
    rig.pull();
    assert_eq!(rig.push(0, 1, generation), Pushed::Applied);
    rig.servers[1].inject(&[Fault::CloseBefore]);
    *rig.map.reborn.lock().unwrap() = Some(0);
    let Fence::Held { mark, incarnations, .. } = rig.fence(2) else { panic!("the task is ours") };
    assert_eq!((mark, &*incarnations), (0, &[2, 1, 1][..]));
}

#[test]
fn a_gap_is_redone_and_a_newer_lease_ends_the_task() {
    let mut rig = Rig::new();
    let (_, generation) = rig.hold(1);
    rig.pull();
    assert_eq!(rig.push(2, 1, generation), Pushed::Redo);
    rig.hold(9);
    assert_eq!(rig.push(0, 1, generation), Pushed::Lost);
    assert_eq!(rig.fence(1), Fence::Lost);
    assert_eq!(rig.applied(0), Vec::<u64>::new());
}

#[test]
fn partitions_that_move_are_found() {
    let mut rig = Rig::new();
    rig.pull();
    let first = rig.pulled.clone();
    let address = rig.servers[1].address.clone();
    rig.map.addresses.lock().unwrap()[0].clone_from(&address);
    rig.world.lock().unwrap().partitions[0].incarnation += 1;
    rig.pull();
    assert_eq!(rig.pulled, first);
}

/// A paused server is not waited for once the master has given its partitions away.
#[test]
fn a_server_that_hangs_is_left_when_its_partitions_are_elsewhere() {
    let mut rig = Rig::new();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = rig.servers[1].address.clone();
    rig.map.addresses.lock().unwrap()[1] = silent.local_addr().unwrap().to_string();
    let map = rig.map.clone();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _connected = silent.accept().unwrap();
            map.addresses.lock().unwrap()[1] = address;
        });
        rig.pull();
    });
    assert_eq!(rig.pulled.rows[0].len(), rig.keys.unique() * 2);
}

/// Goal: waiting neither spins nor outlives the worker.
#[test]
fn a_wait_for_servers_pauses_and_ends_with_the_worker() {
    let mut rig = Rig::new();
    rig.map.addresses.lock().unwrap().iter_mut().for_each(String::clear);
    let (stop, client, keys) = (&rig.stop, &mut rig.client, &rig.keys);
    std::thread::scope(|scope| {
        let pull = scope.spawn(move || {
            client.pull(keys, PullMode { births: true, tensors: true }, &mut Pulled::default())
        });
        stop.pause(Duration::from_millis(300), Level::Stopped);
        stop.raise(Level::Draining);
        assert!(matches!(pull.join().unwrap(), Err(Error::Stopped { attempt: "pulling" })));
    });
    let asked = *rig.map.asked.lock().unwrap();
    assert!((2..12).contains(&asked), "{asked} looks at the topology in 300 ms");
}

#[test]
fn a_strange_server_behind_a_port_is_not_believed() {
    let mut rig = Rig::new();
    let stranger = FakeServer::start(&rig.world, "another job's token");
    let right = std::mem::replace(&mut rig.map.addresses.lock().unwrap()[1], stranger.address.clone());
    let map = rig.map.clone();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while stranger.seen().is_empty() {
                std::thread::yield_now();
            }
            map.addresses.lock().unwrap()[1] = right;
        });
        rig.pull();
    });
    assert_eq!(rig.pulled.versions.len(), PARTITIONS as usize);
}

/// A codec for tables that travel in these precisions, and the keys of a batch.
fn codec(rounded: bool) -> (Codec, Keys) {
    let said = if rounded { r#"{ "*": { "wire": "f16" } }"# } else { "{}" };
    let mut keys = Keys::default();
    Deduper::new(PARTITIONS).dedup(&batch(TASK, 0, 16).ids, &mut keys);
    (Codec::new(Arc::new(shape()), &serde_json::from_str(said).unwrap(), PARTITIONS), keys)
}

/// Reads an answer to a pull from all partitions; tells how many have answered for good.
fn take(codec: &Codec, keys: &Keys, mode: PullMode, words: &[u64]) -> Option<usize> {
    let (mut answer, mut pulled) = (elasticdl_wire::frame::Frame::default(), Pulled::default());
    answer.begin(kind::PULLED, 1);
    answer.put_all(words);
    codec.make_room(keys, &mut pulled);
    let mut pending = links::Pending::of(Whom::All, PARTITIONS as usize);
    codec.take_pulled(answer.payload(), mode, &mut pending, keys, &mut pulled).ok()?;
    Some((0..PARTITIONS).filter(|p| pending.check(PartitionId(*p)).is_err()).count())
}

/// What all servers together say to a pull.
fn pulled(codec: &Codec, keys: &Keys, mode: PullMode) -> Vec<u64> {
    let mut answer = elasticdl_wire::frame::Frame::default();
    answer.begin(kind::PULLED, 1);
    answer.put(u64::from(PARTITIONS));
    for p in (0..PARTITIONS).map(PartitionId) {
        answer.put_all(&[u64::from(p.0), Status::Ok.word(), 7]);
        for (width, precision) in codec.widths.iter().zip(&codec.precisions) {
            floats::put(&mut answer, *precision, &vec![0.5; keys.part(p).len() * width]);
        }
        let tensors = codec.tensors_of(p).iter().filter(|_| mode.tensors);
        tensors.for_each(|tensor| answer.put_floats(&vec![0.5; codec.shape.tensors[*tensor].len()]));
    }
    answer.payload().rest().to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Goal: whatever a server says to a pull, it is taken or refused: no panic, and no partition answers twice.
    #[test]
    fn harmed_answers_to_a_pull_are_taken_or_refused(
        (rounded, tensors) in any::<(bool, bool)>(),
        harms in proptest::collection::vec(
            (any::<prop::sample::Index>(), prop_oneof![3 => 0..20u64, 1 => any::<u64>()]), 0..4),
        cut in prop_oneof![3 => Just(None), 1 => any::<prop::sample::Index>().prop_map(Some)],
    ) {
        let (codec, keys) = codec(rounded);
        let mode = PullMode { births: true, tensors };
        let mut words = pulled(&codec, &keys, mode);
        prop_assert_eq!(take(&codec, &keys, mode, &words), Some(PARTITIONS as usize));
        for (place, word) in harms {
            let place = place.index(words.len());
            words[place] ^= word;
        }
        if let Some(cut) = cut {
            words.truncate(cut.index(words.len()));
            prop_assert_eq!(take(&codec, &keys, mode, &words), None, "some of it is missing");
        }
        take(&codec, &keys, mode, &words);
    }
}
