//! An audit for people and for programs. Pure.

use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::{Audit, Line};
use crate::print;

/// What was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// The job.
    pub job: String,
    /// The checkpoint whose files were read.
    pub checkpoint: u64,
    /// Whether it must hold every record of every epoch.
    pub complete: bool,
    /// Records that had to be applied again after servers died.
    pub replayed: u64,
}

/// The audit as one JSON object.
pub fn as_json(subject: &Subject, audit: &Audit) -> Value {
    let partition = |(partition, line): (u32, &Line)| {
        json!({
            "partition": partition, "expected": line.expected, "applied": line.applied,
            "set_aside": line.set_aside, "lost": line.lost, "doubled": line.doubled,
            "replayed": line.replayed,
        })
    };
    let epoch = |epoch: u32| {
        let applied = || audit.epoch(epoch).map(|(_, line)| line.applied);
        json!({
            "epoch": epoch,
            "expected": audit.epoch(epoch).map(|(_, line)| line.expected).max(),
            "applied_min": applied().min(), "applied_max": applied().max(),
            "partitions": audit.epoch(epoch).map(partition).collect::<Vec<_>>(),
        })
    };
    json!({
        "exact": audit.exact, "lost": audit.lost, "doubled": audit.doubled,
        "set_aside": audit.set_aside, "replayed": subject.replayed,
        "job": subject.job, "checkpoint": subject.checkpoint, "complete": subject.complete,
        "epochs": audit.epochs().into_iter().map(epoch).collect::<Vec<_>>(),
    })
}

/// The audit as a table; partitions with the same figures share a row.
pub fn as_table(audit: &Audit) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header([
        "EPOCH",
        "PARTITIONS",
        "EXPECTED",
        "APPLIED",
        "SET ASIDE",
        "LOST",
        "DOUBLED",
        "REPLAYED",
    ]);
    for epoch in audit.epochs() {
        let lines: Vec<(u32, &Line)> = audit.epoch(epoch).collect();
        for alike in lines.chunk_by(|(_, a), (_, b)| a == b) {
            let (first, line) = alike[0];
            let (last, _) = alike[alike.len() - 1];
            let at_least = if line.batches_agree { "" } else { "≥ " };
            let wrong = |n: u64| if n == 0 { "0".into() } else { format!("{at_least}{}", print::count(n)) };
            table.add_row([
                epoch.to_string(),
                if first == last { first.to_string() } else { format!("{first}–{last}") },
                print::count(line.expected),
                print::count(line.applied),
                print::count(line.set_aside),
                wrong(line.lost),
                wrong(line.doubled),
                print::count(line.replayed),
            ]);
        }
    }
    table.trim_fmt()
}

/// The outcome in one line.
pub fn verdict(subject: &Subject, audit: &Audit) -> String {
    let what = match subject.complete {
        true => format!("the whole job, checkpoint {}", subject.checkpoint),
        false => format!("as of checkpoint {}; the job has more to do", subject.checkpoint),
    };
    let mut aside = String::new();
    if audit.set_aside > 0 {
        aside = format!(", {} set aside", print::count(audit.set_aside));
    }
    if subject.replayed > 0 {
        aside.push_str(&format!(", {} replayed after servers died", print::count(subject.replayed)));
    }
    if audit.exact {
        return format!("exact: every record counts once in every partition{aside} ({what})");
    }
    let (lost, doubled) = (print::count(audit.lost), print::count(audit.doubled));
    let both = audit.lines.values().any(|l| !l.batches_agree && l.expected == l.applied);
    let why =
        if both { "; the counts agree and the batches do not: one was lost, another doubled" } else { "" };
    format!("NOT EXACT: at least {lost} records lost, {doubled} doubled{aside} ({what}){why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject() -> Subject {
        Subject { job: "ctr".into(), checkpoint: 7, complete: true, replayed: 1200 }
    }

    fn right(records: u64) -> Line {
        Line { expected: records, applied: records, batches_agree: true, ..Line::default() }
    }

    fn audit(wrong: Option<Line>) -> Audit {
        let mut audit = Audit { exact: wrong.is_none(), ..Audit::default() };
        for at in (0..2).flat_map(|epoch| (0..4).map(move |partition| (epoch, partition))) {
            audit.lines.insert(at, right(5000));
        }
        if let Some(wrong) = wrong {
            audit.lines.insert((1, 2), wrong);
            (audit.lost, audit.doubled) = (wrong.lost, wrong.doubled);
        }
        audit
    }

    #[test]
    fn a_person_sees_a_row_for_partitions_that_are_alike_and_a_verdict() {
        let lost = Line { applied: 4990, lost: 10, batches_agree: false, ..right(5000) };
        let both = Line { lost: 10, doubled: 10, batches_agree: false, ..right(5000) };
        let text = [None, Some(lost), Some(both)].map(|wrong| {
            let audit = audit(wrong);
            format!("{}\n{}", as_table(&audit), verdict(&subject(), &audit))
        });
        insta::assert_snapshot!(text.join("\n\n"));
    }

    #[test]
    fn a_program_sees_every_partition() {
        insta::assert_snapshot!(serde_json::to_string_pretty(&as_json(&subject(), &audit(None))).unwrap());
    }
}
