//! Whole lives of jobs, without a cluster: decisions are carried out on a world of plain values.

use serde_json::{Value, json};

use super::*;
use crate::negotiate::Reason;

const START: i64 = 1_800_000_000;

/// What a cluster would hold of one job.
struct World {
    job: ElasticJob,
    seen: Seen,
    second: i64,
    masters_made: u32,
    workers_asked: Option<u32>,
    workers_allowed: Option<u32>,
    told: Vec<String>,
    /// Whether the resource is gone.
    removed: bool,
}

fn spec() -> Value {
    json!({
        "model": { "zoo": "lr" },
        "data": { "train": "t.tsv", "layout": "criteo" },
        "workers": { "count": 2, "max": 4 },
        "limits": { "restarts": 2 },
        "kubernetes": { "volumes": [{ "hostPath": { "path": "/srv" }, "mountPath": "/data" }] },
    })
}

fn report(phase: Phase, records: u64, workers_wanted: u32) -> Report {
    Report {
        phase,
        records,
        records_total: Some(1000),
        epoch: Some(1),
        workers: workers_wanted,
        workers_wanted,
        workers_useful: None,
        workers_allowed: None,
        auc: None,
        logloss: None,
        error: None,
    }
}

impl World {
    fn new(spec: Value) -> World {
        let job = serde_json::from_value(json!({
            "apiVersion": "elasticdl.org/v1", "kind": "ElasticJob",
            "metadata": { "name": "ctr", "namespace": "ads", "uid": "u", "generation": 1 }, "spec": spec,
        }));
        World {
            job: job.unwrap(),
            seen: Seen::default(),
            second: 0,
            masters_made: 0,
            workers_asked: None,
            workers_allowed: None,
            told: Vec::new(),
            removed: false,
        }
    }

    /// One look: decides, carries out, remembers.
    fn look(&mut self) -> Decision {
        let now = Timestamp::from_second(START + self.second).unwrap();
        let decision = decide(&self.job, &self.seen, now);
        for action in &decision.actions {
            match action {
                Action::Hold => self.job.metadata.finalizers = Some(vec![FINALIZER.into()]),
                Action::Release => self.removed = true,
                Action::Remove => self.delete(),
                Action::Prepare => {}
                Action::Start => {
                    let pod = self.pod("Pending", None);
                    self.seen.masters.push(pod);
                    self.masters_made += 1;
                }
                Action::Scale(workers) => self.workers_asked = Some(*workers),
                Action::Allow(workers) => self.workers_allowed = *workers,
                Action::Stop => self.end(0, &report(Phase::Stopped, 500, 0).to_line()),
                Action::DeleteMasters => self.seen.masters.clear(),
                Action::DeleteMembers => self.seen.members = 0,
            }
        }
        self.job.status = Some(decision.status.clone());
        self.told.extend(decision.stories.iter().map(|story| story.reason.clone()));
        decision
    }

    fn pod(&self, phase: &str, terminated: Option<Value>) -> Pod {
        let created = Timestamp::from_second(START + self.second).unwrap().to_string();
        let name = format!("ctr-master-{}", self.seen.masters.len());
        let mut status = json!({ "phase": phase });
        if let Some(terminated) = terminated {
            let state = json!({ "terminated": terminated });
            status["containerStatuses"] = json!([{ "name": "elasticdl", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state }]);
        }
        let metadata = json!({ "name": name, "creationTimestamp": created });
        serde_json::from_value(json!({ "metadata": metadata, "status": status })).unwrap()
    }

    /// The newest master runs and says this.
    fn runs(&mut self, said: Report) {
        let last = self.seen.masters.last_mut().expect("there is a master");
        last.status.get_or_insert_default().phase = Some("Running".into());
        self.seen.report = Some(said);
        self.seen.members = 3;
    }

    /// The newest master ends.
    fn end(&mut self, code: i32, message: &str) {
        self.seen.masters.pop();
        let reason = if code == 0 { "Completed" } else { "Error" };
        let pod = self.pod(
            if code == 0 { "Succeeded" } else { "Failed" },
            Some(json!({ "exitCode": code, "reason": reason, "message": message })),
        );
        self.seen.masters.push(pod);
        self.seen.report = None;
    }

    fn delete(&mut self) {
        self.job.metadata.deletion_timestamp = Some(Time(Timestamp::from_second(START).unwrap()));
    }

    fn set(&mut self, key: &str, value: Value) {
        self.job.spec[key] = value;
        self.job.metadata.generation = self.job.metadata.generation.map(|n| n + 1);
    }

    fn status(&self) -> &JobStatus {
        self.job.status.as_ref().unwrap()
    }

    fn phase(&self) -> Phase {
        self.status().phase.unwrap()
    }

