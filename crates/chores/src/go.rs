//! The Go toolchain, which builds what tests run against from pinned modules.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::Result;

/// The Go toolchain.
pub struct Go {
    program: PathBuf,
    /// go1.26.0 linux/amd64
    pub version: String,
}

impl Go {
    /// Where it is usually unpacked counts too: the path of a service is often shorter than a person's.
    pub fn find() -> Result<Go> {
        for program in ["go", "/usr/local/go/bin/go"] {
            let asked = Command::new(program).arg("version").stderr(Stdio::null()).output();
            if let Some(said) = asked.ok().filter(|said| said.status.success()) {
                let version = String::from_utf8_lossy(&said.stdout);
                let version = version.trim().trim_start_matches("go version ").to_owned();
                return Ok(Go { program: program.into(), version });
            }
        }
        anyhow::bail!("there is no Go here; unpack Go 1.26 or newer from go.dev/dl to /usr/local/go")
    }

    /// A command of it.
    pub fn command(&self) -> Command {
        Command::new(&self.program)
    }
}
