//! Parameter servers as pods: more and fewer of them while the job trains, and backups that take over.

use serde_json::{Value, json};

use super::place::Place;

/// Far more than are trained before the last server goes.
const EPOCHS: u32 = 60;

#[test]
fn servers_come_and_go_as_pods_and_backups_take_over() {
    let Some(place) = Place::find("servers") else { return };
    let workers = json!({ "count": 1, "max": 1, "cpu": "300m", "memory": "256Mi" });
    let job = place.job("servers", EPOCHS, workers);
    let mut running = place.train_with(&job, &["--set", "servers.replicas=2"]);
    running.until("the backups", |e| e["event"] == "backed_up");

    place.elasticdl(&["scale", "servers", "--servers", "3"]).ok();
    let moved = running.until("a move", |e| e["event"] == "moved");
    assert_eq!(moved["to"], 2, "{moved}");
    all_backed_up(&place);

    place.kill(&place.pod("servers", "server"));
    let took_over = running.until("the backups", |e| e["event"] == "promoted" || e["event"] == "replay");
    assert_eq!(took_over["event"], "promoted", "{took_over}");
    all_backed_up(&place);

    place.elasticdl(&["scale", "servers", "--servers", "2"]).ok();
    place.until("the third server to go", || (servers(&status(&place)) == 2).then_some(()));

    let (finished, code) = running.end();
    assert_eq!((code, &finished["outcome"]), (Some(0), &json!("done")), "{finished}");
    let audit: Value = serde_json::from_str(&place.elasticdl(&["audit", "servers", "--json"]).ok()).unwrap();
    let figures = ["exact", "lost", "doubled", "replayed"].map(|figure| &audit[figure]);
    assert_eq!(
        figures,
        [&json!(true), &json!(0), &json!(0), &json!(0)],
        "nothing was trained again: {audit}"
    );
}

fn status(place: &Place) -> Value {
    let status: Value =
        serde_json::from_str(&place.elasticdl(&["status", "servers", "--json"]).ok()).unwrap();
    assert_eq!(status["phase"], "training", "the job ends too soon");
    status
}

fn servers(status: &Value) -> usize {
    status["servers"].as_array().map_or(0, Vec::len)
}

/// Waits until every partition has a backup.
fn all_backed_up(place: &Place) {
    place.until("all backups", || {
        let backups = &status(place)["backups"];
        (backups["there"] == backups["wanted"]).then_some(())
    });
}
