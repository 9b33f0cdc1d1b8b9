//! A worker from its first call to its last: the edge to the master, the clock and the system.
//!
//! What is asked and reported when is [`Session`]'s decision; here it is carried out.
#![expect(clippy::disallowed_methods, reason = "tells the session the time")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticdl_spec::{LeaseId, Plan, Position, WorkerId};
use elasticdl_wire::control::{
    Done, Failed, LeaseReply, Member, ReportRequest, Role, beat_reply, lease_reply,
    report_request::Outcome as Told,
};
use elasticdl_wire::{Identity, Token};
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tracing::{info, warn};

use crate::error::{Error, Result};
use crate::gauges::Gauges;
use crate::master::{Master, MasterPlaces};
use crate::pipeline::{self, Event, Outcome, Pipeline, Together};
use crate::ps_client::{self, Directory, PsClient};
use crate::session::{Effect, Input, Report, Session, State};
use crate::silence::Silence;
use crate::source::Files;
use crate::stop::{Level, Stop};
use crate::task::{Claim, Leased, LeasedTask};

/// How long a worker looks for a master before it knows `limits.orphan`.
const ORPHAN_BEFORE_JOIN: Duration = Duration::from_secs(30);
const TICK: Duration = Duration::from_millis(100);
/// How long batches in flight may take to land when the worker is to leave.
const DRAIN_MAX: Duration = Duration::from_secs(10);
/// How long the last reports may take after that.
const FAREWELL_MAX: Duration = Duration::from_secs(3);
/// Signs of life are not given more often, however fast the master answers them.
const BEAT_MIN: Duration = Duration::from_millis(100);
/// Batches that are read ahead at most; a task's batches are decoded together.
const READ_AHEAD_MAX: usize = 16;

/// What a worker is started with. All else comes from the master.
#[derive(Debug, Clone)]
pub struct Config {
    /// The master's host and port.
    pub master: String,
    /// The job's token.
    pub token: Token,
    /// The job's certificate; without one everything is plain.
    pub identity: Option<Identity>,
    /// Which worker this is.
    pub id: WorkerId,
    /// Tells it apart from others of its number.
    pub process: u32,
}

/// Works until there is nothing left to do, the master sends it away, or SIGTERM: then it drains, gives
/// its leases back and ends well. A second SIGTERM ends it at once.
pub fn run(config: Config) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("control")
        .enable_all()
        .build()
        .map_err(|source| Error::System { what: "an async runtime", source })?;
    let outcome = runtime.block_on(async {
        let mut sigterm = signal(SignalKind::terminate())
            .map_err(|source| Error::System { what: "a handler for SIGTERM", source })?;
        // The kernel hangs up on all that a master has started when it dies while one of them is stopped; the next master
        // takes them over.
        let _hang_ups = signal(SignalKind::hangup())
            .map_err(|source| Error::System { what: "a handler for SIGHUP", source })?;
        let (terminate, terminations) = unbounded_channel();
        tokio::spawn(async move { while sigterm.recv().await.is_some() && terminate.send(()).is_ok() {} });
        live(config, terminations).await
    });
    runtime.shutdown_background();
    outcome
}

/// A worker's life; each message in `terminations` is a SIGTERM.
async fn live(config: Config, mut terminations: UnboundedReceiver<()>) -> Result<()> {
    let member = Member { role: Role::Worker.into(), id: config.id.0, pid: config.process };
    let master = Master::new(&config.master, config.token.clone(), config.identity.as_ref(), member)?;
    let plan = tokio::select! {
        plan = master.join() => Arc::new(plan?),
        Some(()) = terminations.recv() => return Ok(()),
        orphaned = silence(&master, ORPHAN_BEFORE_JOIN) => return Err(orphaned),
    };
    info!(worker = %config.id, job = plan.job.name, "worker joined");
    let stop = Stop::default();
    let gauges = Arc::new(Gauges::default());
    let (events, happening) = unbounded_channel();
    let stages = start_stages(&config, &plan, &master, &stop, &gauges, events)?;
    let (control, controls) = unbounded_channel();
    tokio::spawn(beat(master.clone(), gauges, control.clone()));
    let worker = Worker {
        session: if plan.job.is_deterministic() {
            Session::one_after_the_other()
        } else {
            Session::default()
        },
        started: Instant::now(),
        master: master.clone(),
        stages,
        stop: stop.clone(),
        tasks: BTreeMap::new(),
        control,
        terminated: false,
        leave_by: None,
    };
    let outcome = tokio::select! {
        outcome = worker.work(happening, controls, terminations) => outcome,
        orphaned = silence(&master, plan.job.limits.orphan) => Err(orphaned),
    };
    stop.raise(Level::Stopped);
    outcome
}

