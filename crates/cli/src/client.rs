//! Calls to a master, each with the job's token and a deadline; over TLS where the job has a certificate.

use std::time::Duration;

use elasticdl_master::status::{AllowRequest, Event, ScaleRequest, Status, StopRequest};
use elasticdl_wire::{Identity, Token, tls};
use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

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
    /// What comes before a path: the address, or the name in the certificate in its place.
    origin: String,
    authorization: String,
}

impl Client {
    /// A client of the master at `address`; over TLS with an identity.
    pub fn new(address: &str, token: &Token, identity: Option<&Identity>) -> anyhow::Result<Self> {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(DEADLINE))
            .http_status_as_error(false)
            // The master is called at its own address, whatever HTTP_PROXY says.
            .proxy(None);
        let (agent, origin) = match identity {
            None => (config.build().into(), format!("http://{address}")),
            Some(identity) => {
                let config = config.https_only(true).tls_config(secure(identity)?).build();
                let at = At(format!("https://{address}").parse()?);
                let agent = ureq::Agent::with_parts(config, DefaultConnector::default(), at);
                (agent, format!("https://{}", tls::NAME))
            }
        };
        let authorization = format!("Bearer {}", token.secret());
        Ok(Client { agent, address: address.into(), origin, authorization })
    }

    /// A client of the running master of a job.
    pub fn of(dir: &JobDir) -> anyhow::Result<Self> {
        let at = dir.master().ok_or_else(|| {
            Fault::job(format!("the master of {} has not said where it is", dir.path().display()))
                .hint("it may be starting: try again in a moment")
        })?;
        Client::new(&at.address, &Token::read(&dir.token())?, dir.identity()?.as_ref())
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

    /// Asks for so many workers and servers.
    pub fn scale(&self, wanted: ScaleRequest) -> anyhow::Result<()> {
        self.post("/v1/scale", &wanted)
    }

    /// Allows so many workers, whatever is wanted.
    pub fn allow(&self, workers: Option<u32>) -> anyhow::Result<()> {
        self.post("/v1/allow", &AllowRequest { workers })
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
        format!("{}{path}", self.origin)
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

/// Believes the job's certificate alone, and shows it.
fn secure(identity: &Identity) -> Result<TlsConfig, ureq::Error> {
    let ours = Certificate::from_pem(identity.cert_pem().as_bytes())?;
    let key = PrivateKey::from_pem(identity.key_pem().as_bytes())?;
    let authority = Certificate::from_pem(identity.ca_pem().as_bytes())?;
    Ok(TlsConfig::builder()
        .client_cert(Some(ClientCert::new_with_certs(&[ours], key)))
        .root_certs(RootCerts::new_with_certs(&[authority]))
        .unversioned_rustls_crypto_provider(tls::provider())
        .build())
}

/// Where the master is: the certificate's name is for the handshake and nobody's address.
#[derive(Debug)]
struct At(Uri);

impl Resolver for At {
    fn resolve(
        &self,
        _name: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        DefaultResolver::default().resolve(&self.0, config, timeout)
    }
}
