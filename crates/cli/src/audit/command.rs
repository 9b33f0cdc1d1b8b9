//! `audit`: reads a job's ledger and the heads of a checkpoint's files, and says whether all records count once.

#![expect(clippy::disallowed_methods, reason = "an edge: a checkpoint that goes away meanwhile is let go")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use elasticdl_master::checkpoint::Manifest;
use elasticdl_master::ledger::{self, Book};
use elasticdl_master::status::Phase;
use elasticdl_master::store as checkpoints;
use elasticdl_operator::manifest as operator;
use elasticdl_ps::checkpoint::{path_of, read_head};
use elasticdl_spec::PartitionId;

use super::report::{Subject, as_json, as_table, verdict};
use super::{Audit, Facts, Held, Unknown, audit};
use crate::args;
use crate::fault::{Exit, Fault};
use crate::home::{Home, JobDir, OnCluster, Record};
use crate::{gang, in_pod, print, tether};

/// How often files are read again that were pruned while they were being read, and the pause between.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(100);
/// How long a pod may take to get room, read the files and answer.
const POD_LIMIT: Duration = Duration::from_secs(300);

/// `audit`.
pub fn command(args: &args::Audit) -> anyhow::Result<Exit> {
    let dir = match &args.job_dir {
        Some(dir) => JobDir::at(dir)?,
        None => Home::find()?.existing(&args.job)?,
    };
    let record = match dir.record() {
        // In a pod of a job without a volume the directory is empty; its secret tells.
        Err(_) if args.job_dir.is_some() && !dir.path().exists() => in_pod::record()?,
        other => other?,
    };
    gang::refuse(&record.job, "audit")?;
    if let Some(on) = &record.on {
        return ask_pod(args, &record, on);
    }
    let (subject, audit) = look(&dir.checkpoints(&record), &record)?;
    if args.json {
        print::line(&as_json(&subject, &audit).to_string())?;
    } else {
        print::line(&as_table(&audit))?;
        print::line(&verdict(&subject, &audit))?;
    }
    Ok(if audit.exact { Exit::Done } else { Exit::Job })
}

/// Has a pod look at a job whose files are on a cluster's volume.
fn ask_pod(args: &args::Audit, record: &Record, on: &OnCluster) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (code, said) = runtime.block_on(async {
        let cluster = tether::find(on).await?;
        let job = tether::job(&cluster, record, on);
        let owner = cluster.owner(&record.job.name).await.map_err(tether::api)?;
        let job = operator::Job { owner: Some(owner), ..job };
        let dir = job.directory();
        let mut words = vec!["audit", &args.job, "--job-dir", &dir];
        words.extend(args.json.then_some("--json"));
        cluster.errand(&job, "audit", &words, POD_LIMIT).await.map_err(tether::api)
    })?;
    match code {
        0 | 3 => print::line(said.trim_end())?,
        _ => return Err(Fault::user(said.trim().trim_start_matches("error: ").to_string()).into()),
    }
    Ok(if code == 0 { Exit::Done } else { Exit::Job })
}

/// Audits the committed checkpoint in `at` that the ledger goes by.
fn look(at: &Path, record: &Record) -> anyhow::Result<(Subject, Audit)> {
    for tried in 1.. {
        match look_once(at, record) {
            // A running job writes its ledger anew, commits another checkpoint and removes the oldest.
            Err(error) if tried < TRIES && !error.is::<Fault>() => thread::sleep(PAUSE),
            other => return other,
        }
    }
    unreachable!("the last try returns")
}

fn look_once(at: &Path, record: &Record) -> anyhow::Result<(Subject, Audit)> {
    let name = &record.job.name;
    let book = ledger::read(at)?.ok_or_else(|| nothing_yet(name, "it has no ledger"))?;
    let committed = book.committed.ok_or_else(|| nothing_yet(name, "it has no committed checkpoint"))?;
    let (manifest, partitions) = read(at, committed)?;
    judge(record, &book, &manifest, &partitions)
}

fn judge(
    record: &Record,
    book: &Book,
    manifest: &Manifest,
    partitions: &BTreeMap<u32, Held>,
) -> anyhow::Result<(Subject, Audit)> {
    let facts = facts(record, book, manifest);
    let audit = audit(&facts, partitions).map_err(|Unknown(shard)| {
        let what = format!("the ledger does not say how many records shard {shard} has");
        Fault::user(format!("cannot audit job {:?}: {what}", record.job.name))
            .hint("a compressed file is counted when it has been read once: audit the job after its next checkpoint")
    })?;
    let subject = Subject {
        job: record.job.name.clone(),
        checkpoint: manifest.id,
        complete: facts.complete,
        replayed: facts.replayed,
    };
    Ok((subject, audit))
}

fn facts(record: &Record, book: &Book, manifest: &Manifest) -> Facts {
    let epochs = book.terms_of_job.epochs;
    let tasks = u64::from(epochs) * book.shards.len() as u64;
    let all_covered = book.indexed && manifest.done.tasks() == tasks;
    Facts {
        batch: book.terms_of_job.batch,
        epochs,
        shards: book.shards.iter().map(|(number, note)| (*number, note.records)).collect(),
        complete: all_covered || book.finished == Some(Phase::Done),
        covered: manifest.done.clone(),
        recent: book.recent.clone(),
        sets_aside: record.job.data.bad_records_max > 0 || !book.quarantined.is_empty(),
        replayed: book.replayed,
        replayed_in: book.replayed_in.clone(),
    }
}

/// The manifest of a checkpoint, and what every partition's file says of itself.
fn read(at: &Path, checkpoint: u64) -> anyhow::Result<(Manifest, BTreeMap<u32, Held>)> {
    let manifest = checkpoints::load(at, checkpoint)?;
    let dir = PathBuf::from(checkpoints::checkpoint_path(&at.display().to_string(), checkpoint));
    let mut partitions = BTreeMap::new();
    for partition in manifest.partitions.keys() {
        let head = read_head(&path_of(&dir, PartitionId(*partition)))?;
        let marks = head.marks.iter().map(|(task, open)| (*task, open.mark)).collect();
        partitions.insert(*partition, Held { tallies: head.audit.epochs().clone(), marks });
    }
    Ok((manifest, partitions))
}

fn nothing_yet(name: &str, why: &str) -> Fault {
    Fault::user(format!("there is nothing to audit of job {name:?} yet: {why}"))
        .hint("a checkpoint is written on stop, at the end, and every checkpoint.every")
}
