//! The checkers can fail: each way of breaking the protocol is noticed by the checker that is there for it.

use elasticdl_sim::run::{keep_panics_quiet, run_once};
use elasticdl_sim::sabotage::Sabotage;
use elasticdl_sim::scenario::Kind;
use elasticdl_sim::trace::Trace;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Seeds that are searched before a checker is taken for blind.
const SEEDS: u64 = 100;

/// One of the first seeds makes the checker say so, and what it says holds these words.
fn noticed(sabotage: Sabotage, checker: &str, words: &str) {
    noticed_in(Kind::Usual, sabotage, checker, words);
}

fn noticed_in(kind: Kind, sabotage: Sabotage, checker: &str, words: &str) {
    keep_panics_quiet();
    let mut said = Vec::new();
    for seed in 1..=SEEDS {
        let outcome = run_once(seed, kind, sabotage, Trace::default());
        said.extend(
            outcome.violations.into_iter().map(|v| format!("seed {seed}: {}: {}", v.checker, v.what)),
        );
        let by_it = |line: &&String| line.contains(&format!(": {checker}: ")) && line.contains(words);
        if said.iter().any(|line| by_it(&line)) {
            return;
        }
    }
    panic!("{sabotage:?} was not noticed by {checker}; what was said:\n{}", said.join("\n"));
}

#[test]
fn duplicates_that_are_applied_are_noticed() {
    noticed(Sabotage::MarksOff, "exact", "has counted");
}

#[test]
fn a_push_under_an_older_lease_is_noticed() {
    noticed(Sabotage::FencingOff, "leases", "under lease");
}

/// A task that is done by the word of the dead is never covered: the marks in the files tell. So nothing is
/// lost, and the job never ends.
#[test]
fn acknowledgements_of_dead_lives_that_are_believed_are_noticed() {
    noticed(Sabotage::IncarnationsOff, "liveness", "is not done");
}

#[test]
fn a_forgotten_closed_set_is_noticed() {
    noticed(Sabotage::ClosedOff, "exact", "has counted");
}

#[test]
fn a_checkpoint_committed_before_its_files_are_on_disk_is_noticed() {
    noticed(Sabotage::CommitBeforeDurable, "checkpoints", "its file is not on disk");
}

#[test]
fn marks_that_are_cut_later_than_rows_are_noticed() {
    noticed(Sabotage::TornCut, "checkpoints", "is covered, and the file has");
}

#[test]
fn rows_that_are_lost_when_a_partition_moves_are_noticed() {
    noticed(Sabotage::LastRowsLost, "checkpoints", "has counted");
}

#[test]
fn a_server_that_forgets_what_was_refused_is_noticed() {
    noticed(Sabotage::RefusedForgotten, "checkpoints", "gradients were refused");
}

#[test]
fn answers_before_a_backup_has_it_are_noticed() {
    noticed(Sabotage::BackupsUnawaited, "exact", "was applied");
}

#[test]
fn gradients_that_are_too_stale_and_applied_are_noticed() {
    noticed_in(Kind::Bounded, Sabotage::StaleOff, "bound", "are allowed");
}

#[test]
fn gradients_of_tensors_that_have_moved_since_and_are_applied_are_noticed() {
    noticed_in(Kind::Hybrid, Sabotage::StaleOff, "bound", "had moved since");
}

#[test]
fn a_step_that_lacks_a_batch_somewhere_is_noticed() {
    noticed_in(Kind::Synchronous, Sabotage::StepsOff, "staged", "cannot apply it");
}

#[test]
fn a_job_that_never_ends_is_noticed() {
    noticed(Sabotage::NoCheckpoints, "liveness", "is not done");
}

#[test]
fn without_sabotage_nobody_says_anything() {
    let outcome = run_once(7, Kind::Usual, Sabotage::None, Trace::default());
    assert_eq!(outcome.violations, []);
}
