//! A Python with what tests import, made once and kept in the [cache](crate::cache).

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::kube::succeed;
use crate::{cache, packages};

/// What is installed; a directory is named after it.
const PACKAGE: &str = "pyarrow==26.0.1";

/// What tests find it by.
const VARIABLE: &str = "ELASTICDL_TEST_PYTHON";

/// The same, or none where it cannot be made: tests that need it say so then, but those of CI must not be skipped.
pub fn if_it_can_be_had() -> Result<Option<(&'static str, String)>> {
    match environment() {
        Err(error) if env::var_os("CI").is_none() => {
            println!("skipped: tests of files that Python reads: {error:#}");
            Ok(None)
        }
        other => other.map(Some),
    }
}

/// What tests find it by, and where it is: one that a person names, or else ours.
fn environment() -> Result<(&'static str, String)> {
    if let Some(named) = env::var_os(VARIABLE).filter(|named| !named.is_empty()) {
        return Ok((VARIABLE, named.to_string_lossy().into_owned()));
    }
    let made = ensure_made().with_context(|| {
        format!(
            "make a Python with {PACKAGE}, which tests of checkpoints need; this takes python3 with venv, and PyPI. \
             Where PyPI cannot be reached, set {VARIABLE} to a Python that can import pyarrow"
        )
    })?;
    Ok((VARIABLE, made.display().to_string()))
}

/// The interpreter.
fn ensure_made() -> Result<PathBuf> {
    let made = cache::directory()?.join(format!("testpython-{}", PACKAGE.replace("==", "-")));
    let python = |dir: &Path| dir.join("bin/python");
    if python(&made).is_file() {
        return Ok(python(&made));
    }
    println!("== installing {PACKAGE} for tests, once");
    if !can_make_environments() {
        packages::ensure_installed(&["python3-venv"], "the tests of files that Python reads")?;
    }
    let partial = tempfile::tempdir_in(cache::directory()?).context("make a directory in the cache")?;
    succeed(Command::new("python3").args(["-m", "venv"]).arg(partial.path()))?;
    let mut install = Command::new(python(partial.path()));
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE]);
    succeed(&mut install).with_context(|| format!("install {PACKAGE} from PyPI"))?;
    match fs::rename(partial.path(), &made) {
        // Somebody else was quicker.
        Err(_) if python(&made).is_file() => {}
        other => other.with_context(|| format!("rename to {}", made.display()))?,
    }
    Ok(python(&made))
}

/// Debian has what it takes in a package of its own.
fn can_make_environments() -> bool {
    let mut import = Command::new("python3");
    import.args(["-c", "import ensurepip, venv"]).stderr(Stdio::null());
    import.status().is_ok_and(|status| status.success())
}
