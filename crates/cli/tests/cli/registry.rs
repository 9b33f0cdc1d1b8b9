//! A registry for tests: the part of the OCI distribution protocol that a push uses, in memory.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use sha2::{Digest, Sha256};

/// What a registry holds and has seen.
#[derive(Debug, Default)]
pub struct State {
    /// Parts by digest.
    pub blobs: BTreeMap<String, Vec<u8>>,
    /// Manifests by `repository:tag`.
    pub manifests: BTreeMap<String, Vec<u8>>,
    /// `METHOD path` of every call, in order.
    pub calls: Vec<String>,
    /// The header that every call must have, and the challenge for those that have not.
    pub guard: Option<(String, String)>,
    /// What the token service answers to this header.
    pub token: Option<(String, String)>,
    /// How many uploads are still cut off in the middle, without an answer.
    pub cuts: u32,
    /// How many calls are still answered with "unavailable".
    pub outages: u32,
}

/// A registry that listens.
pub struct Registry {
    /// HOST:PORT
    pub address: String,
    state: Arc<Mutex<State>>,
}

struct Call {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

impl Registry {
    /// Begins to listen; it ends with the test's process.
    pub fn start() -> Registry {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                serve(stream, &shared);
            }
        });
        Registry { address, state }
    }

    /// What it holds, to look at or to change.
    pub fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

/// One call per connection.
fn serve(stream: TcpStream, state: &Mutex<State>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let Some((mut call, length)) = head(&mut reader) else { return };
    let mut state = state.lock().unwrap();
    state.calls.push(format!("{} {}", call.method, call.path));
    if call.method == "PUT" && call.path.contains("/uploads/") && state.cuts > 0 {
        state.cuts -= 1;
        call.body = vec![0; length / 2];
        let _ = reader.read_exact(&mut call.body);
        // Dropping both ends closes the connection with the rest unread.
        return;
    }
    call.body = vec![0; length];
    reader.read_exact(&mut call.body).unwrap();
    let (status, headers, body) = answer(&call, &mut state);
    let mut text = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n", body.len());
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    let body = if call.method == "HEAD" { String::new() } else { body };
    let _ = (&stream).write_all(format!("{text}\r\n{body}").as_bytes());
}

fn head(reader: &mut BufReader<TcpStream>) -> Option<(Call, usize)> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace().map(String::from);
    let (method, path) = (words.next()?, words.next()?);
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_string());
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    Some((Call { method, path, headers, body: Vec::new() }, length))
}

type Answer = (&'static str, Vec<(&'static str, String)>, String);

fn answer(call: &Call, state: &mut State) -> Answer {
    let errors = |message: &str| format!(r#"{{"errors":[{{"code":"SOME","message":"{message}"}}]}}"#);
    let given = call.headers.get("authorization");
    if call.path.starts_with("/token?") {
        return match &state.token {
            Some((wanted, token)) if given == Some(wanted) => {
                ("200 OK", vec![], format!(r#"{{"token":"{token}"}}"#))
            }
            _ => ("401 Unauthorized", vec![], errors("unknown user")),
        };
    }
    if state.outages > 0 {
        state.outages -= 1;
        return ("503 Service Unavailable", vec![], errors("back soon"));
    }
    if let Some((_, challenge)) = state.guard.as_ref().filter(|(wanted, _)| given != Some(wanted)) {
        return (
            "401 Unauthorized",
            vec![("www-authenticate", challenge.clone())],
            errors("authentication required"),
        );
    }
    let (path, query) = call.path.split_once('?').unwrap_or((&call.path, ""));
    let path = path.strip_prefix("/v2/").unwrap_or(path);
    match call.method.as_str() {
        "HEAD" => {
            let digest = path.rsplit('/').next().unwrap();
            (if state.blobs.contains_key(digest) { "200 OK" } else { "404 Not Found" }, vec![], String::new())
        }
        "POST" => ("202 Accepted", vec![("location", format!("/v2/{path}1?state=x"))], String::new()),
        "PUT" if path.contains("/blobs/uploads/") => {
            let digest = query.strip_prefix("state=x&digest=").unwrap_or_default();
            if digest != digest_of(&call.body) {
                return ("400 Bad Request", vec![], errors("digest does not match"));
            }
            state.blobs.insert(digest.into(), call.body.clone());
            ("201 Created", vec![], String::new())
        }
        "PUT" => {
            let (repository, tag) = path.split_once("/manifests/").unwrap();
            state.manifests.insert(format!("{repository}:{tag}"), call.body.clone());
            ("201 Created", vec![("docker-content-digest", digest_of(&call.body))], String::new())
        }
        _ => ("405 Method Not Allowed", vec![], String::new()),
    }
}

/// `sha256:…` of some bytes.
pub fn digest_of(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}
