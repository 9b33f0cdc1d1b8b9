//! The planted truth: how a record is drawn, and how its label follows from it.
//!
//! A record is a pure function of (seed, split, row), so files, formats and threads don't matter.
//! Fields are independent. The log-odds of the label are a constant, plus one effect per count, plus
//! one effect per id, plus inner products between the ids of some fields. Every part is
//! centred and scaled to a stated variance under the distribution it is drawn from, whatever the
//! seed: that pins how good the best model is, and how much of it a linear model can see.

use elasticdl_spec::layout::Scale;
use elasticdl_spec::mix::{Rng, hash_text, mix2};

pub(crate) const COUNTS: usize = 13;
pub(crate) const FIELDS: usize = 26;

/// Log-odds of a record without any effect: about one label in four is 1.
const BIAS: f32 = -1.35;

/// Variance of the log-odds that comes from the counts, from the ids alone, and from pairs of ids.
const VARIANCE_COUNTS: f64 = 0.35;
const VARIANCE_IDS: f64 = 0.95;
const VARIANCE_PAIRS: f64 = 0.60;

/// Fields whose ids interact, each with each; all of modest size, so that every combination that
/// matters is seen often enough to be learnt in one pass.
const GROUP: [usize; 6] = [4, 5, 7, 13, 16, 22];

/// Length of the hidden vectors of their ids: the interactions have this rank. A higher one would
/// spread the same variance over more directions, and each takes longer to be found.
const RANK: usize = 3;

/// Ids that are seen less often than this in a million records hardly matter: one could not learn them.
const SEEN_ENOUGH: f64 = 3000.0;

/// Ids beyond this rank carry no signal at all.
const HEAD: usize = 4096;

/// Number of distinct ids, exponent of their power law and share of missing values, by field. Sizes
/// are Criteo's, the largest cut down so that a laptop holds the tables.
const SHAPES: [(u32, f64, f64); FIELDS] = [
    (1_400, 1.4, 0.0),
    (550, 1.35, 0.0),
    (300_000, 1.27, 0.03),
    (120_000, 1.3, 0.03),
    (300, 1.45, 0.0),
    (20, 1.1, 0.12),
    (12_000, 1.25, 0.0),
    (600, 1.4, 0.0),
    (3, 1.0, 0.0),
    (60_000, 1.35, 0.0),
    (5_500, 1.3, 0.0),
    (280_000, 1.27, 0.03),
    (3_100, 1.3, 0.0),
    (26, 1.0, 0.0),
    (12_500, 1.35, 0.0),
    (240_000, 1.27, 0.03),
    (10, 0.9, 0.0),
    (5_600, 1.3, 0.0),
    (2_100, 1.45, 0.44),
    (4, 0.8, 0.44),
    (260_000, 1.27, 0.03),
    (17, 1.0, 0.76),
    (15, 1.1, 0.0),
    (90_000, 1.3, 0.03),
    (100, 1.1, 0.44),
    (60_000, 1.33, 0.44),
];

/// Mean and deviation of the logarithm of each count, its offset, and its share of missing values.
const COUNT_SHAPES: [(f64, f64, i32, f64); COUNTS] = [
    (0.7, 1.1, 0, 0.45),
    (2.0, 1.9, -2, 0.0),
    (1.8, 1.4, 0, 0.21),
    (1.6, 1.0, 0, 0.22),
    (7.4, 2.2, 0, 0.03),
    (3.2, 1.6, 0, 0.22),
    (1.4, 1.4, 0, 0.04),
    (2.0, 1.1, 0, 0.0),
    (3.8, 1.4, 0, 0.04),
    (0.1, 0.8, 0, 0.45),
    (0.8, 1.0, 0, 0.04),
    (-0.9, 1.2, 0, 0.76),
    (1.6, 1.1, 0, 0.22),
];

/// Draws of one field or count are equally likely to fall into each of so many bins.
const BINS: usize = 4096;

/// A distribution over integers in bins of equal probability: even within a bin.
#[derive(Debug)]
struct Bins(Vec<(i32, u32)>);

impl Bins {
    /// One draw from 64 random bits: the lower 44 are used.
    #[inline]
    fn draw(&self, bits: u64) -> i32 {
        let (first, count) = self.0[bits as usize % BINS];
        let within = (u64::from((bits >> 12) as u32) * u64::from(count)) >> 32;
        first + within as i32
    }

