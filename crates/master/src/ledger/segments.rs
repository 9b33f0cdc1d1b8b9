//! A ledger in objects: which there are, and which of them add up to the book. Pure.
//!
//! Objects cannot grow, so each stretch of entries is a segment of its own. Segments are numbered by the term of
//! the master that writes them and, within it, from 0 on without a gap. Every term begins with a snapshot, so that
//! nothing a former master still writes is read; a later snapshot takes the place of all before it. A number that
//! is missing behind the newest snapshot was there and is lost: nothing is believed then.

use super::{Book, records};

/// An object of the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Segment {
    /// The term of the master that wrote it.
    pub term: u64,
    /// Its number in the term.
    pub number: u64,
    /// What it holds.
    pub kind: Kind,
}

/// What a segment holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// The book so far.
    Snapshot,
    /// Entries since.
    Entries,
}

impl Segment {
    /// Its name in the ledger's directory.
    pub fn name(&self) -> String {
        let kind = match self.kind {
            Kind::Snapshot => "snapshot",
            Kind::Entries => "entries",
        };
        format!("{:010}-{:010}.{kind}", self.term, self.number)
    }

    /// The segment of this name; `None` where it is none of ours.
    pub fn of(name: &str) -> Option<Segment> {
        let (numbers, kind) = name.split_once('.')?;
        let (term, number) = numbers.split_once('-')?;
        let kind = match kind {
            "snapshot" => Kind::Snapshot,
            "entries" => Kind::Entries,
            _ => return None,
        };
        Some(Segment { term: term.parse().ok()?, number: number.parse().ok()?, kind })
    }
}

/// The segments to read, in order: the newest snapshot and all entries since. None where there is no ledger.
///
/// # Errors
///
/// Which segment is missing.
pub(super) fn chain(names: &[String]) -> Result<Vec<Segment>, String> {
    let mut all: Vec<Segment> = names.iter().filter_map(|name| Segment::of(name)).collect();
    all.sort_unstable();
    let Some(newest) = all.last().copied() else { return Ok(Vec::new()) };
    let ours = all.partition_point(|segment| segment.term < newest.term);
    let Some(start) = all[ours..].iter().rposition(|segment| segment.kind == Kind::Snapshot) else {
        return Err(format!("the snapshot that term {} began with is missing", newest.term));
    };
    let chain = all.split_off(ours + start);
    for (segment, number) in chain.iter().zip(chain[0].number..) {
        if segment.number != number {
            let missing = Segment { term: newest.term, number, kind: Kind::Entries };
            return Err(format!("segment {} is missing", missing.name()));
        }
    }
    Ok(chain)
}

