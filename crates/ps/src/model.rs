//! What a server must know of a job: the shape of its model and how it is trained. Nothing else.

use elasticdl_spec::placement::partition_of_tensor;
use elasticdl_spec::{ModelShape, OptimizerSpec, PartitionId, Plan};

/// The part of a [`Plan`] that partitions are built from.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// The job's name, kept in checkpoints for the reader.
    pub job: String,
    /// Tables and tensors, in the order of every frame.
    pub shape: ModelShape,
    /// The optimizer of all of them.
    pub optimizer: OptimizerSpec,
    /// The job's seed: rows are born from it.
    pub seed: u64,
    /// How many partitions the job has.
    pub partitions: u32,
    /// For each partition, which tensors of the shape are its own.
    tensors: Vec<Vec<usize>>,
}

impl Model {
    /// A model cut into `partitions`.
    pub fn new(job: &str, shape: ModelShape, optimizer: OptimizerSpec, seed: u64, partitions: u32) -> Self {
        assert!(partitions > 0, "a model has at least one partition");
        assert!(shape.tables.iter().all(|t| t.width() > 0), "a row has at least one weight");
        let mut tensors = vec![Vec::new(); partitions as usize];
        for (i, tensor) in shape.tensors.iter().enumerate() {
            tensors[partition_of_tensor(&tensor.name, partitions).0 as usize].push(i);
        }
        Model { job: job.into(), shape, optimizer, seed, partitions, tensors }
    }

    /// The model of a plan.
    pub fn of(plan: &Plan) -> Self {
        let job = &plan.job;
        let partitions = job.servers.partitions;
        Model::new(&job.name, plan.shape.clone(), job.train.optimizer, job.train.seed, partitions)
    }

    /// Indices in the shape of the tensors that live in `partition`, in the order of the shape.
    /// `None`: the model has no such partition.
    pub fn tensors_of(&self, partition: PartitionId) -> Option<&[usize]> {
        self.tensors.get(partition.0 as usize).map(Vec::as_slice)
    }
}
