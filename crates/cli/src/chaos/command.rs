//! `chaos`: kills and pauses processes of a running job, and tells how it coped.
//!
//! Nobody else's process is hit: a process is opened by a handle first, then its command line must be that of
//! the very member of this job, and then it must still be alive.

#![expect(clippy::disallowed_methods, reason = "an edge: it reads clocks, waits and signals")]

use std::fs;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use elasticdl_master::status::{Process, Status};
use rustix::process::Signal;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::account::{self, Account};
use super::{Deed, Dice, Draw, Hit, Victim};
use crate::args::{self, Target};
use crate::client::Client;
use crate::fault::{Exit, Fault};
use crate::home::{Home, JobDir};
use crate::process::{Handle, command_line};
use crate::{gang, jobs, print};

/// Between two looks.
const PACE: Duration = Duration::from_millis(20);
/// How long the job may take to mend the last hit before the figures are told without it.
const MENDING_MAX: Duration = Duration::from_secs(30);
/// How often it is looked whether the last hit is mended.
const MENDING_PACE: Duration = Duration::from_millis(250);

/// `chaos`.
pub async fn command(args: args::Chaos) -> anyhow::Result<Exit> {
    let dir = Home::find()?.existing(&args.job)?;
    gang::refuse(&dir.record()?.job, "chaos")?;
    jobs::ask(&dir, Client::status)?.ok_or_else(|| jobs::not_running(&args.job))?;
    if args.kill.contains(&Target::Master) && !dir.is_tended() {
        let what = format!("nobody would start the master of {:?} again: it runs without a client", args.job);
        return Err(Fault::user(what).hint("leave master out of --kill, or train without --detach").into());
    }
    let lease = dir.record()?.job.limits.lease;
    let mut chaos = Chaos {
        events_before: fs::metadata(dir.events()).map_or(0, |file| file.len()),
        dice: Dice::new(args.seed, &args.kill, &args.pause),
        pending: None,
        pause_for: args.pause_for.unwrap_or(lease + Duration::from_secs(1)),
        paused: Vec::new(),
        hits: Vec::new(),
        began: Instant::now(),
        began_ms: unix_ms(),
        next: Instant::now() + args.every,
        dir,
    };
    let mut interrupts = signal(SignalKind::interrupt()).context("listening for Ctrl-C")?;
    let mut terminations = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let left = tokio::select! {
        outcome = chaos.run(args.every, args.limit) => outcome.map(|()| false)?,
        _ = interrupts.recv() => true,
        _ = terminations.recv() => true,
    };
    // Before anything else: what is paused must go on, whatever happens to this process.
    chaos.paused.clear();
    if !left {
        tokio::select! {
            () = chaos.mending() => {}
            _ = interrupts.recv() => {}
        }
    }
    chaos.tell(&args)
}

/// A process that does not run and will again, at the latest when this is dropped.
struct Paused {
    handle: Handle,
    until: Instant,
    /// Which hit it was.
    hit: usize,
    role: Target,
}

impl Drop for Paused {
    fn drop(&mut self) {
        // One that was killed meanwhile needs nothing any more.
        let _ = self.handle.send(Signal::CONT);
    }
}

struct Chaos {
    dir: JobDir,
    dice: Dice,
    /// Drawn, and still without a victim.
    pending: Option<Draw>,
    pause_for: Duration,
    paused: Vec<Paused>,
    hits: Vec<Hit>,
    began: Instant,
    began_ms: u64,
    events_before: u64,
    /// When the next hit is due.
    next: Instant,
}

impl Chaos {
    /// Hits until the job or the time is over.
    async fn run(&mut self, every: Duration, limit: Option<Duration>) -> anyhow::Result<()> {
        loop {
            self.let_go();
            if !self.dir.is_running() || limit.is_some_and(|limit| self.began.elapsed() >= limit) {
                return Ok(());
            }
            // A master that is paused cannot say who is there.
            let blind = self.paused.iter().any(|paused| paused.role == Target::Master);
            if !blind && Instant::now() >= self.next && self.hit()? {
                self.next = Instant::now() + every;
            }
            tokio::time::sleep(PACE).await;
        }
    }

    /// Lets those go on whose pause is over.
    fn let_go(&mut self) {
        let now = Instant::now();
        for paused in self.paused.extract_if(.., |paused| paused.until <= now) {
            self.hits[paused.hit].until_ms = Some(unix_ms());
        }
    }

    /// Does what was drawn, once there is somebody to do it to; tells whether it was done.
    fn hit(&mut self) -> anyhow::Result<bool> {
        let draw = *self.pending.get_or_insert_with(|| self.dice.draw());
        // A master that is being started again cannot be asked; the next look may be luckier.
        let Ok(status) = Client::of(&self.dir).and_then(|client| client.status()) else { return Ok(false) };
        let there = self.victims(&status);
        let Some(victim) = draw.victim(&there) else { return Ok(false) };
        let Some(handle) = self.open(victim) else { return Ok(false) };
        self.pending = None;
        let signal = if draw.deed == Deed::Kill { Signal::KILL } else { Signal::STOP };
        let now_ms = unix_ms();
        if handle.send(signal).is_err() {
            // It ended by itself in this instant.
            return Ok(false);
        }
        self.hits.push(Hit { unix_ms: now_ms, deed: draw.deed, victim, until_ms: None });
        if draw.deed == Deed::Pause {
            let (until, hit) = (Instant::now() + self.pause_for, self.hits.len() - 1);
            self.paused.push(Paused { handle, until, hit, role: victim.role });
        }
        let at = self.began.elapsed().as_secs_f64();
        print::note(&format!("{at:>6.1}s  {} {victim} (pid {})", draw.deed, victim.pid));
        Ok(true)
    }

