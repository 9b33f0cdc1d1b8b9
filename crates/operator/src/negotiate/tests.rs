//! What people may rely on, by example, and the small language that all tests of the negotiation speak.

use super::*;

/// A pod of so many whole processors and nothing else.
pub(super) fn cpus(n: u64) -> Resources {
    Resources { cpu_millis: n * 1000, ..Resources::default() }
}

pub(super) fn gpus(cpus_each: u64, n: u64) -> Resources {
    Resources { extended: [("nvidia.com/gpu".to_owned(), n)].into(), ..cpus(cpus_each) }
}

/// A cluster of one node for each of these numbers of processors.
pub(super) fn cluster(nodes: &[u64]) -> Cluster {
    Cluster { nodes: nodes.iter().map(|&n| cpus(n)).collect() }
}

/// A job of 1 to 10 workers of one processor each and no other pods.
pub(super) fn job(name: &str, arrival: u64) -> Job {
    Job {
        name: name.to_owned(),
        priority: 0,
        weight: NonZeroU32::MIN,
        arrival,
        min: 1,
        max: 10,
        useful: u32::MAX,
        worker: cpus(1),
        overhead: Vec::new(),
        held: 0,
    }
}

pub(super) fn weight(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

/// Negotiates, and lets each job hold what it was granted.
pub(super) fn settle(cluster: &Cluster, jobs: &mut [Job]) -> Vec<Grant> {
    let grants = negotiate(cluster, jobs);
    for job in jobs.iter_mut() {
        job.held = grants.iter().find(|grant| grant.job == job.name).unwrap().workers;
    }
    grants
}

fn workers(cluster: &Cluster, jobs: &[Job]) -> Vec<u32> {
    negotiate(cluster, jobs).iter().map(|grant| grant.workers).collect()
}

fn said(cluster: &Cluster, jobs: &[Job]) -> Vec<String> {
    negotiate(cluster, jobs).iter().map(|g| format!("{} {}: {}", g.job, g.workers, g.reason)).collect()
}

#[test]
fn room_is_evened_out_and_what_one_cannot_use_goes_to_the_others() {
    let jobs = [job("a", 0), job("b", 1), Job { useful: 2, ..job("c", 2) }];
    assert_eq!(
        said(&cluster(&[8, 5]), &jobs),
        [
            "a 6: shares the room with 2 other jobs of its priority",
            "b 5: shares the room with 2 other jobs of its priority",
            "c 2: has all the workers it can use",
        ]
    );
}

#[test]
fn a_share_is_in_proportion_to_the_weight() {
    let jobs = [job("a", 0), Job { weight: weight(3), ..job("b", 1) }];
    assert_eq!(workers(&cluster(&[12]), &jobs), [3, 9]);
}

#[test]
fn a_share_is_of_the_resource_that_a_job_needs_most_of() {
    let nodes = vec![gpus(16, 4), gpus(16, 4)];
    let jobs = [Job { worker: gpus(2, 1), ..job("gpu", 0) }, Job { max: 40, ..job("cpu", 1) }];
    assert_eq!(
        workers(&Cluster { nodes }, &jobs),
        [6, 20],
        "6 of 8 GPUs are worth about 20 of 32 processors"
    );
}

#[test]
fn pods_without_a_gpu_leave_nodes_with_one_to_those_who_need_it() {
    let nodes = vec![gpus(4, 4), cpus(4)];
    let high = Job { priority: 1, max: 4, ..job("cpu", 1) };
    let low = Job { worker: gpus(1, 1), ..job("gpu", 0) };
    assert_eq!(workers(&Cluster { nodes }, &[high, low]), [4, 4]);
}

#[test]
fn a_late_job_is_let_into_a_full_cluster_at_once() {
    let (nodes, overhead) = (cluster(&[8, 8, 8]), vec![cpus(1); 3]);
    let mut jobs = vec![Job { overhead: overhead.clone(), max: 21, ..job("early", 0) }];
    assert_eq!(settle(&nodes, &mut jobs)[0].workers, 21);
    jobs.push(Job { overhead, min: 4, ..job("late", 1) });
    assert_eq!(workers(&nodes, &jobs), [9, 9]);
}

#[test]
fn those_furthest_above_their_share_make_room_and_none_goes_below_its_min() {
    let nodes = cluster(&[12]);
    let mut jobs = vec![Job { min: 4, ..job("a", 0) }, Job { min: 2, ..job("b", 1) }];
    jobs[0].held = 4;
    jobs[1].held = 8;
    jobs.push(Job { min: 3, ..job("late", 2) });
    assert_eq!(workers(&nodes, &jobs), [4, 4, 4]);
    jobs[2].min = 6;
    assert_eq!(workers(&nodes, &jobs), [4, 2, 6]);
}

#[test]
fn where_minima_do_not_fit_the_last_to_come_waits_and_nobody_runs_below_its_min() {
    let nodes = cluster(&[8]);
    let mut jobs =
        vec![Job { min: 4, ..job("a", 0) }, Job { min: 3, ..job("b", 1) }, Job { min: 3, ..job("c", 2) }];
    let told = said(&nodes, &jobs);
    assert_eq!(
        told,
        [
            "a 4: has its least number of workers: there is no room for more",
            "b 4: shares the room with 1 other job of its priority",
            "c 0: waits: its least number of workers does not fit beside jobs that came first",
        ]
    );
    settle(&nodes, &mut jobs);
    jobs.remove(0);
    assert_eq!(workers(&nodes, &jobs), [4, 4], "one has ended");
}

#[test]
fn a_small_job_passes_a_large_one_only_where_that_costs_the_large_one_nothing() {
    let nodes = cluster(&[8]);
    let mut jobs = vec![Job { min: 5, ..job("a", 0) }, Job { min: 6, ..job("large", 1) }];
    settle(&nodes, &mut jobs);
    jobs.push(Job { min: 2, ..job("x", 2) });
    jobs.push(Job { min: 1, ..job("y", 3) });
    assert_eq!(
        said(&nodes, &jobs),
        [
            "a 5: has its least number of workers: there is no room for more",
            "large 0: waits: its least number of workers does not fit beside jobs that came first",
            "x 3: shares the room with 1 other job of its priority",
            "y 0: waits behind job \"large\", which came first and needs the room",
        ]
    );
    settle(&nodes, &mut jobs);
    jobs.remove(0);
    assert_eq!(workers(&nodes, &jobs), [6, 2, 0]);
}

#[test]
fn a_job_that_runs_is_not_sent_away_for_an_equal_that_came_first() {
    let late = Job { min: 5, held: 6, ..job("late", 1) };
    assert_eq!(workers(&cluster(&[8]), &[Job { min: 6, ..job("early", 0) }, late]), [0, 8]);
}

#[test]
fn a_job_that_can_never_run_holds_nobody_up() {
    let nodes = cluster(&[4, 4]);
    let jobs = [Job { worker: cpus(5), ..job("wide", 0) }, job("b", 1)];
    assert_eq!(
        said(&nodes, &jobs),
        [
            "wide 0: cannot start: its least number of workers would not fit into the cluster if it were alone",
            "b 8: has all the room there is",
        ]
    );
}

#[test]
fn higher_priority_is_served_first_and_lower_gets_what_is_left() {
    let nodes = cluster(&[12]);
    let mut low = vec![Job { min: 3, ..job("low", 0) }];
    settle(&nodes, &mut low);
    let high = Job { priority: 1, ..job("high", 1) };
    let jobs = [low[0].clone(), high];
    assert_eq!(
        said(&nodes, &jobs),
        ["high 10: has all the workers it can use", "low 0: waits: jobs of higher priority need the room"]
    );
}

#[test]
fn a_worker_needs_a_node_that_holds_it() {
    let nodes = cluster(&[3, 3, 3]);
    assert_eq!(workers(&nodes, &[Job { worker: cpus(2), ..job("a", 0) }]), [3]);
    assert_eq!(workers(&nodes, &[Job { worker: cpus(2), ..job("a", 0) }, job("b", 1)]), [2, 5]);
}

#[test]
fn after_a_loss_of_nodes_the_last_to_come_waits_again() {
    let mut jobs = vec![Job { min: 4, ..job("a", 0) }, Job { min: 4, ..job("b", 1) }];
    settle(&cluster(&[4, 4]), &mut jobs);
    assert_eq!(workers(&cluster(&[7]), &jobs), [7, 0]);
}

#[test]
fn one_worker_more_than_an_equal_is_kept_and_two_are_not() {
    let nodes = cluster(&[9]);
    let mut jobs = vec![Job { useful: 4, ..job("a", 0) }, job("b", 1)];
    settle(&nodes, &mut jobs);
    assert_eq!((jobs[0].held, jobs[1].held), (4, 5));
    jobs[0].useful = 10;
    assert_eq!(
        workers(&nodes, &jobs),
        [4, 5],
        "not even though the first would get the odd one in a new split"
    );
    (jobs[0].held, jobs[1].held) = (3, 6);
    assert_eq!(workers(&nodes, &jobs), [4, 5]);
}

#[test]
fn limits_that_contradict_each_other_end_in_at_least_one_and_at_most_max_workers() {
    let nodes = cluster(&[9]);
    let job = |min, max, useful| Job { min, max, useful, ..job("a", 0) };
    for (job, expected) in [(job(0, 0, 0), 1), (job(5, 3, 9), 3), (job(3, 5, 1), 3), (job(0, 5, 2), 2)] {
        assert_eq!(workers(&nodes, &[job]), [expected]);
    }
    assert_eq!(workers(&Cluster::default(), &[job(1, 1, 1)]), [0]);
    assert_eq!(negotiate(&nodes, &[]), []);
}

#[test]
fn workers_that_ask_for_nothing_are_granted_to_the_last_at_once() {
    let all = Job { max: u32::MAX, worker: Resources::default(), ..job("a", 0) };
    assert_eq!(
        workers(&cluster(&[1]), &[all.clone(), Job { name: "b".into(), ..all }]),
        [u32::MAX, u32::MAX]
    );
}
