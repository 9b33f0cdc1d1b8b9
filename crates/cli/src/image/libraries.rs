//! The shared libraries that a program needs, as its own loader finds them.
//!
//! The loader is asked without the machine's cache and without the environment's paths: an image has neither,
//! so what is found here is found there too, at the same places.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::fault::Fault;

/// What glibc opens by itself to look up hosts and users; newer ones have it all inside.
const OPENED_LATER: [&str; 3] = ["libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2"];

/// What to do about a program that cannot be taken along as it is.
pub const STATIC_HINT: &str = "a static program needs no libraries: `cargo xtask image` builds one, as does \
    RUSTFLAGS=\"-C target-feature=+crt-static\" cargo build --release --target x86_64-unknown-linux-gnu";

/// The loader and the libraries of a program, sorted.
pub fn of(program: &Path, interpreter: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut loader = Command::new(interpreter);
    // musl's loader has no cache and does not know the word.
    if !interpreter.to_string_lossy().contains("/ld-musl-") {
        loader.arg("--inhibit-cache");
    }
    // Without a slash the loader would look for the program as if it were a library.
    let program = std::path::absolute(program)?;
    loader.arg("--list").arg(&program).env_remove("LD_LIBRARY_PATH").env_remove("LD_PRELOAD");
    let fault = |why: String| {
        let what = format!("cannot find the libraries of {}", program.display());
        Fault::user(format!("{what}: {why}")).hint(STATIC_HINT)
    };
    let output = loader.output().map_err(|e| fault(format!("its loader {}: {e}", interpreter.display())))?;
    let listing = String::from_utf8_lossy(&output.stdout);
    let found = found(&listing).map_err(|missing| fault(format!("there is no {}", missing.join(", "))))?;
    if !output.status.success() {
        return Err(fault(String::from_utf8_lossy(&output.stderr).trim().to_string()).into());
    }
    let mut all = vec![interpreter.to_path_buf()];
    let libc = found.iter().find(|path| path.ends_with("libc.so.6"));
    if let Some(dir) = libc.and_then(|libc| libc.parent()) {
        all.extend(OPENED_LATER.map(|name| dir.join(name)).into_iter().filter(|path| path.exists()));
    }
    all.extend(found);
    all.sort();
    all.dedup();
    Ok(all)
}

/// The paths in a loader's list, or the names that it found nothing for.
fn found(listing: &str) -> Result<Vec<PathBuf>, Vec<String>> {
    let (mut paths, mut missing) = (Vec::new(), Vec::new());
    for line in listing.lines() {
        // `name => path (address)`, or `path (address)`, or the kernel's own, which has no path.
        let (name, place) = line.trim().split_once(" => ").unwrap_or((line.trim(), line.trim()));
        let place = place.rsplit_once(" (").map_or(place, |(path, _)| path);
        if place == "not found" {
            missing.push(name.to_string());
        } else if place.starts_with('/') {
            paths.push(PathBuf::from(place));
        }
    }
    if missing.is_empty() { Ok(paths) } else { Err(missing) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loaders_list_is_read() {
        let listing = "\tlinux-vdso.so.1 (0x00007ffd7a9f2000)\n\
                       \tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f1a)\n\
                       \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f1b)\n\
                       \t/lib64/ld-linux-x86-64.so.2 (0x00007f1c)\n";
        let wanted = [
            "/lib/x86_64-linux-gnu/libgcc_s.so.1",
            "/lib/x86_64-linux-gnu/libc.so.6",
            "/lib64/ld-linux-x86-64.so.2",
        ];
        assert_eq!(found(listing).unwrap(), wanted.map(PathBuf::from));
    }

    #[test]
    fn every_library_that_is_missing_is_named() {
        let listing = "\tliba.so => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x1)\n\tlibb.so => not found\n";
        assert_eq!(found(listing).unwrap_err(), ["liba.so", "libb.so"]);
    }

    #[test]
    fn a_loader_that_is_not_there_is_told_with_the_way_out() {
        let error = of(Path::new("/bin/true"), Path::new("/nowhere/ld.so")).unwrap_err();
        let text = crate::fault::text(&error);
        assert!(
            text.starts_with("error: cannot find the libraries of /bin/true: its loader /nowhere/ld.so: ")
        );
        assert!(text.contains("cargo xtask image"), "{text}");
    }
}
