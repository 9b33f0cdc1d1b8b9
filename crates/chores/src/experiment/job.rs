//! The jobs of experiments: a tiny model, whose batches take as long as they are told. Pure.

use serde_json::{Value, json};

/// How large a job is.
#[derive(Debug)]
pub struct Size {
    /// Servers.
    pub servers: u32,
    /// Workers that are wanted.
    pub workers: u32,
    /// Workers without which it is not to begin.
    pub workers_min: u32,
    /// What every pod of it asks for.
    pub cpu: &'static str,
    /// Passes over the data.
    pub epochs: u32,
    /// Records of a batch.
    pub batch: u64,
}

impl Size {
    /// The resource, with what it says of the cluster.
    pub fn resource(&self, name: &str, kubernetes: Value) -> Value {
        json!({
            "apiVersion": "elasticdl.org/v1", "kind": "ElasticJob", "metadata": { "name": name },
            "spec": {
                "model": { "zoo": "lr" },
                "data": { "train": "data/train-*.tsv", "layout": "criteo", "batches_per_task": 1 },
                "train": { "epochs": self.epochs, "batch": self.batch, "learning_rate": 0.1 },
                "workers": {
                    "min": self.workers_min, "count": self.workers, "max": self.workers, "pipeline": 1, "threads": 1,
                    "cpu": self.cpu, "memory": "64Mi",
                },
                "servers": { "count": self.servers, "cpu": self.cpu, "memory": "64Mi" },
                "master": { "cpu": self.cpu, "memory": "64Mi" },
                "checkpoint": { "every": "15s" },
                "limits": { "lease": "30s", "silence": "30s" },
                "kubernetes": kubernetes,
            },
        })
    }
}

/// Variables that make a batch take so many seconds, whatever the machine does meanwhile.
pub fn paced(batch_seconds: f64) -> Value {
    let sleep = format!("worker.compute=sleep:{}ms@every", (batch_seconds * 1000.0).round());
    json!({ "ELASTICDL_FAILPOINTS": sleep, "ELASTICDL_LOG": "warn" })
}

#[cfg(test)]
mod tests {
    use elasticdl_operator::resource::ElasticJob;

    use super::*;

    #[test]
    fn a_job_of_an_experiment_is_a_valid_job() {
        let size = Size { servers: 2, workers: 10, workers_min: 10, cpu: "100m", epochs: 1, batch: 4 };
        let kubernetes =
            json!({ "volumes": [{ "hostPath": { "path": "/d" }, "mountPath": "/d" }], "env": paced(0.25) });
        let job: ElasticJob = serde_json::from_value(size.resource("first", kubernetes)).unwrap();
        let spec = job.resolve().unwrap();
        assert_eq!((spec.workers.count, spec.workers.max, spec.kubernetes.workers_min), (Some(10), 10, 10));
        assert_eq!(spec.kubernetes.env["ELASTICDL_FAILPOINTS"], "worker.compute=sleep:250ms@every");
    }
}
