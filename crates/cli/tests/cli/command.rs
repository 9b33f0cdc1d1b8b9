//! Programs of one's own: shell and Python in place of a model of ours.

use std::fs;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::world::{Running, World, is_alive, pids, signal, wait_for};

/// Writes a job file that runs `script` with `sh`; `more` goes below `command`.
fn job(world: &World, name: &str, script: &str, more: &Value) -> String {
    let mut command = json!({ "run": ["sh", "-c", script] });
    command.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let job = json!({
        "apiVersion": "elasticdl.org/v1", "kind": "ElasticJob", "metadata": { "name": name },
        "spec": { "command": command, "kubernetes": { "grace": "5s" } },
    });
    let file = format!("{name}.yaml");
    world.write(&file, &job.to_string());
    file
}

fn until_running(running: &mut Running) -> Value {
    running.until("the program to run", |e| e["event"] == "running")
}

/// What a member's program wrote into a file of its own, once it is there.
fn written(world: &World, name: &str) -> String {
    wait_for(name, || fs::read_to_string(world.path(name)).ok().filter(|text| text.ends_with('\n')))
}

/// The process of a member.
fn pid(world: &World, job: &str, member: &str) -> u32 {
    let status = world.status(job);
    let found = status["workers"].as_array().unwrap().iter().find(|m| m["name"] == member).cloned();
    found.unwrap_or_else(|| panic!("{member} in {status}"))["pid"].as_u64().unwrap() as u32
}

#[test]
fn ranks_meet_at_the_address_that_all_of_them_know() {
    if world_has_no_python() {
        return;
    }
    let world = World::new();
    // Rank 0 listens and adds up what the others send, as a rendezvous of torch would.
    world.write(
        "meet.py",
        "import os, socket, json
rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
at = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))
if rank == 0:
    server = socket.create_server(at)
    total = 0
    for _ in range(size - 1):
        peer, _ = server.accept()
        total += int(peer.recv(100))
        peer.sendall(b'thanks')
    json.dump(dict(total=total, local=os.environ['LOCAL_WORLD_SIZE']), open('sum.json', 'w'))
    print('sum', total)
else:
    while True:
        try:
            peer = socket.create_connection(at)
            break
        except ConnectionRefusedError:
            pass
    peer.sendall(str(rank * 10).encode())
    assert peer.recv(100) == b'thanks'
",
    );
    let file = job(
        &world,
        "meet",
        "",
        &json!({ "run": ["python3", "meet.py"], "framework": "torch", "roles": { "worker": 4 } }),
    );
    let said = world.run(&["train", &file, "--json"]);
    let finished = said.last_json();
    assert_eq!(
        (said.code, &finished["outcome"]),
        (Some(0), &json!("done")),
        "{}{}",
        said.stdout,
        said.stderr
    );
    let sum: Value = serde_json::from_str(&fs::read_to_string(world.path("sum.json")).unwrap()).unwrap();
    assert_eq!(sum, json!({ "total": 60, "local": "4" }));
    assert_eq!(world.run(&["logs", "meet", "worker-0"]).ok().trim(), "sum 60");
    let row: Value = serde_json::from_str(&world.run(&["jobs", "--json"]).ok()).unwrap();
    assert_eq!((&row[0]["phase"], &row[0]["records"]), (&json!("done"), &Value::Null));
}

fn world_has_no_python() -> bool {
    let missing = std::process::Command::new("python3").arg("-c").arg("0").status().is_err();
    if missing {
        eprintln!("skipped: there is no python3");
    }
    missing
}

