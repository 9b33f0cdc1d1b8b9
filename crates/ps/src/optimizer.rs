//! Optimizers: how a gradient changes weights and their slots.
//!
//! One file per formula. A rule knows nothing of rows, tensors or steps of the job: it sees the weights
//! of one row (or of one whole tensor), its slots, and the gradient. What it must remember, a step count
//! for instance, is in the slots, so that a checkpoint holds it without knowing of it.

mod adagrad;
mod adam;
mod sgd;

use elasticdl_spec::OptimizerSpec;

pub use adagrad::Adagrad;
pub use adam::Adam;
pub use sgd::Sgd;

/// What an optimizer does to one row or one tensor.
pub trait Rule {
    /// How many slots go with so many weights.
    fn slots(&self, weights: usize) -> usize;

    /// Writes what slots start with. Never drawn from an initializer: a negative second moment has no root.
    fn begin(&self, slots: &mut [f32]);

    /// Moves the weights by a gradient of the same length.
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32]);
}

/// The optimizer of a job.
#[derive(Debug, Clone)]
pub enum Optimizer {
    /// Plain gradient descent.
    Sgd(Sgd),
    /// Adagrad per element.
    Adagrad(Adagrad),
    /// Adam with bias correction.
    Adam(Adam),
}

impl Optimizer {
    /// The optimizer that a job asks for.
    pub fn new(spec: OptimizerSpec) -> Self {
        match spec {
            OptimizerSpec::Sgd { learning_rate } => Optimizer::Sgd(Sgd { learning_rate }),
            OptimizerSpec::Adagrad { learning_rate, initial_accumulator, epsilon } => {
                Optimizer::Adagrad(Adagrad { learning_rate, initial_accumulator, epsilon })
            }
            OptimizerSpec::Adam { learning_rate, beta1, beta2, epsilon } => {
                Optimizer::Adam(Adam::new(learning_rate, beta1, beta2, epsilon))
            }
        }
    }
}

impl Rule for Optimizer {
    fn slots(&self, weights: usize) -> usize {
        match self {
            Optimizer::Sgd(rule) => rule.slots(weights),
            Optimizer::Adagrad(rule) => rule.slots(weights),
            Optimizer::Adam(rule) => rule.slots(weights),
        }
    }

    fn begin(&self, slots: &mut [f32]) {
        match self {
            Optimizer::Sgd(rule) => rule.begin(slots),
            Optimizer::Adagrad(rule) => rule.begin(slots),
            Optimizer::Adam(rule) => rule.begin(slots),
        }
    }

    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32]) {
        match self {
            Optimizer::Sgd(rule) => rule.apply(weights, slots, gradient),
            Optimizer::Adagrad(rule) => rule.apply(weights, slots, gradient),
            Optimizer::Adam(rule) => rule.apply(weights, slots, gradient),
        }
    }
}

/// The name of an optimizer's kind, as job files spell it.
pub(crate) fn name(spec: OptimizerSpec) -> &'static str {
    match spec {
        OptimizerSpec::Sgd { .. } => "sgd",
        OptimizerSpec::Adagrad { .. } => "adagrad",
        OptimizerSpec::Adam { .. } => "adam",
    }
}

/// The decimal number that a person wrote, from its nearest f32.
///
/// `0.999_f32` is 0.99900001…, and `1 - beta` would be off by 1e-5 of itself; torch computes these in
/// f64 from the decimal text. The shortest decimal that rounds to the f32 is that text again.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().expect("a printed float is a float")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies the gradients in turn and compares weights and slots with `expected` after each.
    pub(super) fn check(rule: &impl Rule, weights: &[f32], steps: &[&[f32]], expected: &[(&[f32], &[f32])]) {
        let mut weights = weights.to_vec();
        let mut slots = vec![f32::NAN; rule.slots(weights.len())];
        rule.begin(&mut slots);
        for (step, (gradient, (w, s))) in steps.iter().zip(expected).enumerate() {
            rule.apply(&mut weights, &mut slots, gradient);
            for (got, want) in weights.iter().zip(*w).chain(slots.iter().zip(*s)) {
                let error = (got - want).abs();
                assert!(error <= 1e-6 * want.abs().max(1.0), "step {step}: {weights:?} {slots:?}");
            }
        }
    }

    #[test]
    fn decimals_come_back_as_written() {
        assert_eq!(decimal(0.999), 0.999);
        assert_eq!(decimal(0.9), 0.9);
        assert_eq!(decimal(1e-8), 1e-8);
    }

    /// Defect 4 of the original: slots drawn from the embedding initializer gave NaN.
    #[test]
    fn slots_start_where_the_optimizer_says_and_never_below_zero() {
        let specs = [
            OptimizerSpec::Sgd { learning_rate: 0.1 },
            OptimizerSpec::Adagrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-10 },
            OptimizerSpec::Adam { learning_rate: 0.1, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 },
        ];
        for spec in specs {
            let optimizer = Optimizer::new(spec);
            let mut slots = vec![-1.0; optimizer.slots(4)];
            optimizer.begin(&mut slots);
            let start = if matches!(spec, OptimizerSpec::Adagrad { .. }) { 0.1 } else { 0.0 };
            assert!(slots.iter().all(|s| *s == start), "{spec:?} {slots:?}");
            let mut weights = [0.5; 4];
            optimizer.apply(&mut weights, &mut slots, &[0.0, 1.0, -1.0, 1e-20]);
            assert!(weights.iter().chain(&slots).all(|x| x.is_finite()), "{spec:?} {weights:?}");
        }
    }
}
