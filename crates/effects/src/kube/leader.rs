//! Leader election with a Lease: one replica runs the controllers, the others serve pages and wait.
//!
//! As in client-go, a lease expires when *this* replica has not seen it change for its duration; clocks of two machines
//! are never compared. Every renewal opens the [`Fence`] for the lease duration, counted from before the request was
//! sent, so it closes before another replica can take over.

use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{
    Api, Client, ResourceExt,
    api::{ObjectMeta, PostParams},
    runtime::{WatchStreamExt, watcher},
};
use tokio_util::sync::CancellationToken;

use crate::fence::Fence;

/// The name of the Lease, in the operator's own namespace.
pub const LEASE: &str = "paddock";

/// Delay before the lease is read again after a failed write.
const WRITE_RETRY: Duration = Duration::from_millis(300);

/// The lease as last seen, and when it was seen by the local clock.
struct ObservedLease {
    lease: Option<Lease>,
    since: Instant,
}

#[derive(Debug, PartialEq, Eq)]
enum LeaseAction {
    /// Acquire or renew the lease, over the observed version.
    Write,
    /// Wait until the lease changes or this instant.
    Wait(Instant),
}

/// The holder of a lease; empty if it is free.
fn holder(seen: &ObservedLease) -> &str {
    let spec = seen.lease.as_ref().and_then(|lease| lease.spec.as_ref());
    spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default()
}

/// The next action of the replica `me`.
fn next_action(seen: &ObservedLease, me: &str, lease_duration: Duration, now: Instant) -> LeaseAction {
    let spec = seen.lease.as_ref().and_then(|lease| lease.spec.as_ref());
    let wait = match holder(seen) {
        "" => Duration::ZERO,
        // Renew three times per duration, so that two failed renewals do not lose the lease.
        holder if holder == me => lease_duration / 3,
        _ => match spec.and_then(|spec| spec.lease_duration_seconds) {
            Some(seconds) => Duration::from_secs(seconds.max(0).cast_unsigned().into()),
            None => lease_duration,
        },
    };
    let due = seen.since + wait;
    if due <= now { LeaseAction::Write } else { LeaseAction::Wait(due) }
}

/// The lease with `me` as the holder, to replace the observed version.
fn with_holder(seen: Option<&Lease>, me: Option<&str>, lease_duration: Duration, now: Timestamp) -> Lease {
    let old = seen.and_then(|lease| lease.spec.clone()).unwrap_or_default();
    let same = old.holder_identity.as_deref() == me;
    Lease {
        metadata: ObjectMeta {
            name: Some(LEASE.into()),
            resource_version: seen.and_then(ResourceExt::resource_version),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: me.map(str::to_owned),
            lease_duration_seconds: Some(lease_duration.as_secs().try_into().unwrap_or(i32::MAX)),
            renew_time: Some(MicroTime(now)),
            acquire_time: if same { old.acquire_time } else { Some(MicroTime(now)) },
            lease_transitions: Some(old.lease_transitions.unwrap_or(0) + i32::from(!same && me.is_some())),
            ..LeaseSpec::default()
        }),
    }
}

pub struct Election {
    pub client: Client,
    pub namespace: String,
    /// Unique per replica and restart: a restarted pod of the same name must not hold the old pod's lease.
    pub identity: String,
    pub duration: Duration,
    pub fence: Fence,
}

