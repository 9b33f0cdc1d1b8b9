//! Edge: the loop that feeds the job events and carries out its effects.
#![expect(clippy::disallowed_methods, reason = "the edge reads the clock and starts threads")]

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use elasticdl_wire::control::{BeatReply, Role, beat_reply};
use elasticdl_wire::{failpoint, tls};
use tokio::sync::{mpsc, oneshot};

use crate::config::{Config, Export, Launcher, News};
use crate::error::{Error, Result};
use crate::fleet::Order;
use crate::job::{Answer, Effect, Event, Job, Start, Ticket};
use crate::ledger::{self, Entry, Ledger, TermsOfJob};
use crate::pruner::Pruner;
use crate::server::{Input, router};
use crate::status::{LedgerStatus, Phase, Status};
use crate::teller::Teller;
use crate::{listen, shards, store};

/// How often time passes for the job.
const TICK: Duration = Duration::from_millis(50);
/// How long processes may take to end once the job is over, before they are ended.
const GOODBYE: Duration = Duration::from_secs(5);

/// How the job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Done, failed or stopped.
    pub phase: Phase,
}

/// Runs a job to its end, from wherever its ledger says it is.
pub async fn run(mut config: Config) -> Result<Outcome> {
    let address = config.outside.listener.local_addr().map_err(|e| Error::io("asking for the address", e))?;
    tls::may_listen(address, config.outside.identity.as_ref())?;
    let job_spec = config.plan.job.clone();
    let default_dir = config.outside.job_dir.join("checkpoint");
    let checkpoint_dir = job_spec.checkpoint.dir.as_ref().map_or(default_dir, PathBuf::from);
    let (ledger, start) = prepare(&mut config, &checkpoint_dir)?;
    let (inputs_sender, inputs) = mpsc::unbounded_channel();
    let teller = Teller::open(&config.outside.job_dir, config.outside.told, events_before(&start))?;
    let app = router(config.outside.token.clone(), inputs_sender.clone(), teller.log());
    let serving = listen::serve(config.outside.listener, config.outside.identity.as_ref(), app)?;
    index(&job_spec, config.outside.job_dir.join("index"), inputs_sender.clone())?;

    let running =
        start.book.processes.values().map(|p| (p.process.pid, (Role::from(p.role), p.id))).collect();
    let pruner = Pruner::start(&checkpoint_dir, job_spec.checkpoint.keep);
    let mut edge = Edge {
        job: Job::new(start),
        ledger,
        began: Instant::now(),
        checkpoint_dir,
        launcher: config.outside.launcher,
        export: config.export,
        inputs: inputs_sender,
        tickets: BTreeMap::new(),
        ticket_next: 1,
        teller,
        running,
        over: None,
        pruner,
    };
    let outcome = edge.follow(inputs, config.outside.news, config.outside.stops).await;
    edge.pruner.finish(GOODBYE).await;
    if outcome.is_ok() {
        edge.teller.farewell().await;
    }
    serving.abort();
    outcome.map(|phase| Outcome { phase })
}

/// Opens the ledger, checks that it is this job's, and takes over what still runs.
fn prepare(config: &mut Config, checkpoint_dir: &Path) -> Result<(Ledger, Start)> {
    elasticdl_storage::make_dir(checkpoint_dir)
        .map_err(|e| Error::io(format!("making the checkpoint directory {}", checkpoint_dir.display()), e))?;
    let shown = checkpoint_dir.display().to_string();
    if config.outside.resume && ledger::read(checkpoint_dir)?.is_none_or(|book| book.is_empty()) {
        return Err(Error::NothingToResume(shown));
    }
    let term = store::claim_term(checkpoint_dir)?;
    failpoint::reached("master.term_claimed");
    let mut ledger = Ledger::open(checkpoint_dir, term)?;
    let book = ledger.book();
    let difference = book.terms_of_job.difference(&TermsOfJob::of(&config.plan));
    if let Some(reason) = difference.filter(|_| !book.is_empty()) {
        return Err(Error::Ledger { path: ledger::dir_of(checkpoint_dir).display().to_string(), reason });
    }
    let committed = book.committed.map(|id| store::load(checkpoint_dir, id)).transpose()?;
    if let Some(manifest) = &committed {
        store::check_fits(&shown, manifest, &config.plan)?;
    }
    let wanted = config.wanted.entries(&config.plan.job, ledger.book());
    if !wanted.is_empty() {
        ledger.append(&wanted)?;
    }
    let mut book = ledger.book().clone();
    let launcher = &mut config.outside.launcher;
    book.processes.retain(|_, running| launcher.adopt(running.role.into(), running.id, running.process));
    let start = Start {
        plan: config.plan.clone(),
        checkpoint_dir: shown,
        checkpoint_next: store::next_id(checkpoint_dir)?,
        checkpoint_age: match (book.is_empty(), book.committed) {
            (true, _) => Duration::ZERO,
            (false, Some(id)) => store::age(checkpoint_dir, id),
            (false, None) => Duration::MAX,
        },
        term,
        book,
        committed,
        best: config.best,
        exports: config.export.is_some(),
        workers_allowed: config.workers_allowed,
    };
    Ok((ledger, start))
}

