//! From a checked job to a running master: the job's directory, its locks, the process.

#![expect(clippy::disallowed_methods, reason = "an edge: it starts a process and waits for it to listen")]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use elasticdl_master::status::ScaleRequest;
use elasticdl_spec::JobSpec;
use elasticdl_wire::Identity;
use tokio::process::{Child, ChildStdin, Command};

use crate::client::Client;
use crate::fault::{Exit, Fault};
use crate::home::{Home, JobDir, MasterAt, OnCluster, Record, last_lines};
use crate::lock::{self, Holder, Lock, Refused};
use crate::{print, store};

/// How a master is to be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// Go on from the ledger that there must be.
    pub resume: bool,
    /// Live on when this process is gone.
    pub detach: bool,
    /// Where it listens; a free port where this is not said.
    pub listen: Option<std::net::SocketAddr>,
    /// So many workers and servers, whatever was wanted before.
    pub wanted: ScaleRequest,
}

/// A master that listens.
pub struct Started {
    /// The job's directory.
    pub dir: JobDir,
    /// The process.
    pub child: Child,
    /// Its stdin, the leash: when this process dies, it closes and the master stops the job.
    pub leash: Option<ChildStdin>,
    /// Where it is.
    pub at: MasterAt,
    /// Length of the job's events file before this master wrote to it.
    pub events_before: u64,
    /// The number of the last event before this master's first.
    pub seq_before: u64,
    /// For calls to it.
    pub client: Client,
    /// What it was told to have. It is in the ledger when the master has told that it has started.
    pub wanted: ScaleRequest,
}

/// How long a master may take to listen. It has little to do before that; a machine can be busy.
const START_LIMIT: Duration = Duration::from_secs(60);

/// What a new run does with the committed checkpoints it finds in `checkpoint.dir`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Earlier {
    /// They are an error.
    Refuse,
    /// They are removed.
    Remove,
}

/// A job's directory that no other client can start a master in until this is dropped.
pub struct Claim {
    dir: JobDir,
    record: Record,
    _starting: Lock,
}

impl Claim {
    /// Claims the directory for a new run of `job`. Nothing of an earlier run is touched yet.
    pub fn fresh(home: &Home, job: JobSpec, on: Option<OnCluster>) -> anyhow::Result<Claim> {
        let dir = home.job(&job.name);
        dir.create().map_err(|e| {
            let hint = "set ELASTICDL_HOME to a directory you can write to";
            Fault::user(format!("cannot make the job's directory {}", dir.path().display()))
                .because(e)
                .hint(hint)
        })?;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let cwd = std::env::current_dir().context("finding the current directory")?;
        Claim::of(dir, Record { created, cwd, job, on })
    }

    /// Claims the directory of a job that is to go on.
    pub fn existing(home: &Home, name: &str) -> anyhow::Result<Claim> {
        let dir = home.existing(name)?;
        let record = dir.record()?;
        Claim::of(dir, record)
    }

    /// Claims the directory of a job whose master died, for the client that follows it.
    pub fn again(dir: JobDir) -> anyhow::Result<Claim> {
        let record = dir.record()?;
        Claim::of(dir, record)
    }

    fn of(dir: JobDir, record: Record) -> anyhow::Result<Claim> {
        let name = record.job.name.clone();
        if dir.is_between_masters() {
            let client = lock::holder(&dir.client_lock()).flatten();
            if client.as_ref().is_some_and(|client| client.pid != std::process::id()) {
                return Err(running(&name, client.as_ref(), "is being started again by its client").into());
            }
        }
        let starting = match Lock::take(&dir.starting_lock(), &name) {
            Ok(lock) => lock,
            Err(Refused::Held(holder)) => {
                return Err(running(&name, holder.as_ref(), "is being started").into());
            }
            Err(Refused::Io(e)) => {
                return Err(e).with_context(|| format!("locking {}", dir.starting_lock().display()));
            }
        };
        if let Some(holder) = dir.holder() {
            return Err(running(&name, holder.as_ref(), "is running").into());
        }
        let checkpoints = dir.checkpoints(&record);
        if record.on.is_none()
            && record.job.command.is_none()
            && !elasticdl_storage::is_url(&checkpoints)
            && let Some(holder) = lock::holder(&checkpoints.join("lock"))
        {
            return Err(shared_checkpoints(&checkpoints, holder.as_ref()).into());
        }
        Ok(Claim { dir, record, _starting: starting })
    }

