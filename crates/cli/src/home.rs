//! Where jobs live on this machine: one directory each below `$ELASTICDL_HOME` or `~/.elasticdl`.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use elasticdl_master::status::Event;
use elasticdl_spec::JobSpec;
use elasticdl_spec::resolve::nearest;
use elasticdl_wire::Identity;
use serde::{Deserialize, Serialize};

use crate::fault::Fault;
use crate::lock::{self, Holder};

/// All jobs of this machine.
#[derive(Debug, Clone)]
pub struct Home {
    root: PathBuf,
}

impl Home {
    /// The one that the environment names.
    pub fn find() -> anyhow::Result<Home> {
        let named = std::env::var_os("ELASTICDL_HOME").filter(|v| !v.is_empty()).map(PathBuf::from);
        let root = match named {
            Some(root) => root,
            None => std::env::home_dir()
                .ok_or_else(|| {
                    Fault::user("there is no home directory to keep jobs in").hint("set ELASTICDL_HOME")
                })?
                .join(".elasticdl"),
        };
        let root = std::path::absolute(&root).with_context(|| format!("using {}", root.display()))?;
        Ok(Home { root })
    }

    /// The directory for jobs of this name, whether there is one or not.
    pub fn job(&self, name: &str) -> JobDir {
        JobDir { path: self.root.join("jobs").join(name) }
    }

    /// The directory of a job that exists.
    pub fn existing(&self, name: &str) -> anyhow::Result<JobDir> {
        let names = self.names()?;
        if names.iter().any(|n| n == name) {
            return Ok(self.job(name));
        }
        let near = nearest(name, names.iter().map(String::as_str));
        let hint = near.unwrap_or_else(|| "`elasticdl jobs` lists the jobs of this machine".into());
        Err(Fault::user(format!("there is no job {name:?} in {}", self.root.display())).hint(hint).into())
    }

    /// The names of all jobs, sorted.
    pub fn names(&self) -> anyhow::Result<Vec<String>> {
        let dir = self.root.join("jobs");
        let entries = match fs::read_dir(&dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.with_context(|| format!("listing {}", dir.display()))?,
        };
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok())
            .filter(|entry| entry.path().join("job.json").is_file())
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        Ok(names)
    }
}

/// What was submitted: the content of `job.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Seconds since 1970 when it was submitted.
    pub created: u64,
    /// Where it was submitted; relative paths of the job start here.
    pub cwd: PathBuf,
    /// The job.
    pub job: JobSpec,
    /// The cluster that it runs on; `None`: this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on: Option<OnCluster>,
}

/// Where on a cluster a job runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnCluster {
    /// The context of kubectl; `None`: the current one.
    pub context: Option<String>,
    /// The namespace; `None`: that of the context.
    pub namespace: Option<String>,
    /// Which run of the job: jobs of one name follow each other on a volume.
    pub run: String,
    /// Whether checkpoints of an earlier run are to be removed.
    pub fresh: bool,
}

impl Record {
    /// A path of the job file, from wherever this process runs; a URL is the same everywhere.
    pub fn resolve(&self, path: impl AsRef<Path>) -> PathBuf {
        elasticdl_storage::resolve(&self.cwd, path)
    }
}

/// Where a running master is: the content of `master.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasterAt {
    /// host:port
    pub address: String,
    /// Its process.
    pub pid: u32,
}

/// The directory of one job.
#[derive(Debug, Clone)]
pub struct JobDir {
    path: PathBuf,
}

