//! Lines become records of a batch: the hot path of text.

use elasticdl_spec::{Layout, Shard};
use elasticdl_storage::Source;
use memchr::{memchr, memchr_iter};

use super::plan::{Plan, RowMut, Wrong, header_names};
use crate::batch::Batch;
use crate::error::{BadRecord, Error, Place, Result};
use crate::files::Compression;
use crate::lines::{Lines, Style, closing_quote, lines_before};

/// The records of one shard of a text file.
#[derive(Debug)]
pub(crate) struct TextReader {
    path: String,
    lines: Lines,
    style: Style,
    plan: Plan,
    /// Where reading started, and how many lines are before it once somebody had to know.
    offset: u64,
    lines_before: Option<u64>,
    scratch: Vec<u8>,
}

/// Why a line is no record.
#[derive(Debug)]
pub(crate) enum BadLine {
    /// It has more or fewer columns than expected.
    Columns,
    /// A field's quotes are wrong.
    Quotes(usize),
    /// A value cannot be used.
    Value(usize, Wrong),
}

impl TextReader {
    /// Opens `file` where the shard starts.
    pub fn open(file: Source, shard: &Shard, compression: Compression, layout: &Layout) -> Result<Self> {
        let style = Style::of(layout)?;
        let path = &shard.path;
        let again = |file: &Source| file.try_clone().map_err(Error::io("open", path));
        let plan;
        let mut lines;
        if style.header {
            let mut top = Lines::open(again(&file)?, path, compression, style, 0)?;
            plan = header_plan(&mut top, path, layout)?;
            // Offset 0 means the first record, and in a file with a header that is not at 0. The clone
            // shares the position in the file, so it has to be done with when the other one starts.
            lines = match shard.offset {
                0 => top,
                offset => Lines::open(file, path, compression, style, offset)?,
            };
        } else {
            plan = Plan::without_header(path, layout)?;
            lines = Lines::open(file, path, compression, style, shard.offset)?;
        }
        if compression != Compression::Plain {
            skip(&mut lines, shard.first)?;
        }
        let offset = shard.offset;
        Ok(TextReader {
            path: path.clone(),
            lines,
            style,
            plan,
            offset,
            lines_before: None,
            scratch: Vec::new(),
        })
    }

    /// Passes over records without decoding them. Returns how many there were.
    pub fn skip(&mut self, records: u64) -> Result<u64> {
        skip(&mut self.lines, records)
    }

    /// Appends up to `records` records to `batch`, and those that cannot be used to `bad`.
    ///
    /// Returns how many records were taken from the file; fewer than asked for only at its end.
    pub fn read(&mut self, records: usize, batch: &mut Batch, bad: &mut Vec<BadRecord>) -> Result<usize> {
        let mut at = batch.records;
        self.plan.extend(batch, records);
        let mut taken = 0;
        while taken < records {
            let Some(line) = self.lines.next()? else { break };
            taken += 1;
            let mut row = self.plan.row(batch, at);
            match decode(line.text, self.style, &self.plan, &mut self.scratch, &mut row) {
                Ok(()) => at += 1,
                Err(why) => {
                    let before = match self.lines_before {
                        Some(before) => before,
                        None => *self.lines_before.insert(lines_before(&self.path, self.offset)?),
                    };
                    let place = Place::Line(before + line.line);
                    bad.push(explain(line.text, self.style, &self.plan, place, why));
                }
            }
        }
        self.plan.truncate(batch, at);
        Ok(taken)
    }

    /// The values of the next record as they stand in the file, which [`TextReader::read`] then decodes.
    pub fn peek(&mut self) -> Result<Option<Vec<Vec<u8>>>> {
        let mut values = Vec::new();
        let Some(line) = self.lines.peek()? else { return Ok(None) };
        // What is wrong with it, reading it will tell.
        let _ = split(line.text, self.style, &mut self.scratch, &mut |_, value| {
            values.push(value.to_vec());
            Ok(())
        });
        Ok(Some(values))
    }

