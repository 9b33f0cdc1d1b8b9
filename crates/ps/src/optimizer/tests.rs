//! What holds of every optimizer. Their formulas are held against other implementations in `tests/references.rs`.

pub(crate) mod references;

use super::*;

/// Every optimizer, with usual settings.
pub(crate) const ALL: [OptimizerSpec; 10] = {
    let (learning_rate, momentum) = (0.1, 0.9);
    let (initial_accumulator, epsilon) = (0.1, 1e-8);
    let (beta1, beta2) = (0.9, 0.999);
    [
        OptimizerSpec::Sgd { learning_rate },
        OptimizerSpec::Momentum { learning_rate, momentum },
        OptimizerSpec::Nesterov { learning_rate, momentum },
        OptimizerSpec::Adagrad { learning_rate, initial_accumulator, epsilon },
        OptimizerSpec::AdagradRow { learning_rate, initial_accumulator, epsilon },
        OptimizerSpec::Adam { learning_rate, beta1, beta2, epsilon },
        OptimizerSpec::Amsgrad { learning_rate, beta1, beta2, epsilon },
        OptimizerSpec::Adamw { learning_rate, beta1, beta2, epsilon, weight_decay: 0.01 },
        OptimizerSpec::Rmsprop { learning_rate, rho: 0.99, epsilon },
        OptimizerSpec::Ftrl { learning_rate, initial_accumulator, l1: 0.01, l2: 0.01, beta: 1.0 },
    ]
};

#[test]
fn every_optimizer_of_job_files_is_tried() {
    assert_eq!(ALL.map(|spec| spec.name()), elasticdl_spec::optimizer::OPTIMIZERS.map(|(name, _)| name));
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
    for spec in ALL {
        let optimizer = Optimizer::new(spec);
        let mut slots = vec![-1.0; optimizer.slots(4)];
        optimizer.begin(&mut slots);
        let expected = match spec {
            OptimizerSpec::Adagrad { .. } | OptimizerSpec::AdagradRow { .. } => vec![0.1; slots.len()],
            OptimizerSpec::Ftrl { .. } => vec![0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0],
            _ => vec![0.0; slots.len()],
        };
        assert_eq!(slots, expected, "{spec:?}");
        let mut weights = [0.5; 4];
        for factor in [1.0, 0.0, 1e-30, 1e-3] {
            optimizer.apply(&mut weights, &mut slots, &[0.0, 1.0, -1.0, 1e-20], factor);
            assert!(weights.iter().chain(&slots).all(|x| x.is_finite()), "{spec:?} {weights:?}");
        }
    }
}

/// Goal: the last batches of a schedule that ends at nothing change nothing.
#[test]
fn a_learning_rate_of_zero_moves_no_weight() {
    for spec in ALL {
        let optimizer = Optimizer::new(spec);
        let mut slots = vec![0.0; optimizer.slots(4)];
        optimizer.begin(&mut slots);
        let mut weights = [1.0, -2.0, 0.3, 0.0];
        optimizer.apply(&mut weights, &mut slots, &[0.5, -0.25, 0.0, 1e-3], 1.0);
        let before = weights;
        optimizer.apply(&mut weights, &mut slots, &[-1.0, 2.0, 1e-3, 0.0], 0.0);
        assert_eq!(weights, before, "{spec:?}");
    }
}

#[test]
fn tensors_have_an_accumulator_per_element_where_rows_have_one_each() {
    for spec in ALL {
        let rows = Optimizer::new(spec);
        let tensors = rows.of_tensors();
        match spec {
            OptimizerSpec::AdagradRow { .. } => assert_eq!((rows.slots(6), tensors.slots(6)), (1, 6)),
            _ => assert_eq!(rows.slots(6), tensors.slots(6)),
        }
    }
}
