use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::ErrorKind;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;

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
        let error = Frame::default().read(&mut &bytes[..cut], Limits::default()).unwrap_err();
        let arrived = match cut {
            0..16 => format!("{cut} of 16 bytes of its header"),
            _ => format!("{} of 24 bytes of 0x1, request 2,", cut - 16),
        };
        assert_eq!(error.chain(), format!("a frame broke off: {arrived} had come: unexpected end of file"));
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

/// Header words of a part.
fn header(kind: u32, request: u64, words: usize) -> [u64; 2] {
    [u64::from(kind) | (words as u64) << 32, request]
}

/// Goal: whoever sends, announced or in parts, gets no more room than the longest frame takes.
#[test]
fn room_is_never_made_for_more_than_the_longest_frame() {
    let limits = Limits { words_max: 3 * STEP_WORDS };
    let longest = limits.words_max + HEADER_WORDS;
    for first in [5, STEP_WORDS, 2 * STEP_WORDS - 1, 2 * STEP_WORDS + 1, limits.words_max - 5] {
        let [one, two] = [header(1 | MORE, 9, first), header(1, 9, limits.words_max - first)];
        let zeros = |words: usize| std::io::repeat(0).take(words as u64 * 8);
        let stream = bytemuck::cast_slice(&one).chain(zeros(first));
        let mut stream = stream.chain(bytemuck::cast_slice(&two)).chain(zeros(limits.words_max - first));
        let mut frame = Frame::default();
        assert!(frame.read(&mut stream, limits).unwrap());
        assert_eq!((frame.len, frame.words.capacity()), (longest, longest), "{first} words first");
    }
    let mut frame = Frame::default();
    let announced = header(1, 9, limits.words_max);
    frame.read(&mut bytemuck::cast_slice::<u64, u8>(&announced).chain(&[0; 80][..]), limits).unwrap_err();
    assert!(frame.words.capacity() <= STEP_WORDS + HEADER_WORDS, "room is made for what was only announced");
}

/// Gives a stream's bytes in pieces of these sizes, over and over; 0: it has nothing at this moment.
struct Pieces<'a> {
    bytes: &'a [u8],
    sizes: std::iter::Cycle<std::slice::Iter<'a, usize>>,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let size = *self.sizes.next().expect("sizes come over and over");
        if size == 0 {
            return Err(ErrorKind::Interrupted.into());
        }
        let taken = size.min(buffer.len());
        self.bytes.read(&mut buffer[..taken])
    }
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    (vec(prop_oneof![Just(0), 1..8usize, 8..200usize], 0..6), 1..200usize).prop_map(|(mut sizes, last)| {
        sizes.push(last);
        sizes
    })
}

/// A frame as it is sent.
#[derive(Debug, Clone)]
struct Sent {
    kind: u32,
    parts: Vec<Vec<u64>>,
    last: Vec<u64>,
    /// Whether it is given up after its parts and `last` is another one, sent instead.
    given_up: bool,
}

type Got = (u32, u64, Vec<u64>);

impl Sent {
    /// Sends it; also tells where its headers are, in words.
    fn put(&self, request: u64, bytes: &mut Vec<u8>, headers: &mut Vec<usize>) {
        let mut frame = Frame::default();
        frame.begin(self.kind, request);
        for part in &self.parts {
            headers.push(bytes.len() / 8);
            frame.put_all(part);
            frame.write_part(bytes).unwrap();
        }
        if self.given_up {
            frame.begin(self.kind ^ 1, request);
        }
        headers.push(bytes.len() / 8);
        frame.put_all(&self.last);
        frame.write(bytes).unwrap();
    }

    /// What is due at the other side.
    fn got(&self, request: u64) -> Got {
        if self.given_up && !self.parts.is_empty() {
            return (self.kind ^ 1, request, self.last.clone());
        }
        (self.kind ^ u32::from(self.given_up), request, [self.parts.concat(), self.last.clone()].concat())
    }

    /// The least limit that lets it pass.
    fn words(&self, request: u64) -> usize {
        self.got(request).2.len().max(self.parts.concat().len())
    }
}

