//! Jobs with known curves of speed, in virtual time.

use elasticdl_spec::mix::Rng;
use proptest::prelude::*;

use super::*;

/// How long a new worker takes to come.
const SPAWN: Duration = Duration::from_millis(1500);
const TICK: Duration = Duration::from_millis(20);
/// Records a second of a worker that is alone.
const ONE: f64 = 20_000.0;

/// A job whose speed with so many workers, at some time, is this multiple of that of one.
struct Job<F> {
    curve: F,
    /// How much windows of a second scatter, as a part, to either side.
    noise: f64,
    /// Workers that there is room for.
    room: u32,
    /// How often a worker tells news.
    news_every: Duration,
}

/// What came of it.
#[derive(Debug)]
struct Outcome {
    /// When how many workers were asked for.
    targets: Vec<(Duration, u32)>,
    /// The number that was found last.
    found: u32,
    records: f64,
}

impl Outcome {
    fn workers(&self) -> Vec<u32> {
        self.targets.iter().map(|&(_, workers)| workers).collect()
    }
}

impl<F: Fn(u32, f64) -> f64> Job<F> {
    fn run(&self, useful: &mut Useful, seconds: u64, seed: u64) -> Outcome {
        let mut rng = Rng::new(seed);
        // When each is of use, and the records that it has not told of.
        let mut workers: Vec<(Duration, f64)> = Vec::new();
        let (mut done, mut told, mut noise) = (0.0, 0.0, 1.0);
        let (mut targets, mut found) = (vec![(Duration::ZERO, useful.target().workers)], 0);
        let (mut now, phases) = (Duration::ZERO, (self.news_every.as_millis() / TICK.as_millis()) as u64);
        while now < Duration::from_secs(seconds) {
            now += TICK;
            let wanted = useful.target().workers.min(self.room) as usize;
            while workers.len() < wanted {
                workers.push((now + SPAWN + TICK * rng.below(phases) as u32, 0.0));
            }
            for (_, untold) in workers.drain(wanted..) {
                told += untold;
            }
            let active = workers.iter().filter(|(at, _)| *at <= now).count() as u32;
            if now.subsec_nanos() == 0 {
                noise = 1.0 + self.noise * (2.0 * rng.uniform() - 1.0);
            }
            let each = ONE * noise * (self.curve)(active.max(1), now.as_secs_f64()) * TICK.as_secs_f64()
                / f64::from(active);
            for (at, untold) in workers.iter_mut().filter(|(at, _)| *at <= now) {
                *untold += each;
                done += each;
                if (now - *at).as_millis().is_multiple_of(self.news_every.as_millis()) {
                    told += std::mem::take(untold);
                    useful.observe(now, active, told as u64);
                }
            }
            if targets.last().unwrap().1 != useful.target().workers {
                targets.push((now, useful.target().workers));
            }
            if matches!(useful.target().reason, Reason::Enough | Reason::Max) {
                found = useful.target().workers;
            }
        }
        Outcome { targets, found, records: done }
    }

    /// What the best fixed number of workers does in that time, from when they are there.
    fn best(&self, max: u32, seconds: u64) -> f64 {
        let speed = |n, second: u64| ONE * (self.curve)(n, second as f64);
        let total = |n| (0..seconds).map(|second| speed(n, second)).sum::<f64>();
        let there = 1.0 - SPAWN.as_secs_f64() / seconds as f64;
        (1..=max.min(self.room)).map(total).fold(0.0, f64::max) * there
    }
}

fn job<F: Fn(u32, f64) -> f64>(curve: F) -> Job<F> {
    Job { curve, noise: 0.1, room: u32::MAX, news_every: Duration::from_millis(200) }
}

fn linear(n: u32, _: f64) -> f64 {
    f64::from(n)
}

fn saturating(k: f64) -> impl Fn(u32, f64) -> f64 {
    move |n, _| f64::from(n).min(k)
}

fn collapsing(k: f64) -> impl Fn(u32, f64) -> f64 {
    move |n, _| if f64::from(n) <= k { f64::from(n) } else { k * k / f64::from(n) }
}

/// Two processors: two workers are nearly twice as fast as one, a third fills the gaps, more only get in the
/// way.
fn two_cores(n: u32, _: f64) -> f64 {
    [0.0, 1.0, 1.85, 1.9, 1.87, 1.84, 1.8, 1.76, 1.72][n as usize]
}

const SEEDS: u64 = 40;

