//! Whole gangs without a process: what members do is played here, deaths included.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_spec::JobSpec;
use elasticdl_spec::resolve::{Inputs, resolve};
use elasticdl_wire::control::Role;

use super::*;

mod properties;
mod variables;

/// A job that runs `a`, with these settings below `command`.
pub(super) fn job(settings: &[(&str, &str)]) -> JobSpec {
    let base = [("name", "own"), ("command.run", "[a]"), ("kubernetes.grace", "10s")].into_iter();
    let flags = settings.iter().copied().map(|(path, value)| (format!("command.{path}"), value.to_string()));
    let flags = base.map(|(k, v)| (k.to_string(), v.to_string())).chain(flags).collect();
    resolve(&Inputs { flags, ..Inputs::default() }).unwrap().job
}

/// A member as it would behave.
#[derive(Debug, Clone, Default)]
struct Played {
    pid: u32,
    start: Option<Start>,
    end: Option<End>,
    environment: BTreeMap<String, String>,
}

/// A gang and the members it has started.
pub(super) struct World {
    pub job: JobSpec,
    pub gang: Gang,
    pub now: Duration,
    members: BTreeMap<u32, Played>,
    pid_last: u32,
    ticket_last: Ticket,
    pub told: Vec<(&'static str, Map<String, Value>)>,
    pub finished: Option<Phase>,
    book: Book,
    /// Programs started, by round: rank and environment.
    pub started: Vec<(Start, u32, BTreeMap<String, String>)>,
    /// A new process of a rank has this host.
    pub hosts: fn(u32, u32) -> String,
}

impl World {
    pub fn new(settings: &[(&str, &str)]) -> World {
        World::of(job(settings))
    }

    fn of(job: JobSpec) -> World {
        let origin = Origin { job: &job, book: Book::default(), lost: vec![], resume: false, term: 1 };
        let gang = Gang::new(origin);
        let mut world = World {
            gang,
            job,
            now: Duration::ZERO,
            members: BTreeMap::new(),
            pid_last: 0,
            ticket_last: 0,
            told: Vec::new(),
            finished: None,
            book: Book::default(),
            started: Vec::new(),
            hosts: |_, _| "127.0.0.1".into(),
        };
        world.step(Event::Begin);
        world
    }

    pub fn step(&mut self, event: Event) {
        let mut events = std::collections::VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let mut effects = Vec::new();
            self.gang.step(self.now, event, &mut effects);
            for effect in effects {
                match effect {
                    Effect::Record(book) => self.book = *book,
                    Effect::Launch(rank) => {
                        self.pid_last += 1;
                        let pid = self.pid_last;
                        let before = self.members.insert(rank, Played { pid, ..Played::default() });
                        assert!(before.is_none(), "two members of rank {rank}");
                        events.push_back(Event::Launched(rank, Ok(Process { pid, started: 0 })));
                    }
                    Effect::Stop(rank, pid) | Effect::Kill(rank, pid) => {
                        events.extend(self.exit(rank, pid, Some(143), None));
                    }
                    Effect::Answer(_, wanted) => drop(wanted),
                    Effect::Emit(event, fields) => self.told.push((event, fields)),
                    Effect::Finish(phase) => {
                        assert_eq!(self.finished.replace(phase), None, "a job ends once");
                    }
                }
            }
        }
    }

    fn exit(&mut self, rank: u32, pid: u32, code: Option<i32>, outside: Option<&str>) -> Option<Event> {
        self.members.remove_entry(&rank).filter(|(_, played)| played.pid == pid)?;
        let outside = outside.map(Into::into);
        let exit =
            Exit { role: Role::Worker, id: rank, pid, code, signal: None, last_lines: vec![], outside };
        Some(Event::Exited(exit))
    }

