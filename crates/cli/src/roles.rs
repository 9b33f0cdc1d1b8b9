//! The roles: `master`, `ps`, `worker`. Each is a crate; here they get what they need from this machine.

#![expect(clippy::disallowed_methods, reason = "an edge: it waits for a port")]

use std::fs;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use elasticdl_master::Outcome;
use elasticdl_master::config::{Export, Outside};
use elasticdl_master::gang::run::Memory;
use elasticdl_master::status::{Phase, ScaleRequest, StopRequest};
use elasticdl_spec::{ServerId, WorkerId};
use elasticdl_wire::{Identity, Token, tls};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::args::{Master, Member};
use crate::fault::{Exit, Fault};
use crate::home::{JobDir, MasterAt, Record};
use crate::local::Local;
use crate::lock::{Lock, Refused};
use crate::{check, export, gang, submit, truth};

/// How long a master that goes on waits for the port of the one before it: a process that called that one
/// may hold it for a moment.
const BIND_PATIENCE: Duration = Duration::from_secs(5);
const BIND_PAUSE: Duration = Duration::from_millis(20);

/// `master`: leads a job to its end.
pub async fn master(args: Master) -> anyhow::Result<Exit> {
    let dir = JobDir::at(&args.job_dir)?;
    let record = dir.record()?;
    let wanted = args.wanted.request();
    check::wanted(&record.job, wanted)?;
    let tls_dir = absolute(args.tls_dir)?;
    std::env::set_current_dir(&record.cwd).with_context(|| format!("going to {}", record.cwd.display()))?;
    let identity = identity(tls_dir.as_deref(), args.listen)?;
    if record.job.security.tls && identity.is_none() {
        let what = "the job is to be encrypted (security.tls), and there is no certificate";
        return Err(Fault::user(what).hint("name its directory with --tls-dir").into());
    }
    let _locks = locks(&dir, &record)?;
    let goes_on = args.resume || dir.gang().exists();
    let patience = if goes_on { BIND_PATIENCE } else { Duration::ZERO };
    let listener = bind(args.listen, patience).await?;
    let address = listener.local_addr().context("asking for the address")?.to_string();
    if record.job.command.is_none() {
        check::plan(&record.job)?;
    }
    let (news_in, news) = mpsc::unbounded_channel();
    let (stops_in, stops) = mpsc::unbounded_channel();
    outlive_hang_ups()?;
    stop_on_signals(stops_in.clone())?;
    if args.attached {
        stop_on_silence(stops_in)?;
    }
    fs::create_dir_all(dir.logs()).with_context(|| format!("making {}", dir.logs().display()))?;
    let program = std::env::current_exe().context("finding this program")?;
    let launcher = Local::new(program, dir.clone(), address.clone(), news_in)
        .tls(tls_dir)
        .command(record.job.command.clone());
    let outside = Outside {
        job_dir: dir.path().into(),
        token: Token::read(&dir.token())?,
        identity,
        listener,
        resume: args.resume,
        launcher: Box::new(launcher),
        news,
        stops,
        told: None,
    };
    let memory = record.job.command.as_ref().map(|_| Box::new(gang::File(dir.clone())) as Box<dyn Memory>);
    // The client takes this for the sign that it can call.
    dir.write_master(&MasterAt { address, pid: std::process::id() }).context("writing master.json")?;
    let outcome = lead(&dir, &record, outside, wanted, None, memory).await;
    let _ = fs::remove_file(dir.master_file());
    match outcome?.phase {
        Phase::Done | Phase::Stopped => Ok(Exit::Done),
        _ => Ok(Exit::Job),
    }
}

/// Leads the job: with a memory it is one that runs a program of its own. So many workers and servers as are wanted, and
/// no more workers than allowed at first.
pub async fn lead(
    dir: &JobDir,
    record: &Record,
    outside: Outside,
    wanted: ScaleRequest,
    workers_allowed: Option<u32>,
    memory: Option<Box<dyn Memory>>,
) -> anyhow::Result<Outcome> {
    let job = record.job.clone();
    if let Some(memory) = memory {
        return Ok(
            elasticdl_master::gang::run(elasticdl_master::gang::Config { job, outside, memory }).await?
        );
    }
    let config = elasticdl_master::Config {
        plan: check::plan(&job)?,
        outside,
        wanted,
        workers_allowed,
        best: truth::best(&job.data.validate),
        export: exporter(dir, record),
    };
    Ok(elasticdl_master::run(config).await?)
}

/// A path that means the same wherever this process and its children run.
fn absolute(path: Option<PathBuf>) -> anyhow::Result<Option<PathBuf>> {
    let full =
        path.map(|path| std::path::absolute(&path).with_context(|| format!("using {}", path.display())));
    full.transpose()
}

/// The certificate in a directory, for a role that listens there.
pub fn identity(dir: Option<&Path>, listen: SocketAddr) -> anyhow::Result<Option<Identity>> {
    let identity = dir.map(Identity::read).transpose()?;
    tls::may_listen(listen, identity.as_ref()).map_err(|e| {
        Fault::user(e.to_string())
            .hint("set security.tls to true in the job, or name the certificate with --tls-dir")
    })?;
    Ok(identity)
}

