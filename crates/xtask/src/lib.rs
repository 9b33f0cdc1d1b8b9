//! How chores start cargo.

use std::process::Command;

/// Cargo, as a person would start it. What the cargo that runs this program says of it goes: build scripts of
/// dependencies would take it for a change, and half of the tree would be built anew.
pub fn cargo() -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    let ours = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(ours) {
            cargo.env_remove(name);
        }
    }
    cargo
}
