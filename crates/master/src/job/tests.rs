//! Whole jobs without a process: events in, effects out.

use super::*;
use elasticdl_spec::resolve::{Inputs, resolve};
use elasticdl_spec::scores::Scores;
use elasticdl_spec::{ModelShape, TaskId};
use elasticdl_wire::control::{Assignment, Done, Failed, Leased, Member, lease_reply, report_request};

/// A job in a world where everything asked for happens at once.
struct World {
    job: Job,
    now: Duration,
    effects: Vec<Effect>,
    pid_next: u32,
    /// pids of running processes.
    running: BTreeMap<(i32, u32), u32>,
    emitted: Vec<(&'static str, Map<String, Value>)>,
    answers: BTreeMap<Ticket, Answer>,
    ticket_next: Ticket,
    commits: Vec<Manifest>,
    exports: Vec<u64>,
    ended: Option<Phase>,
}

impl World {
    fn new(extra: &[(&str, &str)]) -> World {
        World::resumed(extra, None)
    }

    fn resumed(extra: &[(&str, &str)], resume: Option<Manifest>) -> World {
        let file = "{apiVersion: elasticdl.org/v1, kind: ElasticJob, metadata: {name: j}, spec: {model: {zoo: lr}, \
                    data: {train: t, validate: v, layout: criteo}, servers: {count: 2, partitions: 4}, \
                    workers: {count: 2, max: 4}, limits: {restarts: 2}}}";
        let flags = extra.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        let resolved = resolve(&Inputs { file: Some(file), environment: vec![], flags }).unwrap();
        let plan = Plan { job: resolved.job, shape: ModelShape::default() };
        let exports = plan.job.output.is_some();
        let job = Job::new(Start {
            plan,
            checkpoint_dir: "ckpt".into(),
            checkpoint_next: resume.as_ref().map_or(1, |m| m.id + 1),
            resume,
            best: Some(Best { logloss: 0.4, auc: 0.8 }),
            exports,
            term: 1,
        });
        World {
            job,
            now: Duration::ZERO,
            effects: Vec::new(),
            pid_next: 100,
            running: BTreeMap::new(),
            emitted: Vec::new(),
            answers: BTreeMap::new(),
            ticket_next: 1,
            commits: Vec::new(),
            exports: Vec::new(),
            ended: None,
        }
    }

    /// A job with `shards` training shards and one to validate on, everything started.
    fn training(extra: &[(&str, &str)], shards: u64) -> World {
        let mut world = World::new(extra);
        world.find_shards(shards);
        world.tick(1);
        world.serve();
        assert_eq!(world.job.phase(), Phase::Training);
        world
    }

    fn find_shards(&mut self, shards: u64) {
        let shard =
            |n| Shard { path: "t".into(), first: n * 10, records: Some(10), offset: 0, fingerprint: 1 };
        for n in 0..shards {
            self.step(Event::ShardFound(Purpose::Train, shard(n)));
        }
        self.step(Event::AllFound(Purpose::Train));
        self.step(Event::ShardFound(Purpose::Evaluate, shard(0)));
        self.step(Event::AllFound(Purpose::Evaluate));
    }

    fn step(&mut self, event: Event) {
        self.job.step(self.now, event, &mut self.effects);
        while !self.effects.is_empty() {
            for effect in std::mem::take(&mut self.effects) {
                self.carry_out(effect);
            }
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Answer(ticket, answer) => {
                assert!(self.answers.insert(ticket, answer).is_none(), "answered twice");
            }
            Effect::Fleet(fleet::Order::Start { role, id }) => {
                let pid = self.pid_next;
                self.pid_next += 1;
                self.running.insert((role as i32, id), pid);
                self.job.step(self.now, Event::Launched(role, id, Ok(pid)), &mut self.effects);
                let caller = Caller { role: role as i32, id, pid };
                let ticket = self.ticket();
                let joined = Event::Joined(ticket, caller, format!("address-{id}"));
                self.job.step(self.now, joined, &mut self.effects);
            }
            Effect::Fleet(fleet::Order::Stop { role, id, pid }) | Effect::Kill(role, id, pid) => {
                self.running.remove(&(role as i32, id));
                let exit = Exit { role, id, pid, code: Some(0), signal: None, last_lines: vec![] };
                self.job.step(self.now, Event::Exited(exit), &mut self.effects);
            }
            Effect::Fleet(fleet::Order::GiveUp { .. }) => panic!("the job turns this into a failure"),
            Effect::Commit(manifest) => {
                self.commits.push(*manifest.clone());
                let committed = Event::Committed(manifest.id, Ok(manifest));
                self.job.step(self.now, committed, &mut self.effects);
            }
            Effect::Export(id) => self.exports.push(id),
            Effect::Emit(event, fields) => self.emitted.push((event, fields)),
            Effect::Finish(phase) => self.ended = Some(phase),
        }
    }

