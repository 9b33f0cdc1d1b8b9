//! How often each fault and each branch of the protocol was met. One that never is, is not tested.

use crate::scenario::Kind;

macro_rules! branches {
    ($($name:ident: $text:literal,)*) => {
        /// A fault, or a branch of the protocol.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Branch {
            $(#[doc = $text] $name,)*
        }

        impl Branch {
            /// All of them, with what they mean.
            pub const ALL: &'static [(Branch, &'static str)] = &[$((Branch::$name, $text),)*];
        }
    };
}

branches! {
    WorkerCrash: "fault: a worker crashes",
    ServerCrash: "fault: a server crashes",
    MasterCrash: "fault: the master crashes",
    WorkerPause: "fault: a worker is stopped for a while",
    ServerPause: "fault: a server is stopped for a while",
    MasterPause: "fault: the master is stopped for a while",
    SecondMaster: "fault: a second master while the first is stopped",
    OldMasterWoke: "fault: a master woke up after its successor began",
    WorkerCut: "fault: a worker is cut off from the master",
    ServerCut: "fault: a server is cut off from the master",
    Scaled: "fault: the number of workers is changed",
    ServersScaled: "fault: the number of servers is changed",
    Stopped: "fault: the job is stopped and resumed",
    MessageLost: "fault: a message is lost",
    MessageDoubled: "fault: a message comes twice",
    MessageLate: "fault: a message comes very late",
    Stray: "fault: a push comes before the one that it follows",
    FrameCut: "fault: a connection breaks between two partitions",
    DiskSlow: "fault: the disk is slow",
    CheckpointWriteFailed: "fault: a checkpoint file cannot be written",
    CheckpointReadFailed: "fault: a checkpoint file cannot be read",
    ManifestFailed: "fault: a manifest cannot be written (commit failed)",
    LedgerFailed: "fault: the ledger cannot be written, and its master ends",
    LedgerTorn: "ledger: a torn tail is cut off",
    LedgerLost: "ledger: entries that were not on disk are lost",
    MasterRestarted: "master: goes on from its ledger",
    Adopted: "master: adopts a process that still runs",
    GoneWithoutMaster: "master: a process died while there was none",
    OldMasterAnswered: "master: a master whose successor has begun answers",
    Succeeded: "master: finds that it has a successor, and ends",
    JobResumed: "master: a failed or stopped job is resumed",
    LeaseGiven: "lease: given",
    LeaseAgain: "lease: given for a task that was leased before",
    LeaseExpired: "lease: expired",
    LeaseLostOnItsWay: "lease: lost on its way to the worker",
    LeaseOfGone: "lease: ended with its worker",
    ReportNotHeld: "lease: a report under an ended lease",
    Returned: "lease: given back by a worker that leaves",
    DoneRefused: "done: refused because of an incarnation",
    DoneTaken: "done: taken",
    Silent: "fleet: a silent process is killed",
    Stranger: "fleet: a process is told to join first",
    NotOurs: "fleet: a process that is none of ours ends",
    Measured: "fleet: another number of workers is asked for because of what was measured",
    Drained: "fleet: a worker drains and leaves",
    Orphaned: "fleet: a process ends itself without a master",
    PushApplied: "push: applied",
    PushDuplicate: "push: acknowledged and not applied",
    PushClosed: "push: to a closed task",
    PushGap: "push: above the mark",
    PushFenced: "push: under an older lease",
    WrongIncarnation: "push: to another life of the partition",
    FenceRaised: "fence: raised",
    FenceRefused: "fence: a newer lease was seen",
    FenceClosed: "fence: of a closed task",
    MarksDiffer: "fence: partitions have different marks",
    Redo: "worker: begins a task again at its marks",
    TaskLost: "worker: lets go of a task that another lease holds",
    LeasesEnded: "worker: hears when it asks that leases of its own have ended",
    LeaseDropped: "worker: drops a task that the master says is not its own",
    Quarantined: "worker: a batch that fails again and again is set aside",
    Staged: "staged: a batch is kept by a partition",
    StepCommitted: "staged: a batch that was kept is applied",
    HalfCommitted: "staged: a step that is committed somewhere is committed everywhere",
    NotAdmitted: "bounded: a worker waits at the gate",
    PushStale: "bounded: a push is refused because it is too stale",
    StepApplied: "steps: a partition applies a step",
    StepAgain: "steps: a partition is told again of a step that it has applied",
    StepStale: "steps: a batch comes too late for its step",
    StepLate: "steps: a batch was in a step that somebody else saw to",
    StepsBack: "steps: all partitions go back to the checkpoint",
    TensorsStale: "hybrid: a push is refused because tensors have moved since it was pulled",
    Settled: "hybrid: what is gathered is applied before the last cut",
    RolledBack: "staged: all partitions go back to the checkpoint",
    Replayed: "replay: tasks that were done are opened again",
    ServerReborn: "replay: partitions begin another life",
    Moved: "move: partitions are taken over by another server",
    MoveFailed: "move: partitions could not be copied",
    MoveLost: "rare: partitions were lost on their way",
    MoveWaits: "move: partitions are copied, and wait for a checkpoint",
    Arriving: "move: a master died while partitions were on their way",
    HandedLater: "staged: a partition is handed over when its step is committed",
    BackedUp: "backup: a server has one that lacks nothing",
    BackupLost: "backup: one that does not answer is lost",
    Alone: "backup: a partition goes on alone with the master's leave",
    BackupDropped: "backup: one that nobody knows of is dropped",
    Promoted: "backup: one takes the place of its partition",
    PromotionFailed: "rare: a backup that is to take its partition's place is not there",
    PromotionLost: "backup: its server is gone before it serves",
    Restored: "checkpoint: a partition is restored from it",
    RestoredChain: "checkpoint: a partition is restored from a chain of files",
    FileAdds: "checkpoint: a file adds to earlier ones",
    FileKept: "checkpoint: a file of an old one is kept for the chain that needs it",
    Committed: "checkpoint: committed",
    CheckpointAbandoned: "checkpoint: abandoned because a partition was reborn",
    CheckpointFailed: "checkpoint: failed, and training goes on",
    ManifestUnknown: "checkpoint: on disk, and not in the ledger",
    Evaluated: "evaluation: a round is complete",
}

