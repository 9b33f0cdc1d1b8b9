use super::*;
use crate::Consistency;
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

fn with(flags: &[(&str, &str)]) -> Result<Resolved, String> {
    let flags = flags.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect();
    resolve(&Inputs { file: Some(GOOD), flags, ..Inputs::default() }).map_err(|e| e.to_string())
}

#[test]
fn a_staleness_of_zero_takes_one_worker_and_makes_the_job_deterministic() {
    let job = with(&[("train.staleness", "0"), ("workers.max", "1")]).unwrap().job;
    assert_eq!(job.train.staleness, Some(0));
    assert!(job.is_deterministic());
    assert_eq!((job.workers.pipeline, job.pipeline_depth()), (4, 1));
    let job = with(&[]).unwrap().job;
    assert_eq!((job.train.staleness, job.is_deterministic(), job.pipeline_depth()), (None, false, 4));
    assert_eq!(
        with(&[("train.staleness", "0")]).unwrap_err(),
        "spec.train.staleness: 0 takes one worker, and spec.workers.max is 16\n  hint: set spec.workers.max to 1, or spec.train.staleness to 1 or more"
    );
    assert_eq!((job.staleness_bound(), job.is_gated()), (None, false));
    for workers in ["1", "2"] {
        let job = with(&[("train.staleness", "3"), ("workers.max", workers)]).unwrap().job;
        assert_eq!((job.staleness_bound(), job.is_gated()), (Some(3), true));
        assert_eq!((job.is_deterministic(), job.pipeline_depth()), (false, 4));
    }
}

#[test]
fn how_workers_come_together_is_said_once_and_has_its_own_keys() {
    let job = with(&[("train.consistency", "synchronous"), ("train.grads_to_wait", "4")]).unwrap().job;
    assert_eq!((job.train.consistency, job.train.grads_to_wait), (Consistency::Synchronous, 4));
    assert_eq!((job.is_staged(), job.is_gated(), job.is_deterministic()), (true, true, false));
    let job = with(&[("train.consistency", "hybrid"), ("train.grads_to_wait", "2")]).unwrap().job;
    assert_eq!((job.is_hybrid(), job.is_staged(), job.is_gated()), (true, false, true));
    let job = with(&[]).unwrap().job;
    assert_eq!((job.train.consistency, job.is_gated()), (Consistency::Asynchronous, false));
    assert_eq!(
        with(&[("train.grads_to_wait", "4")]).unwrap_err(),
        "spec.train.grads_to_wait: the consistency asynchronous has none\n  hint: leave it out; \
         spec.train.consistency has it where it is one of synchronous, hybrid"
    );
    assert_eq!(
        with(&[("train.consistency", "synchronous"), ("train.staleness", "4")]).unwrap_err(),
        "spec.train.staleness: the consistency synchronous has none\n  hint: leave it out; \
         spec.train.consistency has it where it is asynchronous"
    );
    let mut json = serde_json::to_value(&job).unwrap();
    let train = json["train"].as_object_mut().unwrap();
    assert!(train.remove("consistency").is_some() && train.remove("grads_to_wait").is_some());
    assert_eq!(serde_json::from_value::<JobSpec>(json).unwrap(), job, "jobs of before say nothing of it");
}

/// Goal: a laptop gets one worker, a number is a number, and a limit alone leaves the choice to the master.
#[test]
fn the_number_of_workers_is_given_or_found_out_below_a_given_limit() {
    let workers = |flags: &[(&str, &str)]| {
        let job = with(flags).unwrap().job;
        (job.workers.count, job.workers_at_start(), job.workers.max)
    };
    let (count, min, max) = (("workers.count", "3"), ("workers.min", "4"), ("workers.max", "8"));
    assert_eq!(workers(&[]), (Some(1), 1, 16));
    assert_eq!(workers(&[count]), (Some(3), 3, 16));
    assert_eq!(workers(&[count, max]), (Some(3), 3, 8));
    assert_eq!(workers(&[min]), (Some(4), 4, 16), "no limit was given, so nothing is found out");
    assert_eq!(workers(&[max]), (None, 2, 8));
    assert_eq!(workers(&[min, max]), (None, 4, 8));
    assert_eq!(workers(&[("workers.max", "1")]), (Some(1), 1, 1), "there is nothing to find out");
}

#[test]
fn a_pod_is_allowed_what_it_asks_for() {
    assert_eq!(
        with(&[("workers.cpu", "400m"), ("workers.cpu_limit", "0.1")]).unwrap_err(),
        "spec.workers.cpu_limit: 0.1 is less than spec.workers.cpu: 400m\n  hint: raise it, or lower spec.workers.cpu"
    );
    assert!(with(&[("servers.memory", "1Gi"), ("servers.memory_limit", "1024Mi")]).is_ok());
}

#[test]
fn numbers_of_workers_that_contradict_each_other_are_told() {
    let (count, max) = (("workers.count", "3"), ("workers.max", "2"));
    assert_eq!(
        with(&[count, max]).unwrap_err(),
        "spec.workers.count: 3 workers at the start are more than spec.workers.max: 2\n  hint: raise spec.workers.max"
    );
    assert_eq!(
        with(&[count, ("workers.min", "4")]).unwrap_err(),
        "spec.workers.count: 3 workers at the start are fewer than spec.workers.min: 4\n  hint: raise it, lower \
         spec.workers.min, or leave it out and set spec.workers.max: then as many are asked for as are of use"
    );
    assert_eq!(
        with(&[("workers.min", "4"), max]).unwrap_err(),
        "spec.workers.min: at least 4 workers are more than spec.workers.max: 2\n  hint: lower it, or raise \
         spec.workers.max"
    );
}

