//! Whether a set of pods goes onto the nodes.

use super::resources::Resources;

/// Nodes, with what is left on each.
///
/// Whether pods fit depends on the set of pods alone, never on the order in which they were thought of. That
/// is what makes an answer, once given, hold when the same question is asked again.
#[derive(Debug, Clone)]
pub(super) struct Room {
    nodes: Vec<Resources>,
    total: Resources,
}

/// Pods of one size.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pods<'a> {
    /// The part of the cluster that one of them takes: see [`Room::part`].
    pub part: u64,
    /// What one of them asks for.
    pub size: &'a Resources,
    /// How many there are.
    pub count: u32,
}

impl Room {
    /// The room on these nodes.
    pub fn new(nodes: &[Resources]) -> Self {
        let mut nodes = nodes.to_vec();
        nodes.sort();
        Room { total: Resources::sum(&nodes), nodes }
    }

    /// The largest part that a pod takes of any one resource of the cluster.
    pub fn part(&self, size: &Resources) -> u64 {
        size.part_of(&self.total)
    }

    /// What is left once these pods are placed, or `None` where they don't all fit.
    ///
    /// Large pods choose first, and each takes the node where it fits most tightly, nodes with a GPU that it
    /// has no use for last. That is a rule of thumb: it finds a placement nearly always when there is one,
    /// and what it finds is real.
    pub fn less(&self, mut pods: Vec<Pods<'_>>) -> Option<Room> {
        pods.sort_by(|a, b| b.cmp(a));
        let mut room = self.clone();
        let mut sizes = pods.chunk_by(|a, b| a.size == b.size);
        sizes
            .all(|pods| room.place(pods[0].size, pods.iter().map(|p| u64::from(p.count)).sum()))
            .then_some(room)
    }

    fn place(&mut self, size: &Resources, count: u64) -> bool {
        let mut fitting: Vec<_> = (self.nodes.iter().enumerate())
            .map(|(n, node)| (size.leaves_idle(node), size.times_in(node), n))
            .filter(|&(_, times, _)| times > 0)
            .collect();
        fitting.sort_unstable();
        let mut left = count;
        for (_, times, n) in fitting {
            let here = times.min(left);
            self.nodes[n].take(size, here);
            left -= here;
            if left == 0 {
                break;
            }
        }
        left == 0
    }
}
