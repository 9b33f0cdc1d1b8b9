//! Which partitions should move to which server. Pure.

use std::collections::{BTreeMap, BTreeSet};

/// A server with so much more than the mean is worth a move.
const HEAVY: f64 = 1.2;
/// A step must take so much off the heavier one of two servers, as a share of the mean: moving is not free.
const GAIN: f64 = 0.1;

/// Partitions that move together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// The server that has them.
    pub from: u32,
    /// The one that is to have them.
    pub to: u32,
    /// The partitions.
    pub partitions: Vec<u32>,
}

/// What there is to balance.
#[derive(Debug)]
pub struct Balance<'a> {
    /// By partition: the server that has it.
    pub places: &'a [u32],
    /// By partition: how much work it is, at any scale.
    pub weights: &'a [f64],
    /// Servers that are to have partitions. All others are to have none.
    pub servers: &'a BTreeSet<u32>,
    /// Servers that could be given some now.
    pub able: &'a BTreeSet<u32>,
    /// A partition that is to stay where it is.
    pub pinned: Option<u32>,
}

impl Balance<'_> {
    /// The first transfer on the way to an even share; `None` where it does not pay. Whatever becomes of it, asking again
    /// goes on from there and comes to an end: every transfer leaves fewer partitions at servers that are to have
    /// none, or makes shares more even.
    pub fn next(&self) -> Option<Transfer> {
        let ready = self.servers.intersection(self.able);
        let mut shares: BTreeMap<u32, f64> = ready.map(|id| (*id, 0.0)).collect();
        if shares.is_empty() {
            return None;
        }
        for (place, weight) in self.places.iter().zip(self.weights) {
            if let Some(share) = shares.get_mut(place) {
                *share += weight;
            }
        }
        let steps = match self.places.iter().any(|place| !self.servers.contains(place)) {
            true => self.empty_those_that_leave(&mut shares),
            false => self.even_out(&mut shares),
        };
        let &(first, to) = steps.first()?;
        let from = self.places[first];
        let together = steps.iter().filter(|(p, place)| (self.places[*p], *place) == (from, to));
        Some(Transfer { from, to, partitions: together.map(|(p, _)| *p as u32).collect() })
    }

    fn is_pinned(&self, partition: usize) -> bool {
        self.pinned == Some(partition as u32)
    }

    /// The heaviest first, each to the server with the least.
    fn empty_those_that_leave(&self, shares: &mut BTreeMap<u32, f64>) -> Vec<(usize, u32)> {
        let homeless = |p: &usize| !self.servers.contains(&self.places[*p]) && !self.is_pinned(*p);
        let mut homeless: Vec<usize> = (0..self.places.len()).filter(homeless).collect();
        homeless.sort_by(|a, b| self.weights[*b].total_cmp(&self.weights[*a]));
        let mut steps = Vec::new();
        for partition in homeless {
            let (server, _) = extreme(shares, |a, b| a < b);
            *shares.get_mut(&server).expect("it has a share") += self.weights[partition];
            steps.push((partition, server));
        }
        steps
    }

    /// From the heaviest server to the lightest, for as long as that helps and they stay the same two.
    fn even_out(&self, shares: &mut BTreeMap<u32, f64>) -> Vec<(usize, u32)> {
        let mean = shares.values().sum::<f64>() / shares.len() as f64;
        let mut places = self.places.to_vec();
        let mut steps = Vec::new();
        let mut pair = None;
        loop {
            let (heavy, most) = extreme(shares, |a, b| a > b);
            let (light, least) = extreme(shares, |a, b| a < b);
            let empty = !places.contains(&light);
            if *pair.get_or_insert((heavy, light)) != (heavy, light) || (most <= HEAVY * mean && !empty) {
                return steps;
            }
            let heavier = |p: &usize| (most - self.weights[*p]).max(least + self.weights[*p]);
            let given = (0..places.len()).filter(|p| places[*p] == heavy && !self.is_pinned(*p));
            let best = given.min_by(|a, b| heavier(a).total_cmp(&heavier(b)));
            let gain = if empty { 0.0 } else { GAIN * mean };
            let Some(p) = best.filter(|p| most - heavier(p) >= gain && heavier(p) < most) else {
                return steps;
            };
            places[p] = light;
            *shares.get_mut(&heavy).expect("it has a share") -= self.weights[p];
            *shares.get_mut(&light).expect("it has a share") += self.weights[p];
            steps.push((p, light));
        }
    }
}