    fn ticket(&mut self) -> Ticket {
        self.ticket_next += 1;
        self.ticket_next
    }

    fn ask(&mut self, make: impl FnOnce(Ticket) -> Event) -> Option<Answer> {
        let ticket = self.ticket();
        self.step(make(ticket));
        self.answers.remove(&ticket)
    }

    fn tick(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
        self.step(Event::Tick);
    }

    fn caller(&self, role: Role, id: u32) -> Caller {
        Caller { role: role as i32, id, pid: self.running[&(role as i32, id)] }
    }

    /// Every running server opens the partitions it was assigned.
    fn serve(&mut self) {
        for server in 0..2 {
            let caller = self.caller(Role::Server, server);
            let mine = self.job.places.iter().enumerate().filter(|(_, p)| p.server == server);
            let partitions = mine
                .map(|(p, place)| Assignment {
                    partition: p as u32,
                    incarnation: place.incarnation,
                    bytes: 0,
                    crc32: 0,
                })
                .collect();
            let ready = ReadyRequest { partitions, ..ReadyRequest::default() };
            assert_eq!(self.ask(|t| Event::Ready(t, caller, ready)), Some(Answer::Noted));
        }
    }

    fn lease(&mut self, worker: u32) -> Option<Leased> {
        let caller = self.caller(Role::Worker, worker);
        match self.ask(|t| Event::LeaseAsked(t, caller)) {
            Some(Answer::Lease(LeaseReply { what: Some(lease_reply::What::Leased(leased)) })) => Some(leased),
            _ => None,
        }
    }

    fn report(&mut self, worker: u32, leased: &Leased, outcome: report_request::Outcome) -> bool {
        let caller = self.caller(Role::Worker, worker);
        let report = ReportRequest {
            member: Some(Member { role: 0, id: worker, pid: caller.pid }),
            task: leased.task.clone(),
            term: leased.term,
            lease: leased.lease,
            batches: 1,
            records: 10,
            loss_sum: 5.0,
            outcome: Some(outcome),
            ..ReportRequest::default()
        };
        match self.ask(|t| Event::Reported(t, caller, Box::new(report))) {
            Some(Answer::Report(held)) => held,
            other => panic!("{other:?}"),
        }
    }

    fn train_one(&mut self, worker: u32) -> bool {
        let Some(leased) = self.lease(worker) else { return false };
        assert!(leased.task.starts_with("train/"), "{}", leased.task);
        assert!(self.report(worker, &leased, done(None)));
        true
    }

    fn kill(&mut self, role: Role, id: u32) {
        let pid = self.running.remove(&(role as i32, id)).unwrap();
        let exit = Exit { role, id, pid, code: None, signal: Some(9), last_lines: vec!["last words".into()] };
        self.step(Event::Exited(exit));
    }

    /// Servers beat; those told to write a checkpoint do.
    fn write_checkpoints(&mut self) {
        for server in 0..2 {
            let caller = self.caller(Role::Server, server);
            let Some(Answer::Beat(BeatReply { what: Some(what), .. })) =
                self.ask(|t| Event::Beat(t, caller, Value::Null))
            else {
                continue;
            };
            let elasticdl_wire::control::beat_reply::What::WriteCheckpoint(write) = what else { continue };
            let written = self.written(server, write.checkpoint);
            self.ask(|t| Event::Written(t, caller, written));
        }
    }

