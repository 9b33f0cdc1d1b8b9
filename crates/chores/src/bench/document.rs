//! docs/benchmarks.md: sections that chores write, and what tables are made of.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// Replaces the section that this chore has written before, or adds it at the end.
pub fn write_section(root: &Path, chore: &str, section: &str) -> Result<()> {
    let path = root.join("docs/benchmarks.md");
    let old = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => "# Benchmarks\n".to_owned(),
        Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
    };
    let new = replace_section(&old, chore, section)
        .with_context(|| format!("find the section in {}", path.display()))?;
    let directory = path.parent().context("the file is in a directory")?;
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    fs::write(&path, new).with_context(|| format!("write {}", path.display()))?;
    eprintln!("wrote {}", path.display());
    Ok(())
}

/// The text with the section between the markers replaced; the markers are added where there are none.
fn replace_section(old: &str, chore: &str, section: &str) -> Result<String> {
    let (begin, end) = (format!("<!-- {chore}: begin -->"), format!("<!-- {chore}: end -->"));
    let marked = format!("{begin}\n{section}{end}\n");
    match (old.find(&begin), old.find(&end)) {
        (None, None) => Ok(format!("{}\n\n{marked}", old.trim_end())),
        (Some(from), Some(to)) if from < to => {
            let after = old[to + end.len()..].trim_start_matches('\n');
            let gap = if after.is_empty() { "" } else { "\n" };
            Ok(format!("{}{marked}{gap}{after}", &old[..from]))
        }
        _ => bail!("its markers {begin} and {end} do not match; remove them"),
    }
}

/// The first row is the header; so many columns to the left are texts, the rest figures.
pub fn markdown_table(rows: &[Vec<String>], texts: usize) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let padding = " ".repeat(width - cell.chars().count());
            let (before, after) =
                if column < texts { ("", padding.as_str()) } else { (padding.as_str(), "") };
            let _ = write!(text, "| {before}{cell}{after} ");
        }
        text.push_str("|\n");
        if index == 0 {
            for (column, width) in widths.iter().enumerate() {
                let dashes = "-".repeat(width - usize::from(column >= texts));
                let _ = write!(text, "| {dashes}{} ", if column < texts { "" } else { ":" });
            }
            text.push_str("|\n");
        }
    }
    text
}

/// Where there is no figure.
pub fn dash() -> String {
    "–".to_owned()
}

/// `1234567` as `1,234,567`.
pub fn thousands(value: f64) -> String {
    let digits = format!("{:.0}", value.round());
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `None` for nothing; the mean of the middle two for an even count.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        count if count % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_an_even_count_is_the_mean_of_the_middle() {
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(Vec::new()), None);
    }

    #[test]
    fn section_is_replaced_in_place_and_the_rest_is_kept() {
        let first = replace_section("# Benchmarks\n", "bench x", "one\n").unwrap();
        let (begin, end) = ("<!-- bench x: begin -->", "<!-- bench x: end -->");
        assert_eq!(first, format!("# Benchmarks\n\n{begin}\none\n{end}\n"));
        let more = format!("{first}\n## Other\n");
        let second = replace_section(&more, "bench x", "two\n").unwrap();
        assert_eq!(second, more.replace("one", "two"));
        let both = replace_section(&second, "bench y", "three\n").unwrap();
        assert!(both.starts_with(second.trim_end()), "the section of another chore comes after");
        assert!(replace_section(&format!("{end}\n{begin}\n"), "bench x", "x").is_err());
    }

    #[test]
    fn table_is_aligned_markdown() {
        let rows =
            [["case", "what", "rate"], ["a", "CSV", "1,200"]].map(|row| row.map(str::to_owned).to_vec());
        let expected = "| case | what |  rate |\n| ---- | ---- | ----: |\n| a    | CSV  | 1,200 |\n";
        assert_eq!(markdown_table(&rows, 2), expected);
    }

    #[test]
    fn thousands_are_grouped() {
        assert_eq!([0.0, 999.4, 1000.0, 1_234_567.0].map(thousands), ["0", "999", "1,000", "1,234,567"]);
    }
}
