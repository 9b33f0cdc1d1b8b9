use super::*;
use elasticdl_spec::mix::Rng;
use proptest::prelude::*;

const LIMIT: Duration = Duration::from_secs(10);

fn shard(n: u32) -> Shard {
    Shard { path: format!("f{n}"), first: 0, records: Some(100), offset: 0, fingerprint: 1 }
}

fn tasks(epochs: u32, shards: u32, order: Order) -> Tasks {
    let mut tasks = Tasks::new(epochs, order);
    (0..shards).for_each(|n| tasks.add_shard(shard(n)));
    tasks.all_found();
    tasks
}

fn lease_id(n: u64) -> LeaseId {
    LeaseId { term: 1, n }
}

/// Leases at time 0; which task, without whether it is for the first time.
fn lease(tasks: &mut Tasks, n: u64, worker: u32) -> Option<TaskId> {
    tasks.lease(at(0), lease_id(n), WorkerId(worker)).map(|(task, _)| task)
}

/// All records of a task are done, in five batches.
fn finish(tasks: &mut Tasks, task: TaskId, n: u64) -> bool {
    tasks.finish(task, lease_id(n), 100, 5).is_some()
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn every_task_of_every_epoch_is_leased_once() {
    let mut tasks = tasks(3, 7, Order::Shuffled(5));
    let mut seen = BTreeSet::new();
    for n in 1.. {
        let Some((task, again)) = tasks.lease(at(0), lease_id(n), WorkerId(0)) else { break };
        assert!(seen.insert(task) && !again, "{task} leased twice");
        assert!(tasks.finish(task, lease_id(n), 100, 5).is_some());
    }
    assert_eq!(seen.len(), 21);
    assert!(tasks.is_complete());
    assert_eq!((tasks.records(), tasks.records_total()), (2100, Some(2100)));
    assert_eq!(tasks.counts().done, 21);
}

#[test]
fn shuffles_differ_by_epoch_and_seed_and_repeat_by_seed() {
    let order = |seed| {
        let mut tasks = tasks(2, 20, Order::Shuffled(seed));
        (0..40).map_while(|n| lease(&mut tasks, n, 0)).collect::<Vec<_>>()
    };
    let shards = |tasks: &[TaskId]| tasks.iter().map(|t| t.shard).collect::<Vec<_>>();
    let first = order(1);
    assert_eq!(first, order(1));
    assert_ne!(first, order(2));
    assert_ne!(shards(&first[..20]), shards(&first[20..]));
}

/// Goal: positions follow the order of leases, without a gap, whatever the order in which they are asked for.
#[test]
fn a_tasks_position_is_where_it_is_leased_when_nothing_goes_wrong() {
    for order in [Order::Files, Order::Shuffled(5)] {
        let mut tasks = Tasks::new(3, order);
        let records = |n: u32| [100, 7, 64, 33, 1][n as usize % 5];
        for n in 0..9 {
            tasks.add_shard(Shard { records: Some(records(n)), ..shard(n) });
        }
        tasks.all_found();
        let (mut leased, mut before) = (Vec::new(), 0);
        for n in 1.. {
            let Some(task) = lease(&mut tasks, n, 0) else { break };
            finish(&mut tasks, task, n);
            assert_eq!(tasks.position(task, 32).first, before, "{task} in {order:?}");
            leased.push((task, before));
            before += records(task.shard).div_ceil(32);
        }
        assert_eq!((leased.len(), before), (27, 57), "19 batches in 9 shards, thrice");
        for (task, first) in leased.into_iter().rev() {
            assert_eq!(tasks.position(task, 32), Position { first, total: 57 });
        }
    }
}

#[test]
fn first_shards_are_leased_while_the_rest_is_still_being_found() {
    let mut tasks = Tasks::new(2, Order::Files);
    tasks.add_shard(shard(0));
    assert_eq!(lease(&mut tasks, 1, 0), Some(TaskId::train(0, 0)));
    assert_eq!(lease(&mut tasks, 2, 0), None, "the second epoch waits for all shards");
    finish(&mut tasks, TaskId::train(0, 0), 1);
    assert!(!tasks.is_complete());
    tasks.add_shard(shard(1));
    tasks.all_found();
    assert_eq!(lease(&mut tasks, 3, 0), Some(TaskId::train(0, 1)));
    assert_eq!(lease(&mut tasks, 4, 0), Some(TaskId::train(1, 0)));
}

#[test]
fn a_dead_workers_tasks_go_first_to_the_next() {
    let mut tasks = tasks(1, 5, Order::Files);
    let held = lease(&mut tasks, 1, 0).unwrap();
    lease(&mut tasks, 2, 1).unwrap();
    tasks.progress(at(1), held, lease_id(1), 50, 0);
    assert_eq!(tasks.worker_gone(WorkerId(0)), [held]);
    assert_eq!(tasks.lease(at(1), lease_id(3), WorkerId(2)), Some((held, true)));
}

#[test]
fn expired_lease_returns_task_to_queue_and_the_late_report_is_not_counted() {
    let mut tasks = tasks(1, 1, Order::Files);
    let task = lease(&mut tasks, 1, 0).unwrap();
    tasks.progress(at(9), task, lease_id(1), 10, 0);
    assert_eq!(tasks.expire(at(19), LIMIT), []);
    assert_eq!(tasks.expire(at(20), LIMIT), [(task, WorkerId(0))]);
    assert!(!finish(&mut tasks, task, 1));
    assert_eq!(tasks.lease(at(20), lease_id(2), WorkerId(1)), Some((task, true)));
    assert_eq!(tasks.progress(at(21), task, lease_id(1), 10, 0), Held::No);
    assert!(finish(&mut tasks, task, 2));
    assert_eq!(tasks.records(), 100);
}

#[test]
fn a_report_without_a_batch_done_does_not_renew() {
    let mut tasks = tasks(1, 1, Order::Files);
    let task = lease(&mut tasks, 1, 0).unwrap();
    assert_eq!(tasks.progress(at(9), task, lease_id(1), 0, 0), Held::Yes);
    assert_eq!(tasks.expire(at(11), LIMIT).len(), 1);
}

#[test]
fn a_batch_done_renews_the_task_read_ahead_too() {
    let mut tasks = tasks(1, 3, Order::Files);
    let first = lease(&mut tasks, 1, 0).unwrap();
    let ahead = lease(&mut tasks, 2, 0).unwrap();
    let others = lease(&mut tasks, 3, 1).unwrap();
    tasks.progress(at(9), first, lease_id(1), 10, 0);
    assert_eq!(tasks.expire(at(11), LIMIT), [(others, WorkerId(1))]);
    assert!(finish(&mut tasks, ahead, 2));
}

/// Marks of a task in the files of two partitions.
fn marks(of: &[(TaskId, u64, u64)]) -> FileMarks {
    let file = |second: bool| of.iter().map(|(t, a, b)| (*t, if second { *b } else { *a })).collect();
    [(0, file(false)), (1, file(true))].into()
}

#[test]
fn a_checkpoint_covers_what_every_file_has_to_its_end() {
    let mut tasks = tasks(1, 4, Order::Files);
    let held: Vec<TaskId> = (0..3).map(|n| lease(&mut tasks, n, 0).unwrap()).collect();
    finish(&mut tasks, held[0], 0);
    finish(&mut tasks, held[1], 1);
    // The third is at its end in both files, but nobody has said yet where that end is.
    let covered = tasks.covered_by(&marks(&[(held[0], 5, 5), (held[1], 5, 4), (held[2], 5, 5)]));
    assert_eq!((covered.tasks(), covered.records), (1, 100));
    assert!(covered.contains(held[0]));
    tasks.commit(covered);
    assert_eq!((tasks.records(), tasks.counts().done), (200, 2));
}

#[test]
fn what_no_checkpoint_covers_is_opened_again_and_comes_first() {
    let mut tasks = tasks(2, 3, Order::Files);
    for n in 0..4 {
        let task = lease(&mut tasks, n, 0).unwrap();
        finish(&mut tasks, task, n);
    }
    let covered = tasks.covered_by(&marks(&[(TaskId::train(0, 0), 5, 5), (TaskId::train(0, 2), 9, 9)]));
    tasks.commit(covered);
    let held = lease(&mut tasks, 4, 1).unwrap();
    assert_eq!(tasks.reopen().into_keys().collect::<Vec<_>>(), [TaskId::train(0, 1), TaskId::train(1, 0)]);
    assert_eq!(tasks.records(), 200);
    assert_eq!(tasks.lease(at(0), lease_id(5), WorkerId(0)), Some((TaskId::train(0, 1), true)));
    assert_eq!(tasks.lease(at(0), lease_id(6), WorkerId(0)), Some((TaskId::train(1, 0), true)));
    assert_eq!(tasks.lease(at(0), lease_id(7), WorkerId(0)), Some((TaskId::train(1, 2), false)));
    assert!(finish(&mut tasks, held, 4), "who holds a task goes on with it");
}

#[test]
fn rolling_back_ends_leases_too_and_keeps_the_order() {
    let order = Order::Shuffled(3);
    let undisturbed: Vec<TaskId> = {
        let mut tasks = tasks(2, 5, order);
        (0..).map_while(|n| lease(&mut tasks, n, 0)).collect()
    };
    let mut tasks = tasks(2, 5, order);
    for n in 0..6 {
        let task = lease(&mut tasks, n, 0).unwrap();
        finish(&mut tasks, task, n);
        if n == 1 {
            let all: Vec<_> = undisturbed[..2].iter().map(|t| (*t, 5, 5)).collect();
            let covered = tasks.covered_by(&marks(&all));
            tasks.commit(covered);
        }
    }
    let given_back = lease(&mut tasks, 6, 0).unwrap();
    assert_eq!(tasks.give_back(given_back, lease_id(6)), Held::Yes);
    lease(&mut tasks, 7, 0).unwrap();
    tasks.roll_back();
    let again: Vec<TaskId> = (8..).map_while(|n| lease(&mut tasks, n, 0)).collect();
    assert_eq!(again, undisturbed[2..]);
}

#[test]
fn a_lease_that_never_arrived_is_given_again() {
    let mut tasks = tasks(1, 3, Order::Files);
    let first = lease(&mut tasks, 1, 0).unwrap();
    let lost = lease(&mut tasks, 2, 0).unwrap();
    let others = lease(&mut tasks, 3, 1).unwrap();
    assert_eq!(tasks.keep_only(WorkerId(0), &BTreeSet::from([lease_id(1)])), [lost]);
    assert_eq!(lease(&mut tasks, 4, 0), Some(lost));
    assert!(finish(&mut tasks, first, 1) && finish(&mut tasks, others, 3) && !finish(&mut tasks, lost, 2));
}

#[test]
fn a_ledger_brings_back_what_is_done_leased_and_waiting() {
    let lease_of = |n| (lease_id(n), WorkerId(4));
    let mut book = Book::default();
    book.covered.add(TaskId::train(0, 0), Finished { records: 100, ..Finished::default() });
    book.recent.insert(TaskId::train(0, 2), Finished { records: 90, bad_records: 10, batches: 5 });
    book.leased.insert(TaskId::train(1, 1), lease_of(7));
    let mut tasks = Tasks::new(2, Order::Files);
    tasks.load(at(0), &book);
    (0..3).for_each(|n| tasks.add_shard(shard(n)));
    tasks.all_found();
    assert_eq!((tasks.records(), tasks.bad_records()), (190, 10));
    let waiting: Vec<TaskId> = (8..).map_while(|n| lease(&mut tasks, n, 0)).collect();
    assert_eq!(waiting, [TaskId::train(0, 1), TaskId::train(1, 0), TaskId::train(1, 2)]);
    assert_eq!(tasks.is_held(TaskId::train(1, 1), lease_id(7)), Held::Yes);
}

#[test]
fn bad_records_are_counted_once_however_often_a_task_is_taken() {
    let mut tasks = tasks(1, 1, Order::Files);
    let task = lease(&mut tasks, 1, 0).unwrap();
    tasks.progress(at(0), task, lease_id(1), 10, 3);
    tasks.worker_gone(WorkerId(0));
    lease(&mut tasks, 2, 1).unwrap();
    tasks.progress(at(0), task, lease_id(2), 10, 3);
    assert_eq!(tasks.bad_records(), 3);
    tasks.finish(task, lease_id(2), 97, 5);
    assert_eq!((tasks.bad_records(), tasks.records()), (3, 97));
}

proptest! {
    /// Whatever dies, expires or is given back in whatever order, each task is finished exactly once.
    #[test]
    fn any_history_ends_with_each_task_done_once(seed: u64, shards in 1u32..12, epochs in 1u32..4) {
        let mut rng = Rng::new(seed);
        let mut tasks = tasks(epochs, shards, Order::Shuffled(seed));
        let mut held: Vec<(TaskId, LeaseId, WorkerId)> = Vec::new();
        let (mut now, mut n, mut finished) = (Duration::ZERO, 0, BTreeSet::new());
        for step in 0..10_000 {
            now += Duration::from_millis(rng.below(4_000));
            let quiet = step > 2_000;
            match rng.below(if quiet { 2 } else { 5 }) {
                0 => {
                    n += 1;
                    let worker = WorkerId(rng.below(4) as u32);
                    if let Some((task, _)) = tasks.lease(now, lease_id(n), worker) {
                        prop_assert!(!finished.contains(&task));
                        held.push((task, lease_id(n), worker));
                    }
                }
                1 if !held.is_empty() => {
                    let (task, id, _) = held.swap_remove(rng.below(held.len() as u64) as usize);
                    if tasks.finish(task, id, 100, 5).is_some() {
                        prop_assert!(finished.insert(task), "finished twice");
                    }
                }
                2 => { tasks.worker_gone(WorkerId(rng.below(4) as u32)); }
                3 => { tasks.expire(now, LIMIT); }
                4 if !held.is_empty() => {
                    let (task, id, _) = held[rng.below(held.len() as u64) as usize];
                    tasks.give_back(task, id);
                }
                _ => {}
            }
            if quiet { tasks.expire(now, LIMIT); }
            if tasks.is_complete() { break; }
        }
        prop_assert!(tasks.is_complete());
        prop_assert_eq!(tasks.records(), u64::from(epochs * shards) * 100);
    }
}

#[test]
fn of_a_dead_workers_tasks_the_one_it_was_at_comes_first() {
    let mut tasks = tasks(1, 9, Order::Shuffled(3));
    let held: Vec<TaskId> = (0..4).map(|n| lease(&mut tasks, n, u32::from(n == 1)).unwrap()).collect();
    assert_eq!(tasks.worker_gone(WorkerId(0)).len(), 3);
    let again: Vec<TaskId> = (4..7).map(|n| lease(&mut tasks, n, 1).unwrap()).collect();
    assert_eq!(again, [held[0], held[2], held[3]]);
}

/// Goal: after a master's death tasks are opened again before the files are indexed again. They wait once,
/// and not before their shard is known.
#[test]
fn a_task_that_waits_before_its_shard_is_found_waits_once() {
    let mut book = Book::default();
    for shard in 0..3 {
        let finished = Finished { records: 100, bad_records: 0, batches: 5 };
        book.recent.insert(TaskId::train(0, shard), finished);
    }
    book.leased.insert(TaskId::train(0, 3), (lease_id(1), WorkerId(7)));
    let mut tasks = Tasks::new(1, Order::Files);
    tasks.load(at(0), &book);
    assert_eq!(tasks.keep_workers(&[]), [TaskId::train(0, 3)]);
    assert_eq!(tasks.reopen().len(), 3);
    assert_eq!(lease(&mut tasks, 2, 0), None, "no shard is known yet");
    (0..4).for_each(|n| tasks.add_shard(shard(n)));
    tasks.all_found();
    assert_eq!(tasks.counts().todo, 4);
    let leased: Vec<u32> = (3..9).map_while(|n| lease(&mut tasks, n, 0)).map(|task| task.shard).collect();
    assert_eq!(leased, [3, 0, 1, 2], "the one that somebody was at goes first");
}