    fn written(&self, server: u32, checkpoint: u64) -> CheckpointWrittenRequest {
        let mine = self.job.places.iter().enumerate().filter(|(_, p)| p.server == server);
        let files = mine
            .map(|(p, place)| Assignment {
                partition: p as u32,
                incarnation: place.incarnation,
                bytes: 5,
                crc32: 6,
            })
            .collect();
        CheckpointWrittenRequest { checkpoint, files, ..CheckpointWrittenRequest::default() }
    }

    fn events(&self) -> Vec<&'static str> {
        self.emitted.iter().map(|(event, _)| *event).collect()
    }

    fn finished(&self) -> &Map<String, Value> {
        &self.emitted.iter().rfind(|(event, _)| *event == "finished").expect("it finished").1
    }
}

fn done(scores: Option<Scores>) -> report_request::Outcome {
    let scores = scores.map(|s| serde_json::to_string(&s).unwrap()).unwrap_or_default();
    report_request::Outcome::Done(Done { task_records: 10, scores })
}

fn good_scores() -> Scores {
    let mut scores = Scores::default();
    scores.add(0.9, 1.0);
    scores.add(0.1, 0.0);
    scores
}

#[test]
fn a_job_trains_saves_evaluates_exports_and_is_done() {
    let mut world = World::training(&[("output", "model")], 3);
    while world.train_one(0) {}
    assert_eq!(world.job.phase(), Phase::Saving);
    assert!(world.lease(1).is_none(), "nothing is evaluated before the model is saved");
    world.write_checkpoints();
    assert_eq!(world.commits.last().unwrap().done.records, 30);
    assert_eq!(world.job.phase(), Phase::Evaluating);
    let leased = world.lease(1).expect("the final evaluation");
    assert_eq!(leased.task, "evaluate/1/0");
    world.report(1, &leased, done(Some(good_scores())));
    assert_eq!(world.exports, [1]);
    world.step(Event::Exported(Ok(Value::Null)));
    assert_eq!(world.ended, Some(Phase::Done));
    let finished = world.finished();
    assert_eq!((&finished["outcome"], &finished["records"]), (&"done".into(), &30.into()));
    assert_eq!((&finished["auc"], &finished["best_auc"]), (&1.0.into(), &0.8.into()));
    assert!(world.running.is_empty(), "everybody was asked to end");
}

#[test]
fn nothing_is_leased_before_every_partition_is_served() {
    let mut world = World::new(&[]);
    world.find_shards(2);
    world.tick(1);
    assert!(world.lease(0).is_none());
    world.serve();
    assert!(world.lease(0).is_some());
}

#[test]
fn a_killed_worker_is_replaced_at_once_and_its_task_goes_to_the_next() {
    let mut world = World::training(&[], 3);
    let held = world.lease(0).unwrap();
    world.kill(Role::Worker, 0);
    assert!(world.running.contains_key(&(Role::Worker as i32, 2)), "the replacement runs in the same step");
    let again = world.lease(2).unwrap();
    assert_eq!(again.task, held.task);
    assert!(again.lease > held.lease, "a lease's number only grows");
}

#[test]
fn a_dead_server_rolls_everything_back_to_the_checkpoint() {
    let mut world = World::training(&[("checkpoint.every", "10s")], 4);
    world.train_one(0);
    world.tick(10_000);
    world.write_checkpoints();
    assert_eq!(world.commits.len(), 1);
    world.train_one(0);
    let open = world.lease(1).unwrap();
    assert_eq!(world.job.status(world.now).records, 20);

    world.kill(Role::Server, 1);
    assert_eq!(world.job.phase(), Phase::Starting);
    assert_eq!(world.job.status(world.now).records, 10, "what came after the checkpoint is to be done again");
    assert!(!world.report(1, &open, done(None)), "a report from before the roll-back does not count");
    assert!(world.job.places.iter().all(|p| p.incarnation == 2 && p.address.is_none()));
    world.tick(1);
    world.serve();
    let mut trained = 0;
    while world.train_one(0) {
        trained += 1;
    }
    assert_eq!(trained, 3);
    assert_eq!(world.job.status(world.now).records, 40);
}

