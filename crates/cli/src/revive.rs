//! Whether and when a master that died is started again. Pure: the caller waits and starts.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use elasticdl_wire::retry::Backoff;

/// The pauses before a second start in a row and before the last one.
const PAUSE_FIRST: Duration = Duration::from_millis(200);
const PAUSE_LONGEST: Duration = Duration::from_secs(5);
/// What a process ends with when it panics, and when this program has caught its own panic.
const PANICKED: [i32; 2] = [101, 2];

/// Whether a master ended without having meant to. One that means to end has told the job's outcome, or what
/// is wrong with its input, and would only say it again.
pub fn is_death(status: ExitStatus) -> bool {
    status.signal().is_some() || status.code().is_some_and(|code| PANICKED.contains(&code))
}

/// What follows from a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// It is started again after a pause.
    Again(Duration),
    /// It has died too often without getting anything done.
    GiveUp,
}

/// Counts deaths in a row: those without a record done in between.
#[derive(Debug)]
pub struct Revivals {
    limit: u32,
    deaths: u32,
    /// How many records were done when that was first heard of since the last death.
    records: Option<u64>,
    /// The most records that were ever done.
    records_max: u64,
    backoff: Backoff,
}

impl Revivals {
    /// A master that has not died yet; it may do so `limit` times in a row.
    pub fn new(limit: u32) -> Self {
        let backoff = Backoff::new(PAUSE_FIRST, PAUSE_LONGEST, 0);
        Revivals { limit, deaths: 0, records: None, records_max: 0, backoff }
    }

    /// So many records are done now. That may be fewer than before: what a server lost is not done any more.
    pub fn records(&mut self, records: u64) {
        let first = *self.records.get_or_insert(records);
        if records > first || records > self.records_max {
            self.progress();
        }
        self.records_max = records.max(self.records_max);
    }

    /// Something was done that is not counted in records: a program of its own runs under this master.
    pub fn progress(&mut self) {
        self.deaths = 0;
        self.backoff.reset();
    }

    /// The master died. The first time it is started again at once: whatever killed it may be over.
    pub fn died(&mut self) -> Next {
        self.deaths += 1;
        self.records = None;
        match self.deaths {
            deaths if deaths > self.limit => Next::GiveUp,
            1 => Next::Again(Duration::ZERO),
            _ => Next::Again(self.backoff.pause()),
        }
    }

    /// How often it has died in a row.
    pub fn deaths(&self) -> u32 {
        self.deaths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deaths_in_a_row_come_with_growing_pauses_and_an_end() {
        let mut revivals = Revivals::new(3);
        assert_eq!(revivals.died(), Next::Again(Duration::ZERO));
        let Next::Again(second) = revivals.died() else { panic!("two are not too many") };
        let Next::Again(third) = revivals.died() else { panic!("three are not too many") };
        assert!(second > Duration::ZERO && third > second, "{second:?} {third:?}");
        assert_eq!(revivals.died(), Next::GiveUp);
        assert_eq!(Revivals::new(0).died(), Next::GiveUp);
    }

    #[test]
    fn records_done_in_between_begin_the_count_anew() {
        let mut revivals = Revivals::new(1);
        revivals.records(500);
        assert_eq!(revivals.died(), Next::Again(Duration::ZERO));
        revivals.records(300);
        revivals.records(301);
        assert_eq!(revivals.died(), Next::Again(Duration::ZERO), "it had got something done");
        revivals.records(501);
        assert_eq!(revivals.died(), Next::Again(Duration::ZERO), "it had, though it was heard of but once");
        revivals.records(501);
        assert_eq!(revivals.died(), Next::GiveUp, "it had not");
    }

    #[test]
    fn only_signals_and_panics_are_deaths() {
        let exited = |code: i32| ExitStatus::from_raw(code << 8);
        assert!(is_death(ExitStatus::from_raw(9)) && is_death(exited(101)) && is_death(exited(2)));
        assert!(!is_death(exited(0)) && !is_death(exited(1)) && !is_death(exited(3)));
    }
}
