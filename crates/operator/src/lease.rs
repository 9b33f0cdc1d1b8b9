//! One operator at a time: a Lease of the cluster says which.
//!
//! [`claim`] decides and is pure; [`Lead`] is the edge. Clocks of several machines are not compared: one that
//! waits looks whether the lease was renewed since it last looked, by its own clock. Whoever cannot renew ends
//! before another one would take over.

#![expect(clippy::disallowed_methods, reason = "an edge: it reads the clock and waits")]

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tracing::{info, warn};

use crate::error::{Error, Result};

/// The lease.
pub const NAME: &str = "elasticdl-operator";
/// One that is not renewed for so long is free.
const LIFE: Duration = Duration::from_secs(15);
/// Whoever holds it and could not renew it for so long ends.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks or renewals.
const BEAT: Duration = Duration::from_secs(3);

/// What to do about the lease.
#[derive(Debug, PartialEq)]
enum Claim {
    /// Nobody has made it yet.
    Make,
    /// Ours: renew it.
    Renew,
    /// Free, or its holder was not heard of for long: take it.
    Take,
    /// Another one leads.
    Wait,
}

/// What is known of the lease: how it looked, and for how long it has looked like that.
#[derive(Debug, Default)]
struct Looked {
    renewed: Option<MicroTime>,
    holder: Option<String>,
    since: Option<Instant>,
}

fn claim(lease: Option<&LeaseSpec>, me: &str, looked: &mut Looked, now: Instant) -> Claim {
    let Some(lease) = lease else { return Claim::Make };
    let holder = lease.holder_identity.as_deref().unwrap_or_default();
    if holder == me {
        return Claim::Renew;
    }
    if holder.is_empty() {
        return Claim::Take;
    }
    if looked.since.is_none()
        || looked.renewed != lease.renew_time
        || looked.holder.as_deref() != Some(holder)
    {
        *looked = Looked { renewed: lease.renew_time.clone(), holder: Some(holder.into()), since: Some(now) };
    }
    let life = lease.lease_duration_seconds.map_or(LIFE, |s| Duration::from_secs(s.max(1) as u64));
    let unseen = looked.since.map_or(Duration::ZERO, |since| now.duration_since(since));
    if unseen > life { Claim::Take } else { Claim::Wait }
}

/// Whoever leads, for as long as it does.
#[derive(Debug)]
pub struct Lead {
    leases: Api<Lease>,
    me: String,
}

impl Lead {
    /// Waits until this process leads. `me` is its name, which no other process has.
    pub async fn gain(client: Client, namespace: &str, me: String) -> Lead {
        let lead = Lead { leases: Api::namespaced(client, namespace), me };
        let mut looked = Looked::default();
        loop {
            match lead.step(&mut looked).await {
                Ok(true) => {
                    info!(me = lead.me, "this operator leads");
                    return lead;
                }
                Ok(false) => {}
                Err(error) => warn!(error = error.chain(), "the lease cannot be had"),
            }
            tokio::time::sleep(BEAT).await;
        }
    }

    /// Renews the lease; returns when it is lost.
    pub async fn keep(&self) {
        let (mut looked, mut renewed) = (Looked::default(), Instant::now());
        loop {
            tokio::time::sleep(BEAT).await;
            match tokio::time::timeout(PATIENCE / 2, self.step(&mut looked)).await {
                Ok(Ok(true)) => renewed = Instant::now(),
                Ok(Ok(false)) => return,
                Ok(Err(error)) => warn!(error = error.chain(), "the lease was not renewed"),
                Err(_) => warn!("renewing the lease takes long"),
            }
            if renewed.elapsed() > PATIENCE {
                return;
            }
        }
    }

    /// Gives the lease back, so that the next one need not wait for it to end.
    pub async fn release(&self) {
        if let Ok(Some(mut lease)) = self.leases.get_opt(NAME).await
            && let Some(spec) = &mut lease.spec
            && spec.holder_identity.as_deref() == Some(&self.me)
        {
            spec.holder_identity = None;
            // Nobody depends on it: the lease ends by itself.
            let _ = self.leases.replace(NAME, &PostParams::default(), &lease).await;
        }
    }

    /// Whether this process has the lease after one look at it.
    async fn step(&self, looked: &mut Looked) -> Result<bool> {
        let lease = self.leases.get_opt(NAME).await.map_err(Error::api("reading the operator's lease"))?;
        let spec = lease.as_ref().and_then(|lease| lease.spec.as_ref());
        let outcome = match claim(spec, &self.me, looked, Instant::now()) {
            Claim::Wait => return Ok(false),
            Claim::Make => {
                let metadata = ObjectMeta { name: Some(NAME.into()), ..ObjectMeta::default() };
                let lease = Lease { metadata, spec: Some(self.taken(None)) };
                self.leases.create(&PostParams::default(), &lease).await
            }
            Claim::Take | Claim::Renew => {
                let mut lease = lease.unwrap_or_default();
                lease.spec = Some(self.taken(lease.spec.take()));
                // It carries the version that was read: of two that take it, one is refused.
                self.leases.replace(NAME, &PostParams::default(), &lease).await
            }
        };
        match outcome {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(Error::api("taking the operator's lease")(error)),
        }
    }

    /// The lease in our hands.
    fn taken(&self, before: Option<LeaseSpec>) -> LeaseSpec {
        let now = Some(MicroTime(Timestamp::now()));
        let before = before.unwrap_or_default();
        let ours = before.holder_identity.as_deref() == Some(&self.me);
        LeaseSpec {
            holder_identity: Some(self.me.clone()),
            lease_duration_seconds: Some(LIFE.as_secs() as i32),
            acquire_time: if ours { before.acquire_time } else { now.clone() },
            renew_time: now,
            lease_transitions: Some(before.lease_transitions.unwrap_or(0) + i32::from(!ours)),
            ..LeaseSpec::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: &str, renewed: i64) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(holder.into()),
            renew_time: Some(MicroTime(Timestamp::from_second(renewed).unwrap())),
            lease_duration_seconds: Some(15),
            ..LeaseSpec::default()
        }
    }

    #[test]
    fn a_lease_is_taken_when_it_was_not_renewed_for_its_life_by_our_own_clock() {
        let (mut looked, start) = (Looked::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        // Its times say that it is long over; the clock of its holder may be wrong.
        assert_eq!(claim(Some(&lease("a", 1)), "b", &mut looked, after(0)), Claim::Wait);
        assert_eq!(claim(Some(&lease("a", 1)), "b", &mut looked, after(14)), Claim::Wait);
        assert_eq!(claim(Some(&lease("a", 2)), "b", &mut looked, after(15)), Claim::Wait, "renewed");
        assert_eq!(claim(Some(&lease("a", 2)), "b", &mut looked, after(30)), Claim::Wait);
        assert_eq!(claim(Some(&lease("c", 2)), "b", &mut looked, after(31)), Claim::Wait, "another holder");
        assert_eq!(claim(Some(&lease("c", 2)), "b", &mut looked, after(47)), Claim::Take);
    }

    #[test]
    fn ours_is_renewed_and_a_free_one_is_taken_at_once() {
        let (mut looked, now) = (Looked::default(), Instant::now());
        assert_eq!(claim(None, "b", &mut looked, now), Claim::Make);
        assert_eq!(claim(Some(&lease("b", 1)), "b", &mut looked, now), Claim::Renew);
        assert_eq!(claim(Some(&lease("", 1)), "b", &mut looked, now), Claim::Take);
        assert_eq!(claim(Some(&LeaseSpec::default()), "b", &mut looked, now), Claim::Take);
    }
}
