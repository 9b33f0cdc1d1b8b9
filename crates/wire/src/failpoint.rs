//! Places in the code where a test makes a real process die, stop, fail or wait.
//!
//! A call site names itself: `failpoint::reached("ps.cut")`. Without the environment variable
//! `ELASTICDL_FAILPOINTS` that is one load and `false`. The variable holds points, separated by semicolons:
//!
//! ```text
//! ELASTICDL_FAILPOINTS="ps.between_partitions=kill@3;worker.compute=error;ps.cut=sleep:200ms"
//! ```
//!
//! | action | what happens there |
//! | --- | --- |
//! | `kill` | the process gets SIGKILL from itself |
//! | `stop` | the process gets SIGSTOP from itself |
//! | `error` | `reached` returns true, and the call site fails as if by itself |
//! | `sleep:200ms` | the thread sleeps for so long |
//!
//! `@n` acts when the point is reached for the n-th time in the process, once; without it, the first time;
//! with `@every` each time. Some points know where they are, and can be asked for one place only:
//! `worker.compute[train/0/3:2]=error@every` has batch 2 of a task fail whoever computes it.
//! Where `ELASTICDL_FAILPOINTS_LOG` names a file, a line `name pid` is appended to it and synced before
//! anything happens, and a point whose name stands there already does nothing: a process that is started
//! again does not die again, of several processes one acts, and a test can show that its point was hit.

#![expect(clippy::disallowed_methods, reason = "a point may sleep: that is what it is asked for")]

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use tracing::{error, warn};

const POINTS: &str = "ELASTICDL_FAILPOINTS";
const LOG: &str = "ELASTICDL_FAILPOINTS_LOG";

/// A point is reached. What the environment asks for here happens now; `true`: the caller is to fail.
#[inline]
pub fn reached(name: &str) -> bool {
    set().is_some_and(|set| set.reached(name, act))
}

/// [`reached`] for a caller that fails as if a file or a socket had failed.
///
/// # Errors
///
/// The environment asks for it.
#[inline]
pub fn pass(name: &str) -> io::Result<()> {
    if reached(name) { Err(io::Error::other("a failpoint says so")) } else { Ok(()) }
}

/// [`reached`] for a point that is reached in many places, such as a batch of a task.
#[inline]
pub fn reached_at(name: &str, place: impl FnOnce() -> String) -> bool {
    match set() {
        None => false,
        Some(set) => set.reached(name, act) || set.reached(&format!("{name}[{}]", place()), act),
    }
}

fn set() -> Option<&'static Set> {
    static SET: OnceLock<Option<Set>> = OnceLock::new();
    SET.get_or_init(from_environment).as_ref()
}

#[cold]
fn from_environment() -> Option<Set> {
    let text = std::env::var_os(POINTS)?;
    match parse(&text.to_string_lossy()) {
        Ok(points) => Some(Set { points, log: std::env::var_os(LOG).map(PathBuf::from) }),
        Err(problem) => {
            error!(variable = POINTS, problem, "the failpoints make no sense, so none of them acts");
            None
        }
    }
}

/// What happens at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Kill,
    Stop,
    Error,
    Sleep(Duration),
}

#[derive(Debug)]
struct Point {
    name: String,
    action: Action,
    /// The time it acts, counted from 1; `None`: every time.
    at: Option<u64>,
    reached: AtomicU64,
}

/// The points of a process.
#[derive(Debug)]
struct Set {
    points: Vec<Point>,
    log: Option<PathBuf>,
}

impl Set {
    fn reached(&self, name: &str, act: impl FnOnce(Action) -> bool) -> bool {
        let Some(point) = self.points.iter().find(|point| point.name == name) else { return false };
        let times = point.reached.fetch_add(1, Ordering::Relaxed) + 1;
        if point.at.is_some_and(|at| at != times) {
            return false;
        }
        match self.log.as_deref().map_or(Ok(true), |log| is_first(log, name)) {
            Ok(first) if first || point.at.is_none() => {
                // One that acts every time would fill the log.
                if times == 1 || point.at.is_some() {
                    warn!(point = name, action = ?point.action, "failpoint acts");
                }
                act(point.action)
            }
            Ok(_) => false,
            Err(problem) => {
                error!(point = name, %problem, "the failpoint cannot be noted, so it does not act");
                false
            }
        }
    }
}

/// Notes that the point acts; `false` where it has acted before, in whichever process.
fn is_first(log: &Path, name: &str) -> io::Result<bool> {
    let mut file: File = OpenOptions::new().create(true).read(true).append(true).open(log)?;
    // Freed when the file is closed, also by a process that dies.
    file.lock()?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    if text.lines().any(|line| line.split(' ').next() == Some(name)) {
        return Ok(false);
    }
    file.write_all(format!("{name} {}\n", std::process::id()).as_bytes())?;
    file.sync_all()?;
    Ok(true)
}

fn act(action: Action) -> bool {
    let signal = |signal| {
        if let Err(problem) = kill_process(getpid(), signal) {
            error!(%problem, "the process could not signal itself");
        }
        false
    };
    match action {
        Action::Kill => signal(Signal::KILL),
        Action::Stop => signal(Signal::STOP),
        Action::Error => true,
        Action::Sleep(time) => {
            std::thread::sleep(time);
            false
        }
    }
}

