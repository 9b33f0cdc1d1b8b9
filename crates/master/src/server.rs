//! Edge: turns calls into events and answers into replies. gRPC and HTTP share one port, and nothing
//! is answered without the job's token.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{Query, Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use elasticdl_spec::LeaseId;
use elasticdl_wire::Token;
use elasticdl_wire::control::master_server::{Master, MasterServer};
use elasticdl_wire::control::{
    BeatReply, BeatRequest, CheckpointWrittenReply, CheckpointWrittenRequest, JoinReply, JoinRequest,
    LeaseReply, LeaseRequest, Member, ReadyReply, ReadyRequest, ReportReply, ReportRequest, TopologyReply,
    TopologyRequest,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot, watch};

use crate::job::{Answer, Caller, Event, Need, Ticket};
use crate::status::{self, AllowRequest, ScaleRequest, Status, StopRequest};

/// Something for the loop.
pub enum Input {
    /// An event without a question.
    Event(Event),
    /// A question: the event it becomes, and where its answer goes.
    Question(Box<dyn FnOnce(Ticket) -> Event + Send>, oneshot::Sender<Answer>),
    /// How is the job?
    Status(oneshot::Sender<Status>),
}

/// The events of a job so far, and who has seen them.
#[derive(Clone)]
pub struct EventLog {
    /// The number of the last event of the masters before.
    before: u64,
    events: Arc<Mutex<Vec<status::Event>>>,
    count: watch::Sender<u64>,
    /// The highest number that a follower has acknowledged by asking for what comes after it.
    seen: watch::Sender<u64>,
}

impl EventLog {
    /// A log whose numbers go on after `before`, the last one of the masters before.
    pub fn new(before: u64) -> Self {
        EventLog {
            before,
            events: Arc::default(),
            count: watch::channel(before).0,
            seen: watch::channel(0).0,
        }
    }

    /// The number of the next event.
    pub fn next_seq(&self) -> u64 {
        *self.count.borrow() + 1
    }

    /// Publishes the next event.
    pub fn push(&self, event: status::Event) {
        assert_eq!(event.seq, self.next_seq(), "events come without holes");
        let seq = event.seq;
        self.events.lock().expect("no holder of this lock panics").push(event);
        self.count.send_replace(seq);
    }

    /// Waits until a follower has seen everything.
    pub async fn all_seen(&self) {
        let count = *self.count.borrow();
        let mut seen = self.seen.subscribe();
        // The sender lives in self, so this ends only when the condition holds.
        let _ = seen.wait_for(|seen| *seen >= count).await;
    }

    async fn after(&self, after: u64, wait: Duration) -> Vec<status::Event> {
        self.seen.send_if_modified(|seen| {
            let newer = after > *seen;
            *seen = after.max(*seen);
            newer
        });
        let mut count = self.count.subscribe();
        // Nothing new in time is an answer too.
        let _ = tokio::time::timeout(wait, count.wait_for(|count| *count > after)).await;
        let events = self.events.lock().expect("no holder of this lock panics");
        events.iter().skip(after.saturating_sub(self.before) as usize).cloned().collect()
    }
}

/// What the handlers share.
#[derive(Clone)]
struct Shared {
    inputs: mpsc::UnboundedSender<Input>,
    log: EventLog,
}

impl Shared {
    async fn ask(
        &self,
        make: impl FnOnce(Ticket) -> Event + Send + 'static,
    ) -> Result<Answer, tonic::Status> {
        let (reply, answer) = oneshot::channel();
        let ending = || tonic::Status::unavailable("the master is ending");
        self.inputs.send(Input::Question(Box::new(make), reply)).map_err(|_| ending())?;
        match answer.await.map_err(|_| ending())? {
            Answer::Refused(reason) => Err(tonic::Status::failed_precondition(reason)),
            answer => Ok(answer),
        }
    }
}

/// Everything the master answers, behind the token.
pub fn router(token: Token, inputs: mpsc::UnboundedSender<Input>, log: EventLog) -> Router {
    let shared = Shared { inputs, log };
    let grpc = MasterServer::new(shared.clone()).max_decoding_message_size(64 << 20);
    let http = Router::new()
        .route("/v1/status", get(get_status))
        .route("/v1/events", get(get_events))
        .route("/v1/scale", post(post_scale))
        .route("/v1/allow", post(post_allow))
        .route("/v1/stop", post(post_stop))
        .with_state(shared);
    tonic::service::Routes::new(grpc)
        .into_axum_router()
        .merge(http)
        .layer(axum::middleware::from_fn_with_state(token, require_token))
}

async fn require_token(State(token): State<Token>, request: Request, next: Next) -> Response {
    let header = request.headers().get("authorization").map(|h| h.as_bytes());
    if token.matches_header(header) {
        return next.run(request).await;
    }
    tracing::warn!(path = request.uri().path(), "call without the job's token refused");
    let grpc =
        request.headers().get("content-type").is_some_and(|t| t.as_bytes().starts_with(b"application/grpc"));
    if grpc {
        return tonic::Status::unauthenticated("the job's token is missing or wrong").into_http();
    }
    let body = json!({"error": "the job's token is missing or wrong"});
    (StatusCode::UNAUTHORIZED, Json(body)).into_response()
}