    /// The job.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// The directory.
    pub fn dir(&self) -> &JobDir {
        &self.dir
    }

    /// Makes the directory that of a new run: checkpoints of earlier ones out of the way, new secrets.
    pub fn renew(&self, earlier: Earlier) -> anyhow::Result<()> {
        if self.record.on.is_none() && self.record.job.command.is_none() {
            set_checkpoints_aside(&self.dir, &self.record, earlier)?;
        }
        remove(&self.dir.logs(), |path| fs::remove_dir_all(path))?;
        remove(&self.dir.events(), |path| fs::remove_file(path))?;
        remove(&self.dir.gang(), |path| fs::remove_file(path))?;
        remove(&self.dir.tls(), |path| fs::remove_dir_all(path))?;
        if self.record.job.security.tls || self.record.on.is_some() {
            Identity::make(SystemTime::now())?.write(&self.dir.tls())?;
        }
        let wrote = self.dir.write_record(&self.record).and_then(|()| self.dir.write_token());
        wrote.with_context(|| format!("writing to {}", self.dir.path().display()))
    }

    /// Where the job's certificate is, if it is to have one.
    fn tls_dir(&self) -> anyhow::Result<Option<PathBuf>> {
        let dir = self.dir.tls();
        match (self.record.job.security.tls, dir.exists()) {
            (_, true) => Ok(Some(dir)),
            (false, false) => Ok(None),
            // Going on without it would say in the open what was to be kept secret.
            (true, false) => Err(Fault::user(format!("the job's certificate is gone: {}", dir.display()))
                .hint("start the job again with `elasticdl train`")
                .into()),
        }
    }

