//! What becomes of the learning rate and of large gradients on the way to the servers.

use elasticdl_spec::schedule::{Decay, Position};

use super::*;
use crate::task::Leased;

const SCHEDULE: Schedule = Schedule { warmup_steps: 3, decay: Decay::Cosine { end: 0.1 } };

/// A task of six batches at its place among three.
fn placed(shard: u32) -> Arc<LeasedTask> {
    let LeasedTask { claim, shard: records, .. } = &*train(shard);
    let position = Position { first: 6 * u64::from(shard), total: 18 };
    Arc::new(LeasedTask::new(Leased { position, ..Leased::new(*claim, records.clone()) }))
}

/// Trains three tasks and tells the factor of every push; a partition dies before the push of this number.
fn factors(order: [u32; 3], death: Option<usize>) -> Vec<((u32, u64), f32)> {
    let world = World::shared();
    let born = lives(&world);
    let pushed = Arc::new(Mutex::new(Vec::new()));
    let all = Arc::clone(&pushed);
    let on_push: OnPush = Box::new(move |world, header| {
        let mut pushed = all.lock().unwrap();
        pushed.push(((header.task.shard, header.batch), header.factor));
        if death == Some(pushed.len()) {
            world.restore(1, &born[1]);
        }
    });
    let setup = Setup { schedule: SCHEDULE, on_push: Some(on_push), ..Setup::default() };
    let (ends, _) = setup.run(&world, &order.map(placed));
    assert_eq!(ends.len(), 3);
    let pushed = pushed.lock().unwrap();
    pushed.clone()
}

/// Goal: the factor is that of the batch, whatever the order of tasks, and the same when it is pushed again.
#[test]
fn every_push_has_the_factor_of_its_batch() {
    let expected = |(shard, batch): (u32, u64)| {
        SCHEDULE.factor(Position { first: 6 * u64::from(shard) + batch, total: 18 }, 0)
    };
    let in_order = factors([0, 1, 2], None);
    assert_eq!(in_order.len(), 18);
    assert_eq!((in_order[0].1, in_order[2].1, in_order[17].1), (1.0 / 3.0, 1.0, 0.1));
    assert!(in_order.iter().all(|(at, factor)| *factor == expected(*at)), "{in_order:?}");
    let disturbed = factors([2, 0, 1], Some(4));
    assert!(disturbed.len() > 18, "some were pushed again");
    assert!(disturbed.iter().all(|(at, factor)| *factor == expected(*at)), "{disturbed:?}");
}

#[test]
fn without_a_schedule_every_factor_is_one() {
    let world = World::shared();
    let on_push: OnPush = Box::new(|_, header| assert_eq!(header.factor, 1.0));
    let (ends, _) = Setup { on_push: Some(on_push), ..Setup::default() }.run(&world, &[train(0)]);
    assert!(ends.values().all(|end| *end == done(6)), "{ends:?}");
}

/// Goal: with steps of 1, what a batch changes is its gradient, so that its norm can be measured.
#[test]
fn a_clipped_batch_moves_the_weights_by_no_more_than_the_norm() {
    let moved = |clip| {
        let world = World::shared();
        let first = Setup { depth: 1, batches: 1, clip, ..Setup::default() };
        first.run(&world, &[train(0)]);
        let after = lives(&world);
        let shape = fake::shape();
        let mut squares = 0.0;
        for partition in &after {
            for (id, row) in &partition.rows {
                let mut born = [0.0; 2];
                shape.tables[0].init_row(7, *id, &mut born);
                squares += row.iter().zip(born).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            }
            for (tensor, values) in &partition.tensors {
                let born = shape.tensors[*tensor].init_values(7);
                squares += values.iter().zip(born).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            }
        }
        squares.sqrt()
    };
    let free = moved(ClipSpec::default());
    assert!(free > 0.1, "{free}");
    let norm = moved(ClipSpec { norm: Some(0.05), value: None });
    assert!((norm - 0.05).abs() < 1e-5, "{norm}");
    let unmoved = moved(ClipSpec { norm: Some(100.0), value: None });
    assert_eq!(unmoved, free);
    let value = moved(ClipSpec { norm: None, value: Some(1e-3) });
    assert!(value < 0.02 && value > 1e-3, "{value}");
}
