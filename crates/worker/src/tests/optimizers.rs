//! Every optimizer of job files learns: from the text of a job to real partitions, through real stages and frames.

use std::sync::Arc;

use elasticdl_spec::optimizer::OPTIMIZERS;
use elasticdl_spec::resolve::{Inputs, resolve};
use elasticdl_spec::{JobSpec, Position, TaskId};
use tokio::sync::mpsc::unbounded_channel;

use super::deterministic::Real;
use super::{PARTITIONS, ToyModel, ToySource, leased_at, shape};
use crate::gauges::Gauges;
use crate::pipeline::{Config, Event, Outcome, Pipeline};
use crate::ps_client::PsClient;
use crate::stop::Stop;

const TASKS: u64 = 8;
const BATCHES: u64 = 12;

fn job(train: &str, tables: &str) -> JobSpec {
    let file = format!(
        "{{apiVersion: elasticdl.org/v1, kind: ElasticJob, metadata: {{name: j}}, spec: {{model: {{zoo: lr}}, \
         data: {{train: t, layout: criteo}}, train: {{{train}}}, tables: {{{tables}}}}}}}"
    );
    resolve(&Inputs { file: Some(&file), ..Inputs::default() }).unwrap().job
}

/// Trains all tasks once; the mean loss of the first batch, and that of the second half of them.
fn losses(job: &JobSpec) -> (f64, f64) {
    let world = Real::with(job.train.optimizer, job.tables.clone());
    world.begin();
    let (stop, (events, mut happening)) = (Stop::default(), unbounded_channel());
    let client = world.client(false, &stop);
    let mut stages = Pipeline::start(Config {
        shape: Arc::new(shape()),
        partitions: PARTITIONS,
        depth: 1,
        together: crate::pipeline::Together::Freely,
        read_ahead: 2,
        bad_records_max: 0,
        schedule: job.train.schedule,
        clip: job.train.clip,
        models: vec![ToyModel::boxed()],
        source: Box::new(ToySource { batches: BATCHES, spoil: Default::default() }),
        pulls: Box::new(PsClient::new(client.clone())),
        pushes: Box::new(PsClient::new(client)),
        stop,
        gauges: Arc::new(Gauges::default()),
        events,
    })
    .unwrap();
    let (mut losses, mut given, mut done) = (Vec::new(), 0, 0);
    while done < TASKS {
        match happening.blocking_recv().expect("the stages run") {
            Event::Wanted if given < TASKS => {
                let position = Position { first: given * BATCHES, total: TASKS * BATCHES };
                stages.give(leased_at(TaskId::train(0, given as u32), given + 1, position));
                given += 1;
            }
            Event::Applied { records, loss_sum, .. } => losses.push(loss_sum / records as f64),
            Event::Ended { outcome: Outcome::Done { .. }, .. } => done += 1,
            Event::Ended { outcome, .. } => panic!("{outcome:?}"),
            Event::Broken(error) => panic!("{error}"),
            _ => {}
        }
    }
    stages.close();
    stages.join();
    let second_half = &losses[losses.len() / 2..];
    (losses[0], second_half.iter().sum::<f64>() / second_half.len() as f64)
}

/// Goal: records are labelled 1 in 3 of 10 cases, so that the loss goes from ln 2 towards 0.61.
#[test]
fn every_optimizer_learns() {
    let rates = [
        ("sgd", "0.3"),
        ("momentum", "0.03"),
        ("nesterov", "0.03"),
        ("adagrad", "0.1"),
        ("adagrad-row", "0.1"),
        ("adam", "0.02"),
        ("amsgrad", "0.02"),
        ("adamw", "0.02"),
        ("rmsprop", "0.01"),
        ("ftrl", "0.1, l1: 1e-3, l2: 1e-3"),
    ];
    assert_eq!(rates.map(|(name, _)| name), OPTIMIZERS.map(|(name, _)| name));
    for (name, rate) in rates {
        for more in ["", ", schedule: cosine, learning_rate_end: 1e-3, warmup_steps: 8, clip_norm: 1"] {
            let train = format!("optimizer: {name}, learning_rate: {rate}{more}");
            let (start, end) = losses(&job(&train, ""));
            assert!((start - std::f64::consts::LN_2).abs() < 0.05, "{train}: {start}");
            assert!(end < 0.645 && end < start - 0.03, "{train}: {start} {end}");
        }
    }
}

/// Goal: what is rounded on its way is still trained on, to about the same loss and not to the very same.
#[test]
fn every_precision_learns() {
    let train = "optimizer: adagrad, learning_rate: 0.1";
    let (_, exact) = losses(&job(train, ""));
    for precision in ["bf16", "f16"] {
        let (_, rounded) = losses(&job(train, &format!("'*': {{wire: {precision}}}")));
        assert!((rounded - exact).abs() < 1e-3 && rounded != exact, "{precision}: {rounded} for {exact}");
    }
}
