//! Partitions that move between servers.

use elasticdl_wire::control::{CopiedReply, CopiedRequest, Move, beat_reply, copied_reply};

use serde_json::json;

use super::*;

impl World {
    /// A server says that it serves these, and is believed.
    pub(super) fn ready(&mut self, server: u32, partitions: &[(u32, u64)]) {
        assert_eq!(self.tell_ready(server, partitions), Some(Answer::Noted));
    }

    /// A server says that it serves these.
    fn tell_ready(&mut self, server: u32, partitions: &[(u32, u64)]) -> Option<Answer> {
        let assignment = |(partition, incarnation): &(u32, u64)| Assignment {
            partition: *partition,
            incarnation: *incarnation,
            ..Assignment::default()
        };
        let partitions = partitions.iter().map(assignment).collect();
        let ready = ReadyRequest { partitions, ..ReadyRequest::default() };
        let caller = self.caller(Role::Server, server);
        self.ask(|t| Event::Ready(t, caller, ready))
    }

    /// The order to move partitions that a server's beat is answered with.
    pub(super) fn ordered(&mut self, server: u32) -> Option<(u64, Move)> {
        let caller = self.caller(Role::Server, server);
        match self.ask(|t| Event::Beat(t, caller, Value::Null)) {
            Some(Answer::Beat(BeatReply { command, what: Some(beat_reply::What::Move(order)) })) => {
                Some((command, order))
            }
            _ => None,
        }
    }

    pub(super) fn copied(&mut self, server: u32, command: u64, error: &str) -> copied_reply::What {
        let caller = self.caller(Role::Server, server);
        let request = CopiedRequest { command, error: error.into(), ..CopiedRequest::default() };
        match self.ask(|t| Event::Copied(t, caller, request)) {
            Some(Answer::Copied(CopiedReply { what: Some(what) })) => what,
            other => panic!("{other:?}"),
        }
    }

