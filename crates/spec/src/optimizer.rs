//! An optimizer with its settings, and which of `train.*` belong to which. The formulas are in
//! `ps/src/optimizer/`.

use serde::{Deserialize, Serialize};

/// An optimizer with its settings.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum OptimizerSpec {
    /// Plain gradient descent.
    Sgd {
        /// Step size.
        learning_rate: f32,
    },
    /// Gradient descent with momentum.
    Momentum {
        /// Step size.
        learning_rate: f32,
        /// How much of the velocity is kept.
        momentum: f32,
    },
    /// The same with Nesterov's look ahead.
    Nesterov {
        /// Step size.
        learning_rate: f32,
        /// How much of the velocity is kept.
        momentum: f32,
    },
    /// Adagrad per element.
    Adagrad {
        /// Step size.
        learning_rate: f32,
        /// What the accumulator starts with.
        initial_accumulator: f32,
        /// Added to the root.
        epsilon: f32,
    },
    /// Adagrad with one accumulator per row; dense tensors have one per element.
    AdagradRow {
        /// Step size.
        learning_rate: f32,
        /// What the accumulator starts with.
        initial_accumulator: f32,
        /// Added to the root.
        epsilon: f32,
    },
    /// Adam with bias correction; steps are counted per row (per tensor for dense ones).
    Adam {
        /// Step size.
        learning_rate: f32,
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the root.
        epsilon: f32,
    },
    /// Adam whose second moment never shrinks.
    Amsgrad {
        /// Step size.
        learning_rate: f32,
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the root.
        epsilon: f32,
    },
    /// Adam with decoupled decay of the weights.
    Adamw {
        /// Step size.
        learning_rate: f32,
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the root.
        epsilon: f32,
        /// With each step a weight loses this part of itself, times the step size.
        weight_decay: f32,
    },
    /// RMSprop.
    Rmsprop {
        /// Step size.
        learning_rate: f32,
        /// Decay of the mean of squares.
        rho: f32,
        /// Added to the root.
        epsilon: f32,
    },
    /// FTRL-Proximal.
    Ftrl {
        /// Step size.
        learning_rate: f32,
        /// What the accumulator starts with.
        initial_accumulator: f32,
        /// Weights whose gradients sum up to no more than this are zero.
        l1: f32,
        /// Pull of the weights towards zero.
        l2: f32,
        /// Added to the root.
        beta: f32,
    },
}

/// Every optimizer by its name in job files, with the keys of `train` that it has beside `learning_rate`.
pub const OPTIMIZERS: [(&str, &[&str]); 10] = [
    ("sgd", &[]),
    ("momentum", &["momentum"]),
    ("nesterov", &["momentum"]),
    ("adagrad", &["initial_accumulator", "epsilon"]),
    ("adagrad-row", &["initial_accumulator", "epsilon"]),
    ("adam", &["beta1", "beta2", "epsilon"]),
    ("amsgrad", &["beta1", "beta2", "epsilon"]),
    ("adamw", &["beta1", "beta2", "epsilon", "weight_decay"]),
    ("rmsprop", &["rho", "epsilon"]),
    ("ftrl", &["initial_accumulator", "l1", "l2", "beta"]),
];

/// The names of [`OPTIMIZERS`].
pub(crate) const NAMES: [&str; OPTIMIZERS.len()] = {
    let mut names = [""; OPTIMIZERS.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = OPTIMIZERS[i].0;
        i += 1;
    }
    names
};

impl OptimizerSpec {
    /// Its name in job files.
    pub fn name(&self) -> &'static str {
        match self {
            OptimizerSpec::Sgd { .. } => "sgd",
            OptimizerSpec::Momentum { .. } => "momentum",
            OptimizerSpec::Nesterov { .. } => "nesterov",
            OptimizerSpec::Adagrad { .. } => "adagrad",
            OptimizerSpec::AdagradRow { .. } => "adagrad-row",
            OptimizerSpec::Adam { .. } => "adam",
            OptimizerSpec::Amsgrad { .. } => "amsgrad",
            OptimizerSpec::Adamw { .. } => "adamw",
            OptimizerSpec::Rmsprop { .. } => "rmsprop",
            OptimizerSpec::Ftrl { .. } => "ftrl",
        }
    }
}
