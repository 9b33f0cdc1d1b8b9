//! Amounts as Kubernetes writes them: `500m`, `2`, `1.5`, `4Gi`, `100M`, `1e3`.

const SUFFIXES: [(&str, f64); 16] = [
    ("Ki", 1024.0),
    ("Mi", 1048576.0),
    ("Gi", 1073741824.0),
    ("Ti", 1099511627776.0),
    ("Pi", 1125899906842624.0),
    ("Ei", 1152921504606846976.0),
    ("n", 1e-9),
    ("u", 1e-6),
    ("m", 1e-3),
    ("k", 1e3),
    ("M", 1e6),
    ("G", 1e9),
    ("T", 1e12),
    ("P", 1e15),
    ("E", 1e18),
    ("", 1.0),
];

/// Thousandths of the unit, rounded up: millicores for processors. `None`: it is no amount.
pub fn parse(text: &str) -> Option<u128> {
    let (number, factor) = SUFFIXES
        .iter()
        .filter_map(|(suffix, factor)| text.strip_suffix(suffix).map(|number| (number, *factor)))
        .find(|(number, _)| is_number(number))?;
    let thousandths = number.parse::<f64>().ok()? * factor * 1000.0;
    // Beyond this a double is no whole number any more, and no machine is as large.
    (0.0..1e30).contains(&thousandths).then(|| (thousandths - 1e-6).ceil().max(0.0) as u128)
}

/// Whole units, rounded up: bytes for memory.
pub fn whole(text: &str) -> Option<u64> {
    u64::try_from(parse(text)?.div_ceil(1000)).ok()
}

/// An amount of memory in the largest unit that says it exactly.
pub fn bytes(amount: u64) -> String {
    const UNITS: [(&str, u32); 3] = [("Gi", 30), ("Mi", 20), ("Ki", 10)];
    let unit = UNITS.iter().find(|(_, bits)| amount > 0 && amount.trailing_zeros() >= *bits);
    unit.map_or_else(|| amount.to_string(), |(name, bits)| format!("{}{name}", amount >> bits))
}

fn is_number(text: &str) -> bool {
    let digits = |t: &str| !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => digits(mantissa) && exponent.parse::<i8>().is_ok(),
        None => digits(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_as_kubernetes_reads_them() {
        let cases = [
            ("1", 1000),
            ("500m", 500),
            ("1.5", 1500),
            ("0.1", 100),
            ("2k", 2_000_000),
            ("1e3", 1_000_000),
            ("1E3", 1_000_000),
            ("1Ki", 1_024_000),
            ("4Gi", 4 * 1024 * 1024 * 1024 * 1000),
            ("1E", 1_000_000_000_000_000_000_000),
            ("1u", 1),
            ("0", 0),
        ];
        for (text, thousandths) in cases {
            assert_eq!(parse(text), Some(thousandths), "{text}");
        }
        for wrong in ["", "-1", "Gi", "1gi", "1 Gi", "one", "1.5.2", "1e", "NaN", "inf"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn bytes_are_said_in_the_largest_exact_unit() {
        for text in ["4Gi", "512Mi", "1536Mi", "3Ki", "1000", "0"] {
            assert_eq!(bytes(whole(text).unwrap()), text);
        }
        assert_eq!(whole("1500m"), Some(2));
    }
}
