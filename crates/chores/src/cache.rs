//! Where chores keep what is expensive to make: outside the clone, so that a fresh clone finds it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// `$ELASTICDL_CACHE`, or `elasticdl` in `$XDG_CACHE_HOME` or `~/.cache`; made where it is missing.
pub fn directory() -> Result<PathBuf> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = match (variable("ELASTICDL_CACHE"), variable("XDG_CACHE_HOME"), variable("HOME")) {
        (Some(cache), _, _) => cache,
        (_, Some(caches), _) => caches.join("elasticdl"),
        (_, _, Some(home)) => home.join(".cache/elasticdl"),
        _ => bail!("find a place for the cache: none of ELASTICDL_CACHE, XDG_CACHE_HOME and HOME is set"),
    };
    fs::create_dir_all(&cache).with_context(|| format!("create the cache {}", cache.display()))?;
    // Commands run in directories of their own, so the path must not depend on this one.
    cache.canonicalize().with_context(|| format!("resolve the cache {}", cache.display()))
}

/// Cargo says where `xtask` is; the workspace is two levels above.
pub fn workspace_root() -> Result<PathBuf> {
    let manifest =
        env::var_os("CARGO_MANIFEST_DIR").context("find the workspace: run this as `cargo xtask`")?;
    let root = Path::new(&manifest).ancestors().nth(2).context("the workspace is two levels above xtask")?;
    Ok(root.to_path_buf())
}
