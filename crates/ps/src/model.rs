//! What a server must know of a job: the shape of its model and how it is trained. Nothing else.

use std::time::Duration;

use elasticdl_spec::placement::partition_of_tensor;
use elasticdl_spec::{
    Consistency, JobSpec, ModelShape, OptimizerSpec, PartitionId, Plan, TableSpec, TablesSpec,
};

use crate::gate::Policy;

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
    /// Whether the learning rate of a batch is divided by its staleness.
    pub modulates: bool,
    /// What batches must be admitted for; `None`: they come as they come.
    pub policy: Option<Policy>,
    /// How long a batch that was admitted may take.
    pub permit_timeout: Duration,
    /// For each table, what the job says of it.
    tables: Vec<TableSpec>,
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
        let tables = vec![TableSpec::default(); shape.tables.len()];
        let (job, modulates, policy, permit_timeout) = (job.into(), false, None, Duration::from_secs(60));
        Model { job, shape, optimizer, seed, partitions, modulates, policy, permit_timeout, tables, tensors }
    }

    /// The same with what a job says of single tables.
    pub fn with_tables(mut self, said: &TablesSpec) -> Self {
        self.tables = self.shape.tables.iter().map(|table| said.of(&table.name)).collect();
        self
    }

    /// The model of a plan.
    pub fn of(plan: &Plan) -> Self {
        let job = &plan.job;
        let partitions = job.servers.partitions;
        let model =
            Model::new(&job.name, plan.shape.clone(), job.train.optimizer, job.train.seed, partitions);
        let (modulates, policy) = (job.train.staleness_modulation, policy_of(job));
        Model { modulates, policy, permit_timeout: job.limits.lease, ..model.with_tables(&job.tables) }
    }

    /// What the job says of each table of the shape.
    pub fn tables(&self) -> &[TableSpec] {
        &self.tables
    }

    /// Indices in the shape of the tensors that live in `partition`, in the order of the shape.
    /// `None`: the model has no such partition.
    pub fn tensors_of(&self, partition: PartitionId) -> Option<&[usize]> {
        self.tensors.get(partition.0 as usize).map(Vec::as_slice)
    }
}

fn policy_of(job: &JobSpec) -> Option<Policy> {
    match job.train.consistency {
        Consistency::Asynchronous => job.staleness_bound().map(|most| Policy::Bounded(most.into())),
        Consistency::Synchronous => Some(Policy::Steps(job.train.grads_to_wait.into())),
        Consistency::Hybrid => Some(Policy::Rounds(job.train.grads_to_wait.into())),
    }
}

#[cfg(test)]
mod tests {
    use elasticdl_spec::resolve::{Inputs, resolve};

    use super::*;

    /// Defect 7 of the original: such flags were parsed and ignored. What a policy does is tried where it is kept
    /// (`gate.rs`, `partition.rs`), and with workers in `worker/src/tests/gated.rs`.
    #[test]
    fn what_a_job_says_of_consistency_is_what_its_servers_keep() {
        let model = |train: &str| {
            let file = format!(
                "{{apiVersion: elasticdl.org/v1, kind: ElasticJob, metadata: {{name: j}}, spec: {{model: {{zoo: lr}}, \
                 data: {{train: t, layout: criteo}}, workers: {{max: 4}}, train: {{{train}}}}}}}"
            );
            let job = resolve(&Inputs { file: Some(&file), ..Inputs::default() }).unwrap().job;
            let model = Model::of(&Plan { job, shape: crate::test_model::shape() });
            (model.policy, model.modulates)
        };
        assert_eq!(model(""), (None, false));
        assert_eq!(model("staleness: 3"), (Some(Policy::Bounded(3)), false));
        assert_eq!(model("staleness_modulation: true"), (None, true));
        assert_eq!(model("consistency: synchronous, grads_to_wait: 2"), (Some(Policy::Steps(2)), false));
        assert_eq!(model("consistency: hybrid, grads_to_wait: 3"), (Some(Policy::Rounds(3)), false));
    }
}
