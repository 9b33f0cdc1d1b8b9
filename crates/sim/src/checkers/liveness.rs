//! Once nothing goes wrong any more, the job gets done.

use crate::world::World;

/// The world has ended, and its job is not done.
pub fn ended(world: &mut World) {
    let now = world.now;
    let state = match world.masters.last().and_then(|m| m.as_ref()) {
        Some(master) => {
            let status = master.job.status(now);
            format!(
                "term {} (runs: {}) is {:?}, tasks {:?}, workers {:?}, servers {:?}",
                master.term,
                master.alive,
                status.phase,
                status.tasks,
                status.workers.len(),
                status.servers.len()
            )
        }
        None => "there is no master".to_string(),
    };
    let what =
        format!("nothing went wrong since {:?}, and the job is not done: {state}", world.scenario.heal);
    world.fail("liveness", what);
}
