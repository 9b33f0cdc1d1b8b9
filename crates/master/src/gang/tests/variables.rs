//! The variables of each framework, as programs get them.

use super::job;
use crate::gang::variables::of;

/// All variables of a member that are none of ours, a line each.
fn variables(settings: &[(&str, &str)], rank: u32, places: &[&str], restart: u32) -> String {
    let command = job(settings).command.unwrap();
    let set = of("own", &command, rank, places, restart);
    let lines = set.iter().filter(|(name, _)| !name.starts_with("ELASTICDL_"));
    lines.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_program_learns_who_it_is_and_where_the_others_are() {
    let command = job(&[("roles", "{ reader: 1, worker: 2 }"), ("env", "{ MODE: fast }")]).command.unwrap();
    let set = of("own", &command, 2, &["10.0.0.1:29500", "10.0.0.2:29500", "[fd00::3]:29500"], 4);
    let lines: Vec<String> = set.iter().map(|(name, value)| format!("{name}={value}")).collect();
    assert_eq!(
        lines.join("\n"),
        r#"ELASTICDL_ADDRESS=[fd00::3]:29500
ELASTICDL_INDEX=0
ELASTICDL_JOB=own
ELASTICDL_MEMBERS={"worker":["10.0.0.1:29500","10.0.0.2:29500"],"reader":["[fd00::3]:29500"]}
ELASTICDL_RANK=2
ELASTICDL_RESTART=4
ELASTICDL_ROLE=reader
ELASTICDL_SIZE=3
MODE=fast"#
    );
}

#[test]
fn tensorflow_gets_its_cluster_without_the_evaluator() {
    let settings = [("framework", "tensorflow"), ("roles", "{ chief: 1, ps: 1, worker: 2, evaluator: 1 }")];
    let places = ["10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222", "10.0.0.4:2222", "10.0.0.5:2222"];
    assert_eq!(
        variables(&settings, 3, &places, 0),
        r#"TF_CONFIG={"cluster":{"chief":["10.0.0.1:2222"],"ps":["10.0.0.2:2222"],"worker":["10.0.0.3:2222","10.0.0.4:2222"]},"task":{"type":"worker","index":1}}"#
    );
    assert!(variables(&settings, 4, &places, 0).ends_with(r#""task":{"type":"evaluator","index":0}}"#));
}

#[test]
fn torch_gets_what_torchrun_would_set() {
    let settings = [("framework", "torch"), ("roles", "{ worker: 3 }"), ("restart.max", "5")];
    // The first two share a machine.
    let places = ["10.0.0.1:29500", "10.0.0.1:29501", "10.0.0.2:29500"];
    assert_eq!(
        variables(&settings, 1, &places, 2),
        "GROUP_RANK=0
GROUP_WORLD_SIZE=2
LOCAL_RANK=1
LOCAL_WORLD_SIZE=2
MASTER_ADDR=10.0.0.1
MASTER_PORT=29500
PET_MASTER_ADDR=10.0.0.1
PET_MASTER_PORT=29500
PET_NNODES=3
PET_NODE_RANK=1
RANK=1
ROLE_NAME=worker
ROLE_RANK=1
ROLE_WORLD_SIZE=3
TORCHELASTIC_MAX_RESTARTS=5
TORCHELASTIC_RESTART_COUNT=2
TORCHELASTIC_RUN_ID=own
WORLD_SIZE=3"
    );
    let last = variables(&settings, 2, &places, 0);
    assert!(last.contains("LOCAL_RANK=0\nLOCAL_WORLD_SIZE=1\n") && last.contains("GROUP_RANK=1\n"), "{last}");
}

#[test]
fn dmlc_gets_its_scheduler_and_its_numbers() {
    let settings = [("framework", "dmlc"), ("roles", "{ scheduler: 1, server: 1, worker: 2 }")];
    let places = ["10.0.0.1:9091", "10.0.0.2:9091", "10.0.0.3:9091", "10.0.0.4:9091"];
    assert_eq!(
        variables(&settings, 3, &places, 0),
        "DMLC_NODE_HOST=10.0.0.4
DMLC_NUM_SERVER=1
DMLC_NUM_WORKER=2
DMLC_PS_ROOT_PORT=9091
DMLC_PS_ROOT_URI=10.0.0.1
DMLC_ROLE=worker
DMLC_WORKER_ID=1"
    );
    assert!(variables(&settings, 1, &places, 0).ends_with("DMLC_ROLE=server"));
}
