//! Learning rates that go by the place in the job: every lease tells where its task stands.

use super::*;

/// Ten records a shard are three batches.
const COSINE: [(&str, &str); 3] = [("train.schedule", "cosine"), ("train.batch", "4"), ("train.epochs", "2")];

fn position(leased: &Leased) -> (u64, u64) {
    (leased.first_step, leased.steps)
}

#[test]
fn tasks_stand_one_after_the_other_in_the_order_of_their_leases() {
    let mut world = World::training(&COSINE, 4);
    for n in 0..8 {
        let leased = world.lease(0).unwrap();
        assert_eq!(position(&leased), (3 * n, 24), "{}", leased.task);
        assert!(world.train(0, &leased));
    }
    assert!(world.lease(0).is_none());
}

/// Goal: a batch that is trained again has the rate that it had, whoever died in between.
#[test]
fn a_task_that_is_leased_again_stands_where_it_stood() {
    let mut world = World::training(&COSINE, 4);
    assert!(world.train_one(0));
    let (first, second) = (world.lease(0).unwrap(), world.lease(1).unwrap());
    world.kill(Role::Worker, 0);
    assert!(world.train_one(1), "another one, or the freed one: it stands where it stood");
    let mut world = world.master_dies();
    world.tick(1);
    world.kill(Role::Server, 1);
    world.tick(1);
    world.tick(1_000);
    world.serve();
    let known = [first, second];
    let mut seen = 0;
    while let Some(leased) = world.lease(1) {
        for known in known.iter().filter(|known| known.task == leased.task) {
            assert_eq!(position(&leased), position(known));
            seen += 1;
        }
        assert!(world.train(1, &leased));
    }
    assert!(seen > 0, "what was leased before the deaths was leased again");
}

#[test]
fn nothing_is_leased_before_all_places_are_known() {
    let mut world = World::new(&COSINE);
    world.tick(1);
    world.serve();
    let shard = Shard { path: "t".into(), first: 0, records: Some(10), offset: 0, fingerprint: 1 };
    world.step(Event::ShardFound(Purpose::Train, shard));
    assert!(world.lease(0).is_none());
    world.step(Event::AllFound(Purpose::Train));
    assert_eq!(world.lease(0).map(|leased| position(&leased)), Some((0, 6)));
}

#[test]
fn a_steady_rate_waits_for_nothing_and_needs_no_place() {
    let mut world = World::new(&[]);
    world.tick(1);
    world.serve();
    let shard = Shard { path: "t".into(), first: 0, records: None, offset: 0, fingerprint: 1 };
    world.step(Event::ShardFound(Purpose::Train, shard));
    assert_eq!(world.lease(0).map(|leased| position(&leased)), Some((0, 0)));
}
