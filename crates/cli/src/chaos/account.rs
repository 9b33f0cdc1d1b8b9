//! What came of each hit: how long the job took to notice and to mend it. Pure: the log of the harm and the
//! job's events in, figures out.

use std::collections::BTreeSet;

use comfy_table::{Table, presets};
use elasticdl_master::status::Event;
use serde_json::{Value, json};

use super::{Deed, Hit};
use crate::args::Target;
use crate::print;

/// For so long after a paused process was let go on, a lost lease is put down to the pause.
const AFTER_PAUSE_MS: u64 = 1000;

/// What came of a hit; `None` where it does not apply, or has not happened.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Account {
    /// Seconds until the master knew.
    pub detect: Option<f64>,
    /// Seconds from there until a replacement was there: a worker has joined, a server's process was started,
    /// another worker has gone on with a lost task. Of the master: from the hit until its successor listens.
    pub regroup: Option<f64>,
    /// Seconds until it could work: a server has loaded its partitions, a master has given its first lease.
    pub load: Option<f64>,
    /// Seconds until everything that a server had lost was applied again.
    pub replay: Option<f64>,
    /// How many records that was.
    pub redone: Option<u64>,
    /// A master died before that, and its successor does not tell when it was done.
    pub untold: bool,
}

/// Reckons what came of each hit.
pub fn account(hits: &[Hit], events: &[Event]) -> Vec<Account> {
    let mut story = Story { events, told: BTreeSet::new() };
    hits.iter().map(|hit| story.account(hit)).collect()
}

/// Whether nothing more is to come of a hit.
pub fn is_over(hit: &Hit, account: &Account) -> bool {
    match (hit.deed, hit.victim.role) {
        // Not every pause is noticed, and none has to be.
        (Deed::Pause, _) => true,
        (Deed::Kill, Target::Worker) => account.regroup.is_some(),
        (Deed::Kill, Target::Master) => account.load.is_some(),
        (Deed::Kill, Target::Server) => {
            let replayed = account.replay.is_some() || account.untold;
            account.load.is_some() && replayed == account.redone.is_some()
        }
    }
}

/// The job's events, each of which belongs to one hit at most.
struct Story<'a> {
    events: &'a [Event],
    told: BTreeSet<u64>,
}

impl<'a> Story<'a> {
    fn account(&mut self, hit: &Hit) -> Account {
        match hit.victim.role {
            Target::Worker => self.worker(hit),
            Target::Server => self.server(hit),
            Target::Master if hit.deed == Deed::Kill => self.master(hit),
            Target::Master => Account::default(),
        }
    }

    fn worker(&mut self, hit: &Hit) -> Account {
        let mut account = Account::default();
        if let Some(exited) = self.noticed(hit, "worker_exited") {
            account.detect = Some(seconds(hit.unix_ms, exited));
            let started = self.take(exited, |e| e.event == "worker_started");
            let joined = started.and_then(|started| {
                let worker = number(started, "worker");
                self.take(started, |e| e.event == "worker_joined" && number(e, "worker") == worker)
            });
            account.regroup = joined.map(|joined| seconds(exited.unix_ms, joined));
            return account;
        }
        let until = hit.until_ms.map_or(u64::MAX, |until| until + AFTER_PAUSE_MS);
        let expired = self.take_from(hit.unix_ms, |e| {
            e.event == "lease_expired"
                && number(e, "worker") == Some(hit.victim.id.into())
                && e.unix_ms <= until
        });
        if let Some(expired) = expired {
            account.detect = Some(seconds(hit.unix_ms, expired));
            let task = expired.fields.get("task");
            let goes_on = self.take(expired, |e| e.event == "task_goes_on" && e.fields.get("task") == task);
            account.regroup = goes_on.map(|goes_on| seconds(expired.unix_ms, goes_on));
        }
        account
    }

    fn server(&mut self, hit: &Hit) -> Account {
        let Some(exited) = self.noticed(hit, "server_exited") else { return Account::default() };
        let id = u64::from(hit.victim.id);
        let ours = |e: &Event, event: &str| e.event == event && number(e, "server") == Some(id);
        let started = self.take(exited, |e| ours(e, "server_started"));
        let ready = started.and_then(|started| self.take(started, |e| ours(e, "server_ready")));
        // Servers that die together are mended together, and told of once.
        let of_ours = |e: &Event| {
            e.fields.get("servers").and_then(Value::as_array).is_some_and(|list| list.contains(&json!(id)))
        };
        let replay = self.events.iter().find(|e| e.seq > exited.seq && e.event == "replay" && of_ours(e));
        let mut account = Account {
            detect: Some(seconds(hit.unix_ms, exited)),
            regroup: started.map(|started| seconds(exited.unix_ms, started)),
            load: ready.and_then(|ready| ready.fields.get("load_seconds")?.as_f64()),
            ..Account::default()
        };
        if let Some(replay) = replay {
            account.redone = number(replay, "records");
            let mut later = self.events.iter().filter(|e| e.seq > replay.seq);
            let end = later.find(|e| e.event == "replayed" || e.event == "started");
            (account.replay, account.untold) = match (number(replay, "tasks"), end) {
                (Some(0), _) => (Some(0.0), false),
                (_, Some(end)) if end.event == "started" => (None, true),
                (_, end) => (end.map(|replayed| seconds(replay.unix_ms, replayed)), false),
            };
        }
        account
    }

