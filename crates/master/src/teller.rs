//! Edge: tells what happens: to the events file, to whoever asks over HTTP, and to whoever else listens.
#![expect(clippy::disallowed_methods, reason = "the edge reads the clock")]

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::mpsc;

use crate::error::{Error, Result};
use crate::pages::EventLog;
use crate::status;

/// How long the last events wait to be fetched.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Tells events, numbered without holes.
pub struct Teller {
    began: Instant,
    log: EventLog,
    told: Option<mpsc::UnboundedSender<status::Event>>,
    file: File,
}

impl Teller {
    /// Goes on with the events file in a job's directory. Where an earlier master's file is gone, numbers begin
    /// above `floor`.
    pub fn open(
        job_dir: &Path,
        told: Option<mpsc::UnboundedSender<status::Event>>,
        floor: u64,
    ) -> Result<Teller> {
        let path = job_dir.join("events.jsonl");
        let log = EventLog::new(Some(last_event(&path)).filter(|last| *last > 0).unwrap_or(floor));
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|e| Error::io(format!("opening {}", path.display()), e))?;
        Ok(Teller { began: Instant::now(), log, told, file })
    }

    /// What was told so far, for those who ask.
    pub fn log(&self) -> EventLog {
        self.log.clone()
    }

    /// Waits until a follower has seen everything, for a moment.
    pub async fn farewell(&self) {
        let _ = tokio::time::timeout(LAST_WORDS, self.log.all_seen()).await;
    }

    /// Tells the events file and the log, and then followers: a number that they have seen is not used again.
    pub fn emit(&mut self, event: &str, fields: serde_json::Map<String, serde_json::Value>) {
        let seconds = self.began.elapsed().as_millis() as f64 / 1000.0;
        let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
        let event = status::Event { event: event.into(), seq: self.log.next_seq(), seconds, unix_ms, fields };
        match serde_json::to_string(&event) {
            Ok(mut line) => {
                if event.event != "progress" {
                    tracing::info!("{line}");
                }
                // All at once: a line without its end would swallow the next master's first.
                line.push('\n');
                if let Err(error) = self.file.write_all(line.as_bytes()) {
                    tracing::warn!(%error, "cannot write the event to events.jsonl");
                }
            }
            Err(error) => tracing::error!(%error, "an event is no JSON"),
        }
        if let Some(told) = &self.told {
            // Nobody may listen any more.
            let _ = told.send(event.clone());
        }
        self.log.push(event);
    }
}

/// The number of the last event that an earlier master told; 0 where there is none.
fn last_event(path: &Path) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let number = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok()?["seq"].as_u64();
    text.lines().rev().find_map(number).unwrap_or(0)
}
