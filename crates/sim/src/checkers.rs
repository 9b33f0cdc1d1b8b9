//! What must hold whatever happens. One file each; each can be made to fail by a [`crate::sabotage`].

pub mod checkpoints;
pub mod exact;
pub mod leases;
pub mod liveness;

use std::time::Duration;

use crate::checkers::leases::Leases;

/// Something that must not have happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Who says so: exact, leases, checkpoints, liveness, or what broke otherwise.
    pub checker: &'static str,
    /// When.
    pub at: Duration,
    /// What.
    pub what: String,
}

/// The checkers of a world, and what they have found.
#[derive(Debug, Default)]
pub struct Checkers {
    /// Who may change what.
    pub leases: Leases,
    /// What was found, the first of each checker.
    pub violations: Vec<Violation>,
}

impl Checkers {
    /// A checker has found something. The first word of each is enough.
    pub fn found(&mut self, at: Duration, checker: &'static str, what: String) {
        if self.violations.iter().all(|violation| violation.checker != checker) {
            self.violations.push(Violation { checker, at, what });
        }
    }

    /// Whether there is any use in going on: a master that cannot begin again never will.
    pub fn goes_on(&mut self) -> bool {
        self.violations.extend(self.leases.found.take());
        self.violations.iter().all(|violation| violation.checker != "ledger")
    }
}