    fn master(&mut self, hit: &Hit) -> Account {
        let Some(started) = self.take_from(hit.unix_ms, |e| e.event == "started") else {
            return Account::default();
        };
        let leasing = self.take(started, |e| e.event == "leasing");
        Account {
            regroup: Some(seconds(hit.unix_ms, started)),
            load: leasing.map(|leasing| seconds(started.unix_ms, leasing)),
            ..Account::default()
        }
    }

    /// How the master learnt that the process that was hit is gone: it saw it end, or it is a new master that
    /// did not find it any more.
    fn noticed(&mut self, hit: &Hit, event: &str) -> Option<&'a Event> {
        let pid = Some(hit.victim.pid.into());
        // What ends after a pause is over ends for another reason.
        let until = hit.until_ms.filter(|_| hit.deed == Deed::Pause).unwrap_or(u64::MAX);
        let ours = |e: &Event| e.event == event && number(e, "pid") == pid && e.unix_ms <= until;
        let exited = self.take_from(hit.unix_ms, ours);
        if exited.is_some() || hit.deed == Deed::Pause {
            return exited;
        }
        self.events.iter().find(|e| e.unix_ms >= hit.unix_ms && e.event == "started")
    }

    /// The first such event after another one.
    fn take(&mut self, after: &Event, wanted: impl Fn(&Event) -> bool) -> Option<&'a Event> {
        self.take_if(|e| e.seq > after.seq && wanted(e))
    }

    /// The first such event since a moment.
    fn take_from(&mut self, since_ms: u64, wanted: impl Fn(&Event) -> bool) -> Option<&'a Event> {
        self.take_if(|e| e.unix_ms >= since_ms && wanted(e))
    }

    fn take_if(&mut self, wanted: impl Fn(&Event) -> bool) -> Option<&'a Event> {
        let found = self.events.iter().find(|e| wanted(e) && !self.told.contains(&e.seq))?;
        self.told.insert(found.seq);
        Some(found)
    }
}

fn number(event: &Event, field: &str) -> Option<u64> {
    event.fields.get(field)?.as_u64()
}

/// Seconds from a moment to an event.
fn seconds(since_ms: u64, event: &Event) -> f64 {
    event.unix_ms.saturating_sub(since_ms) as f64 / 1000.0
}

/// The hits as a table; times count from `began_ms`.
pub fn as_table(began_ms: u64, hits: &[Hit], accounts: &[Account]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["TIME", "HIT", "DETECT", "REGROUP", "LOAD", "REPLAY", "RECORDS REDONE"]);
    let dash = || "–".to_string();
    let shown = |seconds: Option<f64>| seconds.map_or_else(dash, |s| format!("{s:.3}s"));
    for (hit, account) in hits.iter().zip(accounts) {
        table.add_row([
            format!("{:.1}s", since(began_ms, hit)),
            format!("{} {}", hit.deed, hit.victim),
            shown(account.detect),
            shown(account.regroup),
            shown(account.load),
            shown(account.replay),
            account.redone.map_or_else(dash, print::count),
        ]);
    }
    table.trim_fmt()
}

/// The hits as JSON objects.
pub fn as_json(began_ms: u64, hits: &[Hit], accounts: &[Account]) -> Vec<Value> {
    let one = |(hit, account): (&Hit, &Account)| {
        json!({
            "seconds": since(began_ms, hit), "unix_ms": hit.unix_ms, "deed": hit.deed,
            "victim": hit.victim.to_string(), "pid": hit.victim.pid,
            "detect": account.detect, "regroup": account.regroup, "load": account.load,
            "replay": account.replay, "records_redone": account.redone,
        })
    };
    hits.iter().zip(accounts).map(one).collect()
}

