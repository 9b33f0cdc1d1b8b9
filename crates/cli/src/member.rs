//! `member`: one of a person's own program. It asks the master what to do, starts the program and ends it, and tells
//! how it ended.
//!
//! The program is a child with a process group of its own, so that what it starts ends with it. Its output goes
//! through here, so that its last lines can be told. It does not outlive this process: [`exec`] sees to that.

#![expect(clippy::disallowed_methods, reason = "an edge: it starts processes, waits and reads the clock")]

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::Context;
use elasticdl_wire::client::{Gang, answer, connect_gang};
use elasticdl_wire::control::{ProgramEnd, Start, TurnReply, TurnRequest, turn_reply};
use elasticdl_wire::{Identity, Token};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::Member;
use crate::fault::{Exit, Fault};
use crate::roles;

mod program;

use program::Program;

/// Between two calls where the last one was answered at once, or not at all.
const PACE: Duration = Duration::from_millis(200);
/// What holds until the master has said otherwise.
const GRACE: Duration = Duration::from_secs(30);
const ORPHAN: Duration = Duration::from_secs(30);
/// How much of the time that this process has to end is its own.
const OWN_SHARE: Duration = Duration::from_secs(1);

/// `member run`: does what the master says until it may leave.
pub async fn run(args: Member) -> anyhow::Result<Exit> {
    let token = Token::read(&args.token_file)?;
    let identity = args.tls_dir.as_deref().map(Identity::read).transpose()?;
    let client = connect_gang(&args.master, token, identity.as_ref())?;
    let (address, reserved) = place(args.listen)?;
    let mut part = Part {
        client,
        rank: args.id,
        pid: args.process.unwrap_or_else(std::process::id),
        address,
        reserved,
        start: None,
        program: None,
        end: None,
        grace: GRACE,
        orphan: ORPHAN,
        heard: Instant::now(),
    };
    let code = part.play().await?;
    std::process::exit(code);
}

/// Where the program may listen: the address given, or a free port, which is kept free until the program starts.
fn place(listen: SocketAddr) -> anyhow::Result<(String, Option<TcpListener>)> {
    if listen.port() != 0 {
        return Ok((listen.to_string(), None));
    }
    let listener = TcpListener::bind(listen).context("looking for a free port")?;
    let address = listener.local_addr().context("looking for a free port")?;
    Ok((address.to_string(), Some(listener)))
}

/// What came of doing what was wanted.
enum Obeyed {
    /// Nothing is new.
    Same,
    /// A start was made.
    Started,
    /// It is to end, with this code.
    Left(i32),
}

/// A member with its program.
struct Part {
    client: Gang,
    rank: u32,
    pid: u32,
    address: String,
    /// Keeps the port from others until the program wants it.
    reserved: Option<TcpListener>,
    /// The last start that was made.
    start: Option<Start>,
    /// While it runs.
    program: Option<Program>,
    /// How it ended.
    end: Option<ProgramEnd>,
    grace: Duration,
    orphan: Duration,
    /// When the master last answered.
    heard: Instant,
}

impl Part {
    /// Does what the master says; tells what to exit with.
    async fn play(&mut self) -> anyhow::Result<i32> {
        let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
        roles::outlive_hang_ups()?;
        loop {
            let mut client = self.client.clone();
            let request = TurnRequest {
                rank: self.rank,
                pid: self.pid,
                address: self.address.clone(),
                start: self.start,
                end: self.end.clone(),
            };
            let began = Instant::now();
            tokio::select! {
                biased;
                _ = terminate.recv() => {
                    self.end_program(self.grace.saturating_sub(OWN_SHARE)).await;
                    return Ok(128 + Signal::TERM.as_raw());
                }
                end = ended(&mut self.program) => {
                    self.end = Some(end);
                    self.program = None;
                    continue;
                }
                reply = client.turn(request) => match answer("turn", reply) {
                    Ok(reply) => match self.obey(reply).await {
                        Obeyed::Left(code) => return Ok(code),
                        // The master wants to know.
                        Obeyed::Started => continue,
                        Obeyed::Same => {}
                    },
                    Err(error) if self.heard.elapsed() > self.orphan => {
                        self.end_program(self.grace).await;
                        return Err(Fault::job("no master answers any more").because(error).into());
                    }
                    Err(error) => tracing::debug!(%error, "the master does not answer"),
                }
            }
            // A program that is being ended is told of with every call, and so is a master that is away.
            self.rest(PACE.saturating_sub(began.elapsed())).await;
        }
    }