    /// A world whose job trains.
    fn training(spec: Value) -> World {
        let mut world = World::new(spec);
        world.look();
        world.runs(report(Phase::Training, 100, 2));
        world.look();
        assert_eq!(world.phase(), Phase::Training);
        world
    }
}

#[test]
fn a_job_starts_trains_and_is_done() {
    let mut world = World::new(spec());
    let first = world.look();
    assert_eq!(first.actions, [Action::Hold, Action::Start]);
    assert_eq!((world.phase(), first.again), (Phase::Starting, Some(LOOK)));
    assert_eq!(world.look().actions, [], "there is one");
    world.runs(report(Phase::Training, 420, 2));
    assert_eq!(world.look().again, Some(LOOK));
    let status = world.status();
    assert_eq!(
        (status.progress.as_deref(), status.workers, status.records),
        (Some("42 %"), Some(2), Some(420))
    );
    assert_eq!(status.selector.as_deref(), Some("elasticdl.org/job=ctr,elasticdl.org/role=worker"));
    assert!(status.holds("Valid") && status.holds("Running"));
    world.second = 60;
    let done = Report { auc: Some(0.77777), ..report(Phase::Done, 1000, 0) };
    world.end(0, &done.to_line());
    let last = world.look();
    assert_eq!((world.phase(), last.actions.as_slice(), last.again), (Phase::Done, &[][..], None));
    let status = world.status();
    assert_eq!((status.progress.as_deref(), status.auc.as_deref()), (Some("100 %"), Some("0.7778")));
    assert_eq!(status.completion_time.as_ref().unwrap().0.as_second(), START + 60);
    assert!(status.holds("Complete") && !status.holds("Failed") && !status.holds("Running"));
    assert_eq!(world.told, ["Started", "Done"]);
    world.seen.masters.clear();
    assert_eq!(world.look().actions, [], "its master's pod may go; the job stays done");
}

#[test]
fn nothing_changes_where_nothing_changed() {
    let mut world = World::training(spec());
    let before = world.status().clone();
    world.second = 5;
    assert_eq!(world.look().status, before, "or the status would be written at every look");
}

#[test]
fn a_typo_is_refused_with_the_nearest_key_and_mended_by_the_next_version() {
    let mut wrong = spec();
    wrong["train"] = json!({ "epoks": 3 });
    let mut world = World::new(wrong);
    assert_eq!(world.look().actions, [Action::Hold]);
    world.look();
    let valid = world.status().condition("Valid").unwrap();
    assert_eq!((valid.status.as_str(), valid.reason.as_str()), ("False", "Invalid"));
    assert_eq!(valid.message, "spec.train.epoks: unknown key; did you mean epochs?");
    assert_eq!(
        (world.phase(), world.told.as_slice()),
        (Phase::Pending, &["Invalid".to_string()][..]),
        "told once"
    );
    world.set("train", json!({ "epochs": 3 }));
    assert_eq!(world.look().actions, [Action::Start]);
    assert!(world.status().holds("Valid") && world.status().error.is_none());
}

#[test]
fn a_name_that_a_client_uses_is_left_alone() {
    let mut world = World::new(spec());
    world.seen.taken = true;
    assert_eq!(world.look().actions, [Action::Hold]);
    assert_eq!(world.status().condition("Valid").unwrap().reason, "NameTaken");
    world.seen.taken = false;
    assert_eq!(world.look().actions, [Action::Start]);
}

#[test]
fn a_master_that_dies_is_started_again_with_growing_pauses_and_not_for_ever() {
    let mut world = World::training(spec());
    world.end(137, "");
    assert_eq!(world.look().actions, [Action::Start], "at once");
    assert_eq!((world.status().restarts, world.status().restarts_in_row), (1, 1));
    world.end(101, "panicked");
    let paused = world.look();
    assert_eq!((paused.actions.as_slice(), paused.again), (&[][..], Some(Duration::from_secs(1))));
    world.second = 1;
    assert_eq!(world.look().actions, [Action::Start]);
    world.end(101, "panicked");
    world.second = 100;
    assert_eq!(world.look().actions, []);
    assert_eq!(world.phase(), Phase::Failed);
    let failed = world.status().condition("Failed").unwrap();
    assert_eq!((failed.reason.as_str(), failed.status.as_str()), ("MasterFailed", "True"));
    assert!(failed.message.contains("code 101, 3 times in a row: panicked"), "{}", failed.message);
}

#[test]
fn progress_makes_deaths_count_from_the_first_again() {
    let mut world = World::training(spec());
    for round in 1..10 {
        world.end(137, "");
        world.second += 100;
        world.look();
        world.runs(report(Phase::Training, 100, 2));
        world.look();
        assert_eq!(world.status().restarts_in_row, 1, "no record more than before");
        world.runs(report(Phase::Training, 100 + round, 2));
        world.look();
        assert_eq!((world.status().restarts_in_row, world.status().restarts), (0, round as u32));
        world.runs(report(Phase::Training, 100, 2));
        world.look();
    }
}

