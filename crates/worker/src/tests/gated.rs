//! Jobs with a gate: real stages, real frames, real partitions, and several workers, one of them much slower than
//! the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use elasticdl_nn::{Gradients, Input, Model, TableInput};
use elasticdl_ps::Partitions;
use elasticdl_ps::gate::Policy;
use elasticdl_ps::partition::{Push, RowGradients};
use elasticdl_spec::placement::{partition_of_row, partition_of_tensor};
use elasticdl_spec::{ModelShape, OptimizerSpec, PartitionId, TaskId};
use elasticdl_wire::ps::{PushHeader, Status};
use serde_json::Value;
use tokio::sync::mpsc::unbounded_channel;

use super::deterministic::Real;
use super::{PARTITIONS, ToyModel, ToySource, lease, leased, shape};
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
    /// Told the bias that each batch is computed from.
    computed: Option<Sender<f32>>,
    bias: f32,
}

struct First {
    /// Told when the batch is pulled.
    begun: Sender<()>,
    partitions: Arc<Partitions>,
    until: u64,
}

impl Slow {
    fn boxed(first: Option<First>, computed: Option<Sender<f32>>) -> Box<dyn Model> {
        Box::new(Slow { model: ToyModel::boxed(), first, computed, bias: 0.0 })
    }
}

impl Model for Slow {
    fn shape(&self) -> &ModelShape {
        self.model.shape()
    }

    fn load(&mut self, tensors: &[&[f32]]) {
        self.bias = tensors[0][0];
        self.model.load(tensors);
    }

    fn train(&mut self, input: &Input, batch_records: usize, gradients: &mut Gradients) -> f64 {
        if let Some(First { begun, partitions, until }) = self.first.take() {
            begun.send(()).unwrap();
            while partitions.with(PartitionId(0), |p| p.version()) < Some(until) {
                std::thread::yield_now();
            }
        }
        self.computed.iter().for_each(|told| told.send(self.bias).unwrap());
        self.model.train(input, batch_records, gradients)
    }

    fn predict(&mut self, input: &Input, probabilities: &mut Vec<f32>) {
        self.model.predict(input, probabilities);
    }
}

/// A worker that does these tasks and leaves.
fn work(world: &Real, number: u32, tasks: &[u32], model: Box<dyn Model>, depth: usize) {
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
        models: vec![model],
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
        scope.spawn(|| work(&world, 1, &[0], Slow::boxed(Some(first), None), 2));
        began.recv().unwrap();
        scope.spawn(|| work(&world, 2, &[1, 3, 5, 7], ToyModel::boxed(), 3));
        scope.spawn(|| work(&world, 3, &[2, 4, 6, 8], ToyModel::boxed(), 1));
    });
    staleness(&world)
}

/// Defect 7 of the original: flags of consistency were parsed and ignored.
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

/// Defect 7 of the original: flags of consistency were parsed and ignored.
/// Goal: by hand: each two batches are computed from the same weights, and these lose a tenth of the mean gradient.
#[test]
fn a_synchronous_step_of_two_is_that_of_the_mean_gradient() {
    let world = Real::gated(SGD, Some(Policy::Steps(2)));
    world.begin();
    work(&world, 1, &[0], ToyModel::boxed(), 3);
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

/// A batch that no gate knows of: as by a permit that died with the gate's server. It raises the bias by a tenth.
fn push_past_the_gate(world: &Real, batch: u64) {
    let header = PushHeader { task: TaskId::train(0, 9), batch, lease: lease(900), records: 1, factor: 1.0 };
    // The first partition last: whoever sees it there finds it in all of them.
    for id in (0..PARTITIONS).rev().map(PartitionId) {
        let pushed = world.partitions.with(id, |p| {
            let ones: Vec<Vec<f32>> = p.tensors().iter().map(|t| vec![-1.0; t.values().len()]).collect();
            let tensors: Vec<&[f32]> = ones.iter().map(Vec::as_slice).collect();
            let tables = [RowGradients { ids: &[], gradients: &[] }];
            let version = p.version();
            p.push(&Push { header, incarnation: 1, version, tables: &tables, tensors: &tensors })
                .unwrap()
                .status
        });
        assert_eq!(pushed, Some(Status::Ok));
    }
}

/// Defect 7 of the original: a gradient that was refused as too stale was lost.
/// Goal: its batch is computed once more, from the weights of then, and what comes out is as if it had begun there.
#[test]
fn a_batch_that_is_refused_as_too_stale_is_computed_and_pushed_again() {
    const OTHERS: u64 = 2;
    let bound = Some(Policy::Bounded(OTHERS - 1));
    let late = Real::gated(SGD, bound);
    late.begin();
    let ((begun, began), (computed, computations)) = (channel(), channel());
    let first = First { begun, partitions: Arc::clone(&late.partitions), until: OTHERS };
    std::thread::scope(|scope| {
        scope.spawn(|| work(&late, 1, &[0], Slow::boxed(Some(first), Some(computed)), 1));
        began.recv().unwrap();
        (0..OTHERS).for_each(|batch| push_past_the_gate(&late, batch));
    });
    let biases: Vec<f32> = computations.iter().collect();
    assert_eq!(biases.len() as u64, BATCHES + 1, "one batch twice");
    assert!((biases[1] - biases[0] - 0.1 * OTHERS as f32).abs() < 1e-6, "from newer weights: {biases:?}");
    for (version, counts) in staleness(&late) {
        assert_eq!(
            (version, counts),
            (BATCHES + OTHERS, vec![BATCHES + OTHERS]),
            "what was refused counts not"
        );
    }

    let after = Real::gated(SGD, bound);
    after.begin();
    (0..OTHERS).for_each(|batch| push_past_the_gate(&after, batch));
    work(&after, 1, &[0], ToyModel::boxed(), 1);
    assert_eq!(late.state(), after.state());
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
