//! Records in a file: how they are written, and what a file that was cut or damaged still tells. Pure.
//!
//! A record is a header (magic, length, CRC of the payload, CRC of these three) and a payload. What a
//! crash cuts off is at the end of the file; a record that cannot be read *before* one that can was
//! damaged, and then nothing is believed.

/// Bytes before a payload.
const HEADER: usize = 16;
const MAGIC: u32 = 0x4c44_4531;
/// No record is longer; a length beyond it was never written.
const PAYLOAD_MAX: usize = 1 << 30;

/// What a file holds.
#[derive(Debug, PartialEq, Eq)]
pub struct Read<'a> {
    /// The payloads in order.
    pub payloads: Vec<&'a [u8]>,
    /// Where the last whole record ends; what follows was cut off.
    pub end: usize,
}

/// A record in the middle cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub struct Damaged {
    /// Its number, from 0.
    pub record: usize,
    /// Where it begins.
    pub offset: usize,
}

/// Appends a record to `out`.
pub fn append(out: &mut Vec<u8>, payload: &[u8]) {
    assert!(payload.len() <= PAYLOAD_MAX, "a record has a reasonable length");
    let mut header = Vec::with_capacity(HEADER);
    for word in [MAGIC, payload.len() as u32, crc32fast::hash(payload)] {
        header.extend_from_slice(&word.to_le_bytes());
    }
    header.extend_from_slice(&crc32fast::hash(&header).to_le_bytes());
    out.extend_from_slice(&header);
    out.extend_from_slice(payload);
}

/// Reads all records.
///
/// # Errors
///
/// A record cannot be read, and one behind it can.
pub fn read(bytes: &[u8]) -> Result<Read<'_>, Damaged> {
    let mut payloads = Vec::new();
    let mut end = 0;
    while let Some(payload) = record(&bytes[end..]) {
        payloads.push(payload);
        end += HEADER + payload.len();
    }
    let rest = &bytes[end..];
    let later = (1..rest.len()).any(|skip| record(&rest[skip..]).is_some());
    if later { Err(Damaged { record: payloads.len(), offset: end }) } else { Ok(Read { payloads, end }) }
}

/// The payload of the record that `bytes` begin with, if they begin with a whole one.
fn record(bytes: &[u8]) -> Option<&[u8]> {
    let header = bytes.get(..HEADER)?;
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    if word(0) != MAGIC || word(12) != crc32fast::hash(&header[..12]) {
        return None;
    }
    let payload = bytes.get(HEADER..HEADER.checked_add(word(4) as usize)?)?;
    (crc32fast::hash(payload) == word(8)).then_some(payload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(payloads: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        payloads.iter().for_each(|p| append(&mut bytes, p));
        bytes
    }

    fn payloads() -> impl Strategy<Value = Vec<Vec<u8>>> {
        proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 1..8)
    }

    proptest! {
        #[test]
        fn a_file_cut_anywhere_gives_all_whole_records(payloads in payloads(), cut: prop::sample::Index) {
            let bytes = file(&payloads);
            let cut = cut.index(bytes.len() + 1);
            let read = read(&bytes[..cut]).unwrap();
            let whole = (0..=payloads.len()).rev().find(|n| file(&payloads[..*n]).len() <= cut).unwrap();
            prop_assert_eq!(read.payloads, payloads[..whole].iter().collect::<Vec<_>>());
            prop_assert_eq!(read.end, file(&payloads[..whole]).len());
        }

        #[test]
        fn a_flipped_bit_is_refused_or_cuts_the_last_record_and_never_gives_another_one(
            payloads in payloads(), at: prop::sample::Index, bit in 0..8u8,
        ) {
            let mut bytes = file(&payloads);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            let last = file(&payloads[..payloads.len() - 1]).len();
            match read(&bytes) {
                Ok(read) => {
                    prop_assert!(at >= last, "damage in the middle is refused");
                    prop_assert_eq!(read.payloads, payloads[..payloads.len() - 1].iter().collect::<Vec<_>>());
                }
                Err(damaged) => {
                    prop_assert!(at < last, "a damaged end is cut off");
                    prop_assert!((damaged.offset..bytes.len()).contains(&at));
                }
            }
        }
    }

    #[test]
    fn zeros_that_a_crash_left_behind_the_end_are_cut_off() {
        let mut bytes = file(&[b"one".to_vec()]);
        let end = bytes.len();
        bytes.extend([0; 100]);
        assert_eq!(read(&bytes).unwrap(), Read { payloads: vec![b"one"], end });
    }
}