impl JobDir {
    /// The directory at `path`.
    pub fn at(path: &Path) -> anyhow::Result<JobDir> {
        let path = std::path::absolute(path).with_context(|| format!("using {}", path.display()))?;
        Ok(JobDir { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes it, for its owner alone.
    pub fn create(&self) -> io::Result<()> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&self.path)
    }

    /// The job's secret.
    pub fn token(&self) -> PathBuf {
        self.path.join("token")
    }

    /// The directory of the job's certificate; missing where everything is plain.
    pub fn tls(&self) -> PathBuf {
        self.path.join("tls")
    }

    /// The job's certificate; `None` where it has none and everything is plain.
    pub fn identity(&self) -> anyhow::Result<Option<Identity>> {
        let dir = self.tls();
        if !dir.exists() {
            return Ok(None);
        }
        Ok(Some(Identity::read(&dir)?))
    }

    /// Held by the master for its life.
    pub fn lock(&self) -> PathBuf {
        self.path.join("lock")
    }

    /// Held by a client while it starts a master.
    pub fn starting_lock(&self) -> PathBuf {
        self.path.join("starting.lock")
    }

    /// Held for its life by a client that follows the job and starts its master again where it dies.
    pub fn client_lock(&self) -> PathBuf {
        self.path.join("client.lock")
    }

    /// Where the master is, once it listens.
    pub fn master_file(&self) -> PathBuf {
        self.path.join("master.json")
    }

    /// Logs of all processes.
    pub fn logs(&self) -> PathBuf {
        self.path.join("logs")
    }

    /// The log of one process.
    pub fn log(&self, process: &str) -> PathBuf {
        self.logs().join(format!("{process}.log"))
    }

    /// Events, written by the master.
    pub fn events(&self) -> PathBuf {
        self.path.join("events.jsonl")
    }

    /// What the masters of a job that runs a program of its own remember.
    pub fn gang(&self) -> PathBuf {
        self.path.join("gang.json")
    }

    /// Where checkpoints are, wherever this process runs.
    pub fn checkpoints(&self, record: &Record) -> PathBuf {
        match &record.job.checkpoint.dir {
            Some(dir) => record.resolve(dir),
            None => self.default_checkpoints(),
        }
    }

    /// Where checkpoints go where the job does not say.
    pub fn default_checkpoints(&self) -> PathBuf {
        self.path.join("checkpoint")
    }

    /// What was submitted.
    pub fn record(&self) -> anyhow::Result<Record> {
        let path = self.path.join("job.json");
        let text = fs::read_to_string(&path).map_err(|e| {
            Fault::user(format!("cannot read {}", path.display()))
                .because(e)
                .hint("is it the directory of a job? `elasticdl train` makes them")
        })?;
        serde_json::from_str(&text).map_err(|e| {
            let hint = "start the job again with `elasticdl train`";
            Fault::user(format!("{} is no job of this version", path.display())).because(e).hint(hint).into()
        })
    }

    /// Writes what was submitted.
    pub fn write_record(&self, record: &Record) -> io::Result<()> {
        write_json(&self.path.join("job.json"), record)
    }

    /// Draws a new secret.
    pub fn write_token(&self) -> io::Result<()> {
        let mut random = [0u8; 32];
        fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
        let text: String = random.iter().map(|b| format!("{b:02x}")).collect();
        match fs::remove_file(self.token()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        // Born with its mode: nobody else can read it even for an instant.
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.token())?;
        file.write_all(text.as_bytes())
    }

    /// Where the master is; `None` where none has said so.
    pub fn master(&self) -> Option<MasterAt> {
        serde_json::from_str(&fs::read_to_string(self.master_file()).ok()?).ok()
    }

    /// Says where the master is.
    pub fn write_master(&self, at: &MasterAt) -> io::Result<()> {
        write_json(&self.master_file(), at)
    }

    /// Who leads the job now: `None` where nobody does.
    pub fn holder(&self) -> Option<Option<Holder>> {
        lock::holder(&self.lock())
    }

    /// Whether a client would start the master again.
    pub fn is_tended(&self) -> bool {
        lock::holder(&self.client_lock()).is_some()
    }

    /// Whether the job's master is gone for a moment only: its client is starting it again.
    pub fn is_between_masters(&self) -> bool {
        self.holder().is_none() && self.is_tended() && self.ending().is_none()
    }

    /// The last event of this kind among the newest ones.
    pub fn last_event(&self, kind: &str) -> Option<Event> {
        self.newest_events(200).into_iter().rev().find(|event| event.event == kind)
    }

    /// Whether the job has a master, or will have one in a moment.
    pub fn is_running(&self) -> bool {
        // Looked at twice: it may get its next master between the first look and the second.
        self.holder().is_some() || self.is_between_masters() || self.holder().is_some()
    }

    /// How the job ended, where its last master could tell: the event `finished`.
    pub fn ending(&self) -> Option<Event> {
        let newest = self.newest_events(200);
        let last = newest.into_iter().rev().find(|e| e.event == "finished" || e.event == "started")?;
        (last.event == "finished").then_some(last)
    }

    /// The number of the last event; 0 where there was none yet.
    pub fn last_seq(&self) -> u64 {
        self.newest_events(20).last().map_or(0, |event| event.seq)
    }

    /// The events from byte `start` of the events file on.
    pub fn events_from(&self, start: u64) -> Vec<Event> {
        let mut text = Vec::new();
        if let Ok(mut file) = fs::File::open(self.events()) {
            // What cannot be read was not written.
            let _ = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_to_end(&mut text));
        }
        text.split(|byte| *byte == b'\n').filter_map(event).collect()
    }

    fn newest_events(&self, count: usize) -> Vec<Event> {
        let lines = last_lines(&self.events(), count).unwrap_or_default();
        lines.iter().filter_map(|line| event(line.as_bytes())).collect()
    }
}

/// The event in a line; `None` where it is cut off, or of a version that has other events.
fn event(line: &[u8]) -> Option<Event> {
    let value: serde_json::Value = serde_json::from_slice(line).ok()?;
    serde_json::from_value(value).ok()
}

