//! The claims that wait for machines of a pool: whether one is next, and when to reconcile it.

use std::{sync::Arc, time::Duration};

use futures::{StreamExt, channel::mpsc::UnboundedSender};
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use paddock_core::{
    api::{ClaimPhase, ClaimReason, Ec2Pool, READY, RunnerClaim, RunnerClaimStatus, RunnerPool},
    ec2::{
        claim::claim_ref,
        requirements::Requirements,
        waiting_line::{Admission, OpenClaim, Stock, admit, admit_last},
    },
    names::PoolKey,
};
use paddock_effects::clock;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::Ec2Context;
use crate::controllers::reference;

/// How long changes are batched before the lines are checked.
const CHANGE_WINDOW: Duration = Duration::from_millis(50);

/// Enqueues waiting claims that can be served, until `stop`.
pub async fn watch(
    context: Arc<Ec2Context>,
    admitted: UnboundedSender<ObjectRef<RunnerClaim>>,
    stop: CancellationToken,
) {
    let changed = Notify::new();
    let claims = context.shared.stores.claims.stream().for_each(async |_| changed.notify_one());
    let mut ledger = context.ledger.changes();
    let work = async {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = changed.notified() => {}
                Ok(()) = ledger.changed() => {}
            }
            for claim in context.admitted() {
                // There is no receiver while the controllers stop.
                let _ = admitted.unbounded_send(ObjectRef::from_obj(&*claim));
            }
            tokio::time::sleep(CHANGE_WINDOW).await;
        }
    };
    tokio::select! {
        () = claims => {}
        () = work => {}
    }
}

impl Ec2Context {
    /// Whether a claim can have the machines that it misses. `status` may be ahead of the one that was written;
    /// `exhausted`: the pool's idle machines do not count.
    pub fn admission(
        &self,
        claim: &RunnerClaim,
        status: &RunnerClaimStatus,
        pool: Option<&RunnerPool>,
        exhausted: bool,
    ) -> Admission {
        let Some((pool, spec)) = pool.and_then(|pool| Some((pool, pool.spec.ec2.as_ref()?))) else {
            return Ok(Vec::new());
        };
        let (key, now) = (PoolKey::of(pool), clock::now());
        let Some(own) = self.open_claim(&key, claim, Some(status), spec, now).filter(|own| own.missing > 0) else {
            return Ok(Vec::new());
        };
        let older = self.open_claims(&key).into_iter().take_while(|other| age(other) < age(claim));
        let mut line: Vec<_> = older
            .filter_map(|other| self.open_claim(&key, &other, other.status.as_ref(), spec, now))
            .filter(|other| other.missing > 0)
            .collect();
        line.push(own);
        let token = status.fleet.as_ref().map_or("", |order| order.client_token.as_str());
        self.with_stock(&key, spec, token, exhausted, now, |stock| admit_last(&line, stock, now))
    }

    /// The claims that wait for room, and can have it now.
    fn admitted(&self) -> Vec<Arc<RunnerClaim>> {
        let is_waiting = |claim: &RunnerClaim| is_open(claim) && waits_for_room(claim);
        let stores = &self.shared.stores;
        let waiting = stores.claims.store.state_filter(is_waiting);
        let mut pools: Vec<_> = waiting.iter().filter_map(|claim| pool_key(claim)).collect();
        pools.sort();
        pools.dedup();
        let mut admitted = Vec::new();
        for key in pools {
            let Some(pool) = stores.pools.store.get(&reference::<RunnerPool>(&key.namespace, &key.name)) else {
                continue;
            };
            let Some(spec) = &pool.spec.ec2 else { continue };
            admitted.extend(self.admitted_of(&key, spec));
        }
        admitted
    }

