//! Settings of the machine's kernel that every kubelet changes, remembered and put back.
//!
//! A kubelet sets them for the whole machine, and refuses to run where it may not.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const TUNABLES: [&str; 6] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
];

/// What the settings are now; those that this kernel lacks are left out.
pub fn read() -> BTreeMap<String, String> {
    let read = |name: &str| fs::read_to_string(path(name)).ok();
    TUNABLES.into_iter().filter_map(|name| Some((name.to_owned(), read(name)?.trim().to_owned()))).collect()
}

/// Puts back what differs. A setting that cannot be written is told and left.
pub fn restore(before: &BTreeMap<String, String>) {
    let now = read();
    for (name, value) in before.iter().filter(|(name, value)| now.get(*name) != Some(value)) {
        if let Err(error) = fs::write(path(name), value) {
            eprintln!("warning: {name} was {value} and could not be put back: {error}");
        }
    }
}

fn path(name: &str) -> impl AsRef<Path> {
    Path::new("/proc/sys").join(name)
}
