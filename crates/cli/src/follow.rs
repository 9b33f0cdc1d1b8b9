//! Follows a job to its end: its events, its status, its process, and the person's Ctrl-C. A master that dies
//! on the way is started again.

#![expect(clippy::disallowed_methods, reason = "an edge: it polls, waits and reads the clock")]

use std::fs;
use std::net::SocketAddr;
use std::pin::pin;
use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use elasticdl_master::status::{Event, ScaleRequest, Status, StopRequest};
use elasticdl_spec::JobSpec;
use serde_json::{Map, Value, json};
use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use crate::client::Client;
use crate::fault::{self, Exit};
use crate::home::{JobDir, MasterAt, last_lines};
use crate::lock::Lock;
use crate::revive::{Next, Revivals, is_death};
use crate::submit::{Claim, Start, Started};
use crate::view::{View, summary};
use crate::{print, store};

/// What the pollers bring.
enum News {
    Events(Vec<Event>),
    Status(Box<Status>),
}

/// How long a master may take to leave after it said that the job is over.
const LEAVE_LIMIT: Duration = Duration::from_secs(30);
/// Between two tries to reach a master that does not answer.
const RETRY: Duration = Duration::from_millis(100);

/// Follows a job that this process started, and starts its master again where that dies.
pub async fn follow(started: Started, mut view: View) -> anyhow::Result<Exit> {
    let Started { dir, mut child, leash, at, client, events_before, seq_before, wanted } = started;
    let mut _leash = leash;
    // Says to others that a master that dies will be back. Where it cannot be had they don't wait for one.
    let _tending = Lock::take(&dir.client_lock(), &dir.record()?.job.name).ok();
    let mut job = Followed::new(dir, client, &view, seq_before)?;
    (job.events_before, job.wanted) = (events_before, wanted);
    let mut signals = Signals::listen()?;
    let died = loop {
        let died = tokio::select! {
            Some(news) = job.news.recv() => {
                job.take(news, &mut view)?;
                None
            }
            status = child.wait() => Some(status.context("waiting for the master")?),
            () = signals.recv() => {
                job.interrupted(&mut view)?;
                None
            }
        };
        if job.finished.is_some() {
            break None;
        }
        let Some(status) = died else { continue };
        match job.revive(status, &at, &mut signals, &mut view).await? {
            Some(again) => (child, _leash) = (again.child, again.leash),
            None => break Some(status),
        }
    };
    let died = match died {
        Some(status) => Some(status),
        None => leave(&mut child).await,
    };
    view.end()?;
    job.conclude(died, &mut view)
}

/// Ctrl-C, and the same asked for by SIGTERM.
struct Signals {
    interrupts: Signal,
    terminations: Signal,
}

impl Signals {
    fn listen() -> anyhow::Result<Signals> {
        let interrupts = signal(SignalKind::interrupt()).context("listening for Ctrl-C")?;
        let terminations = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
        Ok(Signals { interrupts, terminations })
    }

    async fn recv(&mut self) {
        tokio::select! {
            _ = self.interrupts.recv() => {}
            _ = self.terminations.recv() => {}
        }
    }
}

/// Starts the master of a job again where the one before it listened.
async fn restart(dir: JobDir, listen: Option<SocketAddr>, wanted: ScaleRequest) -> anyhow::Result<Started> {
    let claim = Claim::again(dir)?;
    // One that died before its first entry has nothing to go on from: then the job begins.
    // A program of its own goes on from what is remembered of it, if anything is.
    let program = claim.record().job.command.is_some();
    let resume = !program && store::has_begun(&claim.dir().checkpoints(claim.record()));
    claim.start(Start { resume, detach: false, listen, wanted }).await
}

/// Watches a job that runs elsewhere; Ctrl-C leaves it alone.
pub async fn watch(dir: JobDir, client: Client, mut view: View) -> anyhow::Result<Exit> {
    // What happened before is in the status; the view begins with what happens from now on.
    let events_before = fs::metadata(dir.events()).map_or(0, |file| file.len());
    let seen = dir.last_seq();
    let mut job = Followed::new(dir, client, &view, seen)?;
    job.events_before = events_before;
    let mut interrupts = signal(SignalKind::interrupt()).context("listening for Ctrl-C")?;
    let mut looks = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            Some(news) = job.news.recv() => job.take(news, &mut view)?,
            _ = looks.tick() => if !job.dir.is_running() { break },
            _ = interrupts.recv() => {
                view.end()?;
                return Ok(Exit::Done);
            }
        }
        if job.finished.is_some() {
            break;
        }
    }
    view.end()?;
    job.conclude(None, &mut view)
}

