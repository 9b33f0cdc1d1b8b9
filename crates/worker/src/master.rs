//! The master, as a worker calls it: every call tried again for as long as it takes, a new master joined,
//! and the silence measured.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use elasticdl_spec::{Kind, LeaseId, PartitionId, Plan};
use elasticdl_wire::client::{self, Client};
use elasticdl_wire::control::{
    BeatReply, BeatRequest, JoinRequest, LeaseNumber, LeaseReply, LeaseRequest, Member, ReportReply,
    ReportRequest, TopologyRequest,
};
use elasticdl_wire::retry::Backoff;
use elasticdl_wire::{Error as WireError, Identity, Token};
use tracing::{info, warn};

use crate::error::{Error, Result};
use crate::gauges::Gauges;
use crate::ps_client::{Place, Places};

const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_LONGEST: Duration = Duration::from_secs(1);

/// A handle to the master; cheap to clone.
#[derive(Clone)]
pub(crate) struct Master {
    client: Client,
    address: String,
    member: Member,
    /// Set by every answer; whoever measures the silence takes it back.
    heard: Arc<AtomicBool>,
}

impl Master {
    pub fn new(address: &str, token: Token, identity: Option<&Identity>, member: Member) -> Result<Self> {
        let client = client::connect(address, token, identity)
            .map_err(|source| Error::Wire { attempt: "connecting to the master", source })?;
        Ok(Master { client, address: address.into(), member, heard: Arc::default() })
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Whether a master has answered since this was asked last.
    pub fn was_heard(&self) -> bool {
        self.heard.swap(false, Ordering::Relaxed)
    }

    /// Joins the job and learns its plan, with as many tries as it takes.
    pub async fn join(&self) -> Result<Plan> {
        let mut backoff = self.backoff();
        loop {
            match self.join_once().await {
                Err(Error::Wire { source, .. }) if may_pass(&source) => {
                    tokio::time::sleep(backoff.pause()).await;
                }
                outcome => return outcome,
            }
        }
    }

    async fn join_once(&self) -> Result<Plan> {
        let request = JoinRequest { member: self.member(), address: String::new() };
        let outcome = client::answer("Join", self.client.clone().join(request).await);
        let reply =
            self.note(outcome).map_err(|source| Error::Wire { attempt: "joining the job", source })?;
        serde_json::from_str(&reply.plan)
            .map_err(|e| Error::Plan { what: "plan of the job", reason: e.to_string() })
    }

    /// Asks for a task until the master answers. `held` are the leases in hand; `ahead`: it is not needed yet.
    pub async fn lease(&self, held: &[LeaseId], ahead: bool) -> Result<LeaseReply> {
        let held: Vec<_> = held.iter().map(|lease| LeaseNumber { term: lease.term, n: lease.n }).collect();
        let call = |mut client: Client| {
            let request = LeaseRequest { member: self.member(), held: held.clone(), ahead };
            async move { client.lease(request).await }
        };
        self.persist("asking for a task", "Lease", call).await
    }

    /// Reports until the master answers.
    pub async fn report(&self, request: ReportRequest) -> Result<ReportReply> {
        let request = ReportRequest { member: self.member(), ..request };
        let call = |mut client: Client| {
            let request = request.clone();
            async move { client.report(request).await }
        };
        self.persist("reporting on a task", "Report", call).await
    }

    /// Gives a sign of life and waits for something to do.
    pub async fn beat(&self, gauges: &Gauges, command_seen: u64) -> Result<BeatReply> {
        let call = |mut client: Client| {
            let request = BeatRequest { member: self.member(), gauges: gauges.to_json(), command_seen };
            async move { client.beat(request).await }
        };
        self.persist("giving a sign of life", "Beat", call).await
    }

    /// Makes a call until it is answered; a master that does not know us is joined again.
    async fn persist<T, F>(
        &self,
        attempt: &'static str,
        name: &'static str,
        call: impl Fn(Client) -> F,
    ) -> Result<T>
    where
        F: Future<Output = std::result::Result<tonic::Response<T>, tonic::Status>>,
    {
        let mut backoff = self.backoff();
        loop {
            let error = match self.note(client::answer(name, call(self.client.clone()).await)) {
                Ok(answer) => {
                    if backoff.tries() > 1 {
                        info!(attempt, tries = backoff.tries(), "master answers again");
                    }
                    return Ok(answer);
                }
                Err(error) => error,
            };
            if is_unknown_member(&error) {
                info!(attempt, "the master does not know this worker, joining again");
                self.join().await?;
            } else if !may_pass(&error) {
                return Err(Error::Wire { attempt, source: error });
            } else if backoff.tries() == 1 {
                warn!(attempt, %error, "master does not answer");
            }
            // After joining too: a master that forgets us each time is not to be asked without a pause.
            tokio::time::sleep(backoff.pause()).await;
        }
    }

    /// Notes whether it was a master that answered, be it with an error.
    fn note<T>(&self, outcome: elasticdl_wire::Result<T>) -> elasticdl_wire::Result<T> {
        let answered = match &outcome {
            Err(error) => is_unknown_member(error) || !may_pass(error),
            Ok(_) => true,
        };
        if answered {
            self.heard.store(true, Ordering::Relaxed);
        }
        outcome
    }

    fn member(&self) -> Option<Member> {
        Some(self.member)
    }

    fn backoff(&self) -> Backoff {
        Backoff::new(PAUSE_FIRST, PAUSE_LONGEST, u64::from(self.member.id))
    }
}

/// Whether a master that started afresh says "join first".
fn is_unknown_member(error: &WireError) -> bool {
    matches!(error, WireError::Call { status, .. }
        if matches!(status.code(), tonic::Code::NotFound | tonic::Code::FailedPrecondition))
}

/// Whether the same call may be answered later. That includes "internal": it is also what a connection
/// says that broke in the middle of an answer.
fn may_pass(error: &WireError) -> bool {
    let internal = matches!(error, WireError::Call { status, .. } if status.code() == tonic::Code::Internal);
    error.kind() == Kind::Retry || internal
}

/// The master's topology for the threads that pull and push: they block.
pub(crate) struct MasterPlaces {
    pub master: Master,
    pub runtime: tokio::runtime::Handle,
}

impl Places for MasterPlaces {
    fn places(&self) -> elasticdl_wire::Result<Vec<(PartitionId, Place)>> {
        let request = TopologyRequest { member: self.master.member() };
        let mut client = self.master.client.clone();
        let outcome = self.runtime.block_on(client.topology(request));
        match self.master.note(client::answer("Topology", outcome)) {
            // The beat joins again; this thread waits like for any master that is away.
            Err(error) if is_unknown_member(&error) => {
                Err(WireError::io("asking for the topology", std::io::Error::other(error)))
            }
            outcome => Ok(outcome?
                .places
                .into_iter()
                .map(|p| (PartitionId(p.partition), Place { incarnation: p.incarnation, address: p.address }))
                .collect()),
        }
    }
}
