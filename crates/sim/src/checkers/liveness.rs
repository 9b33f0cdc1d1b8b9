//! Once nothing goes wrong any more, the job gets done.

use crate::world::World;

/// The world has ended after so many steps, and its job is not done.
pub fn ended(world: &mut World, steps: u64) {
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
    let heal = world.scenario.heal;
    let what =
        format!("nothing went wrong since {heal:?}, and the job is not done after {steps} steps: {state}");
    world.fail("liveness", what);
}
