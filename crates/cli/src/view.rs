//! What a person or a program sees of a job while it runs: a live block on a terminal, plain lines where
//! there is none, JSON for programs. Here is the choice among them; what is shown is in the files below.

use std::io::{self, IsTerminal};
use std::time::Duration;

use elasticdl_master::status::{Event, Status};

use crate::print;

mod block;
pub mod event;
mod live;
mod plain;
mod staleness;
mod summary;

pub use block::{Block, Rates, phase_text};
pub use summary::summary;

/// Where a job is shown.
pub enum View {
    /// Redrawn in place on a terminal.
    Live(live::Live),
    /// A line now and then on stderr.
    Plain(plain::Plain),
    /// Every event on stdout.
    Json,
}

impl View {
    /// The view that fits: JSON where it is asked for, live on a terminal, else plain lines.
    pub fn fitting(json: bool) -> View {
        if json {
            View::Json
        } else if io::stderr().is_terminal() {
            View::Live(live::Live::new())
        } else {
            View::Plain(plain::Plain::default())
        }
    }

    /// How often it wants to know the status.
    pub fn pace(&self) -> Option<Duration> {
        match self {
            View::Live(_) => Some(Duration::from_millis(250)),
            View::Plain(_) => Some(Duration::from_secs(2)),
            View::Json => None,
        }
    }

    /// The job now; `now` is a clock that only grows.
    pub fn status(&mut self, now: Duration, status: &Status) -> io::Result<()> {
        match self {
            View::Live(live) => live.status(now, status),
            View::Plain(plain) => {
                plain.status(status).iter().for_each(|line| print::note(line));
                Ok(())
            }
            View::Json => Ok(()),
        }
    }

    /// Something happened.
    pub fn event(&mut self, event: &Event) -> io::Result<()> {
        match self {
            View::Live(live) => match event::text(event) {
                Some(text) => live.note(&event::stamped(event, &text)),
                None => Ok(()),
            },
            View::Plain(_) => {
                if let Some(text) = event::text(event) {
                    print::note(&event::stamped(event, &text));
                }
                Ok(())
            }
            View::Json => print::line(&serde_json::to_string(event).map_err(io::Error::other)?),
        }
    }

    /// Tells the person something that is no event of the job.
    pub fn note(&mut self, text: &str) -> io::Result<()> {
        match self {
            View::Live(live) => live.note(text),
            View::Plain(_) | View::Json => {
                print::note(text);
                Ok(())
            }
        }
    }

    /// Leaves the terminal as it was.
    pub fn end(&mut self) -> io::Result<()> {
        match self {
            View::Live(live) => live.end(),
            View::Plain(_) | View::Json => Ok(()),
        }
    }
}