    /// Lets time pass, unless the program ends.
    async fn rest(&mut self, time: Duration) {
        tokio::select! {
            biased;
            end = ended(&mut self.program) => {
                self.end = Some(end);
                self.program = None;
            }
            () = tokio::time::sleep(time) => {}
        }
    }

    async fn obey(&mut self, reply: TurnReply) -> Obeyed {
        self.heard = Instant::now();
        self.grace = Duration::from_millis(reply.grace_ms.into());
        self.orphan = Duration::from_millis(reply.orphan_ms.into());
        match reply.wanted {
            Some(turn_reply::Wanted::Leave(_)) => {
                let asked = self.program.is_some();
                self.end_program(self.grace).await;
                // How the program ended by itself is what people look for.
                let own = self.end.as_ref().filter(|_| !asked).map_or(0, exit_code);
                return Obeyed::Left(own);
            }
            Some(turn_reply::Wanted::Nothing(_)) => self.ask_to_end(),
            Some(turn_reply::Wanted::Program(wanted)) if self.start != wanted.start => {
                if self.program.is_some() {
                    self.ask_to_end();
                    return Obeyed::Same;
                }
                self.reserved = None;
                self.start = wanted.start;
                self.end = None;
                match Program::start(&wanted.run, &wanted.environment.into_iter().collect()) {
                    Ok(program) => self.program = Some(program),
                    Err(why) => self.end = Some(stillborn(why)),
                }
                return Obeyed::Started;
            }
            Some(turn_reply::Wanted::Program(_)) | None => {}
        }
        Obeyed::Same
    }

    fn ask_to_end(&mut self) {
        if let Some(program) = &mut self.program {
            program.ask_to_end(self.grace);
        }
    }

    /// Ends the program and waits until it has.
    async fn end_program(&mut self, grace: Duration) {
        if let Some(mut program) = self.program.take() {
            program.ask_to_end(grace);
            self.end = Some(program.ended().await);
        }
    }
}

/// How the program ended; never, where there is none.
async fn ended(program: &mut Option<Program>) -> ProgramEnd {
    match program {
        Some(program) => program.ended().await,
        None => std::future::pending().await,
    }
}

fn stillborn(why: String) -> ProgramEnd {
    tracing::error!("{why}");
    ProgramEnd { code: Some(127), signal: None, last_lines: vec![why], stillborn: true }
}

/// What a shell would make of it.
fn exit_code(end: &ProgramEnd) -> i32 {
    end.code.or(end.signal.map(|signal| 128 + signal)).unwrap_or(1)
}

/// How a process ended, as the master is told.
fn told(status: ExitStatus, last_lines: Vec<String>) -> ProgramEnd {
    ProgramEnd { code: status.code(), signal: status.signal(), last_lines, stillborn: false }
}

/// `member exec`: becomes the program, which ends when the member that asked for it is gone.
pub fn exec(parent: u32, program: &[String]) -> anyhow::Result<Exit> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("tying the program to its member")?;
    // One that went before this cannot be waited for any more.
    if getppid().map(Pid::as_raw_pid) != i32::try_from(parent).ok() {
        return Ok(Exit::Job);
    }
    let (name, args) = program.split_first().context("a program has a name")?;
    let error = std::process::Command::new(name).args(args).exec();
    Err(Fault::user(format!("cannot start {name}")).because(error).into())
}

/// `member install`: copies this program to where the pod's other containers find it.
pub fn install(dir: &Path) -> anyhow::Result<Exit> {
    let own = std::env::current_exe().context("finding this program")?;
    let to = dir.join("elasticdl");
    fs::copy(&own, &to).with_context(|| format!("copying {} to {}", own.display(), to.display()))?;
    // The image that it will run in may have another user.
    fs::set_permissions(&to, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("making {} a program", to.display()))?;
    Ok(Exit::Done)
}
