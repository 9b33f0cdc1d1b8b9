//! A client of one repository in a registry, by the OCI distribution protocol.
//!
//! It decides nothing about images. Calls that fail for a reason that may pass are made again, with growing
//! pauses; an upload is then begun anew.

#![expect(clippy::disallowed_methods, reason = "an edge: it waits between attempts")]

use std::fs;
use std::io::{self, Read};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use ureq::http::{Request, Response, StatusCode};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, SendBody};

use super::credentials::Credentials;
use crate::fault::Fault;
use crate::image::archive::Descriptor;
use crate::image::digest::Digest;
use crate::image::furniture;
use crate::image::reference::Reference;
use crate::image::stored::Stored;
use crate::print;

/// How often a call is made before it is given up.
const ATTEMPTS: u32 = 5;
/// The first pause; each one is twice as long as that before it.
const PAUSE: Duration = Duration::from_millis(200);
/// How long a registry may take to answer; it checks a whole layer before it does.
const ANSWER_LIMIT: Duration = Duration::from_secs(300);
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// An answer is a few lines.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// A repository in a registry.
pub struct Registry {
    agent: Agent,
    /// `https://HOST`
    root: String,
    /// The registry as people name it.
    host: String,
    repository: String,
    lookup: fn(&str) -> anyhow::Result<Option<Credentials>>,
    authorization: Option<String>,
}

/// What is sent; it can be sent again.
pub enum Body<'a> {
    /// Nothing.
    Nothing,
    /// These bytes.
    Bytes(&'a [u8]),
    /// A part of an archive.
    Part(&'a Stored, &'a Descriptor),
}

/// Why a call failed.
enum Failure {
    /// It may work in a moment.
    Passing(anyhow::Error),
    /// It will not.
    Final(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure::Final(error.into())
    }
}

impl Body<'_> {
    fn len(&self) -> u64 {
        match self {
            Body::Nothing => 0,
            Body::Bytes(bytes) => bytes.len() as u64,
            Body::Part(_, part) => part.size,
        }
    }

    fn reader(&self) -> anyhow::Result<Box<dyn Read + '_>> {
        Ok(match self {
            Body::Nothing => Box::new(io::empty()),
            Body::Bytes(bytes) => Box::new(*bytes),
            Body::Part(stored, part) => Box::new(stored.reader(&part.digest)?),
        })
    }
}

impl Registry {
    /// The repository that an image's name means; nothing is sent yet.
    pub fn new(
        scheme: &str,
        target: &Reference,
        lookup: fn(&str) -> anyhow::Result<Option<Credentials>>,
    ) -> anyhow::Result<Self> {
        let host = target.registry().to_string();
        // Docker's own is reached under another name than people write.
        let address = if host == "docker.io" { "registry-1.docker.io" } else { &host };
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // A registry that knows a part may say so by sending on to where it is kept; that is an answer.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT_LIMIT))
            .timeout_recv_response(Some(ANSWER_LIMIT))
            .user_agent(concat!("elasticdl/", env!("CARGO_PKG_VERSION")))
            .tls_config(TlsConfig::builder().root_certs(roots()?).build())
            .build();
        Ok(Registry {
            agent: config.into(),
            root: format!("{scheme}://{address}"),
            host,
            repository: target.repository(),
            lookup,
            authorization: None,
        })
    }

    /// Whether the repository has a part.
    pub fn has(&mut self, digest: &Digest) -> anyhow::Result<bool> {
        let url = self.url(&format!("blobs/{digest}"));
        self.retried("looking for a layer", |registry| {
            let response = registry.call("HEAD", &url, "", &Body::Nothing)?;
            let status = response.status();
            match status {
                _ if status.is_success() || status.is_redirection() => Ok(true),
                StatusCode::NOT_FOUND => Ok(false),
                _ => Err(registry.refusal("looking for a layer", response)),
            }
        })
    }

    /// Sends a part.
    pub fn upload(&mut self, digest: &Digest, body: &Body) -> anyhow::Result<()> {
        let begin = self.url("blobs/uploads/");
        self.retried("sending a layer", |registry| {
            let response = registry.call("POST", &begin, "", &Body::Nothing)?;
            if response.status() != StatusCode::ACCEPTED {
                return Err(registry.refusal("beginning an upload", response));
            }
            let location =
                header(&response, "location").context("the registry did not say where to send to")?;
            let place = upload_url(&registry.root, location, digest)
                .with_context(|| format!("the registry wants a layer sent to {location:?}"))?;
            let response = registry.call("PUT", &place, "application/octet-stream", body)?;
            if response.status() != StatusCode::CREATED {
                return Err(registry.refusal("sending a layer", response));
            }
            Ok(())
        })
    }

    /// Gives a manifest, whose parts are there, a tag.
    pub fn tag(&mut self, tag: &str, media_type: &str, bytes: &[u8], digest: &Digest) -> anyhow::Result<()> {
        let url = self.url(&format!("manifests/{tag}"));
        self.retried("sending the manifest", |registry| {
            let response = registry.call("PUT", &url, media_type, &Body::Bytes(bytes))?;
            if response.status() != StatusCode::CREATED {
                return Err(registry.refusal("sending the manifest", response));
            }
            match header(&response, "docker-content-digest") {
                Some(kept) if kept != digest.to_string() => {
                    let what = format!("{} keeps the manifest as {kept}, and it is {digest}", registry.host);
                    Err(Fault::user(what)
                        .hint("something between here and the registry changes what is sent")
                        .into())
                }
                _ => Ok(()),
            }
        })
    }

