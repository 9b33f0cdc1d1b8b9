//! Text becomes records: where each starts and ends, whatever the line ends, quotes and packing.
//!
//! This is the one place that decides what a record of a text file is, so that the index and the
//! reader never disagree:
//!
//! - A record ends at `\n`; a `\r` before it belongs to the line end. The last one may lack it.
//! - With quotes, a field whose first byte (after blanks, where they are trimmed) is `"` runs to the
//!   closing `"`, line ends included; `""` inside is a quote. A `"` elsewhere is a letter.
//! - A blank line is no record, wherever it stands.
//! - A UTF-8 byte order mark at the start of a file is not part of the first record.
//! - A record has at most [`RECORD_BYTES_MAX`] bytes.

use std::io::{self, BufReader, Read, Seek, SeekFrom};

use elasticdl_spec::Layout;
use elasticdl_storage::{self as storage, Source};
use memchr::{memchr, memchr_iter, memchr2};

use crate::error::{Error, Result};
use crate::files::Compression;

/// A longer record is taken for a file that is no text, or a quote that was never closed.
pub(crate) const RECORD_BYTES_MAX: usize = 1 << 20;

/// What is read at once: large enough for the system call not to matter, small enough for the cache.
const BUFFER_BYTES: usize = 256 << 10;

/// What in a layout decides where records and columns end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style {
    pub delimiter: u8,
    pub header: bool,
    pub quotes: bool,
    pub trim: bool,
}

impl Style {
    /// The style of a layout; its delimiter must be one byte that means nothing else.
    pub fn of(layout: &Layout) -> Result<Style> {
        let text = &layout.text;
        let delimiter = u8::try_from(text.delimiter).ok().filter(u8::is_ascii);
        match delimiter {
            Some(delimiter) if !matches!(delimiter, b'\n' | b'\r' | b'"') => {
                Ok(Style { delimiter, header: text.header, quotes: text.quotes, trim: text.trim })
            }
            _ => Err(Error::Options(format!(
                "{:?} cannot stand between columns; use one ASCII character, such as ',' or '\\t'",
                text.delimiter
            ))),
        }
    }

    /// Whether `byte` is dropped around values where values are trimmed.
    #[inline]
    pub fn is_blank(&self, byte: u8) -> bool {
        (byte == b' ' || byte == b'\t') && byte != self.delimiter
    }

    /// `value` without the blanks around it, where the layout says so.
    #[inline]
    pub fn trimmed<'a>(&self, mut value: &'a [u8]) -> &'a [u8] {
        if self.trim {
            while let [first, rest @ ..] = value
                && self.is_blank(*first)
            {
                value = rest;
            }
            while let [rest @ .., last] = value
                && self.is_blank(*last)
            {
                value = rest;
            }
        }
        value
    }

    /// The length of the record at the start of `bytes`, line end included; `None` where it ends beyond them.
    #[inline]
    fn record_length(&self, bytes: &[u8]) -> Option<usize> {
        if self.quotes { self.quoted_length(bytes) } else { memchr(b'\n', bytes).map(|end| end + 1) }
    }

    fn quoted_length(&self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        loop {
            let found = at + memchr2(b'\n', b'"', &bytes[at..])?;
            at = found + 1;
            if bytes[found] == b'\n' {
                return Some(at);
            }
            if self.opens(&bytes[..found]) {
                // A quote in the last place is judged once the byte after it is there. Where the
                // file ends with it, the record does too, so nothing is lost.
                at = closing_quote(bytes, at).filter(|quote| quote + 1 < bytes.len())? + 1;
            }
        }
    }

    /// Whether a quote after `before`, within one record, is the first byte of a field.
    fn opens(&self, before: &[u8]) -> bool {
        let blanks =
            if self.trim { before.iter().rev().take_while(|b| self.is_blank(**b)).count() } else { 0 };
        let before = &before[..before.len() - blanks];
        before.last().is_none_or(|byte| *byte == self.delimiter)
    }

    /// Whether any quote in `bytes` is the first byte of a field.
    fn opens_any(&self, bytes: &[u8]) -> bool {
        memchr_iter(b'"', bytes).any(|quote| self.opens(&bytes[..quote]))
    }

    fn is_blank_line(&self, text: &[u8]) -> bool {
        self.trimmed(text).is_empty()
    }
}

/// Where the quote is that closes a field whose content starts at `from`.
///
/// It may be the last byte: whether it closes or is the first half of an escaped one, only what
/// comes after `bytes` can tell.
pub(crate) fn closing_quote(bytes: &[u8], mut from: usize) -> Option<usize> {
    loop {
        let found = from + memchr(b'"', &bytes[from..])?;
        if bytes.get(found + 1) != Some(&b'"') {
            return Some(found);
        }
        from = found + 2;
    }
}

