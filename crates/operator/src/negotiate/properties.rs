//! What holds for any cluster and any jobs.
//!
//! Two kinds of worlds allow an exact judgement from outside, because fitting is a matter of sums there: one
//! node with pods of any size, and many nodes with pods of one processor. The third kind mixes everything,
//! and there a placement is looked for by trying them all.

use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;

use super::tests::{cluster, cpus, settle};
use super::*;

#[derive(Debug, Clone)]
struct World {
    cluster: Cluster,
    jobs: Vec<Job>,
}

impl World {
    /// Each job with what it is granted, first served first.
    fn granted(&self) -> Vec<(&Job, u32)> {
        let job = |name: &str| self.jobs.iter().find(|job| job.name == name).unwrap();
        negotiate(&self.cluster, &self.jobs).iter().map(|g| (job(&g.job), g.workers)).collect()
    }

    /// Whether these fit, where that is a matter of sums.
    fn holds(&self, granted: &[(&Job, u32)]) -> bool {
        let pods = all_pods(granted);
        Resources::sum(&pods).times_in(&Resources::sum(&self.cluster.nodes)) > 0 || pods.is_empty()
    }

    /// The same jobs before any of them has started.
    fn fresh(mut self) -> World {
        self.jobs.iter_mut().for_each(|job| job.held = 0);
        self
    }
}

fn floor(job: &Job) -> u32 {
    job.min
}

fn cap(job: &Job) -> u32 {
    job.max.min(job.useful).max(job.min)
}

fn all_pods(granted: &[(&Job, u32)]) -> Vec<Resources> {
    let pods = |&(job, n): &(&Job, u32)| {
        let workers = std::iter::repeat_n(job.worker.clone(), n as usize);
        workers.chain(job.overhead.iter().filter(|_| n > 0).cloned()).collect::<Vec<_>>()
    };
    granted.iter().flat_map(pods).collect()
}

/// Whether there is any placement, by trying all of them; equal pods in the order of nodes only.
fn placeable(nodes: &mut [Resources], pods: &[Resources], first: usize) -> bool {
    let Some((pod, rest)) = pods.split_first() else { return true };
    (first..nodes.len()).any(|n| {
        if pod.times_in(&nodes[n]) == 0 {
            return false;
        }
        let before = nodes[n].clone();
        nodes[n].take(pod, 1);
        let found = placeable(nodes, rest, if rest.first() == Some(pod) { n } else { 0 });
        nodes[n] = before;
        found
    })
}

fn resources(cpu: Range<u64>, memory: Range<u64>, gpus: u64) -> BoxedStrategy<Resources> {
    let extended = |gpus| if gpus > 0 { [("nvidia.com/gpu".to_owned(), gpus)].into() } else { [].into() };
    (cpu, memory, 0..=gpus)
        .prop_map(move |(cpu, memory_bytes, gpus)| Resources {
            cpu_millis: cpu * 500,
            memory_bytes,
            extended: extended(gpus),
        })
        .boxed()
}

fn a_job(pod: BoxedStrategy<Resources>) -> impl Strategy<Value = Job> {
    let overhead = vec(pod.clone(), 0..3);
    let held = prop_oneof![Just(0), 1..9u32];
    ((0..2i32, 1..4u32, 0..5u64), (1..4u32, 0..8u32, 0..12u32), (pod, overhead, held)).prop_map(
        |((priority, weight, arrival), (min, more, useful), (worker, overhead, held))| Job {
            name: String::new(),
            priority,
            weight: NonZeroU32::new(weight).unwrap(),
            arrival,
            min,
            max: min + more,
            useful,
            worker,
            overhead,
            held,
        },
    )
}

fn world(nodes: BoxedStrategy<Vec<Resources>>, pod: BoxedStrategy<Resources>) -> BoxedStrategy<World> {
    let named = |(nodes, mut jobs): (_, Vec<Job>)| {
        jobs.iter_mut().enumerate().for_each(|(n, job)| job.name = format!("job-{n}"));
        World { cluster: Cluster { nodes }, jobs }
    };
    (nodes, vec(a_job(pod), 1..7)).prop_map(named).boxed()
}

fn one_node() -> BoxedStrategy<World> {
    world(vec(resources(8..60, 8..60, 8), 1).boxed(), resources(1..5, 1..5, 1))
}

