//! On what and with what was measured.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use serde::{Serialize, Serializer};

/// Where everything ran.
#[derive(Debug, Serialize)]
pub struct Machine {
    processor: String,
    cores: usize,
    memory_gib: u64,
}

impl Machine {
    /// This one.
    pub fn here() -> Machine {
        let field = |path: &str, name: &str| {
            let text = fs::read_to_string(path).ok()?;
            let line = text.lines().find(|line| line.starts_with(name))?.to_owned();
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let memory = field("/proc/meminfo", "MemTotal");
        let memory_kib: u64 =
            memory.and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or_default();
        Machine {
            processor: field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown processor".to_owned()),
            cores: thread::available_parallelism().map_or(1, usize::from),
            memory_gib: memory_kib.div_ceil(1 << 20),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} cores, {} GiB", self.processor, self.cores, self.memory_gib)
    }
}

/// The load average of the last minute; a busy machine is worth a warning.
pub fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or_default();
    if load > 0.5 {
        eprintln!("warning: the machine is not idle (load {load:.1}); the figures will be noisy");
    }
    load
}

/// What was compared, by name; a program that cannot be asked is left out.
#[derive(Debug, Default)]
pub struct Versions(Vec<(String, String)>);

impl Versions {
    /// Adds a version that is known.
    pub fn add(&mut self, name: &str, version: &str) {
        self.0.push((name.to_owned(), version.to_owned()));
    }

    /// Adds what a program says with `--version`, after its name.
    pub fn ask(&mut self, name: &str, program: &Path) {
        if let Some(version) =
            said(program, &["--version"]).as_deref().and_then(|text| text.split_whitespace().nth(1))
        {
            self.add(name, version);
        }
    }

    /// Adds Python and these packages of it.
    pub fn ask_python(&mut self, python: &Path, packages: &[&str]) {
        self.ask("python", python);
        let program = "import sys\n\
                       from importlib.metadata import version as v\n\
                       for p in sys.argv[1:]: print(p, v(p))";
        let listed = said(python, &[&["-c", program], packages].concat()).unwrap_or_default();
        listed
            .lines()
            .filter_map(|line| line.split_once(' '))
            .for_each(|(name, version)| self.add(name, version));
    }
}

/// What a program prints, if all goes well.
fn said(program: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then_some(output.stdout).and_then(|text| String::from_utf8(text).ok())
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.0.iter().map(|(name, version)| format!("{name} {version}")).collect();
        f.write_str(&all.join(", "))
    }
}

impl Serialize for Versions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, version)| (name, version)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_a_list_for_people_and_a_map_for_programs() {
        let mut versions = Versions::default();
        versions.add("redis", "7.0.15");
        versions.ask("nothing", Path::new("/nonexistent/program"));
        versions.add("numpy", "2.4.6");
        assert_eq!(versions.to_string(), "redis 7.0.15, numpy 2.4.6");
        let map = serde_json::to_value(&versions).unwrap();
        assert_eq!(map, serde_json::json!({ "redis": "7.0.15", "numpy": "2.4.6" }));
    }
}
