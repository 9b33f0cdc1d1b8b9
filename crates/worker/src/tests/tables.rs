//! A model of several tables: servers get one message for all of them, and each row comes as wide and as exact as its
//! table says.

use elasticdl_nn::Gradients;
use elasticdl_ps::Model as PsModel;
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{Initializer, ModelShape, OptimizerSpec, Purpose, TableShape, TablesSpec, TaskId};
use elasticdl_wire::ps::{PullMode, PushHeader};

use super::deterministic::Real;
use super::{PARTITIONS, batch, lease, shape};
use crate::dedup::{Deduper, Keys};
use crate::ps_client::PsClient;
use crate::stop::Stop;
use crate::store::{Fence, Pulled, Push, Pushed, Store};

const TASK: TaskId = TaskId { purpose: Purpose::Train, epoch: 0, shard: 3 };
/// Told apart by f32 alone, by f16 too, and by all.
const GRADIENTS: [f32; 3] = [1.0 + 1.0 / 65_536.0, 1.0 + 1.0 / 1024.0, 1.5];
const WIDTHS: [usize; 3] = [2, 5, 3];

/// Three tables whose rows begin as zeros: f32, f16 and bf16.
fn world() -> Real {
    let table = |(name, width): (&str, usize)| TableShape {
        name: name.into(),
        parts: vec![RowPart { width, init: Initializer::Zeros }],
    };
    let tables = ["users", "items", "words"].into_iter().zip(WIDTHS).map(table).collect();
    let shape = ModelShape { tables, ..shape() };
    let said = r#"{ "items": { "wire": "f16" }, "words": { "wire": "bf16" } }"#;
    let said: TablesSpec = serde_json::from_str(said).unwrap();
    let sgd = OptimizerSpec::Sgd { learning_rate: 1.0 };
    Real::of(PsModel::new("test", shape, sgd, 7, PARTITIONS).with_tables(&said), said)
}

#[test]
fn rows_of_all_tables_travel_in_one_message_to_each_server() {
    let world = world();
    world.begin();
    let mut client = PsClient::new(world.client(false, &Stop::default()));
    let (mut keys, mut pulled) = (Keys::default(), Pulled::default());
    Deduper::new(PARTITIONS).dedup(&batch(TASK, 0, 16).ids, &mut keys);
    let mode = PullMode { births: true, tensors: true };
    let Fence::Held { generation, .. } = client.fence(TASK, lease(1)).unwrap() else { panic!("ours") };
    client.pull(&keys, mode, &mut pulled).unwrap();
    for (rows, width) in pulled.rows.iter().zip(WIDTHS) {
        assert_eq!(*rows, vec![0.0; keys.unique() * width]);
    }

    let mut gradients = Gradients::default();
    gradients.reset(&world.partitions.model().shape, &[keys.unique(); WIDTHS.len()]);
    for (table, (width, gradient)) in gradients.tables.iter_mut().zip(WIDTHS.into_iter().zip(GRADIENTS)) {
        // The first weight of a row says which row it is.
        for (place, row) in table.chunks_exact_mut(width).enumerate() {
            row.fill(-gradient);
            row[0] = place as f32;
        }
    }
    let header = PushHeader { task: TASK, batch: 0, lease: lease(1), records: 16, factor: 1.0 };
    let versions = &pulled.versions;
    let push = Push { header, generation, keys: &keys, versions, gradients: &gradients };
    assert_eq!(client.push(&push).unwrap(), Pushed::Applied);

    client.pull(&keys, mode, &mut pulled).unwrap();
    for (rows, (width, gradient)) in pulled.rows.iter().zip(WIDTHS.into_iter().zip(GRADIENTS)) {
        for (place, row) in rows.chunks_exact(width).enumerate() {
            assert_eq!(row[0], -(place as f32), "of {width} weights");
            assert!(
                row[1..].iter().all(|weight| *weight == gradient),
                "{place}: {row:?}, {gradient} is right"
            );
        }
    }
    let told = world.partitions.gauges().unwrap();
    let servers = u64::from(PARTITIONS);
    assert_eq!((told.pulls, told.pushes), (2 * servers, servers), "each server has a partition");
}