    fn url(&self, path: &str) -> String {
        format!("{}/v2/{}/{path}", self.root, self.repository)
    }

    /// Makes attempts until one works, or fails for good.
    fn retried<T>(
        &mut self,
        what: &str,
        mut attempt: impl FnMut(&mut Self) -> Result<T, Failure>,
    ) -> anyhow::Result<T> {
        for tried in 1.. {
            match attempt(self) {
                Ok(value) => return Ok(value),
                Err(Failure::Passing(error)) if tried < ATTEMPTS => {
                    let pause = PAUSE * 2u32.pow(tried - 1);
                    print::note(&format!("{what} failed and is tried again in {pause:?}: {error:#}"));
                    thread::sleep(pause);
                }
                Err(Failure::Passing(error)) => {
                    let what = format!("{what} at {} failed {ATTEMPTS} times", self.host);
                    return Err(error.context(what));
                }
                Err(Failure::Final(error)) => return Err(error),
            }
        }
        unreachable!("the last attempt returns")
    }

    /// One call; says who calls where the registry wants to know.
    fn call(
        &mut self,
        method: &str,
        url: &str,
        media_type: &str,
        body: &Body,
    ) -> Result<Response<ureq::Body>, Failure> {
        // An address elsewhere, such as that of a store, has its permission in itself.
        let own = url.strip_prefix(&self.root).is_some_and(|rest| rest.starts_with('/'));
        let mut introduced = false;
        loop {
            let mut request = Request::builder().method(method).uri(url);
            if method != "HEAD" {
                request = request.header("content-length", body.len());
            }
            if !media_type.is_empty() {
                request = request.header("content-type", media_type);
            }
            if let Some(authorization) = self.authorization.as_ref().filter(|_| own) {
                request = request.header("authorization", authorization);
            }
            let response = match body {
                Body::Nothing => self.agent.run(request.body(())?),
                _ => self.agent.run(request.body(SendBody::from_reader(&mut body.reader()?))?),
            };
            let response = response.map_err(|e| self.unreachable(e))?;
            match response.status().as_u16() {
                401 if own && !introduced => {
                    let challenge = header(&response, "www-authenticate").unwrap_or_default().to_string();
                    self.introduce(&challenge)?;
                    introduced = true;
                }
                401 | 403 => return Err(self.forbidden(response).into()),
                429 | 500..=599 => return Err(Failure::Passing(self.refused("it is busy", response).into())),
                _ => return Ok(response),
            }
        }
    }

    /// Finds out how to answer "who are you".
    fn introduce(&mut self, challenge: &str) -> Result<(), Failure> {
        let credentials = (self.lookup)(&self.host)?;
        let (scheme, wanted) = parse_challenge(challenge);
        if scheme.eq_ignore_ascii_case("basic") {
            let credentials = credentials.ok_or_else(|| self.unknown())?;
            self.authorization = Some(credentials.basic());
            return Ok(());
        }
        let realm = wanted.iter().find(|(name, _)| name == "realm").map(|(_, value)| value.as_str());
        let Some(realm) = realm.filter(|_| scheme.eq_ignore_ascii_case("bearer")) else {
            return Err(Fault::user(format!(
                "{} wants to know who you are in a way that is not known here",
                self.host
            ))
            .hint(format!("it says {challenge:?}"))
            .into());
        };
        if realm.starts_with("http://") && !self.root.starts_with("http://") {
            let what = format!("{} wants your password sent to {realm}, without encryption", self.host);
            return Err(Fault::user(what).hint("only with --insecure").into());
        }
        let mut request = self.agent.get(realm);
        if let Some(service) = wanted.iter().find(|(name, _)| name == "service") {
            request = request.query("service", &service.1);
        }
        request = request.query("scope", format!("repository:{}:pull,push", self.repository));
        if let Some(credentials) = credentials {
            request = request.header("authorization", credentials.basic());
        }
        let mut response = request.call().map_err(|e| self.unreachable(e))?;
        match response.status().as_u16() {
            200 => {}
            401 | 403 => return Err(self.forbidden(response).into()),
            429 | 500..=599 => {
                return Err(Failure::Passing(self.refused("it gives no token", response).into()));
            }
            _ => return Err(self.refused("it gives no token", response).into()),
        }
        let answer: Value = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_json()?;
        let token = answer["token"].as_str().or(answer["access_token"].as_str());
        let token = token.with_context(|| format!("{realm} answered without a token"))?;
        self.authorization = Some(format!("Bearer {token}"));
        Ok(())
    }