/// What the contents of a chain add up to.
///
/// # Errors
///
/// Which segment is damaged, and where.
pub(super) fn book(chain: &[Segment], contents: &[Vec<u8>]) -> Result<Book, String> {
    assert_eq!(chain.len(), contents.len(), "each segment was read");
    let mut book = Book::default();
    for (segment, bytes) in chain.iter().zip(contents) {
        let damaged = |reason| format!("segment {}: {reason}", segment.name());
        match segment.kind {
            Kind::Snapshot => {
                let read = records::read(bytes).map_err(damaged)?;
                if read.end < bytes.len() || read.entries > 0 {
                    return Err(damaged(format!("it has more than a snapshot, from byte {} on", read.end)));
                }
                book = read.book;
            }
            Kind::Entries => {
                records::read_entries(bytes).map_err(damaged)?.iter().for_each(|entry| book.apply(entry));
            }
        }
    }
    Ok(book)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Entry, TermsOfJob};
    use elasticdl_spec::{LeaseId, TaskId, WorkerId};
    use proptest::prelude::*;

    /// Objects as masters leave them: terms one after the other, each with its stretches of entries and, here and
    /// there, a snapshot; what a snapshot replaces is removed or not, as a crash has it.
    #[derive(Debug, Clone)]
    struct History {
        objects: Vec<(Segment, Vec<u8>)>,
        book: Book,
    }

    /// What a master does: so many entries in a segment, or (0) a snapshot; and whether it sweeps.
    fn history() -> impl Strategy<Value = History> {
        let term = proptest::collection::vec((0usize..4, any::<bool>()), 0..6);
        proptest::collection::vec(term, 1..4).prop_map(|terms| {
            let mut history = History { objects: Vec::new(), book: Book::default() };
            let mut lease = 0;
            for (acts, term) in terms.into_iter().zip(1..) {
                let acts = std::iter::once((0, false)).chain(acts);
                for ((entries, sweeps), number) in acts.zip(0..) {
                    let mut bytes = Vec::new();
                    let kind = if entries == 0 { Kind::Snapshot } else { Kind::Entries };
                    let segment = Segment { term, number, kind };
                    if kind == Kind::Snapshot {
                        records::append_snapshot(&mut bytes, &history.book);
                        history.objects.retain(|(older, _)| !sweeps || *older > segment);
                    }
                    for _ in 0..entries {
                        lease += 1;
                        let entry = leased(term, lease);
                        records::append_entry(&mut bytes, &entry);
                        history.book.apply(&entry);
                    }
                    history.objects.push((segment, bytes));
                }
            }
            history
        })
    }

    fn leased(term: u64, n: u64) -> Entry {
        let (task, lease) = (TaskId::train(0, n as u32), LeaseId { term, n });
        Entry::Leased { task, lease, worker: WorkerId(0), lasting: false }
    }

    fn read(objects: &[(Segment, Vec<u8>)]) -> Result<Book, String> {
        let names: Vec<String> = objects.iter().map(|(segment, _)| segment.name()).collect();
        let chain = chain(&names)?;
        let content = |wanted: &Segment| objects.iter().find(|(s, _)| s == wanted).unwrap().1.clone();
        book(&chain, &chain.iter().map(content).collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn what_masters_wrote_is_read_whatever_was_swept(history in history()) {
            prop_assert_eq!(read(&history.objects).unwrap(), history.book);
        }

        #[test]
        fn what_a_former_master_writes_late_is_not_read(history in history(), number in 0..20u64) {
            let mut objects = history.objects.clone();
            let newest = objects.last().unwrap().0.term;
            let mut bytes = Vec::new();
            records::append_entry(&mut bytes, &leased(newest - 1, 999));
            let late = Segment { term: newest - 1, number, kind: Kind::Entries };
            objects.retain(|(segment, _)| *segment != late);
            objects.push((late, bytes));
            prop_assert_eq!(read(&objects).unwrap(), history.book);
        }

        #[test]
        fn a_segment_that_is_lost_before_the_last_is_named(history in history(), which: prop::sample::Index) {
            let names: Vec<String> = history.objects.iter().map(|(s, _)| s.name()).collect();
            let chain = chain(&names).unwrap();
            prop_assume!(chain.len() > 1);
            let lost = chain[which.index(chain.len() - 1)];
            let rest: Vec<_> = history.objects.iter().filter(|(s, _)| *s != lost).cloned().collect();
            let error = read(&rest).unwrap_err();
            match lost.kind {
                Kind::Entries => prop_assert_eq!(error, format!("segment {} is missing", lost.name())),
                Kind::Snapshot => prop_assert!(error.contains("missing"), "{}", error),
            }
        }

        #[test]
        fn damage_is_named(
            history in history(), which: prop::sample::Index, at: prop::sample::Index, cut in 0..9usize,
        ) {
            let names: Vec<String> = history.objects.iter().map(|(s, _)| s.name()).collect();
            let chain = chain(&names).unwrap();
            let damaged = chain[which.index(chain.len())];
            let mut objects = history.objects.clone();
            let bytes = &mut objects.iter_mut().find(|(s, _)| *s == damaged).unwrap().1;
            match (cut, at.index(bytes.len())) {
                (0, at) => bytes[at] ^= 1,
                (cut, _) => bytes.truncate(bytes.len() - cut),
            }
            let error = read(&objects).unwrap_err();
            prop_assert!(error.starts_with(&format!("segment {}: ", damaged.name())), "{}", error);
        }
    }

    #[test]
    fn names_sort_as_segments_do_and_others_are_none() {
        let segment = Segment { term: 7, number: 12, kind: Kind::Entries };
        assert_eq!(segment.name(), "0000000007-0000000012.entries");
        assert_eq!(Segment::of(&segment.name()), Some(segment));
        assert_eq!((Segment::of("notes.txt"), Segment::of("1-2.log")), (None, None));
        assert_eq!(chain(&["notes.txt".into()]), Ok(Vec::new()));
    }

    #[test]
    fn a_term_without_its_snapshot_is_refused() {
        let names = ["0000000001-0000000000.snapshot", "0000000002-0000000001.entries"].map(String::from);
        assert_eq!(chain(&names), Err("the snapshot that term 2 began with is missing".into()));
        let mut bytes = Vec::new();
        let begun = Entry::Begun { term: 1, terms_of_job: TermsOfJob::default() };
        records::append_entry(&mut bytes, &begun);
        let snapshot = Segment { term: 1, number: 0, kind: Kind::Snapshot };
        assert!(book(&[snapshot], &[bytes]).unwrap_err().contains("record 0 is out of place"));
    }
}
