use elasticdl_spec::{LeaseId, TaskId};
use proptest::prelude::*;

use super::*;

fn batch(shard: u32, batch: u64, n: u64) -> Batch {
    Batch { task: TaskId::train(0, shard), batch, lease: LeaseId { term: 1, n } }
}

const NOW: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(1000);

fn permit(gate: &mut Gate, connection: u64, b: Batch) -> Option<u64> {
    gate.admit(NOW, connection, b).map(|granted| granted.permit)
}

#[test]
fn a_bound_of_one_lets_two_go_side_by_side_and_makes_the_faster_wait() {
    let mut gate = Gate::new(Policy::Bounded(1), LONG, 1, 0);
    let slow = permit(&mut gate, 1, batch(0, 0, 1)).unwrap();
    let fast = permit(&mut gate, 2, batch(1, 0, 2)).unwrap();
    assert_eq!(permit(&mut gate, 3, batch(2, 0, 3)), None, "one of three would be late by two");
    gate.landed(fast);
    assert_eq!(permit(&mut gate, 2, batch(1, 1, 2)), None, "the slow one would be late by two");
    gate.landed(slow);
    assert!(permit(&mut gate, 2, batch(1, 1, 2)).is_some());
    gate.landed(slow);
    assert!(permit(&mut gate, 3, batch(2, 0, 3)).is_some(), "what comes back twice counts once");
}

#[test]
fn a_connection_that_ends_gives_back_its_permits() {
    let mut gate = Gate::new(Policy::Bounded(1), LONG, 1, 0);
    permit(&mut gate, 1, batch(0, 0, 1)).unwrap();
    permit(&mut gate, 1, batch(0, 1, 1)).unwrap();
    assert_eq!(permit(&mut gate, 2, batch(1, 0, 2)), None);
    gate.lost(1);
    assert!(gate.is_idle());
    assert!(permit(&mut gate, 2, batch(1, 0, 2)).is_some());
}

/// Goal: a permit that was granted to nobody, because who asked was gone by then, is not waited for for ever. The last
/// worker asks for no other batch while it waits for the step of the one that it has.
#[test]
fn who_waits_for_a_step_outlasts_another_that_is_not_heard_of_again() {
    let mut gate = Gate::new(Policy::Steps(3), LONG, 1, 0);
    let mine = permit(&mut gate, 1, batch(0, 0, 1)).unwrap();
    permit(&mut gate, 2, batch(1, 0, 2)).unwrap();
    assert!(gate.staged(NOW, mine, batch(0, 0, 1)));
    gate.close(NOW + LONG);
    assert_eq!(gate.decision(0, None), None, "it may still come");
    gate.close(NOW + LONG + TAIL);
    let decided = gate.decision(0, None).map(|decided| decided.batches.clone());
    assert_eq!(decided, Some(vec![batch(0, 0, 1)]));
}

#[test]
fn permits_of_two_lives_are_told_apart() {
    let old = permit(&mut Gate::new(Policy::Bounded(1), LONG, 4, 0), 1, batch(0, 0, 1)).unwrap();
    let mut gate = Gate::new(Policy::Bounded(1), LONG, 5, 0);
    let new = permit(&mut gate, 1, batch(0, 0, 1)).unwrap();
    gate.landed(old);
    assert!(old != new && !gate.is_idle());
}

#[derive(Debug, Clone, Copy)]
enum Event {
    /// A worker asks for its next batch.
    Ask(usize),
    /// The n-th batch under way is applied by all partitions.
    Land(usize),
    /// Or by the first partition alone, and then its worker is gone.
    Lose(usize),
    /// Or is dropped.
    Drop(usize),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let any = |make: fn(usize) -> Event| (0..8usize).prop_map(make);
    let one = prop_oneof![6 => any(Event::Ask), 4 => any(Event::Land), 1 => any(Event::Lose), 1 => any(Event::Drop)];
    proptest::collection::vec(one, 0..200)
}

