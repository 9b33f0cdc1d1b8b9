//! Edge: the loop that feeds a gang events and carries out its effects.
#![expect(clippy::disallowed_methods, reason = "the edge reads the clock")]

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use elasticdl_spec::JobSpec;
use elasticdl_wire::control::Role;
use elasticdl_wire::tls;
use tokio::sync::{mpsc, oneshot};

use super::book::Book;
use super::server::{Input, router};
use super::{Effect, Event, Gang, Origin, Ticket, Wanted};
use crate::config::{Launcher, News, Outside};
use crate::error::{Error, Result};
use crate::listen;
use crate::run::Outcome;
use crate::status::{Phase, StopRequest};
use crate::teller::Teller;

/// How often time passes for the gang.
const TICK: Duration = Duration::from_millis(50);
/// No master tells more events than that: the next one's come after them, though their file went with its pod.
const EVENTS_MAX: u64 = 1 << 20;

/// Everything that the master of a gang needs from outside.
pub struct Config {
    /// The job; it has a command.
    pub job: JobSpec,
    /// What any master needs. A worker's number is the rank of a member.
    pub outside: Outside,
    /// Remembers for the next master.
    pub memory: Box<dyn Memory>,
}

/// Where a gang's book is kept from one master to the next.
pub trait Memory: Send {
    /// What the masters before remember.
    fn recall(&mut self) -> Result<Book>;
    /// Remembers this in place of what was. May return before it is durable: what is lost costs a round.
    fn remember(&mut self, book: &Book) -> Result<()>;
}

/// Leads a gang to its end, from wherever its book says it is.
pub async fn run(mut config: Config) -> Result<Outcome> {
    let address = config.outside.listener.local_addr().map_err(|e| Error::io("asking for the address", e))?;
    tls::may_listen(address, config.outside.identity.as_ref())?;
    let mut book = config.memory.recall()?;
    let term = book.term + 1;
    let mut lost = Vec::new();
    for (rank, note) in (0..).zip(&mut book.members) {
        if let Some(process) = note.process
            && !config.outside.launcher.adopt(Role::Worker, rank, process)
        {
            note.process = None;
            lost.push(rank);
        }
    }
    let gang = Gang::new(Origin { job: &config.job, book, lost, resume: config.outside.resume, term });
    let teller = Teller::open(&config.outside.job_dir, config.outside.told, (term - 1) * EVENTS_MAX)?;
    let (inputs_sender, inputs) = mpsc::unbounded_channel();
    let app = router(config.outside.token, inputs_sender, teller.log(), gang.patience());
    let serving = listen::serve(config.outside.listener, config.outside.identity.as_ref(), app)?;
    let mut edge = Edge {
        size: config.job.command.as_ref().map_or(0, |command| command.size()),
        gang,
        began: Instant::now(),
        launcher: config.outside.launcher,
        memory: config.memory,
        teller,
        tickets: BTreeMap::new(),
        ticket_next: 1,
        over: None,
    };
    let outcome = edge.follow(inputs, config.outside.news, config.outside.stops).await;
    if outcome.is_ok() {
        edge.teller.farewell().await;
    }
    serving.abort();
    outcome.map(|phase| Outcome { phase })
}

/// The gang with everything it touches.
struct Edge {
    gang: Gang,
    size: u32,
    began: Instant,
    launcher: Box<dyn Launcher>,
    memory: Box<dyn Memory>,
    teller: Teller,
    tickets: BTreeMap<Ticket, oneshot::Sender<Wanted>>,
    ticket_next: Ticket,
    over: Option<Phase>,
}

impl Edge {
    async fn follow(
        &mut self,
        mut inputs: mpsc::UnboundedReceiver<Input>,
        mut news: mpsc::UnboundedReceiver<News>,
        mut stops: mpsc::UnboundedReceiver<StopRequest>,
    ) -> Result<Phase> {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.step(Event::Begin)?;
        loop {
            if let Some(phase) = self.over {
                return Ok(phase);
            }
            tokio::select! {
                // Calls come before exits: a member says how its program ended before it goes itself.
                biased;
                Some(input) = inputs.recv() => self.input(input)?,
                Some(news) = news.recv() => self.step(match news {
                    News::Exited(exit) => Event::Exited(exit),
                    News::Waits(waits) => Event::Waits(waits),
                    News::Placed(placed) => Event::Placed(placed),
                })?,
                Some(stop) = stops.recv() => self.step(Event::Stop(stop))?,
                _ = tick.tick() => self.step(Event::Tick)?,
            }
        }
    }

    fn input(&mut self, input: Input) -> Result<()> {
        match input {
            Input::Turn(turn, reply) => {
                let ticket = self.ticket_next;
                self.ticket_next += 1;
                self.tickets.insert(ticket, reply);
                self.step(Event::Turn(ticket, turn))
            }
            Input::Stop(stop) => self.step(Event::Stop(stop)),
            Input::Status(reply) => {
                // Whoever asked may have gone.
                drop(reply.send(self.gang.status(self.began.elapsed())));
                Ok(())
            }
        }
    }

    /// Has the gang take an event in, and does what it decides.
    ///
    /// # Errors
    ///
    /// Nothing can be remembered: the next master would not know what runs.
    fn step(&mut self, event: Event) -> Result<()> {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            if !event.is_sound(self.size) {
                continue;
            }
            let mut effects = Vec::new();
            self.gang.step(self.began.elapsed(), event, &mut effects);
            for effect in effects {
                events.extend(self.carry_out(effect)?);
            }
        }
        Ok(())
    }

    /// Does what the gang decided; what comes of it at once is an event again.
    fn carry_out(&mut self, effect: Effect) -> Result<Option<Event>> {
        match effect {
            Effect::Record(book) => self.memory.remember(&book)?,
            Effect::Launch(rank) => {
                let outcome = self.launcher.start(Role::Worker, rank).map_err(|e| e.to_string());
                return Ok(Some(Event::Launched(rank, outcome)));
            }
            Effect::Stop(rank, pid) => self.launcher.stop(Role::Worker, rank, pid),
            Effect::Kill(rank, pid) => self.launcher.kill(Role::Worker, rank, pid),
            Effect::Answer(ticket, wanted) => {
                // A member that gave up waiting asks again.
                let _ = self.tickets.remove(&ticket).map(|reply| reply.send(wanted));
            }
            Effect::Emit(event, fields) => self.teller.emit(event, fields),
            Effect::Finish(phase) => self.over = Some(phase),
        }
        Ok(None)
    }
}
