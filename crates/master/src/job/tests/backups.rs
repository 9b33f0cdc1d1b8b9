//! Backups of partitions, and servers that die.

use elasticdl_wire::control::{
    AloneReply, AloneRequest, CopiedReply, CopiedRequest, Forget, Promote, beat_reply, copied_reply,
};
use serde_json::json;

use super::*;

impl World {
    /// A job of two servers with two partitions each, and backups of all of them.
    fn backed_up() -> World {
        let mut world = World::training(&[("servers.replicas", "2")], 8);
        world.tick(10);
        for server in [1, 0, 1, 0] {
            assert_eq!(world.back_up(server), copied_reply::What::Take(true));
        }
        let backups: Vec<_> = world.book.backups.iter().map(|(p, s)| (*p, *s)).collect();
        assert_eq!(backups, [(0, 1), (1, 0), (2, 1), (3, 0)], "each at the other server");
        assert_eq!(world.events().iter().filter(|e| **e == "backed_up").count(), 1);
        world
    }

    /// A server does as it is told, and has the next backup.
    fn back_up(&mut self, server: u32) -> copied_reply::What {
        let (command, order) = self.ordered(server).expect("a backup is lacking");
        assert!(order.backup && order.partitions.len() == 1, "{order:?}");
        self.has_backup(server, command, order.partitions[0].clone(), "")
    }

    fn has_backup(
        &mut self,
        server: u32,
        command: u64,
        backup: Assignment,
        error: &str,
    ) -> copied_reply::What {
        let caller = self.caller(Role::Server, server);
        let request =
            CopiedRequest { command, backup: Some(backup), error: error.into(), ..CopiedRequest::default() };
        match self.ask(|t| Event::Copied(t, caller, request)) {
            Some(Answer::Copied(CopiedReply { what: Some(what) })) => what,
            other => panic!("{other:?}"),
        }
    }

    /// What a server that tells of its backups hears.
    fn told(&mut self, server: u32, backs: Value) -> Option<beat_reply::What> {
        let caller = self.caller(Role::Server, server);
        match self.ask(|t| Event::Beat(t, caller, json!({ "backs": backs }))) {
            Some(Answer::Beat(reply)) => reply.what,
            None => None,
            other => panic!("{other:?}"),
        }
    }

    fn promotion(&mut self, server: u32) -> Option<Promote> {
        match self.told(server, json!({})) {
            Some(beat_reply::What::Promote(order)) => Some(order),
            _ => None,
        }
    }

    fn alone(&mut self, server: u32, partition: u32, incarnation: u64, backup: u32) -> bool {
        let caller = self.caller(Role::Server, server);
        let request = AloneRequest { partition, incarnation, backup, ..AloneRequest::default() };
        match self.ask(|t| Event::Alone(t, caller, request)) {
            Some(Answer::Alone(AloneReply { alone })) => alone,
            other => panic!("{other:?}"),
        }
    }
}

fn lives(assignments: &[Assignment]) -> Vec<(u32, u64)> {
    assignments.iter().map(|a| (a.partition, a.incarnation)).collect()
}

#[test]
fn backups_take_the_place_of_a_dead_servers_partitions_and_what_was_acknowledged_holds() {
    let mut world = World::backed_up();
    let leased = world.lease(0).unwrap();
    let by = world.incarnations();
    world.kill(Role::Server, 0);
    assert_eq!(world.book.servers[&0], 1, "written down before anything is said");
    let order = world.promotion(1).expect("the other server has the backups");
    assert_eq!((lives(&order.partitions), order.incarnations), (vec![(0, 2), (2, 2)], vec![1, 1]));
    assert_eq!(world.topology()[0].0, "", "and does not serve them yet");
    assert!(world.book.backups.is_empty(), "the dead one had those of the other two");
    world.ready(1, &[(0, 2), (1, 1), (2, 2), (3, 1)]);
    assert_eq!(world.topology()[2], ("address-1".to_string(), 2));
    assert!(world.events().contains(&"promoted") && !world.events().contains(&"replay"));
    assert!(world.book.arriving.is_empty());
    let done = Done { task_records: 10, batches: 1, incarnations: by, ..Done::default() };
    assert!(world.report(0, &leased, report_request::Outcome::Done(done)), "nothing was lost");
    assert_eq!((world.job.replayed, world.book.replayed), (0, 0));

    // The next server of its number gets its share, and then there are backups again.
    world.ready(0, &[]);
    world.tick(10);
    let (_, order) = world.ordered(0).expect("partitions are dealt first");
    assert!(!order.backup);
}

