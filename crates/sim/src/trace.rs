//! What happened, as a number that two runs of one seed must agree on, and as text for people.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use elasticdl_spec::mix::{mix2, mix64};

/// Lines kept of a run that is traced.
const LINES_MAX: usize = 400_000;

/// The trace of a run.
#[derive(Debug, Default)]
pub struct Trace {
    hash: u64,
    /// `None`: nobody wants to read it. Shared, so that it outlives a panic of its world.
    lines: Option<Lines>,
}

/// The text of a trace.
pub type Lines = Rc<RefCell<Vec<String>>>;

impl Trace {
    /// A trace that keeps its text there.
    pub fn with_text(lines: &Lines) -> Self {
        Trace { hash: 0, lines: Some(Rc::clone(lines)) }
    }

    /// Notes something. The text is made only where somebody wants it.
    pub fn note(
        &mut self,
        now: Duration,
        kind: &'static str,
        facts: [u64; 3],
        text: impl FnOnce() -> String,
    ) {
        let name = kind.bytes().fold(0u64, |h, b| h.wrapping_mul(0x100_0000_01b3) ^ u64::from(b));
        let [a, b, c] = facts;
        let event = mix64(name ^ now.as_nanos() as u64)
            .wrapping_add(mix64(a ^ b.rotate_left(21) ^ c.rotate_left(42)));
        self.hash = mix2(self.hash, event);
        if let Some(lines) = &self.lines
            && lines.borrow().len() < LINES_MAX
        {
            let line = format!("{:>9.4}  {kind:<14} {}", now.as_secs_f64(), text());
            lines.borrow_mut().push(line);
        }
    }

    /// One number for all that was noted.
    pub fn hash(&self) -> u64 {
        self.hash
    }
}