    /// Starts the master and waits until it listens.
    pub async fn start(self, start: Start) -> anyhow::Result<Started> {
        let dir = &self.dir;
        remove(&dir.master_file(), |path| fs::remove_file(path))?;
        let events_before = fs::metadata(dir.events()).map_or(0, |file| file.len());
        let seq_before = dir.last_seq();
        let mut child = self.spawn(start)?;
        let pid = child.id().context("a process that was just started has an id")?;
        let began = Instant::now();
        let at = loop {
            if let Some(at) = dir.master().filter(|at| at.pid == pid) {
                break at;
            }
            if let Some(status) = child.try_wait().context("waiting for the master")? {
                return Err(stillborn(dir, &self.record.job.name, status).into());
            }
            if began.elapsed() > START_LIMIT {
                child.start_kill().context("ending a master that does not start")?;
                let what =
                    format!("the master of {} did not listen within {START_LIMIT:?}", self.record.job.name);
                return Err(Fault::job(what)
                    .hint(format!("its log: {}", dir.log("master").display()))
                    .into());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let client = Client::of(dir)?;
        // Taken out of the child: waiting for a child closes the stdin that is still in it.
        let leash = child.stdin.take();
        let wanted = start.wanted;
        Ok(Started { dir: self.dir, child, leash, at, client, events_before, seq_before, wanted })
    }

    fn spawn(&self, start: Start) -> anyhow::Result<Child> {
        let dir = &self.dir;
        fs::create_dir_all(dir.logs()).with_context(|| format!("making {}", dir.logs().display()))?;
        let log =
            append(&dir.log("master")).with_context(|| format!("opening {}", dir.log("master").display()))?;
        let program = std::env::current_exe().context("finding this program")?;
        let mut command = Command::new(program);
        let role = if self.record.on.is_some() { "tether" } else { "master" };
        command.arg(role).arg("--job-dir").arg(dir.path());
        if start.resume {
            command.arg("--resume");
        }
        if let Some(listen) = start.listen.filter(|_| self.record.on.is_none()) {
            command.arg("--listen").arg(listen.to_string());
        }
        if let Some(workers) = start.wanted.workers {
            command.arg("--workers").arg(workers.to_string());
        }
        if let Some(servers) = start.wanted.servers {
            command.arg("--servers").arg(servers.to_string());
        }
        // This job's own or none, whatever the environment says.
        command.env_remove("ELASTICDL_TLS_DIR");
        if let Some(dir) = self.tls_dir()?.filter(|_| self.record.on.is_none()) {
            command.arg("--tls-dir").arg(dir);
        }
        if start.detach {
            command.stdin(Stdio::null());
        } else {
            command.arg("--attached").stdin(Stdio::piped());
        }
        // Its own process group: Ctrl-C in the terminal is for the client, which then asks for a stop.
        command.process_group(0).stdout(log.try_clone()?).stderr(log).kill_on_drop(false);
        command.current_dir(&self.record.cwd);
        command.spawn().map_err(|e| {
            let what = format!("cannot start the master in {}", self.record.cwd.display());
            Fault::user(what).because(e).hint("the job goes on in the directory it was submitted from").into()
        })
    }
}

/// A run begins without checkpoints, or it would go on from another one's.
pub fn set_checkpoints_aside(job: &JobDir, record: &Record, earlier: Earlier) -> anyhow::Result<()> {
    let dir = job.checkpoints(record);
    if store::all(&dir)?.is_empty() {
        // That of a run which ended before its first checkpoint.
        return store::clear_ledger(&dir);
    }
    let name = &record.job.name;
    if record.job.checkpoint.dir.is_none() {
        let old = job.path().join("checkpoint.old");
        remove(&old, |path| fs::remove_dir_all(path))?;
        fs::rename(&dir, &old).with_context(|| format!("moving {} to {}", dir.display(), old.display()))?;
        print::note(&format!("checkpoints of the last run of {name} are now in {}", old.display()));
    } else if earlier == Earlier::Remove {
        store::clear(&dir)?;
        print::note(&format!("removed the checkpoints of an earlier run from {}", dir.display()));
    } else {
        let owner = store::newest(&dir, name).map_or(name.clone(), |(manifest, _)| manifest.job);
        let what = format!("{} holds checkpoints of an earlier run of job {owner:?}", dir.display());
        let hint = format!(
            "`elasticdl resume {owner}` goes on with them, --fresh removes them; or name another checkpoint.dir"
        );
        return Err(Fault::user(what).hint(hint).into());
    }
    Ok(())
}

/// Opens a log so that several writers and restarts keep each other's lines.
pub fn append(path: &Path) -> io::Result<fs::File> {
    fs::OpenOptions::new().create(true).append(true).open(path)
}

fn remove(path: &Path, remove: fn(&Path) -> io::Result<()>) -> anyhow::Result<()> {
    match remove(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// A job of this name is alive.
pub fn running(name: &str, holder: Option<&Holder>, what: &str) -> Fault {
    let pid = holder.map(|h| format!(" (pid {})", h.pid)).unwrap_or_default();
    Fault::user(format!("job {name:?} {what}{pid}"))
        .hint(format!("`elasticdl stop {name}` stops it; or give this one another metadata.name (--name)"))
}

/// Another job writes its checkpoints there.
pub fn shared_checkpoints(dir: &Path, holder: Option<&Holder>) -> Fault {
    let who = holder.map(|h| format!(" by job {:?} (pid {})", h.job, h.pid)).unwrap_or_default();
    let stop = holder.map(|h| format!("`elasticdl stop {}` stops it; or ", h.job)).unwrap_or_default();
    Fault::user(format!("the checkpoint directory {} is in use{who}", dir.display()))
        .hint(format!("{stop}name another checkpoint.dir"))
}

/// The master ended before it listened: its own last words are the best explanation.
fn stillborn(dir: &JobDir, name: &str, status: ExitStatus) -> Fault {
    let lines = last_lines(&dir.log("master"), 20).unwrap_or_default();
    let start = lines.iter().rposition(|line| line.starts_with("error: ")).unwrap_or(0);
    let said = lines[start..].join("\n  ");
    let exit = match status.code() {
        Some(1) => Exit::User,
        Some(2) => Exit::Bug,
        _ => Exit::Job,
    };
    Fault::job(format!("the master of {name:?} could not start ({status})\n  {said}")).exit(exit)
}
