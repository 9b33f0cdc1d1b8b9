//! Whole jobs without a process: events in, effects out.

use super::*;
use crate::status::Wanted;
use elasticdl_spec::ModelShape;
use elasticdl_spec::resolve::{Inputs, resolve};
use elasticdl_spec::scores::Scores;
use elasticdl_wire::control::{
    Assignment, Done, Failed, File, Leased, Mark, Member, lease_reply, report_request,
};

mod backups;
mod chains;
mod moves;
mod scale;
mod schedule;

/// A job in a world where everything asked for happens at once.
struct World {
    job: Job,
    /// What the effects have recorded.
    book: Book,
    extra: Vec<(&'static str, &'static str)>,
    shards: u64,
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
    fn new(extra: &[(&'static str, &'static str)]) -> World {
        World::resumed(extra, None)
    }

    /// A master that goes on from a book of which nothing runs any more.
    fn resumed(extra: &[(&'static str, &'static str)], from: Option<(Book, Manifest)>) -> World {
        let (book, manifest) =
            from.map_or((Book::default(), None), |(book, manifest)| (book, Some(manifest)));
        World::with(extra, book, manifest)
    }

    fn with(extra: &[(&'static str, &'static str)], mut book: Book, committed: Option<Manifest>) -> World {
        let file = "{apiVersion: elasticdl.org/v1, kind: ElasticJob, metadata: {name: j}, spec: {model: {zoo: lr}, \
                    data: {train: t, validate: v, layout: criteo}, servers: {count: 2, partitions: 4}, \
                    limits: {restarts: 2, silence: 1h}}}";
        // A limit alone would leave the choice to the master.
        let own = extra.iter().any(|(path, _)| *path == "workers.max");
        let workers = [("workers.count", "2"), ("workers.max", "4")].into_iter().filter(|_| !own);
        let flags = workers.chain(extra.iter().copied()).map(|(k, v)| (k.into(), v.into())).collect();
        let resolved = resolve(&Inputs { file: Some(file), environment: vec![], flags }).unwrap();
        let plan = Plan { job: resolved.job, shape: ModelShape::default() };
        let exports = plan.job.output.is_some();
        let job = Job::new(Start {
            plan,
            checkpoint_dir: "ckpt".into(),
            checkpoint_next: committed.as_ref().map_or(1, |m| m.id + 1),
            checkpoint_age: Duration::ZERO,
            term: book.term + 1,
            book: book.clone(),
            committed,
            best: Some(Best { logloss: 0.4, auc: 0.8 }),
            exports,
            workers_allowed: None,
        });
        let running = book.processes.values();
        let running = running.map(|p| ((Role::from(p.role) as i32, p.id), p.process.pid)).collect();
        book.finished = None;
        let mut world = World {
            job,
            book,
            extra: extra.to_vec(),
            shards: 0,
            now: Duration::ZERO,
            effects: Vec::new(),
            pid_next: 100,
            running,
            emitted: Vec::new(),
            answers: BTreeMap::new(),
            ticket_next: 1,
            commits: Vec::new(),
            exports: Vec::new(),
            ended: None,
        };
        world.pid_next += 1000 * world.book.term as u32;
        world.step(Event::Begin);
        world
    }

    /// The master is killed; what it started runs on. The next one goes on from its ledger.
    fn master_dies(self) -> World {
        let committed = self.job.committed.clone();
        let mut world = World::with(&self.extra, self.book, committed);
        world.find_shards(self.shards);
        world
    }

    /// A job with `shards` training shards and one to validate on, everything started.
    fn training(extra: &[(&'static str, &'static str)], shards: u64) -> World {
        let mut world = World::new(extra);
        world.find_shards(shards);
        world.tick(1);
        world.serve();
        assert_eq!(world.job.phase(), Phase::Training);
        world
    }