    /// A call that got no answer.
    fn unreachable(&self, error: ureq::Error) -> Failure {
        let passing = match &error {
            // TLS that is not understood; more attempts change nothing.
            ureq::Error::Io(e) => e.kind() != io::ErrorKind::InvalidData,
            ureq::Error::Timeout(_)
            | ureq::Error::HostNotFound
            | ureq::Error::ConnectionFailed
            | ureq::Error::Protocol(_)
            | ureq::Error::BodyStalled => true,
            _ => false,
        };
        let fault = Fault::user(format!("calling the registry {}", self.host)).because(error);
        if passing {
            return Failure::Passing(fault.hint("is the address right, and does the registry run?").into());
        }
        let hint = "a registry that speaks plain HTTP needs --insecure; a certificate authority of your own \
                    belongs into this system's certificates";
        Failure::Final(fault.hint(hint).into())
    }

    fn refusal(&self, what: &str, response: Response<ureq::Body>) -> Failure {
        Failure::Final(self.refused(what, response).into())
    }

    /// A refusal in the registry's own words.
    fn refused(&self, what: &str, mut response: Response<ureq::Body>) -> Fault {
        let status = response.status();
        let said = words(&mut response).map(|words| format!(": {words}")).unwrap_or_default();
        Fault::user(format!("the registry {} refused ({what}): {status}{said}", self.host))
    }

    fn forbidden(&self, response: Response<ureq::Body>) -> Fault {
        let what = format!("pushing to {}", self.repository);
        self.refused(&what, response).hint(format!(
            "`docker login {}` as somebody who may push to {}, or write auths into ~/.docker/config.json",
            self.host, self.repository
        ))
    }

    fn unknown(&self) -> Fault {
        Fault::user(format!("the registry {} wants to know who you are (401 Unauthorized)", self.host)).hint(
            format!(
                "`docker login {}`, or write auths.{:?}.auth into ~/.docker/config.json",
                self.host, self.host
            ),
        )
    }
}

/// Whom to trust: the authorities of this system, so that a company's own counts, or else those of the web.
fn roots() -> anyhow::Result<RootCerts> {
    let Some(path) = furniture::certificates() else { return Ok(RootCerts::WebPki) };
    let bytes = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    let certificates = parse_pem(&bytes).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    Ok(RootCerts::from(certificates.collect::<Vec<_>>()))
}

fn header<'a>(response: &'a Response<ureq::Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// What the body of a refusal says: `{"errors":[{"code":…,"message":…}]}`.
fn words(response: &mut Response<ureq::Body>) -> Option<String> {
    let body: Value = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_json().ok()?;
    let errors = body["errors"].as_array()?;
    let words: Vec<&str> = errors
        .iter()
        .filter_map(|error| {
            error["message"].as_str().filter(|text| !text.is_empty()).or(error["code"].as_str())
        })
        .collect();
    (!words.is_empty()).then(|| words.join("; "))
}

/// Where an upload ends: a registry names the place, whole or without itself, and the digest is added.
fn upload_url(root: &str, location: &str, digest: &Digest) -> Option<String> {
    let whole = if location.starts_with("http://") || location.starts_with("https://") {
        // Encryption is not given up because the other side says so.
        if root.starts_with("https://") && location.starts_with("http://") {
            return None;
        }
        location.to_string()
    } else {
        format!("{root}{}", location.strip_prefix('/').map(|_| location)?)
    };
    let joint = if whole.contains('?') { '&' } else { '?' };
    Some(format!("{whole}{joint}digest={digest}"))
}

/// `Bearer realm="…",service="…"` as a scheme and its values.
fn parse_challenge(text: &str) -> (&str, Vec<(String, String)>) {
    let (scheme, mut rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
    let mut values = Vec::new();
    while let Some((name, after)) = rest.split_once('=') {
        // Quoted values may hold commas.
        let (value, left) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => after.split_once(',').map_or((after, ""), |(value, left)| (value, left)),
        };
        values.push((name.trim_matches([',', ' ']).to_ascii_lowercase(), value.trim().to_string()));
        rest = left;
    }
    (scheme, values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_challenge_is_taken_apart() {
        let text = r#"Bearer realm="https://auth.example.com/token",service="reg, one",scope=x:y:pull"#;
        let (scheme, values) = parse_challenge(text);
        let values: Vec<_> = values.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(scheme, "Bearer");
        let wanted =
            [("realm", "https://auth.example.com/token"), ("service", "reg, one"), ("scope", "x:y:pull")];
        assert_eq!(values, wanted);
        assert_eq!(parse_challenge("Basic").0, "Basic");
        assert_eq!(parse_challenge("").1, []);
    }

    #[test]
    fn an_upload_ends_where_the_registry_says() {
        let digest = Digest::of(b"");
        let url = |location| upload_url("https://reg.io", location, &digest);
        assert_eq!(url("/v2/a/1").unwrap(), format!("https://reg.io/v2/a/1?digest={digest}"));
        assert_eq!(url("/v2/a/1?s=2").unwrap(), format!("https://reg.io/v2/a/1?s=2&digest={digest}"));
        assert_eq!(url("https://store.io/1").unwrap(), format!("https://store.io/1?digest={digest}"));
        assert_eq!(url("http://store.io/1"), None);
        assert_eq!(url("uploads/1"), None);
    }
}
