//! Where the test cluster keeps what: all of it below one directory of the cache.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cache;

/// Paths of the test cluster.
#[derive(Debug, Clone)]
pub struct Places {
    /// Go modules and the rules of simulated nodes, in the clone.
    pub sources: PathBuf,
    home: PathBuf,
}

impl Places {
    /// Finds them; makes nothing but the cache.
    pub fn find() -> Result<Places> {
        let sources = cache::workspace_root()?.join("deploy/testcluster");
        Ok(Places { sources, home: cache::directory()?.join("testcluster") })
    }

    /// All of it in one directory.
    #[cfg(test)]
    pub fn below(directory: &Path) -> Places {
        Places { sources: directory.join("sources"), home: directory.join("home") }
    }

    /// Everything that outlives a cluster.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// What one cluster uses, from `up` to `down`.
    pub fn run(&self) -> PathBuf {
        self.home.join("run")
    }

    /// What runs; see [`State`](super::state::State).
    pub fn state(&self) -> PathBuf {
        self.home.join("state.json")
    }

    /// Logs stay after `down`, until the next `up`.
    pub fn logs(&self) -> PathBuf {
        self.home.join("log")
    }

    /// The log of one process.
    pub fn log(&self, process: &str) -> PathBuf {
        self.logs().join(format!("{process}.log"))
    }

    /// Archives of the images every node has.
    pub fn images(&self) -> PathBuf {
        self.home.join("images")
    }

    /// At the same path on the machine and on every real node: the stand-in for a shared file system.
    pub fn shared(&self) -> PathBuf {
        self.home.join("shared")
    }

    /// Keys and certificates.
    pub fn pki(&self) -> PathBuf {
        self.run().join("pki")
    }

    /// The kubeconfig of whoever may do everything.
    pub fn admin_config(&self) -> PathBuf {
        self.pki().join("admin.kubeconfig")
    }

    /// The disk of a real node.
    pub fn node(&self, name: &str) -> PathBuf {
        self.run().join("nodes").join(name)
    }
}

/// Creates a directory with everything above it.
pub fn make_directory(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))
}

/// Writes a file, with its directory.
pub fn write_file(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    if let Some(parent) = path.parent() {
        make_directory(parent)?;
    }
    fs::write(path, content).with_context(|| format!("write {}", path.display()))
}

/// Removes a directory with everything in it; well where there is none.
pub fn remove_directory(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
