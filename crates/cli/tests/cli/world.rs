//! A directory with a home for jobs and some data, and the binary to try there.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Nothing here takes this long on a machine that is merely busy.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// A place to try things; what still runs there is stopped when it is dropped.
pub struct World {
    dir: tempfile::TempDir,
}

/// What a command said.
#[derive(Debug)]
pub struct Said {
    /// Its exit code.
    pub code: Option<i32>,
    /// Data.
    pub stdout: String,
    /// Everything else.
    pub stderr: String,
}

impl Said {
    /// The stdout of a command that must have worked.
    pub fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{}{}", self.stdout, self.stderr);
        self.stdout
    }

    /// The stderr of a command that must have failed with this code.
    pub fn failed(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{}{}", self.stdout, self.stderr);
        self.stderr
    }

    /// The last line of stdout as JSON.
    pub fn last_json(&self) -> Value {
        let line = self.stdout.lines().last().unwrap_or_else(|| panic!("no output; stderr: {}", self.stderr));
        serde_json::from_str(line).unwrap()
    }
}

impl World {
    /// An empty place.
    pub fn new() -> World {
        World { dir: tempfile::tempdir().unwrap() }
    }

    /// A place with so many synthetic records to train on, and some to judge by, in `data/`.
    pub fn with_data(rows: u64) -> World {
        let world = World::new();
        let rows = rows.to_string();
        world.run(&["data", "synth", "criteo", "--rows", &rows, "--test-rows", "2000", "--out", "data"]).ok();
        world
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file into it.
    pub fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Writes the job file `NAME.yaml`: a small model on the data in `data/`; `more` goes below `spec`.
    pub fn job(&self, name: &str, more: &str) -> String {
        let file = format!("{name}.yaml");
        let more = more.replace('\n', "\n  ");
        let text = format!(
            "apiVersion: elasticdl.org/v1\nkind: ElasticJob\nmetadata: {{ name: {name} }}\nspec:\n  \
             model: {{ zoo: deepfm, embedding_dim: 4, hidden: [8] }}\n  \
             data: {{ train: data/train-*.tsv, validate: data/test-*.tsv, layout: criteo, batches_per_task: 4 }}\n  \
             {more}\n"
        );
        self.write(&file, &text);
        file
    }

    /// The directory of a job.
    pub fn job_dir(&self, name: &str) -> PathBuf {
        self.path("home/jobs").join(name)
    }

    /// The binary, in this place.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elasticdl"));
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ELASTICDL_"))
        {
            command.env_remove(name);
        }
        command
            .args(args)
            .current_dir(self.dir.path())
            .env("ELASTICDL_HOME", self.path("home"))
            .env("NO_COLOR", "1");
        command.stdin(Stdio::null());
        command
    }

    /// Runs the binary to its end.
    pub fn run(&self, args: &[&str]) -> Said {
        said(&mut self.command(args))
    }

    /// Trains with `--json` and follows the events while it runs.
    pub fn start(&self, args: &[&str]) -> Running {
        let mut command = self.command(args);
        Running::following(
            command.arg("--json").stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap(),
        )
    }

    /// The status of a running job.
    pub fn status(&self, job: &str) -> Value {
        serde_json::from_str(&self.run(&["status", job, "--json"]).ok()).unwrap()
    }

    /// Where the master of a running job is: address and process.
    pub fn master(&self, job: &str) -> (String, u32) {
        let text = fs::read_to_string(self.job_dir(job).join("master.json")).unwrap();
        let at: Value = serde_json::from_str(&text).unwrap();
        (at["address"].as_str().unwrap().into(), at["pid"].as_u64().unwrap() as u32)
    }

    /// Text with the place's own path taken out, for snapshots.
    pub fn neutral(&self, text: &str) -> String {
        text.replace(&self.dir.path().display().to_string(), "[DIR]")
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let jobs = fs::read_dir(self.path("home/jobs")).into_iter().flatten().flatten();
        for job in jobs.filter(|job| job.path().join("master.json").exists()) {
            let name = job.file_name().into_string().unwrap_or_default();
            self.run(&["stop", &name, "--now"]);
        }
    }
}

/// Runs a command to its end.
pub fn said(command: &mut Command) -> Said {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Said { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// A job that is being followed.
pub struct Running {
    /// The client.
    pub child: Child,
    events: BufReader<ChildStdout>,
    seen: Vec<Value>,
}

impl Running {
    /// Follows a client whose stdout is ours.
    pub fn following(mut child: Child) -> Running {
        let events = BufReader::new(child.stdout.take().unwrap());
        Running { child, events, seen: Vec::new() }
    }

    /// The next event that `wanted` likes; fails where the job ends before it.
    pub fn until(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            let event =
                self.next().unwrap_or_else(|| panic!("the job ended before {what}: {:#?}", self.seen));
            if wanted(&event) {
                return event;
            }
        }
    }

    /// Waits until some records were trained.
    pub fn until_training(&mut self) -> Value {
        self.until("training", |e| e["event"] == "progress" && e["records"].as_u64() > Some(0))
    }

    /// The last event and the exit code.
    pub fn end(mut self) -> (Value, Option<i32>) {
        while self.next().is_some() {}
        let status = self.child.wait().unwrap();
        let last = self.seen.pop().expect("a job says something");
        assert_eq!(last["event"], "finished", "the last event: {last}");
        (last, status.code())
    }

    fn next(&mut self) -> Option<Value> {
        let mut line = String::new();
        if self.events.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        let event: Value = serde_json::from_str(&line).unwrap();
        self.seen.push(event.clone());
        Some(event)
    }
}

/// Waits for something that happens elsewhere; there is nothing to be told by, so it looks often.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < DEADLINE, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a process of ours is there and no zombie.
pub fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| state != 'Z')
}

/// Sends a signal to a process that this test has started.
pub fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// The processes of a job by the status: workers and servers.
pub fn pids(status: &Value) -> Vec<u32> {
    let list = |key: &str| status[key].as_array().cloned().unwrap_or_default();
    let all = list("workers").into_iter().chain(list("servers"));
    all.filter_map(|process| process["pid"].as_u64()).map(|pid| pid as u32).collect()
}

/// Where real data may lie; `None` says aloud that a test is skipped.
pub fn shared_data(name: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let places = [root.join("../shared/data").join(name), root.join("data").join(name)];
    let found = places.into_iter().find(|path| path.exists());
    if found.is_none() {
        eprintln!("skipped: there is no shared/data/{name} beside the repository");
    }
    found.and_then(|path| fs::canonicalize(path).ok())
}