impl Election {
    /// Runs the election until `stop`; calls `elected` when the lease is first acquired.
    ///
    /// Returns `Lost` if a held lease is lost. On `stop` it releases a held lease, so that another replica takes over
    /// at once.
    pub async fn run(&self, elected: impl FnOnce(), stop: CancellationToken) -> Result<(), Lost> {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut changes = std::pin::pin!(watcher::watch_object(api.clone(), LEASE).default_backoff());
        let mut seen = tokio::select! {
            () = stop.cancelled() => return Ok(()),
            seen = next_observed(&mut changes) => seen,
        };
        let mut elected = Some(elected);
        loop {
            if elected.is_none() && self.fence.check().is_err() {
                return Err(Lost);
            }
            match next_action(&seen, &self.identity, self.duration, Instant::now()) {
                LeaseAction::Wait(until) => tokio::select! {
                    () = stop.cancelled() => break,
                    () = tokio::time::sleep_until(until.into()) => {}
                    changed = next_observed(&mut changes) => seen = newer(seen, changed),
                },
                LeaseAction::Write => {
                    let sent = Instant::now();
                    let lease = with_holder(seen.lease.as_ref(), Some(&self.identity), self.duration, Timestamp::now());
                    let written = tokio::time::timeout(self.duration / 3, write(&api, &lease)).await;
                    match written {
                        Ok(Ok(lease)) => {
                            self.fence.open_until(sent + self.duration);
                            seen = ObservedLease { lease: Some(lease), since: sent };
                            if let Some(elected) = elected.take() {
                                tracing::info!(identity = self.identity, "lease acquired");
                                elected();
                            }
                        }
                        outcome => {
                            let conflict = matches!(&outcome, Ok(Err(kube::Error::Api(status)))
                                if status.is_conflict() || status.is_already_exists());
                            if conflict && elected.is_none() && !self.still_ours(&api).await {
                                self.fence.close();
                                return Err(Lost);
                            }
                            if !conflict {
                                let error = match outcome {
                                    Ok(written) => written.err().map(|error| error.to_string()).unwrap_or_default(),
                                    Err(_) => "no answer in time".to_owned(),
                                };
                                tracing::warn!(error, "lease write failed");
                            }
                            // Get the current lease, from the watch or with a read.
                            tokio::select! {
                                () = stop.cancelled() => break,
                                changed = next_observed(&mut changes) => seen = newer(seen, changed),
                                () = tokio::time::sleep(WRITE_RETRY) => if let Ok(lease) = api.get_opt(LEASE).await {
                                    seen = newer(seen, ObservedLease { lease, since: Instant::now() });
                                },
                            }
                            // Renew our own lease at once, before the fence closes.
                            if holder(&seen) == self.identity {
                                seen.since = sent.checked_sub(self.duration).unwrap_or(sent);
                            }
                        }
                    }
                }
            }
        }
        if elected.is_none() {
            self.fence.close();
            let released = with_holder(seen.lease.as_ref(), None, self.duration, Timestamp::now());
            match write(&api, &released).await {
                Ok(_) => tracing::info!("lease released"),
                Err(error) => tracing::warn!(%error, "lease release failed; it will expire"),
            }
        }
        Ok(())
    }

    async fn still_ours(&self, api: &Api<Lease>) -> bool {
        match api.get(LEASE).await {
            Ok(lease) => lease.spec.and_then(|spec| spec.holder_identity).as_deref() == Some(&self.identity),
            Err(_) => false,
        }
    }
}

/// A held lease was lost.
#[derive(Debug, thiserror::Error)]
#[error("the lease was lost; this replica stops at once and starts over as a follower")]
pub struct Lost;

async fn write(api: &Api<Lease>, lease: &Lease) -> kube::Result<Lease> {
    match lease.metadata.resource_version {
        Some(_) => api.replace(LEASE, &PostParams::default(), lease).await,
        None => api.create(&PostParams::default(), lease).await,
    }
}

async fn next_observed(changes: &mut (impl Stream<Item = watcher::Result<Option<Lease>>> + Unpin)) -> ObservedLease {
    loop {
        match changes.next().await {
            Some(Ok(lease)) => return ObservedLease { lease, since: Instant::now() },
            Some(Err(error)) => tracing::warn!(%error, "lease watch failed"),
            None => std::future::pending().await,
        }
    }
}

