//! A server that speaks S3, on this machine and in memory, for the tests of object storage.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ring::digest::{Context as Digest, SHA256};

use crate::cache;
use crate::daemon::Daemon;
use crate::go::Go;

/// Where only this machine can call it.
pub const LOOPBACK: &str = "127.0.0.1";
/// The bucket that tests write to, each below a name of its own.
const BUCKET: &str = "tests";
const PROGRAM: &str = "gofakes3";

/// A running server; it ends when this is dropped.
pub struct Bucket {
    daemon: Daemon,
}

impl Bucket {
    /// Builds the server where it is not built yet (20 seconds), and starts it at an address of this machine.
    pub fn start(host: &str) -> Result<Bucket> {
        let program = ensure_built()?;
        let daemon = Daemon::start(host, |port| {
            let mut command = Command::new(&program);
            command.args(["-backend", "memory", "-quiet", "-initialbucket", BUCKET]);
            command.args(["-host", &format!("{host}:{port}")]);
            command
        })?;
        Ok(Bucket { daemon })
    }

    /// What tests find it by.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("ELASTICDL_TEST_S3", format!("s3://{BUCKET}")),
            ("AWS_ENDPOINT_URL", format!("http://{}", self.daemon.address)),
            ("AWS_ALLOW_HTTP", "true".into()),
            ("AWS_REGION", "us-east-1".into()),
            ("AWS_ACCESS_KEY_ID", "tests".into()),
            ("AWS_SECRET_ACCESS_KEY", "tests".into()),
        ]
    }
}

/// The program, in the cache: built from the module whose checksums stand in `deploy/testbucket`.
fn ensure_built() -> Result<PathBuf> {
    let go = Go::find().context("build the S3 server for tests")?;
    let sources = cache::workspace_root()?.join("deploy/testbucket");
    let built = cache::directory()?.join(format!("testbucket-{}", key(&sources, &go)?));
    let program = built.join(PROGRAM);
    if program.is_file() {
        return Ok(program);
    }
    println!("== building {PROGRAM}, the S3 server for tests, once");
    let partial = tempfile::tempdir_in(cache::directory()?).context("make a directory in the cache")?;
    let mut build = go.command();
    build.args(["build", "-trimpath", "-buildvcs=false", "-o"]).arg(partial.path()).arg("tool");
    let status = build.current_dir(&sources).env("CGO_ENABLED", "0").status().context("run go build")?;
    ensure!(status.success(), "building {PROGRAM} failed: {status}");
    match fs::rename(partial.path(), &built) {
        // Somebody else was quicker.
        Err(_) if program.is_file() => {}
        other => other.with_context(|| format!("rename to {}", built.display()))?,
    }
    Ok(program)
}

/// A hash of everything the program depends on.
fn key(sources: &Path, go: &Go) -> Result<String> {
    let mut digest = Digest::new(&SHA256);
    digest.update(go.version.as_bytes());
    for file in ["go.mod", "go.sum"] {
        let path = sources.join(file);
        digest.update(&fs::read(&path).with_context(|| format!("read {}", path.display()))?);
    }
    Ok(digest.finish().as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect())
}
