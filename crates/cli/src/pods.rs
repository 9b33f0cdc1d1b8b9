//! The fleet on Kubernetes: workers and servers as pods, each with the number of its launch for a process id.

use std::io;

use elasticdl_master::config::{Exit, Launcher, News, Placed, Process, Waits};
use elasticdl_operator::fleet::Fleet;
use elasticdl_operator::pod::{Cause, End};
use elasticdl_operator::roster::{self, Who};
use elasticdl_spec::JobSpec;
use elasticdl_spec::amount;
use elasticdl_spec::command::CommandSpec;
use elasticdl_wire::control::Role;
use tokio::sync::mpsc;

/// Starts pods.
pub struct Pods {
    /// The pods of the job.
    pub fleet: Fleet,
    /// Where the job runs a program of its own, and how its members ended matters though no master saw it: what is
    /// gone without a trace was deleted, and is told here.
    pub gone: Option<mpsc::UnboundedSender<News>>,
}

impl Launcher for Pods {
    fn start(&mut self, role: Role, id: u32) -> io::Result<Process> {
        let launch = self.fleet.start(role, id);
        Ok(Process { pid: launch, started: launch.into() })
    }

    fn adopt(&mut self, role: Role, id: u32, process: Process) -> bool {
        let who = Who { role, id, launch: process.pid };
        let Some(gone) = &self.gone else { return self.fleet.is_alive(who) };
        if !self.fleet.knows(who) {
            let deleted = roster::News::Ended(who, End::by(Cause::Deleted));
            let _ = gone.send(in_words(None, deleted));
        }
        true
    }

    fn stop(&mut self, role: Role, id: u32, pid: u32) {
        self.fleet.stop(Who { role, id, launch: pid });
    }

    fn kill(&mut self, role: Role, id: u32, pid: u32) {
        self.fleet.kill(Who { role, id, launch: pid });
    }
}

/// Hands on what becomes of pods, in the master's words, until nobody tells any more.
pub async fn hand_on(
    job: JobSpec,
    mut pods: mpsc::UnboundedReceiver<roster::News>,
    news: mpsc::UnboundedSender<News>,
) {
    while let Some(told) = pods.recv().await {
        if news.send(in_words(Some(&job), told)).is_err() {
            return;
        }
    }
}

/// News of pods, in the master's words.
fn in_words(job: Option<&JobSpec>, told: roster::News) -> News {
    match told {
        roster::News::Waits(who, wait) => News::Waits(Waits {
            role: who.role,
            id: who.id,
            pid: who.launch,
            why: wait.why,
            may_pass: wait.may_pass,
        }),
        roster::News::Placed(who) => News::Placed(Placed { role: who.role, id: who.id, pid: who.launch }),
        roster::News::Ended(who, end) => {
            let outside = match end.cause {
                Cause::Memory => job.and_then(|job| memory(job, who, end.memory_deaths)),
                cause => cause.is_from_outside().then(|| cause.to_string()),
            };
            let Who { role, id, launch } = who;
            let (code, signal, last_lines) = (end.code, end.signal, end.last_lines);
            News::Exited(Exit { role, id, pid: launch, code, signal, last_lines, outside })
        }
    }
}

/// What is done about a death for lack of memory; `None`: nothing more can be.
fn memory(job: &JobSpec, who: Who, deaths: u32) -> Option<String> {
    let holds = |command: &CommandSpec| {
        let member = command.members().nth(who.id as usize);
        member.is_some_and(|member| CommandSpec::holds_parameters(member.role))
    };
    let pods = match (who.role, &job.command) {
        (Role::Worker, Some(command)) if holds(command) => &job.kubernetes.servers,
        (Role::Worker, _) => &job.kubernetes.workers,
        (Role::Server, _) => &job.kubernetes.servers,
    };
    let next = amount::bytes(pods.memory_after(deaths));
    pods.can_grow(deaths - 1).then(|| format!("{}; the next one asks for {next}", Cause::Memory))
}
