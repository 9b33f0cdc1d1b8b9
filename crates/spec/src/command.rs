//! A job that runs a person's own program: who its members are, and what is done when one of them ends.
//!
//! A member is one process of the program. Members are numbered from 0 through all roles, by rank; the name of
//! one says its role and its number in it, as `worker-2`.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// `command`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSpec {
    /// `command.run`: the program and its arguments; not empty.
    pub run: Vec<String>,
    /// `command.framework`
    pub framework: Framework,
    /// `command.roles`, in the order of ranks.
    pub roles: Vec<RoleSpec>,
    /// `command.port`
    pub port: u16,
    /// `command.env`
    pub env: BTreeMap<String, String>,
    /// `command.image`
    pub image: Option<String>,
    /// `command.success`
    pub success: Success,
    /// `command.restart`
    pub restart: RestartSpec,
    /// `command.wait`
    pub wait: Duration,
}

/// A role and how many members have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleSpec {
    /// Its name.
    pub name: String,
    /// How many there are.
    pub count: u32,
}

/// A member by its role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemberName<'a> {
    /// Its role.
    pub role: &'a str,
    /// Its number among those of its role.
    pub index: u32,
}

impl fmt::Display for MemberName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.role, self.index)
    }
}

/// Which variables the program expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Framework {
    /// Only ours.
    None,
    /// `TF_CONFIG`.
    Tensorflow,
    /// Those that torchrun sets.
    Torch,
    /// `DMLC_*`, of ps-lite and what is built on it.
    Dmlc,
}

/// Who must end well for the job to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Success {
    /// The chief.
    Chief,
    /// All workers.
    Workers,
    /// Everybody.
    All,
}

/// `command.restart`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartSpec {
    /// `command.restart.policy`
    pub policy: Policy,
    /// `command.restart.max`
    pub max: u32,
    /// `command.restart.scope`
    pub scope: Scope,
}

/// What is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Nothing.
    Never,
    /// What ended badly.
    OnFailure,
    /// That, and what ended well without the job being done by it.
    Always,
}

/// Who is started again with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Everybody.
    All,
    /// Nobody.
    One,
}

impl CommandSpec {
    /// How many members there are.
    pub fn size(&self) -> u32 {
        self.roles.iter().map(|role| role.count).sum()
    }

    /// How many members have this role.
    pub fn count(&self, role: &str) -> u32 {
        self.roles.iter().find(|known| known.name == role).map_or(0, |known| known.count)
    }

    /// All members, by rank.
    pub fn members(&self) -> impl Iterator<Item = MemberName<'_>> {
        self.roles.iter().flat_map(|role| (0..role.count).map(|index| MemberName { role: &role.name, index }))
    }

    /// The member of this rank.
    ///
    /// # Panics
    ///
    /// There is none.
    pub fn member(&self, rank: u32) -> MemberName<'_> {
        self.members().nth(rank as usize).expect("a rank is below the size")
    }

    /// The rank of a role's first member.
    pub fn first(&self, role: &str) -> Option<u32> {
        self.members().position(|member| member.role == role).map(|rank| rank as u32)
    }

    /// Whether the job is done only when this member has ended well.
    pub fn decides(&self, rank: u32) -> bool {
        match self.success {
            Success::Chief => self.member(rank).role == "chief",
            Success::Workers => self.member(rank).role == "worker",
            Success::All => true,
        }
    }

    /// Whether a role holds parameters: on a cluster its pods ask for what `servers` says.
    pub fn holds_parameters(role: &str) -> bool {
        matches!(role, "ps" | "server" | "scheduler")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::{Inputs, resolve};

    fn command(flags: &[(&str, &str)]) -> CommandSpec {
        let base = [("name", "j"), ("command.run", "[python, train.py]")].into_iter();
        let flags = base.chain(flags.iter().copied()).map(|(k, v)| (k.to_string(), v.to_string())).collect();
        resolve(&Inputs { flags, ..Inputs::default() }).unwrap().job.command.unwrap()
    }

    #[test]
    fn ranks_go_through_the_roles_in_an_order_of_their_own() {
        let roles = "{ worker: 2, evaluator: 1, ps: 1, chief: 1 }";
        let command = command(&[("command.framework", "tensorflow"), ("command.roles", roles)]);
        let names: Vec<String> = command.members().map(|member| member.to_string()).collect();
        assert_eq!(names, ["chief-0", "ps-0", "worker-0", "worker-1", "evaluator-0"]);
        assert_eq!((command.size(), command.first("worker"), command.first("server")), (5, Some(2), None));
        assert_eq!(command.member(3).to_string(), "worker-1");
    }

    #[test]
    fn what_nobody_said_follows_from_the_roles() {
        let tensorflow = |roles| command(&[("command.framework", "tensorflow"), ("command.roles", roles)]);
        let ps = tensorflow("{ chief: 1, worker: 2, ps: 1 }");
        assert_eq!((ps.success, ps.restart.scope), (Success::Chief, Scope::One));
        assert!(ps.decides(0) && !ps.decides(1) && !ps.decides(2));
        let mirrored = tensorflow("{ worker: 2 }");
        assert_eq!((mirrored.success, mirrored.restart.scope), (Success::Workers, Scope::All));
        let own = command(&[("command.roles", "{ reader: 2 }")]);
        assert_eq!((own.success, own.restart.max, own.port), (Success::All, 3, 29500));
        assert_eq!(own.wait, Duration::from_secs(60));
    }
}
