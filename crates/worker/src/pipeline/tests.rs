//! The stages against parameter servers in memory.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use elasticdl_data::Batch;
use elasticdl_spec::TaskId;
use elasticdl_wire::ps::PullMode;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::dedup::{Deduper, Keys};
use crate::stop::Level;
use crate::store::Pulled;
use crate::tests::{
    self as fake, FakePartition, MemoryStore, OnPush, Op, PARTITIONS, RECORDS, Spoil, ToyModel, ToySource,
    World, lease, leased,
};

mod rates;

/// How a pipeline is to be.
struct Setup {
    depth: usize,
    threads: usize,
    batches: u64,
    spoil: BTreeMap<u64, Spoil>,
    on_push: Option<OnPush>,
    stop: Stop,
    schedule: Schedule,
    clip: ClipSpec,
}

impl Default for Setup {
    fn default() -> Self {
        let (spoil, stop) = (BTreeMap::new(), Stop::default());
        let (schedule, clip) = (Schedule::default(), ClipSpec::default());
        Setup { depth: 3, threads: 1, batches: 6, spoil, on_push: None, stop, schedule, clip }
    }
}

/// A running pipeline.
struct Rig {
    pipeline: Pipeline,
    events: UnboundedReceiver<Event>,
    gauges: Arc<Gauges>,
}

impl Setup {
    fn start(self, world: &Arc<Mutex<World>>) -> Rig {
        let (events, happening) = unbounded_channel();
        let gauges = Arc::new(Gauges::default());
        let mut pushes = MemoryStore::new(world);
        pushes.on_push = self.on_push;
        let pipeline = Pipeline::start(Config {
            shape: Arc::new(fake::shape()),
            partitions: PARTITIONS,
            depth: self.depth,
            together: crate::pipeline::Together::Freely,
            read_ahead: 2,
            bad_records_max: 3,
            schedule: self.schedule,
            clip: self.clip,
            models: (0..self.threads).map(|_| ToyModel::boxed()).collect(),
            source: Box::new(ToySource { batches: self.batches, spoil: self.spoil }),
            pulls: MemoryStore::new(world),
            pushes,
            stop: self.stop,
            gauges: Arc::clone(&gauges),
            events,
        })
        .unwrap();
        Rig { pipeline, events: happening, gauges }
    }

    /// Puts tasks through a pipeline: how each ended, and records applied.
    fn run(self, world: &Arc<Mutex<World>>, tasks: &[Arc<LeasedTask>]) -> (BTreeMap<Claim, Outcome>, u64) {
        let mut rig = self.start(world);
        let mut tasks_left = tasks.iter();
        let (mut ends, mut records) = (BTreeMap::new(), 0);
        while ends.len() < tasks.len() {
            match rig.event().expect("the stages run") {
                Event::Wanted => {
                    if let Some(task) = tasks_left.next() {
                        rig.pipeline.give(Arc::clone(task));
                    }
                }
                Event::Applied { records: n, .. } => records += n,
                Event::Ended { claim, outcome } => {
                    assert!(ends.insert(claim, outcome).is_none(), "{claim} ended twice");
                }
                Event::Bad { .. } | Event::Began { .. } => {}
                Event::Broken(error) => panic!("{error}"),
            }
        }
        rig.end();
        (ends, records)
    }
}

impl Rig {
    /// The next event; `None` when the stages have ended.
    fn event(&mut self) -> Option<Event> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let deadline = Duration::from_secs(60);
        runtime
            .block_on(async { tokio::time::timeout(deadline, self.events.recv()).await })
            .expect("an event")
    }

    fn end(mut self) {
        self.pipeline.close();
        while self.event().is_some() {}
        self.pipeline.join();
    }
}

fn train(shard: u32) -> Arc<LeasedTask> {
    leased(TaskId::train(0, shard), 10 + u64::from(shard))
}

/// The end of a task of six batches, so many of them with records.
fn done(batches: u64) -> Outcome {
    let incarnations = vec![1; PARTITIONS as usize];
    Outcome::Done { records: batches * RECORDS as u64, batches: 6, incarnations, scores: None }
}

fn lives(world: &Arc<Mutex<World>>) -> Vec<FakePartition> {
    world.lock().unwrap().partitions.clone()
}

/// The batches of these tasks, each once and in order.
fn in_order(tasks: &[Arc<LeasedTask>], batches: u64) -> Vec<(TaskId, u64)> {
    tasks.iter().flat_map(|t| (0..batches).map(|b| (t.claim.task, b))).collect()
}

