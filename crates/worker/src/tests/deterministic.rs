//! Jobs whose outcome must be the same to the bit: real stages, real frames, real partitions, and workers
//! that die at any frame. Whatever a worker leaves half done, the next one goes on as if it had not been.

use std::iter::once;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use elasticdl_ps::gate::Policy;
use elasticdl_ps::partition::RowGradients;
use elasticdl_ps::requests::Requests;
use elasticdl_ps::{Model as PsModel, Partition, Partitions};
use elasticdl_spec::mix::{Rng, mix2};
use elasticdl_spec::placement::partition_of_row;
use elasticdl_spec::schedule::{Decay, Position, Schedule};
use elasticdl_spec::{OptimizerSpec, PartitionId, TablesSpec, TaskId};
use elasticdl_wire::Token;
use elasticdl_wire::frame::{Frame, Limits};
use elasticdl_wire::ps::{PushHeader, kind};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::{PARTITIONS, ToyModel, ToySource, lease, leased_at, shape};
use crate::error::Error;
use crate::gauges::Gauges;
use crate::pipeline::{Config, Event, Outcome, Pipeline, Together};
use crate::ps_client::{self, Directory, Place, Places, PsClient};
use crate::stop::{Level, Stop};
use crate::store::{Fence, Store};

const TOKEN: &str = "0123456789abcdef";
const BATCHES: u64 = 3;

/// Whether the frame at which a worker dies is still carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Before,
    After,
}

/// A worker dies when so many of its frames have come.
type Death = (u64, When);

/// How the learning rate goes: no two batches of a test have the same.
const SCHEDULE: Schedule = Schedule { warmup_steps: 2, decay: Decay::Cosine { end: 0.1 } };

/// The worker of the moment, as the servers see it.
struct Life {
    frames: u64,
    death: Option<Death>,
    stop: Stop,
    events: UnboundedSender<Event>,
}

impl Life {
    /// A frame has come. Tells whether the worker has died of it.
    fn frame(&mut self) -> Option<When> {
        self.frames += 1;
        let (_, when) = self.death.filter(|(at, _)| *at == self.frames)?;
        self.stop.raise(Level::Stopped);
        // Wakes whoever waits for the worker's next event.
        let _ = self.events.send(Event::Broken(Error::Killed));
        Some(when)
    }
}

/// All partitions, each with a server of its own.
pub(super) struct Real {
    pub(super) partitions: Arc<Partitions>,
    tables: TablesSpec,
    life: Arc<Mutex<Option<Life>>>,
    addresses: Vec<String>,
}

impl Real {
    fn start() -> Self {
        let optimizer =
            OptimizerSpec::Adagrad { learning_rate: 0.5, initial_accumulator: 0.1, epsilon: 1e-8 };
        Real::with(optimizer, TablesSpec::default())
    }

    pub(super) fn with(optimizer: OptimizerSpec, tables: TablesSpec) -> Self {
        Real::of(PsModel::new("test", shape(), optimizer, 7, PARTITIONS).with_tables(&tables), tables)
    }

    /// Servers with a gate.
    pub(super) fn gated(optimizer: OptimizerSpec, policy: Option<Policy>) -> Self {
        let mut model = PsModel::new("test", shape(), optimizer, 7, PARTITIONS);
        model.policy = policy;
        Real::of(model, TablesSpec::default())
    }

    pub(super) fn together(&self) -> Together {
        match self.partitions.model().policy {
            None => Together::Freely,
            Some(Policy::Steps(_)) => Together::InSteps,
            Some(_) => Together::Gated,
        }
    }

    pub(super) fn of(model: PsModel, tables: TablesSpec) -> Self {
        let model = Arc::new(model);
        let partitions = Arc::new(Partitions::new(Arc::clone(&model)));
        for id in (0..PARTITIONS).map(PartitionId) {
            partitions.open(Partition::new(Arc::clone(&model), id, 1));
        }
        let life = Arc::default();
        let addresses = (0..PARTITIONS).map(|_| serve(&partitions, &life)).collect();
        Real { partitions, tables, life, addresses }
    }

    /// Serves, without anybody that dies.
    pub(super) fn begin(&self) {
        let events = unbounded_channel().0;
        let life = Life { frames: 0, death: None, stop: Stop::default(), events };
        *self.life.lock().unwrap() = Some(life);
    }

    pub(super) fn client(&self, staged: bool, stop: &Stop) -> ps_client::Config {
        let places = Fixed(self.addresses.clone());
        ps_client::Config {
            shape: Arc::new(self.partitions.model().shape.clone()),
            tables: self.tables.clone(),
            partitions: PARTITIONS,
            directory: Arc::new(Directory::new(PARTITIONS, Box::new(places))),
            token: Token::new(TOKEN).unwrap(),
            identity: None,
            worker: 1,
            staged,
            stop: stop.clone(),
        }
    }

