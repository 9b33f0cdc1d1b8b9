//! Debian packages, installed where they are missing.

use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::kube::succeed;

/// Installs which of these are missing, and says so. They are for `whom`.
pub fn ensure_installed(packages: &[&'static str], whom: &str) -> Result<()> {
    let missing = missing(packages)?;
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("installing packages: {}", missing.join(" "));
    apt(&["update", "--quiet=2"]).context("read the lists of packages")?;
    let mut install = vec!["install", "--quiet=2", "--yes", "--no-install-recommends"];
    install.extend(missing);
    apt(&install).with_context(|| format!("install packages that {whom} needs"))
}

fn missing(packages: &[&'static str]) -> Result<Vec<&'static str>> {
    let output = Command::new("dpkg-query")
        .args(["--show", "--showformat=${Package} ${db:Status-Status}\n"])
        .args(packages)
        .stderr(Stdio::null())
        .output()
        .context("list installed packages: this needs Debian's dpkg-query")?;
    Ok(not_installed(packages, &String::from_utf8_lossy(&output.stdout)))
}

/// Which of `packages` have no `NAME installed` line.
fn not_installed(packages: &[&'static str], listed: &str) -> Vec<&'static str> {
    let there = |package: &str| listed.lines().any(|line| line == format!("{package} installed"));
    packages.iter().copied().filter(|package| !there(package)).collect()
}

fn apt(arguments: &[&str]) -> Result<()> {
    // Nothing may ask, and nothing belongs on standard output.
    let mut command = Command::new("apt-get");
    command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
    succeed(command.stdout(Stdio::null()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_package_counts_as_missing() {
        let listed = "containerd installed\nrunc config-files\nconntrack installed\n";
        let wanted = ["containerd", "runc", "busybox-static", "conntrack"];
        assert_eq!(not_installed(&wanted, listed), ["runc", "busybox-static"]);
    }
}