#[test]
fn what_comes_from_outside_is_no_fault_of_the_master() {
    let mut world = World::training(spec());
    for _ in 0..10 {
        let mut gone = world.seen.masters.pop().unwrap();
        gone.metadata.deletion_timestamp = Some(Time(Timestamp::from_second(START).unwrap()));
        world.seen.masters = vec![gone];
        world.seen.report = None;
        assert_eq!(world.look().actions, [Action::Start]);
    }
    assert_eq!((world.status().restarts, world.status().restarts_in_row), (10, 0));
}

#[test]
fn the_number_of_workers_follows_the_resource() {
    let mut world = World::training(spec());
    assert_eq!(world.workers_asked, None);
    world.set("workers", json!({ "count": 4, "max": 4 }));
    assert_eq!(world.look().actions, [Action::Prepare, Action::Scale(4)]);
    world.runs(report(Phase::Training, 200, 4));
    assert_eq!(world.look().actions, []);
    assert_eq!(world.status().observed_generation, Some(2));
}

#[test]
fn a_suspended_job_stops_after_a_checkpoint_and_goes_on() {
    let mut world = World::training(spec());
    world.set("suspend", json!(true));
    assert_eq!(world.look().actions, [Action::Stop]);
    assert_eq!(world.phase(), Phase::Stopping);
    assert_eq!(world.look().actions, [Action::DeleteMasters]);
    let status = world.status();
    assert_eq!(
        (status.progress.as_deref(), status.records),
        (Some("50 %"), Some(500)),
        "its last words count"
    );
    assert_eq!(world.look().actions, [Action::DeleteMembers]);
    let rests = world.look();
    assert_eq!((rests.actions.as_slice(), rests.again), (&[][..], None), "it costs nothing");
    assert_eq!(world.phase(), Phase::Suspended);
    assert!(world.status().holds("Suspended") && world.status().start_time.is_none());
    world.second = 500;
    world.set("suspend", json!(false));
    assert_eq!(world.look().actions, [Action::Start]);
    assert!(!world.status().holds("Suspended"));
    assert_eq!(world.status().start_time.as_ref().unwrap().0.as_second(), START + 500);
    assert_eq!(world.told, ["Started", "Stopping", "Suspended", "Resumed", "Started"]);
}

#[test]
fn a_change_of_mind_waits_until_the_job_has_stopped() {
    let mut world = World::training(spec());
    world.set("suspend", json!(true));
    world.look();
    world.set("suspend", json!(false));
    assert_eq!(world.look().actions, [Action::DeleteMasters]);
    assert_eq!(world.look().actions, [Action::DeleteMembers]);
    assert_eq!(world.look().actions, [Action::Start]);
    assert_eq!(world.status().stopping_since, None);
}

#[test]
fn a_master_that_does_not_stop_is_deleted_in_the_end() {
    let mut world = World::training(spec());
    world.set("suspend", json!(true));
    let now = Timestamp::from_second(START).unwrap();
    let asked = decide(&world.job, &world.seen, now);
    assert_eq!(asked.actions, [Action::Stop]);
    world.job.status = Some(asked.status);
    world.second = STOP_LIMIT.as_secs() as i64;
    assert_eq!(world.look().actions, [Action::DeleteMasters]);
}

#[test]
fn a_job_that_is_done_before_it_could_be_suspended_is_done() {
    let mut world = World::training(spec());
    world.set("suspend", json!(true));
    world.end(0, &report(Phase::Done, 1000, 0).to_line());
    world.look();
    assert_eq!(world.phase(), Phase::Done);
}

#[test]
fn a_job_that_somebody_stopped_is_over_and_neither_done_nor_failed() {
    let mut world = World::training(spec());
    world.end(0, &report(Phase::Stopped, 500, 0).to_line());
    assert_eq!(world.look().actions, []);
    assert_eq!(world.phase(), Phase::Stopped);
    assert!(!world.status().holds("Complete") && !world.status().holds("Failed"));
}

#[test]
fn what_the_master_says_of_its_input_is_the_error() {
    let mut world = World::training(spec());
    world.end(1, "reading\nerror: spec.data.train: no file matches t.tsv");
    world.look();
    assert_eq!(
        (world.phase(), world.status().error.as_deref()),
        (Phase::Failed, Some("spec.data.train: no file matches t.tsv"))
    );
    assert_eq!(world.status().condition("Failed").unwrap().reason, "WrongInput");
}

