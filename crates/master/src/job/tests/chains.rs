//! Checkpoints that add to earlier ones: ordered, believed, and handed out to whoever restores them.

use elasticdl_wire::control::{EarlierFile, JoinReply, WriteCheckpoint, beat_reply::What};

use super::*;

/// What a server is told to write.
fn order(world: &mut World, server: u32) -> WriteCheckpoint {
    let caller = world.caller(Role::Server, server);
    match world.ask(|t| Event::Beat(t, caller, Value::Null)) {
        Some(Answer::Beat(BeatReply { what: Some(What::WriteCheckpoint(order)), .. })) => order,
        other => panic!("no order to write a checkpoint: {other:?}"),
    }
}

/// A server has written its files; those of some partitions add to `base`.
fn write(world: &mut World, server: u32, order: &WriteCheckpoint, base: impl Fn(u32) -> u64) {
    let caller = world.caller(Role::Server, server);
    let mut written = world.written(server, order.checkpoint);
    written.files.iter_mut().for_each(|file| file.base = base(file.partition));
    world.ask(|t| Event::Written(t, caller, written));
}

/// A checkpoint that does as it is told. Returns what it was to add to.
fn checkpoint(world: &mut World) -> u64 {
    world.tick(10_000);
    let orders = [0, 1].map(|server| order(world, server));
    assert_eq!(orders[0], orders[1]);
    for (server, order) in (0..).zip(&orders) {
        write(world, server, order, |_| order.base);
    }
    orders[0].base
}

fn chains(world: &World) -> Vec<Vec<u64>> {
    let manifest = world.commits.last().unwrap();
    let chain = |partition| manifest.chain(partition).iter().map(|file| file.checkpoint).collect();
    (0..4).map(chain).collect()
}

const EVERY: (&str, &str) = ("checkpoint.every", "10s");

#[test]
fn every_so_manieth_checkpoint_is_whole_and_the_others_add_to_the_last() {
    let mut world = World::training(&[EVERY, ("checkpoint.full_every", "3")], 9);
    let bases: Vec<u64> = (0..7).map(|_| checkpoint(&mut world)).collect();
    assert_eq!(bases, [0, 1, 2, 0, 4, 5, 0]);
    let chains: Vec<usize> = world.commits.iter().map(|m| m.chain(1).len()).collect();
    assert_eq!(chains, [1, 2, 3, 1, 2, 3, 1]);
    let adding: Vec<Value> =
        world.emitted.iter().filter(|(e, _)| *e == "checkpoint").map(|(_, f)| f["adding"].clone()).collect();
    assert_eq!(adding, [0, 4, 4, 0, 4, 4, 0].map(Value::from));
}

#[test]
fn with_one_every_checkpoint_is_whole_and_nobody_notes_changes() {
    let mut world = World::training(&[EVERY, ("checkpoint.full_every", "1")], 9);
    for _ in 0..3 {
        world.tick(10_000);
        let order = [0, 1].map(|server| order(&mut world, server))[0].clone();
        assert_eq!((order.base, order.is_basis), (0, false));
        (0..2).for_each(|server| write(&mut world, server, &order, |_| 0));
    }
    assert_eq!(world.commits.len(), 3);
}

#[test]
fn a_partition_may_be_whole_where_others_add() {
    let mut world = World::training(&[EVERY], 9);
    checkpoint(&mut world);
    checkpoint(&mut world);
    world.tick(10_000);
    for server in 0..2 {
        let order = order(&mut world, server);
        assert_eq!(order.base, 2);
        write(&mut world, server, &order, |partition| if partition == 2 { 0 } else { 2 });
    }
    assert_eq!(chains(&world), [vec![1, 2, 3], vec![1, 2, 3], vec![3], vec![1, 2, 3]]);
}

#[test]
fn what_was_abandoned_or_failed_is_nothing_to_add_to() {
    let mut world = World::training(&[EVERY], 9);
    checkpoint(&mut world);
    world.tick(10_000);
    let second = order(&mut world, 0);
    write(&mut world, 0, &second, |_| 1);
    let caller = world.caller(Role::Server, 1);
    let failed = CheckpointWrittenRequest {
        checkpoint: second.checkpoint,
        error: "no room".into(),
        ..CheckpointWrittenRequest::default()
    };
    world.ask(|t| Event::Written(t, caller, failed));
    assert_eq!(checkpoint(&mut world), 1, "the second one is not there");
    assert_eq!(chains(&world)[0], [1, 3]);
}

/// Goal: what a confused server says is no manifest.
#[test]
fn files_that_add_to_another_checkpoint_than_the_last_fail_theirs() {
    let mut world = World::training(&[EVERY], 9);
    checkpoint(&mut world);
    checkpoint(&mut world);
    world.tick(10_000);
    for server in 0..2 {
        let order = order(&mut world, server);
        write(&mut world, server, &order, |_| 1);
        if world.job.checkpoints.writing().is_none() {
            break;
        }
    }
    assert_eq!(world.commits.len(), 2);
    let warned = world.emitted.iter().any(|(event, fields)| {
        *event == "warning"
            && fields["message"].as_str().unwrap().contains("add to another checkpoint than the last")
    });
    assert!(warned, "{:?}", world.emitted);
}

#[test]
fn a_server_that_restores_is_told_of_all_files_of_a_chain() {
    let mut world = World::training(&[EVERY, ("checkpoint.full_every", "3")], 9);
    let told = |world: &mut World| {
        let caller = world.caller(Role::Server, 1);
        match world.ask(|t| Event::Joined(t, caller, "address-1".into())) {
            Some(Answer::Join(reply)) => *reply,
            other => panic!("{other:?}"),
        }
    };
    let JoinReply { partitions, restore_from, .. } = told(&mut world);
    assert_eq!((restore_from.as_str(), partitions[0].checkpoint, partitions[0].is_basis), ("", 0, false));
    checkpoint(&mut world);
    checkpoint(&mut world);
    let JoinReply { partitions, restore_from, .. } = told(&mut world);
    assert_eq!(restore_from, "ckpt/checkpoint-000002");
    let first = EarlierFile { checkpoint: 1, dir: "ckpt/checkpoint-000001".into(), bytes: 5, crc32: 6 };
    for partition in &partitions {
        assert_eq!((partition.checkpoint, partition.bytes, partition.crc32), (2, 5, 6));
        assert_eq!((&partition.earlier[..], partition.is_basis), (std::slice::from_ref(&first), true));
    }
    checkpoint(&mut world);
    assert!(
        told(&mut world).partitions.iter().all(|p| p.earlier.len() == 2 && !p.is_basis),
        "the next is whole"
    );
}
