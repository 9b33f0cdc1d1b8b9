//! What goes wrong, and how it stops.

use std::time::Duration;

use elasticdl_master::job::Event;
use elasticdl_master::status::{ScaleRequest, StopRequest, Wanted};
use elasticdl_wire::control::Role;

use crate::branches::Branch;
use crate::net::Pid;
use crate::scenario::Fault;
use crate::world::{Action, World};

impl World {
    /// Something goes wrong.
    pub(crate) fn strike(&mut self, fault: Fault) {
        self.note("fault", [0; 3], || format!("{fault:?}"));
        match fault {
            Fault::CrashWorker => self.crash(Role::Worker, Branch::WorkerCrash),
            Fault::CrashServer => self.crash(Role::Server, Branch::ServerCrash),
            Fault::CrashMaster => {
                if let Some(master) = self.leader() {
                    self.branches.count(Branch::MasterCrash);
                    self.kill_master(master);
                }
            }
            Fault::PauseWorker(time) => self.pause(Role::Worker, time, Branch::WorkerPause),
            Fault::PauseServer(time) => self.pause(Role::Server, time, Branch::ServerPause),
            Fault::PauseMaster(time) => {
                if self.pause_master(time) {
                    self.branches.count(Branch::MasterPause);
                }
            }
            Fault::SecondMaster(time) => self.second_master(time),
            Fault::CutWorker(time) => self.cut(Role::Worker, time, Branch::WorkerCut),
            Fault::CutServer(time) => self.cut(Role::Server, time, Branch::ServerCut),
            Fault::Scale => self.scale(),
            Fault::Stop => self.stop(),
            Fault::DiskSlow(time) => {
                self.branches.count(Branch::DiskSlow);
                self.slow_until = self.now + time;
            }
            Fault::DiskFails(time) => self.fails_until = self.now + time,
            Fault::LedgerFails => self.ledger_fails = true,
        }
    }

    /// Nothing goes wrong any more: whoever is stopped goes on, and of several masters the newest is left.
    pub(crate) fn heal(&mut self) {
        self.note("heal", [0; 3], String::new);
        self.healed = true;
        self.ledger_fails = false;
        self.slow_until = Duration::ZERO;
        for master in 0..self.masters.len().saturating_sub(1) {
            self.kill_master(master);
        }
        if let Some(Some(newest)) = self.masters.last_mut() {
            newest.paused_until = newest.paused_until.min(self.now);
        }
        for process in &mut self.processes {
            process.paused_until = process.paused_until.min(self.now);
            process.cut_until = Duration::ZERO;
        }
        if self.leader().is_none() {
            self.plan_master();
        }
    }

    /// One of those that run, at random.
    fn anyone(&mut self, role: Role) -> Option<Pid> {
        let running = self.running(role);
        if running.is_empty() {
            return None;
        }
        let at = self.rng.below(running.len() as u64);
        running.get(at as usize).copied()
    }

    fn crash(&mut self, role: Role, branch: Branch) {
        if let Some(pid) = self.anyone(role) {
            self.branches.count(branch);
            self.end(pid, None);
        }
    }

    fn pause(&mut self, role: Role, time: Duration, branch: Branch) {
        if let Some(pid) = self.anyone(role) {
            self.branches.count(branch);
            self.note("stopped", [pid.into(), 0, 0], || format!("pid {pid} for {time:?}"));
            self.processes[pid as usize].paused_until = self.now + time;
        }
    }

    fn cut(&mut self, role: Role, time: Duration, branch: Branch) {
        if let Some(pid) = self.anyone(role) {
            self.branches.count(branch);
            self.note("cut off", [pid.into(), 0, 0], || format!("pid {pid} for {time:?}"));
            self.processes[pid as usize].cut_until = self.now + time;
        }
    }

    fn pause_master(&mut self, time: Duration) -> bool {
        let Some(master) = self.leader() else { return false };
        let until = self.now + time;
        if let Some(m) = self.masters[master].as_mut() {
            m.paused_until = until;
        }
        true
    }

    /// The master is taken for dead, and another one begins. The first wakes up later.
    fn second_master(&mut self, time: Duration) {
        if !self.pause_master(time) || self.starting {
            return;
        }
        self.branches.count(Branch::SecondMaster);
        if self.now + time < self.scenario.heal {
            self.branches.count(Branch::OldMasterWoke);
        }
        self.starting = true;
        let soon = Duration::from_millis(50 + self.rng.below(1500));
        self.queue.plan(self.now + soon, Action::StartMaster);
    }

    fn scale(&mut self) {
        let wanted = match self.rng.below(u64::from(self.scenario.plan.job.workers.max) + 1) {
            0 => Wanted::Auto,
            workers => Wanted::Fixed(workers as u32),
        };
        let servers = 1 + self.rng.below(5.min(self.scenario.partitions().into())) as u32;
        let moves = self.rng.below(2) == 0;
        if let Some(master) = self.leader() {
            if moves {
                self.branches.count(Branch::ServersScaled);
                return self.deliver(
                    master,
                    Event::Scale(0, ScaleRequest { workers: None, servers: Some(servers) }),
                );
            }
            self.branches.count(Branch::Scaled);
            self.deliver(master, Event::Scale(0, wanted.into()));
        }
    }

    fn stop(&mut self) {
        let now = self.rng.below(3) == 0;
        if let Some(master) = self.leader() {
            self.branches.count(Branch::Stopped);
            self.deliver(master, Event::Stop(StopRequest { now }));
        }
    }
}