    fn find_shards(&mut self, shards: u64) {
        self.shards = shards;
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
            Effect::Record(entry) => self.book.apply(&entry),
            Effect::Prune(_) => {}
            Effect::Answer(ticket, answer) => {
                assert!(self.answers.insert(ticket, answer).is_none(), "answered twice");
            }
            Effect::Fleet(fleet::Order::Start { role, id }) => {
                let pid = self.pid_next;
                self.pid_next += 1;
                self.running.insert((role as i32, id), pid);
                let process = Process { pid, started: 1 };
                self.job.step(self.now, Event::Launched(role, id, Ok(process)), &mut self.effects);
                let caller = Caller { role: role as i32, id, pid };
                let ticket = self.ticket();
                let joined = Event::Joined(ticket, caller, format!("address-{id}"));
                self.job.step(self.now, joined, &mut self.effects);
            }
            Effect::Fleet(fleet::Order::Stop { role, id, pid }) | Effect::Kill(role, id, pid) => {
                self.running.remove(&(role as i32, id));
                let exit =
                    Exit { role, id, pid, code: Some(0), signal: None, last_lines: vec![], outside: None };
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
            let partitions = self.served_by(server, |partition, incarnation| Assignment {
                partition,
                incarnation,
                ..Assignment::default()
            });
            let ready = ReadyRequest { partitions, ..ReadyRequest::default() };
            assert_eq!(self.ask(|t| Event::Ready(t, caller, ready)), Some(Answer::Noted));
        }
    }

    fn lease(&mut self, worker: u32) -> Option<Leased> {
        self.lease_for(worker, Need::Now)
    }