/// The same training without any pipeline.
fn serial(tasks: &[Arc<LeasedTask>], batches: u64) -> Vec<FakePartition> {
    let world = World::shared();
    let (mut store, mut model) = (MemoryStore::new(&world), ToyModel::boxed());
    let (mut keys, mut pulled) = (Keys::default(), Pulled::default());
    let mut deduper = Deduper::new(PARTITIONS);
    for task in tasks {
        let Claim { task, lease } = task.claim;
        let Ok(crate::store::Fence::Held { generation, .. }) = store.fence(task, lease) else { panic!() };
        for index in 0..batches {
            let batch = fake::batch(task, index, RECORDS);
            deduper.dedup(&batch.ids, &mut keys);
            store.pull(&keys, PullMode { births: true, tensors: true }, &mut pulled).unwrap();
            let mut gradients = elasticdl_nn::Gradients::default();
            gradients.reset(&fake::shape(), &[keys.unique()]);
            model.load(&[&pulled.tensors[0], &pulled.tensors[1]]);
            let tables = [elasticdl_nn::TableInput { rows: &pulled.rows[0], index: keys.index() }];
            let Batch { records, labels, numeric, .. } = &batch;
            let input = elasticdl_nn::Input { records: *records, numeric, labels, tables: &tables };
            model.train(&input, RECORDS, &mut gradients);
            let header = elasticdl_wire::ps::PushHeader {
                task,
                batch: index,
                lease,
                records: RECORDS as u64,
                factor: 1.0,
            };
            let versions = &pulled.versions;
            let push =
                crate::store::Push { header, generation, keys: &keys, versions, gradients: &gradients };
            store.push(&push).unwrap();
        }
    }
    lives(&world)
}

/// Whether two trained worlds have the same weights, up to `tolerance`.
fn assert_close(one: &[FakePartition], other: &[FakePartition], tolerance: f32) {
    for (a, b) in one.iter().zip(other) {
        assert!(a.rows.keys().eq(b.rows.keys()) && a.tensors.keys().eq(b.tensors.keys()));
        let weights =
            |p: &FakePartition| p.rows.values().chain(p.tensors.values()).flatten().copied().collect();
        let (a, b): (Vec<f32>, Vec<f32>) = (weights(a), weights(b));
        for (x, y) in a.iter().zip(&b) {
            assert!((x - y).abs() <= tolerance, "{x} {y}");
        }
    }
}

#[test]
fn every_batch_is_pushed_once_and_in_order_across_tasks() {
    let tasks = [train(0), train(1), train(2)];
    for depth in [1, 2, 5] {
        let world = World::shared();
        let (ends, records) = Setup { depth, ..Setup::default() }.run(&world, &tasks);
        assert!(ends.values().all(|end| *end == done(6)), "{ends:?}");
        assert_eq!(records, 3 * 6 * RECORDS as u64);
        for partition in lives(&world) {
            assert_eq!(partition.applied, in_order(&tasks, 6), "depth {depth}");
            assert_eq!(partition.records, records);
        }
    }
}

#[test]
fn a_depth_of_one_is_strictly_one_after_the_other_and_bit_identical_to_a_plain_loop() {
    let tasks = [train(0), train(1)];
    let world = World::shared();
    Setup { depth: 1, ..Setup::default() }.run(&world, &tasks);
    assert_close(&lives(&world), &serial(&tasks, 6), 0.0);
    let ops: Vec<Op> =
        world.lock().unwrap().ops.iter().filter(|op| !matches!(op, Op::Fence(_))).copied().collect();
    for pair in ops.chunks(2) {
        assert!(matches!(pair, [Op::Pull, Op::Push(..)]), "{pair:?}");
    }
}

#[test]
fn no_more_batches_are_between_pull_and_push_than_the_pipeline_is_deep() {
    let world = World::shared();
    Setup { depth: 3, batches: 40, ..Setup::default() }.run(&world, &[train(0)]);
    let mut flying = 0;
    for op in &world.lock().unwrap().ops {
        match op {
            Op::Pull => flying += 1,
            Op::Push(..) => flying -= 1,
            Op::Fence(_) => {}
        }
        assert!((0..=3).contains(&flying), "{flying}");
    }
}

#[test]
fn two_threads_give_the_gradients_of_one() {
    let tasks = [train(0), train(1)];
    let train_with = |threads| {
        let world = World::shared();
        Setup { depth: 1, threads, ..Setup::default() }.run(&world, &tasks);
        lives(&world)
    };
    let one = train_with(1);
    for threads in [2, 3, 32] {
        assert_close(&train_with(threads), &one, 1e-5);
    }
}

