//! Frames: what travels between workers and servers.
//!
//! A frame is a sequence of 64-bit little-endian words: two of header, then the payload. Everything in
//! a payload starts at a word, so ids and floats are used in place, without a copy. The layouts of the
//! payloads are in [`crate::ps`]. Reading never trusts a length further than [`Limits::words_max`], makes room as
//! data arrives, not as it is announced, and never for more than the longest frame.
//!
//! A long frame may be sent in parts, each with the header again, so that what is ready travels while the rest is
//! made. The highest bit of the kind says that another part follows; none is empty, and the limit counts for all of
//! them together. Who reads gets the frame whole. Whoever has to give one up in the middle of it sends another one
//! instead of the next part, to say why.

use std::io::{Read, Write};

use crate::error::{Error, Result};

const HEADER_WORDS: usize = 2;
const HEADER_BYTES: usize = HEADER_WORDS * 8;
/// With this bit in its kind a part of a frame says that another one follows.
const MORE: u32 = 1 << 31;
/// How many words are made room for before the first of them has arrived.
const STEP_WORDS: usize = 1 << 17;

/// What a peer may send.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The longest payload accepted, in words of 8 bytes.
    pub words_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { words_max: 1 << 26 } // 512 MiB
    }
}

/// A frame to fill and send, or one that was received. Reused between calls: it only grows, and what
/// is about to be overwritten is not cleared first.
#[derive(Debug, Default)]
pub struct Frame {
    /// Room; the frame is the first `len` words of it.
    words: Vec<u64>,
    len: usize,
}

impl Frame {
    /// Begins a new frame of this kind.
    pub fn begin(&mut self, kind: u32, request: u64) {
        self.len = 0;
        self.put_all(&[u64::from(kind), request]);
    }

    /// What the frame is; see [`crate::ps`].
    pub fn kind(&self) -> u32 {
        self.filled().first().map_or(0, |w| *w as u32)
    }

    /// The number that ties an answer to its request.
    pub fn request(&self) -> u64 {
        self.filled().get(1).copied().unwrap_or(0)
    }

    /// Appends a word.
    #[inline]
    pub fn put(&mut self, word: u64) {
        self.grow(1)[0] = word;
    }

    /// Appends words.
    pub fn put_all(&mut self, words: &[u64]) {
        self.grow(words.len()).copy_from_slice(words);
    }

    /// Appends floats, two to a word, the last one padded.
    pub fn put_floats(&mut self, floats: &[f32]) {
        self.grow_floats(floats.len()).copy_from_slice(floats);
    }

    /// Appends room for `count` floats and hands it out to be filled, every one of them: what it holds
    /// now is left over from an earlier frame.
    pub fn grow_floats(&mut self, count: usize) -> &mut [f32] {
        let room: &mut [f32] = bytemuck::cast_slice_mut(self.grow(count.div_ceil(2)));
        if let Some(padding) = room.get_mut(count) {
            *padding = 0.0;
        }
        &mut room[..count]
    }

    /// The same for numbers of 16 bits, four to a word.
    pub fn grow_halves(&mut self, count: usize) -> &mut [u16] {
        let room: &mut [u16] = bytemuck::cast_slice_mut(self.grow(count.div_ceil(4)));
        let (numbers, padding) = room.split_at_mut(count);
        padding.fill(0);
        numbers
    }

    /// Appends bytes with their length before them.
    pub fn put_bytes(&mut self, bytes: &[u8]) {
        self.put(bytes.len() as u64);
        let room: &mut [u8] = bytemuck::cast_slice_mut(self.grow(bytes.len().div_ceil(8)));
        let (text, padding) = room.split_at_mut(bytes.len());
        text.copy_from_slice(bytes);
        padding.fill(0);
    }

    /// Appends `count` words and hands them out to be filled.
    fn grow(&mut self, count: usize) -> &mut [u64] {
        self.grow_within(count, usize::MAX)
    }

    /// The same, where what is made room for in advance is at most so many words in all.
    fn grow_within(&mut self, count: usize, room_max: usize) -> &mut [u64] {
        let start = self.len;
        self.len += count;
        if self.words.len() < self.len {
            let room = self.len.max((start * 2).min(room_max));
            // A vector by itself would make room for twice of what it had.
            self.words.reserve_exact(room - self.words.len());
            self.words.resize(room, 0);
        }
        &mut self.words[start..self.len]
    }

