//! Calls to a master, each with the job's token and a deadline.

use std::time::Duration;

use elasticdl_master::status::{Event, ScaleRequest, Status, StopRequest};
use elasticdl_wire::Token;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::fault::{Exit, Fault};
use crate::home::JobDir;

/// How long an event that has not happened yet is waited for.
const WAIT: Duration = Duration::from_millis(1000);
/// How long any call may take; a master answers at once, or after [`WAIT`].
const DEADLINE: Duration = Duration::from_secs(10);

/// What a master says where it refuses.
#[derive(serde::Deserialize)]
struct Refusal {
    error: String,
}

/// A client of one master; cheap to clone.
#[derive(Debug, Clone)]
pub struct Client {
    agent: ureq::Agent,
    address: String,
    authorization: String,
}

impl Client {
    /// A client of the master at `address`.
    pub fn new(address: &str, token: &Token) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(DEADLINE))
            .http_status_as_error(false)
            // The master is on this machine, whatever HTTP_PROXY says.
            .proxy(None)
            .build();
        let authorization = format!("Bearer {}", token.secret());
        Client { agent: config.into(), address: address.into(), authorization }
    }

    /// A client of the running master of a job.
    pub fn of(dir: &JobDir) -> anyhow::Result<Self> {
        let at = dir.master().ok_or_else(|| {
            Fault::job(format!("the master of {} has not said where it is", dir.path().display()))
                .hint("it may be starting: try again in a moment")
        })?;
        Ok(Client::new(&at.address, &Token::read(&dir.token())?))
    }

    /// The job now.
    pub fn status(&self) -> anyhow::Result<Status> {
        self.get("/v1/status")
    }

    /// Events after number `after`; waits about a second where there is none yet.
    pub fn events(&self, after: u64) -> anyhow::Result<Vec<Event>> {
        let path = format!("/v1/events?after={after}&wait_ms={}", WAIT.as_millis());
        let events: Vec<serde_json::Value> = self.get(&path)?;
        // One that this version cannot read must not hide the others.
        Ok(events.into_iter().filter_map(|event| serde_json::from_value(event).ok()).collect())
    }

    /// Asks for so many workers.
    pub fn scale(&self, workers: u32) -> anyhow::Result<()> {
        self.post("/v1/scale", &ScaleRequest { workers })
    }

    /// Asks the job to stop.
    pub fn stop(&self, request: StopRequest) -> anyhow::Result<()> {
        self.post("/v1/stop", &request)
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let request = self.agent.get(self.url(path)).header("authorization", &self.authorization);
        let mut response = self.checked(path, request.call())?;
        let answer = response.body_mut().with_config().limit(256 << 20).read_json();
        answer.map_err(|e| self.unreachable(path).because(e).into())
    }

    fn post<T: Serialize>(&self, path: &str, body: &T) -> anyhow::Result<()> {
        let request = self.agent.post(self.url(path)).header("authorization", &self.authorization);
        self.checked(path, request.send_json(body)).map(|_| ())
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Turns a refusal into an error with the master's own words.
    fn checked(
        &self,
        path: &str,
        outcome: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> anyhow::Result<ureq::http::Response<ureq::Body>> {
        let mut response = outcome.map_err(|e| self.unreachable(path).because(e))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let said: Option<Refusal> = response.body_mut().read_json().ok();
        let said = said.map_or_else(|| status.to_string(), |refusal| refusal.error);
        let exit = if status.is_client_error() { Exit::User } else { Exit::Bug };
        Err(Fault::user(format!("the master refused {path}: {said}")).exit(exit).into())
    }

    fn unreachable(&self, path: &str) -> Fault {
        Fault::job(format!("calling the master at {}{path}", self.address))
    }
}