fn since(began_ms: u64, hit: &Hit) -> f64 {
    hit.unix_ms.saturating_sub(began_ms) as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chaos::Victim;

    /// Events from lines of milliseconds, name and fields.
    fn events(lines: Value) -> Vec<Event> {
        let lines = lines.as_array().unwrap().clone();
        let event = |(seq, line): (usize, Value)| {
            let mut event = line[2].as_object().unwrap().clone();
            event.insert("event".into(), line[1].clone());
            event.insert("seq".into(), json!(seq + 1));
            event.insert("seconds".into(), json!(0.0));
            event.insert("unix_ms".into(), line[0].clone());
            serde_json::from_value(Value::Object(event)).unwrap()
        };
        lines.into_iter().enumerate().map(event).collect()
    }

    fn hit(unix_ms: u64, deed: Deed, role: Target, id: u32) -> Hit {
        let until_ms = (deed == Deed::Pause).then_some(unix_ms + 5000);
        Hit { unix_ms, deed, victim: Victim { role, id, pid: 100 + id }, until_ms }
    }

    #[test]
    fn a_killed_worker_is_accounted_for_by_its_own_exit_and_its_replacement() {
        let events = events(json!([
            [900, "worker_started", { "worker": 7, "pid": 107 }],
            [1010, "worker_exited", { "worker": 3, "pid": 103 }],
            [1020, "worker_started", { "worker": 8, "pid": 200 }],
            [1500, "worker_joined", { "worker": 7, "pid": 107 }],
            [1600, "worker_joined", { "worker": 8, "pid": 200 }],
        ]));
        let hits = [hit(1000, Deed::Kill, Target::Worker, 3)];
        let expected = Account { detect: Some(0.01), regroup: Some(0.59), ..Account::default() };
        assert_eq!(account(&hits, &events), [expected]);
        assert!(is_over(&hits[0], &expected) && !is_over(&hits[0], &Account::default()));
    }

    #[test]
    fn two_workers_killed_together_get_a_replacement_each() {
        let events = events(json!([
            [1010, "worker_exited", { "worker": 3, "pid": 103 }],
            [1011, "worker_exited", { "worker": 4, "pid": 104 }],
            [1020, "worker_started", { "worker": 8, "pid": 200 }],
            [1021, "worker_started", { "worker": 9, "pid": 201 }],
            [1611, "worker_joined", { "worker": 9, "pid": 201 }],
            [2010, "worker_joined", { "worker": 8, "pid": 200 }],
        ]));
        let hits = [hit(1000, Deed::Kill, Target::Worker, 3), hit(1001, Deed::Kill, Target::Worker, 4)];
        let regroups: Vec<_> = account(&hits, &events).iter().map(|a| a.regroup).collect();
        assert_eq!(regroups, [Some(1.0), Some(0.6)]);
    }

    #[test]
    fn a_killed_server_loads_and_replays() {
        let mut lines = json!([
            [1005, "server_exited", { "server": 1, "pid": 101 }],
            [1005, "replay", { "servers": [0, 1], "tasks": 3, "records": 12_288 }],
            [1015, "server_started", { "server": 1, "pid": 300 }],
            [1400, "server_ready", { "server": 1, "load_seconds": 0.25 }],
        ]);
        let hits = [hit(1000, Deed::Kill, Target::Server, 1)];
        let loaded = Account {
            detect: Some(0.005),
            regroup: Some(0.01),
            load: Some(0.25),
            redone: Some(12_288),
            ..Account::default()
        };
        assert_eq!(account(&hits, &events(lines.clone())), [loaded]);
        assert!(!is_over(&hits[0], &loaded), "it has not caught up yet");
        let mut next = lines.clone();
        next.as_array_mut().unwrap().push(json!([1900, "started", { "term": 2 }]));
        let untold = account(&hits, &events(next))[0];
        assert_eq!(untold, Account { untold: true, ..loaded });
        assert!(is_over(&hits[0], &untold), "the next master tells of no end of it");
        lines.as_array_mut().unwrap().push(json!([2105, "replayed", { "tasks": 3 }]));
        let over = account(&hits, &events(lines))[0];
        assert_eq!(over, Account { replay: Some(1.1), ..loaded });
        assert!(is_over(&hits[0], &over));
    }

    #[test]
    fn a_server_that_lost_nothing_has_nothing_to_replay() {
        let events = events(json!([
            [1005, "server_exited", { "server": 1, "pid": 101 }],
            [1005, "replay", { "servers": [0, 1], "tasks": 0, "records": 0 }],
            [1015, "server_started", { "server": 1, "pid": 300 }],
            [1400, "server_ready", { "server": 1, "load_seconds": 0.25 }],
        ]));
        let hits = [hit(1000, Deed::Kill, Target::Server, 1)];
        let account = account(&hits, &events)[0];
        assert_eq!((account.replay, account.redone), (Some(0.0), Some(0)));
        assert!(is_over(&hits[0], &account));
    }

    #[test]
    fn what_dies_while_there_is_no_master_is_noticed_by_the_next_one() {
        let events = events(json!([
            [1100, "started", { "term": 2, "adopted": 1 }],
            [1101, "replay", { "servers": [1], "tasks": 1, "records": 40 }],
            [1110, "server_started", { "server": 1, "pid": 300 }],
            [1111, "worker_started", { "worker": 9, "pid": 301 }],
            [1300, "server_ready", { "server": 1, "load_seconds": 0.1 }],
            [1500, "worker_joined", { "worker": 9, "pid": 301 }],
        ]));
        let hits = [
            hit(1000, Deed::Kill, Target::Master, 0),
            hit(1050, Deed::Kill, Target::Worker, 3),
            hit(1060, Deed::Kill, Target::Server, 1),
        ];
        let accounts = account(&hits, &events);
        assert_eq!((accounts[0].regroup, accounts[1].detect), (Some(0.1), Some(0.05)));
        assert_eq!((accounts[1].regroup, accounts[2].regroup), (Some(0.4), Some(0.01)));
        assert_eq!((accounts[2].load, accounts[2].redone), (Some(0.1), Some(40)));
    }

    #[test]
    fn a_killed_master_is_back_when_it_listens_and_works_when_it_leases() {
        let events = events(json!([
            [500, "started", { "term": 1 }],
            [510, "leasing", { "term": 1 }],
            [1080, "started", { "term": 2, "adopted": 4 }],
            [1090, "leasing", { "term": 2 }],
        ]));
        let hits = [hit(1000, Deed::Kill, Target::Master, 0)];
        let expected = Account { regroup: Some(0.08), load: Some(0.01), ..Account::default() };
        assert_eq!(account(&hits, &events), [expected]);
    }

    #[test]
    fn a_pause_is_noticed_by_the_lease_or_not_at_all() {
        let events = events(json!([
            [3000, "lease_expired", { "worker": 4, "task": "train/0/9" }],
            [4000, "lease_expired", { "worker": 3, "task": "train/0/17" }],
            [4100, "task_goes_on", { "task": "train/0/9", "worker": 1 }],
            [4200, "task_goes_on", { "task": "train/0/17", "worker": 2 }],
            [90_000, "lease_expired", { "worker": 5, "task": "train/0/99" }],
        ]));
        let hits = [
            hit(1000, Deed::Pause, Target::Worker, 3),
            hit(1000, Deed::Pause, Target::Worker, 5),
            hit(1000, Deed::Pause, Target::Server, 0),
            hit(1000, Deed::Pause, Target::Master, 0),
        ];
        let noticed = Account { detect: Some(3.0), regroup: Some(0.2), ..Account::default() };
        let nothing = Account::default();
        assert_eq!(account(&hits, &events), [noticed, nothing, nothing, nothing]);
    }

    #[test]
    fn what_is_killed_after_its_pause_dies_of_the_kill() {
        let events = events(json!([[7010, "server_exited", { "server": 1, "pid": 101 }]]));
        let hits = [hit(1000, Deed::Pause, Target::Server, 1), hit(7000, Deed::Kill, Target::Server, 1)];
        let accounts = account(&hits, &events);
        assert_eq!((accounts[0].detect, accounts[1].detect), (None, Some(0.01)));
    }

    #[test]
    fn the_table_has_a_dash_where_nothing_applies() {
        let hits = [
            hit(4000, Deed::Kill, Target::Worker, 3),
            hit(7_250, Deed::Kill, Target::Server, 1),
            hit(10_000, Deed::Kill, Target::Master, 0),
            hit(13_000, Deed::Pause, Target::Server, 0),
        ];
        let accounts = [
            Account { detect: Some(0.002), regroup: Some(0.31), ..Account::default() },
            Account {
                detect: Some(0.001),
                regroup: Some(0.012),
                load: Some(0.25),
                replay: Some(1.4),
                redone: Some(12_288),
                untold: false,
            },
            Account { regroup: Some(0.09), load: Some(0.004), ..Account::default() },
            Account::default(),
        ];
        insta::assert_snapshot!(as_table(1000, &hits, &accounts));
        let json = as_json(1000, &hits, &accounts);
        assert_eq!(json[1]["records_redone"], 12_288);
        assert_eq!((&json[0]["victim"], &json[0]["replay"]), (&json!("worker-3"), &Value::Null));
        assert_eq!((&json[3]["deed"], &json[3]["seconds"]), (&json!("pause"), &json!(12.0)));
    }
}
