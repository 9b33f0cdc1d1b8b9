use super::super::{Inputs, Resolved, resolve};
use super::*;
use crate::settings::{Rule, find};
use crate::tables::TableSpec;

/// A job with these keys below `train`, and `more` below `spec`.
fn with(train: &str, more: &str) -> Result<Resolved, String> {
    let file = format!(
        "apiVersion: elasticdl.org/v1\nkind: ElasticJob\nmetadata: {{ name: ctr }}\nspec:\n  \
         model: {{ zoo: deepfm }}\n  data: {{ train: a.tsv, layout: criteo }}\n  train: {{ {train} }}\n  {more}\n"
    );
    resolve(&Inputs { file: Some(&file), ..Inputs::default() }).map_err(|e| e.to_string())
}

fn job(train: &str) -> TrainSpec {
    with(train, "").unwrap().job.train
}

#[test]
fn every_optimizer_has_its_settings_from_the_file() {
    let check = |train: &str, expected: OptimizerSpec| {
        let got = job(train).optimizer;
        assert_eq!(got, expected);
        assert_eq!(train.split([' ', ',']).nth(1), Some(got.name()));
    };
    let learning_rate = 0.5;
    let (beta1, beta2, epsilon) = (0.8, 0.99, 1e-6);
    check("optimizer: sgd, learning_rate: 0.5", OptimizerSpec::Sgd { learning_rate });
    let momentum = 0.75;
    let spec = OptimizerSpec::Momentum { learning_rate, momentum };
    check("optimizer: momentum, learning_rate: 0.5, momentum: 0.75", spec);
    let spec = OptimizerSpec::Nesterov { learning_rate, momentum: 0.9 };
    check("optimizer: nesterov, learning_rate: 0.5", spec);
    let spec = OptimizerSpec::Adagrad { learning_rate, initial_accumulator: 0.1, epsilon: 1e-8 };
    check("optimizer: adagrad, learning_rate: 0.5", spec);
    let spec = OptimizerSpec::AdagradRow { learning_rate, initial_accumulator: 0.0, epsilon };
    check("optimizer: adagrad-row, learning_rate: 0.5, initial_accumulator: 0, epsilon: 1e-6", spec);
    let moments = "learning_rate: 0.5, beta1: 0.8, beta2: 0.99, epsilon: 1e-6";
    let spec = OptimizerSpec::Adam { learning_rate, beta1, beta2, epsilon };
    check(&format!("optimizer: adam, {moments}"), spec);
    let spec = OptimizerSpec::Amsgrad { learning_rate, beta1, beta2, epsilon };
    check(&format!("optimizer: amsgrad, {moments}"), spec);
    let spec = OptimizerSpec::Adamw { learning_rate, beta1, beta2, epsilon, weight_decay: 0.02 };
    check(&format!("optimizer: adamw, {moments}, weight_decay: 0.02"), spec);
    let spec = OptimizerSpec::Rmsprop { learning_rate, rho: 0.9, epsilon };
    check("optimizer: rmsprop, learning_rate: 0.5, rho: 0.9, epsilon: 1e-6", spec);
    let spec = OptimizerSpec::Ftrl { learning_rate, initial_accumulator: 0.1, l1: 0.01, l2: 0.02, beta: 1.0 };
    check("optimizer: ftrl, learning_rate: 0.5, l1: 0.01, l2: 0.02, beta: 1", spec);
}

#[test]
fn a_key_that_the_optimizer_does_not_have_is_refused() {
    assert_eq!(
        with("optimizer: sgd, beta1: 0.9, l1: 0.1", "").unwrap_err(),
        "spec.train.beta1: the optimizer sgd has none
  hint: leave it out; spec.train.optimizer has it where it is one of adam, amsgrad, adamw
spec.train.l1: the optimizer sgd has none
  hint: leave it out; spec.train.optimizer has it where it is ftrl"
    );
    assert_eq!(
        with("momentum: 0.9", "").unwrap_err(),
        "spec.train.momentum: the optimizer adagrad has none
  hint: leave it out; spec.train.optimizer has it where it is one of momentum, nesterov"
    );
    let unknown = with("optimizer: ftrl, initial_acumulator: 1", "").unwrap_err();
    assert!(unknown.contains("unknown key\n  hint: did you mean initial_accumulator?"), "{unknown}");
}

/// Goal: what one may write for an optimizer is what is told of each, and in the help of each key.
#[test]
fn the_keys_of_optimizers_and_schedules_are_settings_whose_help_names_them() {
    for (of, choices) in [("train.optimizer", &OPTIMIZERS[..]), ("train.schedule", &SCHEDULES[..])] {
        let Some(crate::settings::Setting { rule: Rule::OneOf(names), .. }) = find(of) else {
            panic!("{of}")
        };
        assert_eq!(*names, choices.iter().map(|(name, _)| *name).collect::<Vec<_>>());
        for (name, key) in choices.iter().flat_map(|(name, keys)| keys.iter().map(move |key| (name, key))) {
            let help = find(&format!("train.{key}")).expect(key).help;
            let (named, _) = help.split_once(':').expect(help);
            assert!(named.split(", ").any(|other| other == *name), "{name} has {key}: {help}");
        }
    }
}

