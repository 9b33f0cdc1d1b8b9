//! The gate of a server that holds partition 0, and the threads that wait at it.

#![expect(clippy::disallowed_methods, reason = "an edge: it waits, and tells the gate the time")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use elasticdl_wire::gate::{Ask, Said};
use elasticdl_wire::ps::Status;

use crate::gate::{Gate, Policy};

/// How long somebody waits here for a permit before it is told to ask again: short, so that workers notice
/// meanwhile what else happens.
const PATIENCE: Duration = Duration::from_millis(50);

/// A gate that many connections ask.
#[derive(Debug)]
pub struct Gatekeeper {
    policy: Policy,
    patience: Duration,
    began: Instant,
    /// The life of partition 0 that the gate is beside.
    gate: Mutex<(u64, Gate)>,
    changed: Condvar,
    connections: AtomicU64,
}

impl Gatekeeper {
    /// A keeper whose gate is born with the first question; a batch may take so long.
    pub fn new(policy: Policy, patience: Duration) -> Self {
        let gate = Mutex::new((0, Gate::new(policy, patience, 0, 0)));
        let (changed, connections) = (Condvar::new(), AtomicU64::new(0));
        Gatekeeper { policy, patience, began: Instant::now(), gate, changed, connections }
    }

    /// A number for a connection.
    pub fn connect(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed)
    }

    /// A connection has ended.
    pub fn lost(&self, connection: u64) {
        let mut guard = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        guard.1.lost(connection);
        self.changed.notify_all();
    }

    /// Whether no batch is under way.
    pub fn is_idle(&self) -> bool {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner).1.is_idle()
    }

    /// Answers a question to the gate of a life of partition 0 that has applied so many batches. May wait.
    pub fn answer(&self, connection: u64, (life, version): (u64, u64), ask: Ask, committed: u64) -> Said {
        let until = Instant::now() + PATIENCE;
        let mut guard = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if guard.0 < life {
                *guard = (life, Gate::new(self.policy, self.patience, life, version));
            }
            if guard.0 > life {
                return Said::only(Status::WrongIncarnation);
            }
            let gate = &mut guard.1;
            gate.observe(version);
            let said = said(gate, self.began.elapsed(), connection, ask, committed);
            let left = until.saturating_duration_since(Instant::now());
            let news = said.decision.is_some();
            if said.status != Status::NotYet || news || left.is_zero() {
                // What came back makes room for others, and what was decided concerns all.
                if news || !matches!(ask, Ask::Admit(_)) {
                    self.changed.notify_all();
                }
                return said;
            }
            guard = self.changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// What a gate says at a time.
pub fn said(gate: &mut Gate, now: Duration, connection: u64, ask: Ask, committed: u64) -> Said {
    let (status, granted, asked) = match ask {
        Ask::Admit(batch) => match gate.admit(now, connection, batch) {
            Some(granted) => (Status::Ok, Some(granted), Some(batch)),
            None => (Status::NotYet, None, Some(batch)),
        },
        Ask::Landed(permit) => {
            gate.landed(permit);
            (Status::Ok, None, None)
        }
        Ask::Dropped(permit) => {
            gate.dropped(permit);
            (Status::Ok, None, None)
        }
        Ask::Staged(permit, batch) => {
            let held = gate.staged(now, permit, batch);
            (if held { Status::Ok } else { Status::Stale }, None, None)
        }
        Ask::Look => {
            gate.close(now);
            (Status::NotYet, None, None)
        }
    };
    let decision = gate.decision(committed, asked).cloned();
    let (permit, version) = granted.map_or((0, 0), |granted| (granted.permit, granted.version));
    Said { status, permit, version, decision }
}
