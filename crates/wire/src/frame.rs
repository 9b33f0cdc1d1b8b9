//! Frames: what travels between workers and servers.
//!
//! A frame is a sequence of 64-bit little-endian words: two of header, then the payload. Everything in
//! a payload starts at a word, so ids and floats are used in place, without a copy. The layouts of the
//! payloads are in [`crate::ps`]. Reading never trusts a length further than [`Limits::words_max`] and
//! allocates as data arrives, not as it is announced.
//!
//! A long frame may be sent in parts, each with the header again, so that what is ready travels while the rest is
//! made. The highest bit of the kind says that another part follows; none is empty, and the limit counts for all of
//! them together. Who reads gets the frame whole. Whoever has to give one up in the middle of it sends another one
//! instead of the next part, to say why.

use std::io::{Read, Write};

use crate::error::{Error, Result};

const HEADER_WORDS: usize = 2;
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
        let start = self.len;
        self.len += count;
        if self.words.len() < self.len {
            self.words.resize(self.len.max(start * 2), 0);
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
    pub fn read(&mut self, stream: &mut impl Read, limits: Limits) -> Result<bool> {
        let mut header = [0; HEADER_WORDS];
        if !read_header(stream, bytemuck::cast_slice_mut(&mut header))? {
            return Ok(false);
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
            if !read_header(stream, bytemuck::cast_slice_mut(&mut header))? {
                return Err(Error::io("reading a frame", std::io::ErrorKind::UnexpectedEof.into()));
            }
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
        while self.len < end {
            // Room that is there already costs nothing; new room is made as data arrives.
            let step = (end - self.len).min(STEP_WORDS.max(self.words.len() - self.len));
            stream
                .read_exact(bytemuck::cast_slice_mut(self.grow(step)))
                .map_err(|e| Error::io("reading a frame", e))?;
        }
        Ok(())
    }
}

/// Reads the two header words; `false` where the stream ends before the first byte.
fn read_header(stream: &mut impl Read, header: &mut [u8]) -> Result<bool> {
    let mut filled = 0;
    while filled < header.len() {
        match stream.read(&mut header[filled..]) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(Error::io("reading a frame", std::io::ErrorKind::UnexpectedEof.into())),
            Ok(n) => filled += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::io("reading a frame", e)),
        }
    }
    Ok(true)
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_frame_survives_the_wire() {
        let mut sent = Frame::default();
        sent.begin(3, 42);
        sent.put(7);
        sent.put_floats(&[1.0, 2.0, 3.0]);
        sent.put_bytes(b"hello, you");
        let mut bytes = Vec::new();
        sent.write(&mut bytes).unwrap();

        let mut got = Frame::default();
        let mut stream = &bytes[..];
        assert!(got.read(&mut stream, Limits::default()).unwrap());
        assert_eq!((got.kind(), got.request()), (3, 42));
        let mut payload = got.payload();
        assert_eq!(payload.take().unwrap(), 7);
        assert_eq!(payload.take_floats(3).unwrap(), [1.0, 2.0, 3.0]);
        assert_eq!(payload.take_bytes().unwrap(), b"hello, you");
        payload.end().unwrap();
        assert!(!got.read(&mut stream, Limits::default()).unwrap(), "the stream ends between frames");
    }

    #[test]
    fn a_truncated_frame_is_an_error_at_every_byte() {
        let mut sent = Frame::default();
        sent.begin(1, 2);
        sent.put_all(&[1, 2, 3]);
        let mut bytes = Vec::new();
        sent.write(&mut bytes).unwrap();
        for cut in 1..bytes.len() {
            let result = Frame::default().read(&mut &bytes[..cut], Limits::default());
            assert!(result.is_err(), "cut at {cut}");
        }
    }

    /// A frame that was sent in three parts.
    fn in_parts() -> Vec<u8> {
        let (mut sent, mut bytes) = (Frame::default(), Vec::new());
        sent.begin(5, 6);
        sent.put_all(&[1, 2]);
        sent.write_part(&mut bytes).unwrap();
        sent.put(3);
        sent.write_part(&mut bytes).unwrap();
        sent.put_all(&[4, 5]);
        sent.write(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn what_is_sent_in_parts_comes_whole() {
        let mut bytes = in_parts();
        bytes.extend(in_parts());
        let (mut got, mut stream) = (Frame::default(), &bytes[..]);
        for _ in 0..2 {
            assert!(got.read(&mut stream, Limits { words_max: 5 }).unwrap());
            assert_eq!((got.kind(), got.request(), got.payload().rest()), (5, 6, &[1, 2, 3, 4, 5][..]));
        }
        let bytes = in_parts();
        for cut in 1..bytes.len() {
            assert!(Frame::default().read(&mut &bytes[..cut], Limits::default()).is_err(), "cut at {cut}");
        }
        let error = Frame::default().read(&mut &bytes[..], Limits { words_max: 4 }).unwrap_err();
        assert!(error.to_string().contains("40 bytes announced, 32 is the limit"), "{error}");
    }

    #[test]
    fn a_frame_that_is_given_up_for_another_one_is_that_one() {
        let (mut sent, mut bytes) = (Frame::default(), Vec::new());
        sent.begin(5, 6);
        sent.put_all(&[1, 2]);
        sent.write_part(&mut bytes).unwrap();
        sent.begin(7, 6);
        sent.put(9);
        sent.write(&mut bytes).unwrap();
        let mut got = Frame::default();
        assert!(got.read(&mut &bytes[..], Limits::default()).unwrap());
        assert_eq!((got.kind(), got.payload().rest()), (7, &[9][..]));

        let mut both = bytes.clone();
        both.truncate(32);
        sent.begin(7, 6);
        sent.put(9);
        sent.write_part(&mut both).unwrap();
        let error = got.read(&mut &both[..], Limits::default()).unwrap_err();
        assert!(error.to_string().contains("parts of two frames"), "{error}");
    }

    #[test]
    fn parts_without_anything_are_refused() {
        let mut bytes = Vec::new();
        let mut sent = Frame::default();
        sent.begin(5, 6);
        sent.write_part(&mut bytes).unwrap();
        let error = Frame::default().read(&mut &bytes[..], Limits::default()).unwrap_err();
        assert!(error.to_string().contains("without anything in it"), "{error}");
    }

    #[test]
    fn an_oversized_frame_is_refused_before_it_is_read() {
        let header = [1u64 | (1 << 40), 0];
        let error = Frame::default().read(&mut bytemuck::cast_slice(&header), Limits { words_max: 16 });
        assert!(error.unwrap_err().to_string().contains("128 is the limit"));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut frame = Frame::default();
            let mut stream = &bytes[..];
            while let Ok(true) = frame.read(&mut stream, Limits { words_max: 1 << 10 }) {
                let mut payload = frame.payload();
                let _ = payload.take_count(3);
                let _ = payload.take_bytes();
                let _ = payload.take_floats(usize::MAX / 2);
            }
        }
    }
}