/// Ends when the master was silent for too long.
async fn silence(master: &Master, limit: Duration) -> Error {
    let mut silence = Silence::new(limit);
    loop {
        let look = Instant::now();
        tokio::time::sleep(TICK).await;
        if master.was_heard() {
            silence.ends();
        } else {
            silence.lasts(look.elapsed());
        }
        if let Some(silence) = silence.too_long() {
            return Error::Orphaned { master: master.address().into(), silence };
        }
    }
}

fn start_stages(
    config: &Config,
    plan: &Arc<Plan>,
    master: &Master,
    stop: &Stop,
    gauges: &Arc<Gauges>,
    events: UnboundedSender<Event>,
) -> Result<Pipeline> {
    let job = &plan.job;
    let layout = &job.data.layout;
    let mut models = Vec::new();
    for _ in 0..job.workers.threads {
        let model = elasticdl_nn::build(&job.model, layout.numeric.len(), layout.categorical.len());
        models.push(model.map_err(Error::Model)?);
    }
    if models.iter().any(|model| *model.shape() != plan.shape) {
        let reason = format!("its {} has other tables and tensors than this binary's", job.model.zoo);
        return Err(Error::Plan { what: "plan of the job", reason });
    }
    let shape = Arc::new(plan.shape.clone());
    let places = MasterPlaces { master: master.clone(), runtime: Handle::current() };
    let client = ps_client::Config {
        shape: Arc::clone(&shape),
        tables: job.tables.clone(),
        partitions: job.servers.partitions,
        directory: Arc::new(Directory::new(job.servers.partitions, Box::new(places))),
        token: config.token.clone(),
        identity: config.identity.clone(),
        worker: config.id.0,
        staged: job.is_deterministic(),
        stop: stop.clone(),
    };
    Pipeline::start(pipeline::Config {
        shape,
        partitions: job.servers.partitions,
        depth: job.pipeline_depth(),
        together: match (job.is_gated(), job.is_synchronous()) {
            (_, true) => Together::InSteps,
            (true, false) => Together::Gated,
            (false, false) => Together::Freely,
        },
        read_ahead: (job.data.batches_per_task as usize).clamp(2, READ_AHEAD_MAX),
        bad_records_max: job.data.bad_records_max,
        schedule: job.train.schedule,
        clip: job.train.clip,
        models,
        source: Box::new(Files::new(Arc::clone(plan))),
        pulls: Box::new(PsClient::new(client.clone())),
        pushes: Box::new(PsClient::new(client)),
        stop: stop.clone(),
        gauges: Arc::clone(gauges),
        events,
    })
}

/// What the tasks that talk to the master have to say.
enum Control {
    /// An answer.
    Answer(Input),
    /// The master sends this worker away.
    SentAway,
    /// The master cannot be worked with.
    Broken(Error),
}

