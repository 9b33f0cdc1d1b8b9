//! Why a call to object storage failed: what it means, and what to set.

use std::error::Error as _;
use std::io;

use object_store::client::{HttpError, HttpErrorKind};

/// A failure of object storage, the inside of an [`io::Error`] whose kind says what it means.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{reason}; {hint}")]
pub struct Refusal {
    reason: String,
    hint: &'static str,
    /// What object storage said itself, for the log.
    #[source]
    source: Said,
}

/// The words of object storage in one line.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct Said(String);

const KEY_HINT: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to a key that may do this";
const BUCKET_HINT: &str = "make it, or check its name, AWS_REGION and AWS_ENDPOINT_URL";
const ENDPOINT_HINT: &str =
    "check AWS_ENDPOINT_URL and AWS_REGION, and AWS_ALLOW_HTTP=true where it begins with http://";

/// Says what a failure means for `url`, an object of `bucket`.
pub fn refusal(error: &object_store::Error, url: &str, bucket: &str) -> io::Error {
    use object_store::Error as E;
    let said = said(error);
    let no_bucket = said.contains("NoSuchBucket");
    let refused = |kind, reason: String, hint| {
        io::Error::new(kind, Refusal { reason, hint, source: Said(said.clone()) })
    };
    match error {
        // Not `NotFound`: what is asked for may be missing without harm, the bucket may not.
        _ if no_bucket => {
            refused(io::ErrorKind::NotADirectory, format!("there is no bucket {bucket:?}"), BUCKET_HINT)
        }
        E::NotFound { .. } => {
            refused(io::ErrorKind::NotFound, format!("there is no object {url}"), "check its name")
        }
        E::AlreadyExists { .. } => refused(
            io::ErrorKind::AlreadyExists,
            format!("the object {url} is there already"),
            "somebody else has made it",
        ),
        E::Precondition { .. } | E::NotModified { .. } => changed(url, said),
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
            refused(io::ErrorKind::PermissionDenied, format!("the key was refused for {url}"), KEY_HINT)
        }
        E::InvalidPath { .. } | E::NotSupported { .. } | E::UnknownConfigurationKey { .. } => refused(
            io::ErrorKind::InvalidInput,
            format!("{url} cannot be used"),
            "check the URL and the variables AWS_*",
        ),
        _ if said.contains("URL scheme is not allowed") => {
            let reason =
                format!("the endpoint of {url} begins with http://, which anybody on the way can read");
            refused(io::ErrorKind::InvalidInput, reason, "set AWS_ALLOW_HTTP=true where that does not matter")
        }
        // Without a key the machine is asked for one, at an address that only machines of a cloud know.
        _ if said.contains("169.254.169.254") => {
            refused(io::ErrorKind::PermissionDenied, format!("there is no key for {url}"), KEY_HINT)
        }
        other => match network(other) {
            Some(kind) => refused(kind, format!("the endpoint of {url} was not reached"), ENDPOINT_HINT),
            None => refused(
                io::ErrorKind::Other,
                format!("object storage failed for {url}"),
                "it was tried several times",
            ),
        },
    }
}

/// Another version of `url` came than the one that was opened.
pub fn changed(url: &str, said: String) -> io::Error {
    let reason = format!("the object {url} changed while it was read");
    let hint = "objects that a job uses must not be replaced";
    io::Error::new(io::ErrorKind::InvalidData, Refusal { reason, hint, source: Said(said) })
}

/// The same failure for another who waited for it.
pub fn again(error: &io::Error) -> io::Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Refusal>()) {
        Some(refusal) => io::Error::new(error.kind(), refusal.clone()),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

/// Whether the network failed, not what is behind it.
fn network(error: &object_store::Error) -> Option<io::ErrorKind> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = error.source();
    while let Some(error) = cause {
        if let Some(http) = error.downcast_ref::<HttpError>() {
            return match http.kind() {
                HttpErrorKind::Connect => Some(io::ErrorKind::ConnectionRefused),
                HttpErrorKind::Timeout => Some(io::ErrorKind::TimedOut),
                HttpErrorKind::Request | HttpErrorKind::Interrupted => Some(io::ErrorKind::ConnectionReset),
                _ => None,
            };
        }
        cause = error.source();
    }
    None
}

/// An error with its causes, without the line ends and the repetition of an XML answer.
fn said(error: &object_store::Error) -> String {
    const LENGTH_MAX: usize = 400;
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(LENGTH_MAX).collect()
}

#[cfg(test)]
mod tests {
    use object_store::Error as E;

    use super::*;

    #[test]
    fn what_failed_is_told_with_what_to_set() {
        let generic = |text: &str| E::Generic { store: "S3", source: text.into() };
        let path = || "x".to_string();
        let cases = [
            (E::NotFound { path: path(), source: "404".into() }, io::ErrorKind::NotFound, "check its name"),
            (generic("<Code>NoSuchBucket</Code>"), io::ErrorKind::NotADirectory, "make it"),
            (
                E::PermissionDenied { path: path(), source: "403".into() },
                io::ErrorKind::PermissionDenied,
                "AWS_SECRET_ACCESS_KEY",
            ),
            (
                generic("PUT http://169.254.169.254/latest"),
                io::ErrorKind::PermissionDenied,
                "AWS_ACCESS_KEY_ID",
            ),
            (generic("URL scheme is not allowed"), io::ErrorKind::InvalidInput, "AWS_ALLOW_HTTP=true"),
            (generic("500\nInternal  Error"), io::ErrorKind::Other, "tried several times"),
        ];
        for (error, kind, hint) in cases {
            let refusal = refusal(&error, "s3://b/x", "b");
            assert_eq!(refusal.kind(), kind, "{refusal}");
            assert!(refusal.to_string().contains(hint), "{refusal}");
            let said = refusal.get_ref().and_then(|inner| inner.source()).map(ToString::to_string);
            assert!(said.is_some_and(|said| !said.contains('\n')), "the answer is one line");
            assert_eq!(again(&refusal).to_string(), refusal.to_string());
        }
    }
}
