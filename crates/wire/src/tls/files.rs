//! An identity's directory: `ca.pem`, `cert.pem`, `key.pem`.
//!
//! On a laptop it is part of the job's own directory, made by [`Identity::write`]. In a pod it is a mounted
//! Secret with these keys; mount it with `defaultMode: 0400`. With an `fsGroup` the kubelet adds the group's
//! read bit, which is accepted; a key that everybody can read is not.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::{Identity, too_open};
use crate::error::{Error, Result};

const CA: &str = "ca.pem";
const CERT: &str = "cert.pem";
const KEY: &str = "key.pem";

impl Identity {
    /// Writes the identity into `dir`, in place of one that may be there. The directory is made where it is
    /// missing; one that others can enter is refused.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let error =
            |what: &Path, reason: String| Error::Identity { what: what.display().to_string(), reason };
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|e| error(dir, e.to_string()))?;
        let mode = fs::metadata(dir).map_err(|e| error(dir, e.to_string()))?.mode();
        if mode & 0o077 != 0 {
            let reason = format!("others can enter it (mode {:o}); make it 700", mode & 0o777);
            return Err(error(dir, reason));
        }
        for (name, text, mode) in
            [(KEY, self.key_pem(), 0o600), (CERT, self.cert_pem(), 0o644), (CA, self.ca_pem(), 0o644)]
        {
            let path = dir.join(name);
            put(&path, text, mode).map_err(|e| error(&path, e.to_string()))?;
        }
        Ok(())
    }

    /// Reads the identity in `dir`. The files may be links, as in a mounted Secret; the key must not be
    /// readable by others than its owner and group.
    pub fn read(dir: &Path) -> Result<Self> {
        let error =
            |what: &Path, reason: String| Error::Identity { what: what.display().to_string(), reason };
        let text = |name: &str| {
            let path = dir.join(name);
            fs::read_to_string(&path).map_err(|e| error(&path, e.to_string()))
        };
        let key = dir.join(KEY);
        let mode = fs::metadata(&key).map_err(|e| error(&key, e.to_string()))?.mode();
        if let Some(reason) = too_open(mode) {
            return Err(error(&key, reason));
        }
        let (ca, cert, key) = (text(CA)?, text(CERT)?, text(KEY)?);
        Identity::from_pem(ca, cert, key).map_err(|e| match e {
            Error::Identity { reason, .. } => error(dir, reason),
            other => other,
        })
    }
}

/// Writes a file that is born with its mode: nobody else can read it even for an instant.
fn put(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(text.as_bytes())
}
