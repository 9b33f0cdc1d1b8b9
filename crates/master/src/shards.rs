//! Edge: finds the job's files and cuts them into shards, each handed on as soon as it is known.

use std::path::Path;

use elasticdl_spec::{JobSpec, Purpose};

use crate::job::Event;

/// Cuts training files, then validation files. Runs on a thread of its own: a large text file takes a
/// while to index, and the first shards are trained meanwhile.
pub fn find(job: &JobSpec, index_dir: &Path, send: &mut dyn FnMut(Event)) {
    for (purpose, patterns) in [(Purpose::Train, &job.data.train), (Purpose::Evaluate, &job.data.validate)] {
        if let Err(error) = find_one(job, purpose, patterns, index_dir, send) {
            return send(Event::IndexFailed(error.to_string()));
        }
        send(Event::AllFound(purpose));
    }
}

fn find_one(
    job: &JobSpec,
    purpose: Purpose,
    patterns: &[String],
    index_dir: &Path,
    send: &mut dyn FnMut(Event),
) -> elasticdl_data::Result<()> {
    if patterns.is_empty() {
        return Ok(());
    }
    let records_per_shard = job.train.batch as u64 * u64::from(job.data.batches_per_task);
    for file in elasticdl_data::discover(patterns, job.data.format)? {
        let mut found = |shard| send(Event::ShardFound(purpose, shard));
        elasticdl_data::cut(&file, &job.data.layout, records_per_shard, index_dir, &mut found)?;
    }
    Ok(())
}