#[test]
fn a_partition_goes_on_alone_when_the_ledger_has_forgotten_its_backup() {
    let mut world = World::backed_up();
    assert!(!world.alone(0, 0, 2, 1), "another life");
    assert!(!world.alone(0, 1, 1, 0), "another server's");
    assert!(world.book.backups.contains_key(&0));
    assert!(world.alone(0, 0, 1, 1));
    assert_eq!(world.book.backups.get(&0), None, "written down before it is said");
    assert!(world.alone(0, 0, 1, 1), "asked again, the same is said");
    let stale = world.told(1, json!({ "0": 1, "2": 1 }));
    let Some(beat_reply::What::Forget(Forget { partitions })) = stale else { panic!("{stale:?}") };
    assert_eq!(lives(&partitions), [(0, 1)], "the one that nobody knows of");
    world.kill(Role::Server, 0);
    let order = world.promotion(1).unwrap();
    assert_eq!(lives(&order.partitions), [(2, 2)]);
    assert!(world.events().contains(&"replay"), "the other one goes back to the checkpoint");
}

/// Goal: a backup that was lost before the ledger knew of it must never be believed.
#[test]
fn a_backup_that_is_lost_while_it_is_made_does_not_count() {
    let mut world = World::training(&[("servers.replicas", "2")], 8);
    world.tick(10);
    let (command, order) = world.ordered(1).unwrap();
    assert!(world.alone(0, 0, 1, 1));
    let word = world.has_backup(1, command, order.partitions[0].clone(), "");
    assert_eq!((word, world.book.backups.len()), (copied_reply::What::Forget(true), 0));
}

#[test]
fn a_backup_that_fails_is_tried_again_after_a_rest() {
    let mut world = World::training(&[("servers.replicas", "2")], 8);
    world.tick(10);
    let (command, order) = world.ordered(1).unwrap();
    let word = world.has_backup(1, command, order.partitions[0].clone(), "no room");
    assert_eq!(word, copied_reply::What::Forget(true));
    world.tick(10);
    assert_eq!(world.ordered(0), None, "not at once");
    world.tick(6000);
    assert_eq!(world.back_up(0), copied_reply::What::Take(true), "what has failed comes last");
    assert_eq!(world.book.backups.get(&1), Some(&0));
    let (command, order) = world.ordered(1).unwrap();
    let backup = order.partitions[0].clone();
    for _ in 0..2 {
        let word = world.has_backup(1, command, backup.clone(), "");
        assert_eq!(word, copied_reply::What::Take(true), "asked again, the same is said");
    }
}

/// Goal: a server that was told to make a backup and says nothing of it does not hold up all others.
#[test]
fn a_backup_that_nobody_makes_is_given_up() {
    let mut world = World::training(&[("servers.replicas", "2")], 8);
    world.tick(10);
    assert!(world.ordered(1).is_some());
    world.tick(4000);
    world.told(1, json!({}));
    assert!(!world.events().contains(&"warning"), "it may have been told just now");
    world.tick(2000);
    world.told(1, json!({ "0": 1 }));
    assert!(!world.events().contains(&"warning"), "it is at it");
    world.told(1, json!({}));
    assert!(world.events().contains(&"warning"));
    world.tick(6000);
    assert_eq!(world.back_up(0), copied_reply::What::Take(true), "others go on");
}

#[test]
fn what_a_backup_cannot_give_goes_back_to_the_checkpoint() {
    for how in ["it says so", "it dies", "it joins again", "it does nothing"] {
        let mut world = World::backed_up();
        world.kill(Role::Server, 0);
        let caller = world.caller(Role::Server, 1);
        match how {
            "it says so" => {
                let Some(Answer::Beat(reply)) = world.ask(|t| Event::Beat(t, caller, Value::Null)) else {
                    panic!()
                };
                let (command, error) = (reply.command, "not there".to_string());
                let request = CopiedRequest { command, error, ..CopiedRequest::default() };
                world.ask(|t| Event::Copied(t, caller, request));
            }
            "it dies" => world.kill(Role::Server, 1),
            "it joins again" => drop(world.ask(|t| Event::Joined(t, caller, "address-1".into()))),
            _ => (0..40).for_each(|_| {
                world.tick(1000);
                world.ask(|t| Event::Beat(t, caller, Value::Null));
            }),
        }
        assert!(world.events().contains(&"replay"), "{how}");
        assert_eq!((world.book.incarnation(0), world.book.since(0)), (3, 3), "{how}: a life of its own");
        assert!(!world.events().contains(&"promoted"), "{how}");
    }
}

/// Goal: a master that finds a server dead when it begins has its backups take over as well.
#[test]
fn the_next_master_knows_of_backups() {
    let world = World::backed_up();
    let mut book = world.book.clone();
    book.processes.remove("ps-0");
    let mut world = World::with(&[("servers.replicas", "2")], book, None);
    assert_eq!((world.book.servers[&0], world.book.incarnation(0), world.book.since(0)), (1, 2, 1));
    assert_eq!(world.book.backups.len(), 0, "the dead one had those of the other two");
    assert!(!world.events().contains(&"replay"));
    assert_eq!(lives(&world.promotion(1).unwrap().partitions), [(0, 2), (2, 2)]);
}

#[test]
fn a_job_with_backups_keeps_two_servers() {
    let mut world = World::backed_up();
    let one = ScaleRequest { workers: None, servers: Some(1) };
    let said = world.ask(|t| Event::Scale(t, one));
    assert!(matches!(&said, Some(Answer::Refused(why)) if why.contains("from 2 to")), "{said:?}");
}