    /// How the columns are used.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

/// Reads the header at the start of `lines` and finds the layout's columns in it.
pub(crate) fn header_plan(lines: &mut Lines, path: &str, layout: &Layout) -> Result<Plan> {
    let style = Style::of(layout)?;
    let Some(header) = lines.next()? else {
        return Err(Error::File {
            path: path.into(),
            reason: "it has nothing but blank lines, not even a header",
        });
    };
    let names = header_names(header.text, style);
    Plan::new(path, names, layout)
}

fn skip(lines: &mut Lines, records: u64) -> Result<u64> {
    for skipped in 0..records {
        if lines.next()?.is_none() {
            return Ok(skipped);
        }
    }
    Ok(records)
}

/// Puts every value of a line where it belongs.
#[inline]
fn decode(
    line: &[u8],
    style: Style,
    plan: &Plan,
    scratch: &mut Vec<u8>,
    row: &mut RowMut<'_>,
) -> std::result::Result<(), BadLine> {
    let columns = split(line, style, scratch, &mut |column, value| {
        let uses = plan.uses.get(column).ok_or(BadLine::Columns)?;
        for what in uses {
            plan.put_text(what, value, row).map_err(|wrong| BadLine::Value(column, wrong))?;
        }
        Ok(())
    })?;
    if columns == plan.uses.len() { Ok(()) } else { Err(BadLine::Columns) }
}

/// Cuts a line into values, unquoted and trimmed, and hands each with its column to `put`.
///
/// Returns how many there are. `scratch` holds a value whose quotes had to be unescaped.
#[inline]
pub(crate) fn split(
    line: &[u8],
    style: Style,
    scratch: &mut Vec<u8>,
    put: &mut impl FnMut(usize, &[u8]) -> std::result::Result<(), BadLine>,
) -> std::result::Result<usize, BadLine> {
    if style.quotes && memchr(b'"', line).is_some() {
        return split_quoted(line, style, scratch, put);
    }
    let (mut column, mut start) = (0, 0);
    for end in memchr_iter(style.delimiter, line) {
        put(column, style.trimmed(&line[start..end]))?;
        column += 1;
        start = end + 1;
    }
    put(column, style.trimmed(&line[start..]))?;
    Ok(column + 1)
}

fn split_quoted(
    line: &[u8],
    style: Style,
    scratch: &mut Vec<u8>,
    put: &mut impl FnMut(usize, &[u8]) -> std::result::Result<(), BadLine>,
) -> std::result::Result<usize, BadLine> {
    let (mut column, mut start) = (0, 0);
    loop {
        let blanks =
            if style.trim { line[start..].iter().take_while(|b| style.is_blank(**b)).count() } else { 0 };
        let content = start + blanks + 1;
        let end;
        if line.get(start + blanks) == Some(&b'"') {
            let close = closing_quote(line, content).ok_or(BadLine::Quotes(column))?;
            end = memchr(style.delimiter, &line[close..]).map_or(line.len(), |at| close + at);
            if !style.trimmed(&line[close + 1..end]).is_empty() {
                return Err(BadLine::Quotes(column));
            }
            put(column, unescaped(&line[content..close], scratch))?;
        } else {
            end = memchr(style.delimiter, &line[start..]).map_or(line.len(), |at| start + at);
            put(column, style.trimmed(&line[start..end]))?;
        }
        column += 1;
        if end == line.len() {
            return Ok(column);
        }
        start = end + 1;
    }
}

/// A quoted field's content with `""` made `"`.
fn unescaped<'a>(content: &'a [u8], scratch: &'a mut Vec<u8>) -> &'a [u8] {
    if memchr(b'"', content).is_none() {
        return content;
    }
    scratch.clear();
    let mut rest = content;
    while let Some(quote) = memchr(b'"', rest) {
        scratch.extend_from_slice(&rest[..=quote]);
        rest = rest.get(quote + 2..).unwrap_or_default();
    }
    scratch.extend_from_slice(rest);
    scratch
}

/// What is wrong with a line, in words.
#[cold]
fn explain(line: &[u8], style: Style, plan: &Plan, place: Place, why: BadLine) -> BadRecord {
    let mut scratch = Vec::new();
    let mut values = Vec::new();
    let split = split(line, style, &mut scratch, &mut |_, value| {
        values.push(value.to_vec());
        Ok(())
    });
    match (split, why) {
        (Err(BadLine::Quotes(column)), _) => {
            plan.bad_record(place, format!("the quotes of column {} don't match", column + 1))
        }
        // A shifted line has wrong values too; that its columns are wrong explains them.
        (Ok(found), BadLine::Value(column, wrong)) if found == plan.uses.len() => {
            plan.bad_value(place, column, &values[column], wrong)
        }
        (found, _) => {
            let (found, expected) = (found.unwrap_or(values.len()), plan.uses.len());
            plan.bad_record(place, format!("{found} columns found, {expected} expected"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(line: &str, style: Style) -> std::result::Result<Vec<String>, BadLine> {
        let mut values = Vec::new();
        split(line.as_bytes(), style, &mut Vec::new(), &mut |column, value| {
            assert_eq!(column, values.len());
            values.push(String::from_utf8_lossy(value).into_owned());
            Ok(())
        })?;
        Ok(values)
    }

    const CSV: Style = Style { delimiter: b',', header: false, quotes: true, trim: false };

    #[test]
    fn values_lie_between_delimiters() {
        assert_eq!(values("a,,c,", CSV).expect("no quotes"), ["a", "", "c", ""]);
        assert_eq!(values("a", CSV).expect("no quotes"), ["a"]);
        let trim = Style { trim: true, ..CSV };
        assert_eq!(values(" a , b\t,, \"c \" ", trim).expect("quotes match"), ["a", "b", "", "c "]);
    }

    #[test]
    fn quoted_values_may_hold_delimiters_and_quotes() {
        assert_eq!(
            values("\"a,b\",\"say \"\"hi\"\"\",5\" pipe,\"\"", CSV).expect("quotes match"),
            ["a,b", "say \"hi\"", "5\" pipe", ""]
        );
        assert_eq!(values("\"a", Style { quotes: false, ..CSV }).expect("a letter"), ["\"a"]);
    }

    #[test]
    fn quotes_that_do_not_match_are_refused() {
        assert!(matches!(values("a,\"b", CSV), Err(BadLine::Quotes(1))));
        assert!(matches!(values("\"a\"b,c", CSV), Err(BadLine::Quotes(0))));
    }
}
