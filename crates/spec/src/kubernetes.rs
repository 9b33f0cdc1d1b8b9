//! What a job asks of a cluster. On a single machine it has no meaning.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::amount;

/// A worker or server that was killed for its memory asks for so much more the next time.
const MEMORY_FACTOR: f64 = 1.5;
/// And for no more than so many times what it asked for first, where no limit is set.
const MEMORY_TIMES_MAX: u64 = 4;

/// `kubernetes`, and what the roles ask for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KubernetesSpec {
    /// `master.*`
    pub master: RolePods,
    /// `servers.*`
    pub servers: RolePods,
    /// `workers.*`
    pub workers: RolePods,
    /// `workers.min`; where the number of workers is automatic it is never less, on a single machine too.
    pub workers_min: u32,
    /// `workers.priority`: the fraction of the workers whose priority is high.
    pub priority: f64,
    /// `kubernetes.namespace`
    pub namespace: Option<String>,
    /// `kubernetes.image`
    pub image: Option<String>,
    /// `kubernetes.image_pull_policy`
    pub image_pull_policy: String,
    /// `kubernetes.image_pull_secrets`
    pub image_pull_secrets: Vec<String>,
    /// `kubernetes.service_account`
    pub service_account: Option<String>,
    /// `kubernetes.directory`
    pub directory: Option<String>,
    /// `kubernetes.volumes`: each a volume of a pod with `mountPath` and, where wanted, `readOnly`, `subPath`.
    pub volumes: Vec<Map<String, Value>>,
    /// `kubernetes.env`
    pub env: BTreeMap<String, String>,
    /// `kubernetes.labels`
    pub labels: BTreeMap<String, String>,
    /// `kubernetes.annotations`
    pub annotations: BTreeMap<String, String>,
    /// `kubernetes.node_selector`
    pub node_selector: BTreeMap<String, String>,
    /// `kubernetes.tolerations`
    pub tolerations: Vec<Value>,
    /// `kubernetes.affinity`
    pub affinity: Option<Value>,
    /// `kubernetes.grace`
    pub grace: Duration,
    /// `suspend`, `deadline`, `ttl`, `weight`; jobs of before say nothing of them.
    #[serde(default)]
    pub care: Care,
}

/// What a job asks of the operator. Without one it has no meaning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Care {
    /// `suspend`: whether the job rests.
    pub suspend: bool,
    /// `deadline`: how long it may run.
    pub deadline: Option<Duration>,
    /// `ttl`: how long it is kept when it is over.
    pub ttl: Option<Duration>,
    /// `weight`: its share of the room, beside that of others.
    pub weight: NonZeroU32,
}

impl Default for Care {
    fn default() -> Self {
        Care { suspend: false, deadline: None, ttl: None, weight: NonZeroU32::MIN }
    }
}

/// The pods of one role.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolePods {
    /// Processors asked for.
    pub cpu: String,
    /// Memory asked for.
    pub memory: String,
    /// GPUs.
    pub gpu: u64,
    /// Processors allowed.
    pub cpu_limit: Option<String>,
    /// Memory allowed.
    pub memory_limit: Option<String>,
    /// Memory asked for at most, after deaths for lack of it.
    pub memory_max: Option<String>,
    /// Laid over the pod.
    pub pod: Option<Value>,
}

impl RolePods {
    /// Memory to ask for after so many deaths for lack of it, in bytes.
    pub fn memory_after(&self, deaths: u32) -> u64 {
        let first = amount::whole(&self.memory).expect("the rule checked it");
        let most = self.memory_max.as_deref().and_then(amount::whole);
        let most = most.unwrap_or(first.saturating_mul(MEMORY_TIMES_MAX)).max(first);
        let wanted = first as f64 * MEMORY_FACTOR.powi(deaths.min(64) as i32);
        // Whole mebibytes are easier to read; an amount that nobody raised stays as it was said.
        if deaths == 0 { first } else { (wanted.min(most as f64) as u64).next_multiple_of(1 << 20).min(most) }
    }

    /// Whether there is more memory to ask for than after so many deaths.
    pub fn can_grow(&self, deaths: u32) -> bool {
        self.memory_after(deaths + 1) > self.memory_after(deaths)
    }
}

/// Where a pod keeps what it can make again, in a job without a volume.
pub const SCRATCH: &str = "/var/lib/elasticdl";

impl KubernetesSpec {
    /// The directory in the pods that paths start from. Without a volume it is each pod's own.
    pub fn directory(&self) -> &str {
        let first = self.volumes.first().and_then(|volume| volume.get("mountPath")).and_then(Value::as_str);
        self.directory.as_deref().or(first).unwrap_or(SCRATCH)
    }

    /// Whether the `n`-th of `count` workers has the high priority: a stated fraction of them, rounded up.
    pub fn is_high(&self, high_now: u32, count: u32) -> bool {
        f64::from(high_now) < (self.priority * f64::from(count)).ceil()
    }
}

#[cfg(test)]
mod tests {
    use crate::resolve::{Inputs, resolve};

    use super::*;

    fn job(flags: &[(&str, &str)]) -> KubernetesSpec {
        let base =
            [("name", "j"), ("model.zoo", "lr"), ("data.train", "t"), ("data.layout", "criteo")].into_iter();
        let flags = base.chain(flags.iter().copied()).map(|(k, v)| (k.to_string(), v.to_string())).collect();
        resolve(&Inputs { flags, ..Inputs::default() }).unwrap().job.kubernetes
    }

    #[test]
    fn memory_grows_by_half_after_each_death_for_lack_of_it_up_to_a_limit() {
        let pods = job(&[("workers.memory", "1Gi")]).workers;
        let asked: Vec<String> = (0..6).map(|n| amount::bytes(pods.memory_after(n))).collect();
        assert_eq!(asked, ["1Gi", "1536Mi", "2304Mi", "3456Mi", "4Gi", "4Gi"]);
        assert!(pods.can_grow(3) && !pods.can_grow(4));
        let pods = job(&[("workers.memory", "1Gi"), ("workers.memory_max", "1200Mi")]).workers;
        assert_eq!(amount::bytes(pods.memory_after(7)), "1200Mi");
    }

    #[test]
    fn a_fraction_of_the_workers_is_high() {
        let third = job(&[("workers.priority", "0.3")]);
        assert!(third.is_high(0, 4) && third.is_high(1, 4) && !third.is_high(2, 4), "0.3 of 4, rounded up");
        assert!(!job(&[]).is_high(0, 4));
        let high = job(&[("workers.priority", "high")]);
        assert!(high.is_high(3, 4));
    }

    #[test]
    fn paths_start_where_the_first_volume_is_unless_said_otherwise() {
        let volumes = "[{hostPath: {path: /srv}, mountPath: /data}]";
        assert_eq!(job(&[("kubernetes.volumes", volumes)]).directory(), "/data");
        assert_eq!(
            job(&[("kubernetes.volumes", volumes), ("kubernetes.directory", "/data/a")]).directory(),
            "/data/a"
        );
        assert_eq!(job(&[]).directory(), SCRATCH);
    }
}
