//! The fleet on Kubernetes: workers and servers as pods, each with the number of its launch for a process id.

use std::io;

use elasticdl_master::config::{Exit, Launcher, News, Process, Waits};
use elasticdl_operator::fleet::Fleet;
use elasticdl_operator::pod::Cause;
use elasticdl_operator::roster::{self, Who};
use elasticdl_spec::JobSpec;
use elasticdl_spec::amount;
use elasticdl_wire::control::Role;
use tokio::sync::mpsc;

/// Starts pods.
pub struct Pods(pub Fleet);

impl Launcher for Pods {
    fn start(&mut self, role: Role, id: u32) -> io::Result<Process> {
        let launch = self.0.start(role, id);
        Ok(Process { pid: launch, started: launch.into() })
    }

    fn adopt(&mut self, role: Role, id: u32, process: Process) -> bool {
        self.0.is_alive(Who { role, id, launch: process.pid })
    }

    fn stop(&mut self, role: Role, id: u32, pid: u32) {
        self.0.stop(Who { role, id, launch: pid });
    }

    fn kill(&mut self, role: Role, id: u32, pid: u32) {
        self.0.kill(Who { role, id, launch: pid });
    }
}

/// Hands on what becomes of pods, in the master's words, until nobody tells any more.
pub async fn hand_on(
    job: JobSpec,
    mut pods: mpsc::UnboundedReceiver<roster::News>,
    news: mpsc::UnboundedSender<News>,
) {
    while let Some(told) = pods.recv().await {
        let told = match told {
            roster::News::Waits(who, wait) => News::Waits(Waits {
                role: who.role,
                id: who.id,
                pid: who.launch,
                why: wait.why,
                may_pass: wait.may_pass,
            }),
            roster::News::Ended(who, end) => {
                let outside = match end.cause {
                    Cause::Memory => memory(&job, who.role, end.memory_deaths),
                    cause => cause.is_from_outside().then(|| cause.to_string()),
                };
                let Who { role, id, launch } = who;
                let (code, signal, last_lines) = (end.code, end.signal, end.last_lines);
                News::Exited(Exit { role, id, pid: launch, code, signal, last_lines, outside })
            }
        };
        if news.send(told).is_err() {
            return;
        }
    }
}

/// What is done about a death for lack of memory; `None`: nothing more can be.
fn memory(job: &JobSpec, role: Role, deaths: u32) -> Option<String> {
    let pods = match role {
        Role::Worker => &job.kubernetes.workers,
        Role::Server => &job.kubernetes.servers,
    };
    let next = amount::bytes(pods.memory_after(deaths));
    pods.can_grow(deaths - 1).then(|| format!("{}; the next one asks for {next}", Cause::Memory))
}