#[test]
fn a_number_that_is_none_stops_the_task_and_is_named() {
    for threads in [1, 2] {
        let world = World::shared();
        let spoil = BTreeMap::from([(3, Spoil::NotANumber)]);
        let tasks = [train(0)];
        let (ends, _) = Setup { spoil, threads, ..Setup::default() }.run(&world, &tasks);
        let Outcome::Failed { error, batch: 3, fatal: true } = &ends[&tasks[0].claim] else {
            panic!("{ends:?}")
        };
        assert_eq!(error, "the loss is NaN");
        for partition in lives(&world) {
            assert!(partition.applied.iter().all(|(_, batch)| *batch < 3));
            assert!(
                partition.rows.values().chain(partition.tensors.values()).flatten().all(|w| w.is_finite())
            );
        }
    }
}

#[test]
fn a_task_goes_on_from_the_lowest_mark() {
    let world = World::shared();
    let tasks = [train(0)];
    for (partition, mark) in [(0, 4), (1, 2), (2, 3)] {
        let marks = &mut world.lock().unwrap().partitions[partition].marks;
        marks.insert(tasks[0].claim.task, (lease(1), mark));
    }
    let (ends, records) = Setup::default().run(&world, &tasks);
    assert_eq!(ends[&tasks[0].claim], done(6), "all records of the task count, whoever trained them");
    assert_eq!(records, 4 * RECORDS as u64, "those of four batches were done here");
    let applied = lives(&world).into_iter().map(|p| p.applied.iter().map(|(_, b)| *b).collect());
    assert_eq!(applied.collect::<Vec<Vec<u64>>>(), [vec![4, 5], vec![2, 3, 4, 5], vec![3, 4, 5]]);
}

#[test]
fn a_closed_task_is_done_without_a_pull() {
    let world = World::shared();
    let tasks = [train(0)];
    for partition in &mut world.lock().unwrap().partitions {
        partition.marks.insert(tasks[0].claim.task, (lease(1), u64::MAX));
    }
    let (ends, _) = Setup::default().run(&world, &tasks);
    assert_eq!(ends[&tasks[0].claim], done(6));
    assert_eq!(world.lock().unwrap().ops, [Op::Fence(tasks[0].claim.task)]);
}

#[test]
fn a_fenced_worker_pushes_nothing() {
    let world = World::shared();
    let tasks = [train(0), train(1)];
    world.lock().unwrap().partitions[2].marks.insert(tasks[0].claim.task, (lease(99), 0));
    let (ends, _) = Setup::default().run(&world, &tasks);
    assert_eq!(ends[&tasks[0].claim], Outcome::Lost);
    assert_eq!(ends[&tasks[1].claim], done(6), "the next task is another matter");
    assert!(lives(&world).iter().all(|p| p.applied == in_order(&tasks[1..], 6)));
}

#[test]
fn a_worker_fenced_in_the_middle_of_a_task_stops() {
    let world = World::shared();
    let tasks = [train(0)];
    let task = tasks[0].claim.task;
    let on_push: OnPush = Box::new(move |world, header| {
        if header.batch == 2 {
            world.partitions.iter_mut().for_each(|p| p.marks.get_mut(&task).unwrap().0 = lease(99));
        }
    });
    let (ends, _) = Setup { on_push: Some(on_push), ..Setup::default() }.run(&world, &tasks);
    assert_eq!(ends[&tasks[0].claim], Outcome::Lost);
    assert!(lives(&world).iter().all(|p| p.applied == in_order(&tasks, 2)));
}

/// A partition dies in the middle and comes back as it was at the start, or two batches before: the task
/// is redone from there, and every partition has every batch once.
#[test]
fn a_reborn_partition_gets_every_batch_again_and_the_others_none_twice() {
    for (depth, dies_at, saved_at) in [(1, 3, 0), (3, 3, 1), (5, 5, 3), (3, 0, 0)] {
        let world = World::shared();
        let tasks = [train(0), train(1), train(2)];
        let mut saved = None;
        let mut dead = false;
        let on_push: OnPush = Box::new(move |world, header| {
            if header.task.shard != 1 || dead {
                return;
            }
            if header.batch == saved_at {
                saved = Some(world.partitions[1].clone());
            }
            if header.batch == dies_at {
                world.restore(1, saved.as_ref().expect("saved before"));
                dead = true;
            }
        });
        let (ends, _) = Setup { depth, on_push: Some(on_push), ..Setup::default() }.run(&world, &tasks);
        for (claim, end) in &ends {
            let Outcome::Done { records: 120, batches: 6, incarnations, .. } = end else {
                panic!("{ends:?}")
            };
            if claim.task.shard == 1 {
                assert_eq!(*incarnations, [1, 2, 1], "every batch was acknowledged by the second life");
            }
        }
        for partition in lives(&world) {
            let mut applied = partition.applied.clone();
            applied.sort_unstable();
            assert_eq!(applied, in_order(&tasks, 6), "depth {depth}, died at {dies_at}");
        }
    }
}