proptest! {
    /// Goal: whatever the order of asks, landings, drops and lost connections, nothing is applied with more
    /// staleness than allowed, and whoever asks while nothing is under way goes on.
    #[test]
    fn the_bound_is_never_exceeded_and_nobody_is_stuck(most in 1..5u64, events in events()) {
        let mut gate = Gate::new(Policy::Bounded(most), LONG, 1, 0);
        // Under way: permit, connection, and how many were applied when it was pulled; in two partitions, of which
        // the first may be ahead.
        let mut under_way: Vec<(u64, u64, u64)> = Vec::new();
        let (mut applied, mut connection) = (0, 0);
        for event in events {
            match event {
                Event::Ask(worker) => {
                    connection += 1;
                    if let Some(permit) = permit(&mut gate, connection, batch(worker as u32, 0, 1)) {
                        under_way.push((permit, connection, applied));
                    } else {
                        prop_assert!(!under_way.is_empty(), "stuck");
                    }
                }
                Event::Land(n) | Event::Lose(n) | Event::Drop(n) if !under_way.is_empty() => {
                    let (permit, connection, pulled) = under_way.remove(n % under_way.len());
                    if !matches!(event, Event::Drop(_)) {
                        prop_assert!(applied - pulled <= most, "{} others came between", applied - pulled);
                        applied += 1;
                    }
                    match event {
                        Event::Land(_) => gate.landed(permit),
                        Event::Lose(_) => gate.lost(connection),
                        _ => gate.dropped(permit),
                    }
                }
                _ => {}
            }
        }
        for (permit, ..) in under_way {
            gate.landed(permit);
        }
        prop_assert!(gate.is_idle());
        prop_assert!(permit(&mut gate, 0, batch(0, 0, 1)).is_some());
    }
}

#[test]
fn a_step_takes_so_many_batches_and_is_decided_when_all_are_staged() {
    let mut gate = Gate::new(Policy::Steps(2), LONG, 1, 10);
    let (a, b, c) = (batch(0, 0, 1), batch(0, 1, 1), batch(1, 0, 2));
    let first = gate.admit(NOW, 1, a).unwrap();
    assert_eq!(first.version, 10);
    let second = gate.admit(NOW, 2, c).unwrap();
    assert_eq!(gate.admit(NOW, 1, b), None, "the step is full");
    assert!(gate.staged(NOW, second.permit, c));
    gate.close(NOW + 10 * TAIL);
    assert_eq!(gate.decision(0, None), None, "one is not staged yet");
    assert!(gate.staged(NOW, first.permit, a));
    let decision = Decision { version: 10, batches: vec![a, c] };
    assert_eq!(gate.decision(10, None), Some(&decision), "in the order of tasks, not of arrival");
    assert_eq!(gate.decision(12, None), None, "who has committed it needs it no more");
    assert_eq!(gate.decision(12, Some(a)), Some(&decision), "but who asks for a batch of it does");
    assert_eq!(gate.admit(NOW, 1, a), None);
    assert!(gate.staged(NOW, first.permit, a), "told twice, it counts once");
    assert_eq!(gate.admit(NOW, 1, b).unwrap().version, 12);
}

#[test]
fn a_place_in_a_step_that_comes_back_is_given_to_another() {
    let mut gate = Gate::new(Policy::Steps(2), LONG, 1, 0);
    let (a, b, c) = (batch(0, 0, 1), batch(1, 0, 2), batch(2, 0, 3));
    let staged = gate.admit(NOW, 1, a).unwrap();
    assert!(gate.staged(NOW, staged.permit, a));
    let lost = gate.admit(NOW, 2, b).unwrap();
    gate.lost(1);
    gate.lost(2);
    assert!(!gate.staged(NOW, lost.permit, b), "its worker was taken for dead: it begins again");
    let next = gate.admit(NOW, 3, c).unwrap();
    assert!(gate.staged(NOW, next.permit, c));
    assert_eq!(
        gate.decision(0, None).unwrap().batches,
        [a, c],
        "what is staged everywhere outlives its worker"
    );
}

#[test]
fn a_newer_lease_takes_the_place_of_an_older_one_but_for_what_is_staged() {
    let mut gate = Gate::new(Policy::Steps(3), LONG, 1, 0);
    let (old, new) = (batch(0, 0, 1), batch(0, 0, 2));
    let first = gate.admit(NOW, 1, old).unwrap();
    let second = gate.admit(NOW, 2, new).unwrap();
    assert!(!gate.staged(NOW, first.permit, old), "nobody waits for a zombie");
    assert_eq!(gate.admit(NOW, 1, old), None);
    assert!(gate.staged(NOW, second.permit, new));
    assert_eq!(gate.admit(NOW, 3, batch(0, 0, 3)), None, "it is in the step already");
}