    /// Every weight of every partition to the bit, and how many batches it has applied.
    pub(super) fn state(&self) -> Vec<(Vec<u32>, u64)> {
        let state = |id: u32| {
            let ids: Vec<u64> = (0..40).map(|n| mix2(3, n)).collect();
            let ids: Vec<u64> =
                ids.into_iter().filter(|i| partition_of_row(*i, PARTITIONS).0 == id).collect();
            self.partitions.with(PartitionId(id), |p| {
                let mut weights = vec![0.0; ids.len() * 2];
                p.read(0, &ids, &mut weights);
                p.tensors().iter().for_each(|t| weights.extend(t.values()));
                (weights.iter().map(|w| w.to_bits()).collect(), p.version())
            })
        };
        (0..PARTITIONS).map(|id| state(id).expect("it is here")).collect()
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        *self.life.lock().unwrap() = None;
        for address in &self.addresses {
            // Wakes the one who accepts, who sees that it is over by the hello that never comes.
            let _ = TcpStream::connect(address.parse::<SocketAddr>().unwrap());
        }
    }
}

/// A server for each partition, for ever.
struct Fixed(Vec<String>);

impl Places for Fixed {
    fn places(&self) -> elasticdl_wire::Result<Vec<(PartitionId, Place)>> {
        let place = |(p, address): (usize, &String)| {
            (PartitionId(p as u32), Place { incarnation: 1, address: address.clone() })
        };
        Ok(self.0.iter().enumerate().map(place).collect())
    }
}

fn serve(partitions: &Arc<Partitions>, life: &Arc<Mutex<Option<Life>>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (partitions, life) = (Arc::clone(partitions), Arc::clone(life));
    let accept = move || {
        for stream in listener.incoming().map_while(std::result::Result::ok) {
            if life.lock().unwrap().is_none() {
                return;
            }
            let (partitions, life) = (Arc::clone(&partitions), Arc::clone(&life));
            spawn(move || drop(answer(stream, &partitions, &life)));
        }
    };
    spawn(accept);
    address
}

fn spawn(body: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().name("server".into()).spawn(body).unwrap();
}

fn answer(
    mut stream: TcpStream,
    partitions: &Partitions,
    life: &Mutex<Option<Life>>,
) -> elasticdl_wire::Result<()> {
    let mut requests = Requests::new(partitions, Limits::default());
    let (mut request, mut reply) = (Frame::default(), Frame::default());
    while request.read(&mut stream, Limits::default())? {
        if request.kind() == kind::HELLO {
            reply.begin(kind::WELCOME, 0);
        } else {
            let death = life.lock().unwrap().as_mut().and_then(Life::frame);
            if death == Some(When::Before) {
                return Ok(());
            }
            requests.answer(&request, &mut reply).unwrap();
            if death == Some(When::After) {
                return Ok(());
            }
        }
        reply.write(&mut stream).map_err(|e| elasticdl_wire::Error::io("answering", e))?;
    }
    Ok(())
}

/// Trains some tasks, one after the other, with workers that die one after the other.
struct Training {
    staged: bool,
    tasks: u32,
    policy: Option<Policy>,
}

impl Training {
    fn run(&self, deaths: &[Death]) -> Vec<(Vec<u32>, u64)> {
        let optimizer =
            OptimizerSpec::Adagrad { learning_rate: 0.5, initial_accumulator: 0.1, epsilon: 1e-8 };
        let world = Real::gated(optimizer, self.policy);
        let (mut done, mut leases) = (0, 0);
        for death in deaths.iter().copied().map(Some).chain(once(None)) {
            self.live(&world, death, &mut done, &mut leases);
        }
        assert_eq!(done, self.tasks);
        world.state()
    }

    /// One worker's life: it takes the first task that is not done, and the next when that one is.
    fn live(&self, world: &Real, death: Option<Death>, done: &mut u32, leases: &mut u64) {
        let (stop, (events, mut happening)) = (Stop::default(), unbounded_channel());
        let life = Life { frames: 0, death, stop: stop.clone(), events: events.clone() };
        *world.life.lock().unwrap() = Some(life);
        let client = world.client(self.staged, &stop);
        let mut stages = Pipeline::start(Config {
            shape: Arc::new(shape()),
            partitions: PARTITIONS,
            depth: 1,
            together: world.together(),
            read_ahead: 2,
            bad_records_max: 0,
            schedule: SCHEDULE,
            clip: elasticdl_spec::job::ClipSpec::default(),
            models: vec![ToyModel::boxed()],
            source: Box::new(ToySource { batches: BATCHES, spoil: Default::default() }),
            pulls: Box::new(PsClient::new(client.clone())),
            pushes: Box::new(PsClient::new(client)),
            stop: stop.clone(),
            gauges: Arc::new(Gauges::default()),
            events,
        })
        .unwrap();
        let (mut wanted, mut held) = (false, false);
        while *done < self.tasks && !stop.reached(Level::Stopped) {
            match next(&mut happening) {
                Event::Wanted => wanted = true,
                Event::Ended { outcome: Outcome::Done { .. }, .. } => (held, *done) = (false, *done + 1),
                Event::Ended { outcome, .. } => panic!("{outcome:?}"),
                Event::Broken(Error::Killed) => break,
                Event::Broken(error) => panic!("{error}"),
                _ => {}
            }
            if wanted && !held && *done < self.tasks {
                *leases += 1;
                let first = u64::from(*done) * BATCHES;
                let position = Position { first, total: u64::from(self.tasks) * BATCHES };
                stages.give(leased_at(TaskId::train(0, *done), *leases, position));
                (wanted, held) = (false, true);
            }
        }
        stages.close();
        stages.join();
    }
}