/// A master that goes on elsewhere than the one before has no events file to look into, and counts from beyond what
/// that one can have told.
fn events_before(start: &Start) -> u64 {
    const EVENTS_PER_TERM: u64 = 1 << 32;
    if start.book.is_empty() { 0 } else { start.term * EVENTS_PER_TERM }
}

/// Indexes the files on a thread of its own.
fn index(
    job: &elasticdl_spec::JobSpec,
    index_dir: PathBuf,
    inputs: mpsc::UnboundedSender<Input>,
) -> Result<()> {
    fs::create_dir_all(&index_dir).map_err(|e| Error::io(format!("making {}", index_dir.display()), e))?;
    let job = job.clone();
    // The loop may be gone before the index is done; then nobody needs it.
    let mut send = move |event| drop(inputs.send(Input::Event(event)));
    std::thread::Builder::new()
        .name("index".into())
        .spawn(move || shards::find(&job, &index_dir, &mut send))
        .map_err(|e| Error::io("starting the indexing thread", e))?;
    Ok(())
}

/// The job with everything it touches.
struct Edge {
    job: Job,
    ledger: Ledger,
    began: Instant,
    checkpoint_dir: PathBuf,
    launcher: Box<dyn Launcher>,
    export: Option<Export>,
    inputs: mpsc::UnboundedSender<Input>,
    tickets: BTreeMap<Ticket, oneshot::Sender<Answer>>,
    ticket_next: Ticket,
    teller: Teller,
    /// Processes that were started and whose exit has not been seen.
    running: BTreeMap<u32, (Role, u32)>,
    over: Option<(Phase, Instant)>,
    pruner: Pruner,
}

impl Edge {
    async fn follow(
        &mut self,
        mut inputs: mpsc::UnboundedReceiver<Input>,
        mut news: mpsc::UnboundedReceiver<News>,
        mut stops: mpsc::UnboundedReceiver<crate::status::StopRequest>,
    ) -> Result<Phase> {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.step(Event::Begin)?;
        loop {
            tokio::select! {
                biased;
                Some(news) = news.recv() => match news {
                    News::Exited(exit) => {
                        self.running.remove(&exit.pid);
                        self.step(Event::Exited(exit))?;
                    }
                    News::Waits(waits) => self.step(Event::Waits(waits))?,
                    // Whoever has room joins soon, and that is told.
                    News::Placed(_) => {}
                },
                Some(stop) = stops.recv() => self.step(Event::Stop(stop))?,
                Some(input) = inputs.recv() => self.input(input)?,
                _ = tick.tick() => self.step(Event::Tick)?,
            }
            if let Some((phase, since)) = self.over {
                if self.running.is_empty() {
                    return Ok(phase);
                }
                if since.elapsed() > GOODBYE {
                    for (pid, (role, id)) in std::mem::take(&mut self.running) {
                        self.launcher.kill(role, id, pid);
                    }
                    return Ok(phase);
                }
            }
        }
    }

    fn input(&mut self, input: Input) -> Result<()> {
        match input {
            Input::Event(event) => self.step(event)?,
            Input::Question(make, reply) => {
                let ticket = self.ticket_next;
                self.ticket_next += 1;
                self.tickets.insert(ticket, reply);
                self.step(make(ticket))?;
            }
            // Whoever asked may have gone.
            Input::Status(reply) => drop(reply.send(self.status())),
        }
        Ok(())
    }

    fn status(&self) -> Status {
        Status { ledger: self.ledger_status(), ..self.job.status(self.began.elapsed()) }
    }