    /// Calls `visit` with each integer of each bin and its probability; several bins may hold one integer.
    fn each(&self, mut visit: impl FnMut(i32, f64)) {
        for (first, count) in &self.0 {
            let share = 1.0 / (BINS as f64 * f64::from(*count));
            (0..*count).for_each(|within| visit(first + within as i32, share));
        }
    }

    /// The same with a few integers standing for those of a wide bin.
    fn each_sampled(&self, mut visit: impl FnMut(i32, f64)) {
        const SAMPLES: u32 = 16;
        for (first, count) in &self.0 {
            let samples = (*count).min(SAMPLES);
            for sample in 0..samples {
                let within = u64::from(*count) * (u64::from(sample) * 2 + 1) / (u64::from(samples) * 2);
                visit(first + within as i32, 1.0 / (BINS as f64 * f64::from(samples)));
            }
        }
    }

    /// Ranks from 0 below `size`, rank r about as likely as (r + 1)^-exponent.
    fn power_law(size: u32, exponent: f64) -> Bins {
        let weight = |rank: u32| f64::from(rank + 1).powf(-exponent);
        let total: f64 = (0..size).map(weight).sum();
        let mut starts = Vec::with_capacity(BINS + 1);
        let (mut rank, mut below) = (0, 0.0);
        for bin in 0..BINS {
            let edge = total * bin as f64 / BINS as f64;
            while rank + 1 < size && below + weight(rank) <= edge {
                below += weight(rank);
                rank += 1;
            }
            starts.push(rank as i32);
        }
        Bins::between(starts, size as i32)
    }

    /// Whole numbers whose logarithm has about this mean and deviation (log-logistic), `offset` added.
    fn counts(mean: f64, deviation: f64, offset: i32) -> Bins {
        let spread = deviation * 3f64.sqrt() / std::f64::consts::PI;
        let quantile = |p: f64| (mean + spread * (p / (1.0 - p)).ln()).exp().min(1e8) as i32;
        let starts = (0..BINS).map(|bin| quantile(bin as f64 / BINS as f64)).collect();
        let mut bins = Bins::between(starts, quantile(1.0 - 0.3 / BINS as f64) + 1);
        bins.0.iter_mut().for_each(|(first, _)| *first += offset);
        bins
    }

    fn between(starts: Vec<i32>, end: i32) -> Bins {
        let ends = starts.iter().skip(1).copied().chain([end]);
        Bins(starts.iter().zip(ends).map(|(start, end)| (*start, (end - start).max(1) as u32)).collect())
    }
}

/// A count column: what it holds and what it does.
#[derive(Debug)]
struct Count {
    bins: Bins,
    missing: Missing,
    slope: f32,
    mean: f32,
}

/// An id column: what it holds and what its ids do.
#[derive(Debug)]
struct Field {
    bins: Bins,
    missing: Missing,
    key: u32,
    /// Effects of the frequent ids by rank, then that of all others (none), then that of a missing value.
    effects: Vec<f32>,
    /// Hidden vectors in the same order, for fields that interact.
    hidden: Vec<Vector>,
}

type Vector = [f32; RANK];

/// How often a value is missing.
#[derive(Debug, Clone, Copy)]
struct Missing(f64);

impl Missing {
    /// Decides by the upper 16 of 64 random bits; the others are for the value.
    #[inline]
    fn strikes(self, bits: u64) -> bool {
        ((bits >> 48) as f64) < self.0 * 65_536.0
    }
}

/// All that labels follow from.
#[derive(Debug)]
pub(crate) struct World {
    seed: u64,
    counts: Vec<Count>,
    fields: Vec<Field>,
}

/// One record and the truth about it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Drawn {
    pub label: bool,
    /// Log-odds of the label being 1.
    pub logit: f32,
    pub counts: [Option<i32>; COUNTS],
    /// How frequent each id is within its field: 0 is the most frequent.
    pub ranks: [Option<u32>; FIELDS],
    /// The ids as they are written; different within a field.
    pub ids: [Option<u32>; FIELDS],
}

