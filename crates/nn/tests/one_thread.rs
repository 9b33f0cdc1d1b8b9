//! A model starts no threads: the worker gives each core a part of the batch instead. Alone in its
//! file, so that no other test's threads are counted.

use elasticdl_nn::{Gradients, Input, TableInput, build};
use elasticdl_spec::{ModelSpec, Zoo};

#[test]
fn large_products_start_no_threads() {
    let Some(before) = threads() else {
        eprintln!("skipped: /proc/self/task tells the threads, and there is none");
        return;
    };
    let spec = ModelSpec { zoo: Zoo::Deepfm, embedding_dim: 16, hidden: vec![400, 400] };
    let mut model = build(&spec, 13, 26).expect("a valid model");
    let shape = model.shape().clone();
    let tensors: Vec<Vec<f32>> = shape.tensors.iter().map(|t| t.init_values(1)).collect();
    model.load(&tensors.iter().map(Vec::as_slice).collect::<Vec<_>>());
    let (numeric, index) = (vec![1.0; 1024 * 13], vec![0; 1024 * 26]);
    let (rows, labels) = (vec![0.1; 17], vec![1.0; 1024]);
    let tables = [TableInput { rows: &rows, index: &index }];
    let input = Input { records: 1024, numeric: &numeric, labels: &labels, tables: &tables };
    let mut gradients = Gradients::default();
    gradients.reset(&shape, &[1]);
    assert!(model.train(&input, 1024, &mut gradients) > 0.0);
    assert_eq!(threads(), Some(before));
}

fn threads() -> Option<usize> {
    Some(std::fs::read_dir("/proc/self/task").ok()?.count())
}
