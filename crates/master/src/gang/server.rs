//! Edge: the calls of members become events, and answers replies.

use std::time::Duration;

use axum::Router;
use elasticdl_wire::Token;
use elasticdl_wire::control::gang_server::{Gang as Calls, GangServer};
use elasticdl_wire::control::{self, TurnReply, TurnRequest, turn_reply};
use tokio::sync::{mpsc, oneshot};

use super::{Turn, Wanted};
use crate::pages::{EventLog, Led, Unmet, guarded, pages};
use crate::status::{ScaleRequest, Status, StopRequest};

/// Something for the loop.
pub enum Input {
    /// A member asks what to do.
    Turn(Turn, oneshot::Sender<Wanted>),
    /// Stop.
    Stop(StopRequest),
    /// How is the job?
    Status(oneshot::Sender<Status>),
}

/// What the handlers share.
#[derive(Clone)]
struct Shared {
    inputs: mpsc::UnboundedSender<Input>,
    grace: Duration,
    orphan: Duration,
}

/// Everything the master of a gang answers, behind the token. `patience`: how long a program that is to end may
/// take, and how long a member does without a master.
pub fn router(
    token: Token,
    inputs: mpsc::UnboundedSender<Input>,
    log: EventLog,
    patience: (Duration, Duration),
) -> Router {
    let shared = Shared { inputs, grace: patience.0, orphan: patience.1 };
    let calls = tonic::service::Routes::new(GangServer::new(shared.clone())).into_axum_router();
    guarded(calls.merge(pages(shared, log)), token)
}

#[tonic::async_trait]
impl Calls for Shared {
    async fn turn(
        &self,
        request: tonic::Request<TurnRequest>,
    ) -> Result<tonic::Response<TurnReply>, tonic::Status> {
        let said = request.into_inner();
        let turn = Turn {
            rank: said.rank,
            pid: said.pid,
            address: said.address,
            start: said.start.map(Into::into),
            end: said.end.map(Into::into),
        };
        let (reply, answer) = oneshot::channel();
        let ending = || tonic::Status::unavailable("the master is ending");
        self.inputs.send(Input::Turn(turn, reply)).map_err(|_| ending())?;
        let wanted = match answer.await.map_err(|_| ending())? {
            Wanted::Nothing => turn_reply::Wanted::Nothing(true),
            Wanted::Leave => turn_reply::Wanted::Leave(true),
            Wanted::Program(program) => turn_reply::Wanted::Program(control::Program {
                start: Some(program.start.into()),
                run: program.run,
                environment: program.environment.into_iter().collect(),
            }),
        };
        let ms = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        let (grace_ms, orphan_ms) = (ms(self.grace), ms(self.orphan));
        Ok(tonic::Response::new(TurnReply { wanted: Some(wanted), grace_ms, orphan_ms }))
    }
}

impl Led for Shared {
    fn status(&self, reply: oneshot::Sender<Status>) {
        // Where the loop is gone the question is dropped at once, and with it the wait for an answer.
        drop(self.inputs.send(Input::Status(reply)));
    }

    async fn scale(&self, _: ScaleRequest) -> Result<(), Unmet> {
        let why = "the job runs a program of its own, with as many members as spec.command.roles says";
        Err(Unmet::Refused(why.into()))
    }

    async fn allow(&self, _: Option<u32>) -> Result<(), Unmet> {
        Err(Unmet::Refused("the members of a program are all or none".into()))
    }

    fn stop(&self, stop: StopRequest) -> bool {
        self.inputs.send(Input::Stop(stop)).is_ok()
    }
}
