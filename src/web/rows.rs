//! What the dashboards show, as plain values.

use std::collections::BTreeMap;

use jiff::Timestamp;
use kube::ResourceExt;
use paddock_core::api::{ClaimPhase, Failure, READY, RunnerClaim, RunnerPool, Worker, WorkerCounts};
use serde::Serialize;

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimRow {
    pub namespace: String,
    pub name: String,
    pub pool: String,
    pub phase: ClaimPhase,
    pub progress: String,
    pub run_id: String,
    pub repository: Option<String>,
    pub labels: Vec<String>,
    pub job_url: Option<String>,
    pub created: Option<Timestamp>,
    pub reason: Option<String>,
    pub message: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkerRow {
    pub namespace: String,
    pub name: String,
    pub pool: String,
    pub state: Option<&'static str>,
    pub claim: Option<String>,
    pub run_id: Option<String>,
    pub location: Option<String>,
    pub created: Option<Timestamp>,
    pub failure: Option<Box<Failure>>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolRow {
    pub namespace: String,
    pub name: String,
    pub ready: bool,
    pub message: String,
    pub workers: WorkerCounts,
    pub slots: Option<String>,
}

/// Pending and running claims, grouped by owner and labels.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UsageRow {
    pub entity: String,
    pub labels: Vec<String>,
    pub claims: BTreeMap<&'static str, u32>,
    pub workers: BTreeMap<&'static str, u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Usage {
    pub pools: Vec<PoolRow>,
    pub groups: Vec<UsageRow>,
}

pub fn claim(claim: &RunnerClaim) -> ClaimRow {
    let status = claim.status.clone().unwrap_or_default();
    let condition = status.conditions.into_iter().find(|condition| condition.type_ == READY);
    ClaimRow {
        namespace: claim.namespace().unwrap_or_default(),
        name: claim.name_any(),
        pool: status.pool.or_else(|| claim.spec.pool.clone()).unwrap_or_default(),
        phase: status.phase.unwrap_or_default(),
        progress: format!("{}/{}", status.ready, claim.spec.count),
        run_id: claim.spec.run_id.clone(),
        repository: claim.spec.repository.clone(),
        labels: claim.spec.labels.clone().unwrap_or_default(),
        job_url: claim.spec.job.as_ref().and_then(|job| job.url.clone()),
        created: created(claim),
        reason: condition.as_ref().map(|condition| condition.reason.clone()),
        message: condition.map(|condition| condition.message),
    }
}

/// Claims by status, the newest first within each.
pub fn history<'a>(claims: impl IntoIterator<Item = &'a RunnerClaim>) -> Vec<ClaimRow> {
    let mut rows: Vec<_> = claims.into_iter().map(claim).collect();
    rows.sort_by(|a, b| {
        (a.phase, std::cmp::Reverse(a.created), &a.name).cmp(&(b.phase, std::cmp::Reverse(b.created), &b.name))
    });
    rows
}

/// Workers, the newest first.
pub fn workers<'a>(workers: impl IntoIterator<Item = &'a Worker>) -> Vec<WorkerRow> {
    let row = |worker: &Worker| {
        let status = worker.status.clone().unwrap_or_default();
        WorkerRow {
            namespace: worker.namespace().unwrap_or_default(),
            name: worker.name_any(),
            pool: worker.spec.pool.clone(),
            state: status.state.map(|state| state.as_str()),
            claim: status.claim,
            run_id: status.run_id,
            location: status.location,
            created: created(worker),
            failure: status.failure,
        }
    };
    let mut rows: Vec<_> = workers.into_iter().map(row).collect();
    rows.sort_by(|a, b| (std::cmp::Reverse(a.created), &a.name).cmp(&(std::cmp::Reverse(b.created), &b.name)));
    rows
}

pub fn pool(pool: &RunnerPool) -> PoolRow {
    let status = pool.status.clone().unwrap_or_default();
    let condition = status.conditions.iter().find(|condition| condition.type_ == READY);
    PoolRow {
        namespace: pool.namespace().unwrap_or_default(),
        name: pool.name_any(),
        ready: condition.is_some_and(|condition| condition.status == "True"),
        message: condition.map_or("not reconciled yet".into(), |condition| condition.message.clone()),
        workers: status.workers,
        slots: status.slots.map(|slots| slots.summary),
    }
}

/// Current usage. A worker belongs to the group of its claim.
pub fn usage(pools: &[&RunnerPool], claims: &[&RunnerClaim], workers: &[&Worker]) -> Usage {
    let mut groups: BTreeMap<(String, Vec<String>), UsageRow> = BTreeMap::new();
    let mut group_of = BTreeMap::new();
    for claim in claims {
        let key = group(claim);
        group_of.insert((claim.namespace(), claim.name_any()), key.clone());
        let phase = claim.status.as_ref().and_then(|status| status.phase).unwrap_or_default();
        if !phase.is_over() {
            *row(&mut groups, key).claims.entry(phase.as_str()).or_default() += 1;
        }
    }
    for worker in workers {
        let status = worker.status.clone().unwrap_or_default();
        let (Some(state), Some(claim)) = (status.state, status.claim) else { continue };
        if let (false, Some(key)) = (state.is_over(), group_of.get(&(worker.namespace(), claim))) {
            *row(&mut groups, key.clone()).workers.entry(state.as_str()).or_default() += 1;
        }
    }
    let mut pools: Vec<_> = pools.iter().map(|object| pool(object)).collect();
    pools.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    Usage { pools, groups: groups.into_values().collect() }
}

fn row(groups: &mut BTreeMap<(String, Vec<String>), UsageRow>, key: (String, Vec<String>)) -> &mut UsageRow {
    groups.entry(key.clone()).or_insert_with(|| UsageRow {
        entity: key.0,
        labels: key.1,
        claims: BTreeMap::new(),
        workers: BTreeMap::new(),
    })
}

/// The display name of a claim's owner, and the labels it requests; a claim on an EC2 pool has its run ID instead.
fn group(claim: &RunnerClaim) -> (String, Vec<String>) {
    let spec = &claim.spec;
    let owner = spec.owner.as_ref().map(|owner| owner.login.clone());
    let entity = owner.or_else(|| spec.repository.clone()).unwrap_or_else(|| claim.namespace().unwrap_or_default());
    let mut labels = spec.labels.clone().unwrap_or_else(|| vec![spec.run_id.clone()]);
    labels.sort();
    (entity, labels)
}

fn created(object: &impl ResourceExt) -> Option<Timestamp> {
    object.creation_timestamp().map(|time| time.0)
}