#[test]
fn a_job_of_before_whose_number_of_workers_was_always_given_is_understood() {
    let job = with(&[("workers.count", "3")]).unwrap().job;
    let json = serde_json::to_value(&job).unwrap();
    assert_eq!(json["workers"]["count"], 3, "as it was written down before");
    assert_eq!(serde_json::from_value::<JobSpec>(json).unwrap(), job);
}

#[test]
fn a_job_of_before_that_says_nothing_of_staleness_or_security_is_understood() {
    let job = with(&[]).unwrap().job;
    let mut json = serde_json::to_value(&job).unwrap();
    json["train"].as_object_mut().unwrap().remove("staleness");
    json.as_object_mut().unwrap().remove("security");
    assert_eq!(serde_json::from_value::<JobSpec>(json).unwrap(), job);
}

#[test]
fn counting_takes_steps_of_exactly_one_and_something_to_count_by() {
    let counting = ("model.zoo", "counting");
    let sgd = ("train.optimizer", "sgd");
    let job = with(&[counting, sgd, ("train.learning_rate", "1")]).unwrap().job;
    assert_eq!(job.model.zoo, crate::Zoo::Counting);
    assert_eq!(
        with(&[counting]).unwrap_err(),
        "spec.train.optimizer: adagrad would not add exactly 1 for each record, as the model counting does\n  hint: set it to sgd\nspec.train.learning_rate: steps of 0.01 would not add exactly 1 for each record, as the model counting does\n  hint: set it to 1"
    );
    let custom = [("data.layout", "custom"), ("data.label", "y"), ("data.numeric", "x")];
    let flags = [&[counting, sgd, ("train.learning_rate", "1.0")][..], &custom[..]].concat();
    assert_eq!(
        with(&flags).unwrap_err(),
        "spec.data.categorical: the model counting counts by the first of these, and there is none\n  hint: name the column to count by"
    );
}

#[test]
fn the_models_of_the_settings_are_those_that_ship() {
    let Some(Setting { rule: Rule::OneOf(names), .. }) = find("model.zoo") else { panic!("a choice") };
    assert_eq!(*names, crate::Zoo::ALL.map(|(name, _)| name));
}

/// A job that runs a program of its own; `command` goes below `spec.command`, `more` below `spec`.
fn command(command: &str, more: &str) -> String {
    format!(
        "apiVersion: elasticdl.org/v1\nkind: ElasticJob\nmetadata: {{ name: own }}\nspec:\n  \
         command: {{ {command} }}\n  {more}\n"
    )
}

#[test]
fn a_program_of_ones_own_needs_neither_model_nor_data() {
    let file =
        command("run: [python, train.py], framework: torch, roles: { worker: 4 }", "workers: { cpu: 2 }");
    let job = resolve(&Inputs { file: Some(&file), ..Inputs::default() }).unwrap().job;
    assert_eq!(job.command.as_ref().unwrap().run, ["python", "train.py"]);
    assert_eq!((job.command.unwrap().size(), job.kubernetes.workers.cpu.as_str()), (4, "2"));
    assert_eq!((job.workers.count, job.workers.max, job.kubernetes.workers_min), (Some(4), 4, 4));
}

#[test]
fn what_a_program_says_itself_is_not_said_in_the_job() {
    let file = command("run: [a]", "model: { zoo: lr }\n  workers: { count: 2, cpu: 1 }");
    assert_eq!(
        problems(&file),
        "spec.model.zoo: a job with spec.command has none: its program says this itself
  hint: leave it out, or leave spec.command out
spec.workers.count: a job with spec.command has none: its program says this itself
  hint: leave it out; spec.command.roles says how many there are"
    );
}

#[test]
fn roles_are_those_of_the_framework() {
    let check = |spec: &str, expected: &str| assert_eq!(problems(&command(spec, "")), expected);
    check(
        "run: [a], framework: tensorflow, roles: { wroker: 2, chief: 2 }",
        "spec.command.roles: tensorflow has no role \"wroker\"
  hint: did you mean worker?
spec.command.roles: tensorflow takes 0 to 1 of chief, and there are 2",
    );
    check(
        "run: [a], framework: dmlc, roles: { worker: 2, server: 1 }",
        "spec.command.roles: dmlc takes exactly 1 of scheduler, and there are 0",
    );
    check(
        "run: [a], roles: { master: 1, worker: 0 }",
        "spec.command.roles: 0 for worker was given; this takes a mapping of names to whole numbers, such as { chief: 1, worker: 3 }",
    );
    check(
        "run: [a], roles: { master: 1 }, success: workers",
        "spec.command.roles: \"master\" is a name of our own
  hint: give it another name; the chief of a tensorflow job is its chief
spec.command.success: there is no worker in spec.command.roles whose success could count
  hint: leave it out, or add the role",
    );
}

#[test]
fn a_program_is_a_list_of_words_and_must_be_named() {
    assert_eq!(
        problems(&command("run: python train.py", "")),
        "spec.command.run: a program has no blanks in its name
  hint: write it as a list, as in [python, train.py]; or as [sh, -c, \"python train.py\"]"
    );
    let alone = problems(&command("framework: torch", ""));
    assert!(alone.contains("spec.command.run: missing beside spec.command.framework"), "{alone}");
}
