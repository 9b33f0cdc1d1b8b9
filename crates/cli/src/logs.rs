//! `logs`: what a job's processes have written.

#![expect(clippy::disallowed_methods, reason = "an edge: it waits for files to grow")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::thread;
use std::time::Duration;

use anyhow::Context;

use crate::args::Logs;
use crate::fault::{Exit, Fault};
use crate::home::{Home, JobDir, last_lines};
use crate::print;

/// How often growing files are looked at.
const PACE: Duration = Duration::from_millis(200);

/// `logs`.
pub fn logs(args: &Logs) -> anyhow::Result<Exit> {
    let dir = Home::find()?.existing(&args.job)?;
    let processes = chosen(&dir, args)?;
    let several = args.process.is_none();
    let mut places = BTreeMap::new();
    for process in &processes {
        let path = dir.log(process);
        // Measured before the lines are read: a line written in between is shown twice rather than never.
        places.insert(process.clone(), fs::metadata(&path).map_or(0, |m| m.len()));
        let lines = last_lines(&path, args.lines).with_context(|| format!("reading {}", path.display()))?;
        for line in lines {
            print::line(&tagged(process, &line, several))?;
        }
    }
    if args.follow {
        grow(&dir, args, places)?;
    }
    Ok(Exit::Done)
}

/// The processes whose logs are wanted: one, or all that have one, the master first.
fn chosen(dir: &JobDir, args: &Logs) -> anyhow::Result<Vec<String>> {
    let all = names(dir);
    let Some(wanted) = &args.process else {
        return Ok(all);
    };
    if all.contains(wanted) {
        return Ok(vec![wanted.clone()]);
    }
    let what = format!("job {:?} has no process {wanted:?} with a log", args.job);
    let there =
        if all.is_empty() { "there are none yet".into() } else { format!("there are {}", all.join(", ")) };
    Err(Fault::user(what).hint(there).into())
}

fn names(dir: &JobDir) -> Vec<String> {
    let files = fs::read_dir(dir.logs()).into_iter().flatten().flatten();
    let names = files.filter_map(|file| Some(file.file_name().to_str()?.strip_suffix(".log")?.to_string()));
    let mut names: Vec<String> = names.collect();
    // worker-2 before worker-10.
    let number = |name: &str| name.rsplit_once('-').and_then(|(_, n)| n.parse::<u32>().ok());
    names.sort_by_key(|name| (name != "master", name.split('-').next().map(String::from), number(name)));
    names
}

fn tagged(process: &str, line: &str, several: bool) -> String {
    if several { format!("{process:<9} | {line}") } else { line.into() }
}

/// Goes on with new lines until nobody leads the job any more.
fn grow(dir: &JobDir, args: &Logs, mut places: BTreeMap<String, u64>) -> anyhow::Result<()> {
    loop {
        // Asked before reading, so that the last lines of a job that ends meanwhile are still read.
        let over = !dir.is_running();
        let processes = match &args.process {
            Some(one) => vec![one.clone()],
            None => names(dir),
        };
        for process in processes {
            let place = places.entry(process.clone()).or_default();
            for line in
                new_lines(dir, &process, place).with_context(|| format!("reading the log of {process}"))?
            {
                print::line(&tagged(&process, &line, args.process.is_none()))?;
            }
        }
        if over {
            return Ok(());
        }
        thread::sleep(PACE);
    }
}

/// Whole lines after `place`, which moves past them.
fn new_lines(dir: &JobDir, process: &str, place: &mut u64) -> io::Result<Vec<String>> {
    let mut file = File::open(dir.log(process))?;
    // A new run has begun the file anew.
    *place = if file.metadata()?.len() < *place { 0 } else { *place };
    file.seek(SeekFrom::Start(*place))?;
    let mut fresh = Vec::new();
    file.read_to_end(&mut fresh)?;
    let whole = fresh.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1);
    *place += whole as u64;
    Ok(String::from_utf8_lossy(&fresh[..whole]).lines().map(Into::into).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_listed_in_the_order_of_their_numbers() {
        let root = tempfile::tempdir().unwrap();
        let dir = JobDir::at(root.path()).unwrap();
        fs::create_dir_all(dir.logs()).unwrap();
        for name in ["worker-10", "worker-2", "ps-0", "master"] {
            fs::write(dir.log(name), "x\n").unwrap();
        }
        assert_eq!(names(&dir), ["master", "ps-0", "worker-2", "worker-10"]);
    }

    #[test]
    fn only_whole_new_lines_are_shown() {
        let root = tempfile::tempdir().unwrap();
        let dir = JobDir::at(root.path()).unwrap();
        fs::create_dir_all(dir.logs()).unwrap();
        fs::write(dir.log("ps-0"), "one\ntw").unwrap();
        let mut place = 0;
        assert_eq!(new_lines(&dir, "ps-0", &mut place).unwrap(), ["one"]);
        fs::write(dir.log("ps-0"), "one\ntwo\n").unwrap();
        assert_eq!(new_lines(&dir, "ps-0", &mut place).unwrap(), ["two"]);
        assert!(new_lines(&dir, "ps-0", &mut place).unwrap().is_empty());
    }
}