/// Which records are drawn: those to train on, or those to judge by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Split {
    Train,
    Test,
}

impl World {
    /// How many different ids each field can have.
    pub const SIZES: [u32; FIELDS] = {
        let mut sizes = [0; FIELDS];
        let mut at = 0;
        while at < FIELDS {
            sizes[at] = SHAPES[at].0;
            at += 1;
        }
        sizes
    };

    /// The world of a seed.
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(mix2(seed, hash_text("world")));
        let counts = count_columns(&mut rng);
        let mut fields = id_columns(&mut rng);
        hide_vectors(&mut fields, &mut rng);
        World { seed, counts, fields }
    }

    /// The record in row `row` of a split.
    pub fn draw(&self, split: Split, row: u64) -> Drawn {
        let salt = match split {
            Split::Train => 1,
            Split::Test => 2,
        };
        let mut rng = Rng::new(mix2(mix2(self.seed, salt), row));
        let mut logit = BIAS;
        let counts = std::array::from_fn(|at| {
            let count = self.counts[at].draw(rng.next_u64());
            logit += self.counts[at].effect(count);
            count
        });
        let ranks: [Option<u32>; FIELDS] = std::array::from_fn(|at| {
            let rank = self.fields[at].draw(rng.next_u64());
            logit += self.fields[at].effects[self.fields[at].entry(rank)];
            rank
        });
        logit += self.pairs(&ranks);
        let ids = std::array::from_fn(|at| ranks[at].map(|rank| self.fields[at].id(rank)));
        let label = rng.uniform() < probability(logit);
        Drawn { label, logit, counts, ranks, ids }
    }

    /// The sum of the inner products of the vectors of all pairs of ids that interact.
    fn pairs(&self, ranks: &[Option<u32>; FIELDS]) -> f32 {
        let (mut sums, mut squares) = ([0.0; RANK], 0.0);
        for at in GROUP {
            let field = &self.fields[at];
            for (sum, x) in sums.iter_mut().zip(field.hidden[field.entry(ranks[at])]) {
                *sum += x;
                squares += x * x;
            }
        }
        (sums.iter().map(|sum| sum * sum).sum::<f32>() - squares) / 2.0
    }
}

/// The probability that log-odds stand for.
#[inline]
pub(crate) fn probability(logit: f32) -> f64 {
    1.0 / (1.0 + f64::from(-logit).exp())
}

impl Count {
    #[inline]
    fn draw(&self, bits: u64) -> Option<i32> {
        (!self.missing.strikes(bits)).then(|| self.bins.draw(bits))
    }

    #[inline]
    fn effect(&self, count: Option<i32>) -> f32 {
        self.slope * (seen(count) - self.mean)
    }
}

/// A count as models see it.
#[inline]
fn seen(count: Option<i32>) -> f32 {
    count.map_or(0.0, |count| Scale::Log.apply(count as f32))
}

impl Field {
    #[inline]
    fn draw(&self, bits: u64) -> Option<u32> {
        (!self.missing.strikes(bits)).then(|| self.bins.draw(bits) as u32)
    }

    /// Where an id's effect and vector stand.
    #[inline]
    fn entry(&self, rank: Option<u32>) -> usize {
        let others = self.effects.len() - 2;
        rank.map_or(others + 1, |rank| (rank as usize).min(others))
    }

    /// The number that is written for the id of this rank: a bijection, so that none are mistaken.
    #[inline]
    fn id(&self, rank: u32) -> u32 {
        let mut x = rank ^ self.key;
        x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
        x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
        x ^ (x >> 16)
    }

    /// How likely each entry is, and how much of its effect remains given that.
    fn shares(&self) -> Vec<(f64, f64)> {
        let mut likely = vec![0.0; self.effects.len()];
        let others = likely.len() - 2;
        self.bins.each(|rank, share| likely[(rank as usize).min(others)] += share * (1.0 - self.missing.0));
        likely[others + 1] = self.missing.0;
        let seen = |p: f64| p * 1e6 / (p * 1e6 + SEEN_ENOUGH);
        let remains = |(entry, p): (usize, f64)| (p, if entry == others { 0.0 } else { seen(p) });
        likely.into_iter().enumerate().map(remains).collect()
    }
}

