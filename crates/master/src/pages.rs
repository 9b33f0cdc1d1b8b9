//! Edge: what every master answers over HTTP, whatever it leads: status, events, scale, stop. Nothing is answered
//! without the job's token.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{Query, Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use elasticdl_wire::Token;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};

use crate::status::{self, AllowRequest, ScaleRequest, Status, StopRequest};

/// What is led, as the pages see it.
pub trait Led: Clone + Send + Sync + 'static {
    /// How is it? The sender is dropped where nobody leads any more.
    fn status(&self, reply: oneshot::Sender<Status>);
    /// So many workers and servers, please.
    fn scale(&self, wanted: ScaleRequest) -> impl Future<Output = Result<(), Unmet>> + Send;
    /// No more workers than that, whatever is wanted; `None`: as many as are wanted.
    fn allow(&self, workers: Option<u32>) -> impl Future<Output = Result<(), Unmet>> + Send;
    /// Stop. `false`: nobody leads any more.
    fn stop(&self, stop: StopRequest) -> bool;
}

/// Why a wish is not met.
pub enum Unmet {
    /// It cannot be; in words.
    Refused(String),
    /// Nobody leads any more.
    Ending,
}

/// The pages of what is led.
pub fn pages<L: Led>(led: L, log: EventLog) -> Router {
    let http = Router::new()
        .route("/v1/status", get(get_status::<L>))
        .route("/v1/scale", post(post_scale::<L>))
        .route("/v1/allow", post(post_allow::<L>))
        .route("/v1/stop", post(post_stop::<L>))
        .with_state(led);
    http.merge(Router::new().route("/v1/events", get(get_events)).with_state(log))
}

/// With the token asked for.
pub fn guarded(router: Router, token: Token) -> Router {
    router.layer(axum::middleware::from_fn_with_state(token, require_token))
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

async fn get_status<L: Led>(State(led): State<L>) -> Response {
    let (reply, status) = oneshot::channel();
    led.status(reply);
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

async fn get_events(State(log): State<EventLog>, Query(query): Query<EventsQuery>) -> Response {
    let wait = Duration::from_millis(query.wait_ms.min(30_000));
    Json(log.after(query.after, wait).await).into_response()
}

async fn post_scale<L: Led>(State(led): State<L>, Json(scale): Json<ScaleRequest>) -> Response {
    if scale.workers.is_none() && scale.servers.is_none() {
        return noted(Err(Unmet::Refused("say how many workers or servers are wanted".into())), json!(null));
    }
    noted(led.scale(scale).await, json!(scale))
}

async fn post_allow<L: Led>(State(led): State<L>, Json(allow): Json<AllowRequest>) -> Response {
    noted(led.allow(allow.workers).await, json!({"workers": allow.workers}))
}

fn noted(outcome: Result<(), Unmet>, body: Value) -> Response {
    match outcome {
        Ok(()) => Json(body).into_response(),
        Err(Unmet::Refused(why)) => (StatusCode::BAD_REQUEST, Json(json!({"error": why}))).into_response(),
        Err(Unmet::Ending) => ending().into_response(),
    }
}

async fn post_stop<L: Led>(State(led): State<L>, Json(stop): Json<StopRequest>) -> Response {
    match led.stop(stop) {
        true => Json(json!({"stopping": true})).into_response(),
        false => ending().into_response(),
    }
}

fn ending() -> impl IntoResponse {
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"error": "the master is ending"})))
}
