//! Deterministic mixing and seeded numbers: the same on every machine, in every run.

/// What [`mix64`] multiplies by, for who does it in other words.
pub const FACTORS: [u64; 2] = [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// A strong 64-bit mixer (splitmix64's finalizer): a bijection without fixed structure.
#[inline(always)]
pub fn mix64(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(FACTORS[0]);
    x ^= x >> 27;
    x = x.wrapping_mul(FACTORS[1]);
    x ^ (x >> 31)
}

/// Mixes two values into one, order mattering.
#[inline]
pub fn mix2(a: u64, b: u64) -> u64 {
    mix64(mix64(a.wrapping_add(STEP)) ^ b.wrapping_mul(0xd6e8_feb8_6659_fd93))
}

/// A stable 64-bit hash of text, for names and seeds; not for hot paths.
pub fn hash_text(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| mix2(h, u64::from(b)))
}

/// By so much a generator goes on from draw to draw.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A number in [0, 1) from 64 bits. What is left of them is positive whatever way it is read.
#[inline(always)]
fn unit(bits: u64) -> f64 {
    (bits >> 11) as i64 as f64 * (1.0 / (1u64 << 53) as f64)
}

/// A small seeded generator (splitmix64). It is deterministic, fast and no secret.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator for this seed.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// The next 64 bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix64(self.0)
    }

    /// Fills `out` with what `each` makes of what [`Rng::uniform`] would give one after the other. None waits for the one
    /// before, so that vectors do some at a time.
    #[inline(always)]
    pub fn uniforms(&mut self, out: &mut [f32], each: impl Fn(f64) -> f32) {
        for (draw, x) in (1u64..).zip(&mut *out) {
            *x = each(unit(mix64(self.0.wrapping_add(draw.wrapping_mul(STEP)))));
        }
        self.0 = self.0.wrapping_add((out.len() as u64).wrapping_mul(STEP));
    }

    /// Uniform in [0, 1).
    #[inline]
    pub fn uniform(&mut self) -> f64 {
        unit(self.next_u64())
    }

    /// Uniform below `n`, which must not be 0.
    #[inline]
    pub fn below(&mut self, n: u64) -> u64 {
        assert!(n > 0, "a draw needs at least one possibility");
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// A seeded permutation of `items`.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_at_once_are_the_same_as_one_after_the_other() {
        for count in [0, 1, 7, 8, 100] {
            let (mut single, mut many, mut out) = (Rng::new(11), Rng::new(11), vec![0.0; count]);
            many.uniforms(&mut out, |x| (x as f32 * 2.0 - 1.0) * 0.3);
            let expected = (0..count).map(|_| (single.uniform() as f32 * 2.0 - 1.0) * 0.3);
            assert!(out.iter().map(|x| x.to_bits()).eq(expected.map(f32::to_bits)), "{count}");
            assert_eq!(many.next_u64(), single.next_u64(), "{count}");
        }
    }

    #[test]
    fn shuffle_is_a_permutation_and_depends_on_the_seed() {
        let shuffled = |seed| {
            let mut items: Vec<u32> = (0..100).collect();
            Rng::new(seed).shuffle(&mut items);
            items
        };
        let mut sorted = shuffled(1);
        assert_ne!(sorted, shuffled(2));
        assert_eq!(sorted, shuffled(1));
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn normal_has_mean_zero_and_deviation_one() {
        let mut rng = Rng::new(7);
        let draws: Vec<f64> = (0..20_000).map(|_| rng.normal()).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64;
        assert!(mean.abs() < 0.03, "{mean}");
        assert!((variance - 1.0).abs() < 0.05, "{variance}");
    }
}