/// Reads the variable, or tells what is wrong with it.
fn parse(text: &str) -> Result<Vec<Point>, String> {
    let mut points: Vec<Point> = Vec::new();
    for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
        let point = parse_point(part).map_err(|problem| format!("{part:?}: {problem}"))?;
        if points.iter().any(|other| other.name == point.name) {
            return Err(format!("{part:?}: the point {} is named twice", point.name));
        }
        points.push(point);
    }
    Ok(points)
}

fn parse_point(text: &str) -> Result<Point, String> {
    let (name, rest) = text.split_once('=').ok_or("a point looks like name=action or name=action@2")?;
    let (action, at) = match rest.split_once('@') {
        None => (rest, Some(1)),
        Some((action, "every")) => (action, None),
        Some((action, times)) => {
            let at = times.parse::<u64>().ok().filter(|n| *n > 0);
            (action, Some(at.ok_or_else(|| format!("{times:?} is no number of times from 1 on"))?))
        }
    };
    let name = name.trim();
    if name.is_empty() || name.contains(char::is_whitespace) {
        return Err("a point has a name without spaces".into());
    }
    let reached = AtomicU64::new(0);
    Ok(Point { name: name.into(), action: parse_action(action.trim())?, at, reached })
}

fn parse_action(text: &str) -> Result<Action, String> {
    match text {
        "kill" => Ok(Action::Kill),
        "stop" => Ok(Action::Stop),
        "error" => Ok(Action::Error),
        _ => {
            let time = text.strip_prefix("sleep:").and_then(|t| humantime::parse_duration(t).ok());
            let wrong = || format!("{text:?} is no action; known: kill, stop, error, sleep:200ms");
            time.map(Action::Sleep).ok_or_else(wrong)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str, log: Option<PathBuf>) -> Set {
        Set { points: parse(text).unwrap(), log }
    }

    /// What a point did when it was reached, if anything.
    fn reach(set: &Set, name: &str) -> Option<Action> {
        let mut done = None;
        set.reached(name, |action| {
            done = Some(action);
            false
        });
        done
    }

    #[test]
    fn points_are_read_with_their_actions_and_times() {
        let points = parse("a.b=kill; c=stop@2;d[x/1:2]=error@every;e=sleep:200ms@7;").unwrap();
        let read: Vec<_> = points.iter().map(|p| (p.name.as_str(), p.action, p.at)).collect();
        let sleep = Action::Sleep(Duration::from_millis(200));
        assert_eq!(
            read,
            [
                ("a.b", Action::Kill, Some(1)),
                ("c", Action::Stop, Some(2)),
                ("d[x/1:2]", Action::Error, None),
                ("e", sleep, Some(7))
            ]
        );
        assert!(parse("").unwrap().is_empty());
    }

    #[test]
    fn what_makes_no_sense_is_told() {
        for (text, expected) in [
            ("a", "\"a\": a point looks like name=action or name=action@2"),
            ("a=kil", "\"a=kil\": \"kil\" is no action; known: kill, stop, error, sleep:200ms"),
            ("a=sleep:soon", "\"sleep:soon\" is no action"),
            ("a=kill@0", "\"0\" is no number of times from 1 on"),
            ("a=kill@often", "\"often\" is no number of times"),
            ("=kill", "a point has a name"),
            ("a=kill;a=stop", "the point a is named twice"),
        ] {
            let problem = parse(text).unwrap_err();
            assert!(problem.contains(expected), "{problem}");
        }
    }

    #[test]
    fn a_point_acts_at_its_time_and_only_once() {
        let set = set("a=error@3;b=kill", None);
        let done: Vec<_> = (0..6).map(|_| reach(&set, "a")).collect();
        assert_eq!(done, [None, None, Some(Action::Error), None, None, None]);
        assert_eq!(reach(&set, "b"), Some(Action::Kill));
        assert_eq!(reach(&set, "c"), None);
    }

    #[test]
    fn the_caller_fails_for_an_error_and_for_nothing_else() {
        let set = set("a=error;b=sleep:1ms", None);
        assert!(set.reached("a", act));
        assert!(!set.reached("a", act) && !set.reached("b", act) && !set.reached("c", act));
    }

    #[test]
    fn a_process_that_is_started_again_does_not_act_again() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("failpoints.log");
        let life = || set("ps.cut=kill;ps.cut_more=stop", Some(log.clone()));
        assert_eq!(reach(&life(), "ps.cut_more"), Some(Action::Stop));
        assert_eq!(reach(&life(), "ps.cut"), Some(Action::Kill), "another name is another point");
        assert_eq!(reach(&life(), "ps.cut"), None);
        let pid = std::process::id();
        let noted = std::fs::read_to_string(&log).unwrap();
        assert_eq!(noted, format!("ps.cut_more {pid}\nps.cut {pid}\n"));
    }

    #[test]
    fn a_point_that_cannot_be_noted_does_not_act() {
        let set = set("a=kill", Some(PathBuf::from("/nowhere/failpoints.log")));
        assert_eq!(reach(&set, "a"), None);
    }
}
