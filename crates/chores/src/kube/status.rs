//! What runs, for people and for programs.

use anyhow::Result;
use serde_json::{Value, json};

use super::places::Places;
use super::state::{Phase, State, boot};
use super::{network, node};

/// Prints it to standard output.
pub fn print(as_json: bool) -> Result<()> {
    let places = Places::find()?;
    let state = State::read(&places)?.filter(|state| boot().is_ok_and(|boot| boot == state.boot));
    let status = state.as_ref().map_or_else(|| json!({ "phase": "down" }), |state| describe(&places, state));
    if as_json {
        println!("{status:#}");
    } else {
        print!("{}", in_words(&status));
    }
    Ok(())
}

fn describe(places: &Places, state: &State) -> Value {
    let broken = state.phase == Phase::Up && !state.serves();
    let phase = if broken { json!("broken") } else { json!(state.phase) };
    let node = |index: u8| {
        let name = node::name(index);
        let on = state.node_is_on(&name);
        json!({ "name": name, "ip": network::node_ip(index), "pods": network::node_pods(index), "on": on })
    };
    let processes: Vec<Value> = state
        .processes
        .iter()
        .map(|process| json!({ "name": process.name, "pid": process.pid, "runs": process.runs() }))
        .collect();
    json!({
        "phase": phase,
        "nodes": (1..=state.shape.nodes).map(node).collect::<Vec<_>>(),
        "simulated": state.shape.simulated,
        "kubeconfig": places.admin_config(),
        "binaries": state.binaries,
        "shared": places.shared(),
        "logs": places.logs(),
        "processes": processes,
    })
}

fn in_words(status: &Value) -> String {
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut lines = vec![format!("cluster     {}", word(&status["phase"]))];
    for node in status["nodes"].as_array().into_iter().flatten() {
        let power = if node["on"] == true { "on" } else { "off" };
        lines.push(format!(
            "{:<11} {power}, {}, pods {}",
            word(&node["name"]),
            word(&node["ip"]),
            word(&node["pods"])
        ));
    }
    if let Some(count @ 1..) = status["simulated"].as_u64() {
        lines.push(format!("simulated   {count} nodes"));
    }
    for process in
        status["processes"].as_array().into_iter().flatten().filter(|process| process["runs"] == false)
    {
        lines.push(format!("died        {}", word(&process["name"])));
    }
    for (label, key) in [("kubeconfig", "kubeconfig"), ("shared", "shared"), ("logs", "logs")] {
        if status[key].is_string() {
            lines.push(format!("{label:<11} {}", word(&status[key])));
        }
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_process_and_a_node_without_power_are_told() {
        let status = json!({
            "phase": "broken",
            "nodes": [{ "name": "n1", "ip": "10.250.0.11", "pods": "10.244.1.0/24", "on": false }],
            "simulated": 0,
            "shared": "/cache/shared",
            "processes": [{ "name": "etcd", "pid": 7, "runs": false }, { "name": "kwok", "pid": 8, "runs": true }],
        });
        assert_eq!(
            in_words(&status),
            "cluster     broken\nn1          off, 10.250.0.11, pods 10.244.1.0/24\ndied        etcd\n\
             shared      /cache/shared\n"
        );
        assert_eq!(in_words(&json!({ "phase": "down" })), "cluster     down\n");
    }
}