    /// A member calls, and does what it is told.
    pub fn call(&mut self, rank: u32) {
        let Some(played) = self.members.get(&rank).cloned() else { return };
        self.ticket_last += 1;
        let ticket = self.ticket_last;
        let turn = Turn {
            rank,
            pid: played.pid,
            address: format!("{}:{}", (self.hosts)(rank, played.pid), 1000 + played.pid),
            start: played.start,
            end: played.end,
        };
        let mut effects = Vec::new();
        self.gang.step(self.now, Event::Turn(ticket, turn), &mut effects);
        let mut events = Vec::new();
        for effect in effects {
            match effect {
                Effect::Answer(to, wanted) if to == ticket => self.obey(rank, wanted, &mut events),
                Effect::Record(book) => self.book = *book,
                Effect::Emit(event, fields) => self.told.push((event, fields)),
                Effect::Finish(phase) => self.finished = Some(phase),
                Effect::Stop(rank, pid) | Effect::Kill(rank, pid) => {
                    events.extend(self.exit(rank, pid, Some(143), None));
                }
                Effect::Answer(..) => {}
                Effect::Launch(rank) => {
                    self.pid_last += 1;
                    let pid = self.pid_last;
                    assert!(self.members.insert(rank, Played { pid, ..Played::default() }).is_none());
                    events.push(Event::Launched(rank, Ok(Process { pid, started: 0 })));
                }
            }
        }
        events.into_iter().for_each(|event| self.step(event));
    }

    fn obey(&mut self, rank: u32, wanted: Wanted, events: &mut Vec<Event>) {
        let played = self.members.get_mut(&rank).unwrap();
        match wanted {
            Wanted::Nothing => {
                if played.start.is_some() && played.end.is_none() {
                    played.end = Some(End { signal: Some(15), ..End::unknown() });
                }
            }
            Wanted::Program(program) => {
                if played.start != Some(program.start) {
                    assert!(played.start.is_none_or(|before| before < program.start), "starts only grow");
                    played.start = Some(program.start);
                    played.end = None;
                    played.environment = program.environment.clone();
                    self.started.push((program.start, rank, program.environment));
                }
            }
            Wanted::Leave => {
                let pid = played.pid;
                events.extend(self.exit(rank, pid, Some(0), None));
            }
        }
    }

    pub fn call_all(&mut self) {
        for rank in 0..self.gang.members.len() as u32 {
            self.call(rank);
        }
    }

    /// The program of a member ends, and the member says so.
    pub fn end(&mut self, rank: u32, code: i32) {
        let Some(played) = self.members.get_mut(&rank) else { return };
        if played.start.is_some() && played.end.is_none() {
            let last_lines = vec![format!("bye {rank}")];
            played.end = Some(End { code: Some(code), last_lines, ..End::unknown() });
        }
        self.call(rank);
    }

    /// A member dies; `outside`: somebody needed its place.
    pub fn kill(&mut self, rank: u32, outside: Option<&str>) {
        let Some(pid) = self.members.get(&rank).map(|played| played.pid) else { return };
        let exit = self.exit(rank, pid, None, outside);
        exit.into_iter().for_each(|event| self.step(event));
    }

    pub fn pass(&mut self, time: Duration) {
        self.now += time;
        self.step(Event::Tick);
    }

    /// The master dies and the next one reads its book.
    pub fn succeed(&mut self) {
        let mut book = self.book.clone();
        let mut lost = Vec::new();
        for (rank, note) in (0..).zip(&mut book.members) {
            let alive =
                self.members.get(&rank).is_some_and(|played| Some(played.pid) == note.process.map(|p| p.pid));
            if note.process.is_some() && !alive {
                note.process = None;
                lost.push(rank);
            }
        }
        let term = book.term + 1;
        self.gang = Gang::new(Origin { job: &self.job, book, lost, resume: false, term });
        self.finished = None;
        self.step(Event::Begin);
    }

    /// Whose programs run.
    pub fn running(&self) -> Vec<u32> {
        let runs = |played: &Played| played.start.is_some() && played.end.is_none();
        self.members.iter().filter(|(_, played)| runs(played)).map(|(rank, _)| *rank).collect()
    }

    /// Whose programs of an earlier round run on.
    pub fn left_over(&self) -> Vec<u32> {
        let now = (self.gang.term, self.gang.round);
        let earlier =
            |rank: &u32| self.members[rank].start.is_some_and(|start| (start.term, start.round) < now);
        self.running().into_iter().filter(earlier).collect()
    }

    pub fn events(&self, name: &str) -> Vec<&Map<String, Value>> {
        self.told.iter().filter(|(event, _)| *event == name).map(|(_, fields)| fields).collect()
    }