/// The server with the most or the least; the first of equals.
fn extreme(shares: &BTreeMap<u32, f64>, beats: fn(f64, f64) -> bool) -> (u32, f64) {
    let mut shares = shares.iter().map(|(id, share)| (*id, *share));
    let first = shares.next().expect("there is a server");
    shares.fold(first, |best, next| if beats(next.1, best.1) { next } else { best })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(servers: &[u32]) -> BTreeSet<u32> {
        servers.iter().copied().collect()
    }

    /// Carries out transfers until none is left.
    fn settle(mut places: Vec<u32>, weights: &[f64], servers: &[u32]) -> (Vec<u32>, usize) {
        let servers = set(servers);
        let mut moved = 0;
        for _ in 0..100 {
            let balance =
                Balance { places: &places, weights, servers: &servers, able: &servers, pinned: None };
            let Some(transfer) = balance.next() else { return (places, moved) };
            for p in &transfer.partitions {
                assert_eq!(places[*p as usize], transfer.from);
                places[*p as usize] = transfer.to;
                moved += 1;
            }
        }
        panic!("it does not settle")
    }

    fn counts(places: &[u32]) -> Vec<usize> {
        let servers = places.iter().copied().collect::<BTreeSet<u32>>();
        servers.iter().map(|s| places.iter().filter(|p| *p == s).count()).collect()
    }

    #[test]
    fn a_new_server_gets_its_share_and_no_more_is_moved_than_that() {
        let (places, moved) = settle((0..8).map(|p| p % 2).collect(), &[1.0; 8], &[0, 1, 2]);
        assert_eq!((counts(&places), moved), (vec![3, 3, 2], 2));
        let (places, moved) =
            settle((0..32).map(|p| p % 10).collect(), &[1.0; 32], &(0..11).collect::<Vec<_>>());
        assert!(counts(&places).len() == 11 && moved <= 3, "{places:?}");
    }

    #[test]
    fn a_server_that_is_to_leave_ends_with_nothing() {
        let (places, moved) = settle((0..9).map(|p| p % 3).collect(), &[1.0; 9], &[0, 1]);
        assert_eq!(moved, 3);
        let mut counts = counts(&places);
        counts.sort_unstable();
        assert_eq!(counts, [4, 5]);
    }

    #[test]
    fn nothing_moves_to_a_server_that_is_not_there() {
        let balance = |able: &[u32]| {
            let (servers, able) = (set(&[0, 1, 2]), set(able));
            let (places, weights) = (&[0, 1, 0, 1], &[1.0; 4]);
            Balance { places, weights, servers: &servers, able: &able, pinned: Some(0) }.next()
        };
        assert_eq!(balance(&[0, 1]), None);
        assert_eq!(balance(&[]), None);
        let transfer = balance(&[0, 1, 2]).unwrap();
        assert_eq!((transfer.to, transfer.partitions), (2, vec![2]), "partition 0 stays");
    }

    #[test]
    fn a_hot_partition_gets_a_server_for_itself() {
        let weights = [9.0, 1.0, 1.0, 1.0, 1.0, 1.0];
        let (places, moved) = settle((0..6).map(|p| p % 2).collect(), &weights, &[0, 1]);
        let alone = places.iter().filter(|s| **s == places[0]).count();
        assert_eq!((alone, moved), (1, 2), "{places:?}");
    }

    #[test]
    fn small_differences_move_nothing() {
        let weights = [1.1, 0.9, 1.05, 1.0, 1.0, 0.95];
        assert_eq!(settle((0..6).map(|p| p % 2).collect(), &weights, &[0, 1]).1, 0);
        assert_eq!(settle(vec![0, 0], &[1.0, 0.0], &[0]).1, 0);
    }

    proptest! {
        #[test]
        fn it_settles_with_every_partition_at_a_server_that_stays(
            partitions in 1..40u32,
            before in 1..6u32,
            after in 1..6u32,
            weights in proptest::collection::vec(0.0..100.0f64, 40),
        ) {
            let servers: Vec<u32> = (0..after).collect();
            let places = (0..partitions).map(|p| p % before).collect();
            let (places, _) = settle(places, &weights[..partitions as usize], &servers);
            prop_assert!(places.iter().all(|server| *server < after));
        }
    }
}