/// The job's lock and, where it has one, that of its checkpoint directory. Object storage has no locks: terms
/// decide there.
fn locks(dir: &JobDir, record: &Record) -> anyhow::Result<(Lock, Option<Lock>)> {
    let name = &record.job.name;
    let job = Lock::take(&dir.lock(), name).map_err(|refused| match refused {
        Refused::Held(holder) => submit::running(name, holder.as_ref(), "is running"),
        Refused::Io(e) => Fault::user(format!("cannot lock {}", dir.lock().display())).because(e),
    })?;
    if record.job.command.is_some() {
        return Ok((job, None));
    }
    let checkpoints = dir.checkpoints(record);
    if elasticdl_storage::is_url(&checkpoints) {
        return Ok((job, None));
    }
    fs::create_dir_all(&checkpoints).with_context(|| format!("making {}", checkpoints.display()))?;
    let theirs = Lock::take(&checkpoints.join("lock"), name).map_err(|refused| match refused {
        Refused::Held(holder) => submit::shared_checkpoints(&checkpoints, holder.as_ref()),
        Refused::Io(e) => Fault::user(format!("cannot lock {}", checkpoints.display())).because(e),
    })?;
    Ok((job, Some(theirs)))
}

/// Binds the port; one that is in use is tried again for `patience`.
pub async fn bind(listen: SocketAddr, patience: Duration) -> anyhow::Result<TcpListener> {
    let began = Instant::now();
    let bound = loop {
        match TcpListener::bind(listen).await {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && began.elapsed() < patience => {
                tokio::time::sleep(BIND_PAUSE).await;
            }
            other => break other,
        }
    };
    bound.map_err(|e| {
        let hint = match e.kind() {
            io::ErrorKind::AddrInUse => {
                "another process listens there: use another port, or none for a free one"
            }
            _ => "use an address of this machine, such as 127.0.0.1:0",
        };
        Fault::user(format!("the master cannot listen at {listen}")).because(e).hint(hint).into()
    })
}

pub fn exporter(dir: &JobDir, record: &Record) -> Option<Export> {
    let out = record.resolve(record.job.output.as_ref()?);
    let (dir, job) = (dir.clone(), record.job.clone());
    Some(Box::new(move |checkpoint| {
        let exported = export::export(&dir, &job, checkpoint, &out);
        exported.map(|exported| exported.as_json()).map_err(|e| format!("{e:#}"))
    }))
}

/// SIGTERM and SIGINT: the first stops after a checkpoint, the next at once.
fn stop_on_signals(stops: mpsc::UnboundedSender<StopRequest>) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
    tokio::spawn(async move {
        let mut now = false;
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if stops.send(StopRequest { now }).is_err() {
                return;
            }
            now = true;
        }
    });
    Ok(())
}

/// The kernel hangs up on all that a process has started when it dies while one of them is stopped. They are to go on:
/// whoever comes next takes them over.
pub fn outlive_hang_ups() -> anyhow::Result<()> {
    // What was listened for once kills no more, whether anybody still listens or not.
    signal(SignalKind::hangup()).map(drop).context("listening for SIGHUP")
}

/// The end of stdin: the client that started this job is gone, and nobody else looks after it.
fn stop_on_silence(stops: mpsc::UnboundedSender<StopRequest>) -> anyhow::Result<()> {
    let listen = move || {
        let mut byte = [0];
        while matches!(io::stdin().lock().read(&mut byte), Ok(n) if n > 0) {}
        tracing::warn!("the client is gone; stopping after a checkpoint");
        let _ = stops.send(StopRequest { now: false });
    };
    thread::Builder::new().name("client".into()).spawn(listen).context("starting a thread")?;
    Ok(())
}

/// `ps`: holds partitions until the master says that it may leave.
pub async fn ps(args: Member) -> anyhow::Result<Exit> {
    outlive_hang_ups()?;
    let token = Token::read(&args.token_file)?;
    let config = elasticdl_ps::Config {
        master: args.master,
        token,
        identity: identity(args.tls_dir.as_deref(), args.listen)?,
        id: ServerId(args.id),
        process: args.process.unwrap_or_else(std::process::id),
        listen: args.listen.to_string(),
    };
    elasticdl_ps::run(config).await?;
    Ok(Exit::Done)
}

/// `worker`: trains until there is nothing more to train.
pub fn worker(args: Member) -> anyhow::Result<Exit> {
    let token = Token::read(&args.token_file)?;
    let identity = args.tls_dir.as_deref().map(Identity::read).transpose()?;
    let process = args.process.unwrap_or_else(std::process::id);
    let config =
        elasticdl_worker::Config { master: args.master, token, identity, id: WorkerId(args.id), process };
    elasticdl_worker::run(config)?;
    Ok(Exit::Done)
}
