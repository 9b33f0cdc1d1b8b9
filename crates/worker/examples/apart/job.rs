//! What is trained: the jobs of `cargo xtask bench train`, on records that are made up.

use std::sync::Arc;

use elasticdl_data::Batch;
use elasticdl_nn::Model;
use elasticdl_ps::{Model as PsModel, Partition, Partitions};
use elasticdl_spec::mix::Rng;
use elasticdl_spec::resolve::{Inputs, resolve};
use elasticdl_spec::{JobSpec, ModelShape, PartitionId};

use crate::Result;
use crate::ids::{FIELDS, RECORDS, ids};

const NUMBERS: usize = 13;

/// Which of the two jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// An MLP of 400-400-400 and rows of dim 16.
    Large,
    /// An MLP of 16-4 and rows of dim 8: next to nothing is computed.
    Small,
}

impl Size {
    pub fn name(self) -> &'static str {
        match self {
            Size::Large => "large",
            Size::Small => "small",
        }
    }

    pub fn named(name: &str) -> Option<Size> {
        [Size::Large, Size::Small].into_iter().find(|size| size.name() == name)
    }
}

/// A job, and its model as servers see it.
pub struct Job {
    pub spec: JobSpec,
    pub shape: Arc<ModelShape>,
}

impl Job {
    pub fn new(size: Size) -> Result<Job> {
        let model = match size {
            Size::Large => "embedding_dim: 16, hidden: [400, 400, 400]",
            Size::Small => "embedding_dim: 8, hidden: [16, 4]",
        };
        let file = format!(
            "{{apiVersion: elasticdl.org/v1, kind: ElasticJob, metadata: {{name: apart}}, spec: {{\
             model: {{zoo: deepfm, {model}}}, data: {{train: none, layout: criteo}}, \
             train: {{batch: {RECORDS}, optimizer: adagrad, learning_rate: 0.01, initial_accumulator: 0.1, seed: 7}}, \
             workers: {{count: 1, threads: 2}}, servers: {{count: 1}}}}}}"
        );
        let spec = resolve(&Inputs { file: Some(&file), ..Inputs::default() })?.job;
        let shape = Arc::new(elasticdl_nn::build(&spec.model, NUMBERS, FIELDS)?.shape().clone());
        Ok(Job { spec, shape })
    }

    /// One for each compute thread.
    pub fn models(&self) -> Result<Vec<Box<dyn Model>>> {
        let build = |_| Ok(elasticdl_nn::build(&self.spec.model, NUMBERS, FIELDS)?);
        (0..self.spec.workers.threads).map(build).collect()
    }

    /// All partitions, empty, in their first life.
    pub fn partitions(&self) -> Arc<Partitions> {
        let (train, partitions) = (&self.spec.train, self.spec.servers.partitions);
        let shape = ModelShape::clone(&self.shape);
        let model = Arc::new(PsModel::new(&self.spec.name, shape, train.optimizer, train.seed, partitions));
        let all = Arc::new(Partitions::new(Arc::clone(&model)));
        (0..partitions).for_each(|p| all.open(Partition::new(Arc::clone(&model), PartitionId(p), 1)));
        all
    }
}

/// So many batches of records.
pub fn batches(count: usize) -> Vec<Batch> {
    let mut rng = Rng::new(5);
    let mut batch = || Batch {
        records: RECORDS,
        ids: ids(&mut rng),
        numeric: (0..RECORDS * NUMBERS).map(|_| rng.uniform() as f32).collect(),
        labels: (0..RECORDS).map(|_| f32::from(u8::from(rng.uniform() < 0.3))).collect(),
    };
    (0..count).map(|_| batch()).collect()
}
