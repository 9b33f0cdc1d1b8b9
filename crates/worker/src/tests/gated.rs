//! Jobs with a gate: real stages, real frames, real partitions, and several workers, one of them much slower than
//! the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use elasticdl_nn::{Gradients, Input, Model, TableInput};
use elasticdl_ps::Partitions;
use elasticdl_ps::gate::Policy;
use elasticdl_spec::placement::{partition_of_row, partition_of_tensor};
use elasticdl_spec::{ModelShape, OptimizerSpec, PartitionId, TaskId};
use serde_json::Value;
use tokio::sync::mpsc::unbounded_channel;

use super::deterministic::Real;
use super::{PARTITIONS, ToyModel, ToySource, leased, shape};
use crate::dedup::{Deduper, Keys};
use crate::gauges::Gauges;
use crate::pipeline::{Config, Event, Outcome, Pipeline};
use crate::ps_client::PsClient;
use crate::stop::Stop;

const BATCHES: u64 = 10;
const SGD: OptimizerSpec = OptimizerSpec::Sgd { learning_rate: 0.1 };

/// A model that takes its time over its first batch: until the first partition has applied so many of others.
struct Slow {
    model: Box<dyn Model>,
    first: Option<First>,
}

struct First {
    /// Told when the batch is pulled.
    begun: Sender<()>,
    partitions: Arc<Partitions>,
    until: u64,
}

impl Model for Slow {
    fn shape(&self) -> &ModelShape {
        self.model.shape()
    }

    fn load(&mut self, tensors: &[&[f32]]) {
        self.model.load(tensors);
    }

    fn train(&mut self, input: &Input, batch_records: usize, gradients: &mut Gradients) -> f64 {
        if let Some(First { begun, partitions, until }) = self.first.take() {
            begun.send(()).unwrap();
            while partitions.with(PartitionId(0), |p| p.version()) < Some(until) {
                std::thread::yield_now();
            }
        }
        self.model.train(input, batch_records, gradients)
    }

    fn predict(&mut self, input: &Input, probabilities: &mut Vec<f32>) {
        self.model.predict(input, probabilities);
    }
}

/// A worker that does these tasks and leaves.
fn work(world: &Real, number: u32, tasks: &[u32], first: Option<First>, depth: usize) {
    let (stop, (events, mut happening)) = (Stop::default(), unbounded_channel());
    let client = world.client(false, &stop);
    let mut stages = Pipeline::start(Config {
        shape: Arc::new(shape()),
        partitions: PARTITIONS,
        depth,
        together: world.together(),
        read_ahead: 2,
        bad_records_max: 0,
        schedule: elasticdl_spec::Schedule::default(),
        clip: elasticdl_spec::job::ClipSpec::default(),
        models: vec![Box::new(Slow { model: ToyModel::boxed(), first })],
        source: Box::new(ToySource { batches: BATCHES, spoil: Default::default() }),
        pulls: Box::new(PsClient::new(client.clone())),
        pushes: Box::new(PsClient::new(client)),
        stop,
        gauges: Arc::new(Gauges::default()),
        events,
    })
    .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (mut given, mut done) = (0, 0);
    while done < tasks.len() {
        let deadline = Duration::from_secs(60);
        let event = runtime.block_on(async { tokio::time::timeout(deadline, happening.recv()).await });
        match event.expect("an event in time").expect("the stages run") {
            Event::Wanted if given < tasks.len() => {
                stages
                    .give(leased(TaskId::train(0, tasks[given]), u64::from(number) * 100 + given as u64 + 1));
                given += 1;
            }
            Event::Ended { outcome: Outcome::Done { .. }, .. } => done += 1,
            Event::Ended { outcome, .. } => panic!("{outcome:?}"),
            Event::Broken(error) => panic!("{error}"),
            _ => {}
        }
    }
    stages.close();
    stages.join();
}

/// By partition: how many batches it has applied, and how stale they were.
fn staleness(world: &Real) -> Vec<(u64, Vec<u64>)> {
    let of = |p: &mut elasticdl_ps::Partition| {
        let classes: Value = serde_json::to_value(p.staleness()).unwrap();
        (p.version(), serde_json::from_value(classes).unwrap())
    };
    (0..PARTITIONS).map(|id| world.partitions.with(PartitionId(id), of).expect("it is here")).collect()
}

/// Two fast workers and one whose first batch takes until so many of theirs are applied, each with batches in flight.
fn race(policy: Option<Policy>, until: u64) -> Vec<(u64, Vec<u64>)> {
    let world = Real::gated(SGD, policy);
    world.begin();
    let (begun, began) = channel();
    let first = First { begun, partitions: Arc::clone(&world.partitions), until };
    std::thread::scope(|scope| {
        scope.spawn(|| work(&world, 1, &[0], Some(first), 2));
        began.recv().unwrap();
        scope.spawn(|| work(&world, 2, &[1, 3, 5, 7], None, 3));
        scope.spawn(|| work(&world, 3, &[2, 4, 6, 8], None, 1));
    });
    staleness(&world)
}