/// The watch also delivers our own writes, late: those must not count as changes. Versions grow; times need not, because
/// the holder's clock may be set back.
fn newer(old: ObservedLease, new: ObservedLease) -> ObservedLease {
    let version = |seen: &ObservedLease| seen.lease.as_ref().and_then(ResourceExt::resource_version);
    let stale = match (version(&old), version(&new)) {
        (Some(old), Some(new)) => match (old.parse::<u64>(), new.parse::<u64>()) {
            (Ok(old), Ok(new)) => new <= old,
            (Ok(_) | Err(_), Err(_)) | (Err(_), Ok(_)) => new == old,
        },
        (None, None) => true,
        (None, Some(_)) | (Some(_), None) => false,
    };
    if stale { old } else { new }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE_DURATION: Duration = Duration::from_secs(15);

    fn seen(holder: Option<&str>, since: Instant) -> ObservedLease {
        ObservedLease { lease: Some(with_holder(None, holder, LEASE_DURATION, Timestamp::UNIX_EPOCH)), since }
    }

    #[test]
    fn a_free_lease_is_taken_at_once() {
        let now = Instant::now();
        assert_eq!(next_action(&seen(None, now), "a", LEASE_DURATION, now), LeaseAction::Write);
        assert_eq!(next_action(&seen(Some(""), now), "a", LEASE_DURATION, now), LeaseAction::Write);
        assert_eq!(
            next_action(&ObservedLease { lease: None, since: now }, "a", LEASE_DURATION, now),
            LeaseAction::Write
        );
    }

    #[test]
    fn our_own_lease_is_renewed_after_a_third_of_its_duration() {
        let now = Instant::now();
        assert_eq!(
            next_action(&seen(Some("a"), now), "a", LEASE_DURATION, now),
            LeaseAction::Wait(now + LEASE_DURATION / 3)
        );
        assert_eq!(
            next_action(&seen(Some("a"), now), "a", LEASE_DURATION, now + LEASE_DURATION / 3),
            LeaseAction::Write
        );
    }

    #[test]
    fn anothers_lease_is_taken_only_if_unchanged_for_its_whole_duration() {
        let now = Instant::now();
        let other = seen(Some("b"), now);
        assert_eq!(
            next_action(&other, "a", LEASE_DURATION, now + LEASE_DURATION - Duration::from_millis(1)),
            LeaseAction::Wait(now + LEASE_DURATION)
        );
        assert_eq!(next_action(&other, "a", LEASE_DURATION, now + LEASE_DURATION), LeaseAction::Write);
    }

    #[test]
    fn a_lease_is_newer_by_its_version_whatever_the_clock_of_its_holder_says() {
        let (start, now) = (Instant::now(), Instant::now());
        let lease = |version: &str, second, since| {
            let mut lease = with_holder(None, Some("b"), LEASE_DURATION, Timestamp::from_second(second).unwrap());
            lease.metadata.resource_version = Some(version.into());
            ObservedLease { lease: Some(lease), since }
        };
        let is_new = |version, second| newer(lease("99", 500, start), lease(version, second, now)).since == now;
        assert!(is_new("100", 501) && is_new("100", 200), "its clock was set back by five minutes");
        assert!(!is_new("98", 501) && !is_new("99", 501), "it comes late");
        let gone = || ObservedLease { lease: None, since: now };
        assert!(newer(lease("99", 500, start), gone()).lease.is_none());
    }

    #[test]
    fn transitions_count_holder_changes_and_a_release_clears_the_holder() {
        let first = with_holder(None, Some("a"), LEASE_DURATION, Timestamp::UNIX_EPOCH);
        let renewed = with_holder(Some(&first), Some("a"), LEASE_DURATION, Timestamp::UNIX_EPOCH);
        let released = with_holder(Some(&renewed), None, LEASE_DURATION, Timestamp::UNIX_EPOCH);
        let taken = with_holder(Some(&released), Some("b"), LEASE_DURATION, Timestamp::UNIX_EPOCH);
        let count = |lease: &Lease| lease.spec.as_ref().unwrap().lease_transitions;
        assert_eq!([&first, &renewed, &released, &taken].map(count), [Some(1), Some(1), Some(1), Some(2)]);
        assert_eq!(released.spec.unwrap().holder_identity, None);
    }
}
