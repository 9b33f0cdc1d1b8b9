//! Errors as people see them: what was attempted, why it failed, what to do next, and the exit code.

use std::error::Error as StdError;
use std::fmt;

use elasticdl_spec::Kind;
use elasticdl_spec::resolve::Problems;

/// What the process ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Everything that was asked for is done.
    Done = 0,
    /// The person's input is wrong.
    User = 1,
    /// The program is wrong.
    Bug = 2,
    /// The job failed.
    Job = 3,
}

impl From<Kind> for Exit {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::User => Exit::User,
            Kind::Bug => Exit::Bug,
            Kind::Retry => Exit::Job,
        }
    }
}

/// A failure with a hint and an exit code.
#[derive(Debug)]
pub struct Fault {
    what: String,
    hint: Option<String>,
    exit: Exit,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Fault {
    /// The person's input is wrong.
    pub fn user(what: impl Into<String>) -> Self {
        Fault { what: what.into(), hint: None, exit: Exit::User, source: None }
    }

    /// The job failed, for no fault of the input.
    pub fn job(what: impl Into<String>) -> Self {
        Fault { exit: Exit::Job, ..Fault::user(what) }
    }

    /// With what to do next.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// With another exit code.
    pub fn exit(mut self, exit: Exit) -> Self {
        self.exit = exit;
        self
    }

    /// With why it failed.
    pub fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl StdError for Fault {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

/// Everything that is wrong with a job, below one line that says with what.
pub fn problems(subject: &str, problems: &Problems) -> Fault {
    let many = if problems.0.len() == 1 { "a problem" } else { "problems" };
    let list = problems.to_string().replace('\n', "\n  ");
    Fault::user(format!("{subject} has {many}\n  {list}"))
}

/// The text of an error, with its sources, and a hint where one is known.
pub fn text(error: &anyhow::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        let part = cause.to_string();
        // A message that ends with its source's own would say everything twice.
        if !parts.last().is_some_and(|last| last.ends_with(&part)) {
            parts.push(part);
        }
    }
    let mut text = format!("error: {}", parts.join(": "));
    let hints = error.chain().filter_map(|cause| cause.downcast_ref::<Fault>()?.hint.as_ref());
    for hint in hints {
        text.push_str("\nhint: ");
        text.push_str(hint);
    }
    text
}

/// The exit code that an error leads to: the first cause that knows.
pub fn exit(error: &anyhow::Error) -> Exit {
    error.chain().find_map(known_exit).unwrap_or(Exit::Bug)
}

fn known_exit(cause: &(dyn StdError + 'static)) -> Option<Exit> {
    let kind = |kind: Kind| Some(Exit::from(kind));
    if let Some(fault) = cause.downcast_ref::<Fault>() {
        return Some(fault.exit);
    }
    if let Some(e) = cause.downcast_ref::<elasticdl_data::Error>() {
        return kind(e.kind());
    }
    if let Some(e) = cause.downcast_ref::<elasticdl_nn::Error>() {
        return kind(e.kind());
    }
    if let Some(e) = cause.downcast_ref::<elasticdl_wire::Error>() {
        return kind(e.kind());
    }
    if let Some(e) = cause.downcast_ref::<elasticdl_master::Error>() {
        return kind(e.kind());
    }
    if let Some(e) = cause.downcast_ref::<elasticdl_ps::Error>() {
        return kind(e.kind());
    }
    if let Some(e) = cause.downcast_ref::<elasticdl_worker::Error>() {
        return kind(e.kind());
    }
    // The disk, the network and permissions are the person's to mend.
    cause.downcast_ref::<std::io::Error>().map(|_| Exit::User)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_tells_its_causes_once_and_ends_with_the_hint() {
        let io = std::io::Error::other("no space left");
        let fault = Fault::user("cannot write model/x").because(io).hint("free some space");
        let error = anyhow::Error::from(fault);
        assert_eq!(text(&error), "error: cannot write model/x: no space left\nhint: free some space");
        assert_eq!(exit(&error), Exit::User);
    }

    #[test]
    fn what_nobody_classified_is_a_bug() {
        assert_eq!(exit(&anyhow::anyhow!("surprise")), Exit::Bug);
        assert_eq!(exit(&Fault::job("the master died").into()), Exit::Job);
    }
}