/// Goal: whatever the speeds, nothing staler than allowed is applied; without a bound, in the same race, it is.
#[test]
fn no_gradient_is_staler_than_the_bound() {
    for (most, classes) in [(1, 2), (3, 3)] {
        // The slow one waits for as many as the gate lets through while it does.
        let staleness = race(Some(Policy::Bounded(most)), most - 1);
        for (version, counts) in staleness {
            assert_eq!(version, 9 * BATCHES, "every batch counts once");
            assert_eq!(counts.iter().sum::<u64>(), version);
            assert!(counts.len() <= classes, "a bound of {most}, and {counts:?}");
        }
    }
    let unbounded = race(None, 20);
    assert!(unbounded[0].1.len() > 5, "20 others came between: {unbounded:?}");
}

/// Goal: by hand: each two batches are computed from the same weights, and these lose a tenth of the mean gradient.
#[test]
fn a_synchronous_step_of_two_is_that_of_the_mean_gradient() {
    let world = Real::gated(SGD, Some(Policy::Steps(2)));
    world.begin();
    work(&world, 1, &[0], None, 3);
    let mut rows: BTreeMap<u64, Vec<f32>> = BTreeMap::new();
    let born = |id: u64| {
        let mut row = vec![0.0; 2];
        shape().tables[0].init_row(7, id, &mut row);
        row
    };
    let mut tensors: Vec<Vec<f32>> = shape().tensors.iter().map(|t| t.init_values(7)).collect();
    let (mut model, mut deduper, mut keys) = (ToyModel::boxed(), Deduper::new(PARTITIONS), Keys::default());
    for step in 0..BATCHES / 2 {
        let (before, tensors_before) = (rows.clone(), tensors.clone());
        model.load(&tensors_before.iter().map(Vec::as_slice).collect::<Vec<_>>());
        for index in [2 * step, 2 * step + 1] {
            let batch = super::batch(TaskId::train(0, 0), index, super::RECORDS);
            deduper.dedup(&batch.ids, &mut keys);
            let pulled = |id: &u64| before.get(id).cloned().unwrap_or_else(|| born(*id));
            let pulled: Vec<f32> = keys.ids().iter().flat_map(pulled).collect();
            let tables = [TableInput { rows: &pulled, index: keys.index() }];
            let (records, labels, numeric) = (batch.records, &batch.labels[..], &batch.numeric[..]);
            let mut gradients = Gradients::default();
            gradients.reset(&shape(), &[keys.unique()]);
            model.train(&Input { records, numeric, labels, tables: &tables }, records, &mut gradients);
            let learn = |weight: &mut f32, g: &f32| *weight -= 0.1 * 0.5 * g;
            for (id, gradient) in keys.ids().iter().zip(gradients.tables[0].chunks_exact(2)) {
                let row = rows.entry(*id).or_insert_with(|| born(*id));
                row.iter_mut().zip(gradient).for_each(|(w, g)| learn(w, g));
            }
            for (tensor, gradient) in tensors.iter_mut().zip(&gradients.tensors) {
                tensor.iter_mut().zip(gradient).for_each(|(w, g)| learn(w, g));
            }
        }
    }
    let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
    for (id, due) in &rows {
        let mut row = [0.0; 2];
        world.partitions.with(partition_of_row(*id, PARTITIONS), |p| p.read(0, &[*id], &mut row)).unwrap();
        assert!(near(&row, due), "row {id}: {row:?}, and {due:?} is right");
    }
    for (shape, due) in shape().tensors.iter().zip(&tensors) {
        let home = partition_of_tensor(&shape.name, PARTITIONS);
        let found = |p: &mut elasticdl_ps::Partition| {
            p.tensors().iter().find(|t| t.shape().name == shape.name).map(|t| t.values().to_vec())
        };
        let found = world.partitions.with(home, found).flatten().unwrap();
        assert!(near(&found, due), "{}: {found:?}, and {due:?} is right", shape.name);
    }
    assert!(rows.len() > 30 && staleness(&world).iter().all(|(version, counts)| counts[..] == [*version]));
}

/// Goal: workers of very different speed do their share of steps and rounds, and each batch counts once.
#[test]
fn workers_of_very_different_speed_come_together_in_steps_and_rounds() {
    for policy in [Policy::Steps(3), Policy::Rounds(3)] {
        for (version, counts) in race(Some(policy), 0) {
            assert_eq!(version, 9 * BATCHES, "{policy:?}");
            assert_eq!(counts.iter().sum::<u64>(), version);
            assert!(policy != Policy::Steps(3) || counts.len() == 1, "a step knows no staleness: {counts:?}");
        }
    }
}