/// One record: its text without the line end, and where it stands.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    pub text: &'a [u8],
    /// Where its first byte is in the (unpacked) file.
    pub offset: u64,
    /// Its first line, counted from 1 at the place where reading started.
    pub line: u64,
}

/// The records of a text file from some offset on.
pub(crate) struct Lines {
    input: Box<dyn Read + Send>,
    path: String,
    packed: bool,
    style: Style,
    /// Read and not yet handed out: `buffer[start..end]`.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    at_end: bool,
    offset: u64,
    line: u64,
}

impl Lines {
    /// Reads `file` from `offset`, which must be 0 in a packed one.
    pub fn open(
        mut file: Source,
        path: &str,
        compression: Compression,
        style: Style,
        offset: u64,
    ) -> Result<Self> {
        // At the start of a file it may be the header alone that is wanted.
        if offset > 0 || !style.header {
            file.read_in_order();
        }
        let input: Box<dyn Read + Send> = match compression {
            Compression::Plain => {
                file.seek(SeekFrom::Start(offset)).map_err(Error::io("seek in", path))?;
                Box::new(file)
            }
            Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(BufReader::new(file))),
            Compression::Zstd => {
                Box::new(zstd::stream::read::Decoder::new(file).map_err(Error::io("unpack", path))?)
            }
        };
        let packed = compression != Compression::Plain;
        assert!(!packed || offset == 0, "a packed file is read from its start");
        Self::over(input, path, packed, style, offset)
    }

    fn over(
        input: Box<dyn Read + Send>,
        path: &str,
        packed: bool,
        style: Style,
        offset: u64,
    ) -> Result<Self> {
        let path = path.to_string();
        let buffer = vec![0; BUFFER_BYTES];
        let mut lines =
            Lines { input, path, packed, style, buffer, start: 0, end: 0, at_end: false, offset, line: 1 };
        if offset == 0 {
            lines.skip_byte_order_mark()?;
        }
        Ok(lines)
    }

    /// The record that [`Lines::next`] will hand out.
    pub fn peek(&mut self) -> Result<Option<Line<'_>>> {
        let Some(line) = self.next()? else { return Ok(None) };
        let (length, offset, line) = (line.text.len(), line.offset, line.line);
        // The text is still in the buffer: nothing is read over what was just handed out.
        self.start -= (self.offset - offset) as usize;
        self.offset = offset;
        self.line = line;
        Ok(Some(Line { text: &self.buffer[self.start..self.start + length], offset, line }))
    }

    /// The next record that is no blank line; `None` at the end of the file.
    #[inline]
    pub fn next(&mut self) -> Result<Option<Line<'_>>> {
        loop {
            let rest = &self.buffer[self.start..self.end];
            let length = match self.style.record_length(rest) {
                Some(length) => length,
                None if !self.at_end => {
                    self.fill()?;
                    continue;
                }
                None if rest.is_empty() => return Ok(None),
                None => rest.len(),
            };
            let (start, offset, line) = (self.start, self.offset, self.line);
            self.start += length;
            self.offset += length as u64;
            self.line +=
                if self.style.quotes { memchr_iter(b'\n', &rest[..length]).count() as u64 } else { 1 };
            // Looked at again below: the borrow checker cannot see that this one ends where the loop goes on.
            if !self.style.is_blank_line(without_line_end(&rest[..length])) {
                let text = without_line_end(&self.buffer[start..start + length]);
                return Ok(Some(Line { text, offset, line }));
            }
        }
    }

    /// Reads more behind what is there, making room first.
    fn fill(&mut self) -> Result<()> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        if self.end == self.buffer.len() {
            if self.end >= RECORD_BYTES_MAX {
                return Err(self.long_record());
            }
            self.buffer.resize(self.end * 2, 0);
        }
        let read = loop {
            match self.input.read(&mut self.buffer[self.end..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result.map_err(|source| self.read_error(source))?,
            }
        };
        self.end += read;
        self.at_end = read == 0;
        Ok(())
    }

    fn skip_byte_order_mark(&mut self) -> Result<()> {
        while self.end < 3 && !self.at_end {
            self.fill()?;
        }
        if self.buffer[..self.end].starts_with(b"\xef\xbb\xbf") {
            self.start = 3;
            self.offset = 3;
        }
        Ok(())
    }

    #[cold]
    fn long_record(&self) -> Error {
        let hint = if self.style.quotes && self.style.opens_any(&self.buffer[..self.end]) {
            "is a quote not closed?"
        } else {
            "is it text, with one record per line?"
        };
        Error::LongRecord { path: self.path.clone(), line: self.line, bytes_max: RECORD_BYTES_MAX, hint }
    }

    #[cold]
    fn read_error(&self, source: io::Error) -> Error {
        if !self.packed {
            return Error::Io { attempt: "read", path: (&self.path).into(), source };
        }
        // What comes neither from the system nor from object storage is the unpacker's: the file is damaged and
        // stays so.
        let outside = source.raw_os_error().is_some()
            || source.get_ref().is_some_and(|inner| inner.is::<storage::Refusal>());
        let source = if outside { source } else { io::Error::new(io::ErrorKind::InvalidData, source) };
        Error::Io { attempt: "unpack", path: (&self.path).into(), source }
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines")
            .field("path", &self.path)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

#[inline]
fn without_line_end(text: &[u8]) -> &[u8] {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    text.strip_suffix(b"\r").unwrap_or(text)
}

/// How many lines start before `offset`: a pass over the file, for messages only.
pub(crate) fn lines_before(path: &str, offset: u64) -> Result<u64> {
    let mut input = storage::open(path).map_err(Error::io("open", path))?.take(offset);
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut lines = 0;
    loop {
        match input.read(&mut buffer) {
            Ok(0) => return Ok(lines),
            Ok(read) => lines += memchr_iter(b'\n', &buffer[..read]).count() as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::io("read", path)(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Style = Style { delimiter: b',', header: false, quotes: false, trim: false };
    const QUOTED: Style = Style { quotes: true, ..PLAIN };

    /// Hands out a byte at a time, so that every record straddles reads.
    struct Trickle(io::Cursor<Vec<u8>>);

    impl Read for Trickle {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let most = into.len().min(1);
            self.0.read(&mut into[..most])
        }
    }

    fn records(text: &[u8], style: Style) -> Vec<(String, u64, u64)> {
        let mut lines = Lines::over(Box::new(Trickle(io::Cursor::new(text.to_vec()))), "x", false, style, 0)
            .expect("memory can be read");
        let mut records = Vec::new();
        while let Some(line) = lines.next().expect("memory can be read") {
            records.push((String::from_utf8_lossy(line.text).into_owned(), line.offset, line.line));
        }
        records
    }

    fn texts(text: &[u8], style: Style) -> Vec<String> {
        records(text, style).into_iter().map(|(text, ..)| text).collect()
    }

    #[test]
    fn line_ends_of_both_kinds_end_records_and_the_last_may_lack_one() {
        assert_eq!(texts(b"a\nb\r\nc", PLAIN), ["a", "b", "c"]);
        assert_eq!(texts(b"a\nb\r\nc\r\n", PLAIN), ["a", "b", "c"]);
        assert_eq!(texts(b"", PLAIN), [""; 0]);
    }

    #[test]
    fn blank_lines_are_no_records_but_count_as_lines() {
        let found = records(b"\na\n\n\r\nb\n\n", PLAIN);
        assert_eq!(found, [("a".into(), 1, 2), ("b".into(), 6, 5)]);
        assert_eq!(texts(b" \na\n", PLAIN), [" ", "a"]);
        assert_eq!(texts(b" \t\na\n", Style { trim: true, ..PLAIN }), ["a"]);
    }

    #[test]
    fn quotes_hide_line_ends_and_a_quote_inside_a_field_is_a_letter() {
        let found = records(b"1,\"a\nb\",2\n3,5\" pipe,4\n\"x\"\"\ny\",z\n", QUOTED);
        let expected = [("1,\"a\nb\",2", 0, 1), ("3,5\" pipe,4", 10, 3), ("\"x\"\"\ny\",z", 22, 4)];
        assert_eq!(found, expected.map(|(text, offset, line)| (text.to_string(), offset, line)));
        assert_eq!(texts(b"\"a\nb\n", PLAIN), ["\"a", "b"]);
        assert_eq!(texts(b"a, \"b\nc\"\nd", Style { trim: true, ..QUOTED }), ["a, \"b\nc\"", "d"]);
    }

    #[test]
    fn an_open_quote_ends_with_the_file() {
        assert_eq!(texts(b"a\n\"b\nc", QUOTED), ["a", "\"b\nc"]);
        assert_eq!(texts(b"a\n\"b\"", QUOTED), ["a", "\"b\""]);
    }

    #[test]
    fn byte_order_mark_is_skipped() {
        assert_eq!(records(b"\xef\xbb\xbfa\nb", PLAIN), [("a".into(), 3, 1), ("b".into(), 5, 2)]);
        assert_eq!(texts(b"\xef\xbb", PLAIN).len(), 1);
    }

    #[test]
    fn a_record_without_end_is_an_error_that_names_its_line() {
        let mut text = b"a\n\"b".to_vec();
        text.resize(RECORD_BYTES_MAX * 3, b'x');
        let error = |style| {
            let mut lines = Lines::over(Box::new(io::Cursor::new(text.clone())), "big.csv", false, style, 0)
                .expect("memory can be read");
            lines.next().expect("the first record is fine");
            lines.next().expect_err("the second has no end").to_string()
        };
        assert_eq!(
            error(PLAIN),
            "the record at line 2 of big.csv is longer than 1048576 bytes; is it text, with one record per line?"
        );
        assert!(error(QUOTED).ends_with("is a quote not closed?"));
    }
}