/// Signs of life, until the master sends us away.
async fn beat(master: Master, gauges: Arc<Gauges>, control: UnboundedSender<Control>) {
    let mut seen = 0;
    loop {
        let pause = tokio::time::sleep(BEAT_MIN);
        let said = match master.beat(&gauges, seen).await {
            Ok(reply) => {
                seen = seen.max(reply.command);
                match reply.what {
                    Some(beat_reply::What::Leave(true)) => Control::SentAway,
                    // Checkpoints are the servers' business.
                    _ => {
                        pause.await;
                        continue;
                    }
                }
            }
            Err(error) => Control::Broken(error),
        };
        // Nobody listens any more only where the worker has ended already.
        let _ = control.send(said);
        return;
    }
}

/// The session and what it moves.
struct Worker {
    session: Session,
    started: Instant,
    master: Master,
    stages: Pipeline,
    stop: Stop,
    tasks: BTreeMap<Claim, Arc<LeasedTask>>,
    control: UnboundedSender<Control>,
    /// Whether there was a SIGTERM.
    terminated: bool,
    /// When patience with what is in flight, or with the last reports, ends.
    leave_by: Option<tokio::time::Instant>,
}

/// Whether the worker goes on.
enum Then {
    GoOn,
    Leave,
}

impl Worker {
    async fn work(
        mut self,
        mut happening: UnboundedReceiver<Event>,
        mut controls: UnboundedReceiver<Control>,
        mut terminations: UnboundedReceiver<()>,
    ) -> Result<()> {
        let mut tick = tokio::time::interval(TICK);
        let mut stages_run = true;
        loop {
            let leave_by = self.leave_by;
            let input = tokio::select! {
                event = happening.recv(), if stages_run => match event {
                    Some(event) => self.take(event)?,
                    None => {
                        stages_run = false;
                        Input::StagesEnded
                    }
                },
                Some(control) = controls.recv() => match control {
                    Control::Answer(input) => input,
                    Control::SentAway => {
                        info!("sent away by the master");
                        self.drain_within(FAREWELL_MAX)
                    }
                    Control::Broken(error) => return Err(error),
                },
                Some(()) = terminations.recv() => {
                    if std::mem::replace(&mut self.terminated, true) {
                        return Err(Error::Killed);
                    }
                    info!("SIGTERM: finishing what is in flight");
                    self.drain_within(DRAIN_MAX)
                },
                () = until(leave_by) => {
                    if self.stop.reached(Level::Stopped) {
                        warn!("leaving without the master's answer to the last report");
                        return Ok(());
                    }
                    self.stop.raise(Level::Stopped);
                    self.leave_by = Some(tokio::time::Instant::now() + FAREWELL_MAX);
                    Input::Tick
                },
                _ = tick.tick() => Input::Tick,
            };
            if let Then::Leave = self.step(input) {
                self.stages.join();
                return Ok(());
            }
        }
    }

    fn drain_within(&mut self, time: Duration) -> Input {
        self.leave_by.get_or_insert(tokio::time::Instant::now() + time);
        Input::Drain
    }

    /// What happened in the stages, as the session's input.
    fn take(&mut self, event: Event) -> Result<Input> {
        Ok(match event {
            Event::Wanted => Input::Wanted,
            Event::Applied { claim, records, loss_sum } => Input::Applied { claim, records, loss_sum },
            Event::Began { claim } => Input::Began(claim),
            Event::Bad { claim, total, examples } => Input::Bad { claim, total, examples },
            Event::Ended { claim, outcome } => {
                if let Outcome::Failed { error, .. } = &outcome {
                    warn!(task = %claim.task, lease = %claim.lease, error, "task failed");
                }
                self.tasks.remove(&claim);
                Input::Ended(claim, outcome)
            }
            Event::Broken(error) => return Err(error),
        })
    }

