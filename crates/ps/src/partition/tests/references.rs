//! Rows and tensors of a partition beside other implementations of its optimizer: what pushes do to them, from the push to
//! the slots.

use std::collections::BTreeSet;

use elasticdl_spec::TensorShape;

use super::*;
use crate::optimizer::tests::references::{Problem, References, Run};

const ROW: u64 = 7;

/// One table and one tensor, which begin at zero.
fn partition(run: &Run, problem: &Problem) -> Partition {
    let init = Initializer::Zeros;
    let parts = vec![RowPart { width: problem.weights.len(), init }];
    let table = TableShape { name: "t".into(), parts };
    let tensor = TensorShape { name: "d".into(), shape: problem.shape.clone(), init };
    let shape = ModelShape { tables: vec![table], tensors: vec![tensor] };
    let said = serde_json::from_value(serde_json::json!({ "t": { "l2": run.l2 } })).unwrap();
    let model = Model::new("reference", shape, run.optimizer, 1, 1).with_tables(&said);
    Partition::new(Arc::new(model), PartitionId(0), 1)
}

/// Runs that begin at zero and do what ours does without an l2.
fn runs(references: &References) -> impl Iterator<Item = (&Run, &Problem)> {
    let like_ours = references.runs.iter().filter(|run| !run.forgets_the_last_rate && run.l2 == 0.0);
    let runs = like_ours.map(|run| (run, &references.problems[&run.problem]));
    runs.filter(|(_, problem)| problem.weights.iter().all(|weight| *weight == 0.0))
}

/// Pushes every step's gradient to a row and to a tensor. `tensor`: the run that the tensor is held against.
fn follow(references: &References, (run, problem): (&Run, &Problem), tensor: &Run) {
    let mut partition = partition(run, problem);
    let steps = problem.gradients.iter().zip(references.rates(run));
    for (batch, (gradient, factor)) in (0..).zip(steps) {
        let header = PushHeader { factor: *factor, ..header(0, batch, 1) };
        let tables = [RowGradients { ids: &[ROW], gradients: gradient }];
        let push = Push { header, incarnation: 1, version: batch, tables: &tables, tensors: &[gradient] };
        assert_eq!(partition.push(&push).unwrap().status, Status::Ok);
        let mut row = vec![0.0; problem.weights.len()];
        partition.read(0, &[ROW], &mut row);
        run.check_weights(batch as usize + 1, &row);
        tensor.check_weights(batch as usize + 1, partition.tensors()[0].values());
    }
    let (mut weights, mut slots) = (Vec::new(), Vec::new());
    partition.tables()[0].copy_rows(0..1, &mut weights, &mut slots);
    run.check_slots(&slots);
    tensor.check_slots(partition.tensors()[0].slots());
}

#[test]
fn pushes_move_rows_and_tensors_as_the_references_of_every_optimizer_do() {
    let references = References::read();
    let of = |kind: &str| {
        let of = move |(run, _): &(&Run, &Problem)| run.optimizer.name() == kind;
        runs(&references).filter(of).collect::<Vec<_>>()
    };
    for (name, _) in elasticdl_spec::optimizer::OPTIMIZERS {
        // Tensors have an accumulator per element where rows have one each.
        let tensors = of(if name == "adagrad-row" { "adagrad" } else { name });
        let rows = of(name);
        assert!(rows.len() >= 2 && rows.len() == tensors.len(), "{name}: steady and varying rates");
        for (row, (tensor, _)) in rows.into_iter().zip(tensors) {
            assert_eq!(row.0.rates, tensor.rates);
            follow(&references, row, tensor);
        }
    }
}

/// Goal: `l2` of a table is what torch calls weight decay, and tensors have none.
#[test]
fn rows_of_a_table_with_l2_move_as_their_references_do() {
    let references = References::read();
    let decaying: Vec<&Run> = references.runs.iter().filter(|run| run.l2 > 0.0).collect();
    for run in &decaying {
        let same = |(other, _): &(&Run, &Problem)| {
            (other.optimizer, &other.problem, &other.rates) == (run.optimizer, &run.problem, &run.rates)
        };
        let (tensor, problem) = runs(&references).find(same).expect("each has one without");
        follow(&references, (run, problem), tensor);
    }
    let names: BTreeSet<&str> = decaying.iter().map(|run| run.optimizer.name()).collect();
    assert_eq!(Vec::from_iter(names), ["adagrad", "adam", "amsgrad", "momentum", "rmsprop", "sgd"]);
}

/// Defect 7 of the original: AMSGrad moved dense tensors twice, first as Adam.
#[test]
fn a_push_moves_a_dense_tensor_once_with_amsgrad_as_with_adam() {
    let references = References::read();
    for name in ["amsgrad", "adam"] {
        for (run, problem) in runs(&references).filter(|(run, _)| run.optimizer.name() == name) {
            let mut partition = partition(run, problem);
            let mut twice = partition.tensors()[0].clone();
            let rule = Optimizer::new(run.optimizer);
            for (batch, (gradient, factor)) in (0..).zip(problem.gradients.iter().zip(references.rates(run)))
            {
                let header = PushHeader { factor: *factor, ..header(0, batch, 1) };
                let tables = [RowGradients { ids: &[], gradients: &[] }];
                let push =
                    Push { header, incarnation: 1, version: batch, tables: &tables, tensors: &[gradient] };
                partition.push(&push).unwrap();
                let tensor = &partition.tensors()[0];
                run.check_weights(batch as usize + 1, tensor.values());
                assert_eq!(tensor.slots().last(), Some(&(batch as f32 + 1.0)), "one step more of {run}");
                [0, 1].iter().for_each(|_| twice.push(gradient, &rule, *factor));
            }
            let apart = partition.tensors()[0].values().iter().zip(twice.values());
            assert!(apart.into_iter().any(|(once, twice)| (once - twice).abs() > 1e-3), "twice would show");
        }
    }
}