fn next(events: &mut UnboundedReceiver<Event>) -> Event {
    events.blocking_recv().expect("the stages run")
}

/// How many frames a task takes: a fence, and a pull, a stage and a commit for each batch.
const FRAMES: u64 = PARTITIONS as u64 * (1 + 3 * BATCHES);

#[test]
fn staging_changes_nothing_of_an_undisturbed_run() {
    let plain = Training { staged: false, tasks: 2, policy: None }.run(&[]);
    assert_eq!(Training { staged: true, tasks: 2, policy: None }.run(&[]), plain);
    assert!(plain.iter().all(|(_, version)| *version == 2 * BATCHES));
}

#[test]
fn a_death_at_any_frame_leaves_no_trace() {
    let training = Training { staged: true, tasks: 1, policy: None };
    let undisturbed = training.run(&[]);
    for at in 1..=FRAMES {
        for when in [When::Before, When::After] {
            assert_eq!(training.run(&[(at, when)]), undisturbed, "died at frame {at}, {when:?}");
        }
    }
}

#[test]
fn any_row_of_deaths_leaves_no_trace() {
    let training = Training { staged: true, tasks: 2, policy: None };
    let undisturbed = training.run(&[]);
    for seed in 0..30 {
        let mut rng = Rng::new(seed);
        let death = |_| (1 + rng.below(FRAMES), if rng.below(2) == 0 { When::Before } else { When::After });
        let deaths: Vec<Death> = (0..8).map(death).collect();
        assert_eq!(training.run(&deaths), undisturbed, "seed {seed}: {deaths:?}");
    }
}

/// Goal: a step of one batch is that batch; and whoever dies at whichever frame of a step of two, of a round or within
/// a bound, every batch counts once in every partition.
#[test]
fn a_death_at_any_frame_at_the_gate_leaves_every_batch_counted_once() {
    let plain = Training { staged: false, tasks: 1, policy: None }.run(&[]);
    assert_eq!(Training { staged: false, tasks: 1, policy: Some(Policy::Steps(1)) }.run(&[]), plain);
    for policy in [Policy::Steps(2), Policy::Rounds(2), Policy::Bounded(1)] {
        let training = Training { staged: false, tasks: 1, policy: Some(policy) };
        for at in 1..=FRAMES {
            let when = if at % 2 == 0 { When::Before } else { When::After };
            let ended = training.run(&[(at, when)]);
            assert!(ended.iter().all(|(_, version)| *version == BATCHES), "{policy:?}, died at frame {at}");
        }
    }
}

/// Goal: the tests above are not tame. Every batch counts once all the same; the weights are others.
#[test]
fn without_staging_a_death_between_two_partitions_shows() {
    let training = Training { staged: false, tasks: 1, policy: None };
    let undisturbed = training.run(&[]);
    // Of a fence and a pull, then a push: one server of three does not carry it out.
    let died = training.run(&[(2 * u64::from(PARTITIONS) + 1, When::Before)]);
    assert_ne!(died, undisturbed);
    for ((_, versions), (_, expected)) in died.iter().zip(&undisturbed) {
        assert_eq!(versions, expected);
    }
}

/// Goal: a commit that cannot be finished is an error and never passed over.
#[test]
fn a_commit_that_nothing_is_staged_for_is_a_broken_promise() {
    let world = Real::start();
    let stop = Stop::default();
    let events = unbounded_channel().0;
    *world.life.lock().unwrap() = Some(Life { frames: 0, death: None, stop: stop.clone(), events });
    let task = TaskId::train(0, 0);
    let header = PushHeader { task, batch: 0, lease: lease(1), records: 0, factor: 1.0 };
    world.partitions.with(PartitionId(1), |p| {
        let zeros: Vec<Vec<f32>> = p.tensors().iter().map(|t| vec![0.0; t.values().len()]).collect();
        let tensors: Vec<&[f32]> = zeros.iter().map(Vec::as_slice).collect();
        let tables = [RowGradients { ids: &[], gradients: &[] }];
        let push = elasticdl_ps::partition::Push {
            header,
            incarnation: 1,
            version: 0,
            tables: &tables,
            tensors: &tensors,
        };
        p.push(&push).unwrap();
    });
    let mut plain = PsClient::new(world.client(false, &stop));
    assert!(matches!(plain.fence(task, lease(2)), Ok(Fence::Held { mark: 0, .. })));
    let error = PsClient::new(world.client(true, &stop)).fence(task, lease(3)).unwrap_err();
    assert!(matches!(error, Error::HalfCommitted { batch: 0, partition: PartitionId(0 | 2), .. }), "{error}");
    assert_eq!(error.kind(), elasticdl_spec::Kind::Bug);
}