/// A job as far as it is known here.
struct Followed {
    dir: JobDir,
    name: String,
    /// Whether it runs a program of its own, which has no checkpoint that we know of.
    is_program: bool,
    client: Client,
    news: mpsc::UnboundedReceiver<News>,
    began: Instant,
    interrupts: u32,
    last_seq: u64,
    /// Length of the events file when this began.
    events_before: u64,
    last_status: Option<Status>,
    /// What a master was told to have and may not have written down.
    wanted: ScaleRequest,
    revivals: Revivals,
    /// Why the master could not be started again.
    stillborn: Option<String>,
    finished: Option<Event>,
}

impl Followed {
    /// A job whose events after number `seen` are of interest.
    fn new(dir: JobDir, client: Client, view: &View, seen: u64) -> anyhow::Result<Self> {
        let (sender, news) = mpsc::unbounded_channel();
        poll_events(client.clone(), seen, sender.clone())?;
        if let Some(pace) = view.pace() {
            poll_status(client.clone(), pace, sender)?;
        }
        let JobSpec { name, limits, command, .. } = dir.record()?.job;
        let began = Instant::now();
        Ok(Followed {
            dir,
            name,
            is_program: command.is_some(),
            client,
            news,
            began,
            interrupts: 0,
            last_seq: seen,
            events_before: 0,
            last_status: None,
            wanted: ScaleRequest::default(),
            revivals: Revivals::new(limits.restarts),
            stillborn: None,
            finished: None,
        })
    }

    fn take(&mut self, news: News, view: &mut View) -> anyhow::Result<()> {
        match news {
            News::Events(events) => {
                // What a master told to its events file and to nobody else before it died comes first.
                if events.first().is_some_and(|event| event.seq > self.last_seq + 1) {
                    self.catch_up(view)?;
                }
                for event in events {
                    self.event(event, view)?;
                }
            }
            News::Status(status) => {
                view.status(self.began.elapsed(), &status)?;
                self.last_status = Some(*status);
            }
        }
        Ok(())
    }

    /// Takes in what is in the events file and was not fetched from the master.
    fn catch_up(&mut self, view: &mut View) -> anyhow::Result<()> {
        for event in self.dir.events_from(self.events_before) {
            self.event(event, view)?;
        }
        Ok(())
    }

    fn event(&mut self, event: Event, view: &mut View) -> anyhow::Result<()> {
        // What processes still do when the job is over is of no interest, and `finished` is promised to
        // be the last event. Events that were read from the file may be fetched from the master, too.
        if self.finished.is_some() || event.seq <= self.last_seq {
            return Ok(());
        }
        self.last_seq = event.seq;
        if matches!(event.event.as_str(), "training" | "progress" | "checkpoint")
            && let Some(records) = event.fields.get("records").and_then(Value::as_u64)
        {
            self.revivals.records(records);
        }
        if event.event == "running" {
            self.revivals.progress();
        }
        if event.event == "started" {
            self.wanted = ScaleRequest::default();
        }
        view.event(&event)?;
        if event.event == "finished" {
            self.finished = Some(event);
        }
        Ok(())
    }

    /// The first Ctrl-C asks for a checkpoint and a stop, the second for a stop at once, the third leaves;
    /// the master then notices that its client is gone.
    fn interrupted(&mut self, view: &mut View) -> anyhow::Result<()> {
        self.interrupts += 1;
        let now = match self.interrupts {
            1 if self.is_program => {
                view.note("stopping: the program is asked to end; Ctrl-C again ends it at once")?;
                false
            }
            2 if self.is_program => {
                view.note("stopping at once")?;
                true
            }
            1 => {
                view.note("stopping after a checkpoint; Ctrl-C again stops at once")?;
                false
            }
            2 => {
                view.note("stopping at once; what was trained since the last checkpoint is lost")?;
                true
            }
            _ => {
                view.end()?;
                anyhow::bail!(fault::Fault::job("left while the job was stopping"));
            }
        };
        self.ask_to_stop(now);
        Ok(())
    }

    fn ask_to_stop(&self, now: bool) {
        let client = self.client.clone();
        // The answer is the job's end; a master that cannot be reached is noticed by its process.
        spawn_blocking(move || client.stop(StopRequest { now }));
    }

    /// Starts a master that died again; `None` where it had told the outcome, or where that does not help.
    async fn revive(
        &mut self,
        status: ExitStatus,
        at: &MasterAt,
        signals: &mut Signals,
        view: &mut View,
    ) -> anyhow::Result<Option<Started>> {
        self.catch_up(view)?;
        if self.finished.is_some() || !is_death(status) {
            return Ok(None);
        }
        let mut how = status.to_string();
        loop {
            let Next::Again(pause) = self.revivals.died() else { return Ok(None) };
            view.note(&format!("the master of {} died ({how}); starting it again", self.name))?;
            self.meanwhile(tokio::time::sleep(pause), signals, view).await?;
            let again = restart(self.dir.clone(), at.address.parse().ok(), self.wanted);
            match self.meanwhile(again, signals, view).await? {
                Ok(started) => {
                    // The one that died may not have heard of it.
                    if self.interrupts > 0 {
                        self.ask_to_stop(self.interrupts > 1);
                    }
                    return Ok(Some(started));
                }
                Err(error) if fault::exit(&error) == Exit::User => {
                    self.stillborn = Some(format!("{error:#}"));
                    return Ok(None);
                }
                Err(error) => how = format!("{error:#}"),
            }
        }
    }