    fn waits(&mut self, rank: u32) {
        let pid = self.members[&rank].pid;
        let why = "0/2 nodes are available: 2 Insufficient cpu.".into();
        self.step(Event::Waits(Waits { role: Role::Worker, id: rank, pid, why, may_pass: true }));
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn no_program_starts_before_all_members_are_there() {
    let mut world = World::new(&[("roles", "{ worker: 3 }")]);
    world.call(0);
    world.call(1);
    assert!(world.running().is_empty());
    assert_eq!(world.gang.status(world.now).program.unwrap().waits.unwrap(), "1 of 3 are missing");
    world.call(2);
    world.call_all();
    assert_eq!(world.running(), [0, 1, 2]);
    assert_eq!(world.gang.phase(), Phase::Running);
    for rank in 0..3 {
        world.end(rank, 0);
    }
    assert_eq!(world.finished, None, "they are told to leave first");
    world.call_all();
    assert_eq!(world.finished, Some(Phase::Done));
}

#[test]
fn the_chief_decides_and_servers_are_sent_home() {
    let roles = [("framework", "tensorflow"), ("roles", "{ chief: 1, ps: 1, worker: 1 }")];
    let mut world = World::new(&roles);
    world.call_all();
    world.call_all();
    world.end(2, 0);
    assert_eq!(world.gang.phase(), Phase::Running, "a worker does not decide");
    world.end(0, 0);
    assert_eq!(world.gang.phase(), Phase::Stopping);
    world.call_all();
    assert_eq!(world.finished, Some(Phase::Done));
}

#[test]
fn all_start_again_together_and_not_more_often_than_allowed() {
    let mut world = World::new(&[("roles", "{ worker: 2 }"), ("restart.max", "2")]);
    for round in 1..=3 {
        world.pass(60 * SECOND);
        world.call_all();
        world.call_all();
        assert_eq!((world.running().len(), world.gang.rounds), (2, round));
        world.end(1, 7);
        world.call_all();
    }
    world.call_all();
    assert_eq!(world.finished, Some(Phase::Failed));
    let error = world.gang.status(world.now).error.unwrap();
    assert_eq!(
        error,
        "worker-1 ended with exit code 7 after it was started again 2 times (command.restart.max); its log ends with:\n  bye 1"
    );
    let restarts: Vec<u64> =
        world.events("restarting").iter().map(|e| e["restart"].as_u64().unwrap()).collect();
    assert_eq!(restarts, [1, 2]);
}

#[test]
fn a_second_restart_waits_and_a_first_one_does_not() {
    let mut world = World::new(&[("roles", "{ worker: 1 }")]);
    world.call_all();
    world.end(0, 1);
    world.call_all();
    assert_eq!((world.running().len(), world.gang.rounds), (1, 2), "at once");
    world.end(0, 1);
    world.call_all();
    assert_eq!(world.running().len(), 0);
    world.pass(Duration::from_millis(500));
    world.call_all();
    assert_eq!((world.running().len(), world.gang.rounds), (1, 3));
    assert_eq!(world.members[&0].environment["ELASTICDL_RESTART"], "2");
}

#[test]
fn one_that_fails_alone_keeps_its_place_and_the_others_run_on() {
    let mut world = World::new(&[("roles", "{ worker: 2 }"), ("restart.scope", "one")]);
    world.call_all();
    world.call_all();
    let before = world.members[&1].environment["ELASTICDL_ADDRESS"].clone();
    world.end(1, 9);
    assert_eq!(world.running(), [0, 1], "started again at once, and worker-0 was left alone");
    world.kill(1, None);
    world.pass(SECOND);
    world.call_all();
    assert_eq!((world.running(), world.gang.rounds), (vec![0, 1], 1));
    let again = &world.members[&1].environment;
    assert_eq!((&again["ELASTICDL_ADDRESS"], again["ELASTICDL_RESTART"].as_str()), (&before, "2"));
}

#[test]
fn one_that_comes_back_elsewhere_makes_all_begin_again() {
    let mut world = World::new(&[("roles", "{ worker: 2 }"), ("restart.scope", "one")]);
    world.hosts = |_, pid| format!("10.0.0.{pid}");
    world.call_all();
    world.call_all();
    world.kill(1, Some("preempted"));
    assert_eq!(world.running(), [0], "it goes on meanwhile");
    for _ in 0..3 {
        world.call_all();
    }
    assert_eq!((world.running(), world.gang.rounds), (vec![0, 1], 2));
    let seen = |rank: u32| world.members[&rank].environment["ELASTICDL_MEMBERS"].clone();
    assert_eq!(seen(0), seen(1));
    assert_eq!(seen(0), r#"{"worker":["10.0.0.1:1001","10.0.0.3:1003"]}"#);
    assert_eq!(world.gang.status(world.now).program.unwrap().restarts, 0, "from outside: it does not count");
}

#[test]
fn without_room_for_all_nobody_keeps_any_and_it_is_tried_again_after_growing_pauses() {
    let mut world = World::new(&[("roles", "{ worker: 3 }"), ("wait", "60s")]);
    let mut pauses = Vec::new();
    for n in 1..=6 {
        world.call(0);
        world.waits(2);
        world.pass(59 * SECOND);
        world.call(0);
        assert_eq!(world.members.len(), 3, "try {n}");
        world.pass(SECOND);
        assert_eq!(world.members.len(), 0, "all room is free");
        let given = world.events("given_back").pop().unwrap().clone();
        assert_eq!((&given["missing"], given["tries"].as_u64()), (&json!(2), Some(n)));
        assert!(given["why"].as_str().unwrap().contains("Insufficient cpu"));
        let pause = Duration::from_secs_f64(given["pause_seconds"].as_f64().unwrap());
        pauses.push(pause);
        world.pass(pause - Duration::from_millis(1));
        assert_eq!(world.members.len(), 0);
        world.pass(Duration::from_millis(2));
        assert_eq!(world.members.len(), 3);
    }
    assert!(pauses[0] >= 11 * SECOND && pauses[0] <= 19 * SECOND, "{pauses:?}");
    assert!(pauses[5] >= 180 * SECOND && pauses[5] <= 300 * SECOND, "{pauses:?}");
    world.call_all();
    world.call_all();
    assert_eq!(world.running().len(), 3);
}

#[test]
fn two_gangs_do_not_try_in_step() {
    let rest = |name: &str| {
        let mut spec = job(&[("roles", "{ worker: 2 }")]);
        spec.name = name.into();
        let mut world = World::of(spec);
        world.waits(1);
        world.pass(60 * SECOND);
        world.events("given_back")[0]["pause_seconds"].as_f64().unwrap()
    };
    assert_ne!(rest("a"), rest("b"));
}

#[test]
fn who_has_room_and_fetches_an_image_is_waited_for_longer() {
    let mut world = World::new(&[("roles", "{ worker: 2 }"), ("wait", "10s")]);
    world.call(0);
    world.waits(1);
    let pid = world.members[&1].pid;
    world.step(Event::Placed(Placed { role: Role::Worker, id: 1, pid }));
    for _ in 0..9 {
        world.pass(10 * SECOND);
        world.call(0);
    }
    assert_eq!(world.members.len(), 2, "after 90 s");
    world.pass(10 * SECOND);
    assert_eq!(world.members.len(), 0, "after 100 s");
}

#[test]
fn the_next_master_takes_over_what_runs() {
    let mut world = World::new(&[("roles", "{ worker: 2 }")]);
    world.call_all();
    world.call_all();
    world.succeed();
    world.call_all();
    assert_eq!((world.running(), world.gang.rounds, world.started.len()), (vec![0, 1], 1, 2));
    assert_eq!(world.events("started")[1]["adopted"], 2);
    world.end(0, 0);
    world.succeed();
    world.end(1, 0);
    world.call_all();
    assert_eq!(world.finished, Some(Phase::Done));
    world.succeed();
    assert_eq!(world.finished, Some(Phase::Done), "it is still over");
}

#[test]
fn what_died_without_a_master_is_noticed_by_the_next() {
    let mut world = World::new(&[("roles", "{ worker: 2 }")]);
    world.call_all();
    world.call_all();
    world.members.remove(&1);
    world.succeed();
    world.call_all();
    world.call_all();
    world.call_all();
    assert_eq!((world.running(), world.gang.rounds), (vec![0, 1], 2));
    assert_eq!(world.gang.status(world.now).program.unwrap().restarts, 1);
}

#[test]
fn a_stopped_gang_begins_again_with_all_its_restarts() {
    let mut world = World::new(&[("roles", "{ worker: 1 }"), ("restart.max", "1")]);
    world.call_all();
    world.end(0, 1);
    world.call_all();
    world.step(Event::Stop(StopRequest { now: false }));
    world.call_all();
    assert_eq!(world.finished, Some(Phase::Stopped));
    world.succeed();
    world.call_all();
    assert_eq!(world.running(), [0]);
    world.end(0, 1);
    world.call_all();
    assert_eq!(world.running(), [0], "one restart is allowed, again");
    assert_eq!(world.members[&0].environment["ELASTICDL_RESTART"], "3");
}

#[test]
fn never_means_never_and_what_cannot_start_is_not_tried_again() {
    let mut world = World::new(&[("roles", "{ worker: 2 }"), ("restart.policy", "never")]);
    world.call_all();
    world.call_all();
    world.kill(0, Some("preempted"));
    world.call_all();
    assert_eq!(world.finished, Some(Phase::Failed));
    let error = world.gang.status(world.now).error.unwrap();
    assert_eq!(error, "worker-0 was preempted, and command.restart.policy is never");

    let mut world = World::new(&[]);
    world.call_all();
    let lines = vec!["cannot start a: No such file or directory".to_string()];
    world.members.get_mut(&0).unwrap().end =
        Some(End { code: Some(127), last_lines: lines, stillborn: true, signal: None });
    world.call(0);
    world.call(0);
    assert_eq!(world.finished, Some(Phase::Failed));
}

#[test]
fn always_starts_again_what_ended_well_and_does_not_decide() {
    let roles = [("framework", "tensorflow"), ("roles", "{ chief: 1, ps: 1 }"), ("restart.policy", "always")];
    let mut world = World::new(&roles);
    world.call_all();
    world.call_all();
    world.end(1, 0);
    world.call_all();
    assert_eq!(world.running(), [0, 1]);
    world.end(0, 0);
    world.call_all();
    assert_eq!(world.finished, Some(Phase::Done));
}

#[test]
fn who_hangs_is_ended_and_strangers_are_sent_away() {
    let mut world = World::new(&[("roles", "{ worker: 2 }")]);
    world.call_all();
    world.call_all();
    for _ in 0..7 {
        world.pass(10 * SECOND);
        world.call(0);
    }
    assert_eq!(world.events("silent")[0]["member"], "worker-1");
    world.call_all();
    world.call_all();
    assert_eq!(world.running(), [0, 1]);
    let mut effects = Vec::new();
    let stranger = Turn { rank: 0, pid: 999, address: "127.0.0.1:1".into(), start: None, end: None };
    world.gang.step(world.now, Event::Turn(77, stranger), &mut effects);
    assert!(effects.contains(&Effect::Answer(77, Wanted::Leave)));
}

/// Goal: one that is being ended for its silence is not there, whatever it says in its last moment.
#[test]
fn no_round_begins_with_one_that_is_being_ended() {
    let mut world = World::new(&[("roles", "{ worker: 2 }")]);
    world.call(0);
    for _ in 0..6 {
        world.pass(10 * SECOND);
    }
    world.now += SECOND;
    let (pid, mut effects) = (world.members[&0].pid, Vec::new());
    world.gang.step(world.now, Event::Tick, &mut effects);
    assert!(effects.contains(&Effect::Kill(0, pid)), "{effects:?}");
    world.call(1);
    assert_eq!(world.gang.rounds, 0, "worker-0 is about to go");
    let late = Turn { rank: 0, pid, address: "127.0.0.1:1".into(), start: None, end: None };
    effects.clear();
    world.gang.step(world.now, Event::Turn(77, late), &mut effects);
    assert!(effects.contains(&Effect::Answer(77, Wanted::Leave)), "{effects:?}");
    world.kill(0, None);
    world.call_all();
    world.call_all();
    assert_eq!((world.running(), world.gang.rounds), (vec![0, 1], 1));
}

/// Goal: a member that was told to start its program has one, though it had no time to say so.
#[test]
fn no_round_begins_while_a_program_that_was_just_started_runs() {
    let mut world = World::new(&[("roles", "{ worker: 2 }")]);
    world.call_all();
    world.call(0);
    assert_eq!(world.running(), [0, 1]);
    world.end(0, 1);
    assert_eq!(world.gang.rounds, 1, "worker-1 has not ended its own");
    for _ in 0..3 {
        world.call_all();
    }
    assert_eq!((world.running(), world.gang.rounds), (vec![0, 1], 2));
}
