//! A line now and then, for logs and pipes. Pure: status in, lines out.

use elasticdl_master::status::{Phase, Status};

use super::block::{figures, phase_text, program_line};
use crate::print;

/// Remembers what was said, so that nothing is said twice.
#[derive(Debug, Default)]
pub struct Plain {
    last: Option<(Phase, u64)>,
}

impl Plain {
    /// The lines for a status: one where it moved since the last, else none.
    pub fn status(&mut self, status: &Status) -> Vec<String> {
        let now = (status.phase, status.records);
        if self.last.replace(now) == Some(now) || status.phase.is_over() {
            return Vec::new();
        }
        if let Some(program) = &status.program {
            let running = status.workers.iter().filter(|member| member.state == "running").count();
            return vec![format!(
                "{:>7}  {}: {}  {running} of {} running",
                print::seconds(status.seconds),
                phase_text(status.phase),
                program_line(program),
                status.workers.len()
            )];
        }
        let records = match status.records_total.filter(|total| *total > 0) {
            Some(total) => {
                let percent = 100.0 * status.records as f64 / total as f64;
                let (done, total) = (print::count(status.records), print::count(total));
                format!("{done} of {total} records ({percent:.1} %)")
            }
            None => format!("{} records", print::count(status.records)),
        };
        let working = status.workers.iter().filter(|w| w.state == "working").count();
        vec![format!(
            "{:>7}  {}: {records}  {}  {working} working",
            print::seconds(status.seconds),
            phase_text(status.phase),
            figures(status)
        )]
    }
}

#[cfg(test)]
mod tests {
    use super::super::block::tests::training;
    use super::*;

    #[test]
    fn a_line_is_said_once_per_change() {
        let mut plain = Plain::default();
        let mut status = training();
        insta::assert_snapshot!(plain.status(&status).join("\n"));
        assert!(plain.status(&status).is_empty());
        status.records += 1;
        assert_eq!(plain.status(&status).len(), 1);
    }
}