#[test]
fn a_checkpoint_cut_before_a_roll_back_is_never_committed() {
    let mut world = World::training(&[("checkpoint.every", "10s")], 4);
    world.tick(10_000);
    let old = (world.written(0, 1), world.written(1, 1));
    world.kill(Role::Server, 1);
    world.tick(1);
    world.serve();
    for (server, written) in [(0, old.0), (1, old.1)] {
        let caller = world.caller(Role::Server, server);
        world.ask(|t| Event::Written(t, caller, written));
    }
    assert_eq!(world.commits, []);
}

#[test]
fn stopping_drains_writes_a_checkpoint_and_resuming_goes_on_from_it() {
    let mut world = World::training(&[], 4);
    world.train_one(0);
    world.train_one(1);
    world.step(Event::Stop(StopRequest { now: false }));
    assert_eq!(world.job.phase(), Phase::Stopping);
    world.write_checkpoints();
    assert_eq!(world.ended, Some(Phase::Stopped));
    let manifest = world.commits.pop().unwrap();
    assert_eq!(manifest.done.records, 20);

    let mut world = World::resumed(&[], Some(manifest));
    world.find_shards(4);
    world.tick(1);
    world.serve();
    let mut trained = 0;
    while world.train_one(0) {
        trained += 1;
    }
    assert_eq!((trained, world.job.status(world.now).records), (2, 40));
}

#[test]
fn resuming_over_changed_files_is_refused() {
    let mut world = World::training(&[], 4);
    world.step(Event::Stop(StopRequest { now: false }));
    world.write_checkpoints();
    let manifest = world.commits.pop().unwrap();
    let mut world = World::resumed(&[], Some(manifest));
    world.find_shards(5);
    assert_eq!(world.ended, Some(Phase::Failed));
    assert!(
        world.finished()["error"].as_str().unwrap().contains("not those that the checkpoint was made from")
    );
}

#[test]
fn a_second_stop_does_not_wait() {
    let mut world = World::training(&[], 4);
    world.train_one(0);
    world.step(Event::Stop(StopRequest { now: false }));
    world.step(Event::Stop(StopRequest { now: true }));
    assert_eq!(world.ended, Some(Phase::Stopped));
    assert_eq!(world.commits, []);
}

#[test]
fn a_batch_with_a_bad_loss_ends_the_job_and_names_it() {
    let mut world = World::training(&[], 4);
    let leased = world.lease(0).unwrap();
    let failed = Failed { error: "the loss is NaN".into(), batch: 3, user_error: true };
    world.report(0, &leased, report_request::Outcome::Failed(failed));
    assert_eq!(world.ended, Some(Phase::Failed));
    let error = world.finished()["error"].as_str().unwrap().to_string();
    assert_eq!(error, format!("task {}, batch 3: the loss is NaN", leased.task));
    assert_eq!(world.commits, [], "the last good checkpoint stays the last");
}

#[test]
fn a_failure_that_may_mend_is_tried_again_a_few_times() {
    let mut world = World::training(&[], 1);
    for attempt in 1..=3 {
        let leased = world.lease(0).unwrap();
        assert_eq!(leased.task.parse(), Ok(TaskId::train(0, 0)));
        let failed = Failed { error: "disk hiccup".into(), batch: 0, user_error: false };
        world.report(0, &leased, report_request::Outcome::Failed(failed));
        assert_eq!(world.ended.is_some(), attempt == 3);
    }
}

#[test]
fn too_many_deaths_in_a_row_end_the_job_with_the_last_words() {
    let mut world = World::training(&[], 4);
    for id in [0, 2, 3] {
        assert_eq!(world.ended, None);
        world.kill(Role::Worker, id);
        world.tick(60_000);
    }
    assert_eq!(world.ended, Some(Phase::Failed));
    assert!(world.finished()["error"].as_str().unwrap().contains("last words"));
}

