//! `train` and `resume`: a job from its file, or from its ledger, to its end.

#![expect(clippy::disallowed_methods, reason = "an edge: it reads the clock")]

use std::time::{SystemTime, UNIX_EPOCH};

use elasticdl_master::status::ScaleRequest;
use elasticdl_master::store as checkpoints;
use elasticdl_spec::{JobSpec, Plan};
use serde_json::json;

use crate::args::{Follow, Place, Resume, Train};
use crate::check::Missing;
use crate::fault::{self, Exit, Fault};
use crate::home::{Home, OnCluster, Record};
use crate::submit::{Claim, Earlier, Start, Started};
use crate::view::View;
use crate::{check, follow, gang, print, settings, store, tether};

/// `train`.
pub async fn train(args: Train) -> anyhow::Result<Exit> {
    let file = args.job.file.display().to_string();
    let job = settings::load(&args.job)?.job;
    let on = (args.on == Place::Kubernetes).then(|| on_cluster(&args, &job));
    let claim = Claim::fresh(&Home::find()?, job, on)?;
    match &claim.record().on {
        None => check::check(claim.dir(), claim.record(), Missing::Make)
            .map_err(|problems| fault::problems(&file, &problems))?,
        // The data is where the pods are, and so they look at it.
        Some(on) => check_cluster(claim.record(), on).await?,
    }
    claim.renew(if args.fresh { Earlier::Remove } else { Earlier::Refuse })?;
    let wanted = ScaleRequest::default();
    let start = Start { resume: false, detach: args.follow.detach, listen: args.follow.listen, wanted };
    let started = claim.start(start).await?;
    go_on(started, &args.follow).await
}

/// `resume`.
pub async fn resume(args: Resume) -> anyhow::Result<Exit> {
    let claim = Claim::existing(&Home::find()?, &args.job)?;
    let (dir, record) = (claim.dir(), claim.record());
    let wanted = args.wanted.request();
    if record.on.is_some() {
        refuse_on_cluster(&args.job, wanted)?;
        let start = Start { resume: true, detach: args.follow.detach, listen: None, wanted };
        return go_on(claim.start(start).await?, &args.follow).await;
    }
    check::wanted(&record.job, wanted)?;
    if record.job.command.is_some() {
        gang::check_resumable(dir, &args.job)?;
        // What still runs of it calls the address of the master that is gone.
        let last = dir.master().and_then(|at| at.address.parse().ok());
        let listen = args.follow.listen.or(last);
        let start = Start { resume: true, detach: args.follow.detach, listen, wanted };
        return go_on(claim.start(start).await?, &args.follow).await;
    }
    let at = dir.checkpoints(record);
    let plan: Plan = check::plan(&record.job)?;
    match checkpoints::newest(&at)? {
        Some(manifest) => checkpoints::check_fits(&at.display().to_string(), &manifest, &plan)?,
        // A job that was cut off before its first checkpoint goes on all the same.
        None if store::has_begun(&at) => {}
        None => return Err(nothing_to_resume(&args.job).into()),
    }
    let subject = format!("job {:?}", args.job);
    std::env::set_current_dir(&record.cwd)?;
    check::check(dir, record, Missing::Refuse).map_err(|problems| fault::problems(&subject, &problems))?;
    // A master that was killed could not remove this file. What still runs of its job calls this address.
    let last = dir.master().and_then(|at| at.address.parse().ok());
    let listen = args.follow.listen.or(last);
    let start = Start { resume: true, detach: args.follow.detach, listen, wanted };
    let started = claim.start(start).await?;
    go_on(started, &args.follow).await
}

/// The master of a job on a cluster may run already, and is none of this command's to start.
fn refuse_on_cluster(name: &str, wanted: ScaleRequest) -> Result<(), Fault> {
    if wanted == ScaleRequest::default() {
        return Ok(());
    }
    let what = format!("job {name:?} is on a cluster, where resume takes no --workers and no --servers");
    Err(Fault::user(what).hint(format!("resume it without, and ask for them with `elasticdl scale {name}`")))
}

/// Where on the cluster a new run is.
fn on_cluster(args: &Train, job: &JobSpec) -> OnCluster {
    let run = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis());
    OnCluster {
        context: args.context.clone(),
        namespace: job.kubernetes.namespace.clone(),
        run: format!("{run:x}"),
        fresh: args.fresh,
    }
}

/// What can be known of a job on a cluster before anything starts.
async fn check_cluster(record: &Record, on: &OnCluster) -> anyhow::Result<()> {
    if record.job.command.is_some() {
        return tether::find(on).await.map(|_| ());
    }
    check::plan(&record.job)?;
    if record.job.kubernetes.volumes.is_empty() && !record.job.is_in_object_storage() {
        let what = "a job on a cluster keeps its ledger and its checkpoints on a volume, and there is none";
        let hint = "add one to spec.kubernetes.volumes, as in [{ persistentVolumeClaim: { claimName: data }, mountPath: /data }]; or name URLs for data, checkpoint.dir and output";
        return Err(Fault::user(what).hint(hint).into());
    }
    tether::find(on).await.map(|_| ())
}

/// No master of this job has ever got so far as to write anything down.
fn nothing_to_resume(name: &str) -> Fault {
    Fault::user(format!("job {name:?} has not begun: there is nothing to go on from"))
        .hint("start it with `elasticdl train`")
}

/// Follows the job, or leaves it alone.
async fn go_on(started: Started, args: &Follow) -> anyhow::Result<Exit> {
    if !args.detach {
        return follow::follow(started, View::fitting(args.json)).await;
    }
    let name = started.dir.record()?.job.name;
    let (pid, address) = (started.at.pid, &started.at.address);
    if args.json {
        let event = json!({ "event": "detached", "job": name, "pid": pid, "address": address });
        print::line(&event.to_string())?;
    } else {
        print::note(&format!("{name}: started, master {pid} at {address}"));
        print::note(&format!("hint: `elasticdl top {name}` watches it, `elasticdl stop {name}` stops it"));
    }
    Ok(Exit::Done)
}