    fn lease_for(&mut self, worker: u32, need: Need) -> Option<Leased> {
        let caller = self.caller(Role::Worker, worker);
        let held = self.book.leased.values().filter(|(_, w)| w.0 == worker).map(|(id, _)| *id).collect();
        match self.ask(|t| Event::LeaseAsked(t, caller, held, need)) {
            Some(Answer::Lease(LeaseReply { what: Some(lease_reply::What::Leased(leased)), .. })) => {
                Some(leased)
            }
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
        assert!(self.train(worker, &leased));
        true
    }

    fn kill(&mut self, role: Role, id: u32) {
        let pid = self.running.remove(&(role as i32, id)).unwrap();
        let exit = Exit {
            role,
            id,
            pid,
            code: None,
            signal: Some(9),
            last_lines: vec!["last words".into()],
            outside: None,
        };
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

    /// What a server has written: every file has every task that was ever done to its end.
    fn written(&self, server: u32, checkpoint: u64) -> CheckpointWrittenRequest {
        let marks: Vec<Mark> = (0..2)
            .flat_map(|epoch| (0..self.shards as u32).map(move |shard| Mark { epoch, shard, mark: 1 }))
            .collect();
        let files = self.served_by(server, |partition, incarnation| File {
            partition,
            incarnation,
            bytes: 5,
            crc32: 6,
            marks: marks.clone(),
            base: 0,
        });
        CheckpointWrittenRequest { checkpoint, files, ..CheckpointWrittenRequest::default() }
    }

    fn served_by<T>(&self, server: u32, make: impl Fn(u32, u64) -> T) -> Vec<T> {
        let mine = self.job.places.iter().enumerate().filter(|(_, p)| p.server == server);
        mine.map(|(p, place)| make(p as u32, place.incarnation)).collect()
    }

    fn incarnations(&self) -> Vec<u64> {
        self.job.places.iter().map(|p| p.incarnation).collect()
    }

    /// A worker that was given a training task has done all of it.
    fn train(&mut self, worker: u32, leased: &Leased) -> bool {
        let done =
            Done { task_records: 10, batches: 1, incarnations: self.incarnations(), ..Done::default() };
        self.report(worker, leased, report_request::Outcome::Done(done))
    }

    fn events(&self) -> Vec<&'static str> {
        self.emitted.iter().map(|(event, _)| *event).collect()
    }

    fn finished(&self) -> &Map<String, Value> {
        &self.emitted.iter().rfind(|(event, _)| *event == "finished").expect("it finished").1
    }
}

fn scored(scores: Scores) -> report_request::Outcome {
    let scores = serde_json::to_string(&scores).unwrap();
    report_request::Outcome::Done(Done { task_records: 10, scores, ..Done::default() })
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
    world.report(1, &leased, scored(good_scores()));
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
fn a_dead_servers_partitions_are_reborn_and_what_they_lack_is_trained_again() {
    let mut world = World::training(&[("checkpoint.every", "10s")], 4);
    world.train_one(0);
    world.tick(10_000);
    world.write_checkpoints();
    assert_eq!(world.commits.len(), 1);
    world.train_one(0);
    let open = world.lease(1).unwrap();
    assert_eq!(world.job.status(world.now).records, 20);

    let before = world.incarnations();
    world.kill(Role::Server, 1);
    assert_eq!(world.job.phase(), Phase::Training, "the others go on");
    assert_eq!(world.job.status(world.now).records, 10, "what came after the checkpoint is to be done again");
    for (place, before) in world.job.places.iter().zip(&before) {
        let reborn = place.server == 1;
        assert_eq!((place.incarnation, place.address.is_none()), (before + u64::from(reborn), reborn));
    }
    let stale = Done { task_records: 10, batches: 1, incarnations: before, ..Done::default() };
    assert!(
        !world.report(1, &open, report_request::Outcome::Done(stale)),
        "what a dead partition has acknowledged is not done"
    );
    world.tick(1);
    world.serve();
    let mut again = Vec::new();
    while let Some(leased) = world.lease(0) {
        again.push(leased.again);
        assert!(world.train(0, &leased));
    }
    assert_eq!(again, [true, true, false]);
    assert_eq!(world.job.status(world.now).records, 40);
    assert!(world.events().contains(&"replay") && world.events().contains(&"replayed"));
    assert_eq!(world.job.status(world.now).replayed, 10);
}

#[test]
fn a_server_that_dies_after_the_last_task_has_what_it_lost_trained_again() {
    let mut world = World::training(&[], 2);
    while world.train_one(0) {}
    assert_eq!(world.job.phase(), Phase::Saving);
    world.kill(Role::Server, 0);
    assert_eq!(world.job.phase(), Phase::Training);
    world.tick(1);
    world.serve();
    while world.train_one(0) {}
    world.write_checkpoints();
    assert_eq!(world.job.phase(), Phase::Evaluating);
    world.kill(Role::Server, 1);
    assert_eq!(world.job.phase(), Phase::Evaluating, "the checkpoint covers everything");
}

#[test]
fn in_the_deterministic_mode_a_dead_server_takes_all_partitions_back() {
    let mut world = World::training(
        &[
            ("checkpoint.every", "10s"),
            ("workers.count", "1"),
            ("workers.max", "1"),
            ("train.staleness", "0"),
        ],
        4,
    );
    world.train_one(0);
    let held = world.lease(0).unwrap();
    world.tick(10_000);
    assert!(world.lease(0).is_none(), "no task begins while a checkpoint is due");
    assert!(world.train(0, &held));
    world.write_checkpoints();
    assert_eq!(world.commits.last().unwrap().done.records, 20, "cut while no task was under way");
    let held = world.lease(0).unwrap();
    world.kill(Role::Server, 1);
    assert!(world.incarnations().iter().all(|n| *n == 2), "every partition goes back to the same step");
    assert!(!world.train(0, &held), "and every lease ends");
    assert!(
        world.book.leased.is_empty() && world.book.floor > Some(LeaseId { term: held.term, n: held.lease })
    );
    world.tick(1);
    world.tick(1_000);
    world.serve();
    while world.train_one(0) {}
    assert_eq!(world.job.status(world.now).records, 40);
}

#[test]
fn in_the_synchronous_mode_checkpoints_wait_for_tasks_and_a_dead_server_takes_all_partitions_back() {
    let extra =
        [("checkpoint.every", "10s"), ("train.consistency", "synchronous"), ("train.grads_to_wait", "2")];
    let mut world = World::training(&extra, 4);
    let held = world.lease(0).unwrap();
    assert!(world.lease_for(0, Need::Ahead).is_none(), "a checkpoint would wait for it");
    world.tick(10_000);
    assert!(world.job.checkpoints.writing().is_none() && world.lease(0).is_none(), "a step may be under way");
    assert!(world.train(0, &held));
    world.write_checkpoints();
    let held = world.lease(0).unwrap();
    world.kill(Role::Server, 1);
    assert!(world.incarnations().iter().all(|n| *n == 2), "every partition goes back to the same step");
    assert!(!world.train(0, &held), "and every lease ends");
}

/// Goal: what servers gather is applied before the last cut, and a checkpoint that merely covers everything is not it.
#[test]
fn in_the_hybrid_mode_the_last_checkpoint_is_begun_when_all_training_is_done() {
    let extra = [("checkpoint.every", "10s"), ("train.consistency", "hybrid"), ("train.grads_to_wait", "2")];
    let mut world = World::training(&extra, 1);
    let held = world.lease(0).unwrap();
    world.tick(10_000);
    let early = world.job.checkpoints.writing().expect("it is due");
    assert_eq!(world.job.last_cut, None);
    assert!(world.train(0, &held));
    world.write_checkpoints();
    assert_eq!(world.commits.last().map(|m| m.id), Some(early), "it covers everything");
    let last = world.job.checkpoints.writing().expect("and is not the last");
    assert_eq!((world.job.last_cut, world.ended), (Some(last), None));
    world.write_checkpoints();
    assert_ne!(world.job.phase(), Phase::Saving, "on to the evaluation");
}

#[test]
fn in_the_deterministic_mode_no_checkpoint_is_cut_in_the_middle_of_a_step() {
    let extra =
        [("checkpoint.every", "10s"), ("workers.count", "1"), ("workers.max", "1"), ("train.staleness", "0")];
    let mut world = World::training(&extra, 3);
    let held = world.lease(0).unwrap();
    world.kill(Role::Worker, 0);
    let mut world = world.master_dies();
    world.tick(10_000);
    assert!(world.job.checkpoints.writing().is_none(), "one is due, but who died may have been in a step");
    let again = world.lease(1).expect("what was interrupted is finished first");
    assert_eq!(again.task, held.task);
    assert!(world.lease(1).is_none(), "and then no other begins");
    assert!(world.train(1, &again));
    assert!(world.job.checkpoints.writing().is_some());
    world.write_checkpoints();
    let held = world.lease(1).unwrap();
    world.kill(Role::Worker, 1);
    world.step(Event::Stop(StopRequest { now: false }));
    assert_eq!(world.ended, Some(Phase::Stopped), "and none is written on a stop either");
    assert!(world.commits.iter().all(|m| m.done.records == 10), "{held:?}");
}

#[test]
fn the_next_master_goes_on_where_the_last_one_was_killed() {
    let mut world = World::training(&[("checkpoint.every", "10s")], 5);
    world.train_one(0);
    world.tick(10_000);
    world.write_checkpoints();
    world.train_one(0);
    let held = world.lease(1).unwrap();
    let (running, incarnations) = (world.running.clone(), world.incarnations());

    let mut world = world.master_dies();
    assert_eq!(world.running, running, "nothing was started");
    assert_eq!(world.incarnations(), incarnations, "nothing was lost");
    world.tick(1);
    assert_eq!(world.job.phase(), Phase::Training, "servers are known to serve");
    assert_eq!(world.job.status(world.now).records, 20);
    assert!(world.train(1, &held), "a lease of the last term counts as long as nobody else has the task");
    let next = world.lease(0).unwrap();
    assert_eq!(next.term, 2);
    assert!(world.train(0, &next));
    while world.train_one(1) {}
    assert_eq!((world.job.status(world.now).records, world.job.status(world.now).replayed), (50, 0));
}

#[test]
fn what_died_while_there_was_no_master_is_found_out() {
    let mut world = World::training(&[("checkpoint.every", "10s")], 5);
    world.train_one(0);
    let held = world.lease(1).unwrap();
    world.book.processes.remove("worker-1");
    world.book.processes.remove("ps-1");
    let mut world = world.master_dies();
    assert!(world.book.leased.is_empty(), "a dead worker holds nothing");
    assert_eq!(world.job.status(world.now).replayed, 10);
    world.tick(1);
    world.serve();
    let (first, second) =
        (world.lease(0).unwrap(), world.lease(2).expect("the replacement has a new number"));
    assert!(first.again && second.again && [first.task, second.task].contains(&held.task));
}

#[test]
fn a_lease_is_recorded_before_it_is_given() {
    let mut world = World::training(&[], 2);
    let caller = world.caller(Role::Worker, 0);
    let mut effects = Vec::new();
    world.job.step(world.now, Event::LeaseAsked(99, caller, BTreeSet::new(), Need::Now), &mut effects);
    let recorded = effects.iter().position(|e| matches!(e, Effect::Record(Entry::Leased { .. }))).unwrap();
    let given = effects.iter().position(|e| matches!(e, Effect::Answer(99, _))).unwrap();
    assert!(recorded < given);
}

#[test]
fn tasks_are_leased_ahead_while_as_many_wait() {
    let mut world = World::training(&[("train.epochs", "1")], 6);
    for _ in 0..3 {
        assert!(world.lease_for(0, Need::Ahead).is_some());
    }
    assert!(world.lease_for(1, Need::Ahead).is_some(), "three wait, three are leased");
    assert!(world.lease_for(1, Need::Ahead).is_none(), "two wait for whoever has nothing to do");
    assert!(world.lease_for(1, Need::Now).is_some());
}

#[test]
fn a_worker_that_asks_hears_which_of_its_leases_have_ended() {
    let mut world = World::training(&[("limits.lease", "1s")], 6);
    let kept = world.lease(0).unwrap();
    let caller = world.caller(Role::Worker, 0);
    let lease = |leased: &Leased| LeaseId { term: leased.term, n: leased.lease };
    let gone = LeaseId { term: kept.term, n: 77 };
    let held = BTreeSet::from([lease(&kept), gone]);
    let Some(Answer::Lease(reply)) = world.ask(|t| Event::LeaseAsked(t, caller, held, Need::Now)) else {
        panic!()
    };
    assert_eq!(reply.ended, [elasticdl_wire::control::LeaseNumber { term: gone.term, n: gone.n }]);
}

/// While it stood still it could not hear that batches were done.
#[test]
fn a_master_that_slept_ends_no_lease_for_that() {
    let mut world = World::training(&[("limits.lease", "1s")], 6);
    let leased = world.lease(0).unwrap();
    world.tick(5000);
    assert!(
        world.report(0, &leased, report_request::Outcome::Progress(true)),
        "it was the master that slept"
    );
    for _ in 0..13 {
        world.tick(100);
    }
    assert!(!world.report(0, &leased, report_request::Outcome::Progress(true)), "it was the worker");
}

#[test]
fn a_process_that_says_nothing_for_too_long_is_replaced() {
    let mut world = World::training(&[("limits.silence", "20s"), ("limits.restarts", "9")], 2);
    world.tick(15_000);
    for (role, id) in [(Role::Server, 1), (Role::Worker, 0), (Role::Worker, 1)] {
        let caller = world.caller(role, id);
        world.ask(|t| Event::Beat(t, caller, Value::Null));
    }
    let caller = world.caller(Role::Server, 1);
    let silent = world.running[&(Role::Server as i32, 0)];
    world.tick(10_000);
    assert!(world.events().contains(&"silent"));
    assert_ne!(world.running[&(Role::Server as i32, 0)], silent);
    assert_eq!(world.running[&(Role::Server as i32, 1)], caller.pid, "the other one was heard of");
}

#[test]
fn a_batch_that_fails_again_and_again_is_set_aside_and_the_rest_is_trained() {
    let mut world = World::training(&[], 2);
    for tries in 1..=3 {
        let leased = world.lease(0).unwrap();
        assert_eq!((leased.task.as_str(), leased.quarantined.len()), ("train/0/0", 0), "try {tries}");
        let failed = Failed { error: "no such luck".into(), batch: 3, fatal: false };
        world.report(0, &leased, report_request::Outcome::Failed(failed));
    }
    let leased = world.lease(0).unwrap();
    assert_eq!(leased.quarantined, [3]);
    assert_eq!(world.job.status(world.now).quarantined[0].error, "no such luck");
    let caller = world.caller(Role::Worker, 0);
    let report = ReportRequest {
        member: Some(Member { role: 0, id: 0, pid: caller.pid }),
        task: leased.task.clone(),
        term: leased.term,
        lease: leased.lease,
        records: 6,
        bad_records: 4,
        outcome: Some(report_request::Outcome::Done(Done {
            task_records: 6,
            batches: 5,
            incarnations: world.incarnations(),
            ..Done::default()
        })),
        ..ReportRequest::default()
    };
    world.ask(|t| Event::Reported(t, caller, Box::new(report)));
    while world.train_one(0) {}
    world.shards = 0;
    let marks = |shard| Mark { epoch: 0, shard, mark: 5 };
    for server in 0..2 {
        let caller = world.caller(Role::Server, server);
        world.ask(|t| Event::Beat(t, caller, Value::Null));
        let mut written = world.written(server, 1);
        written.files.iter_mut().for_each(|file| file.marks = vec![marks(0), marks(1)]);
        world.ask(|t| Event::Written(t, caller, written));
    }
    let leased = world.lease(1).expect("the final evaluation");
    world.report(1, &leased, scored(good_scores()));
    assert_eq!(world.ended, Some(Phase::Failed));
    let error = world.finished()["error"].as_str().unwrap().to_string();
    assert!(error.contains("train/0/0, batch 3: no such luck"), "{error}");
    assert_eq!(world.finished()["records"], 16, "everything else is trained");
}

#[test]
fn a_task_is_not_at_fault_for_the_deaths_of_those_who_held_it() {
    let mut world = World::training(&[("limits.restarts", "99")], 1);
    let first = world.lease(0).unwrap();
    let mut worker = 0;
    for _ in 0..20 {
        world.kill(Role::Worker, worker);
        world.tick(60_000);
        worker = *world.job.fleet.workers().keys().next_back().unwrap();
        let again = world.lease(worker).expect("it is never dropped");
        assert_eq!((again.task.as_str(), again.quarantined.len()), (first.task.as_str(), 0));
    }
    assert_eq!(world.job.status(world.now).quarantined, []);
    let last = world.book.leased.values().next().unwrap().0;
    let held = Leased { task: first.task, term: last.term, lease: last.n, ..Leased::default() };
    assert!(world.train(worker, &held));
    assert_eq!(world.job.status(world.now).records, 10);
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
    let (book, manifest) = (world.book.clone(), world.commits.pop().unwrap());
    assert_eq!(manifest.done.records, 20);

    let mut world = World::resumed(&[], Some((book, manifest)));
    world.find_shards(4);
    world.tick(1);
    world.serve();
    let mut trained = 0;
    while world.train_one(2) {
        trained += 1;
    }
    assert_eq!((trained, world.job.status(world.now).records), (2, 40));
}

#[test]
fn resuming_over_changed_files_is_refused() {
    let mut world = World::training(&[], 4);
    world.step(Event::Stop(StopRequest { now: false }));
    world.write_checkpoints();
    let (book, manifest) = (world.book.clone(), world.commits.pop().unwrap());
    let mut world = World::resumed(&[], Some((book, manifest)));
    world.find_shards(5);
    assert_eq!(world.ended, Some(Phase::Failed));
    assert!(world.finished()["error"].as_str().unwrap().contains("not those that the job began with"));
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
    let failed = Failed { error: "the loss is NaN".into(), batch: 3, fatal: true };
    world.report(0, &leased, report_request::Outcome::Failed(failed));
    assert_eq!(world.ended, Some(Phase::Failed));
    let error = world.finished()["error"].as_str().unwrap().to_string();
    assert_eq!(error, format!("task {}, batch 3: the loss is NaN", leased.task));
    assert_eq!(world.commits, [], "the last good checkpoint stays the last");
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
    assert_eq!(world.ask(|t| Event::Scale(t, Wanted::Fixed(4).into())), Some(Answer::Noted));
    assert_eq!(world.job.fleet.workers().len(), 4);
    assert_eq!(world.ask(|t| Event::Scale(t, Wanted::Fixed(1).into())), Some(Answer::Noted));
    assert_eq!(world.job.fleet.workers().len(), 1);
    for impossible in [0, 5] {
        assert!(matches!(
            world.ask(|t| Event::Scale(t, Wanted::Fixed(impossible).into())),
            Some(Answer::Refused(_))
        ));
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
    world.report(0, &leased, scored(good_scores()));
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
    assert!(matches!(
        world.ask(|t| Event::LeaseAsked(t, stranger, BTreeSet::new(), Need::Now)),
        Some(Answer::Refused(_))
    ));
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

/// Goal: an order that was lost, or came while the server was at another, is not the end of all checkpoints.
#[test]
fn a_server_is_told_to_write_a_checkpoint_until_it_has() {
    let mut world = World::training(&[("checkpoint.every", "10s")], 4);
    let caller = world.caller(Role::Server, 0);
    let told = |world: &mut World| {
        let ticket = world.ticket();
        world.step(Event::Beat(ticket, caller, Value::Null));
        world.tick(1000);
        match world.answers.remove(&ticket) {
            Some(Answer::Beat(reply)) => (reply.command, reply.what.is_some()),
            other => panic!("{other:?}"),
        }
    };
    world.tick(10_000);
    let (command, ordered) = told(&mut world);
    assert!(ordered && command > 0);
    assert_eq!(told(&mut world), (command, true), "the same order again");
    let written = world.written(0, 1);
    world.ask(|t| Event::Written(t, caller, written));
    assert_eq!(told(&mut world), (0, false), "it has written its part");
}

/// Goal: a server may join one master and tell the next that it is ready. Its address was told to the first.
#[test]
fn a_server_that_has_not_joined_this_master_is_not_taken_to_serve() {
    let mut world = World::training(&[], 2);
    world.book.processes.get_mut("ps-0").unwrap().address = None;
    let mut world = world.master_dies();
    let caller = world.caller(Role::Server, 0);
    let partitions = world.served_by(0, |partition, incarnation| Assignment {
        partition,
        incarnation,
        ..Assignment::default()
    });
    let ready = ReadyRequest { partitions, ..ReadyRequest::default() };
    assert!(matches!(world.ask(|t| Event::Ready(t, caller, ready.clone())), Some(Answer::Refused(_))));
    assert_eq!(world.job.phase(), Phase::Starting);
    world.ask(|t| Event::Joined(t, caller, "address-0".into()));
    assert_eq!(world.ask(|t| Event::Ready(t, caller, ready)), Some(Answer::Noted));
    assert_eq!(world.job.phase(), Phase::Training);
    assert!(world.job.topology().places.iter().all(|place| !place.address.is_empty()));
}
