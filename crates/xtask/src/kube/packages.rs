//! The Debian packages that real nodes need, installed where they are missing.

use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::process::succeed;

const PACKAGES: [&str; 7] = [
    "containerd",
    "runc",
    "containernetworking-plugins",
    "busybox-static",
    "conntrack",
    "iptables",
    "iproute2",
];

/// Installs what is missing, and says so.
pub fn ensure_installed() -> Result<()> {
    let missing = missing()?;
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("installing packages: {}", missing.join(" "));
    apt(&["update", "--quiet=2"]).context("read the lists of packages")?;
    let mut install = vec!["install", "--quiet=2", "--yes", "--no-install-recommends"];
    install.extend(missing);
    apt(&install).context("install packages that nodes need")
}

fn missing() -> Result<Vec<&'static str>> {
    let output = Command::new("dpkg-query")
        .args(["--show", "--showformat=${Package} ${db:Status-Status}\n"])
        .args(PACKAGES)
        .stderr(Stdio::null())
        .output()
        .context("list installed packages: this needs Debian's dpkg-query")?;
    Ok(not_installed(&String::from_utf8_lossy(&output.stdout)))
}

/// What of [`PACKAGES`] has no `NAME installed` line.
fn not_installed(listed: &str) -> Vec<&'static str> {
    let there = |package: &str| listed.lines().any(|line| line == format!("{package} installed"));
    PACKAGES.into_iter().filter(|package| !there(package)).collect()
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
        let listed = "containerd installed\nrunc config-files\ncontainernetworking-plugins installed\n\
                      conntrack installed\niptables installed\niproute2 installed\n";
        assert_eq!(not_installed(listed), ["runc", "busybox-static"]);
    }
}
