//! What is to be compared with: a Redis that has the rows as strings, asked for a batch with MGET.
//!
//! Keys are the 8 bytes of an id and values those of a row, so that nothing is turned into text on the way.

#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::error::Error;
use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Bytes of a value: a row of dim 16.
pub const VALUE_BYTES: usize = 64;
/// Keys of one command; between 100 and 40,000 no number stood out. Those of a batch are sent together, so that Redis
/// works on the next command while its last answer is on the way.
const KEYS: usize = 1_000;

/// A connection to a Redis.
pub struct Redis {
    stream: TcpStream,
    request: Vec<u8>,
    answer: Vec<u8>,
    values: Vec<u8>,
}

impl Redis {
    pub fn connect(address: &str) -> Result<Redis> {
        let stream =
            TcpStream::connect(address).map_err(|e| format!("connect to Redis at {address}: {e}"))?;
        stream.set_nodelay(true)?;
        Ok(Redis { stream, request: Vec::new(), answer: Vec::new(), values: Vec::new() })
    }

    /// Gives each id a value.
    pub fn fill(&mut self, ids: impl Iterator<Item = u64>) -> Result<()> {
        let ids: Vec<u64> = ids.collect();
        for ids in ids.chunks(KEYS) {
            self.request.clear();
            begin(&mut self.request, 1 + 2 * ids.len());
            bulk(&mut self.request, b"MSET");
            for id in ids {
                bulk(&mut self.request, &id.to_le_bytes());
                bulk(&mut self.request, &[id.to_le_bytes()[0]; VALUE_BYTES]);
            }
            self.stream.write_all(&self.request)?;
            let mut said = [0; 5];
            self.stream.read_exact(&mut said)?;
            if said != *b"+OK\r\n" {
                return Err(format!("Redis answers MSET with {:?}", String::from_utf8_lossy(&said)).into());
            }
        }
        Ok(())
    }

    /// Keys a second, over these batches.
    pub fn pull(&mut self, batches: &[Vec<u64>]) -> Result<f64> {
        let start = Instant::now();
        for ids in batches {
            self.get(ids)?;
        }
        let keys: usize = batches.iter().map(Vec::len).sum();
        Ok(keys as f64 / start.elapsed().as_secs_f64())
    }

    /// Brings the values of these ids.
    fn get(&mut self, ids: &[u64]) -> Result<()> {
        self.request.clear();
        for ids in ids.chunks(KEYS) {
            begin(&mut self.request, 1 + ids.len());
            bulk(&mut self.request, b"MGET");
            ids.iter().for_each(|id| bulk(&mut self.request, &id.to_le_bytes()));
        }
        self.stream.write_all(&self.request)?;
        self.values.clear();
        for ids in ids.chunks(KEYS) {
            self.answer.resize(answer_bytes(ids.len()), 0);
            self.stream.read_exact(&mut self.answer)?;
            values(&self.answer, ids.len(), &mut self.values)?;
        }
        Ok(())
    }

    /// Its version.
    pub fn version(&mut self) -> Result<String> {
        self.request.clear();
        begin(&mut self.request, 2);
        bulk(&mut self.request, b"INFO");
        bulk(&mut self.request, b"server");
        self.stream.write_all(&self.request)?;
        let mut reader = BufReader::new(&self.stream);
        let length: usize = String::from_utf8(line(&mut reader)?)?.trim_start_matches('$').parse()?;
        let mut text = vec![0; length + 2];
        reader.read_exact(&mut text)?;
        let text = String::from_utf8(text)?;
        let found = text.lines().find_map(|line| line.strip_prefix("redis_version:"));
        Ok(found.ok_or("Redis tells no version")?.to_owned())
    }
}

/// Bytes up to the end of the line, without it.
fn line(reader: &mut impl Read) -> Result<Vec<u8>> {
    let (mut text, mut byte) = (Vec::new(), [0]);
    loop {
        reader.read_exact(&mut byte)?;
        match byte[0] {
            b'\r' => {}
            b'\n' => return Ok(text),
            other => text.push(other),
        }
    }
}

/// Begins a command, or an answer, of so many strings.
fn begin(out: &mut Vec<u8>, strings: usize) {
    out.extend_from_slice(format!("*{strings}\r\n").as_bytes());
}

/// Appends a string.
fn bulk(out: &mut Vec<u8>, bytes: &[u8]) {
    out.push(b'$');
    match bytes.len() {
        // Keys, of which there are many.
        digit @ 0..=9 => out.push(b'0' + digit as u8),
        length => out.extend_from_slice(length.to_string().as_bytes()),
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// How long an answer with so many values is.
fn answer_bytes(values: usize) -> usize {
    format!("*{values}\r\n").len() + values * (HEAD.len() + VALUE_BYTES + END.len())
}

/// What stands around a value.
const HEAD: &[u8] = b"$64\r\n";
const END: &[u8] = b"\r\n";

/// Appends the values of an answer to `out`, beside each other.
fn values(answer: &[u8], count: usize, out: &mut Vec<u8>) -> Result<()> {
    let head = format!("*{count}\r\n");
    let strings =
        answer.strip_prefix(head.as_bytes()).ok_or("Redis answers with something else than values")?;
    let mut strings = strings.chunks_exact(HEAD.len() + VALUE_BYTES + END.len());
    for string in &mut strings {
        let value = string.strip_prefix(HEAD).and_then(|rest| rest.strip_suffix(END));
        out.extend_from_slice(value.ok_or("Redis lacks a value")?);
    }
    if strings.remainder().is_empty() { Ok(()) } else { Err("Redis answers with too few values".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_an_array_of_strings_with_their_lengths() {
        let mut out = Vec::new();
        begin(&mut out, 3);
        bulk(&mut out, b"MGET");
        bulk(&mut out, b"a\r\nb");
        bulk(&mut out, &[b'x'; 12]);
        assert_eq!(out, b"*3\r\n$4\r\nMGET\r\n$4\r\na\r\nb\r\n$12\r\nxxxxxxxxxxxx\r\n");
    }

    /// What Redis answers, written out.
    fn answer(values: &[[u8; VALUE_BYTES]]) -> Vec<u8> {
        let mut out = Vec::new();
        begin(&mut out, values.len());
        values.iter().for_each(|value| bulk(&mut out, value));
        out
    }

    #[test]
    fn values_of_an_answer_stand_beside_each_other() {
        // A value may look like the end of one.
        let sent = [[b'a'; VALUE_BYTES], [b'\n'; VALUE_BYTES], [b'$'; VALUE_BYTES]];
        let answer = answer(&sent);
        assert_eq!(answer.len(), answer_bytes(3));
        let mut out = Vec::new();
        values(&answer, 3, &mut out).unwrap();
        assert_eq!(out, sent.concat());
    }

    #[test]
    fn an_answer_that_lacks_a_value_is_an_error() {
        let whole = answer(&[[b'a'; VALUE_BYTES]; 2]);
        let missing = b"*1\r\n$-1\r\n";
        for (answer, count) in
            [(&whole[..], 3), (&whole[..whole.len() - 1], 2), (&missing[..], 1), (b"-ERR x\r\n", 1)]
        {
            assert!(values(answer, count, &mut Vec::new()).is_err(), "{:?}", String::from_utf8_lossy(answer));
        }
    }
}
