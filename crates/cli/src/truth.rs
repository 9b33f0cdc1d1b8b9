//! What the data allows at best, where it carries a planted truth.

use std::path::Path;

use elasticdl_data::discover;
use elasticdl_data::synth::Truth;
use elasticdl_master::config::Best;

/// The best reachable figures on the files that `patterns` name; `None` without a truth about just these.
pub fn best(patterns: &[String]) -> Option<Best> {
    if patterns.is_empty() {
        return None;
    }
    let test = Truth::beside(patterns)?.test?;
    // The truth is about the test records as a whole, and they are in files of these names.
    let is_test =
        |path: &str| Path::new(path).file_name().is_some_and(|n| n.to_string_lossy().starts_with("test-"));
    let files = discover(patterns, None).ok()?;
    let best = Best { logloss: test.best_logloss, auc: test.best_auc };
    files.iter().all(|file| is_test(&file.path)).then_some(best)
}
