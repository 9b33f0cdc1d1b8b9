//! A program of one's own on a real cluster: all start or none, in the person's image, without a volume; and the
//! same as a resource.

use serde_json::{Value, json};

use crate::operator::Resources;
use crate::place::Place;

/// Rank 0 greets all others at the addresses that it was told, until they answer; each of them waits for that. So it ends
/// well only where they have met.
const MEET: &str = r#"
set -- $(echo "$ELASTICDL_MEMBERS" | tr -c '0-9.:' '\n' | grep '[.]')
if [ "$ELASTICDL_RANK" = 0 ]; then
    shift
    for peer in "$@"; do until echo hello | nc "${peer%:*}" "${peer#*:}"; do sleep 0.2; done; done
else
    nc -l -p "${ELASTICDL_ADDRESS#*:}" < /dev/null
fi
sleep 6
"#;

#[test]
fn a_program_of_ones_own_starts_with_all_its_members_or_not_at_all() {
    let Some(place) = Place::find("gang") else { return };
    let place = Resources::of(place);
    // The client makes the priority classes that the operator takes for granted.
    all_or_nothing(&place);
    let operator = place.operator();
    as_a_resource(&place);
    drop(operator);
}

/// What the job runs, in the image that has a shell.
fn job(place: &Place, name: &str, script: &str, workers: u32) -> Value {
    let mut kubernetes = place.kubernetes();
    kubernetes["volumes"] = libraries();
    kubernetes["grace"] = json!("3s");
    json!({
        "apiVersion": "elasticdl.org/v1", "kind": "ElasticJob", "metadata": { "name": name },
        "spec": {
            "command": {
                "run": ["sh", "-c", script], "image": place.busybox(), "roles": { "worker": workers }, "wait": "4s",
            },
            "workers": { "cpu": "400m", "memory": "64Mi" },
            "master": { "cpu": "100m", "memory": "64Mi" },
            "kubernetes": kubernetes,
        },
    })
}

/// The program under test is not static, unlike the one that is shipped: where it is brought into another image, so
/// must be what it is linked with, from nodes that are this very machine.
fn libraries() -> Value {
    let program = std::fs::read(env!("CARGO_BIN_EXE_elasticdl")).unwrap();
    let dynamic = program.windows(8).any(|part| part == b"ld-linux");
    let mount = |path: &str| json!({ "hostPath": { "path": path }, "mountPath": path, "readOnly": true });
    let places = ["/lib64", "/lib/x86_64-linux-gnu"].into_iter().filter(|_| dynamic);
    places.map(mount).collect()
}

fn as_a_resource(place: &Resources) {
    place.apply(&job(place, "own", "echo $ELASTICDL_ROLE-$ELASTICDL_INDEX of $ELASTICDL_SIZE; sleep 6", 2));
    place.phase("own", "Running");
    let listed = place.kubectl(&["get", "elasticjobs"]).ok();
    assert!(listed.contains("own") && listed.contains("Running"), "{listed}");
    place.until("what it says", || {
        (place.kubectl(&["logs", "own-worker-1"]).stdout.trim() == "worker-1 of 2").then_some(())
    });
    let complete = place.condition("own", "Complete", "True");
    assert_eq!(complete["message"], "the program is done");
}

fn all_or_nothing(place: &Resources) {
    let blocker = |n: usize, node: &str| {
        // Room for a master and one of the three on each node, and no more.
        let cpu = format!("{}m", place.processors(node) - 550);
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": format!("blocker-{n}"), "labels": { "app": "blocker" } },
            "spec": {
                "terminationGracePeriodSeconds": 0, "nodeSelector": { "kubernetes.io/hostname": node },
                "containers": [{ "name": "c", "image": place.busybox(), "command": ["sleep", "600"],
                    "resources": { "requests": { "cpu": cpu } } }],
            },
        })
    };
    for (n, node) in place.nodes().iter().enumerate() {
        place.apply(&blocker(n, node));
    }
    place.kubectl(&["wait", "--for=condition=Ready", "pod", "-l", "app=blocker", "--timeout=60s"]).ok();
    let mut spec = job(place, "meet", MEET, 3);
    spec["spec"]["kubernetes"]["namespace"] = json!(place.namespace);
    place.write("meet.yaml", &spec.to_string());
    let mut running = place.train("meet.yaml");
    let given = running.until("the room to be given back", |e| {
        assert_ne!(e["event"], "running", "{e}");
        e["event"] == "given_back"
    });
    assert!(given["why"].as_str().unwrap().contains("Insufficient cpu"), "{given}");
    place.until("all of it to be free", || {
        place.pods("elasticdl.org/job=meet,elasticdl.org/member").trim().is_empty().then_some(())
    });

    place.kubectl(&["delete", "pod", "-l", "app=blocker", "--grace-period=0", "--force"]).ok();
    let began = running.until("all to be there", |e| e["event"] == "running");
    assert_eq!((&began["members"], &began["round"]), (&json!(3), &json!(1)), "{began}");
    place.kubectl(&["delete", "pod", "meet-master", "--grace-period=0", "--force"]).ok();
    let next = running.until("the next master", |e| e["event"] == "started");
    assert_eq!((&next["term"], &next["adopted"]), (&json!(2), &json!(3)), "{next}");
    let (finished, code) = running.end();
    assert_eq!(
        (code, &finished["outcome"], &finished["rounds"]),
        (Some(0), &json!("done"), &json!(1)),
        "{finished}"
    );
    let told = place.kubectl(&["get", "events", "-o", "jsonpath={.items[*].reason}"]).ok();
    for reason in ["GivenBack", "Running", "MemberJoined", "Finished"] {
        assert!(told.split(' ').any(|word| word == reason), "{reason} in the events: {told}");
    }
}
