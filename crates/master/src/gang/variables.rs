//! What a program learns of itself and the others: environment variables. Pure.

use std::collections::BTreeMap;

use elasticdl_spec::command::{CommandSpec, Framework};
use serde_json::{Map, Value, json};

use super::rounds::host;

/// The variables of the member of this rank; `places` are the addresses of all, by rank, and `restart` is how often
/// its program was started before.
pub fn of(
    job: &str,
    command: &CommandSpec,
    rank: u32,
    places: &[&str],
    restart: u32,
) -> BTreeMap<String, String> {
    let member = command.member(rank);
    let own = places[rank as usize];
    let mut set = Variables(command.env.clone());
    set.all([
        ("ELASTICDL_JOB", job.to_string()),
        ("ELASTICDL_ROLE", member.role.to_string()),
        ("ELASTICDL_INDEX", member.index.to_string()),
        ("ELASTICDL_RANK", rank.to_string()),
        ("ELASTICDL_SIZE", command.size().to_string()),
        ("ELASTICDL_RESTART", restart.to_string()),
        ("ELASTICDL_ADDRESS", own.to_string()),
        ("ELASTICDL_MEMBERS", cluster(command, places, &[]).to_string()),
    ]);
    match command.framework {
        Framework::None => {}
        Framework::Tensorflow => set.all([("TF_CONFIG", tf_config(command, rank, places))]),
        Framework::Torch => torch(&mut set, job, command, rank, places, restart),
        Framework::Dmlc => dmlc(&mut set, command, rank, places),
    }
    set.0
}

struct Variables(BTreeMap<String, String>);

impl Variables {
    fn all<const N: usize>(&mut self, pairs: [(&str, String); N]) {
        self.0.extend(pairs.into_iter().map(|(name, value)| (name.to_string(), value)));
    }
}

/// The addresses of each role, but for those left out.
fn cluster(command: &CommandSpec, places: &[&str], without: &[&str]) -> Value {
    let mut roles: Map<String, Value> = Map::new();
    for (member, place) in command.members().zip(places).filter(|(member, _)| !without.contains(&member.role))
    {
        let of_role = roles.entry(member.role).or_insert_with(|| json!([]));
        of_role.as_array_mut().expect("a list").push(json!(place));
    }
    roles.into()
}

/// An evaluator looks at checkpoints from outside: it is not part of the cluster that trains.
fn tf_config(command: &CommandSpec, rank: u32, places: &[&str]) -> String {
    let member = command.member(rank);
    let task = json!({ "type": member.role, "index": member.index });
    json!({ "cluster": cluster(command, places, &["evaluator"]), "task": task }).to_string()
}

/// What torchrun tells the processes it starts; and for a command that is torchrun itself, where the others are.
fn torch(set: &mut Variables, job: &str, command: &CommandSpec, rank: u32, places: &[&str], restart: u32) {
    let size = places.len();
    let (master, port) = places[0].rsplit_once(':').unwrap_or((places[0], ""));
    let own = host(places[rank as usize]);
    let neighbours = || places.iter().filter(|place| host(place) == own);
    let local_rank = places[..rank as usize].iter().filter(|place| host(place) == own).count();
    let mut hosts: Vec<&str> = Vec::new();
    for place in places {
        if !hosts.contains(&host(place)) {
            hosts.push(host(place));
        }
    }
    let group = hosts.iter().position(|known| *known == own).unwrap_or(0);
    set.all([
        ("MASTER_ADDR", master.to_string()),
        ("MASTER_PORT", port.to_string()),
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", size.to_string()),
        ("LOCAL_RANK", local_rank.to_string()),
        ("LOCAL_WORLD_SIZE", neighbours().count().to_string()),
        ("GROUP_RANK", group.to_string()),
        ("GROUP_WORLD_SIZE", hosts.len().to_string()),
        ("ROLE_RANK", rank.to_string()),
        ("ROLE_WORLD_SIZE", size.to_string()),
        ("ROLE_NAME", "worker".to_string()),
        ("TORCHELASTIC_RUN_ID", job.to_string()),
        ("TORCHELASTIC_RESTART_COUNT", restart.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", command.restart.max.to_string()),
        ("PET_MASTER_ADDR", master.to_string()),
        ("PET_MASTER_PORT", port.to_string()),
        ("PET_NNODES", size.to_string()),
        ("PET_NODE_RANK", rank.to_string()),
    ]);
}

fn dmlc(set: &mut Variables, command: &CommandSpec, rank: u32, places: &[&str]) {
    let member = command.member(rank);
    let root = command.first("scheduler").map_or("", |rank| places[rank as usize]);
    let (uri, port) = root.rsplit_once(':').unwrap_or((root, ""));
    set.all([
        ("DMLC_ROLE", member.role.to_string()),
        ("DMLC_PS_ROOT_URI", uri.to_string()),
        ("DMLC_PS_ROOT_PORT", port.to_string()),
        ("DMLC_NUM_WORKER", command.count("worker").to_string()),
        ("DMLC_NUM_SERVER", command.count("server").to_string()),
        ("DMLC_NODE_HOST", host(places[rank as usize]).to_string()),
    ]);
    if member.role == "worker" {
        set.all([("DMLC_WORKER_ID", member.index.to_string())]);
    }
}