fn sent() -> impl Strategy<Value = Sent> {
    let word = || prop_oneof![3 => 0..4u64, 1 => any::<u64>()];
    let kind = prop_oneof![3 => 0xED01..0xED2Au32, 1 => 0..MORE];
    (kind, vec(vec(word(), 1..20), 0..4), vec(word(), 0..20), proptest::bool::weighted(0.2))
        .prop_map(|(kind, parts, last, given_up)| Sent { kind, parts, last, given_up })
}

/// The bytes of these frames, and where their headers are.
fn stream_of(frames: &[Sent]) -> (Vec<u8>, Vec<usize>) {
    let (mut bytes, mut headers) = (Vec::new(), Vec::new());
    frames.iter().enumerate().for_each(|(n, frame)| frame.put(n as u64, &mut bytes, &mut headers));
    (bytes, headers)
}

/// How a stream ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Between,
    Amid,
    Malformed(&'static str),
}

/// Reads all frames in pieces. Whatever was sent, there was never more room than the longest frame takes.
fn read_all(bytes: &[u8], sizes: &[usize], words_max: usize) -> (Vec<Got>, End) {
    let (mut frame, mut all) = (Frame::default(), Vec::new());
    let mut stream = Pieces { bytes, sizes: sizes.iter().cycle() };
    loop {
        let read = frame.read(&mut stream, Limits { words_max });
        let room = frame.words.capacity();
        assert!(room <= words_max + HEADER_WORDS, "room for {room} words, {words_max} may come");
        match read {
            Ok(true) => all.push((frame.kind(), frame.request(), frame.payload().rest().to_vec())),
            Ok(false) => return (all, End::Between),
            Err(Error::Truncated { .. }) => return (all, End::Amid),
            Err(Error::Malformed(why)) => {
                let kinds = ["is the limit", "parts of two frames", "without anything in it"];
                let kind = kinds.into_iter().find(|kind| why.contains(kind)).expect("a known reason");
                return (all, End::Malformed(kind));
            }
            Err(other) => panic!("{other}"),
        }
        let mut payload = frame.payload();
        let _ = payload.take_count(3);
        let _ = payload.take_bytes();
        let _ = payload.take_floats(usize::MAX / 2);
    }
}

/// The same, told from the words alone and without any room.
fn judge(bytes: &[u8], words_max: usize) -> (Vec<Got>, End) {
    let words: Vec<u64> =
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    let (mut rest, mut all, mut open) = (&words[..], Vec::new(), None::<Got>);
    while rest.len() >= 2 {
        let (more, length) = (rest[0] as u32 >= MORE, (rest[0] >> 32) as usize);
        let header = (rest[0] as u32 % MORE, rest[1]);
        rest = &rest[2..];
        let (_, _, mut got) = match open.take() {
            Some(open) if (open.0, open.1) == header => open,
            Some(_) if more => return (all, End::Malformed("parts of two frames")),
            _ => (header.0, header.1, vec![]),
        };
        if got.len() + length > words_max {
            return (all, End::Malformed("is the limit"));
        }
        if length > rest.len() {
            return (all, End::Amid);
        }
        got.extend(&rest[..length]);
        rest = &rest[length..];
        match (more, length) {
            (false, _) => all.push((header.0, header.1, got)),
            (true, 0) => return (all, End::Malformed("without anything in it")),
            (true, _) => open = Some((header.0, header.1, got)),
        }
    }
    let between = open.is_none() && rest.is_empty() && bytes.len().is_multiple_of(8);
    (all, if between { End::Between } else { End::Amid })
}

/// What may become of a stream on its way; places count around it.
#[derive(Debug, Clone)]
enum Harm {
    Flip {
        at: usize,
        bit: u32,
    },
    Cut {
        at: usize,
        count: usize,
    },
    Insert {
        at: usize,
        words: Vec<u64>,
    },
    /// What belongs to one frame stands in another.
    Mix {
        from: usize,
        count: usize,
        to: usize,
    },
    Length {
        header: usize,
        words: u32,
    },
    Kind {
        header: usize,
        kind: u32,
    },
    More {
        header: usize,
    },
}