/// How often each was met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Branches(Vec<u64>);

impl Default for Branches {
    fn default() -> Self {
        Branches(vec![0; Branch::ALL.len()])
    }
}

impl Branches {
    /// Counts one.
    pub fn count(&mut self, branch: Branch) {
        self.0[branch as usize] += 1;
    }

    /// How often it was met.
    pub fn of(&self, branch: Branch) -> u64 {
        self.0[branch as usize]
    }

    /// Adds those of another run.
    pub fn add(&mut self, other: &Branches) {
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| *mine += theirs);
    }

    /// Those that were never met and should have been. What staged steps or a gate alone meet is looked for only
    /// there, of the others not all can be met by one worker, and what is rare is not looked for.
    pub fn never(&self, kind: Kind) -> Vec<&'static str> {
        let due = |text: &str| match kind {
            Kind::Usual => {
                !["staged:", "bounded:", "steps:", "hybrid:", "rare:"].iter().any(|of| text.starts_with(of))
            }
            Kind::Staged => text.starts_with("staged:"),
            Kind::Synchronous => text.starts_with("steps:"),
            Kind::Hybrid => text.starts_with("hybrid:"),
            Kind::Bounded => text.starts_with("bounded:"),
        };
        let never = |(branch, text): &&(Branch, &'static str)| self.of(*branch) == 0 && due(text);
        Branch::ALL.iter().filter(never).map(|(_, text)| *text).collect()
    }

    /// A table for people.
    pub fn table(&self) -> String {
        let line = |(branch, text): &(Branch, &str)| format!("{:>12}  {text}\n", self.of(*branch));
        Branch::ALL.iter().map(line).collect()
    }
}