    /// Those who can be hit now.
    fn victims(&self, status: &Status) -> Vec<Victim> {
        let of = |role: Target, list: &[Process]| {
            let there = list.iter().filter(|process| process.state != "draining");
            let victim = |process: &Process| Some(Victim { role, id: process.id, pid: process.pid? });
            there.filter_map(victim).collect::<Vec<Victim>>()
        };
        let mut victims = of(Target::Worker, &status.workers);
        victims.extend(of(Target::Server, &status.servers));
        let master = self.dir.holder().flatten();
        victims.extend(master.map(|master| Victim { role: Target::Master, id: 0, pid: master.pid }));
        victims.retain(|victim| self.paused.iter().all(|paused| paused.handle.pid() != victim.pid));
        victims
    }

    /// The victim's process, where it is alive and really the victim.
    fn open(&self, victim: Victim) -> Option<Handle> {
        let handle = Handle::open(victim.pid).ok()?;
        let words = command_line(victim.pid).ok()?;
        let dir = self.dir.path().to_string_lossy().into_owned();
        let token = self.dir.token().to_string_lossy().into_owned();
        (is_victim(victim, &words, &dir, &token) && handle.is_alive()).then_some(handle)
    }

    /// Waits until the job has mended every hit, is over, or takes too long.
    async fn mending(&mut self) {
        let began = Instant::now();
        while began.elapsed() < MENDING_MAX && self.dir.is_running() {
            let accounts = self.accounts();
            if self.hits.iter().zip(&accounts).all(|(hit, account)| account::is_over(hit, account)) {
                return;
            }
            tokio::time::sleep(MENDING_PACE).await;
        }
    }

    fn accounts(&self) -> Vec<Account> {
        account::account(&self.hits, &self.dir.events_from(self.events_before))
    }

    /// Tells what came of it all.
    fn tell(&self, args: &args::Chaos) -> anyhow::Result<Exit> {
        let accounts = self.accounts();
        let outcome = match self.dir.ending() {
            Some(event) => event.fields.get("outcome").and_then(|o| o.as_str()).unwrap_or("failed").into(),
            None if !self.dir.is_running() => "lost".to_string(),
            None => "running".to_string(),
        };
        if args.json {
            let hits = account::as_json(self.began_ms, &self.hits, &accounts);
            let told = json!({ "job": args.job, "seed": args.seed, "outcome": outcome, "hits": hits });
            print::line(&told.to_string())?;
        } else {
            print::line(&account::as_table(self.began_ms, &self.hits, &accounts))?;
            print::note(&format!("{}: {} hits, the job is {outcome}", args.job, self.hits.len()));
            print::note(&format!(
                "hint: `elasticdl audit {}` tells whether every record counts once",
                args.job
            ));
        }
        Ok(if outcome == "failed" || outcome == "lost" { Exit::Job } else { Exit::Done })
    }
}

/// Whether a command line is that of this member of this job.
fn is_victim(victim: Victim, words: &[String], dir: &str, token: &str) -> bool {
    let has = |name: &str, value: &str| words.windows(2).any(|pair| pair == [name, value]);
    let is = |role: &str| words.get(1).is_some_and(|word| word == role);
    let id = victim.id.to_string();
    match victim.role {
        Target::Master => is("master") && has("--job-dir", dir),
        Target::Worker => is("worker") && has("--token-file", token) && has("--id", &id),
        Target::Server => is("ps") && has("--token-file", token) && has("--id", &id),
    }
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_members_of_the_very_job_are_victims() {
        let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        let worker = Victim { role: Target::Worker, id: 3, pid: 1 };
        let is = |victim, line: &str| is_victim(victim, &words(line), "/jobs/ctr", "/jobs/ctr/token");
        assert!(is(worker, "elasticdl worker --master h:1 --token-file /jobs/ctr/token --id 3"));
        assert!(!is(worker, "elasticdl worker --master h:1 --token-file /jobs/ctr/token --id 31"));
        assert!(!is(worker, "elasticdl worker --master h:1 --token-file /jobs/other/token --id 3"));
        assert!(!is(worker, "elasticdl ps --master h:1 --token-file /jobs/ctr/token --id 3"));
        let master = Victim { role: Target::Master, id: 0, pid: 1 };
        assert!(is(master, "elasticdl master --job-dir /jobs/ctr --attached"));
        assert!(!is(master, "elasticdl master --job-dir /jobs/ctr-2 --attached"));
        assert!(!is(master, "vi master --job-dir"));
    }
}