#[test]
fn servers_are_stopped_when_the_chief_is_done() {
    let world = World::new();
    let script = r#"echo "$TF_CONFIG" > tf-$ELASTICDL_ROLE-$ELASTICDL_INDEX
        if [ $ELASTICDL_ROLE = ps ]; then trap 'echo told to end; exit 0' TERM; while :; do sleep 0.05; done; fi
        [ $ELASTICDL_ROLE = chief ] || exit 0
        until [ -e tf-ps-0 ] && [ -e tf-worker-0 ]; do sleep 0.05; done"#;
    let roles = json!({ "framework": "tensorflow", "roles": { "chief": 1, "worker": 1, "ps": 1 } });
    let file = job(&world, "tf", script, &roles);
    let said = world.run(&["train", &file]);
    assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
    assert!(said.stderr.contains("all 3 are there: the program runs"), "{}", said.stderr);
    assert!(!said.stdout.contains("records"), "{}", said.stdout);
    let config: Value = serde_json::from_str(&written(&world, "tf-worker-0")).unwrap();
    assert_eq!(config["task"], json!({ "type": "worker", "index": 0 }));
    assert_eq!(
        config["cluster"],
        serde_json::from_str::<Value>(&written(&world, "tf-chief-0")).unwrap()["cluster"]
    );
    assert!(world.run(&["logs", "tf", "ps-0"]).ok().contains("told to end\n"));
}

#[test]
fn one_that_fails_makes_all_start_again_and_too_often_is_a_failure() {
    let world = World::new();
    let script = r#"echo $ELASTICDL_RESTART >> starts-$ELASTICDL_RANK
        [ $ELASTICDL_RANK = 1 ] || sleep 600
        until grep -q $ELASTICDL_RESTART starts-0; do sleep 0.05; done
        if [ $ELASTICDL_RESTART = 2 ]; then echo all is lost >&2; fi; exit 7"#;
    let file = job(&world, "again", script, &json!({ "roles": { "worker": 2 }, "restart": { "max": 2 } }));
    let said = world.run(&["train", &file]);
    let stderr = said.failed(3);
    assert!(
        stderr.contains(
            "error: job \"again\" failed: worker-1 ended with exit code 7 after it was started again 2 times \
             (command.restart.max); its log ends with:\n  all is lost"
        ),
        "{stderr}"
    );
    assert!(
        stderr.contains("worker-1 ended (exit code 7): all are started again at once, 1 of 2 times"),
        "{stderr}"
    );
    for rank in [0, 1] {
        assert_eq!(fs::read_to_string(world.path(&format!("starts-{rank}"))).unwrap(), "0\n1\n2\n");
    }
    let status = world.run(&["status", "again"]).ok();
    assert!(status.contains("failed") && status.contains("restarts"), "{status}");
}

#[test]
fn kill_of_a_member_ends_its_program_and_starts_only_it_again() {
    let world = World::new();
    let script = r#"echo $$ > pid-$ELASTICDL_RANK-$ELASTICDL_RESTART.new
        echo $ELASTICDL_ADDRESS >> at-$ELASTICDL_RANK
        mv pid-$ELASTICDL_RANK-$ELASTICDL_RESTART.new pid-$ELASTICDL_RANK-$ELASTICDL_RESTART
        until [ -e enough ]; do sleep 0.05; done"#;
    let file =
        job(&world, "kill", script, &json!({ "roles": { "worker": 2 }, "restart": { "scope": "one" } }));
    let mut running = world.start(&["train", &file]);
    until_running(&mut running);
    let program = |name: &str| written(&world, name).trim().parse::<u32>().unwrap();
    let (other, victim) = (program("pid-0-0"), program("pid-1-0"));
    signal(pid(&world, "kill", "worker-1"), Signal::KILL);
    let again = running.until("the restart", |e| e["event"] == "restarting");
    assert_eq!((&again["member"], &again["how"]), (&json!("worker-1"), &json!("signal 9")), "{again}");
    let next = program("pid-1-1");
    wait_for("the end of the first program", || (!is_alive(victim)).then_some(()));
    assert!(is_alive(other) && is_alive(next));
    // The program itself may be killed too.
    signal(next, Signal::KILL);
    running.until("the second restart", |e| e["event"] == "restarting" && e["restart"] == 2);
    program("pid-1-2");
    let places = fs::read_to_string(world.path("at-1")).unwrap();
    let mut places: Vec<&str> = places.lines().collect();
    places.dedup();
    assert_eq!(places.len(), 1, "it is found where it was: {places:?}");
    world.write("enough", "");
    let (finished, code) = running.end();
    assert_eq!((code, &finished["outcome"], &finished["restarts"]), (Some(0), &json!("done"), &json!(2)));
    assert_eq!(&finished["rounds"], 1);
}