    fn filled(&self) -> &[u64] {
        &self.words[..self.len]
    }

    /// The position of the next word, for [`Frame::set`].
    pub fn position(&self) -> usize {
        self.len
    }

    /// Overwrites a word put before.
    pub fn set(&mut self, position: usize, word: u64) {
        assert!(position < self.len, "only what was put is overwritten");
        self.words[position] = word;
    }

    /// A word put before.
    pub fn word(&self, position: usize) -> u64 {
        self.filled()[position]
    }

    /// Bytes on the wire.
    pub fn bytes(&self) -> usize {
        self.len * 8
    }

    /// Reads the payload from its start.
    pub fn payload(&self) -> Payload<'_> {
        Payload { words: self.filled().get(HEADER_WORDS..).unwrap_or(&[]) }
    }

    /// Sends it, all of it: a stream that gathers what it is given is told to let go.
    pub fn write(&mut self, stream: &mut impl Write) -> std::io::Result<()> {
        self.send(stream, 0)
    }

    /// Sends what was put so far. What is put from now on follows it, and who reads gets one frame.
    pub fn write_part(&mut self, stream: &mut impl Write) -> std::io::Result<()> {
        self.send(stream, MORE)?;
        self.len = HEADER_WORDS;
        Ok(())
    }

    fn send(&mut self, stream: &mut impl Write, more: u32) -> std::io::Result<()> {
        assert!(self.len >= HEADER_WORDS, "a frame is begun before it is sent");
        let payload = (self.len - HEADER_WORDS) as u64;
        assert!(payload < 1 << 32, "a frame's length fits its header");
        let kind = self.kind();
        assert!(kind & MORE == 0, "the highest bit of a kind is taken");
        self.words[0] = u64::from(kind | more) | (payload << 32);
        let sent = stream.write_all(bytemuck::cast_slice(self.filled())).and_then(|()| stream.flush());
        self.words[0] = u64::from(kind);
        sent
    }

    /// Receives the next frame into this one. `Ok(false)`: the peer closed between two frames.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]: the connection failed before the first byte of a frame. After a deadline of the stream one may
    /// call again. [`Error::Truncated`]: it ended or failed in the middle of one. [`Error::Malformed`]: this is no
    /// frame, or one over the limit. After both nothing more can be read.
    pub fn read(&mut self, stream: &mut impl Read, limits: Limits) -> Result<bool> {
        let mut header = [0; HEADER_WORDS];
        match fill(stream, bytemuck::cast_slice_mut(&mut header)) {
            Ok(()) => {}
            Err(Short { got: 0, why: None }) => return Ok(false),
            Err(Short { got: 0, why: Some(source) }) => return Err(Error::io("waiting for a frame", source)),
            Err(short) => return Err(short.of(0, HEADER_BYTES, "its header")),
        }
        self.len = 0;
        loop {
            let [first, request] = header;
            let (kind, payload) = (first as u32 & !MORE, (first >> 32) as usize);
            let more = first as u32 & MORE != 0;
            if self.len == 0 {
                self.begin(kind, request);
            } else if (self.kind(), self.request()) != (kind, request) {
                if more {
                    return Err(Error::Malformed("parts of two frames at a time".into()));
                }
                self.begin(kind, request);
            }
            self.read_payload(stream, payload, limits)?;
            if !more {
                return Ok(true);
            }
            if payload == 0 {
                return Err(Error::Malformed("a part of a frame without anything in it".into()));
            }
            fill(stream, bytemuck::cast_slice_mut(&mut header)).map_err(|short| {
                short.of(0, HEADER_BYTES, &format!("the next header of {kind:#x}, request {request},"))
            })?;
        }
    }

    /// Receives so many words more.
    fn read_payload(&mut self, stream: &mut impl Read, count: usize, limits: Limits) -> Result<()> {
        let end = self.len + count;
        if end - HEADER_WORDS > limits.words_max {
            return Err(Error::Malformed(format!(
                "{} bytes announced, {} is the limit",
                (end - HEADER_WORDS) * 8,
                limits.words_max * 8
            )));
        }
        let room_max = limits.words_max.saturating_add(HEADER_WORDS);
        while self.len < end {
            let before = self.len;
            // Room that is there already costs nothing; new room is made as data arrives.
            let step = (end - before).min(STEP_WORDS.max(self.words.len() - before));
            let room = self.grow_within(step, room_max);
            if let Err(short) = fill(stream, bytemuck::cast_slice_mut(room)) {
                let what = format!("{:#x}, request {},", self.kind(), self.request());
                return Err(short.of((before - HEADER_WORDS) * 8, (end - HEADER_WORDS) * 8, &what));
            }
        }
        Ok(())
    }
}

