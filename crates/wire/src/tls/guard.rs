//! The rules about what must not be open to everybody.

use std::net::SocketAddr;

use super::Identity;
use crate::error::{Error, Result};

/// Whether a role may listen at `address`: beyond this machine only with an identity.
///
/// # Errors
///
/// [`Error::Exposed`].
pub fn may_listen(address: SocketAddr, identity: Option<&Identity>) -> Result<()> {
    if identity.is_some() || address.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    Err(Error::Exposed { address })
}

/// Why a secret's file mode is too open; `None` where it is not. The owner may do anything and the group may
/// read, as it must where a Secret is mounted for a pod with an `fsGroup`.
pub(crate) fn too_open(mode: u32) -> Option<String> {
    let mode = mode & 0o777;
    let what = match (mode & 0o007, mode & 0o030) {
        (0, 0) => return None,
        (0, _) => "its group can do more than read it",
        _ => "others can read it",
    };
    Some(format!("{what} (mode {mode:o}); make it 600 and the job's secret again a secret"))
}