#[test]
fn scaling_changes_the_number_of_workers_within_the_limits() {
    let mut world = World::training(&[], 4);
    assert_eq!(world.ask(|t| Event::Scale(t, 4)), Some(Answer::Noted));
    assert_eq!(world.job.fleet.workers().len(), 4);
    assert_eq!(world.ask(|t| Event::Scale(t, 1)), Some(Answer::Noted));
    assert_eq!(world.job.fleet.workers().len(), 1);
    for impossible in [0, 5] {
        assert!(matches!(world.ask(|t| Event::Scale(t, impossible)), Some(Answer::Refused(_))));
    }
}

#[test]
fn evaluation_on_the_interval_does_not_stop_training() {
    let mut world = World::training(&[("evaluate.every", "10s")], 4);
    world.train_one(0);
    world.tick(10_000);
    let leased = world.lease(0).unwrap();
    assert_eq!(leased.task, "evaluate/1/0");
    assert!(world.train_one(1), "others go on training");
    world.report(0, &leased, done(Some(good_scores())));
    assert_eq!(world.job.status(world.now).auc, Some(1.0));
    assert!(world.events().contains(&"evaluated"));
    assert_eq!(world.job.phase(), Phase::Training);
}

#[test]
fn malformed_records_beyond_the_limit_end_the_job_with_examples() {
    let mut world = World::training(&[("data.bad_records_max", "2")], 4);
    let leased = world.lease(0).unwrap();
    let caller = world.caller(Role::Worker, 0);
    let report = |bad| ReportRequest {
        task: leased.task.clone(),
        term: leased.term,
        lease: leased.lease,
        bad_records: bad,
        bad_examples: vec!["t:7: I3: \"x\" is no number".into()],
        ..ReportRequest::default()
    };
    world.ask(|t| Event::Reported(t, caller, Box::new(report(2))));
    assert_eq!(world.ended, None);
    world.ask(|t| Event::Reported(t, caller, Box::new(report(3))));
    assert_eq!(world.ended, Some(Phase::Failed));
    assert!(world.finished()["error"].as_str().unwrap().contains("t:7: I3"));
}

#[test]
fn a_failed_checkpoint_is_a_warning_while_training_and_the_end_when_it_is_the_last() {
    let mut world = World::training(&[("checkpoint.every", "10s")], 2);
    let fail = |world: &mut World| {
        let caller = world.caller(Role::Server, 0);
        world.ask(|t| Event::Beat(t, caller, Value::Null));
        let id = world.job.checkpoints.writing().expect("one is being written");
        let written =
            CheckpointWrittenRequest { checkpoint: id, error: "disk full".into(), ..Default::default() };
        world.ask(|t| Event::Written(t, caller, written));
    };
    world.tick(10_000);
    fail(&mut world);
    assert_eq!(world.ended, None);
    assert!(world.events().contains(&"warning"));
    while world.train_one(0) {}
    fail(&mut world);
    assert_eq!(world.ended, Some(Phase::Failed));
    assert!(world.finished()["error"].as_str().unwrap().contains("disk full"));
}

#[test]
fn strangers_are_told_to_leave_and_get_no_lease() {
    let mut world = World::training(&[], 2);
    let stranger = Caller { role: Role::Worker as i32, id: 0, pid: 1 };
    assert!(matches!(world.ask(|t| Event::LeaseAsked(t, stranger)), Some(Answer::Refused(_))));
    let Some(Answer::Beat(reply)) = world.ask(|t| Event::Beat(t, stranger, Value::Null)) else { panic!() };
    assert_eq!(reply.what, Some(elasticdl_wire::control::beat_reply::What::Leave(true)));
}

#[test]
fn a_beat_is_held_until_there_is_something_to_do() {
    let mut world = World::training(&[], 2);
    let caller = world.caller(Role::Server, 0);
    let ticket = world.ticket();
    world.step(Event::Beat(ticket, caller, Value::Null));
    assert_eq!(world.answers.get(&ticket), None);
    world.tick(500);
    assert_eq!(world.answers.get(&ticket), None);
    world.tick(500);
    assert!(matches!(world.answers.get(&ticket), Some(Answer::Beat(BeatReply { what: None, .. }))));
}
