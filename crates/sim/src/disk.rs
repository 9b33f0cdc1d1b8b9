//! The virtual disk: the ledger's files, checkpoints and the claimed term. What was written and not synced
//! may be lost or torn by a crash.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use elasticdl_master::checkpoint::Manifest;
use elasticdl_master::ledger::records::{self, Contents};
use elasticdl_master::ledger::{Book, Entry};
use elasticdl_spec::mix::Rng;

/// A disk that all masters and servers share.
#[derive(Debug, Default)]
pub struct Disk {
    term: u64,
    ledgers: BTreeMap<u64, LedgerFile>,
    checkpoints: BTreeMap<u64, Checkpoint>,
}

/// A checkpoint's directory.
#[derive(Debug, Default)]
pub struct Checkpoint {
    /// Partition files: each is there whole or not at all.
    pub files: BTreeMap<u32, Rc<Vec<u8>>>,
    manifest: Option<Vec<u8>>,
}

#[derive(Debug, Default)]
struct LedgerFile {
    bytes: Vec<u8>,
    synced: usize,
}

/// What a master reads when it begins.
#[derive(Debug)]
pub struct Opened {
    /// What the entries add up to.
    pub book: Book,
    /// Bytes at the end that are no whole record.
    pub cut: usize,
    /// Entries of the file.
    pub entries: usize,
    /// The number of the file.
    pub number: u64,
}

impl Disk {
    /// Reads the newest ledger. A master that still has it open is seen as far as it has synced, and at
    /// random beyond.
    ///
    /// # Errors
    ///
    /// It cannot be understood.
    pub fn open_ledger(&self, rng: &mut Rng) -> Result<Opened, String> {
        let beyond = |file: &LedgerFile| rng.below((file.bytes.len() - file.synced) as u64 + 1) as usize;
        self.read_ledger(beyond)
    }

    /// What the newest ledger adds up to, as far as it will last.
    ///
    /// # Errors
    ///
    /// It cannot be understood.
    pub fn settled_book(&self) -> Result<Book, String> {
        self.read_ledger(|_| 0).map(|opened| opened.book)
    }

    fn read_ledger(&self, beyond: impl FnOnce(&LedgerFile) -> usize) -> Result<Opened, String> {
        let Some((number, file)) = self.ledgers.iter().next_back() else {
            return Ok(Opened { book: Book::default(), cut: 0, entries: 0, number: 0 });
        };
        let bytes = &file.bytes[..file.synced + beyond(file)];
        let contents = records::read(bytes).map_err(|reason| format!("ledger {number}: {reason}"))?;
        let Contents { book, entries, end } = contents;
        Ok(Opened { book, cut: bytes.len() - end, entries, number: *number })
    }

    /// A new file that begins with what is known; older ones are removed.
    pub fn begin_ledger(&mut self, number: u64, book: &Book) {
        let mut bytes = Vec::new();
        records::append_snapshot(&mut bytes, book);
        self.ledgers.retain(|older, _| *older >= number);
        let synced = bytes.len();
        self.ledgers.insert(number, LedgerFile { bytes, synced });
    }

    /// Writes entries. A file that was removed takes them too, as the one who has it open can tell.
    pub fn append(&mut self, number: u64, entries: &[Entry]) {
        if let Some(file) = self.ledgers.get_mut(&number) {
            entries.iter().for_each(|entry| records::append_entry(&mut file.bytes, entry));
        }
    }

    /// What was written so far will last.
    pub fn sync_ledger(&mut self, number: u64) {
        if let Some(file) = self.ledgers.get_mut(&number) {
            file.synced = file.bytes.len();
        }
    }

    /// A crash: of what was not synced a part is left. Returns how many bytes are gone.
    pub fn tear(&mut self, number: u64, rng: &mut Rng) -> usize {
        let Some(file) = self.ledgers.get_mut(&number) else { return 0 };
        let before = file.bytes.len();
        let kept = file.synced + rng.below((before - file.synced) as u64 + 1) as usize;
        file.bytes.truncate(kept);
        // Some file systems leave zeros where data was to be.
        if rng.below(4) == 0 {
            file.bytes.resize(kept + rng.below(40) as usize, 0);
        }
        before - kept
    }

    /// What a ledger's file says now, to be believed after a crash: all of it has settled.
    pub fn settle(&mut self, number: u64) {
        self.sync_ledger(number);
    }

    /// Claims the next term.
    pub fn claim_term(&mut self) -> u64 {
        self.term += 1;
        self.term
    }

    /// The newest term claimed.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// The number of the next checkpoint.
    pub fn next_checkpoint(&self) -> u64 {
        self.checkpoints.keys().next_back().map_or(1, |id| id + 1)
    }

    /// Makes a checkpoint's directory.
    pub fn make_checkpoint(&mut self, id: u64) {
        self.checkpoints.entry(id).or_default();
    }

    /// Writes a partition's file. `false`: the directory is not there.
    pub fn put_file(&mut self, id: u64, partition: u32, bytes: Rc<Vec<u8>>) -> bool {
        let dir = self.checkpoints.get_mut(&id);
        dir.map(|dir| dir.files.insert(partition, bytes)).is_some()
    }

    /// A checkpoint's directory.
    pub fn checkpoint(&self, id: u64) -> Option<&Checkpoint> {
        self.checkpoints.get(&id)
    }

    /// Writes a manifest. `false`: the directory is not there.
    pub fn put_manifest(&mut self, manifest: &Manifest) -> bool {
        let Some(dir) = self.checkpoints.get_mut(&manifest.id) else { return false };
        dir.manifest = Some(serde_json::to_vec(manifest).expect("a manifest is JSON"));
        true
    }

    /// Removes what is older than the newest complete ones up to `committed` and not needed by them, as the master's
    /// store does. Returns how many files of older ones stay.
    pub fn prune(&mut self, committed: u64, keep: u32) -> usize {
        let (mut kept, mut needed) = (0, BTreeSet::new());
        for (id, dir) in self.checkpoints.range_mut(..=committed).rev() {
            if let Some(manifest) = dir.manifest().ok().filter(|_| kept < keep) {
                kept += 1;
                needed.extend(manifest.needs());
                continue;
            }
            dir.manifest = None;
            dir.files.retain(|partition, _| needed.contains(&(*id, *partition)));
        }
        self.checkpoints.retain(|id, dir| *id > committed || dir.manifest.is_some() || !dir.files.is_empty());
        let older = self.checkpoints.range(..=committed).filter(|(_, dir)| dir.manifest.is_none());
        older.map(|(_, dir)| dir.files.len()).sum()
    }

    /// The newest checkpoint with a manifest, known to the ledger or not.
    pub fn newest_complete(&self) -> Option<u64> {
        self.checkpoints.iter().rev().find(|(_, dir)| dir.manifest.is_some()).map(|(id, _)| *id)
    }
}

impl Checkpoint {
    /// What the checkpoint says of itself.
    ///
    /// # Errors
    ///
    /// It has no manifest, or none that can be read.
    pub fn manifest(&self) -> Result<Manifest, String> {
        let bytes = self.manifest.as_ref().ok_or("it has no manifest")?;
        serde_json::from_slice(bytes).map_err(|e| format!("its manifest is damaged: {e}"))
    }
}