/// A stream that ended or failed too early.
struct Short {
    /// Bytes that came of those that were due.
    got: usize,
    /// Nothing where the stream ended.
    why: Option<std::io::Error>,
}

impl Short {
    /// The error for what was due in all, where so much had come before.
    fn of(self, before: usize, due: usize, what: &str) -> Error {
        let source = self.why.unwrap_or_else(|| std::io::ErrorKind::UnexpectedEof.into());
        Error::Truncated {
            arrived: format!("{} of {due} bytes of {what} had come", before + self.got),
            source,
        }
    }
}

/// Fills all of `room`.
fn fill(stream: &mut impl Read, room: &mut [u8]) -> std::result::Result<(), Short> {
    let mut got = 0;
    while got < room.len() {
        match stream.read(&mut room[got..]) {
            Ok(0) => return Err(Short { got, why: None }),
            Ok(n) => got += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Short { got, why: Some(e) }),
        }
    }
    Ok(())
}

/// A payload being read from front to back.
#[derive(Debug, Clone, Copy)]
pub struct Payload<'a> {
    words: &'a [u64],
}

impl<'a> Payload<'a> {
    /// The next word.
    pub fn take(&mut self) -> Result<u64> {
        Ok(self.take_all(1)?[0])
    }

    /// The next `count` words, in place.
    pub fn take_all(&mut self, count: usize) -> Result<&'a [u64]> {
        if count > self.words.len() {
            return Err(Error::Malformed(format!("{count} words due, {} left", self.words.len())));
        }
        let (taken, rest) = self.words.split_at(count);
        self.words = rest;
        Ok(taken)
    }

    /// All words that are left, in place.
    pub fn rest(&self) -> &'a [u64] {
        self.words
    }

    /// A count that comes before `width` words for each of its items; refuses what cannot fit.
    pub fn take_count(&mut self, width: usize) -> Result<usize> {
        let count = self.take()?;
        let room = self.words.len() as u64 / width.max(1) as u64;
        if count > room {
            return Err(Error::Malformed(format!("{count} items announced, room for {room}")));
        }
        Ok(count as usize)
    }

    /// The next `count` floats, in place.
    pub fn take_floats(&mut self, count: usize) -> Result<&'a [f32]> {
        Ok(&bytemuck::cast_slice(self.take_all(count.div_ceil(2))?)[..count])
    }

    /// The next `count` numbers of 16 bits, in place.
    pub fn take_halves(&mut self, count: usize) -> Result<&'a [u16]> {
        Ok(&bytemuck::cast_slice(self.take_all(count.div_ceil(4))?)[..count])
    }

    /// Bytes with their length before them.
    pub fn take_bytes(&mut self) -> Result<&'a [u8]> {
        let count = self.take()?;
        let words = usize::try_from(count.div_ceil(8)).unwrap_or(usize::MAX);
        Ok(&bytemuck::cast_slice(self.take_all(words)?)[..count as usize])
    }

    /// Text with its length before it; what is not UTF-8 is replaced.
    pub fn take_text(&mut self) -> Result<String> {
        Ok(String::from_utf8_lossy(self.take_bytes()?).into_owned())
    }

    /// Nothing may be left.
    pub fn end(self) -> Result<()> {
        if self.words.is_empty() {
            return Ok(());
        }
        Err(Error::Malformed(format!("{} words too many", self.words.len())))
    }
}

#[cfg(test)]
mod tests;