fn count_columns(rng: &mut Rng) -> Vec<Count> {
    let strengths = strengths(COUNTS, rng);
    let mut column = |((mean, deviation, offset, missing), strength): (&(f64, f64, i32, f64), f64)| {
        let bins = Bins::counts(*mean, *deviation, *offset);
        let (mut first, mut second) = (0.0, 0.0);
        bins.each_sampled(|count, share| {
            let x = f64::from(seen(Some(count)));
            first += share * (1.0 - missing) * x;
            second += share * (1.0 - missing) * x * x;
        });
        let deviation = (second - first * first).sqrt();
        let sign = if rng.below(2) == 0 { -1.0 } else { 1.0 };
        let slope = sign * (VARIANCE_COUNTS * strength).sqrt() / deviation;
        Count { bins, missing: Missing(*missing), slope: slope as f32, mean: first as f32 }
    };
    COUNT_SHAPES.iter().zip(strengths).map(&mut column).collect()
}

fn id_columns(rng: &mut Rng) -> Vec<Field> {
    let strengths = strengths(FIELDS, rng);
    let mut column = |((size, exponent, missing), strength): (&(u32, f64, f64), f64)| {
        let bins = Bins::power_law(*size, *exponent);
        let entries = (*size as usize).min(HEAD) + 2;
        let key = rng.next_u64() as u32;
        let mut field =
            Field { bins, missing: Missing(*missing), key, effects: vec![0.0; entries], hidden: vec![] };
        let shares = field.shares();
        let mut effects: Vec<f64> = shares.iter().map(|(_, remains)| remains * rng.normal()).collect();
        centre(&mut effects, &shares);
        let variance: f64 = effects.iter().zip(&shares).map(|(x, (p, _))| p * x * x).sum();
        let scale = (VARIANCE_IDS * strength / variance).sqrt();
        field.effects = effects.into_iter().map(|x| (x * scale) as f32).collect();
        field
    };
    SHAPES.iter().zip(strengths).map(&mut column).collect()
}

/// Gives the ids of the fields that interact their vectors.
fn hide_vectors(fields: &mut [Field], rng: &mut Rng) {
    // Second moments of the vectors, field by field. Centred vectors of independent fields make
    // every pair's variance the inner product of the two moments, and pairs uncorrelated.
    let mut moments = Vec::new();
    let mut vectors = Vec::new();
    for at in GROUP {
        let shares = fields[at].shares();
        let parts: Vec<Vec<f64>> = (0..RANK)
            .map(|_| {
                let mut part: Vec<f64> = shares.iter().map(|(_, remains)| remains * rng.normal()).collect();
                centre(&mut part, &shares);
                // Every field pulls its weight, however its frequent ids were dealt.
                let spread: f64 = part.iter().zip(&shares).map(|(x, (p, _))| p * x * x).sum();
                part.iter_mut().for_each(|x| *x /= spread.sqrt());
                part
            })
            .collect();
        let moment = |k: usize, l: usize| -> f64 {
            shares.iter().enumerate().map(|(entry, (p, _))| p * parts[k][entry] * parts[l][entry]).sum()
        };
        moments.push((0..RANK * RANK).map(|kl| moment(kl / RANK, kl % RANK)).collect::<Vec<f64>>());
        vectors.push(parts);
    }
    let mut total = 0.0;
    for (n, a) in moments.iter().enumerate() {
        total += moments[..n].iter().flat_map(|b| a.iter().zip(b)).map(|(x, y)| x * y).sum::<f64>();
    }
    let scale = (VARIANCE_PAIRS / total).powf(0.25);
    for (at, parts) in GROUP.into_iter().zip(vectors) {
        let vector = |entry: usize| std::array::from_fn(|k| (parts[k][entry] * scale) as f32);
        fields[at].hidden = (0..parts[0].len()).map(vector).collect();
    }
}

/// Moves values to mean 0, the ones that matter most by most: what rare ids carry stays small.
fn centre(values: &mut [f64], shares: &[(f64, f64)]) {
    let mean: f64 = values.iter().zip(shares).map(|(x, (p, _))| p * x).sum();
    let mass: f64 = shares.iter().map(|(p, remains)| p * remains).sum();
    values.iter_mut().zip(shares).for_each(|(x, (_, remains))| *x -= mean / mass * remains);
}