    /// Waits for something and goes on taking in news and Ctrl-C.
    async fn meanwhile<T>(
        &mut self,
        future: impl Future<Output = T>,
        signals: &mut Signals,
        view: &mut View,
    ) -> anyhow::Result<T> {
        let mut future = pin!(future);
        loop {
            tokio::select! {
                outcome = &mut future => return Ok(outcome),
                Some(news) = self.news.recv() => self.take(news, view)?,
                () = signals.recv() => self.interrupted(view)?,
            }
        }
    }

    /// Says how it ended, once nothing more comes.
    fn conclude(mut self, died: Option<ExitStatus>, view: &mut View) -> anyhow::Result<Exit> {
        self.catch_up(view)?;
        // One that says nothing and ends so has found something wrong with the job before it led it.
        let user =
            self.finished.is_none() && died.and_then(|status| status.code()) == Some(Exit::User as i32);
        let finished = match self.finished.take() {
            Some(event) => event,
            None => {
                let event = self.death(died);
                view.event(&event)?;
                event
            }
        };
        let outcome = finished.fields.get("outcome").and_then(Value::as_str).unwrap_or("failed");
        if !matches!(view, View::Json) {
            print::line(&summary(&self.name, &finished))?;
        }
        match outcome {
            "done" => Ok(Exit::Done),
            "stopped" => {
                let how = if self.is_program { "runs it again" } else { "goes on from the last checkpoint" };
                print::note(&format!("hint: `elasticdl resume {}` {how}", self.name));
                Ok(Exit::Done)
            }
            _ => {
                let error =
                    finished.fields.get("error").and_then(Value::as_str).unwrap_or("it does not say why");
                print::note(&format!("error: job {:?} failed: {error}", self.name));
                print::note(&format!("hint: `elasticdl logs {}` shows what its processes wrote", self.name));
                Ok(if user { Exit::User } else { Exit::Job })
            }
        }
    }

    /// The end of a job whose master could not tell it.
    fn death(&self, died: Option<ExitStatus>) -> Event {
        let how = died.map_or("it is gone".into(), |status| status.to_string());
        let lines = last_lines(&self.dir.log("master"), 5).unwrap_or_default();
        let mut error = format!("its master died ({how})");
        if self.revivals.deaths() > 1 {
            error.push_str(&format!(" for the {}th time without a record done", self.revivals.deaths()));
        }
        if let Some(why) = &self.stillborn {
            error.push_str(&format!(" and could not be started again: {why}"));
        }
        if !lines.is_empty() {
            error.push_str(&format!("; its last lines:\n  {}", lines.join("\n  ")));
        }
        let status = self.last_status.as_ref();
        let mut fields = Map::new();
        fields.insert("outcome".into(), json!("failed"));
        fields.insert("error".into(), json!(error));
        fields.insert("records".into(), json!(status.map(|s| s.records)));
        fields.insert("logloss".into(), json!(status.and_then(|s| s.logloss)));
        fields.insert("auc".into(), json!(status.and_then(|s| s.auc)));
        let seconds = self.began.elapsed().as_secs_f64();
        let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
        Event { event: "finished".into(), seq: self.last_seq + 1, seconds, unix_ms, fields }
    }
}

/// Waits for a master that has said that the job is over; `None` where it stays.
async fn leave(child: &mut Child) -> Option<ExitStatus> {
    tokio::time::timeout(LEAVE_LIMIT, child.wait()).await.ok()?.ok()
}

/// Asks for events, one call after the other, until nobody listens.
fn poll_events(client: Client, mut after: u64, sender: mpsc::UnboundedSender<News>) -> anyhow::Result<()> {
    let poll = move || {
        loop {
            match client.events(after) {
                Ok(events) => {
                    after = events.last().map_or(after, |event| event.seq);
                    if sender.send(News::Events(events)).is_err() {
                        return;
                    }
                }
                // The master is busy, or gone; its process tells which.
                Err(_) if sender.is_closed() => return,
                Err(_) => thread::sleep(RETRY),
            }
        }
    };
    thread::Builder::new().name("events".into()).spawn(poll).context("starting a thread")?;
    Ok(())
}

/// Asks for the status at a steady pace, until nobody listens.
fn poll_status(client: Client, pace: Duration, sender: mpsc::UnboundedSender<News>) -> anyhow::Result<()> {
    let poll = move || {
        while !sender.is_closed() {
            if let Ok(status) = client.status() {
                let _ = sender.send(News::Status(Box::new(status)));
            }
            thread::sleep(pace);
        }
    };
    thread::Builder::new().name("status".into()).spawn(poll).context("starting a thread")?;
    Ok(())
}