#[test]
fn a_step_that_nobody_comes_to_any_more_is_closed_with_fewer() {
    let mut gate = Gate::new(Policy::Steps(3), LONG, 1, 0);
    let a = batch(0, 0, 1);
    let permit = gate.admit(NOW, 1, a).unwrap().permit;
    gate.staged(NOW, permit, a);
    gate.close(NOW + TAIL / 2);
    assert_eq!(gate.decision(0, None), None);
    gate.close(NOW + TAIL);
    assert_eq!(gate.decision(0, None).unwrap().batches, [a]);
}

proptest! {
    /// Goal: whatever the order, a step has at most so many batches, each batch is in one step, every step begins
    /// where the one before it ended, and with the faults over everything that was admitted gets decided.
    #[test]
    fn steps_follow_each_other_and_have_each_batch_once(size in 1..5u64, events in events()) {
        let mut gate = Gate::new(Policy::Steps(size), LONG, 1, 0);
        let mut under_way: Vec<(u64, u64, Batch)> = Vec::new();
        let mut marks = [0u64; 8];
        let mut decided: Vec<Decision> = Vec::new();
        let (mut connection, mut now) = (0, NOW);
        let mut note = |gate: &Gate, marks: &mut [u64; 8]| {
            let known = decided.last().map_or(0, Decision::end);
            if let Some(decision) = gate.decision(known, None) {
                assert_eq!(decision.version, known);
                assert!(decision.batches.len() as u64 <= size);
                for b in &decision.batches {
                    let mark = &mut marks[b.task.shard as usize];
                    assert_eq!(*mark, b.batch, "each once, and in order");
                    *mark += 1;
                }
                decided.push(decision.clone());
            }
        };
        for event in events {
            now += Duration::from_millis(100);
            match event {
                Event::Ask(worker) => {
                    connection += 1;
                    let asked = batch(worker as u32, marks[worker], connection);
                    if let Some(granted) = gate.admit(now, connection, asked) {
                        under_way.retain(|(_, _, b)| b.task != asked.task);
                        under_way.push((granted.permit, connection, asked));
                    }
                }
                Event::Land(n) if !under_way.is_empty() => {
                    let (permit, _, b) = under_way.remove(n % under_way.len());
                    prop_assert!(gate.staged(now, permit, b));
                }
                Event::Lose(n) | Event::Drop(n) if !under_way.is_empty() => {
                    let (permit, connection, _) = under_way.remove(n % under_way.len());
                    if let Event::Lose(_) = event { gate.lost(connection) } else { gate.dropped(permit) }
                }
                _ => {}
            }
            note(&gate, &mut marks);
        }
        for (permit, _, b) in under_way {
            prop_assert!(gate.staged(now, permit, b));
            note(&gate, &mut marks);
        }
        gate.close(now + TAIL);
        note(&gate, &mut marks);
        prop_assert!(gate.is_idle());
    }
}

#[test]
fn a_permit_that_is_held_for_too_long_is_given_to_another() {
    let patience = Duration::from_secs(5);
    let mut gate = Gate::new(Policy::Bounded(1), patience, 1, 0);
    permit(&mut gate, 1, batch(0, 0, 1)).unwrap();
    permit(&mut gate, 2, batch(1, 0, 2)).unwrap();
    assert_eq!(gate.admit(NOW + patience, 3, batch(2, 0, 3)), None);
    assert!(gate.admit(NOW + patience + Duration::from_millis(1), 3, batch(2, 0, 3)).is_some());
}

#[test]
fn a_round_takes_so_many_and_the_next_begins_when_all_partitions_have_them() {
    let mut gate = Gate::new(Policy::Rounds(3), LONG, 1, 7);
    let (a, b, c) = (batch(0, 0, 1), batch(1, 0, 2), batch(2, 0, 3));
    let first = permit(&mut gate, 1, a).unwrap();
    let second = permit(&mut gate, 2, b).unwrap();
    assert_eq!(permit(&mut gate, 3, c), None, "one of the round was applied before the gate was born");
    gate.dropped(first);
    let third = permit(&mut gate, 3, c).expect("its place is free again");
    gate.observe(9);
    assert_eq!(permit(&mut gate, 1, a), None, "partition 0 has both, and perhaps it alone");
    gate.landed(second);
    assert_eq!(permit(&mut gate, 1, a), None);
    gate.landed(third);
    assert!(permit(&mut gate, 1, a).is_some(), "the next round");
    gate.observe(10);
    gate.lost(1);
    assert!(
        permit(&mut gate, 2, b).is_some(),
        "what was applied counts, though its worker died before it could say so"
    );
    assert!(permit(&mut gate, 3, c).is_some());
    assert_eq!(permit(&mut gate, 4, batch(3, 0, 4)), None);
}
