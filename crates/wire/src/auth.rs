//! The job's token: made at submit time, kept in a file that only its owner and group can read, carried
//! by every call. Without it no role answers.

use std::fmt;
use std::path::Path;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

use crate::error::{Error, Result};

/// A job's secret. It never shows in logs: `Debug` hides it, and there is no `Display`.
#[derive(Clone)]
pub struct Token {
    text: String,
    header: MetadataValue<Ascii>,
}

impl Token {
    /// A token from its text: at least 16 visible ASCII characters.
    pub fn new(text: &str) -> std::result::Result<Self, String> {
        if text.len() < 16 || !text.bytes().all(|b| b.is_ascii_graphic()) {
            return Err("a token is at least 16 visible ASCII characters".into());
        }
        let header = format!("Bearer {text}").parse().map_err(|_| "not a header value".to_string())?;
        Ok(Token { text: text.into(), header })
    }

    /// Reads the token of a job. The file must not be readable by others than its owner and group.
    pub fn read(path: &Path) -> Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let error = |reason: String| Error::Token { path: path.display().to_string(), reason };
        let mode = std::fs::metadata(path).map_err(|e| error(e.to_string()))?.mode();
        if let Some(reason) = crate::tls::too_open(mode) {
            return Err(error(reason));
        }
        let text = std::fs::read_to_string(path).map_err(|e| error(e.to_string()))?;
        Token::new(text.trim()).map_err(error)
    }

    /// The secret itself, for the one header or frame that carries it.
    pub fn secret(&self) -> &str {
        &self.text
    }

    /// Whether `offered` is this token. Takes the same time whichever byte differs.
    pub fn matches(&self, offered: &[u8]) -> bool {
        let ours = self.text.as_bytes();
        let differing = ours.iter().zip(offered).fold(0u8, |acc, (a, b)| acc | (a ^ b));
        std::hint::black_box(differing) == 0 && ours.len() == offered.len()
    }

    /// Whether an `authorization` header carries this token.
    pub fn matches_header(&self, header: Option<&[u8]>) -> bool {
        header.and_then(|h| h.strip_prefix(b"Bearer ")).is_some_and(|offered| self.matches(offered))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

/// Puts the token into every call of a client.
#[derive(Debug, Clone)]
pub struct Bearer(pub Token);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> std::result::Result<Request<()>, Status> {
        request.metadata_mut().insert("authorization", self.0.header.clone());
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_token_matches() {
        let token = Token::new("0123456789abcdef").unwrap();
        assert!(token.matches(b"0123456789abcdef"));
        for other in [&b""[..], b"0123456789abcde", b"0123456789abcdeg", b"0123456789abcdef0"] {
            assert!(!token.matches(other));
        }
        assert!(token.matches_header(Some(b"Bearer 0123456789abcdef")));
        assert!(!token.matches_header(Some(b"0123456789abcdef")));
        assert!(!token.matches_header(None));
    }

    #[test]
    fn a_token_does_not_show() {
        let token = Token::new("0123456789abcdef").unwrap();
        assert!(!format!("{token:?}").contains("0123"));
    }

    #[test]
    fn short_or_odd_tokens_are_refused() {
        assert!(Token::new("short").is_err());
        assert!(Token::new("0123456789abcde\n").is_err());
    }

    #[test]
    fn the_group_may_read_a_token_and_others_may_not() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        let read = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Token::read(&path).map(|token| token.secret().to_string()).map_err(|e| e.to_string())
        };
        for mode in [0o400, 0o440, 0o600, 0o640] {
            assert_eq!(read(mode).as_deref(), Ok("0123456789abcdef"), "{mode:o}");
        }
        for mode in [0o404, 0o444, 0o604, 0o644] {
            let refused = format!("others can read it (mode {mode:o})");
            assert!(read(mode).unwrap_err().contains(&refused), "{mode:o}");
        }
        for mode in [0o620, 0o660] {
            assert!(read(mode).unwrap_err().contains("its group can do more than read it"), "{mode:o}");
        }
    }
}