fn harm() -> impl Strategy<Value = Harm> {
    let (at, count) = (any::<usize>, || 1..12usize);
    prop_oneof![
        (at(), 0..64u32).prop_map(|(at, bit)| Harm::Flip { at, bit }),
        (at(), count()).prop_map(|(at, count)| Harm::Cut { at, count }),
        (at(), vec(prop_oneof![0..4u64, any::<u64>()], 1..4))
            .prop_map(|(at, words)| Harm::Insert { at, words }),
        (at(), count(), at()).prop_map(|(from, count, to)| Harm::Mix { from, count, to }),
        (at(), prop_oneof![2 => Just(0), 3 => 0..60u32, 1 => any::<u32>()])
            .prop_map(|(header, words)| Harm::Length { header, words }),
        (at(), any::<u32>()).prop_map(|(header, kind)| Harm::Kind { header, kind }),
        at().prop_map(|header| Harm::More { header }),
    ]
}

impl Harm {
    fn befall(&self, words: &mut Vec<u64>, headers: &[usize]) {
        let all = words.len();
        let header = |nth: &usize| headers[nth % headers.len()] % all;
        match self {
            Harm::Flip { at, bit } => words[at % all] ^= 1 << bit,
            Harm::Cut { at, count } => drop(words.drain(at % all..(at % all + count).min(all))),
            Harm::Insert { at, words: new } => drop(words.splice(at % all..at % all, new.iter().copied())),
            Harm::Mix { from, count, to } => {
                let mixed = words[from % all..(from % all + count).min(all)].to_vec();
                words.iter_mut().skip(to % all).zip(mixed).for_each(|(word, new)| *word = new);
            }
            Harm::Length { header: nth, words: length } => {
                let word = &mut words[header(nth)];
                *word = u64::from(*word as u32) | u64::from(*length) << 32;
            }
            Harm::Kind { header: nth, kind } => {
                let word = &mut words[header(nth)];
                *word = *word >> 32 << 32 | u64::from(*kind);
            }
            Harm::More { header: nth } => words[header(nth)] ^= u64::from(MORE),
        }
    }
}

proptest! {
    #![proptest_config(Config::with_cases(500))]

    /// Goal: whatever pieces they come in, frames are what was sent, and the limit is exact.
    #[test]
    fn frames_and_frames_in_parts_come_as_they_were_sent(frames in vec(sent(), 1..6), sizes in sizes()) {
        let (bytes, _) = stream_of(&frames);
        let numbered = || frames.iter().zip(0..);
        let longest = numbered().map(|(frame, n)| frame.words(n)).max().unwrap_or(0);
        let expected: Vec<_> = numbered().map(|(frame, n)| frame.got(n)).collect();
        prop_assert_eq!(read_all(&bytes, &sizes, longest), (expected, End::Between));
        if longest > 0 {
            prop_assert_eq!(read_all(&bytes, &sizes, longest - 1).1, End::Malformed("is the limit"));
        }
    }
}

/// Goal: frames that were harmed on their way are errors, or frames that nobody can tell from others: as many, as long
/// and as far as the words say. All ways to end are met.
#[test]
fn harmed_frames_are_an_error_or_frames_within_the_limit() {
    let met = RefCell::new(BTreeMap::<End, usize>::new());
    let inputs = (vec(sent(), 1..6), vec(harm(), 1..4), 0..40usize, sizes(), 40..200usize);
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::with_cases(3000) });
    let outcome = runner.run(&inputs, |(frames, harms, cut, sizes, words_max)| {
        let (bytes, headers) = stream_of(&frames);
        let mut words: Vec<u64> = bytemuck::pod_collect_to_vec(&bytes);
        for harm in &harms {
            if !words.is_empty() {
                harm.befall(&mut words, &headers);
            }
        }
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        // Every other stream is whole.
        let bytes = &bytes[..bytes.len().saturating_sub(cut.saturating_sub(20))];
        let read = read_all(bytes, &sizes, words_max);
        prop_assert!(read.0.iter().all(|(kind, _, words)| *kind < MORE && words.len() <= words_max));
        *met.borrow_mut().entry(read.1).or_default() += 1;
        prop_assert_eq!(read, judge(bytes, words_max));
        Ok(())
    });
    outcome.unwrap();
    let met = met.into_inner();
    assert!(met.len() == 5 && met.values().all(|times| *times >= 10), "{met:?}");
}
