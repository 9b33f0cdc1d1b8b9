//! Edge: finds the job's files and cuts them into shards, each handed on as soon as it is known.

use std::path::Path;

use elasticdl_data::Compression;
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
        if purpose == Purpose::Train && job.train.schedule.varies() && file.compression != Compression::Plain
        {
            let reason = "it is compressed, so that only reading it tells how many batches it has, and the \
                          learning rate goes by the place in the job; take plain text or Parquet, or leave out \
                          train.schedule and train.warmup_steps";
            return Err(elasticdl_data::Error::File { path: file.path.into(), reason });
        }
        let mut found = |shard| send(Event::ShardFound(purpose, shard));
        elasticdl_data::cut(&file, &job.data.layout, records_per_shard, index_dir, &mut found)?;
    }
    Ok(())
}
