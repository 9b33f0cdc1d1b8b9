//! Follows a job to its end: its events, its status, its process, and the person's Ctrl-C.

#![expect(clippy::disallowed_methods, reason = "an edge: it polls, waits and reads the clock")]

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use elasticdl_master::status::{Event, Status, StopRequest};
use serde_json::{Map, Value, json};
use tokio::process::Child;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use crate::client::Client;
use crate::fault::Exit;
use crate::home::{JobDir, last_lines};
use crate::print;
use crate::submit::Started;
use crate::view::{View, summary};

/// What the pollers bring.
enum News {
    Events(Vec<Event>),
    Status(Box<Status>),
}

/// How long a master may take to leave after it said that the job is over.
const LEAVE_LIMIT: Duration = Duration::from_secs(30);
/// Between two tries to reach a master that does not answer.
const RETRY: Duration = Duration::from_millis(100);

/// Follows a job that this process started.
pub async fn follow(started: Started, mut view: View) -> anyhow::Result<Exit> {
    let Started { dir, mut child, leash: _leash, client, events_before, .. } = started;
    let mut job = Followed::new(dir, client, &view, 0)?;
    job.events_before = events_before;
    let mut interrupts = signal(SignalKind::interrupt()).context("listening for Ctrl-C")?;
    let mut terms = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let died = loop {
        tokio::select! {
            Some(news) = job.news.recv() => job.take(news, &mut view)?,
            status = child.wait() => break Some(status.context("waiting for the master")?),
            _ = interrupts.recv() => job.interrupted(&mut view)?,
            _ = terms.recv() => job.interrupted(&mut view)?,
        }
        if job.finished.is_some() {
            break None;
        }
    };
    let died = match died {
        Some(status) => Some(status),
        None => leave(&mut child).await,
    };
    view.end()?;
    job.conclude(died, &mut view)
}

/// Watches a job that runs elsewhere; Ctrl-C leaves it alone.
pub async fn watch(dir: JobDir, client: Client, mut view: View) -> anyhow::Result<Exit> {
    // What happened before is in the status; the view begins with what happens from now on.
    let events_before = fs::metadata(dir.events()).map_or(0, |file| file.len());
    let seen = client.events(0)?.last().map_or(0, |event| event.seq);
    let mut job = Followed::new(dir, client, &view, seen)?;
    job.events_before = events_before;
    let mut interrupts = signal(SignalKind::interrupt()).context("listening for Ctrl-C")?;
    let mut looks = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            Some(news) = job.news.recv() => job.take(news, &mut view)?,
            _ = looks.tick() => if job.dir.holder().is_none() { break },
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
    client: Client,
    news: mpsc::UnboundedReceiver<News>,
    began: Instant,
    interrupts: u32,
    last_seq: u64,
    /// Length of the events file before this run: numbers begin anew with each.
    events_before: u64,
    last_status: Option<Status>,
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
        let name = dir.record()?.job.name;
        let began = Instant::now();
        Ok(Followed {
            dir,
            name,
            client,
            news,
            began,
            interrupts: 0,
            last_seq: seen,
            events_before: 0,
            last_status: None,
            finished: None,
        })
    }

    fn take(&mut self, news: News, view: &mut View) -> anyhow::Result<()> {
        match news {
            News::Events(events) => {
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

    fn event(&mut self, event: Event, view: &mut View) -> anyhow::Result<()> {
        // What processes still do when the job is over is of no interest, and `finished` is promised to
        // be the last event.
        if self.finished.is_some() {
            return Ok(());
        }
        self.last_seq = event.seq;
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
                anyhow::bail!(crate::fault::Fault::job("left while the job was stopping"));
            }
        };
        let client = self.client.clone();
        // The answer is the job's end; a master that cannot be reached is noticed by its process.
        spawn_blocking(move || client.stop(StopRequest { now }));
        Ok(())
    }

    /// Says how it ended, once nothing more comes.
    fn conclude(mut self, died: Option<ExitStatus>, view: &mut View) -> anyhow::Result<Exit> {
        for event in self.unseen() {
            self.event(event, view)?;
        }
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
                print::note(&format!(
                    "hint: `elasticdl resume {}` goes on from the last checkpoint",
                    self.name
                ));
                Ok(Exit::Done)
            }
            _ => {
                let error =
                    finished.fields.get("error").and_then(Value::as_str).unwrap_or("it does not say why");
                print::note(&format!("error: job {:?} failed: {error}", self.name));
                print::note(&format!("hint: `elasticdl logs {}` shows what its processes wrote", self.name));
                Ok(Exit::Job)
            }
        }
    }

    /// Events that the master wrote and nobody fetched before it left.
    fn unseen(&self) -> Vec<Event> {
        let mut text = Vec::new();
        if let Ok(mut file) = File::open(self.dir.events()) {
            // What cannot be read was not written; the process's exit tells the rest.
            let _ = file.seek(SeekFrom::Start(self.events_before)).and_then(|_| file.read_to_end(&mut text));
        }
        let lines = text.split(|byte| *byte == b'\n');
        let events = lines.filter_map(|line| serde_json::from_slice::<Event>(line).ok());
        events.filter(|event| event.seq > self.last_seq).collect()
    }

    /// The end of a job whose master could not tell it.
    fn death(&self, died: Option<ExitStatus>) -> Event {
        let how = died.map_or("it is gone".into(), |status| status.to_string());
        let lines = last_lines(&self.dir.log("master"), 5).unwrap_or_default();
        let mut error = format!("its master died ({how})");
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
        Event { event: "finished".into(), seq: self.last_seq + 1, seconds, fields }
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