    /// Where partitions are served, as workers hear it: server's address and incarnation.
    pub(super) fn topology(&mut self) -> Vec<(String, u64)> {
        match self.ask(Event::TopologyAsked) {
            Some(Answer::Topology(topology)) => {
                topology.places.into_iter().map(|place| (place.address, place.incarnation)).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    /// Three servers are wanted of two, and the third has said that it is there.
    fn growing(extra: &[(&'static str, &'static str)]) -> World {
        let mut world = World::training(extra, 8);
        assert_eq!(world.ask(|t| Event::Scale(t, servers(3))), Some(Answer::Noted));
        world.ready(2, &[]);
        world.tick(10);
        world
    }

    /// The same, with partition 0 copied and given to the third.
    fn handing(extra: &[(&'static str, &'static str)]) -> (World, u64) {
        let mut world = World::growing(extra);
        let (command, _) = world.ordered(2).unwrap();
        assert_eq!(world.copied(2, command, ""), copied_reply::What::Take(true));
        (world, command)
    }
}

fn servers(servers: u32) -> ScaleRequest {
    ScaleRequest { workers: None, servers: Some(servers) }
}

fn at(address: &str, incarnation: u64) -> (String, u64) {
    (address.into(), incarnation)
}

#[test]
fn a_new_server_takes_its_share_over_and_what_was_acknowledged_holds() {
    let mut world = World::growing(&[]);
    assert_eq!(world.book.servers_wanted, Some(3));
    let (command, order) = world.ordered(2).unwrap();
    assert_eq!((order.from.as_str(), &order.incarnations[..]), ("address-0", &[1][..]));
    assert_eq!((order.partitions[0].partition, order.partitions[0].incarnation), (0, 2));
    assert_eq!(world.ordered(1), None, "the others have nothing to do with it");
    let status = world.job.status(world.now);
    assert_eq!(status.moving.map(|m| (m.from, m.to, m.partitions)), Some((0, 2, vec![0])));

    let before = world.topology();
    let leased = world.lease(0).unwrap();
    let by = world.incarnations();
    assert_eq!(world.copied(2, command, ""), copied_reply::What::Take(true));
    assert_eq!((world.book.servers[&0], world.book.incarnation(0)), (2, 2), "written down before it is said");
    assert_eq!(world.topology(), before, "workers go on where it is served");
    assert_eq!(world.copied(2, command, ""), copied_reply::What::Take(true), "asked again, the same is said");
    world.ready(2, &[(0, 2)]);
    assert_eq!(world.topology()[0], at("address-2", 2));
    assert!(world.events().contains(&"moved") && world.book.arriving.is_empty());

    let done = Done { task_records: 10, batches: 1, incarnations: by, ..Done::default() };
    assert!(world.report(0, &leased, report_request::Outcome::Done(done)), "nothing was lost on the way");
    world.tick(10);
    assert_eq!(world.ordered(2), None, "four partitions of three servers are even as they are");
    assert_eq!(world.copied(2, command, ""), copied_reply::What::Forget(true), "that move is over");
    assert_eq!(world.job.replayed, 0);
}

#[test]
fn servers_that_are_too_many_give_what_they_have_and_leave() {
    let mut world = World::training(&[], 8);
    assert_eq!(world.ask(|t| Event::Scale(t, servers(1))), Some(Answer::Noted));
    world.tick(10);
    let (command, order) = world.ordered(0).unwrap();
    assert_eq!(
        order.partitions.iter().map(|a| (a.partition, a.incarnation)).collect::<Vec<_>>(),
        [(1, 2), (3, 2)]
    );
    assert_eq!(world.copied(0, command, ""), copied_reply::What::Take(true));
    world.ready(0, &[(0, 1), (1, 2), (2, 1), (3, 2)]);
    assert!(world.running.contains_key(&(Role::Server as i32, 1)));
    world.tick(10);
    assert!(!world.running.contains_key(&(Role::Server as i32, 1)), "it has nothing left");
    assert_eq!(world.job.status(world.now).servers.len(), 1);
    while world.train_one(0) {}
    assert_eq!(world.job.phase(), Phase::Saving);
    world.job.tick(world.now, &mut Vec::new());
    let both = ScaleRequest { workers: Some(Wanted::Fixed(4)), servers: Some(9) };
    assert!(matches!(world.ask(|t| Event::Scale(t, both)), Some(Answer::Refused(_))));
    assert_eq!(world.job.fleet.workers_wanted(), 2, "both are met, or none");
    for impossible in [0, 5] {
        let refused = world.ask(|t| Event::Scale(t, servers(impossible)));
        assert!(matches!(refused, Some(Answer::Refused(_))), "{refused:?}");
    }
}

#[test]
fn a_server_that_dies_while_it_is_copied_from_takes_nothing_else_along() {
    let mut world = World::growing(&[]);
    let (command, _) = world.ordered(2).unwrap();
    world.kill(Role::Server, 0);
    assert_eq!(world.incarnations(), [2, 1, 2, 1]);
    assert_eq!(world.copied(2, command, ""), copied_reply::What::Forget(true));
    assert_eq!(world.book.servers[&0], 0);
}

#[test]
fn a_copy_that_fails_is_tried_again_after_a_rest() {
    let mut world = World::growing(&[]);
    let (command, _) = world.ordered(2).unwrap();
    assert_eq!(world.copied(2, command, "no route"), copied_reply::What::Forget(true));
    world.tick(1000);
    assert_eq!(world.ordered(2), None);
    world.tick(5000);
    let (next, _) = world.ordered(2).unwrap();
    assert!(next > command);
    assert_eq!(world.incarnations(), [1, 1, 1, 1]);
}

#[test]
fn partitions_that_were_given_to_a_server_which_dies_go_back_to_the_checkpoint() {
    let (mut world, _) = World::handing(&[]);
    assert!(world.train_one(0));
    world.kill(Role::Server, 2);
    assert_eq!(world.incarnations(), [3, 1, 1, 1], "2 may have been served for a moment");
    assert_eq!((world.book.incarnation(0), world.book.since(0)), (3, 3));
    assert!(world.job.replayed > 0 && world.book.arriving.is_empty());
    assert_eq!(world.topology()[0], at("", 3));
    world.ready(2, &[(0, 3)]);
    assert_eq!(world.topology()[0], at("address-2", 3));
}

#[test]
fn partitions_whose_old_server_dies_before_they_are_handed_over_go_back_to_the_checkpoint() {
    let (mut world, command) = World::handing(&[]);
    world.kill(Role::Server, 0);
    assert_eq!(world.incarnations(), [3, 1, 2, 1]);
    // It may have got them all the same; nobody believes it.
    assert!(matches!(world.tell_ready(2, &[(0, 2)]), Some(Answer::Refused(_))));
    assert_eq!(world.topology()[0], at("", 3));
    assert_eq!(world.copied(2, command, "no answer"), copied_reply::What::Forget(true));
    let caller = world.caller(Role::Server, 2);
    let beat = world.ask(|t| Event::Beat(t, caller, Value::Null));
    assert!(matches!(beat, Some(Answer::Refused(_))), "it is to join again: {beat:?}");
    let joined = world.ask(|t| Event::Joined(t, caller, "address-2".into()));
    let Some(Answer::Join(reply)) = joined else { panic!("{joined:?}") };
    assert_eq!(reply.partitions.iter().map(|a| (a.partition, a.incarnation)).collect::<Vec<_>>(), [(0, 3)]);
    world.ready(2, &[(0, 3)]);
    assert_eq!(world.topology()[0], at("address-2", 3));
}

#[test]
fn a_server_that_does_not_get_to_serve_what_it_was_given_gets_the_checkpoint() {
    for fails in [true, false] {
        let (mut world, command) = World::handing(&[]);
        match fails {
            true => assert_eq!(world.copied(2, command, "cut off"), copied_reply::What::Forget(true)),
            false => world.tick(31_000),
        }
        assert_eq!(world.incarnations(), [3, 1, 1, 1]);
    }
}

#[test]
fn a_master_that_dies_while_partitions_are_handed_over_leaves_no_doubt() {
    let (mut world, _) = World::handing(&[]);
    assert!(world.train_one(0));
    let mut world = world.master_dies();
    assert_eq!(world.incarnations(), [3, 1, 1, 1]);
    assert_eq!(world.job.places[0].server, 2);
    assert!(world.job.replayed > 0);
    for server in 0..3 {
        let caller = world.caller(Role::Server, server);
        let beat = world.ask(|t| Event::Beat(t, caller, Value::Null));
        assert!(matches!(beat, Some(Answer::Refused(_))), "ps-{server} may have it still: {beat:?}");
    }
}

/// Goal: a server that says what it served before it was to join again is not taken for one that serves its next life,
/// least of all by the next master, who has nothing but the ledger.
#[test]
fn old_news_of_a_server_that_is_to_join_again_are_refused_and_not_written_down() {
    let (world, _) = World::handing(&[]);
    let mut world = world.master_dies();
    assert_eq!((world.incarnations()[0], world.job.places[0].server), (3, 2));
    let answer = world.tell_ready(2, &[(0, 2)]);
    assert!(matches!(answer, Some(Answer::Refused(_))), "{answer:?}");
    let mut world = world.master_dies();
    assert_eq!(world.topology()[0], at("", 3), "nobody has opened this life");
    let caller = world.caller(Role::Server, 2);
    let beat = world.ask(|t| Event::Beat(t, caller, Value::Null));
    assert!(matches!(beat, Some(Answer::Refused(_))), "it is to join: {beat:?}");
}

#[test]
fn what_a_server_has_left_of_a_move_does_not_spoil_a_checkpoint() {
    let mut world = World::training(&[("checkpoint.every", "10s")], 8);
    assert!(world.train_one(0));
    world.tick(10_000);
    let caller = world.caller(Role::Server, 0);
    let mut written = world.written(0, 1);
    written.files.push(File { partition: 1, incarnation: 9, ..written.files[0].clone() });
    world.ask(|t| Event::Written(t, caller, written));
    let beat = world.ask(|t| Event::Beat(t, caller, Value::Null));
    assert!(matches!(beat, Some(Answer::Refused(_))), "it is to join again, and let go: {beat:?}");
    assert_eq!(world.commits.len(), 0, "its file may have taken the place of the right one");
    world.ask(|t| Event::Joined(t, caller, "address-0".into()));
    world.serve();
    world.tick(10);
    assert_eq!(world.job.checkpoints.writing(), Some(2));
    world.write_checkpoints();
    assert_eq!(world.commits.len(), 1);
    assert_eq!(world.commits[0].partitions.values().map(|f| f.incarnation).collect::<Vec<_>>(), [1; 4]);
}

#[test]
fn a_server_that_joins_again_in_the_middle_of_a_hand_over_has_lost_it() {
    for server in [0, 2] {
        let (mut world, _) = World::handing(&[]);
        let caller = world.caller(Role::Server, server);
        let joined = world.ask(|t| Event::Joined(t, caller, format!("address-{server}")));
        let Some(Answer::Join(reply)) = joined else { panic!("{joined:?}") };
        assert!(reply.partitions.iter().all(|a| a.partition != 0 || a.incarnation == 3), "{reply:?}");
        assert_eq!(world.incarnations(), [3, 1, 1, 1]);
        assert!(world.job.moving.is_none());
    }
}

#[test]
fn a_master_that_dies_while_partitions_are_copied_knows_where_they_are() {
    let mut world = World::growing(&[]);
    let (command, _) = world.ordered(2).unwrap();
    let mut world = world.master_dies();
    assert_eq!((world.incarnations(), world.job.servers_wanted), (vec![1, 1, 1, 1], 3));
    assert_eq!(world.copied(2, command, ""), copied_reply::What::Forget(true));
    world.tick(10);
    assert!(world.ordered(2).is_some_and(|(next, _)| next > command), "it is begun again");
    // And one that comes after a move knows that, too.
    let (mut world, _) = World::handing(&[]);
    world.ready(2, &[(0, 2)]);
    let mut world = world.master_dies();
    assert_eq!(world.topology()[0], at("address-2", 2));
    assert_eq!(world.job.replayed, 0);
}

#[test]
fn a_checkpoint_and_a_hand_over_wait_for_each_other() {
    let mut world = World::growing(&[("checkpoint.every", "10s")]);
    let (command, _) = world.ordered(2).unwrap();
    world.tick(10_000);
    assert!(world.job.checkpoints.writing().is_some());
    assert!(matches!(world.copied(2, command, ""), copied_reply::What::WaitMs(_)));
    assert!(world.train_one(0));
    world.write_checkpoints();
    assert_eq!(world.commits.len(), 1);
    assert_eq!(world.copied(2, command, ""), copied_reply::What::Take(true));
    world.tick(12_000);
    assert_eq!(world.job.checkpoints.writing(), None, "not while a partition has no life that serves");
    world.ready(2, &[(0, 2)]);
    world.tick(10);
    assert!(world.job.checkpoints.writing().is_some());
}

/// Goal: partitions move though a checkpoint takes as long as it is until the next one.
#[test]
fn a_hand_over_that_waited_for_a_checkpoint_comes_before_the_next_one() {
    let waiting = || {
        let mut world = World::growing(&[("checkpoint.every", "1s")]);
        let (command, _) = world.ordered(2).unwrap();
        world.tick(1_000);
        assert!(world.job.checkpoints.writing().is_some());
        world.tick(2_000);
        assert!(matches!(world.copied(2, command, ""), copied_reply::What::WaitMs(_)));
        assert!(world.train_one(0));
        world.write_checkpoints();
        world.tick(2_000);
        assert_eq!(world.job.checkpoints.writing(), None, "the server has not asked again yet");
        (world, command)
    };
    let (mut world, command) = waiting();
    assert_eq!(world.copied(2, command, ""), copied_reply::What::Take(true));
    world.ready(2, &[(0, 2)]);
    world.tick(10);
    assert!(world.job.checkpoints.writing().is_some());

    let (mut world, _) = waiting();
    world.tick(8_000);
    assert!(world.job.checkpoints.writing().is_some(), "one that does not ask is not waited for for ever");
}

#[test]
fn a_job_that_is_resumed_deals_its_partitions_anew() {
    let (mut world, _) = World::handing(&[]);
    world.ready(2, &[(0, 2)]);
    let mut book = world.book.clone();
    book.processes.clear();
    let world = World::with(&[], book, None);
    let servers: Vec<u32> = world.job.places.iter().map(|place| place.server).collect();
    assert_eq!(servers, [0, 1, 2, 0]);
    assert_eq!(world.book.servers, (0..).zip(servers).collect());
    assert_eq!(world.incarnations(), [3, 2, 2, 2]);
}

#[test]
fn a_partition_with_most_of_the_work_gets_a_server_with_less_of_it() {
    let mut world = World::training(&[], 8);
    let tell = |world: &mut World, seconds: u64| {
        for (server, loads) in
            [(0, json!({"0": 100 * seconds, "2": 100 * seconds})), (1, json!({"1": 10, "3": 10}))]
        {
            let caller = world.caller(Role::Server, server);
            world.ask(|t| Event::Beat(t, caller, json!({ "loads": loads })));
        }
    };
    for second in 0..14 {
        tell(&mut world, second);
        world.tick(1000);
    }
    assert!(world.job.moving.is_none(), "that may be chance");
    for second in 14..18 {
        tell(&mut world, second);
        world.tick(1000);
    }
    let moving = world.job.moving_status(world.now).expect("half of the work of ps-0 goes to ps-1");
    assert_eq!((moving.from, moving.to, moving.partitions.len()), (0, 1, 1));
}

#[test]
fn where_all_go_back_to_one_step_a_move_is_forgotten() {
    let deterministic = [("train.staleness", "0"), ("workers.count", "1"), ("workers.max", "1")];
    let (mut world, _) = World::handing(&deterministic);
    world.kill(Role::Server, 1);
    assert!(world.job.moving.is_none());
    assert_eq!(world.incarnations(), [2, 2, 3, 2], "partition 0, where steps are decided, stays where it is");
    let mut world = World::growing(&deterministic);
    world.kill(Role::Server, 1);
    assert!(world.job.moving.is_none());
    assert_eq!(world.incarnations(), [2, 2, 2, 2]);
    let mut world = World::growing(&deterministic);
    world.kill(Role::Server, 2);
    assert!(world.job.moving.is_none());
    assert_eq!(world.incarnations(), [2, 2, 2, 2], "although it had nothing yet");
}

#[test]
fn a_new_server_gets_all_of_its_share_and_not_its_first_partition_alone() {
    let mut world = World::training(&[("servers.partitions", "9")], 8);
    assert_eq!(world.ask(|t| Event::Scale(t, servers(3))), Some(Answer::Noted));
    world.ready(2, &[]);
    let mut moved = Vec::new();
    for _ in 0..3 {
        world.tick(10);
        let Some((command, order)) = world.ordered(2) else { break };
        world.copied(2, command, "");
        moved.extend(order.partitions.iter().map(|a| (a.partition, a.incarnation)));
        world.ready(2, &moved);
    }
    let of = |server: u32| world.job.places.iter().filter(|place| place.server == server).count();
    assert_eq!([of(0), of(1), of(2)], [3, 3, 3]);
    world.tick(10);
    assert!(!world.job.spreading && world.job.moving.is_none());
}