#[test]
fn schedules_come_from_the_file() {
    assert_eq!(job("").schedule, Schedule::default());
    assert_eq!(job("warmup_steps: 100").schedule, Schedule { warmup_steps: 100, decay: Decay::Constant });
    let decay = Decay::Step { steps: 1000, factor: 0.5 };
    let schedule = job("schedule: step, decay_steps: 1000, decay_factor: 0.5").schedule;
    assert_eq!(schedule, Schedule { warmup_steps: 0, decay });
    let schedule =
        job("schedule: cosine, learning_rate: 0.5, learning_rate_end: 0.125, warmup_steps: 3").schedule;
    assert_eq!(schedule, Schedule { warmup_steps: 3, decay: Decay::Cosine { end: 0.25 } });
}

#[test]
fn schedules_that_cannot_be_are_told() {
    assert_eq!(
        with("schedule: step, learning_rate_end: 0", "").unwrap_err(),
        "spec.train.learning_rate_end: the schedule step has none
  hint: leave it out; spec.train.schedule has it where it is cosine
spec.train.decay_steps: missing
  hint: with schedule: step, say after how many batches the learning rate falls"
    );
    assert_eq!(
        with("schedule: cosine, learning_rate_end: 0.1", "").unwrap_err(),
        "spec.train.learning_rate_end: 0.1 is more than spec.train.learning_rate: 0.01\n  hint: lower it"
    );
}

#[test]
fn gradients_are_clipped_where_the_file_says_so() {
    assert_eq!(job("").clip, ClipSpec { value: None, norm: None });
    assert_eq!(job("clip_norm: 5, clip_value: 0.5").clip, ClipSpec { value: Some(0.5), norm: Some(5.0) });
    assert!(with("clip_norm: 0", "").is_err());
}

#[test]
fn tables_have_settings_of_their_own() {
    let tables = |more| with("", more).map(|resolved| resolved.job.tables);
    let said = tables("tables: { '*': { l2: 1e-6 }, users: { l2: 0.5 } }").unwrap();
    assert_eq!(
        (said.of("users"), said.of("items")),
        (TableSpec { l2: 0.5, ..TableSpec::default() }, TableSpec { l2: 1e-6, ..TableSpec::default() })
    );
    assert_eq!(tables("").unwrap(), Default::default());
    assert_eq!(
        tables("tables: { users: { l3: 1 }, items: { l2: -1 }, all: 7 }").unwrap_err(),
        "spec.tables.users.l3: unknown key
  hint: did you mean l2?
spec.tables.items.l2: -1 was given; this takes a number of at least 0
spec.tables.all: 7 was given; this takes a mapping
  hint: keys here: l2, wire, memory_max, admit_after, evict"
    );
}

#[test]
fn a_table_may_have_a_bound() {
    let tables = |more| with("", more).map(|resolved| resolved.job.tables);
    let said = tables("tables: { '*': { evict: age }, users: { memory_max: 2Gi, admit_after: 3 } }").unwrap();
    let users = said.of("users");
    assert_eq!((users.memory_max, users.admit_after), (Some(2 << 30), 3));
    assert_eq!((said.said_of("users", "memory_max"), said.said_of("users", "evict")), ("users", "*"));
    assert!(tables("tables: { items: { admit_after: 2 } }").is_ok());
    assert_eq!(
        tables("tables: { '*': { evict: use }, items: { memory_max: lots, admit_after: 256 } }").unwrap_err(),
        "spec.tables.items.memory_max: \"lots\" was given; this takes an amount of memory, such as 512Mi or 4Gi
spec.tables.items.admit_after: 256 was given; this takes a whole number from 1 to 255"
    );
    assert_eq!(
        tables("tables: { '*': { evict: use }, items: { evict: luck } }").unwrap_err(),
        "spec.tables.*.evict: nothing is evicted from a table without memory_max
  hint: say how much memory its rows may take, as in memory_max: 2Gi, or leave evict out
spec.tables.items.evict: nothing is evicted from a table without memory_max
  hint: say how much memory its rows may take, as in memory_max: 2Gi, or leave evict out
spec.tables.items.evict: \"luck\" was given; this takes one of use, age"
    );
    assert!(tables("tables: { '*': { memory_max: 1Mi }, items: { evict: age } }").is_ok());
}

#[test]
fn counting_takes_nothing_that_changes_its_steps() {
    let file = "apiVersion: elasticdl.org/v1\nkind: ElasticJob\nmetadata: { name: c }\nspec:\n  model: { zoo: counting }\n  \
                data: { train: a, layout: criteo }\n  train: { optimizer: sgd, learning_rate: 1, clip_norm: 1 }\n  \
                tables: { '*': { l2: 1 } }\n";
    assert_eq!(
        resolve(&Inputs { file: Some(file), ..Inputs::default() }).unwrap_err().to_string(),
        "spec.train.clip_norm: the model counting adds exactly 1 for each record, and this may change that
  hint: leave it out
spec.tables: the model counting adds exactly 1 for each record, and this may change that
  hint: leave it out"
    );
}

#[test]
fn a_job_of_before_that_says_nothing_of_schedules_clipping_or_tables_is_understood() {
    let job = with("", "").unwrap().job;
    let mut json = serde_json::to_value(&job).unwrap();
    json.as_object_mut().unwrap().remove("tables");
    let train = json["train"].as_object_mut().unwrap();
    assert!(train.remove("schedule").is_some() && train.remove("clip").is_some());
    assert_eq!(serde_json::from_value::<crate::JobSpec>(json).unwrap(), job);
}
