//! Text becomes a number, fast for the forms that data is full of.

/// Powers of ten that a double holds exactly.
const POWERS: [f64; 19] =
    [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18];

/// The finite number that `text` is, correctly rounded; `None` for anything else.
#[inline]
pub(crate) fn parse(text: &[u8]) -> Option<f64> {
    let (sign, digits) = match text {
        [b'-', digits @ ..] => (-1.0, digits),
        digits => (1.0, digits),
    };
    // 18 digits and a point fit u64.
    if digits.is_empty() || digits.len() > 19 {
        return parse_any(text);
    }
    let (mut mantissa, mut seen, mut point) = (0u64, 0usize, None);
    for &byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit <= 9 {
            mantissa = mantissa.wrapping_mul(10).wrapping_add(u64::from(digit));
            seen += 1;
        } else if byte == b'.' && point.is_none() {
            point = Some(seen);
        } else {
            return parse_any(text);
        }
    }
    // Both operands are exact below 2^53, so the one division rounds once: correctly.
    if seen == 0 || seen > 18 || mantissa > 1 << 53 {
        return parse_any(text);
    }
    let value = mantissa as f64;
    Some(sign * point.map_or(value, |point| value / POWERS[seen - point]))
}

/// Exponents, long mantissas, and everything that is no number.
#[cold]
fn parse_any(text: &[u8]) -> Option<f64> {
    let value: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
    value.is_finite().then_some(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_are_read_in_all_usual_forms() {
        for (text, value) in [
            ("0", 0.0),
            ("-1", -1.0),
            ("+5", 5.0),
            ("3.25", 3.25),
            (".5", 0.5),
            ("5.", 5.0),
            ("-0.1", -0.1),
            ("1e3", 1000.0),
            ("1E-2", 0.01),
            ("123456789012345678", 123_456_789_012_345_678.0),
            ("12345678901234567890", 12_345_678_901_234_567_890.0),
        ] {
            assert_eq!(parse(text.as_bytes()), Some(value), "{text}");
        }
    }

    #[test]
    fn what_is_no_finite_number_is_refused() {
        for text in
            ["", "-", ".", "-.", "abc", "1.2.3", "1,5", "0x10", " 1", "nan", "inf", "1e999", "1-", "--1"]
        {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
        }
        assert_eq!(parse(b"\xff\xfe"), None);
    }

    proptest! {
        #[test]
        fn agrees_with_the_standard_library(text in "[-+]?[0-9]{0,20}([.][0-9]{0,12})?(e[-+]?[0-9]{1,2})?") {
            let expected = text.parse::<f64>().ok().filter(|value| value.is_finite());
            prop_assert_eq!(parse(text.as_bytes()).map(f64::to_bits), expected.map(f64::to_bits));
        }

        #[test]
        fn garbage_never_panics(bytes: Vec<u8>) {
            parse(&bytes);
        }
    }
}