    fn admitted_of(&self, key: &PoolKey, spec: &Ec2Pool) -> Vec<Arc<RunnerClaim>> {
        let now = clock::now();
        let line = self.open_claims(key).into_iter().filter_map(|claim| {
            let open = self.open_claim(key, &claim, claim.status.as_ref(), spec, now);
            open.filter(|open| open.missing > 0).map(|open| (claim, open))
        });
        let (claims, line): (Vec<_>, Vec<_>) = line.unzip();
        let admissions = self.with_stock(key, spec, "", false, now, |stock| admit(&line, stock, now));
        let admitted = claims.into_iter().zip(admissions).filter(|(_, admission)| admission.is_ok());
        admitted.map(|(claim, _)| claim).filter(|claim| waits_for_room(claim)).collect()
    }

    /// The claims on the pool that still want machines, oldest first.
    fn open_claims(&self, key: &PoolKey) -> Vec<Arc<RunnerClaim>> {
        let mut claims = self.shared.stores.claims.store.state_filter(|claim| is_of(claim, key) && is_open(claim));
        claims.sort_by(|one, other| age(one).cmp(&age(other)));
        claims
    }

    fn open_claim(
        &self,
        key: &PoolKey,
        claim: &RunnerClaim,
        status: Option<&RunnerClaimStatus>,
        spec: &Ec2Pool,
        now: Timestamp,
    ) -> Option<OpenClaim> {
        let fleet = status.and_then(|status| status.fleet.as_ref());
        let open_order = fleet.filter(|order| order.instance_ids.is_empty());
        let ordered = open_order.map_or(0, |order| order.requested);
        let held = self.ledger.count_held(key, claim_ref(claim));
        Some(OpenClaim {
            name: claim.metadata.name.clone().unwrap_or_default(),
            needs: Requirements::of(&claim.spec, &key.namespace, spec)?,
            missing: claim.spec.count.saturating_sub(held).saturating_sub(ordered),
            since: status.and_then(|status| status.phase_times.of(ClaimPhase::Pending)).map_or(now, |time| time.0),
        })
    }

    /// `token`: of the order whose machines do not count.
    fn with_stock<T>(
        &self,
        key: &PoolKey,
        spec: &Ec2Pool,
        token: &str,
        exhausted: bool,
        now: Timestamp,
        read: impl FnOnce(Stock) -> T,
    ) -> T {
        let live = self.launch_room.used(key, token, &self.limits(key, spec.max_instances));
        let (capacity, subnets) = (self.capacity_memory().clone(), self.pools.subnets(key, spec));
        self.ledger.read_pool(key, |machines| {
            let idle = machines.filter(|machine| machine.is_claimable(now)).map(|machine| &machine.record).collect();
            read(Stock { spec, idle, exhausted, live, capacity: &capacity, subnets: &subnets })
        })
    }
}

/// Oldest first, in an order that every leader agrees on.
fn age(claim: &RunnerClaim) -> (Option<Timestamp>, Option<&str>) {
    let created = claim.metadata.creation_timestamp.as_ref().map(|time| time.0);
    (created, claim.metadata.name.as_deref())
}

/// Whether the claim is on this pool.
pub fn is_of(claim: &RunnerClaim, pool: &PoolKey) -> bool {
    claim.metadata.namespace.as_ref() == Some(&pool.namespace) && claim.spec.pool.as_ref() == Some(&pool.name)
}

fn pool_key(claim: &RunnerClaim) -> Option<PoolKey> {
    Some(PoolKey::new(claim.metadata.namespace.as_ref()?, claim.spec.pool.as_ref()?))
}

/// Whether the claim still wants machines.
fn is_open(claim: &RunnerClaim) -> bool {
    use ClaimPhase::{Claiming, Creating, Pending, Validating};
    let phase = claim.status.as_ref().and_then(|status| status.phase).unwrap_or_default();
    claim.metadata.deletion_timestamp.is_none() && matches!(phase, Pending | Claiming | Creating | Validating)
}

fn waits_for_room(claim: &RunnerClaim) -> bool {
    let conditions = claim.status.iter().flat_map(|status| &status.conditions);
    conditions
        .filter(|condition| condition.type_ == READY)
        .any(|condition| condition.reason == ClaimReason::PoolFull.as_str())
}
