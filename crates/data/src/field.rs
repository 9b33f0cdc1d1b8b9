//! A categorical value becomes an id: a well-mixed number that depends on the field and the value.
//!
//! The ids are stored in trained models, so they must never change: a test pins them.

use elasticdl_spec::mix::{hash_text, mix2, mix64};

/// The ids of one field.
///
/// The integer 7 of a Parquet column and the text `7` have the same id. Integers, other texts and
/// "missing" are hashed with different salts, so none is mistaken for another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FieldIds {
    integer: u64,
    text: u64,
    missing: u64,
}

impl FieldIds {
    /// The ids of the field with this name.
    pub fn new(name: &str) -> Self {
        let salt = hash_text(name);
        FieldIds { integer: mix2(salt, 1), text: mix2(salt, 2), missing: mix2(salt, 3) }
    }

    /// The id of a missing value.
    #[inline]
    pub fn missing(&self) -> u64 {
        self.missing
    }

    /// The id of an integer; different integers never share one.
    #[inline]
    pub fn of_integer(&self, value: i64) -> u64 {
        mix64(self.integer ^ (value as u64).wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    /// The id of an integer that may lie beyond `i64`; there it is that of its decimal text.
    #[inline]
    pub fn of_unsigned(&self, value: u64) -> u64 {
        match i64::try_from(value) {
            Ok(value) => self.of_integer(value),
            Err(_) => self.of_text(value.to_string().as_bytes()),
        }
    }

    /// The id of a float: that of the integer where it is one, else of its shortest decimal text.
    pub fn of_float<T: Into<f64> + ToString + Copy>(&self, float: T) -> u64 {
        let value: f64 = float.into();
        // Up to 2^53 every integer is a float, so the text of either is the same.
        if value.trunc() == value && value.abs() <= 9_007_199_254_740_992.0 {
            self.of_integer(value as i64)
        } else {
            self.of_text(float.to_string().as_bytes())
        }
    }

    /// The id of a text: that of the integer where it is one in its usual form.
    #[inline]
    pub fn of_text(&self, text: &[u8]) -> u64 {
        match canonical_integer(text) {
            Some(value) => self.of_integer(value),
            None => hash_bytes(self.text, text),
        }
    }
}

/// The integer that prints as exactly this text: no leading zeros, no plus, no `-0`.
#[inline]
fn canonical_integer(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    // 19 digits may overflow; they go the checked way.
    if digits.is_empty() || digits.len() > 19 || (digits[0] == b'0' && text.len() > 1) {
        return None;
    }
    let mut value = 0u64;
    for &byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = value * 10 + u64::from(digit);
    }
    if negative { 0i64.checked_sub_unsigned(value) } else { i64::try_from(value).ok() }
}

/// A fast stable hash: 8 bytes at a time, each step a 64 × 64 → 128 bit product folded in half.
#[inline]
pub(crate) fn hash_bytes(seed: u64, bytes: &[u8]) -> u64 {
    const K1: u64 = 0xa076_1d64_78bd_642f;
    const K2: u64 = 0xe703_7ed1_a0b4_28db;
    let fold = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        product as u64 ^ (product >> 64) as u64
    };
    // The length sets texts apart that differ in trailing NULs only.
    let mut hash = seed ^ (bytes.len() as u64).wrapping_mul(K2);
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        hash = fold(hash ^ u64::from_le_bytes(*word), K1);
    }
    if !rest.is_empty() {
        let mut word = [0; 8];
        word[..rest.len()].copy_from_slice(rest);
        hash = fold(hash ^ u64::from_le_bytes(word), K2);
    }
    mix64(hash)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    // Models in the field hold rows under these numbers. If this fails, the change is wrong, not the test.
    #[test]
    fn ids_never_change() {
        let ids = FieldIds::new("C1");
        assert_eq!(ids.missing(), PINNED[0]);
        assert_eq!(ids.of_integer(0), PINNED[1]);
        assert_eq!(ids.of_integer(-7), PINNED[2]);
        assert_eq!(ids.of_text(b"05db9164"), PINNED[3]);
        assert_eq!(ids.of_text(b"68fd1e64-and-more"), PINNED[4]);
        assert_eq!(FieldIds::new("C2").of_integer(0), PINNED[5]);
    }

    const PINNED: [u64; 6] = [
        0x1c6b_0630_4a01_c912,
        0x7486_7440_fcf1_e3d0,
        0x83a6_b455_ef2f_92ab,
        0x023d_84a4_940a_0be8,
        0xb052_6a48_b461_c9b5,
        0xc40b_c8e1_dc10_f6c9,
    ];

    #[test]
    fn only_canonical_integers_are_integers() {
        for (text, value) in [
            ("0", Some(0)),
            ("-1", Some(-1)),
            ("12345678", Some(12_345_678)),
            ("9223372036854775807", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("99999999999999999999", None),
            ("00", None),
            ("007", None),
            ("-0", None),
            ("+1", None),
            ("1.0", None),
            ("-", None),
            ("", None),
            ("1e3", None),
        ] {
            assert_eq!(canonical_integer(text.as_bytes()), value, "{text}");
        }
    }

    #[test]
    fn unsigned_beyond_i64_agrees_with_its_text() {
        let ids = FieldIds::new("C1");
        assert_eq!(ids.of_unsigned(u64::MAX), ids.of_text(b"18446744073709551615"));
        assert_ne!(ids.of_unsigned(u64::MAX), ids.of_integer(-1));
        assert_eq!(ids.of_float(3.0), ids.of_text(b"3"));
        assert_eq!(ids.of_float(0.1), ids.of_text(b"0.1"));
        assert_eq!(ids.of_float(0.1f32), ids.of_text(b"0.1"));
    }

    #[test]
    fn short_texts_have_distinct_ids_with_even_low_bits() {
        let ids = FieldIds::new("C1");
        let mut seen = BTreeSet::new();
        let mut buckets = [0u32; 64];
        for a in 0..=255u8 {
            for b in 0..=255u8 {
                let id = ids.of_text(&[a, b]);
                buckets[(id % 64) as usize] += 1;
                seen.insert(id);
            }
            seen.insert(ids.of_text(&[a]));
            seen.insert(ids.of_text(&[a, 0, 0]));
        }
        assert_eq!(seen.len(), 65_536 + 512);
        for count in buckets {
            assert!((880..1170).contains(&count), "{count} of 65536 in one bucket of 64");
        }
    }

    proptest! {
        #[test]
        fn an_integer_and_its_text_have_one_id(value: i64) {
            let ids = FieldIds::new("any");
            prop_assert_eq!(ids.of_integer(value), ids.of_text(value.to_string().as_bytes()));
        }

        #[test]
        fn different_texts_have_different_ids(a: Vec<u8>, b: Vec<u8>) {
            let ids = FieldIds::new("any");
            prop_assert_eq!(a == b, ids.of_text(&a) == ids.of_text(&b));
        }
    }
}
