//! Masters that one process stands for: there is no room here for hundreds of real ones and their workers.
//!
//! A stand-in makes its workers' and servers' pods with the code of real masters, which is what costs the API
//! server something, answers the operator as they do, over TLS and to the job's token alone, and ends its job after
//! some time. It trains nothing; its pods are only simulated.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use elasticdl_operator::cluster::Cluster;
use elasticdl_operator::fleet::Fleet;
use elasticdl_operator::manifest::{Job, MASTER_PORT, TLS_FILES};
use elasticdl_operator::names;
use elasticdl_spec::JobSpec;
use elasticdl_wire::Identity;
use elasticdl_wire::control::Role;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use super::addresses::Addresses;
use super::objects::Objects;
use super::status::{self, End};
use super::workload;
use super::{Host, Order};

/// Records that a stand-in says it trains in a second.
const RECORDS_PER_SECOND: f64 = 1000.0;
/// A request of the operator is short.
const REQUEST_MAX: u64 = 64 << 10;

/// Stands for all masters.
pub struct StandIns {
    client: Client,
    objects: Objects,
    addresses: Mutex<Addresses>,
    life: Duration,
}

impl StandIns {
    /// Each job ends after so long.
    pub fn new(client: Client, life: Duration) -> StandIns {
        StandIns { objects: Objects(client.clone()), client, addresses: Mutex::default(), life }
    }
}

impl Host for StandIns {
    async fn live(self: Arc<Self>, pod: Pod, mut order: watch::Receiver<Order>) {
        if *order.borrow_and_update() == Order::Run
            && let Err(error) = self.lead(&pod, &mut order).await
        {
            self.objects.fail(&pod, &error).await;
        }
        self.objects.until_gone(&pod, order).await;
    }
}

impl StandIns {
    /// A master from its start to the end of its job, or until it is to end.
    async fn lead(&self, pod: &Pod, order: &mut watch::Receiver<Order>) -> Result<()> {
        let address = self.address(pod);
        let cluster = Cluster::of(self.client.clone(), pod.namespace().unwrap_or_default());
        let Papers { job, token, identity } = papers(pod, &cluster).await?;
        let listener = TcpListener::bind((address, MASTER_PORT)).await.context("listen")?;
        let started = Timestamp::now();
        self.objects.tell(pod, status::running(pod, &address.to_string(), started)).await;

        let (name, workers) = (job.spec.name.clone(), job.spec.workers_at_start());
        let leads = Arc::new(Leads::new(name.clone(), token, workers, self.life));
        let mut answering = JoinSet::new();
        answering.spawn(answer_all(listener, identity, Arc::clone(&leads)));
        let (servers, at) = (job.spec.servers.count, cluster.master_address(&name).await?);
        let (news, _heard) = mpsc::unbounded_channel();
        let mut fleet = Fleet::watch(self.client.clone(), job, at, news).await?;
        for (role, count) in [(Role::Server, servers), (Role::Worker, workers)] {
            for id in 0..count {
                fleet.start(role, id);
            }
        }
        tokio::select! {
            () = tokio::time::sleep_until(leads.end) => {}
            _ = order.wait_for(|order| *order != Order::Run) => return Ok(()),
        }
        cluster.end_members(&name).await?;
        let message = json!({ "phase": "Done", "records": leads.records(), "epoch": 1 }).to_string();
        let end = End { code: 0, message };
        self.objects.tell(pod, status::ended(pod, &end, started, Timestamp::now())).await;
        Ok(())
    }

    fn address(&self, pod: &Pod) -> Ipv4Addr {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).master(&workload::job(pod))
    }
}

/// What a master reads from its job's secret.
struct Papers {
    job: Job,
    token: String,
    identity: Identity,
}

async fn papers(pod: &Pod, cluster: &Cluster) -> Result<Papers> {
    let name = pod.labels().get(names::JOB).cloned().unwrap_or_default();
    let secret = cluster.anchor(&name).await?.context("the job has no secret")?;
    let data = secret.data.unwrap_or_default();
    let text = |key: &str| {
        let bytes = data.get(key).with_context(|| format!("the secret has no {key}"))?;
        String::from_utf8(bytes.0.clone()).with_context(|| format!("{key} is text"))
    };
    let spec: JobSpec = serde_json::from_str(&text("job.json")?).context("read the job")?;
    let [ca, cert, key] = TLS_FILES;
    let identity = Identity::from_pem(text(ca)?, text(cert)?, text(key)?).context("read the certificate")?;
    let owner = Some(cluster.owner(&name).await?);
    let job = Job {
        spec,
        namespace: cluster.namespace.clone(),
        run: text("run")?,
        fresh: false,
        allowed: None,
        owner,
    };
    Ok(Papers { job, token: text("token")?, identity })
}

/// What a stand-in says of its job.
struct Leads {
    name: String,
    token: String,
    workers: u32,
    /// 0 where nobody has said.
    allowed: AtomicU32,
    began: Instant,
    end: Instant,
}

impl Leads {
    fn new(name: String, token: String, workers: u32, life: Duration) -> Leads {
        let began = Instant::now();
        Leads { name, token, workers, allowed: AtomicU32::new(0), began, end: began + life }
    }

    fn records(&self) -> u64 {
        (self.began.elapsed().as_secs_f64() * RECORDS_PER_SECOND) as u64
    }

