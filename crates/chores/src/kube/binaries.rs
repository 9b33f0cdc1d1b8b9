//! The cluster's programs, built from source once and kept in the cache.
//!
//! Kubernetes publishes no archives that a machine without a registry could fetch and verify more simply than
//! its Go modules, whose checksums stand in `deploy/testcluster`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use ring::digest::{Context as Digest, SHA256};

use super::places::{Places, make_directory, remove_directory};
use super::wait::Progress;
use crate::go::Go;

/// What the programs say they are; the modules pin the same.
const KUBERNETES: (&str, &str, &str) = ("v1.34.4", "1", "34");

const PROGRAMS: [&str; 9] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "kwok",
    "pause",
];

/// Every build's directory begins with this.
const PREFIX: &str = "bin-";

/// One Go module and what of it is built.
struct Module {
    name: &'static str,
    /// Everything a build depends on besides the toolchain: the pins hold the rest.
    files: &'static [&'static str],
    packages: &'static [&'static str],
}

const MODULES: [Module; 2] = [
    Module {
        name: "kubernetes",
        files: &["go.mod", "go.sum", "etcd/main.go", "pause/main.go"],
        packages: &["tool", "./etcd", "./pause"],
    },
    Module { name: "kwok", files: &["go.mod", "go.sum"], packages: &["tool"] },
];

/// The directory of the programs; builds them where this version is not there yet.
pub fn ensure_built(places: &Places) -> Result<PathBuf> {
    let go = Go::find().context("build Kubernetes")?;
    let built = places.home().join(format!("{PREFIX}{}", key(places, &go)?));
    if !built.is_dir() {
        build(places, &go, &built)?;
    }
    for program in PROGRAMS {
        ensure!(built.join(program).is_file(), "{} lacks {program}: remove the directory", built.display());
    }
    Ok(built)
}

/// Removes what other versions left, and broken builds.
pub fn remove_others(places: &Places, current: Option<&Path>) -> Result<()> {
    let Ok(entries) = fs::read_dir(places.home()) else { return Ok(()) };
    for path in entries.flatten().map(|entry| entry.path()) {
        let ours = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
        if ours && Some(path.as_path()) != current {
            remove_directory(&path)?;
        }
    }
    Ok(())
}

/// The version that this clone and this machine want, where it is built.
pub fn current(places: &Places) -> Option<PathBuf> {
    let built = places.home().join(format!("{PREFIX}{}", key(places, &Go::find().ok()?).ok()?));
    built.is_dir().then_some(built)
}

/// Builds beside it and renames, so that an interrupted build is not taken for a whole one.
fn build(places: &Places, go: &Go, built: &Path) -> Result<()> {
    let progress = Progress::begin();
    progress.say("building Kubernetes and kwok from source: 10 minutes on two cores, once");
    let partial = built.with_extension("partial");
    remove_directory(&partial)?;
    make_directory(&partial)?;
    for module in MODULES {
        let status = go
            .command()
            .arg("build")
            .args(["-trimpath", "-buildvcs=false", "-ldflags", &linker_flags(), "-o"])
            .arg(&partial)
            .args(module.packages)
            .current_dir(places.sources.join(module.name))
            .env("CGO_ENABLED", "0")
            .stdout(Stdio::null())
            .status()
            .with_context(|| format!("build {}", module.name))?;
        ensure!(status.success(), "building {} failed: {status}", module.name);
        progress.say(&format!("built {}", module.name));
    }
    fs::rename(&partial, built).with_context(|| format!("rename {}", partial.display()))
}

fn linker_flags() -> String {
    let (version, major, minor) = KUBERNETES;
    let set = |name: &str, value: &str| format!("-X k8s.io/component-base/version.{name}={value}");
    format!("-s -w {} {} {}", set("gitVersion", version), set("gitMajor", major), set("gitMinor", minor))
}

/// A hash of everything the programs depend on.
fn key(places: &Places, go: &Go) -> Result<String> {
    let mut digest = Digest::new(&SHA256);
    for part in [go.version.as_bytes(), linker_flags().as_bytes()] {
        digest.update(part);
        digest.update(&[0]);
    }
    for module in MODULES {
        for file in module.files {
            let path = places.sources.join(module.name).join(file);
            let content = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            digest.update(&(content.len() as u64).to_le_bytes());
            digest.update(&content);
        }
    }
    Ok(digest.finish().as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_say_the_version_that_the_module_pins() {
        let module = include_str!("../../../../deploy/testcluster/kubernetes/go.mod");
        let (version, major, minor) = KUBERNETES;
        assert!(module.lines().any(|line| line.trim() == format!("k8s.io/kubernetes {version}")));
        assert!(version.starts_with(&format!("v{major}.{minor}.")));
    }
}