#[test]
fn an_evaluation_gives_scores_and_changes_nothing() {
    let world = World::shared();
    let tasks = [leased(TaskId::evaluate(0, 0), 5), leased(TaskId::evaluate(0, 1), 6)];
    for threads in [1, 2] {
        let (ends, records) = Setup { threads, ..Setup::default() }.run(&world, &tasks);
        assert_eq!(records, 2 * 6 * RECORDS as u64);
        for end in ends.values() {
            let Outcome::Done { records: 120, batches: 6, scores: Some(scores), incarnations } = end else {
                panic!("{end:?}")
            };
            let scores: serde_json::Value = serde_json::from_str(scores).unwrap();
            assert_eq!(scores["records"], 120);
            assert!(incarnations.is_empty());
        }
    }
    for partition in lives(&world) {
        assert!(partition.rows.is_empty() && partition.version == 0 && partition.marks.is_empty());
    }
}

#[test]
fn an_empty_batch_moves_the_marks() {
    let world = World::shared();
    let tasks = [train(0)];
    let spoil = BTreeMap::from([(5, Spoil::Empty)]);
    let (ends, _) = Setup { spoil, threads: 2, ..Setup::default() }.run(&world, &tasks);
    assert_eq!(ends[&tasks[0].claim], done(5));
    assert!(lives(&world).iter().all(|p| p.applied == in_order(&tasks, 6)));
}

#[test]
fn a_task_without_batches_is_fenced_all_the_same() {
    let world = World::shared();
    let tasks = [train(0)];
    let (ends, _) = Setup { batches: 0, ..Setup::default() }.run(&world, &tasks);
    let incarnations = vec![1; PARTITIONS as usize];
    assert_eq!(ends[&tasks[0].claim], Outcome::Done { records: 0, batches: 0, incarnations, scores: None });
    assert_eq!(world.lock().unwrap().ops, [Op::Fence(tasks[0].claim.task)]);
}

/// A task that was leased before, with batches that are set aside.
fn again(shard: u32, quarantined: &[u64]) -> Arc<LeasedTask> {
    let mut leased = crate::task::Leased::new(train(shard).claim, train(shard).shard.clone());
    (leased.again, leased.quarantined) = (true, quarantined.iter().copied().collect());
    Arc::new(LeasedTask::new(leased))
}

#[test]
fn a_quarantined_batch_moves_the_marks_teaches_nothing_and_is_told() {
    let tasks = [again(0, &[1, 4])];
    let world = World::shared();
    let mut rig = Setup { spoil: BTreeMap::from([(4, Spoil::NotANumber)]), ..Setup::default() }.start(&world);
    let (mut give, mut told) = (tasks.iter(), vec![]);
    let end = loop {
        match rig.event().expect("the stages run") {
            Event::Wanted => {
                give.next().into_iter().for_each(|task| rig.pipeline.give(Arc::clone(task)));
            }
            Event::Bad { total, examples, .. } => told.push((total, examples.join("; "))),
            Event::Ended { outcome, .. } => break outcome,
            Event::Broken(error) => panic!("{error}"),
            Event::Applied { .. } | Event::Began { .. } => {}
        }
    };
    rig.end();
    // More records than may be malformed: that is for the end of the job to judge.
    let first = "batch 1 is quarantined".to_string();
    assert_eq!(told, [(20, first.clone()), (40, format!("{first}; batch 4 is quarantined"))]);
    assert_eq!(end, done(4));
    for partition in lives(&world) {
        assert_eq!(partition.applied, in_order(&tasks, 6));
        assert_eq!(partition.records, 4 * RECORDS as u64);
    }
}

#[test]
fn quarantine_that_does_not_help_ends_the_job() {
    let tasks = [again(0, &[2])];
    let spoil = BTreeMap::from([(2, Spoil::Unreadable)]);
    let (ends, _) = Setup { spoil, ..Setup::default() }.run(&World::shared(), &tasks);
    let Outcome::Failed { batch: 2, fatal: true, .. } = &ends[&tasks[0].claim] else { panic!("{ends:?}") };
}