fn unit_pods() -> BoxedStrategy<World> {
    let nodes = vec(1..9u64, 1..6).prop_map(|nodes| cluster(&nodes).nodes);
    world(nodes.boxed(), Just(cpus(1)).boxed())
}

fn exact() -> BoxedStrategy<World> {
    prop_oneof![one_node(), unit_pods()].boxed()
}

fn mixed() -> BoxedStrategy<World> {
    world(vec(resources(2..12, 2..12, 3), 1..4).boxed(), resources(1..5, 1..5, 1))
}

fn any_world() -> BoxedStrategy<World> {
    prop_oneof![one_node(), unit_pods(), mixed()].boxed()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn grants_are_within_limits_and_can_be_placed(world in any_world()) {
        let granted = world.granted();
        for &(job, n) in &granted {
            prop_assert!(n == 0 || (floor(job)..=cap(job)).contains(&n), "{} has {n}", job.name);
        }
        let mut pods = all_pods(&granted);
        pods.sort_by(|a, b| b.cmp(a));
        prop_assert!(placeable(&mut world.cluster.nodes.clone(), &pods, 0));
    }

    #[test]
    fn no_job_lacks_a_worker_that_would_fit(world in exact()) {
        let granted = world.granted();
        for n in (0..granted.len()).filter(|&n| (1..cap(granted[n].0)).contains(&granted[n].1)) {
            let mut more = granted.clone();
            more[n].1 += 1;
            prop_assert!(!world.holds(&more), "{} could have one more", granted[n].0.name);
        }
    }

    #[test]
    fn asking_again_changes_nothing(world in any_world()) {
        let World { cluster, mut jobs } = world;
        let first = settle(&cluster, &mut jobs);
        prop_assert_eq!(first, negotiate(&cluster, &jobs));
    }

    #[test]
    fn the_order_of_jobs_and_nodes_says_nothing(world in any_world(), seed: u64) {
        let mut shuffled = world.clone();
        let mut rng = elasticdl_spec::mix::Rng::new(seed);
        for n in (1..shuffled.jobs.len()).rev() {
            shuffled.jobs.swap(n, rng.below(n as u64 + 1) as usize);
        }
        shuffled.cluster.nodes.reverse();
        prop_assert_eq!(negotiate(&world.cluster, &world.jobs), negotiate(&shuffled.cluster, &shuffled.jobs));
    }

    /// Nobody runs below its `min` and nobody that could be let in waits: of those that wait and would fit
    /// alone, the first to have come does not fit beside the `min` of those that run.
    #[test]
    fn who_waits_has_no_room(world in exact()) {
        let granted = world.granted();
        for equals in granted.chunk_by(|a, b| a.0.priority == b.0.priority) {
            let above: Vec<_> = granted.iter().copied().filter(|g| g.0.priority > equals[0].0.priority).collect();
            let least = equals.iter().filter(|g| g.1 > 0).map(|g| (g.0, floor(g.0)));
            let with = |job| above.iter().copied().chain([(job, floor(job))]).collect::<Vec<_>>();
            if let Some(first) = equals.iter().find(|g| g.1 == 0 && world.holds(&with(g.0))) {
                let all: Vec<_> = with(first.0).into_iter().chain(least).collect();
                prop_assert!(!world.holds(&all), "{} could run", first.0.name);
            }
        }
    }

    #[test]
    fn who_runs_goes_on_where_those_that_run_fit(world in exact()) {
        let World { cluster, mut jobs } = world;
        jobs.iter_mut().for_each(|job| job.priority = 0);
        let world = World { cluster, jobs };
        let running: Vec<_> = world.jobs.iter().filter(|job| job.held > 0).map(|job| (job, floor(job))).collect();
        let fit = world.holds(&running);
        for (job, n) in world.granted().into_iter().filter(|(job, _)| job.held > 0) {
            prop_assert!(!fit || n >= floor(job), "{} was sent away", job.name);
        }
    }

    /// Jobs come one after the other. Whoever waits would run if those that came before it were gone:
    /// whatever else has been let in since.
    #[test]
    fn a_job_waits_only_for_those_that_came_before_it(world in any_world()) {
        let World { cluster, jobs } = world.fresh();
        let mut there: Vec<Job> = Vec::new();
        for (arrival, job) in jobs.into_iter().enumerate() {
            there.push(Job { arrival: arrival as u64, priority: 0, ..job });
            settle(&cluster, &mut there);
        }
        for waiting in there.iter().filter(|job| job.held == 0) {
            let alone = negotiate(&cluster, std::slice::from_ref(waiting))[0].workers > 0;
            let rest: Vec<Job> = there.iter().filter(|job| job.arrival >= waiting.arrival).cloned().collect();
            let grants = negotiate(&cluster, &rest);
            let runs = grants.iter().any(|g| g.job == waiting.name && g.workers > 0);
            prop_assert_eq!(runs, alone, "{}", &waiting.name);
        }
    }

    #[test]
    fn a_late_job_gets_its_min_at_once_where_the_others_can_spare_it(world in exact()) {
        let World { cluster, mut jobs } = world;
        let mut late = jobs.pop().unwrap();
        (late.held, late.arrival) = (0, u64::MAX);
        jobs.iter_mut().for_each(|job| job.priority = late.priority);
        settle(&cluster, &mut jobs);
        jobs.retain(|job| job.held > 0);
        let running = jobs.clone();
        jobs.push(late);
        let world = World { cluster, jobs };
        let least: Vec<_> = world.jobs.iter().map(|job| (job, floor(job))).collect();
        let granted = world.granted();
        let late = granted.last().unwrap();
        prop_assert_eq!(late.1 > 0, world.holds(&least), "{:?}", granted);
        for before in running {
            let now = granted.iter().find(|(job, _)| job.name == before.name).unwrap();
            prop_assert!(now.1 >= floor(now.0));
        }
    }

    /// Whatever was held before, no job is more than a worker ahead of an equal that could use one more.
    #[test]
    fn shares_differ_by_a_worker_at_most(world in unit_pods()) {
        let granted = world.granted();
        for (ahead, more) in granted.iter().filter(|(job, n)| *n > floor(job)) {
            let equal = |g: &&(&Job, u32)| g.0.priority == ahead.priority && (1..cap(g.0)).contains(&g.1);
            for (behind, less) in granted.iter().filter(equal) {
                let share = |job: &Job, n: u32| f64::from(n) / f64::from(job.weight.get());
                let enough = share(ahead, more - 1) < share(behind, less + 1);
                prop_assert!(enough, "{} has {more}, {} only {less}", ahead.name, behind.name);
            }
        }
    }

    /// In a new split a job's last worker was given while nobody had less: for pods of any size on one node,
    /// a job that is further behind could not have had another one even if all others were cut back to that.
    #[test]
    fn a_new_split_is_even(world in one_node()) {
        let World { cluster, jobs } = world.fresh();
        let jobs = jobs.into_iter().map(|job| Job { priority: 0, ..job }).collect();
        let world = World { cluster, jobs };
        let granted = world.granted();
        let empty = Room::new(&world.cluster.nodes);
        let share = |job: &Job, n: u32| Seat::new(job, &empty).share(n);
        for n in (0..granted.len()).filter(|&n| (1..cap(granted[n].0)).contains(&granted[n].1)) {
            let level = share(granted[n].0, granted[n].1);
            let mut cut = granted.clone();
            for (job, workers) in cut.iter_mut().filter(|(_, workers)| *workers > 0) {
                while *workers > floor(job) && share(job, *workers - 1) > level {
                    *workers -= 1;
                }
            }
            cut[n].1 += 1;
            prop_assert!(!world.holds(&cut), "{} is behind: {granted:?}", granted[n].0.name);
        }
    }

    /// When one job can suddenly use more or less, that is between it and the others, not among the others.
    #[test]
    fn what_one_job_can_use_moves_nothing_between_others(world in unit_pods(), which: usize, useful in 0..12u32) {
        let World { cluster, mut jobs } = world;
        jobs.iter_mut().for_each(|job| (job.priority, job.weight) = (0, NonZeroU32::MIN));
        settle(&cluster, &mut jobs);
        let which = which % jobs.len();
        jobs[which].useful = useful;
        let before = jobs.clone();
        settle(&cluster, &mut jobs);
        let others = || before.iter().zip(&jobs).enumerate().filter(|(n, _)| *n != which).map(|(_, pair)| pair);
        let (more, less) = (others().any(|(a, b)| b.held > a.held), others().any(|(a, b)| b.held < a.held));
        prop_assert!(!(more && less), "{:?} became {:?}", before, jobs);
    }
}
