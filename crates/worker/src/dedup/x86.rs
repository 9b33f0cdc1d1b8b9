//! With AVX-512 eight ids are hashed at once, and a line is compared by one instruction; with AVX2 it takes two.
#![expect(unsafe_code, reason = "a gather takes a pointer")]

use std::arch::x86_64::{__m256i, __m512i};

use elasticdl_spec::mix::FACTORS;
use pulp::x86::{V3, V4};
use pulp::{NullaryFnOnce, Simd, cast};

use super::lanes::{BLOCK, LINE, Lanes, Line, Plain, ROW, Strangers};

/// Places that are looked through at once for ids that were not found.
const GROUP: usize = 64;

/// For processors that have AVX2.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(V3);

impl Avx2 {
    /// If this processor has it.
    pub(super) fn here() -> Option<Self> {
        V3::try_new().map(Avx2)
    }

    pub(super) fn vectorize<Op: NullaryFnOnce>(self, op: Op) -> Op::Output {
        Simd::vectorize(self.0, op)
    }
}

impl Lanes for Avx2 {
    #[inline(always)]
    fn homes(self, lines: u32, ids: &[u64; LINE]) -> [u32; LINE] {
        Plain.homes(lines, ids)
    }

    #[inline(always)]
    fn has(self, ids: &[u64; LINE], word: u64) -> bool {
        Plain.has(ids, word)
    }

    #[inline(always)]
    fn look(self, lines: &[Line], ids: &[u64; LINE], homes: &[u32; LINE], found: &mut [u8; LINE]) {
        for ((id, home), found) in ids.iter().zip(homes).zip(found) {
            let halves: [__m256i; 2] = cast(lines[*home as usize].0);
            let id = self.0.avx._mm256_set1_epi64x(*id as i64);
            let [low, high] = halves.map(|half| {
                let equal = self.0.avx2._mm256_cmpeq_epi64(half, id);
                self.0.avx._mm256_movemask_pd(cast(equal))
            });
            *found = (low | (high << (LINE / 2))) as u8;
        }
    }

    #[inline(always)]
    fn strangers(self, found: &[u8; BLOCK], strangers: &mut Strangers) {
        Plain.strangers(found, strangers);
    }

    #[inline(always)]
    fn places(self, homes: &mut [u32; ROW], found: &[u8; ROW], before: &[u32]) {
        Plain.places(homes, found, before);
    }
}

/// For processors that have AVX-512.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(V4);

impl Avx512 {
    /// If this processor has it.
    pub(super) fn here() -> Option<Self> {
        V4::try_new().map(Avx512)
    }

    pub(super) fn vectorize<Op: NullaryFnOnce>(self, op: Op) -> Op::Output {
        Simd::vectorize(self.0, op)
    }

    #[inline(always)]
    fn splat(self, word: u64) -> __m512i {
        self.0.avx512f._mm512_set1_epi64(word as i64)
    }

    /// `x ^ (x >> BITS)`, for each of eight.
    #[inline(always)]
    fn fold<const BITS: u32>(self, x: __m512i) -> __m512i {
        self.0.avx512f._mm512_xor_si512(x, self.0.avx512f._mm512_srli_epi64::<BITS>(x))
    }

    #[inline(always)]
    fn times(self, x: __m512i, word: u64) -> __m512i {
        self.0.avx512dq._mm512_mullo_epi64(x, self.splat(word))
    }

    /// `spec::mix::mix64` of eight.
    #[inline(always)]
    fn mix(self, ids: __m512i) -> __m512i {
        let x = self.times(self.fold::<30>(ids), FACTORS[0]);
        let x = self.times(self.fold::<27>(x), FACTORS[1]);
        self.fold::<31>(x)
    }
}

impl Lanes for Avx512 {
    #[inline(always)]
    fn homes(self, lines: u32, ids: &[u64; LINE]) -> [u32; LINE] {
        /// The upper halves of eight words, side by side.
        const UPPER: [u32; 16] = [1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15];
        let words = self.0.avx512f;
        let (hash, lines) = (self.mix(cast(*ids)), self.splat(lines.into()));
        let upper = words._mm512_mul_epu32(words._mm512_shuffle_epi32::<0b11_11_01_01>(hash), lines);
        let lower = words._mm512_srli_epi64::<32>(words._mm512_mul_epu32(hash, lines));
        let scaled = words._mm512_add_epi64(upper, lower);
        let [homes, _]: [[u32; LINE]; 2] = cast(words._mm512_permutexvar_epi32(cast(UPPER), scaled));
        homes
    }

    #[inline(always)]
    fn has(self, ids: &[u64; LINE], word: u64) -> bool {
        self.0.avx512f._mm512_cmpeq_epi64_mask(cast(*ids), self.splat(word)) != 0
    }

    #[inline(always)]
    fn look(self, lines: &[Line], ids: &[u64; LINE], homes: &[u32; LINE], found: &mut [u8; LINE]) {
        for ((id, home), found) in ids.iter().zip(homes).zip(found) {
            let line = cast(lines[*home as usize].0);
            *found = self.0.avx512f._mm512_cmpeq_epi64_mask(line, self.splat(*id));
        }
    }

    #[inline(always)]
    fn strangers(self, found: &[u8; BLOCK], strangers: &mut Strangers) {
        const FIRST: [u32; ROW] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        let words = self.0.avx512f;
        let mut count = 0;
        let (groups, _) = found.as_chunks::<GROUP>();
        for (group, found) in groups.iter().enumerate() {
            let found = cast(*found);
            let missed: u64 = self.0.avx512bw._mm512_testn_epi8_mask(found, found);
            for row in 0..GROUP / ROW {
                let missed = (missed >> (ROW * row)) as u16;
                let first = words._mm512_set1_epi32((GROUP * group + ROW * row) as i32);
                let numbers = words._mm512_add_epi32(cast(FIRST), first);
                let numbers: [u32; ROW] = cast(words._mm512_maskz_compress_epi32(missed, numbers));
                strangers.numbers[count..count + ROW].copy_from_slice(&numbers);
                count += missed.count_ones() as usize;
            }
        }
        strangers.count = count;
    }

    #[inline(always)]
    fn places(self, homes: &mut [u32; ROW], found: &[u8; ROW], before: &[u32]) {
        let words = self.0.avx512f;
        let (lines, found) = (cast(*homes), words._mm512_cvtepu8_epi32(cast(*found)));
        // A gather takes its positions for signed numbers.
        let len = words._mm512_set1_epi32(before.len().min(i32::MAX as usize) as i32);
        let known = words._mm512_cmplt_epu32_mask(lines, len);
        assert!(known == u16::MAX, "an id's line is one of those that there are");
        // SAFETY: all sixteen are positions in there, as was just seen.
        let before = unsafe { words._mm512_i32gather_epi32::<4>(lines, before.as_ptr().cast()) };
        // A byte with one bit has 31 less the bit's place before it, as a word.
        let place =
            words._mm512_sub_epi32(words._mm512_set1_epi32(31), self.0.avx512cd._mm512_lzcnt_epi32(found));
        *homes = cast(words._mm512_add_epi32(before, place));
    }
}