    fn step(&mut self, input: Input) -> Then {
        let mut effects = Vec::new();
        self.session.step(self.started.elapsed(), input, &mut effects);
        for effect in effects {
            match effect {
                Effect::Ask { pause, ahead } => self.ask(pause, ahead),
                Effect::Start(leased) => {
                    let task = Arc::new(LeasedTask::new(leased));
                    self.tasks.insert(task.claim, Arc::clone(&task));
                    self.stages.give(task);
                }
                Effect::Drop(claim) => {
                    warn!(task = %claim.task, lease = %claim.lease, "lease lost, task dropped");
                    if let Some(task) = self.tasks.remove(&claim) {
                        task.drop_all();
                    }
                }
                Effect::Report(report) => self.report(report),
                Effect::EndStages => {
                    self.stop.raise(Level::Draining);
                    self.stages.close();
                }
                Effect::Leave => return Then::Leave,
            }
        }
        Then::GoOn
    }

    fn ask(&self, pause: Duration, ahead: bool) {
        let (master, control, stop) = (self.master.clone(), self.control.clone(), self.stop.clone());
        // Nothing is added to them before the answer, and the master minds none that is gone by then.
        let held = self.session.leases();
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            let said = if stop.reached(Level::Draining) {
                Control::Answer(Input::Wait(Duration::ZERO))
            } else {
                match master.lease(&held, ahead).await.and_then(understand) {
                    Ok((ended, input)) => {
                        if !ended.is_empty() {
                            let _ = control.send(Control::Answer(Input::LeasesEnded(ended)));
                        }
                        Control::Answer(input)
                    }
                    Err(error) => Control::Broken(error),
                }
            };
            let _ = control.send(said);
        });
    }

    fn report(&self, report: Report) {
        let (master, control) = (self.master.clone(), self.control.clone());
        tokio::spawn(async move {
            let said = match master.report(request(report)).await {
                Ok(reply) => Control::Answer(Input::Reported { held: reply.held }),
                Err(error) => Control::Broken(error),
            };
            let _ = control.send(said);
        });
    }
}

/// Waits for a moment, or for ever.
async fn until(moment: Option<tokio::time::Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// The master's answer to the wish for a task: leases that have ended, and the answer itself.
pub fn understand(reply: LeaseReply) -> Result<(BTreeSet<LeaseId>, Input)> {
    let wrong = |reason: String| Error::Plan { what: "lease", reason };
    let ended = reply.ended.iter().map(|lease| LeaseId { term: lease.term, n: lease.n }).collect();
    let input = match reply.what {
        Some(lease_reply::What::Leased(leased)) => {
            let task = leased.task.parse().map_err(wrong)?;
            let lease = LeaseId { term: leased.term, n: leased.lease };
            let shard = serde_json::from_str(&leased.shard).map_err(|e| wrong(e.to_string()))?;
            let quarantined = leased.quarantined.into_iter().collect();
            let claim = Claim { task, lease };
            let position = Position { first: leased.first_step, total: leased.steps };
            Input::Leased(Leased { claim, shard, again: leased.again, quarantined, position })
        }
        Some(lease_reply::What::WaitMs(pause)) => Input::Wait(Duration::from_millis(pause.into())),
        Some(lease_reply::What::Finished(true)) => Input::Finished,
        other => return Err(wrong(format!("{other:?} is no answer"))),
    };
    Ok((ended, input))
}

/// A report as the master is told it.
pub fn request(report: Report) -> ReportRequest {
    let told = match report.state {
        State::Progress => Told::Progress(true),
        State::Returned => Told::Returned(true),
        State::Ended(Outcome::Done { records, batches, incarnations, scores }) => {
            let scores = scores.unwrap_or_default();
            Told::Done(Done { task_records: records, scores, batches, incarnations })
        }
        State::Ended(Outcome::Failed { error, batch, fatal }) => Told::Failed(Failed { error, batch, fatal }),
        State::Ended(Outcome::Lost) => unreachable!("the session reports no lost task"),
    };
    ReportRequest {
        member: None,
        task: report.claim.task.to_string(),
        term: report.claim.lease.term,
        lease: report.claim.lease.n,
        batches: report.batches,
        records: report.records,
        loss_sum: report.loss_sum,
        bad_records: report.bad_records,
        bad_examples: report.bad_examples,
        outcome: Some(told),
        began: report.began,
    }
}

#[cfg(test)]
mod tests;
