//! Ways to break the protocol on purpose, in the simulator's own edges, to show that the checkers notice.

/// What is broken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sabotage {
    /// Nothing.
    #[default]
    None,
    /// A server applies a batch that is below the mark.
    MarksOff,
    /// A server takes every lease for the newest.
    FencingOff,
    /// Servers, workers and the master mind no incarnation.
    IncarnationsOff,
    /// A server forgets what is closed.
    ClosedOff,
    /// A server tells of its files before they are on disk.
    CommitBeforeDurable,
    /// A server cuts the rows of a file at one moment and tells the marks of a later one.
    TornCut,
    /// A server takes a partition over without the rows that changed while it was copied.
    LastRowsLost,
    /// A server takes a partition over and forgets what it has refused.
    RefusedForgotten,
    /// A server answers, and its backup hears of nothing.
    BackupsUnawaited,
    /// A worker tells the gate now and then of a batch that it has not staged.
    StepsOff,
    /// A server applies what is too stale.
    StaleOff,
    /// Servers never tell that they have written a checkpoint.
    NoCheckpoints,
}
