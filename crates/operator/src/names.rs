//! Names and labels of everything that belongs to a job.

use elasticdl_spec::command::MemberName;
use elasticdl_wire::control::Role;

/// Label: which job.
pub const JOB: &str = "elasticdl.org/job";
/// Label: which role.
pub const ROLE: &str = "elasticdl.org/role";
/// Label: the number of a worker or server.
pub const ID: &str = "elasticdl.org/id";
/// Label: tells two pods of one worker or server apart.
pub const LAUNCH: &str = "elasticdl.org/launch";
/// Label: the rank of a member of a person's own program. Its role is that of the program, and its id its number
/// in that.
pub const MEMBER: &str = "elasticdl.org/member";
/// Annotation of the object that owns a job: what the masters of a person's own program remember.
pub const BOOK: &str = "elasticdl.org/book";
/// Annotation: how often pods of this role had been killed for their memory.
pub const MEMORY_DEATHS: &str = "elasticdl.org/memory-deaths";
/// The container that runs our program.
pub const CONTAINER: &str = "elasticdl";
/// Who writes the objects, in their managed fields and events.
pub const MANAGER: &str = "elasticdl";

/// Priority classes: the master and the servers displace workers, never the other way round.
pub const PRIORITY_MASTER: &str = "elasticdl-master";
/// Of servers.
pub const PRIORITY_SERVER: &str = "elasticdl-server";
/// Of workers with `workers.priority: high`.
pub const PRIORITY_HIGH: &str = "elasticdl-high";
/// Of all other workers: online services come first.
pub const PRIORITY_LOW: &str = "elasticdl-low";

/// The object that owns all others of a job: they go when it goes.
pub fn anchor(job: &str) -> String {
    format!("{job}-elasticdl")
}

/// The master's Service, and its first pod.
pub fn master(job: &str) -> String {
    format!("{job}-master")
}

/// A role as labels and names say it.
pub fn role(role: Role) -> &'static str {
    match role {
        Role::Worker => "worker",
        Role::Server => "server",
    }
}

/// The `attempt`-th name for a pod: an earlier one may still hold the plain name while its node is away.
pub fn attempt(name: &str, attempt: u32) -> String {
    match attempt {
        0 => name.into(),
        n => format!("{name}-{n}"),
    }
}

/// The first name for a worker's or server's pod.
pub fn member(job: &str, of: Role, id: u32) -> String {
    format!("{job}-{}-{id}", role(of))
}

/// The first name for the pod of a member of a person's own program.
pub fn part(job: &str, member: MemberName<'_>) -> String {
    format!("{job}-{member}")
}

/// Selects the pods of a job's workers and servers, or of the members of a person's own program.
pub fn members_selector(job: &str) -> String {
    format!("{JOB}={job},{ROLE} notin (master,errand)")
}

/// Selects the pods of a job's master.
pub fn master_selector(job: &str) -> String {
    format!("{JOB}={job},{ROLE}=master")
}

/// Whether labels are those of a master's pod.
pub fn is_master(labels: &std::collections::BTreeMap<String, String>) -> bool {
    labels.get(ROLE).is_some_and(|role| role == "master")
}
