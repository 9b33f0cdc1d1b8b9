//! `cargo xtask image`: a static program, and a container image archive with it.
//!
//! A static program runs on any Linux with the same processor, whatever C library is there or not, so its
//! image holds the program and next to nothing else.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::Value;

/// Options of `cargo xtask image`.
#[derive(Debug, Args)]
pub struct Options {
    /// File to write; by default elasticdl.tar in the target directory
    #[arg(long, value_name = "FILE.tar")]
    out: Option<PathBuf>,
    /// Name of the image; by default elasticdl.org/elasticdl:VERSION
    #[arg(long, value_name = "REF")]
    name: Option<String>,
    /// More arguments of `elasticdl image`
    #[arg(last = true)]
    more: Vec<String>,
}

/// Builds the program and lets it write its own image.
pub fn image(options: &Options) -> Result<()> {
    let (host, target) = (host()?, target_directory()?);
    let mut build = xtask::cargo();
    build.args(["build", "--release", "--locked", "--package", "elasticdl-cli", "--target", &host]);
    // With a target named, this is for the program alone and not for what runs during the build.
    build.env("RUSTFLAGS", rustflags(env::var("RUSTFLAGS").ok().as_deref()));
    ensure!(build.status().context("run cargo build")?.success(), "building the static program failed");
    let program = target.join(&host).join("release/elasticdl");
    let out = options.out.clone().unwrap_or_else(|| target.join("elasticdl.tar"));
    let mut write = Command::new(&program);
    write.arg("image").arg("--out").arg(out).args(&options.more);
    if let Some(name) = &options.name {
        write.arg("--name").arg(name);
    }
    let status = write.status().with_context(|| format!("run {}", program.display()))?;
    ensure!(status.success(), "writing the image failed");
    Ok(())
}

/// Whatever flags there are, and static linking.
fn rustflags(given: Option<&str>) -> String {
    let wanted = "-C target-feature=+crt-static";
    given.filter(|given| !given.is_empty()).map_or(wanted.into(), |given| format!("{given} {wanted}"))
}

/// What this machine is called by the compiler.
fn host() -> Result<String> {
    let output = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .arg("-vV")
        .output()
        .context("run rustc -vV")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(String::from).context("rustc -vV does not say what this machine is")
}

fn target_directory() -> Result<PathBuf> {
    let output = xtask::cargo()
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()
        .context("run cargo metadata")?;
    let metadata: Value = serde_json::from_slice(&output.stdout).context("read what cargo metadata says")?;
    let directory =
        metadata["target_directory"].as_str().context("cargo metadata names no target directory")?;
    Ok(directory.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_are_set_stay() {
        assert_eq!(rustflags(None), "-C target-feature=+crt-static");
        assert_eq!(rustflags(Some("")), "-C target-feature=+crt-static");
        assert_eq!(rustflags(Some("-C debuginfo=1")), "-C debuginfo=1 -C target-feature=+crt-static");
    }
}