/// Writes a small JSON file so that a reader sees the old one or the new one, never half of it.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let mut text = serde_json::to_string_pretty(value).map_err(io::Error::other)?;
    text.push('\n');
    let temporary = path.with_extension("new");
    fs::write(&temporary, text)?;
    fs::rename(&temporary, path)
}

/// The last `count` lines of a text file, without reading all of a long one.
pub fn last_lines(path: &Path, count: usize) -> io::Result<Vec<String>> {
    const LINE_BYTES_MAX: u64 = 16 << 10;
    let mut file = fs::File::open(path)?;
    let bytes = file.metadata()?.len();
    let start = bytes.saturating_sub((count as u64 + 1) * LINE_BYTES_MAX);
    file.seek(SeekFrom::Start(start))?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail)?;
    let text = String::from_utf8_lossy(&tail);
    let mut lines: Vec<String> = text.lines().map(Into::into).collect();
    // The first one may be the end of a line.
    let surplus = lines.len().saturating_sub(count).max(usize::from(start > 0).min(lines.len()));
    lines.drain(..surplus);
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_token_is_new_each_time_and_readable_by_its_owner_alone() {
        let root = tempfile::tempdir().unwrap();
        let dir = JobDir::at(&root.path().join("jobs/ctr")).unwrap();
        dir.create().unwrap();
        dir.write_token().unwrap();
        let first = fs::read_to_string(dir.token()).unwrap();
        dir.write_token().unwrap();
        let second = fs::read_to_string(dir.token()).unwrap();
        assert_eq!((first.len(), second.len()), (64, 64));
        assert_ne!(first, second);
        assert_eq!(fs::metadata(dir.token()).unwrap().permissions().mode() & 0o777, 0o600);
        elasticdl_wire::Token::read(&dir.token()).unwrap();
    }

    #[test]
    fn last_lines_are_whole() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("log");
        let long: String = (0..9000).map(|i| format!("line {i}\n")).collect();
        fs::write(&path, long).unwrap();
        assert_eq!(last_lines(&path, 2).unwrap(), ["line 8998", "line 8999"]);
        fs::write(&path, "only").unwrap();
        assert_eq!(last_lines(&path, 2).unwrap(), ["only"]);
        fs::write(&path, "").unwrap();
        assert!(last_lines(&path, 2).unwrap().is_empty());
    }

    #[test]
    fn a_job_has_ended_when_no_master_has_begun_since() {
        let root = tempfile::tempdir().unwrap();
        let dir = JobDir::at(root.path()).unwrap();
        assert_eq!((dir.ending(), dir.last_seq()), (None, 0));
        let event = |seq: u64, name: &str| {
            format!(
                "{{\"event\":\"{name}\",\"seq\":{seq},\"seconds\":1.0,\"unix_ms\":7,\"outcome\":\"stopped\"}}\n"
            )
        };
        let mut text = event(1, "started") + &event(2, "progress") + &event(3, "finished");
        fs::write(dir.events(), &text).unwrap();
        assert_eq!(dir.ending().unwrap().fields["outcome"], "stopped");
        text += &event(4, "started");
        fs::write(dir.events(), &text).unwrap();
        assert_eq!((dir.ending(), dir.last_seq()), (None, 4));
        fs::write(dir.events(), text + "{\"event\":\"prog").unwrap();
        assert_eq!(dir.last_seq(), 4, "half a line is no event");
        let second = event(1, "started").len() as u64;
        let seqs: Vec<u64> = dir.events_from(second).iter().map(|e| e.seq).collect();
        assert_eq!(seqs, [2, 3, 4]);
    }

    #[test]
    fn a_job_without_a_master_is_between_masters_only_while_its_client_lives() {
        let root = tempfile::tempdir().unwrap();
        let dir = JobDir::at(root.path()).unwrap();
        assert!(!dir.is_between_masters());
        let client = lock::Lock::take(&dir.client_lock(), "ctr").unwrap();
        assert!(dir.is_between_masters() && dir.is_running());
        let master = lock::Lock::take(&dir.lock(), "ctr").unwrap();
        assert!(!dir.is_between_masters());
        assert!(dir.is_running());
        drop((master, client));
        assert!(!dir.is_between_masters() && !dir.is_running());
    }

    #[test]
    fn an_unknown_job_is_told_with_the_nearest_name() {
        let root = tempfile::tempdir().unwrap();
        let home = Home { root: root.path().into() };
        fs::create_dir_all(root.path().join("jobs/deepfm")).unwrap();
        fs::write(root.path().join("jobs/deepfm/job.json"), "{}").unwrap();
        let error = home.existing("deepfn").unwrap_err();
        assert!(crate::fault::text(&error).ends_with("hint: did you mean deepfm?"));
        assert!(home.existing("deepfm").is_ok());
    }
}
