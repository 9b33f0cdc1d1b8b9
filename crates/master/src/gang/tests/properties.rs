//! Whatever happens, and in whichever order: what always holds of a gang.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::World;
use crate::gang::{Event, Start};
use crate::status::{Phase, StopRequest};

/// Something that may happen.
#[derive(Debug, Clone)]
enum Act {
    Call(u32),
    CallAll,
    End(u32, i32),
    Kill(u32),
    Preempt(u32),
    Wait(u32),
    Pass(u64),
    Succeed,
    Stop,
}

fn act() -> impl Strategy<Value = Act> {
    let rank = 0u32..4;
    prop_oneof![
        8 => rank.clone().prop_map(Act::Call),
        6 => Just(Act::CallAll),
        3 => (rank.clone(), prop_oneof![2 => Just(0), 1 => Just(1)]).prop_map(|(rank, code)| Act::End(rank, code)),
        1 => rank.clone().prop_map(Act::Kill),
        2 => rank.clone().prop_map(Act::Preempt),
        1 => rank.prop_map(Act::Wait),
        4 => (0u64..20_000).prop_map(Act::Pass),
        1 => Just(Act::Succeed),
        1 => prop_oneof![20 => Just(Act::CallAll), 1 => Just(Act::Stop)],
    ]
}

fn play(world: &mut World, act: &Act) {
    match act {
        Act::Call(rank) => world.call(*rank),
        Act::CallAll => world.call_all(),
        Act::End(rank, code) => world.end(*rank, *code),
        Act::Kill(rank) => world.kill(*rank, None),
        Act::Preempt(rank) => world.kill(*rank, Some("preempted")),
        Act::Wait(rank) if world.members.contains_key(rank) => world.waits(*rank),
        Act::Wait(_) => {}
        Act::Pass(ms) => world.pass(Duration::from_millis(*ms)),
        Act::Succeed => world.succeed(),
        Act::Stop => world.step(Event::Stop(StopRequest { now: false })),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The world itself holds that no rank has two members and that starts only grow.
    #[test]
    fn rounds_are_whole_addresses_agree_and_restarts_are_bounded(
        acts in prop::collection::vec(act(), 0..120),
        scope in prop_oneof![Just("all"), Just("one")],
        moves in any::<bool>(),
    ) {
        let mut world = World::new(&[("roles", "{ worker: 4 }"), ("restart.scope", scope), ("restart.max", "2")]);
        if moves {
            world.hosts = |_, pid| format!("10.0.0.{pid}");
        }
        for act in &acts {
            if world.finished.is_some() {
                break;
            }
            let before = world.gang.rounds;
            play(&mut world, act);
            if world.gang.rounds > before {
                // All or nothing: when a round begins everybody is there, and nobody's last program runs on.
                prop_assert_eq!(world.members.len(), 4, "a round began without all: {:?}", act);
                prop_assert!(world.gang.members.iter().all(|member| member.address.is_some()));
                prop_assert!(world.left_over().is_empty(), "{:?} run on: {:?}", world.left_over(), act);
            }
            for note in &world.gang.book().members {
                prop_assert!(note.restarts <= 2);
            }
            prop_assert!(world.gang.book().restarts <= 2);
        }
        let mut agreed: BTreeMap<(u64, u32), String> = BTreeMap::new();
        for (Start { term, round, .. }, rank, environment) in &world.started {
            let members = &environment["ELASTICDL_MEMBERS"];
            let round = (*term, *round);
            prop_assert_eq!(agreed.entry(round).or_insert_with(|| members.clone()), members);
            prop_assert_eq!(&environment["ELASTICDL_RANK"], &rank.to_string());
        }
        // Whatever happened, it comes to an end once nothing more happens to it.
        for _ in 0..400 {
            if world.finished.is_some() {
                break;
            }
            world.pass(Duration::from_secs(5));
            world.call_all();
            world.call_all();
            for rank in 0..4 {
                world.end(rank, 0);
            }
        }
        prop_assert!(
            matches!(world.finished, Some(Phase::Done | Phase::Failed | Phase::Stopped)),
            "it hangs: {:?}", world.gang
        );
    }
}
