//! `train.*`: the rules that concern several of its values, and the typed result.

use super::build::{Values, get, option, texts};
use super::{Resolver, Source, tables};
use crate::job::{ClipSpec, Consistency, TrainSpec};
use crate::optimizer::{OPTIMIZERS, OptimizerSpec};
use crate::schedule::{Decay, Schedule};

/// Every schedule, with the keys of `train` that it has.
const SCHEDULES: [(&str, &[&str]); 3] =
    [("constant", &[]), ("step", &["decay_steps", "decay_factor"]), ("cosine", &["learning_rate_end"])];

/// Every consistency, with the keys of `train` that it has.
const CONSISTENCIES: [(&str, &[&str]); 3] = [
    ("asynchronous", &["staleness", "staleness_modulation"]),
    ("synchronous", &["grads_to_wait"]),
    ("hybrid", &["grads_to_wait", "staleness_modulation"]),
];

/// Problems that no single value shows.
pub fn check(resolver: &mut Resolver, values: &Values) {
    check_keys(resolver, values, "optimizer", &OPTIMIZERS);
    check_keys(resolver, values, "schedule", &SCHEDULES);
    check_keys(resolver, values, "consistency", &CONSISTENCIES);
    check_schedule(resolver, values);
    check_staleness(resolver, values);
    tables::check(resolver);
    check_counting(resolver, values);
}

/// A key that means nothing to what was chosen was meant for something else: it is not passed over.
fn check_keys(resolver: &mut Resolver, values: &Values, of: &str, choices: &[(&str, &[&str])]) {
    let chosen = values.get(format!("train.{of}").as_str()).and_then(|(v, _)| v.as_str());
    let Some((name, own)) = choices.iter().find(|(name, _)| Some(*name) == chosen) else { return };
    let mut keys: Vec<&str> = choices.iter().flat_map(|(_, keys)| keys.iter().copied()).collect();
    keys.sort_unstable();
    keys.dedup();
    for key in keys.into_iter().filter(|key| !own.contains(key)) {
        let said = values.get(format!("train.{key}").as_str());
        if said.is_none_or(|(_, source)| *source == Source::Default) {
            continue;
        }
        let having = choices.iter().filter(|(_, keys)| keys.contains(&key)).map(|(name, _)| *name);
        let having = having.collect::<Vec<_>>().join(", ");
        let what = format!("the {of} {name} has none");
        let hint = format!("leave it out; spec.train.{of} has it where it is one of {having}");
        let hint = if having.contains(',') { hint } else { hint.replace("is one of ", "is ") };
        resolver.problem(&format!("spec.train.{key}"), what, Some(hint));
    }
}

fn check_schedule(resolver: &mut Resolver, values: &Values) {
    let number = |path| values.get(path).and_then(|(v, _)| v.as_f64());
    match values.get("train.schedule").and_then(|(v, _)| v.as_str()) {
        Some("step") if !values.contains_key("train.decay_steps") => {
            let hint = Some("with schedule: step, say after how many batches the learning rate falls".into());
            resolver.problem("spec.train.decay_steps", "missing".into(), hint);
        }
        Some("cosine") => {
            let (rate, end) = (number("train.learning_rate"), number("train.learning_rate_end"));
            if let (Some(rate), Some(end)) = (rate, end)
                && end > rate
            {
                let what = format!("{end} is more than spec.train.learning_rate: {rate}");
                resolver.problem("spec.train.learning_rate_end", what, Some("lower it".into()));
            }
        }
        _ => {}
    }
}

fn check_staleness(resolver: &mut Resolver, values: &Values) {
    let number = |path| values.get(path).and_then(|(v, _)| v.as_u64());
    match (number("train.staleness"), number("workers.max")) {
        (Some(0), Some(max)) if max != 1 => {
            let what = format!("0 takes one worker, and spec.workers.max is {max}");
            let hint = "set spec.workers.max to 1, or spec.train.staleness to 1 or more";
            resolver.problem("spec.train.staleness", what, Some(hint.into()));
        }
        _ => {}
    }
}

