//! SHA-256 digests, the names of everything in an image.

use std::fmt;
use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// `sha256:` and 64 digits. It is safe as a file name, since nothing else can be parsed into it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

impl Digest {
    /// That of some bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        let mut sha = Sha256::new();
        sha.update(bytes);
        Digest::finish(sha)
    }

    /// That of everything that a reader has, and how much that is.
    pub fn of_all(mut reader: impl Read) -> io::Result<(Digest, u64)> {
        let mut sum = Hashed::new(io::sink());
        io::copy(&mut reader, &mut sum)?;
        let (_, digest, bytes) = sum.finish();
        Ok((digest, bytes))
    }

    /// The digits.
    pub fn hex(&self) -> &str {
        &self.0
    }

    fn finish(sha: Sha256) -> Digest {
        Digest(sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.0)
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let digits = text.strip_prefix("sha256:").filter(|hex| {
            hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        });
        digits.map(|hex| Digest(hex.into())).ok_or_else(|| format!("{text:?} is no sha256 digest"))
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

/// Passes bytes on, and knows their digest and number.
pub struct Hashed<W> {
    inner: W,
    sha: Sha256,
    bytes: u64,
}

impl<W> Hashed<W> {
    /// Nothing was passed on yet.
    pub fn new(inner: W) -> Self {
        Hashed { inner, sha: Sha256::new(), bytes: 0 }
    }

    /// What it wrote to, and what that was.
    pub fn finish(self) -> (W, Digest, u64) {
        (self.inner, Digest::finish(self.sha), self.bytes)
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.sha.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The digest of "abc" is in the standard (FIPS 180-2, B.1).
    const ABC: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn bytes_passed_on_in_pieces_have_the_digest_of_the_whole() {
        let mut sum = Hashed::new(Vec::new());
        sum.write_all(b"a").unwrap();
        sum.write_all(b"bc").unwrap();
        let (passed, digest, bytes) = sum.finish();
        assert_eq!((passed.as_slice(), digest.to_string().as_str(), bytes), (&b"abc"[..], ABC, 3));
        assert_eq!(Digest::of(b"abc"), digest);
        assert_eq!(Digest::of_all(&b"abc"[..]).unwrap(), (digest, 3));
    }

    #[test]
    fn only_a_digest_is_one() {
        assert_eq!(Digest::try_from(ABC.to_string()).unwrap().to_string(), ABC);
        for wrong in ["", "sha256:", "sha256:../../etc/passwd", &ABC.to_uppercase(), &ABC[..70], "md5:00"] {
            assert!(Digest::try_from(wrong.to_string()).is_err(), "{wrong}");
        }
    }
}
