use super::*;
use std::time::Duration;

const GOOD: &str = "
apiVersion: elasticdl.org/v1
kind: ElasticJob
metadata: { name: ctr }
spec:
  model: { zoo: deepfm, embedding_dim: 8 }
  data: { train: data/*.tsv, validate: [a.tsv, b.tsv], layout: criteo }
  checkpoint: { every: 60s }
";

fn problems(file: &str) -> String {
    resolve(&Inputs { file: Some(file), ..Inputs::default() }).expect_err("it has problems").to_string()
}

#[test]
fn a_small_file_becomes_a_complete_job() {
    let resolved = resolve(&Inputs { file: Some(GOOD), ..Inputs::default() }).unwrap();
    let job = &resolved.job;
    assert_eq!(job.name, "ctr");
    assert_eq!(job.model.embedding_dim, 8);
    assert_eq!(job.model.hidden, [400, 400, 400]);
    assert_eq!(job.data.train, ["data/*.tsv"]);
    assert_eq!(job.data.validate, ["a.tsv", "b.tsv"]);
    assert_eq!(job.data.layout.categorical.len(), 26);
    assert_eq!(job.checkpoint.every, Some(Duration::from_secs(60)));
    assert_eq!(resolved.values["model.embedding_dim"].1, Source::File);
    assert_eq!(resolved.values["train.batch"].1, Source::Default);
}

#[test]
fn flags_beat_the_environment_and_that_beats_the_file() {
    let resolved = resolve(&Inputs {
        file: Some(GOOD),
        environment: vec![
            ("ELASTICDL_TRAIN_BATCH".into(), "128".into()),
            ("ELASTICDL_MODEL_EMBEDDING_DIM".into(), "4".into()),
            ("ELASTICDL_HOME".into(), "/x".into()),
        ],
        flags: vec![("train.batch".into(), "64".into()), ("model.hidden".into(), "[8, 4]".into())],
    })
    .unwrap();
    assert_eq!((resolved.job.train.batch, resolved.job.model.embedding_dim), (64, 4));
    assert_eq!(resolved.job.model.hidden, [8, 4]);
    assert_eq!(resolved.values["train.batch"].1, Source::Flag);
    assert_eq!(resolved.values["model.embedding_dim"].1, Source::Environment);
}

#[test]
fn every_problem_is_told_at_once_with_its_place_and_a_hint() {
    let file = "
apiVersion: elasticdl.org/v1
kind: ElasticJob
metadata: { name: Ctr_7 }
spec:
  modell: {}
  model: { zoo: deepfn, hiden: [1] }
  data: { train: [], layout: criteo, label: click }
  train: { batch: 0, learning_rate: -1, optimizer: adamm }
  servers: { count: 9, partitions: 4 }
  checkpoint: { every: soon, keep: 0 }
";
    insta::assert_snapshot!(problems(file));
}

#[test]
fn a_custom_layout_checks_its_columns() {
    let file = "
apiVersion: elasticdl.org/v1
kind: ElasticJob
metadata: { name: x }
spec:
  model: { zoo: lr }
  data: { train: a.csv, layout: custom, columns: [click, age, city], label: clik, numeric: age, categorical: [town] }
";
    insta::assert_snapshot!(problems(file));
}

#[test]
fn what_is_no_job_file_is_said_in_one_line() {
    insta::assert_snapshot!([problems(""), problems("- a"), problems("a: [")].join("\n"));
}

#[test]
fn numbers_may_be_written_in_any_usual_way() {
    for (text, rate) in [("1e-3", 0.001), ("0.5", 0.5), ("1", 1.0)] {
        let resolved = resolve(&Inputs {
            file: Some(GOOD),
            flags: vec![("train.learning_rate".into(), text.into())],
            ..Inputs::default()
        });
        match resolved.unwrap().job.train.optimizer {
            crate::OptimizerSpec::Adagrad { learning_rate, .. } => assert_eq!(learning_rate, rate),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn nan_and_infinity_are_no_learning_rates() {
    for text in [".nan", ".inf", "nan", "-0.0", "0"] {
        let outcome = resolve(&Inputs {
            file: Some(GOOD),
            flags: vec![("train.learning_rate".into(), text.into())],
            ..Inputs::default()
        });
        assert!(outcome.is_err(), "{text}");
    }
}
