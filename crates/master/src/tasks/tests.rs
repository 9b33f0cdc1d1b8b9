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

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn every_task_of_every_epoch_is_leased_once() {
    let mut tasks = tasks(3, 7, Order::Shuffled(5));
    let mut seen = BTreeSet::new();
    for n in 1.. {
        let Some(task) = tasks.lease(at(0), lease_id(n), WorkerId(0)) else { break };
        assert!(seen.insert(task), "{task} leased twice");
        assert_eq!(tasks.finish(task, lease_id(n), 100), Held::Yes);
    }
    assert_eq!(seen.len(), 21);
    assert!(tasks.is_complete());
    assert_eq!((tasks.records(), tasks.records_total()), (2100, Some(2100)));
    assert_eq!(tasks.done().epochs[&2], [(0, 6)]);
}

#[test]
fn shuffles_differ_by_epoch_and_seed_and_repeat_by_seed() {
    let order = |seed| {
        let mut tasks = tasks(2, 20, Order::Shuffled(seed));
        (0..40).map_while(|n| tasks.lease(at(0), lease_id(n), WorkerId(0))).collect::<Vec<_>>()
    };
    let shards = |tasks: &[TaskId]| tasks.iter().map(|t| t.shard).collect::<Vec<_>>();
    let first = order(1);
    assert_eq!(first, order(1));
    assert_ne!(first, order(2));
    assert_ne!(shards(&first[..20]), shards(&first[20..]));
}

#[test]
fn first_shards_are_leased_while_the_rest_is_still_being_found() {
    let mut tasks = Tasks::new(2, Order::Files);
    tasks.add_shard(shard(0));
    assert_eq!(tasks.lease(at(0), lease_id(1), WorkerId(0)), Some(TaskId::train(0, 0)));
    assert_eq!(tasks.lease(at(0), lease_id(2), WorkerId(0)), None, "the second epoch waits for all shards");
    tasks.finish(TaskId::train(0, 0), lease_id(1), 100);
    assert!(!tasks.is_complete());
    tasks.add_shard(shard(1));
    tasks.all_found();
    assert_eq!(tasks.lease(at(0), lease_id(3), WorkerId(0)), Some(TaskId::train(0, 1)));
    assert_eq!(tasks.lease(at(0), lease_id(4), WorkerId(0)), Some(TaskId::train(1, 0)));
}

#[test]
fn a_dead_workers_tasks_go_first_to_the_next() {
    let mut tasks = tasks(1, 5, Order::Files);
    let held = tasks.lease(at(0), lease_id(1), WorkerId(0)).unwrap();
    tasks.lease(at(0), lease_id(2), WorkerId(1)).unwrap();
    tasks.progress(at(1), held, lease_id(1), 50, 0);
    assert_eq!(tasks.worker_gone(WorkerId(0)), [held]);
    assert_eq!(tasks.lease(at(1), lease_id(3), WorkerId(2)), Some(held));
}

#[test]
fn expired_lease_returns_task_to_queue_and_the_late_report_is_not_counted() {
    let mut tasks = tasks(1, 1, Order::Files);
    let task = tasks.lease(at(0), lease_id(1), WorkerId(0)).unwrap();
    tasks.progress(at(9), task, lease_id(1), 10, 0);
    assert_eq!(tasks.expire(at(19), LIMIT), []);
    assert_eq!(tasks.expire(at(20), LIMIT), [(task, WorkerId(0))]);
    assert_eq!(tasks.finish(task, lease_id(1), 100), Held::No);
    assert_eq!(tasks.lease(at(20), lease_id(2), WorkerId(1)), Some(task));
    assert_eq!(tasks.progress(at(21), task, lease_id(1), 10, 0), Held::No);
    assert_eq!(tasks.finish(task, lease_id(2), 100), Held::Yes);
    assert_eq!(tasks.records(), 100);
}

#[test]
fn a_report_without_a_batch_done_does_not_renew() {
    let mut tasks = tasks(1, 1, Order::Files);
    let task = tasks.lease(at(0), lease_id(1), WorkerId(0)).unwrap();
    assert_eq!(tasks.progress(at(9), task, lease_id(1), 0, 0), Held::Yes);
    assert_eq!(tasks.expire(at(11), LIMIT).len(), 1);
}

#[test]
fn a_batch_done_renews_the_task_read_ahead_too() {
    let mut tasks = tasks(1, 3, Order::Files);
    let first = tasks.lease(at(0), lease_id(1), WorkerId(0)).unwrap();
    let ahead = tasks.lease(at(0), lease_id(2), WorkerId(0)).unwrap();
    let others = tasks.lease(at(0), lease_id(3), WorkerId(1)).unwrap();
    tasks.progress(at(9), first, lease_id(1), 10, 0);
    assert_eq!(tasks.expire(at(11), LIMIT), [(others, WorkerId(1))]);
    assert_eq!(tasks.finish(ahead, lease_id(2), 100), Held::Yes);
}

#[test]
fn restoring_makes_what_came_after_the_checkpoint_wait_again() {
    let mut tasks = tasks(2, 4, Order::Files);
    for n in 0..6 {
        let task = tasks.lease(at(0), lease_id(n), WorkerId(0)).unwrap();
        tasks.finish(task, lease_id(n), 100);
    }
    let checkpoint = tasks.done().clone();
    let lost = tasks.lease(at(0), lease_id(6), WorkerId(0)).unwrap();
    tasks.finish(lost, lease_id(6), 100);
    tasks.restore(checkpoint);
    assert_eq!(tasks.records(), 600);
    let rest: Vec<TaskId> = (7..).map_while(|n| tasks.lease(at(0), lease_id(n), WorkerId(0))).collect();
    assert_eq!(rest, [TaskId::train(1, 2), TaskId::train(1, 3)]);
}

#[test]
fn bad_records_are_counted_once_however_often_a_task_is_taken() {
    let mut tasks = tasks(1, 1, Order::Files);
    let task = tasks.lease(at(0), lease_id(1), WorkerId(0)).unwrap();
    tasks.progress(at(0), task, lease_id(1), 10, 3);
    tasks.worker_gone(WorkerId(0));
    tasks.lease(at(0), lease_id(2), WorkerId(1)).unwrap();
    tasks.progress(at(0), task, lease_id(2), 10, 3);
    assert_eq!(tasks.bad_records(), 3);
    tasks.finish(task, lease_id(2), 97);
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
                    if let Some(task) = tasks.lease(now, lease_id(n), worker) {
                        prop_assert!(!finished.contains(&task));
                        held.push((task, lease_id(n), worker));
                    }
                }
                1 if !held.is_empty() => {
                    let (task, id, _) = held.swap_remove(rng.below(held.len() as u64) as usize);
                    if tasks.finish(task, id, 100) == Held::Yes {
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