#[test]
fn a_deadline_stops_the_job_which_has_failed() {
    let mut limited = spec();
    limited["deadline"] = json!("1m");
    let mut world = World::training(limited);
    world.second = 58;
    assert_eq!(world.look().again, Some(Duration::from_secs(2)));
    world.second = 60;
    assert!(needs_members(&world.job, Timestamp::from_second(START + 60).unwrap()));
    assert_eq!(world.look().actions, [Action::Stop]);
    assert_eq!(world.look().actions, [Action::DeleteMasters]);
    assert_eq!(world.look().actions, [Action::DeleteMembers]);
    world.look();
    assert_eq!(world.phase(), Phase::Failed);
    assert_eq!(world.status().condition("Failed").unwrap().reason, "DeadlineExceeded");
}

#[test]
fn a_job_that_is_over_is_removed_after_its_time() {
    let mut kept = spec();
    kept["ttl"] = json!("90s");
    let mut world = World::training(kept);
    world.end(0, &report(Phase::Done, 1000, 0).to_line());
    assert_eq!(world.look().again, Some(Duration::from_secs(90)));
    world.second = 89;
    assert_eq!(world.look().again, Some(Duration::from_secs(1)));
    world.second = 90;
    assert_eq!(world.look().actions, [Action::Remove]);
    assert_eq!(world.look().actions, [Action::DeleteMasters]);
    world.look();
    assert_eq!(world.look().actions, [Action::Release]);
    assert!(world.removed);
}

#[test]
fn a_resource_that_is_deleted_takes_its_master_first() {
    let mut world = World::training(spec());
    world.delete();
    assert_eq!(world.look().actions, [Action::DeleteMasters]);
    assert_eq!(world.look().actions, [Action::DeleteMembers]);
    assert_eq!(world.look().actions, [Action::Release]);
}

#[test]
fn a_pod_that_waits_says_why() {
    let mut world = World::new(spec());
    world.look();
    let why = "0/2 nodes are available: 2 Insufficient cpu.";
    let conditions =
        json!([{ "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why }]);
    world.seen.masters[0].status =
        serde_json::from_value(json!({ "phase": "Pending", "conditions": conditions })).unwrap();
    world.look();
    assert_eq!(world.status().condition("Running").unwrap().message, why);
}

fn grant(workers: u32, reason: Reason) -> Option<Grant> {
    Some(Grant { job: "ads/ctr".into(), workers, reason })
}

#[test]
fn a_job_for_which_there_is_no_room_waits_without_a_pod_and_starts_when_there_is() {
    let mut world = World::new(spec());
    world.seen.grant = grant(0, Reason::NoRoom);
    assert_eq!(world.look().actions, [Action::Hold]);
    world.second = 100;
    assert_eq!(world.look().actions, []);
    assert_eq!((world.phase(), &world.told), (Phase::Pending, &vec!["Waiting".to_string()]));
    let waits = world.status().condition("Admitted").unwrap();
    assert_eq!((waits.status.as_str(), waits.reason.as_str()), ("False", "NoRoom"));
    assert_eq!((world.status().workers_granted, &world.status().start_time), (Some(0), &None));
    world.seen.grant = grant(2, Reason::Enough);
    assert_eq!(world.look().actions, [Action::Start]);
    assert!(world.status().holds("Admitted"));
    let began = world.status().start_time.as_ref().unwrap().0.as_second();
    assert_eq!(began, START + 100, "the deadline counts from here");
}

#[test]
fn a_master_is_allowed_what_was_agreed_and_keeps_running_whatever_that_is() {
    let mut world = World::training(spec());
    world.seen.grant = grant(1, Reason::Share { jobs: 2 });
    assert_eq!(world.look().actions, [Action::Allow(Some(1))]);
    world.seen.report = Some(Report { workers_allowed: Some(1), ..report(Phase::Training, 200, 2) });
    assert_eq!(world.look().actions, [], "it has heard");
    world.seen.grant = grant(0, Reason::Outranked);
    assert_eq!(world.look().actions, []);
    assert_eq!(world.phase(), Phase::Training);
    world.seen.grant = None;
    assert_eq!(world.look().actions, [Action::Allow(None)], "nobody shares out the room any more");
    assert_eq!(world.workers_allowed, None);
}

#[test]
fn only_jobs_that_run_or_are_to_are_at_the_table() {
    let mut world = World::training(spec());
    let wants = |world: &World| wants_room(&world.job, &world.job.resolve().unwrap());
    assert!(wants(&world));
    world.set("suspend", true.into());
    assert!(!wants(&world));
    world.set("suspend", false.into());
    world.end(0, &report(Phase::Done, 1000, 0).to_line());
    world.look();
    assert!(!wants(&world), "it is over");
    let mut gone = World::training(spec());
    gone.delete();
    assert!(!wants(&gone));
}
