//! Virtual jobs: seeds that once found something, and fresh ones.
#![expect(clippy::disallowed_methods, reason = "fresh seeds come from the clock")]

use std::time::{SystemTime, UNIX_EPOCH};

use elasticdl_sim::run::{Summary, keep_panics_quiet, run_many};
use elasticdl_sim::scenario::Kind;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn check(summary: &Summary, kind: Kind) {
    let staged = match kind {
        Kind::Usual => "",
        Kind::Staged => "--staged ",
        Kind::Bounded => "--bounded ",
        Kind::Synchronous => "--synchronous ",
        Kind::Hybrid => "--hybrid ",
    };
    let told = |seed: u64| format!("cargo run --release -p elasticdl-sim -- {staged}--seed {seed}");
    let failures: Vec<_> = summary.failures.iter().map(|f| (told(f.seed), &f.violations)).collect();
    assert!(failures.is_empty(), "{failures:#?}");
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Goal: what these seeds once found stays mended.
///
/// | seeds | found |
/// | --- | --- |
/// | 13, 14, 19, 22, 66 | a task that was opened again before its shard was found waited twice |
/// | 15, 17, 21, 53, 56 | an order to write a checkpoint that was lost was never given again |
/// | staged 2, 79, 86 … | a checkpoint cut while a step was committed in some partitions only |
/// | staged 96 | a lease from before a roll-back was still believed |
/// | synchronous 1795041082745640299 | the last worker waited for ever for a batch of one that was gone |
///
/// A change of what seeds stand for makes other worlds of them. What they found has tests of its own beside
/// the code that was mended.
#[test]
fn seeds_that_once_found_something_pass() {
    keep_panics_quiet();
    for seed in [13, 14, 15, 17, 19, 21, 22, 53, 56, 66] {
        check(&run_many(seed, 1, Kind::Usual, 1), Kind::Usual);
    }
    for seed in [2, 79, 86, 96, 109, 110, 122, 152, 188] {
        check(&run_many(seed, 1, Kind::Staged, 1), Kind::Staged);
    }
    check(&run_many(1795041082745640299, 1, Kind::Synchronous, 1), Kind::Synchronous);
}

/// Fresh seeds each time; among so many every fault and every branch of the protocol happens.
#[test]
fn fresh_seeds_pass() {
    keep_panics_quiet();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is set");
    let first = now.as_nanos() as u64;
    for (kind, seeds) in [
        (Kind::Usual, 1000),
        (Kind::Staged, 300),
        (Kind::Bounded, 150),
        (Kind::Synchronous, 150),
        (Kind::Hybrid, 150),
    ] {
        let summary = run_many(first, seeds, kind, cores());
        check(&summary, kind);
        assert_eq!(summary.seeds, seeds);
        // Half-committed steps come about seven times in a thousand staged worlds: too rare for so few.
        if kind != Kind::Staged {
            assert_eq!(summary.branches.never(kind), [""; 0], "never met, from seed {first} on");
        }
    }
}
