//! Optimizers: how a gradient changes weights and their slots.
//!
//! One file per formula. A rule knows nothing of rows, tensors or steps of the job: it sees the weights
//! of one row (or of one whole tensor), its slots, the gradient, and what the learning rate is multiplied by
//! for this batch. What it must remember, a step count for instance, is in the slots, so that a checkpoint
//! holds it without knowing of it. Rows are moved when a gradient comes for them, and only then: they count
//! their own steps.

mod adagrad;
mod adagrad_row;
mod adam;
mod adamw;
mod amsgrad;
mod corrections;
mod ftrl;
mod momentum;
mod rmsprop;
mod sgd;

use elasticdl_spec::OptimizerSpec;

pub use adagrad::Adagrad;
pub use adagrad_row::AdagradRow;
pub use adam::Adam;
pub use adamw::Adamw;
pub use amsgrad::Amsgrad;
pub use ftrl::Ftrl;
pub use momentum::{Momentum, Nesterov};
pub use rmsprop::Rmsprop;
pub use sgd::Sgd;

/// What an optimizer does to one row or one tensor.
pub trait Rule {
    /// How many slots go with so many weights.
    fn slots(&self, weights: usize) -> usize;

    /// Writes what slots start with, zeros as a rule. Never drawn from an initializer: a negative second moment has no
    /// root.
    fn begin(&self, slots: &mut [f32]) {
        slots.fill(0.0);
    }

    /// Moves the weights by a gradient of the same length, with `factor` times the learning rate.
    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32);
}

/// The optimizer of a job.
#[derive(Debug, Clone)]
pub enum Optimizer {
    /// Plain gradient descent.
    Sgd(Sgd),
    /// Gradient descent with momentum.
    Momentum(Momentum),
    /// Gradient descent with Nesterov's momentum.
    Nesterov(Nesterov),
    /// Adagrad per element.
    Adagrad(Adagrad),
    /// Adagrad per row.
    AdagradRow(AdagradRow),
    /// Adam with bias correction.
    Adam(Adam),
    /// AMSGrad.
    Amsgrad(Amsgrad),
    /// Adam with decoupled decay.
    Adamw(Adamw),
    /// RMSprop.
    Rmsprop(Rmsprop),
    /// FTRL-Proximal.
    Ftrl(Ftrl),
}

/// Does something with the rule inside of an [`Optimizer`]; compiled for each rule by itself, so that loops over
/// rows ask once which it is.
macro_rules! with_rule {
    ($optimizer:expr, $rule:ident => $body:expr) => {
        match $optimizer {
            $crate::optimizer::Optimizer::Sgd($rule) => $body,
            $crate::optimizer::Optimizer::Momentum($rule) => $body,
            $crate::optimizer::Optimizer::Nesterov($rule) => $body,
            $crate::optimizer::Optimizer::Adagrad($rule) => $body,
            $crate::optimizer::Optimizer::AdagradRow($rule) => $body,
            $crate::optimizer::Optimizer::Adam($rule) => $body,
            $crate::optimizer::Optimizer::Amsgrad($rule) => $body,
            $crate::optimizer::Optimizer::Adamw($rule) => $body,
            $crate::optimizer::Optimizer::Rmsprop($rule) => $body,
            $crate::optimizer::Optimizer::Ftrl($rule) => $body,
        }
    };
}
pub(crate) use with_rule;

impl Optimizer {
    /// The optimizer that a job asks for.
    pub fn new(spec: OptimizerSpec) -> Self {
        match spec {
            OptimizerSpec::Sgd { learning_rate } => Optimizer::Sgd(Sgd { learning_rate }),
            OptimizerSpec::Momentum { learning_rate, momentum } => {
                Optimizer::Momentum(Momentum { learning_rate, momentum })
            }
            OptimizerSpec::Nesterov { learning_rate, momentum } => {
                Optimizer::Nesterov(Nesterov { learning_rate, momentum })
            }
            OptimizerSpec::Adagrad { learning_rate, initial_accumulator, epsilon } => {
                Optimizer::Adagrad(Adagrad { learning_rate, initial_accumulator, epsilon })
            }
            OptimizerSpec::AdagradRow { learning_rate, initial_accumulator, epsilon } => {
                Optimizer::AdagradRow(AdagradRow { learning_rate, initial_accumulator, epsilon })
            }
            OptimizerSpec::Adam { learning_rate, beta1, beta2, epsilon } => {
                Optimizer::Adam(Adam::new(learning_rate, beta1, beta2, epsilon))
            }
            OptimizerSpec::Amsgrad { learning_rate, beta1, beta2, epsilon } => {
                Optimizer::Amsgrad(Amsgrad::new(learning_rate, beta1, beta2, epsilon))
            }
            OptimizerSpec::Adamw { learning_rate, beta1, beta2, epsilon, weight_decay } => {
                Optimizer::Adamw(Adamw::new(learning_rate, beta1, beta2, epsilon, weight_decay))
            }
            OptimizerSpec::Rmsprop { learning_rate, rho, epsilon } => {
                Optimizer::Rmsprop(Rmsprop::new(learning_rate, rho, epsilon))
            }
            OptimizerSpec::Ftrl { learning_rate, initial_accumulator, l1, l2, beta } => {
                Optimizer::Ftrl(Ftrl { learning_rate, initial_accumulator, l1, l2, beta })
            }
        }
    }

    /// The optimizer of the dense tensors beside rows with this one: the same, but for Adagrad per row, which
    /// would take a whole tensor for one row.
    pub fn of_tensors(&self) -> Self {
        match self {
            Optimizer::AdagradRow(rule) => {
                let AdagradRow { learning_rate, initial_accumulator, epsilon } = *rule;
                Optimizer::Adagrad(Adagrad { learning_rate, initial_accumulator, epsilon })
            }
            other => other.clone(),
        }
    }
}

impl Rule for Optimizer {
    fn slots(&self, weights: usize) -> usize {
        with_rule!(self, rule => rule.slots(weights))
    }

    fn begin(&self, slots: &mut [f32]) {
        with_rule!(self, rule => rule.begin(slots))
    }

    fn apply(&self, weights: &mut [f32], slots: &mut [f32], gradient: &[f32], factor: f32) {
        with_rule!(self, rule => rule.apply(weights, slots, gradient, factor))
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
pub(crate) mod tests;
