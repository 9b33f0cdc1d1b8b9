//! Text for people: numbers and times, and writing to stdout without tripping over a closed pipe.

use std::io::{self, Write};
use std::time::Duration;

/// Writes a line of data to stdout. A reader that went away (`| head`) is no error: there is nobody to tell.
pub fn line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    quiet(writeln!(out, "{text}").and_then(|()| out.flush()))
}

/// Passes over "broken pipe".
pub fn quiet(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Tells the person something on stderr; where that fails there is nobody to tell.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// So many of something whose plural is regular.
pub fn counted(number: u64, one: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{} {one}s", count(number)) }
}

/// A whole number with separators: 1,234,567.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of bytes: 1.5 GiB.
pub fn bytes(n: u64) -> String {
    let mut value = n as f64;
    for unit in ["bytes", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "bytes" { format!("{n} bytes") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

/// A time in at most two units: 42s, 3m 5s, 2h 10m.
pub fn seconds(s: f64) -> String {
    if !s.is_finite() || s < 0.0 {
        return "?".into();
    }
    if s < 10.0 {
        return format!("{s:.1}s");
    }
    // Above a unit's worth of its parts, the smallest unit is noise.
    let whole = match s as u64 {
        s if s >= 86_400 => s / 3600 * 3600,
        s if s >= 3600 => s / 60 * 60,
        s => s,
    };
    humantime::format_duration(Duration::from_secs(whole)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([5, 1536, 3 << 30].map(bytes), ["5 bytes", "1.5 KiB", "3.0 GiB"]);
        let times = [0.25, 42.4, 185.0, 7_812.0, 200_000.0, f64::NAN].map(seconds);
        assert_eq!(times, ["0.2s", "42s", "3m 5s", "2h 10m", "2days 7h", "?"]);
    }
}