/// A model that counts needs steps of exactly 1.
fn check_counting(resolver: &mut Resolver, values: &Values) {
    let text = |path| values.get(path).and_then(|(v, _)| v.as_str());
    if text("model.zoo") != Some("counting") {
        return;
    }
    if let Some(optimizer) = text("train.optimizer").filter(|name| *name != "sgd") {
        let what = format!("{optimizer} would not add exactly 1 for each record, as the model counting does");
        resolver.problem("spec.train.optimizer", what, Some("set it to sgd".into()));
    }
    let rate = values.get("train.learning_rate").and_then(|(v, _)| v.as_f64());
    if let Some(rate) = rate.filter(|rate| *rate != 1.0) {
        let what =
            format!("steps of {rate} would not add exactly 1 for each record, as the model counting does");
        resolver.problem("spec.train.learning_rate", what, Some("set it to 1".into()));
    }
    const CHANGING: [&str; 5] =
        ["train.schedule", "train.warmup_steps", "train.clip_value", "train.clip_norm", "tables"];
    if text("train.consistency") == Some("synchronous") {
        let what = "the model counting adds exactly 1 for each record, and not a part of a mean";
        resolver.problem("spec.train.consistency", what.into(), Some("leave it out".into()));
    }
    for path in CHANGING {
        if values.get(path).is_some_and(|(_, source)| *source != Source::Default) {
            let what = "the model counting adds exactly 1 for each record, and this may change that";
            resolver.problem(&format!("spec.{path}"), what.into(), Some("leave it out".into()));
        }
    }
    if text("data.layout") == Some("custom") && texts(values, "data.categorical").is_empty() {
        let what = "the model counting counts by the first of these, and there is none".to_string();
        resolver.problem("spec.data.categorical", what, Some("name the column to count by".into()));
    }
}

/// The typed section. Every value has been checked.
pub fn spec(v: &Values) -> TrainSpec {
    TrainSpec {
        epochs: get(v, "train.epochs"),
        batch: get(v, "train.batch"),
        optimizer: optimizer(v),
        schedule: Schedule { warmup_steps: get(v, "train.warmup_steps"), decay: decay(v) },
        clip: ClipSpec { value: option(v, "train.clip_value"), norm: option(v, "train.clip_norm") },
        seed: get(v, "train.seed"),
        staleness: option(v, "train.staleness"),
        consistency: consistency(v),
        grads_to_wait: get(v, "train.grads_to_wait"),
        staleness_modulation: get(v, "train.staleness_modulation"),
    }
}

fn consistency(v: &Values) -> Consistency {
    let said: String = get(v, "train.consistency");
    let known = Consistency::ALL.iter().find(|(name, _)| *name == said);
    known.expect("the rule of train.consistency lets no other through").1
}

fn decay(v: &Values) -> Decay {
    match get::<String>(v, "train.schedule").as_str() {
        "constant" => Decay::Constant,
        "step" => Decay::Step { steps: get(v, "train.decay_steps"), factor: get(v, "train.decay_factor") },
        "cosine" => {
            let (rate, end): (f64, f64) = (get(v, "train.learning_rate"), get(v, "train.learning_rate_end"));
            Decay::Cosine { end: end / rate }
        }
        other => unreachable!("the rule of train.schedule let {other} through"),
    }
}

fn optimizer(v: &Values) -> OptimizerSpec {
    let number = |key: &str| get::<f32>(v, &format!("train.{key}"));
    let learning_rate = number("learning_rate");
    let (momentum, rho, epsilon) = (number("momentum"), number("rho"), number("epsilon"));
    let (beta1, beta2) = (number("beta1"), number("beta2"));
    let initial_accumulator = number("initial_accumulator");
    match get::<String>(v, "train.optimizer").as_str() {
        "sgd" => OptimizerSpec::Sgd { learning_rate },
        "momentum" => OptimizerSpec::Momentum { learning_rate, momentum },
        "nesterov" => OptimizerSpec::Nesterov { learning_rate, momentum },
        "adagrad" => OptimizerSpec::Adagrad { learning_rate, initial_accumulator, epsilon },
        "adagrad-row" => OptimizerSpec::AdagradRow { learning_rate, initial_accumulator, epsilon },
        "adam" => OptimizerSpec::Adam { learning_rate, beta1, beta2, epsilon },
        "amsgrad" => OptimizerSpec::Amsgrad { learning_rate, beta1, beta2, epsilon },
        "adamw" => {
            let weight_decay = number("weight_decay");
            OptimizerSpec::Adamw { learning_rate, beta1, beta2, epsilon, weight_decay }
        }
        "rmsprop" => OptimizerSpec::Rmsprop { learning_rate, rho, epsilon },
        "ftrl" => {
            let (l1, l2, beta) = (number("l1"), number("l2"), number("beta"));
            OptimizerSpec::Ftrl { learning_rate, initial_accumulator, l1, l2, beta }
        }
        other => unreachable!("the rule of train.optimizer let {other} through"),
    }
}

#[cfg(test)]
mod tests;