#[test]
fn eight_workers_allowed_on_two_cores_are_two_or_three_and_a_short_job_loses_little() {
    for seed in 0..SEEDS {
        let job = job(two_cores);
        let outcome = job.run(&mut Useful::new(1, 8, 1), 90, seed);
        let (last, part) = (outcome.found, outcome.records / job.best(8, 90));
        assert!((2..=3).contains(&last), "seed {seed}: {:?}", outcome.workers());
        assert!(two_cores(last, 0.0) > 0.95 * 1.9 && part > 0.93, "seed {seed}: {part:.3} of the best");
        assert!(outcome.targets.len() <= 6, "seed {seed}: {:?}", outcome.workers());
        let part = job.run(&mut Useful::new(1, 8, 2), 60, seed).records / job.best(8, 60);
        assert!(part > 0.92, "seed {seed}: {part:.3} of the best when it starts with two");
    }
}

#[test]
fn where_each_worker_adds_as_much_as_the_first_all_of_them_are_there_soon() {
    for seed in 0..SEEDS {
        let outcome = job(linear).run(&mut Useful::new(1, 8, 1), 90, seed);
        assert_eq!(outcome.workers()[..4], [1, 2, 4, 8]);
        assert!(outcome.targets[3].0 < Duration::from_secs(14), "seed {seed}: {:?}", outcome.targets);
        assert_eq!(outcome.found, 8);
        assert!(outcome.records > 0.87 * job(linear).best(8, 90), "seed {seed}");
        let outcome = job(linear).run(&mut Useful::new(1, 32, 1), 60, seed);
        assert_eq!(outcome.workers()[..6], [1, 2, 4, 8, 16, 32]);
        assert!(outcome.targets[5].0 < Duration::from_secs(24) && outcome.found == 32, "seed {seed}");
    }
}

#[test]
fn a_job_whose_speed_is_bounded_gets_about_as_many_workers_as_reach_the_bound() {
    for (k, max) in [(1, 8), (3, 8), (5, 16), (7, 8), (20, 64)] {
        for seed in 0..SEEDS {
            let job = job(saturating(f64::from(k)));
            let outcome = job.run(&mut Useful::new(1, max, 1), 90, seed);
            let near = f64::from(outcome.found) >= 0.9 * f64::from(k) && outcome.found <= k + 1 + k / 4;
            assert!(near, "{k} of {max}, seed {seed}: {:?}", outcome.workers());
            assert!(outcome.targets.len() <= 14, "{k} of {max}, seed {seed}: {:?}", outcome.workers());
            let part = job.run(&mut Useful::new(1, max, 1), 600, seed).records / job.best(max, 600);
            assert!(part > 0.92, "{k} of {max}, seed {seed}: {part:.3} of the best in ten minutes");
        }
    }
}

#[test]
fn where_more_get_in_each_others_way_the_peak_is_found() {
    for (k, max) in [(3, 8), (5, 16)] {
        for seed in 0..SEEDS {
            let job = job(collapsing(f64::from(k)));
            let outcome = job.run(&mut Useful::new(1, max, 1), 600, seed);
            let part = outcome.records / job.best(max, 600);
            assert_eq!(outcome.found, k, "seed {seed}: {:?}", outcome.workers());
            assert!(part > 0.89, "{k} of {max}, seed {seed}: {part:.3} of the best");
        }
    }
}

#[test]
fn without_noise_the_way_is_known() {
    let way = |curve: &dyn Fn(u32, f64) -> f64, min, max, start| {
        Job { noise: 0.0, ..job(curve) }.run(&mut Useful::new(min, max, start), 100, 1).workers()
    };
    assert_eq!(way(&two_cores, 1, 8, 1), [1, 2, 4, 2]);
    assert_eq!(way(&two_cores, 1, 8, 4), [4, 8, 4, 2, 1, 3, 2], "down as well");
    assert_eq!(way(&two_cores, 4, 8, 1), [4, 8, 4, 6, 5, 4], "never below min");
    assert_eq!(way(&saturating(6.0), 1, 8, 1), [1, 2, 4, 8, 6, 8, 6], "both sides with the same care");
    assert_eq!(way(&collapsing(3.0), 1, 8, 1), [1, 2, 4, 2, 3]);
    assert_eq!(way(&linear, 3, 3, 1), [3], "there is nothing to find out");
}

#[test]
fn a_slow_drift_of_everything_changes_nothing() {
    for seed in 0..SEEDS {
        let curve = |n: u32, second: f64| f64::from(n).min(4.0) * (1.0 - 0.5 * second / 1800.0);
        let outcome = job(curve).run(&mut Useful::new(1, 8, 1), 1800, seed);
        assert!((4..=5).contains(&outcome.found), "seed {seed}: {:?}", outcome.workers());
        let late = outcome.targets.iter().filter(|(at, _)| at.as_secs() > 900).count();
        assert!(late <= 12, "seed {seed}: {late} changes in the second quarter of an hour");
    }
}

