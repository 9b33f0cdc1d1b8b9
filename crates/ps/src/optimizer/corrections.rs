//! Bias correction, which Adam and its kin share: what their step count does to the step.

use super::decimal;

/// For how many steps the corrections are kept ready; later ones are computed when needed.
const STEPS_READY: usize = 2048;

/// The corrections of a step size and two decays.
#[derive(Debug, Clone)]
pub(super) struct Corrections {
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    /// How the first and the second moment take in a gradient.
    pub mixes: (Mix, Mix),
    /// For step t at t-1. Rows are many and their steps few and alike.
    ready: Vec<Correction>,
}

/// What a step needs to know.
#[derive(Debug, Clone, Copy)]
pub(super) struct Correction {
    /// `lr/(1-β₁ᵗ)`
    pub rate: f32,
    /// `1/√(1-β₂ᵗ)`
    pub root: f32,
}

/// How moments take in a gradient: a part of the old, a part of the new.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mix {
    /// β
    pub keep: f32,
    /// 1-β
    pub take: f32,
}

impl Corrections {
    pub fn new(learning_rate: f32, beta1: f32, beta2: f32) -> Self {
        let (learning_rate, beta1, beta2) = (decimal(learning_rate), decimal(beta1), decimal(beta2));
        let mix = |beta: f64| Mix { keep: beta as f32, take: (1.0 - beta) as f32 };
        let mixes = (mix(beta1), mix(beta2));
        let mut corrections = Corrections { learning_rate, beta1, beta2, mixes, ready: Vec::new() };
        corrections.ready = (1..=STEPS_READY).map(|t| corrections.compute(t as f32)).collect();
        corrections
    }

    /// Counts a step of a row, and tells its correction.
    #[inline(always)]
    pub fn step(&self, count: &mut f32) -> Correction {
        *count += 1.0;
        let ready = self.ready.get(*count as usize - 1);
        ready.copied().unwrap_or_else(|| self.compute(*count))
    }

    #[cold]
    fn compute(&self, step: f32) -> Correction {
        let step = step as i32;
        let rate = self.learning_rate / (1.0 - self.beta1.powi(step));
        let root = 1.0 / (1.0 - self.beta2.powi(step)).sqrt();
        Correction { rate: rate as f32, root: root as f32 }
    }
}