async fn get_status(State(shared): State<Shared>) -> Response {
    let (reply, status) = oneshot::channel();
    // Where the loop is gone the question is dropped at once, and with it the wait for an answer.
    drop(shared.inputs.send(Input::Status(reply)));
    match status.await {
        Ok(status) => Json(status).into_response(),
        Err(_) => ending().into_response(),
    }
}

#[derive(Deserialize)]
struct EventsQuery {
    #[serde(default)]
    after: u64,
    #[serde(default)]
    wait_ms: u64,
}

async fn get_events(State(shared): State<Shared>, Query(query): Query<EventsQuery>) -> Response {
    let wait = Duration::from_millis(query.wait_ms.min(30_000));
    Json(shared.log.after(query.after, wait).await).into_response()
}

async fn post_scale(State(shared): State<Shared>, Json(scale): Json<ScaleRequest>) -> Response {
    let workers = json!({"workers": scale.workers});
    noted(shared.ask(move |ticket| Event::Scale(ticket, scale.workers)).await, workers)
}

async fn post_allow(State(shared): State<Shared>, Json(allow): Json<AllowRequest>) -> Response {
    let workers = json!({"workers": allow.workers});
    noted(shared.ask(move |ticket| Event::Allow(ticket, allow.workers)).await, workers)
}

fn noted(outcome: Result<Answer, tonic::Status>, body: Value) -> Response {
    match outcome {
        Ok(_) => Json(body).into_response(),
        Err(status) if status.code() == tonic::Code::FailedPrecondition => {
            (StatusCode::BAD_REQUEST, Json(json!({"error": status.message()}))).into_response()
        }
        Err(_) => ending().into_response(),
    }
}

async fn post_stop(State(shared): State<Shared>, Json(stop): Json<StopRequest>) -> Response {
    match shared.inputs.send(Input::Event(Event::Stop(stop))) {
        Ok(()) => Json(json!({"stopping": true})).into_response(),
        Err(_) => ending().into_response(),
    }
}

fn ending() -> impl IntoResponse {
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"error": "the master is ending"})))
}

fn caller(member: Option<&Member>) -> Result<Caller, tonic::Status> {
    let member =
        member.ok_or_else(|| tonic::Status::invalid_argument("the caller does not say who it is"))?;
    Ok(Caller { role: member.role, id: member.id, pid: member.pid })
}

type Reply<T> = Result<tonic::Response<T>, tonic::Status>;

/// An answer of another kind than the question asks for is our own mistake.
fn mismatch<T>(answer: &Answer) -> Reply<T> {
    Err(tonic::Status::internal(format!("an answer of the wrong kind: {answer:?}")))
}

#[tonic::async_trait]
impl Master for Shared {
    async fn join(&self, request: tonic::Request<JoinRequest>) -> Reply<JoinReply> {
        let request = request.into_inner();
        let caller = caller(request.member.as_ref())?;
        match self.ask(move |ticket| Event::Joined(ticket, caller, request.address)).await? {
            Answer::Join(reply) => Ok(tonic::Response::new(*reply)),
            other => mismatch(&other),
        }
    }

    async fn ready(&self, request: tonic::Request<ReadyRequest>) -> Reply<ReadyReply> {
        let request = request.into_inner();
        let caller = caller(request.member.as_ref())?;
        self.ask(move |ticket| Event::Ready(ticket, caller, request)).await?;
        Ok(tonic::Response::new(ReadyReply {}))
    }

    async fn beat(&self, request: tonic::Request<BeatRequest>) -> Reply<BeatReply> {
        let request = request.into_inner();
        let caller = caller(request.member.as_ref())?;
        let gauges = serde_json::from_str(&request.gauges).unwrap_or_default();
        match self.ask(move |ticket| Event::Beat(ticket, caller, gauges)).await? {
            Answer::Beat(reply) => Ok(tonic::Response::new(reply)),
            other => mismatch(&other),
        }
    }

    async fn topology(&self, _: tonic::Request<TopologyRequest>) -> Reply<TopologyReply> {
        match self.ask(Event::TopologyAsked).await? {
            Answer::Topology(reply) => Ok(tonic::Response::new(reply)),
            other => mismatch(&other),
        }
    }

    async fn lease(&self, request: tonic::Request<LeaseRequest>) -> Reply<LeaseReply> {
        let request = request.into_inner();
        let caller = caller(request.member.as_ref())?;
        let held = request.held.iter().map(|lease| LeaseId { term: lease.term, n: lease.n }).collect();
        let need = if request.ahead { Need::Ahead } else { Need::Now };
        match self.ask(move |ticket| Event::LeaseAsked(ticket, caller, held, need)).await? {
            Answer::Lease(reply) => Ok(tonic::Response::new(reply)),
            other => mismatch(&other),
        }
    }

    async fn report(&self, request: tonic::Request<ReportRequest>) -> Reply<ReportReply> {
        let request = request.into_inner();
        let caller = caller(request.member.as_ref())?;
        match self.ask(move |ticket| Event::Reported(ticket, caller, Box::new(request))).await? {
            Answer::Report(held) => Ok(tonic::Response::new(ReportReply { held })),
            other => mismatch(&other),
        }
    }

    async fn checkpoint_written(
        &self,
        request: tonic::Request<CheckpointWrittenRequest>,
    ) -> Reply<CheckpointWrittenReply> {
        let request = request.into_inner();
        let caller = caller(request.member.as_ref())?;
        self.ask(move |ticket| Event::Written(ticket, caller, request)).await?;
        Ok(tonic::Response::new(CheckpointWrittenReply {}))
    }
}