#[test]
fn another_world_is_noticed_in_time() {
    for seed in 0..SEEDS {
        let shrinks = |n: u32, second: f64| f64::from(n).min(if second < 400.0 { 8.0 } else { 2.0 });
        let outcome = job(shrinks).run(&mut Useful::new(1, 8, 1), 3000, seed);
        assert!(outcome.found <= 3, "seed {seed}: {:?}", outcome.workers());
        let grows = |n: u32, second: f64| f64::from(n).min(if second < 400.0 { 2.0 } else { 8.0 });
        let outcome = job(grows).run(&mut Useful::new(1, 8, 1), 3000, seed);
        assert!(outcome.found >= 7, "seed {seed}: {:?}", outcome.workers());
    }
}

#[test]
fn large_batches_take_longer_windows_and_lead_to_the_same_number() {
    for seed in 0..SEEDS {
        let job = Job { news_every: Duration::from_secs(4), ..job(saturating(4.0)) };
        let outcome = job.run(&mut Useful::new(1, 8, 1), 900, seed);
        assert!((4..=5).contains(&outcome.found), "seed {seed}: {:?}", outcome.workers());
    }
}

#[test]
fn workers_that_do_not_come_are_still_asked_for_where_they_would_pay() {
    let mut useful = Useful::new(1, 8, 1);
    let outcome = Job { room: 3, noise: 0.0, ..job(linear) }.run(&mut useful, 60, 1);
    assert_eq!(outcome.workers(), [1, 2, 4, 6], "three came, and three paid");
    assert_eq!(useful.target().reason.to_string(), "tries whether that is better than 3");
    useful.forget(Duration::from_secs(60));
    assert_eq!(useful.target(), Target { workers: 3, reason: Reason::Measures });
}

/// News from one worker, ten times a second.
fn steady(useful: &mut Useful, from_ms: u64, to_ms: u64, records: &mut u64, each: u64) {
    for ms in (from_ms..to_ms).step_by(100) {
        *records += each;
        useful.observe(Duration::from_millis(ms), 1, *records);
    }
}

#[test]
fn a_window_with_a_stall_does_not_count() {
    let (mut useful, mut records) = (Useful::new(1, 8, 1), 0);
    steady(&mut useful, 0, 2_500, &mut records, 100);
    useful.disturb(Duration::from_millis(2_500));
    steady(&mut useful, 9_000, 10_500, &mut records, 100);
    let speeds: Vec<f64> = useful.speeds[&1].0.iter().copied().collect();
    assert_eq!(speeds, [1000.0, 1000.0], "the seconds without news are in no window");
    assert_eq!(useful.target().workers, 2);
}

#[test]
fn records_that_are_taken_back_for_a_replay_end_the_window() {
    let (mut useful, mut records) = (Useful::new(1, 8, 1), 0);
    steady(&mut useful, 0, 1_500, &mut records, 100);
    records -= 1_000;
    steady(&mut useful, 1_500, 3_600, &mut records, 100);
    assert_eq!(useful.speeds[&1].0, [1000.0], "one window after the warm-up");
}

#[test]
fn reasons_read_well() {
    let (mut useful, mut records) = (Useful::new(1, 1, 1), 0);
    assert_eq!(useful.target().reason.to_string(), "measures how fast they are");
    steady(&mut useful, 0, 4_000, &mut records, 100);
    assert_eq!(useful.target().reason.to_string(), "all of them are of use, and workers.max allows no more");
    assert_eq!(Reason::Enough.to_string(), "more would add less than 5 %");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever the speeds, and however few workers come: nothing outside the limits is asked for, and there
    /// are long times of rest.
    #[test]
    fn any_curve_stays_within_limits_and_comes_to_rest(
        speeds in proptest::collection::vec(0.2..4.0f64, 16),
        (min, more, start, room) in (1..5u32, 0..11u32, 0..20u32, 1..20u32),
        noise in 0.0..0.2f64,
        seed: u64,
    ) {
        let max = min + more;
        let job = Job { noise, room, ..job(|n: u32, _| speeds[n.min(16) as usize - 1]) };
        let mut useful = Useful::new(min, max, start);
        let outcome = job.run(&mut useful, 600, seed);
        prop_assert!(outcome.workers().iter().all(|n| (min..=max).contains(n)), "{:?}", outcome.workers());
        prop_assert!(outcome.targets.len() <= 60, "{:?}", outcome.workers());
    }
}
