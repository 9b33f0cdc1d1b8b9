//! Amounts of what a node offers and a pod takes.

use std::collections::BTreeMap;

/// The whole of a cluster, in the unit of [`Resources::part_of`].
pub(super) const WHOLE: u64 = 1 << 32;

/// What a node has left for our jobs, or what one pod asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Resources {
    /// Thousandths of a processor core.
    pub cpu_millis: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Anything else that is counted, by its Kubernetes name: `nvidia.com/gpu`, and `pods` where a node's
    /// limit of pods is to be minded (each pod then asks for one).
    pub extended: BTreeMap<String, u64>,
}

impl Resources {
    /// How many pods of this size go into `room`. A pod that asks for nothing goes in any number of times.
    pub(super) fn times_in(&self, room: &Resources) -> u64 {
        let times = |have: u64, each: u64| have.checked_div(each).unwrap_or(u64::MAX);
        let extended = self.extended.iter().map(|(name, &each)| times(room.extended(name), each));
        extended.fold(
            times(room.cpu_millis, self.cpu_millis).min(times(room.memory_bytes, self.memory_bytes)),
            u64::min,
        )
    }

    /// Takes `count` pods of this size out of the room, which must hold them.
    pub(super) fn take(&mut self, each: &Resources, count: u64) {
        let left = |have: u64, each: u64| {
            have.checked_sub(each * count).expect("only what fits is taken out of a node")
        };
        self.cpu_millis = left(self.cpu_millis, each.cpu_millis);
        self.memory_bytes = left(self.memory_bytes, each.memory_bytes);
        for (name, &each) in each.extended.iter().filter(|&(_, &each)| each > 0) {
            let have = self.extended.get_mut(name).expect("only what fits is taken out of a node");
            *have = left(*have, each);
        }
    }

    /// The largest part that this is of any one resource of `total`, in units of 1/[`WHOLE`]; at least 1, so
    /// that a pod that asks for nothing counts for something.
    pub(super) fn part_of(&self, total: &Resources) -> u64 {
        let part = |total: u64, each: u64| match each {
            0 => 1,
            each if each >= total => WHOLE,
            each => (u128::from(each) * u128::from(WHOLE)).div_ceil(u128::from(total)) as u64,
        };
        let extended = self.extended.iter().map(|(name, &each)| part(total.extended(name), each));
        extended.fold(
            part(total.cpu_millis, self.cpu_millis).max(part(total.memory_bytes, self.memory_bytes)),
            u64::max,
        )
    }

    /// The larger amount of each.
    pub(crate) fn or_more(&self, other: &Resources) -> Resources {
        let mut most = self.clone();
        most.cpu_millis = most.cpu_millis.max(other.cpu_millis);
        most.memory_bytes = most.memory_bytes.max(other.memory_bytes);
        for (name, &amount) in &other.extended {
            let most = most.extended.entry(name.clone()).or_default();
            *most = amount.max(*most);
        }
        most
    }

    /// What is left once that much is used.
    pub(crate) fn less(&self, used: &Resources) -> Resources {
        let mut left = self.clone();
        left.cpu_millis = left.cpu_millis.saturating_sub(used.cpu_millis);
        left.memory_bytes = left.memory_bytes.saturating_sub(used.memory_bytes);
        for (name, amount) in &mut left.extended {
            *amount = amount.saturating_sub(used.extended(name));
        }
        left
    }

    /// All of these together.
    pub(crate) fn sum<'a>(all: impl IntoIterator<Item = &'a Resources>) -> Resources {
        all.into_iter().fold(Resources::default(), |mut sum, each| {
            sum.cpu_millis = sum.cpu_millis.saturating_add(each.cpu_millis);
            sum.memory_bytes = sum.memory_bytes.saturating_add(each.memory_bytes);
            for (name, amount) in &each.extended {
                let sum = sum.extended.entry(name.clone()).or_default();
                *sum = sum.saturating_add(*amount);
            }
            sum
        })
    }

    /// How many kinds of extended resources lie idle when this pod takes the last room of `node`.
    pub(super) fn leaves_idle(&self, node: &Resources) -> usize {
        node.extended.iter().filter(|&(name, &have)| have > 0 && self.extended(name) == 0).count()
    }

    fn extended(&self, name: &str) -> u64 {
        self.extended.get(name).copied().unwrap_or(0)
    }
}