#[test]
fn the_first_pull_of_a_task_that_was_leased_before_is_told_once() {
    let world = World::shared();
    let tasks = [train(0), again(1, &[])];
    let mut rig = Setup::default().start(&world);
    let (mut give, mut told, mut ended) = (tasks.iter(), vec![], 0);
    while ended < 2 {
        match rig.event().expect("the stages run") {
            Event::Wanted => {
                give.next().into_iter().for_each(|task| rig.pipeline.give(Arc::clone(task)));
            }
            Event::Began { claim } => told.push(claim),
            Event::Ended { .. } => ended += 1,
            _ => {}
        }
    }
    rig.end();
    assert_eq!(told, [tasks[1].claim]);
}

#[test]
fn bad_records_are_told_and_too_many_fail_the_task_with_examples() {
    let world = World::shared();
    let tasks = [train(0)];
    let spoil = BTreeMap::from([(0, Spoil::BadRecords(3)), (4, Spoil::BadRecords(4))]);
    let mut rig = Setup { spoil, ..Setup::default() }.start(&world);
    let mut told = vec![];
    let error = loop {
        match rig.event().expect("the stages run") {
            Event::Wanted => rig.pipeline.give(Arc::clone(&tasks[0])),
            Event::Bad { total, examples, .. } => told.push((total, examples.len())),
            Event::Ended { outcome: Outcome::Failed { error, batch: 4, fatal: true }, .. } => {
                break error;
            }
            Event::Applied { .. } => {}
            other => panic!("{other:?}"),
        }
    };
    rig.end();
    assert_eq!(told, [(3, 3), (7, 5)]);
    assert!(
        error.starts_with(
            "7 malformed records in this task, and data.bad_records_max is 3: a.csv, line 0: no label;"
        ),
        "{error}"
    );
}

#[test]
fn an_unreadable_file_fails_the_task_and_not_the_worker() {
    let world = World::shared();
    let tasks = [train(0)];
    let spoil = BTreeMap::from([(2, Spoil::Unreadable)]);
    let (ends, _) = Setup { spoil, ..Setup::default() }.run(&world, &tasks);
    let Outcome::Failed { error, batch: 2, fatal } = &ends[&tasks[0].claim] else { panic!("{ends:?}") };
    assert!(!fatal, "other batches can be read");
    assert_eq!(error, "cannot read a.csv: entity not found");
}

#[test]
fn a_dropped_task_is_not_pushed_any_more() {
    let world = World::shared();
    let (task, next) = (train(0), train(1));
    let dropped = Arc::clone(&task);
    let on_push: OnPush = Box::new(move |_, header| {
        if header.batch == 1 && header.task == dropped.claim.task {
            dropped.drop_all();
        }
    });
    let mut rig = Setup { on_push: Some(on_push), ..Setup::default() }.start(&world);
    let mut give = [&task, &next].into_iter();
    loop {
        match rig.event().expect("the stages run") {
            Event::Wanted => {
                give.next().into_iter().for_each(|task| rig.pipeline.give(Arc::clone(task)));
            }
            Event::Ended { claim, outcome } => {
                assert_eq!((claim, outcome), (next.claim, done(6)));
                break;
            }
            _ => {}
        }
    }
    rig.end();
    let expected =
        [in_order(std::slice::from_ref(&task), 2), in_order(std::slice::from_ref(&next), 6)].concat();
    assert!(lives(&world).iter().all(|p| p.applied == expected));
}

#[test]
fn a_drain_lands_what_has_taken_off_and_begins_nothing() {
    let world = World::shared();
    let stop = Stop::default();
    let draining = stop.clone();
    let on_push: OnPush = Box::new(move |_, header| {
        if header.batch == 2 {
            draining.raise(Level::Draining);
        }
    });
    let mut rig = Setup { stop, batches: 1000, on_push: Some(on_push), ..Setup::default() }.start(&world);
    let mut applied = 0;
    while let Some(event) = rig.event() {
        match event {
            Event::Wanted => rig.pipeline.give(train(0)),
            Event::Applied { .. } => applied += 1,
            other => panic!("{other:?}"),
        }
    }
    let gauges = rig.gauges.to_json();
    rig.pipeline.join();
    let world = world.lock().unwrap();
    let pulls = world.ops.iter().filter(|op| **op == Op::Pull).count();
    assert_eq!(pulls, applied, "what was pulled was pushed");
    assert!((3..=3 + 3 + 1).contains(&applied), "{applied} batches");
    assert!(gauges.contains(&format!("\"batches\":{applied}")), "{gauges}");
}