    fn ledger_status(&self) -> LedgerStatus {
        let wait = self.ledger.waited.as_secs_f64();
        LedgerStatus {
            entries: self.ledger.entries,
            bytes: self.ledger.bytes(),
            wait_seconds: wait,
            share: wait / self.began.elapsed().as_secs_f64().max(f64::EPSILON),
        }
    }

    /// Has the job take an event in, and does what it decides: what it records is written before anything
    /// that follows from it is done.
    ///
    /// # Errors
    ///
    /// The ledger cannot be written: nothing more may be promised.
    fn step(&mut self, event: Event) -> Result<()> {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let mut effects = Vec::new();
            self.job.step(self.began.elapsed(), event, &mut effects);
            let mut effects = effects.into_iter().peekable();
            while let Some(effect) = effects.next() {
                let Effect::Record(entry) = effect else {
                    events.extend(self.carry_out(effect));
                    continue;
                };
                let mut entries = vec![entry];
                while let Some(Effect::Record(entry)) = effects.next_if(|e| matches!(e, Effect::Record(_))) {
                    entries.push(entry);
                }
                self.ledger.append(&entries)?;
                if entries.iter().any(|entry| matches!(entry, Entry::Leased { .. })) {
                    failpoint::reached("master.lease_recorded");
                }
                if entries.iter().any(|entry| matches!(entry, Entry::Moved { .. })) {
                    failpoint::reached("master.moved_recorded");
                }
            }
        }
        Ok(())
    }

    /// Does what the job decided; what comes of it at once is an event again.
    fn carry_out(&mut self, effect: Effect) -> Option<Event> {
        match effect {
            Effect::Record(_) => unreachable!("records are written where they stand"),
            Effect::Answer(ticket, answer) => {
                if let Answer::Beat(BeatReply {
                    what: Some(beat_reply::What::WriteCheckpoint(write)), ..
                }) = &answer
                    && let Err(error) = elasticdl_storage::make_dir(&write.dir)
                {
                    // The server will fail to write into it and say so.
                    tracing::warn!(dir = write.dir, %error, "cannot make the checkpoint's directory");
                }
                // A caller that gave up waiting asks again.
                if let Some(reply) = self.tickets.remove(&ticket) {
                    let _ = reply.send(answer);
                }
                None
            }
            Effect::Fleet(order) => self.order(order),
            Effect::Kill(role, id, pid) => {
                self.launcher.kill(role, id, pid);
                None
            }
            Effect::Commit(manifest) => {
                let (dir, inputs) = (self.checkpoint_dir.clone(), self.inputs.clone());
                tokio::task::spawn_blocking(move || {
                    let id = manifest.id;
                    let outcome =
                        store::commit(&dir, &manifest).map(|()| manifest).map_err(|e| e.to_string());
                    failpoint::reached("master.manifest_written");
                    let _ = inputs.send(Input::Event(Event::Committed(id, outcome)));
                });
                None
            }
            Effect::Prune(committed) => {
                self.pruner.prune(committed);
                None
            }
            Effect::Export(id) => self.export(id),
            Effect::Emit(event, mut fields) => {
                if event == "finished" {
                    let ledger = serde_json::to_value(self.ledger_status()).expect("numbers are JSON");
                    fields.insert("ledger".into(), ledger);
                }
                self.teller.emit(event, fields);
                None
            }
            Effect::Finish(phase) => {
                self.over = Some((phase, Instant::now()));
                None
            }
        }
    }

    fn order(&mut self, order: Order) -> Option<Event> {
        match order {
            Order::Start { role, id } => {
                let outcome = self.launcher.start(role, id).map_err(|e| e.to_string());
                if let Ok(process) = outcome {
                    self.running.insert(process.pid, (role, id));
                }
                Some(Event::Launched(role, id, outcome))
            }
            Order::Stop { role, id, pid } => {
                self.launcher.stop(role, id, pid);
                None
            }
            Order::GiveUp { .. } => unreachable!("the job turns this into a failure"),
        }
    }

    fn export(&mut self, id: u64) -> Option<Event> {
        let export = self.export.take().expect("a job exports once, and only with an exporter");
        let dir = PathBuf::from(store::checkpoint_path(&self.checkpoint_dir.display().to_string(), id));
        let inputs = self.inputs.clone();
        tokio::task::spawn_blocking(move || {
            let _ = inputs.send(Input::Event(Event::Exported(export(&dir))));
        });
        None
    }
}
