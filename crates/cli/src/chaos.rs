//! Harm done to a job on purpose: what is hit is drawn from a seed. Pure; [`command`] does it, [`account`]
//! reckons what came of it.

use std::fmt;

use elasticdl_spec::mix::Rng;
use serde::Serialize;

use crate::args::Target;

pub mod account;
pub mod command;

/// What is done to a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Deed {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, and SIGCONT after a while.
    Pause,
}

/// A process that can be hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Victim {
    /// What it is.
    pub role: Target,
    /// Its number; a master has none.
    pub id: u32,
    /// Its process.
    pub pid: u32,
}

impl fmt::Display for Victim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.role {
            Target::Worker => write!(f, "worker-{}", self.id),
            Target::Server => write!(f, "ps-{}", self.id),
            Target::Master => f.write_str("master"),
        }
    }
}

impl fmt::Display for Deed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Deed::Kill => "kill",
            Deed::Pause => "pause",
        })
    }
}

/// Something that was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hit {
    /// When, in milliseconds since 1970.
    pub unix_ms: u64,
    /// What.
    pub deed: Deed,
    /// To whom.
    pub victim: Victim,
    /// Until when, where it was let go on.
    pub until_ms: Option<u64>,
}

/// What is to be done next, whoever there will be to do it to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    /// What.
    pub deed: Deed,
    /// To one of these.
    pub role: Target,
    number: u64,
}

/// Draws what is done. The same seed draws the same deeds to the same roles, however long each takes.
#[derive(Debug)]
pub struct Dice {
    rng: Rng,
    choices: Vec<(Deed, Target)>,
}

impl Dice {
    /// Dice for these deeds; there must be one at least.
    pub fn new(seed: u64, kill: &[Target], pause: &[Target]) -> Self {
        let kills = kill.iter().map(|role| (Deed::Kill, *role));
        let mut choices: Vec<(Deed, Target)> =
            kills.chain(pause.iter().map(|role| (Deed::Pause, *role))).collect();
        // Named twice is not meant twice as often, and the order of the words means nothing.
        choices.sort_unstable_by_key(|(deed, role)| (*deed as u8, *role as u8));
        choices.dedup();
        assert!(!choices.is_empty(), "there is something to draw");
        Dice { rng: Rng::new(seed), choices }
    }

    /// The next deed.
    pub fn draw(&mut self) -> Draw {
        let (deed, role) = self.choices[self.rng.below(self.choices.len() as u64) as usize];
        Draw { deed, role, number: self.rng.next_u64() }
    }
}

impl Draw {
    /// Whom it hits among those that there are; `None` while there is nobody of the role.
    pub fn victim(&self, there: &[Victim]) -> Option<Victim> {
        let mut fitting: Vec<Victim> = there.iter().filter(|v| v.role == self.role).copied().collect();
        fitting.sort_unstable_by_key(|victim| victim.id);
        let count = fitting.len() as u64;
        (count > 0).then(|| fitting[(self.number % count) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn victim(role: Target, id: u32) -> Victim {
        Victim { role, id, pid: 100 + id }
    }

    #[test]
    fn a_seed_draws_the_same_deeds_and_another_one_others() {
        let draws = |seed| {
            let mut dice = Dice::new(seed, &[Target::Worker, Target::Master], &[Target::Server]);
            (0..50).map(|_| dice.draw()).collect::<Vec<_>>()
        };
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
        let kinds =
            [(Deed::Kill, Target::Worker), (Deed::Kill, Target::Master), (Deed::Pause, Target::Server)];
        for (deed, role) in kinds {
            assert!(draws(7).iter().any(|d| (d.deed, d.role) == (deed, role)), "{deed} {role:?} never came");
        }
        let mut other_words =
            Dice::new(7, &[Target::Master, Target::Worker, Target::Worker], &[Target::Server]);
        assert_eq!(other_words.draw(), draws(7)[0]);
    }

    #[test]
    fn a_victim_is_of_the_drawn_role_and_everybodys_turn_comes() {
        let there: Vec<Victim> = (0..3).map(|id| victim(Target::Worker, id)).collect();
        let mut dice = Dice::new(1, &[Target::Worker], &[]);
        let mut hit: Vec<u32> = (0..40).filter_map(|_| Some(dice.draw().victim(&there)?.id)).collect();
        hit.sort_unstable();
        hit.dedup();
        assert_eq!(hit, [0, 1, 2]);
        assert_eq!(dice.draw().victim(&[victim(Target::Server, 0)]), None);
        let names = [Target::Worker, Target::Server, Target::Master].map(|role| victim(role, 3).to_string());
        assert_eq!(names, ["worker-3", "ps-3", "master"]);
    }
}
