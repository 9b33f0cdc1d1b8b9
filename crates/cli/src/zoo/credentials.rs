//! Who a person is at a registry, as `docker login` wrote it down.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::Value;

use crate::fault::Fault;

/// A user and a password.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    user: String,
    password: String,
}

/// What Docker calls its own registry in its configuration.
const DOCKER_HUB_KEY: &str = "https://index.docker.io/v1/";

impl Credentials {
    /// As a header of HTTP.
    pub fn basic(&self) -> String {
        format!("Basic {}", STANDARD.encode(format!("{}:{}", self.user, self.password)))
    }
}

/// Looks a registry up in Docker's configuration.
pub fn find(registry: &str) -> anyhow::Result<Option<Credentials>> {
    let Some(path) = config_file() else { return Ok(None) };
    let text = match fs::read_to_string(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => other.with_context(|| format!("reading {}", path.display()))?,
    };
    let config: Value = serde_json::from_str(&text)
        .map_err(|e| Fault::user(format!("{} cannot be read", path.display())).because(e))?;
    match entry(&config, registry) {
        Entry::Nothing => Ok(None),
        Entry::Encoded(text) => {
            let credentials = decode(text).ok_or_else(|| {
                Fault::user(format!("{}: what it says about {registry} cannot be read", path.display()))
                    .hint(format!("`docker login {registry}` writes it again"))
            })?;
            Ok(Some(credentials))
        }
        Entry::Helper(helper) => ask_helper(helper, key(registry)).with_context(|| {
            format!("asking docker-credential-{helper}, which {} names, about {registry}", path.display())
        }),
    }
}

fn config_file() -> Option<PathBuf> {
    let named = std::env::var_os("DOCKER_CONFIG").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let dir = named.or_else(|| Some(std::env::home_dir()?.join(".docker")))?;
    Some(dir.join("config.json"))
}

/// What the configuration has for a registry.
#[derive(Debug, PartialEq, Eq)]
enum Entry<'a> {
    /// Nothing.
    Nothing,
    /// USER:PASSWORD in base64.
    Encoded(&'a str),
    /// The program that knows.
    Helper(&'a str),
}

fn entry<'a>(config: &'a Value, registry: &str) -> Entry<'a> {
    let keys = [key(registry).to_string(), format!("https://{registry}"), format!("https://{registry}/")];
    let text = |value: &'a Value| value.as_str().filter(|text| !text.is_empty());
    if let Some(helper) = text(&config["credHelpers"][key(registry)]) {
        return Entry::Helper(helper);
    }
    if let Some(auth) = keys.iter().find_map(|key| text(&config["auths"][key.as_str()]["auth"])) {
        return Entry::Encoded(auth);
    }
    text(&config["credsStore"]).map_or(Entry::Nothing, Entry::Helper)
}

fn key(registry: &str) -> &str {
    if registry == "docker.io" { DOCKER_HUB_KEY } else { registry }
}

fn decode(text: &str) -> Option<Credentials> {
    let plain = String::from_utf8(STANDARD.decode(text.trim()).ok()?).ok()?;
    let (user, password) = plain.split_once(':')?;
    Some(Credentials { user: user.into(), password: password.trim_end_matches('\0').into() })
}

/// What a credential helper answers.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

fn ask_helper(helper: &str, server: &str) -> anyhow::Result<Option<Credentials>> {
    let mut command = Command::new(format!("docker-credential-{helper}"));
    let mut child = command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    child.stdin.take().context("its stdin is a pipe")?.write_all(server.as_bytes())?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        // That is how they say that they know nothing.
        return Ok(None);
    }
    let answer: Answer = serde_json::from_slice(&output.stdout)
        .map_err(|e| Fault::user("its answer cannot be read").because(e))?;
    if answer.username == "<token>" {
        bail!(Fault::user("it has an identity token, which is not supported").hint("log in with a password"));
    }
    Ok(Some(Credentials { user: answer.username, password: answer.secret }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_registry_is_found_by_the_names_that_docker_writes() {
        let config = json!({ "auths": {
            "reg.example.com:5000": { "auth": "a" },
            "https://old.example.com": { "auth": "b" },
            "https://index.docker.io/v1/": { "auth": "c" },
            "kept.example.com": {},
        }});
        assert_eq!(entry(&config, "reg.example.com:5000"), Entry::Encoded("a"));
        assert_eq!(entry(&config, "old.example.com"), Entry::Encoded("b"));
        assert_eq!(entry(&config, "docker.io"), Entry::Encoded("c"));
        assert_eq!(entry(&config, "reg.example.com"), Entry::Nothing);
        assert_eq!(entry(&config, "kept.example.com"), Entry::Nothing);
    }

    #[test]
    fn a_helper_of_its_own_goes_before_a_password_and_that_before_the_store() {
        let config = json!({ "credsStore": "store", "credHelpers": { "a.io": "own" }, "auths": {
            "a.io": { "auth": "x" }, "b.io": { "auth": "y" },
        }});
        assert_eq!(entry(&config, "a.io"), Entry::Helper("own"));
        assert_eq!(entry(&config, "b.io"), Entry::Encoded("y"));
        assert_eq!(entry(&config, "c.io"), Entry::Helper("store"));
    }

    #[test]
    fn a_password_may_hold_colons() {
        let credentials = decode(&STANDARD.encode("me:a:b")).unwrap();
        assert_eq!((credentials.user.as_str(), credentials.password.as_str()), ("me", "a:b"));
        assert_eq!(credentials.basic(), format!("Basic {}", STANDARD.encode("me:a:b")));
        assert!(decode("%").is_none());
        assert!(decode(&STANDARD.encode("nobody")).is_none());
    }
}