#[test]
fn a_master_that_is_killed_takes_over_the_program_that_runs() {
    let world = World::new();
    let script = r#"echo $$ >> pid-$ELASTICDL_RANK
        until [ -e enough-$ELASTICDL_RANK ]; do sleep 0.05; done"#;
    let file = job(&world, "lead", script, &json!({ "roles": { "worker": 2 } }));
    let mut running = world.start(&["train", &file]);
    until_running(&mut running);
    let programs = [written(&world, "pid-0"), written(&world, "pid-1")];
    signal(world.master("lead").1, Signal::KILL);
    // Its end is told to the next master.
    world.write("enough-0", "");
    let started = running.until("the next master", |e| e["event"] == "started");
    assert_eq!((&started["term"], &started["adopted"]), (&json!(2), &json!(2)), "{started}");
    // Which of the two comes first depends on who calls first.
    let left = std::cell::Cell::new(2);
    running.until("the end of worker-0, and that the program runs on", |e| {
        let ended = e["event"] == "member_ended" && e["member"] == "worker-0";
        let on = e["event"] == "running" && e["goes_on"] == true && e["round"] == 1;
        left.set(left.get() - u32::from(ended || on));
        left.get() == 0
    });
    world.write("enough-1", "");
    let (finished, code) = running.end();
    assert_eq!((code, &finished["outcome"], &finished["rounds"]), (Some(0), &json!("done"), &json!(1)));
    assert_eq!([written(&world, "pid-0"), written(&world, "pid-1")], programs, "nothing was started again");
}

#[test]
fn a_job_is_watched_stopped_and_resumed() {
    let world = World::new();
    let script = r#"trap 'echo saved > saved; exit 0' TERM
        if [ -e saved ]; then echo $ELASTICDL_RESTART > went-on; exit 0; fi
        echo up; while :; do sleep 0.05; done"#;
    let file = job(&world, "stop", script, &json!({ "run": ["sh", "-c", script] }));
    world.run(&["train", &file, "--detach"]).ok();
    wait_for("the program", || world.run(&["logs", "stop", "worker-0"]).stdout.contains("up").then_some(()));
    let shown = wait_for("the program to be told of", || {
        let shown = world.run(&["status", "stop"]).ok();
        shown.contains("  worker-0   running").then_some(shown)
    });
    assert!(shown.starts_with("stop  running") && shown.contains("round 1  0 of 3 restarts used"), "{shown}");
    let status = world.status("stop");
    let processes = pids(&status);
    assert_eq!((&status["phase"], processes.len()), (&json!("running"), 1));
    let refused = world.run(&["scale", "stop", "--workers", "3"]).failed(1);
    assert!(refused.contains("as many members as spec.command.roles says"), "{refused}");
    let refused = world.run(&["audit", "stop"]).failed(1);
    assert!(refused.contains("runs a program of its own"), "{refused}");
    let stopped = world.run(&["stop", "stop"]);
    assert!(stopped.stderr.contains("hint: `elasticdl resume stop` runs it again"), "{}", stopped.stderr);
    stopped.ok();
    assert!(processes.iter().all(|pid| !is_alive(*pid)));
    assert_eq!(written(&world, "saved"), "saved\n");
    let said = world.run(&["resume", "stop", "--json"]);
    assert_eq!((said.code, &said.last_json()["outcome"]), (Some(0), &json!("done")), "{}", said.stderr);
    assert_eq!(written(&world, "went-on"), "1\n", "how often it was started before");
    let over = world.run(&["resume", "stop"]).failed(1);
    assert!(over.contains("job \"stop\" is done"), "{over}");
}

#[test]
fn what_cannot_run_is_told_at_once() {
    let world = World::new();
    let file = job(&world, "none", "", &json!({ "run": ["./no-such-program"] }));
    let stderr = world.run(&["train", &file]).failed(3);
    assert!(
        stderr.contains("the program of worker-0 could not be started; its log ends with:\n  cannot start ./no-such-program: there is no such file"),
        "{stderr}"
    );
    let file = job(&world, "roles", "", &json!({ "framework": "dmlc" }));
    let stderr = world.run(&["train", &file]).failed(1);
    assert!(
        stderr.contains("spec.command.roles: dmlc takes exactly 1 of scheduler, and there are 0"),
        "{stderr}"
    );
}
