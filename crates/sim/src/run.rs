//! Runs seeds, each twice, on several threads, and adds up what they met.

use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::branches::Branches;
use crate::checkers::Violation;
use crate::sabotage::Sabotage;
use crate::scenario::Kind;
use crate::trace::Trace;
use crate::world::{Outcome, World};

/// A seed whose world went wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// What went wrong.
    pub violations: Vec<Violation>,
}

/// What became of many seeds.
#[derive(Debug, Default)]
pub struct Summary {
    /// How many were run.
    pub seeds: u64,
    /// What they met.
    pub branches: Branches,
    /// Those that went wrong, by seed.
    pub failures: Vec<Failure>,
    /// How long they lasted in their own time.
    pub lasted: Duration,
    /// How many things happened.
    pub steps: u64,
}

thread_local! {
    /// What the last panic of this thread said, and where.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
    static IN_A_WORLD: Cell<bool> = const { Cell::new(false) };
}

/// From now on a panic in a world prints nothing: it becomes a violation that names its place.
pub fn keep_panics_quiet() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| match IN_A_WORLD.get() {
        true => LAST_PANIC.set(Some(info.to_string())),
        false => before(info),
    }));
}

/// Runs a seed once.
pub fn run_once(seed: u64, kind: Kind, sabotage: Sabotage, trace: Trace) -> Outcome {
    IN_A_WORLD.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(|| World::new(seed, kind, sabotage, trace).run()));
    IN_A_WORLD.set(false);
    outcome.unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().cloned();
        let said = said.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        let told = LAST_PANIC.take();
        let what = told.or(said).unwrap_or_else(|| "something that is no text".into());
        let violation = Violation { checker: "panic", at: Duration::ZERO, what };
        Outcome {
            hash: 0,
            violations: vec![violation],
            branches: Branches::default(),
            lasted: Duration::ZERO,
            steps: 0,
        }
    })
}

/// Runs a seed twice; the two must agree.
pub fn run_twice(seed: u64, kind: Kind, sabotage: Sabotage) -> Outcome {
    let mut outcome = run_once(seed, kind, sabotage, Trace::default());
    let second = run_once(seed, kind, sabotage, Trace::default());
    if (outcome.hash, outcome.steps) != (second.hash, second.steps) {
        let what = format!("two runs of one seed differ: {:016x} and {:016x}", outcome.hash, second.hash);
        outcome.violations.push(Violation { checker: "replay", at: Duration::ZERO, what });
    }
    outcome
}

/// Runs seeds from `first` on, on so many threads. Stops early once some have failed.
pub fn run_many(first: u64, seeds: u64, kind: Kind, threads: usize) -> Summary {
    let next = AtomicU64::new(0);
    let summary = Mutex::new(Summary::default());
    let work = || {
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= seeds {
                return;
            }
            let seed = first.wrapping_add(n);
            let outcome = run_twice(seed, kind, Sabotage::None);
            let mut summary = summary.lock().expect("no thread panics while it adds up");
            summary.add(seed, outcome);
            if summary.failures.len() >= 20 {
                next.store(seeds, Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(work);
        }
    });
    let mut summary = summary.into_inner().expect("no thread panics while it adds up");
    summary.failures.sort_by_key(|failure| failure.seed);
    summary
}

impl Summary {
    fn add(&mut self, seed: u64, outcome: Outcome) {
        self.seeds += 1;
        self.branches.add(&outcome.branches);
        self.lasted += outcome.lasted;
        self.steps += outcome.steps;
        if !outcome.violations.is_empty() {
            self.failures.push(Failure { seed, violations: outcome.violations });
        }
    }
}
