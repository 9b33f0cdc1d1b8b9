//! Talking to the API server by the cluster's own kubectl.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::places::Places;
use super::process::output;

/// A kubectl that knows its cluster.
#[derive(Debug, Clone)]
pub struct Kubectl {
    program: PathBuf,
    config: PathBuf,
    cache: PathBuf,
}

impl Kubectl {
    /// With the rights of the administrator.
    pub fn new(places: &Places, binaries: &Path) -> Kubectl {
        Kubectl {
            program: binaries.join("kubectl"),
            config: places.admin_config(),
            cache: cache_directory(places),
        }
    }

    /// What it writes to standard output.
    pub fn text(&self, arguments: &[&str]) -> Result<String> {
        output(self.command(arguments).stdout(Stdio::piped()))
            .with_context(|| format!("kubectl {}", arguments.join(" ")))
    }

    /// What it writes, as a value.
    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.text(&[arguments, &["--output=json"]].concat())?;
        serde_json::from_str(&text)
            .with_context(|| format!("read what kubectl {} wrote", arguments.join(" ")))
    }

    /// Creates what a manifest describes.
    pub fn create(&self, manifest: &Value) -> Result<()> {
        let mut child = self
            .command(&["create", "--filename=-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("start kubectl create")?;
        let mut input = child.stdin.take().context("kubectl takes a manifest")?;
        input.write_all(manifest.to_string().as_bytes()).context("hand kubectl a manifest")?;
        drop(input);
        let output = child.wait_with_output().context("wait for kubectl create")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl create failed: {}", errors.trim());
        Ok(())
    }

    /// Waits until something is so, as `kubectl wait --for` says it: it watches, and does not poll.
    pub fn wait(&self, until: &str, what: &[&str], limit: Duration) -> Result<()> {
        let (until, limit) = (format!("--for={until}"), format!("--timeout={}s", limit.as_secs()));
        self.text(&[&["wait", &until, &limit], what].concat()).map(drop)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.env("KUBECONFIG", &self.config).env("KUBECACHEDIR", &self.cache).args(arguments);
        // The cluster is on this machine, and no proxy leads there.
        command.env("NO_PROXY", "*").stdin(Stdio::null());
        command
    }
}

/// A cache of its own: all clusters have one address, and the last one's answers would be taken for this one's.
pub fn cache_directory(places: &Places) -> PathBuf {
    places.run().join("kubectl")
}