    /// As a master answers `/v1/status`.
    fn status(&self) -> Value {
        let worker = |id: u32| json!({ "id": id, "state": "working", "pid": null, "restarts": 0, "task": null, "records": 0, "gauges": {} });
        let allowed = Some(self.allowed.load(Ordering::Relaxed)).filter(|allowed| *allowed > 0);
        let total = (self.end - self.began).as_secs_f64() * RECORDS_PER_SECOND;
        json!({
            "job": self.name, "phase": "training", "error": null, "seconds": self.began.elapsed().as_secs_f64(),
            "epoch": 0, "epochs": 1, "records": self.records(), "records_total": total as u64,
            "records_per_second": RECORDS_PER_SECOND, "eta_seconds": null, "loss": null, "logloss": null, "auc": null,
            "bad_records": 0, "tasks": { "todo": 0, "leased": 0, "done": 0 },
            "workers_wanted": self.workers, "workers_useful": self.workers, "workers_allowed": allowed,
            "workers": (0..self.workers).map(worker).collect::<Vec<_>>(), "servers": [], "checkpoint": null,
        })
    }

    /// What is answered to a request.
    fn answer(&self, path: &str, authorization: &str, body: &[u8]) -> (&'static str, Value) {
        if authorization.trim() != format!("Bearer {}", self.token) {
            return ("401 Unauthorized", json!({ "error": "the job's token is missing" }));
        }
        match path {
            "/v1/status" => ("200 OK", self.status()),
            "/v1/allow" => {
                let asked: Value = serde_json::from_slice(body).unwrap_or_default();
                let workers = asked["workers"].as_u64().and_then(|workers| u32::try_from(workers).ok());
                self.allowed.store(workers.unwrap_or(0), Ordering::Relaxed);
                ("200 OK", json!({}))
            }
            "/v1/scale" | "/v1/stop" => ("200 OK", json!({})),
            _ => ("404 Not Found", json!({ "error": "there is no such thing" })),
        }
    }
}

async fn answer_all(listener: TcpListener, identity: Identity, leads: Arc<Leads>) {
    let acceptor = TlsAcceptor::from(identity.server_of(&[b"http/1.1"]));
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, leads) = (acceptor.clone(), Arc::clone(&leads));
        connections.spawn(async move {
            if let Err(error) = answer(stream, acceptor, &leads).await {
                eprintln!("a call to the master of {} broke off: {error:#}", leads.name);
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Answers one request, as HTTP/1.1 wants it.
async fn answer(stream: TcpStream, acceptor: TlsAcceptor, leads: &Leads) -> Result<()> {
    let stream = acceptor.accept(stream).await.context("agree on a key")?;
    let mut reader = BufReader::new(stream);
    let request = Request::read(&mut reader).await?;
    let (status, body) = leads.answer(&request.path, &request.authorization, &request.body);
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let stream = reader.get_mut();
    stream.write_all((head + &body).as_bytes()).await.context("answer")?;
    stream.shutdown().await.context("close")
}

/// As much of a request as is needed.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    path: String,
    authorization: String,
    body: Vec<u8>,
}

impl Request {
    async fn read(stream: &mut (impl AsyncBufReadExt + Unpin)) -> Result<Request> {
        let mut stream = stream.take(REQUEST_MAX);
        let mut line = String::new();
        stream.read_line(&mut line).await.context("read a request")?;
        let path = line.split(' ').nth(1).context("a request has a path")?.to_owned();
        let (mut authorization, mut length) = (String::new(), 0);
        loop {
            line.clear();
            ensure!(
                stream.read_line(&mut line).await.context("read a header")? > 0,
                "the request is cut off"
            );
            if line.trim().is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').context("a header has a name")?;
            match name.to_ascii_lowercase().as_str() {
                "authorization" => authorization = value.trim().to_owned(),
                "content-length" => length = value.trim().parse().context("a length is a number")?,
                _ => {}
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.context("read a body")?;
        Ok(Request { path, authorization, body })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_is_read_with_its_body() {
        let text = "POST /v1/allow HTTP/1.1\r\nHost: elasticdl\r\nAuthorization: Bearer t\r\nContent-Length: 13\r\n\r\n{\"workers\":7}";
        let request = Request::read(&mut BufReader::new(text.as_bytes())).await.unwrap();
        let expected = Request {
            path: "/v1/allow".into(),
            authorization: "Bearer t".into(),
            body: b"{\"workers\":7}".to_vec(),
        };
        assert_eq!(request, expected);
        let cut = Request::read(&mut BufReader::new(&b"GET / HTTP/1.1\r\nHost: a\r\n"[..])).await;
        assert_eq!(cut.unwrap_err().to_string(), "the request is cut off");
    }

    #[tokio::test]
    async fn a_stand_in_answers_to_the_token_alone_and_remembers_what_it_is_allowed() {
        let leads = Leads::new("j".into(), "secret".into(), 20, Duration::from_secs(60));
        assert_eq!(leads.answer("/v1/status", "Bearer other", b"").0, "401 Unauthorized");
        assert_eq!(leads.status()["workers_allowed"], Value::Null);
        assert_eq!(leads.answer("/v1/allow", "Bearer secret", b"{\"workers\":7}").0, "200 OK");
        let (code, status) = leads.answer("/v1/status", "Bearer secret", b"");
        assert_eq!(
            (code, &status["workers_allowed"], &status["workers_wanted"]),
            ("200 OK", &json!(7), &json!(20))
        );
        assert_eq!(status["workers"].as_array().map(Vec::len), Some(20));
    }
}