/// Shares of a variance: unequal, adding up to 1.
fn strengths(columns: usize, rng: &mut Rng) -> Vec<f64> {
    let raw: Vec<f64> = (0..columns).map(|_| 0.3 + rng.uniform()).collect();
    let total: f64 = raw.iter().sum();
    raw.into_iter().map(|x| x / total).collect()
}

#[cfg(test)]
mod tests {
    use super::super::truth::Score;
    use super::*;

    #[test]
    fn every_seed_makes_data_that_is_neither_easy_nor_hopeless() {
        for seed in 0..5 {
            let world = World::new(seed);
            let mut score = Score::new();
            (0..30_000)
                .map(|row| world.draw(Split::Train, row))
                .for_each(|drawn| score.add(drawn.logit, drawn.label));
            let truth = score.truth().expect("it has records");
            assert!((0.79..0.82).contains(&truth.best_auc), "seed {seed}: {}", truth.best_auc);
            assert!((0.22..0.31).contains(&truth.positive), "seed {seed}: {}", truth.positive);
        }
    }

    #[test]
    fn parts_have_the_variance_they_are_meant_to_have() {
        let world = World::new(3);
        let drawn: Vec<Drawn> = (0..40_000).map(|row| world.draw(Split::Test, row)).collect();
        let variance = |of: &dyn Fn(&Drawn) -> f32| {
            let values: Vec<f64> = drawn.iter().map(|drawn| f64::from(of(drawn))).collect();
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            assert!(mean.abs() < 0.03, "every part is centred: {mean}");
            values.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / values.len() as f64
        };
        let counts = |drawn: &Drawn| world.counts.iter().zip(drawn.counts).map(|(c, n)| c.effect(n)).sum();
        let ids =
            |drawn: &Drawn| world.fields.iter().zip(drawn.ranks).map(|(f, r)| f.effects[f.entry(r)]).sum();
        let pairs = |drawn: &Drawn| world.pairs(&drawn.ranks);
        assert!((variance(&counts) / VARIANCE_COUNTS - 1.0).abs() < 0.05, "{}", variance(&counts));
        assert!((variance(&ids) / VARIANCE_IDS - 1.0).abs() < 0.05, "{}", variance(&ids));
        assert!((variance(&pairs) / VARIANCE_PAIRS - 1.0).abs() < 0.1, "{}", variance(&pairs));
    }

    #[test]
    fn ids_follow_a_power_law_and_no_two_are_written_the_same() {
        let world = World::new(3);
        let field = &world.fields[2];
        let mut rng = Rng::new(1);
        let ranks: Vec<u32> = (0..100_000).filter_map(|_| field.draw(rng.next_u64())).collect();
        let share =
            |below: u32| ranks.iter().filter(|rank| **rank < below).count() as f64 / ranks.len() as f64;
        assert!((0.95..0.99).contains(&(ranks.len() as f64 / 100_000.0)), "3 % are missing");
        assert!(
            (0.2..0.3).contains(&share(1)) && (0.5..0.65).contains(&share(10)),
            "{} {}",
            share(1),
            share(10)
        );
        assert!((0.92..0.995).contains(&share(30_000)), "the tail is long: {}", share(30_000));
        let mut ids: Vec<u32> = (0..World::SIZES[2]).map(|rank| field.id(rank)).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), World::SIZES[2] as usize);
    }

    #[test]
    fn missing_values_are_as_frequent_as_they_should_be() {
        let world = World::new(3);
        let drawn: Vec<Drawn> = (0..20_000).map(|row| world.draw(Split::Train, row)).collect();
        let share =
            |of: &dyn Fn(&Drawn) -> bool| drawn.iter().filter(|drawn| of(drawn)).count() as f64 / 20_000.0;
        for (at, (.., missing)) in SHAPES.iter().enumerate() {
            assert!((share(&|drawn| drawn.ranks[at].is_none()) - missing).abs() < 0.015, "C{}", at + 1);
        }
        for (at, (.., missing)) in COUNT_SHAPES.iter().enumerate() {
            assert!((share(&|drawn| drawn.counts[at].is_none()) - missing).abs() < 0.015, "I{}", at + 1);
        }
    }
}
