//! Every optimizer beside those of torch and TensorFlow. What they did is in `references.json`, which
//! `benches/peers/optimizers.py` writes; its README says how.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::*;

/// What other implementations did.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct References {
    /// The program, and the versions of what it imports.
    #[expect(dead_code, reason = "for people")]
    written_by: String,
    versions: BTreeMap<String, String>,
    pub problems: BTreeMap<String, Problem>,
    pub runs: Vec<Run>,
}

/// Weights, and what happens to them.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Problem {
    pub shape: Vec<usize>,
    /// What they begin as.
    pub weights: Vec<f32>,
    /// One for each step.
    pub gradients: Vec<Vec<f32>>,
    /// By how it goes: what the learning rate is multiplied by at each step.
    rates: BTreeMap<String, Vec<f32>>,
}

/// What an optimizer did about a problem.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Run {
    /// Who has computed it.
    pub by: String,
    pub problem: String,
    /// How the learning rate goes.
    pub rates: String,
    pub optimizer: OptimizerSpec,
    /// TensorFlow's FTRL takes the present rate for the last one.
    #[serde(default)]
    pub forgets_the_last_rate: bool,
    /// So much of a weight is added to its gradient.
    #[serde(default)]
    pub l2: f32,
    /// After each step.
    weights: Vec<Vec<f64>>,
    /// After the last step.
    slots: Vec<f64>,
}

impl References {
    pub fn read() -> Self {
        serde_json::from_str(include_str!("../references.json")).unwrap()
    }

    /// The factors of a run's learning rate.
    pub fn rates(&self, run: &Run) -> &[f32] {
        &self.problems[&run.problem].rates[&run.rates]
    }
}

impl Run {
    /// Whether these are the weights after so many steps.
    pub fn check_weights(&self, steps: usize, weights: &[f32]) {
        let due = &self.weights[steps - 1];
        assert!(near(weights, due, 1e-6), "after {steps} steps of {self}: {weights:?}, {due:?}");
    }

    /// Whether these are the slots in the end.
    pub fn check_slots(&self, slots: &[f32]) {
        // FTRL's z is what is left of summands a hundred times as large, and f32 has it to some hundred-thousandths;
        // weights, which come of it, are as near as all others.
        let is_ftrl = self.optimizer.name() == "ftrl";
        let z = if is_ftrl { slots.len() / 2..slots.len() - 1 } else { 0..0 };
        let fits = slots.len() == self.slots.len()
            && near(&slots[..z.start], &self.slots[..z.start], 1e-6)
            && near(&slots[z.clone()], &self.slots[z.clone()], 3e-5)
            && near(&slots[z.end..], &self.slots[z.end..], 1e-6);
        assert!(fits, "slots of {self}: {slots:?}, {:?}", self.slots);
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Run { optimizer, l2, by, problem, rates, .. } = self;
        write!(f, "{optimizer:?} with l2 {l2} by {by}, {problem}, {rates} rates")
    }
}

/// Whether all are the same but for such a part: of themselves, or of 1 where they are less.
fn near(got: &[f32], due: &[f64], tolerance: f64) -> bool {
    let near = |(got, due): (&f32, &f64)| (f64::from(*got) - due).abs() <= tolerance * due.abs().max(1.0);
    got.len() == due.len() && got.iter().zip(due).all(near)
}

/// Goal: weights and slots, step by step, with a learning rate that stays and with one that varies.
#[test]
fn every_optimizer_moves_as_its_reference_does() {
    let references = References::read();
    // Tables add what an l2 asks for.
    for run in references.runs.iter().filter(|run| run.l2 == 0.0) {
        let (rule, problem) = (Optimizer::new(run.optimizer), &references.problems[&run.problem]);
        let mut weights = problem.weights.clone();
        let mut slots = vec![f32::NAN; rule.slots(weights.len())];
        rule.begin(&mut slots);
        for (step, (gradient, factor)) in problem.gradients.iter().zip(references.rates(run)).enumerate() {
            if run.forgets_the_last_rate {
                *slots.last_mut().unwrap() = 0.0;
            }
            rule.apply(&mut weights, &mut slots, gradient, *factor);
            run.check_weights(step + 1, &weights);
        }
        run.check_slots(&slots);
    }
}

/// Goal: nothing is left out of the file above: each optimizer of job files has each problem, with both kinds of rates.
#[test]
fn every_optimizer_of_job_files_has_references() {
    let references = References::read();
    assert!(references.versions.contains_key("torch") && references.versions.contains_key("tensorflow"));
    for (name, _) in elasticdl_spec::optimizer::OPTIMIZERS {
        for (problem, what) in &references.problems {
            for rates in ["steady", "varying"] {
                let is_it = |run: &&Run| {
                    run.optimizer.name() == name
                        && (&run.problem, &*run.rates) == (problem, rates)
                        && !run.forgets_the_last_rate
                        && run.l2 == 0.0
                };
                let run = references.runs.iter().find(is_it);
                let run = run.unwrap_or_else(|| panic!("{name}: nothing for {problem} with {rates} rates"));
                assert_eq!(references.rates(run).len(), what.gradients.len());
                assert_eq!(run.weights.len(), what.gradients.len());
            }
        }
    }
}
