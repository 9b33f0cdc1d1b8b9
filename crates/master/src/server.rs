//! Edge: turns calls into events and answers into replies. gRPC and HTTP share one port, and nothing
//! is answered without the job's token.

use axum::Router;
use elasticdl_spec::LeaseId;
use elasticdl_wire::Token;
use elasticdl_wire::control::master_server::{Master, MasterServer};
use elasticdl_wire::control::{
    AloneReply, AloneRequest, BeatReply, BeatRequest, CheckpointWrittenReply, CheckpointWrittenRequest,
    CopiedReply, CopiedRequest, JoinReply, JoinRequest, LeaseReply, LeaseRequest, Member, ReadyReply,
    ReadyRequest, ReportReply, ReportRequest, TopologyReply, TopologyRequest,
};
use tokio::sync::{mpsc, oneshot};

use crate::job::{Answer, Caller, Event, Need, Ticket};
use crate::pages::{EventLog, Led, Unmet, guarded, pages};
use crate::status::{ScaleRequest, Status, StopRequest};

/// Something for the loop.
pub enum Input {
    /// An event without a question.
    Event(Event),
    /// A question: the event it becomes, and where its answer goes.
    Question(Box<dyn FnOnce(Ticket) -> Event + Send>, oneshot::Sender<Answer>),
    /// How is the job?
    Status(oneshot::Sender<Status>),
}

/// What the handlers share.
#[derive(Clone)]
struct Shared {
    inputs: mpsc::UnboundedSender<Input>,
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
    let shared = Shared { inputs };
    let grpc = MasterServer::new(shared.clone()).max_decoding_message_size(64 << 20);
    let calls = tonic::service::Routes::new(grpc).into_axum_router();
    guarded(calls.merge(pages(shared, log)), token)
}

/// A wish that was noted, or why not.
fn met(outcome: Result<Answer, tonic::Status>) -> Result<(), Unmet> {
    match outcome {
        Ok(_) => Ok(()),
        Err(status) if status.code() == tonic::Code::FailedPrecondition => {
            Err(Unmet::Refused(status.message().into()))
        }
        Err(_) => Err(Unmet::Ending),
    }
}

impl Led for Shared {
    fn status(&self, reply: oneshot::Sender<Status>) {
        // Where the loop is gone the question is dropped at once, and with it the wait for an answer.
        drop(self.inputs.send(Input::Status(reply)));
    }

    async fn scale(&self, wanted: ScaleRequest) -> Result<(), Unmet> {
        met(self.ask(move |ticket| Event::Scale(ticket, wanted)).await)
    }

    async fn allow(&self, workers: Option<u32>) -> Result<(), Unmet> {
        met(self.ask(move |ticket| Event::Allow(ticket, workers)).await)
    }

    fn stop(&self, stop: StopRequest) -> bool {
        self.inputs.send(Input::Event(Event::Stop(stop))).is_ok()
    }
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

    async fn copied(&self, request: tonic::Request<CopiedRequest>) -> Reply<CopiedReply> {
        let request = request.into_inner();
        let caller = caller(request.member.as_ref())?;
        match self.ask(move |ticket| Event::Copied(ticket, caller, request)).await? {
            Answer::Copied(reply) => Ok(tonic::Response::new(reply)),
            other => mismatch(&other),
        }
    }

    async fn alone(&self, request: tonic::Request<AloneRequest>) -> Reply<AloneReply> {
        let request = request.into_inner();
        let caller = caller(request.member.as_ref())?;
        match self.ask(move |ticket| Event::Alone(ticket, caller, request)).await? {
            Answer::Alone(reply) => Ok(tonic::Response::new(reply)),
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
