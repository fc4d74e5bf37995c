//! Removes runners at GitHub that have no machine or worker any more, and finds machines whose agent is silent.
//!
//! Machines are checked one by one, by name. Board runners come from the lists that `boards::github_poll` reads anyway.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use kube::{Api, ResourceExt, api::ListParams};
use paddock_core::{
    api::{Ec2Pool, RunnerPool, Worker},
    boards::{slots::is_active, worker::holds_runner},
    demand::quota::Scope,
    ec2::machine::Machine,
    names::PoolKey,
    stale_runner::{Listed, Verdict, is_doubtful, verdict, without_worker},
};
use paddock_effects::{
    github::{KnownRunner, Removal, credentials::Credentials},
    kube::objects::KubeError,
    lock,
};
use paddock_record::{Instance, transition};
use tokio_util::sync::CancellationToken;

use super::{Error, Shared, boards::BoardContext, ec2::Ec2Context, every, reference};

/// How often machines are checked; GitHub takes about as long to mark a runner as offline.
const CHECK_PERIOD: Duration = Duration::from_secs(30);
/// Machines checked in one pass, so that the end of a whole fleet does not exhaust GitHub's rate limit.
const MAX_CHECKS_PER_PASS: usize = 10;
/// Runners removed per list, so that a wrong list cannot remove every runner.
const MAX_REMOVALS_PER_LIST: usize = 20;

pub async fn run(context: Arc<Ec2Context>, stop: CancellationToken) {
    // The last machine of the previous pass: machines that stay doubtful must not starve the others.
    let last = Mutex::new(String::new());
    every("stale-runners", CHECK_PERIOD, context.shared.metrics.clone(), stop, || check_doubtful(&context, &last))
        .await;
}

async fn check_doubtful(context: &Ec2Context, last: &Mutex<String>) -> Result<(), Error> {
    let doubtful = |(pool, machine): &(Arc<RunnerPool>, Machine)| {
        pool.spec.ec2.as_ref().is_some_and(|ec2| is_doubtful(machine, &ec2.timeouts))
    };
    let all = context.ledger.all().into_iter();
    let with_pool = all.filter_map(|machine| Some((pool_of(context, &machine.record)?, machine)));
    let mut machines: Vec<_> = with_pool.filter(doubtful).collect();
    let after = lock(last).clone();
    machines.sort_by_key(|(_, machine)| (machine.record.instance_id <= after, machine.record.instance_id.clone()));
    for (pool, machine) in machines.into_iter().take(MAX_CHECKS_PER_PASS) {
        let id = machine.record.instance_id.clone();
        if let Err(error) = check(context, &pool, &machine).await {
            tracing::warn!(instance = id, %error, "runner not checked at GitHub");
        }
        *lock(last) = id;
    }
    Ok(())
}

fn pool_of(context: &Ec2Context, record: &Instance) -> Option<Arc<RunnerPool>> {
    let key = PoolKey::parse(&record.pool)?;
    context.shared.stores.pools.store.get(&reference(&key.namespace, &key.name))
}

async fn check(context: &Ec2Context, pool: &RunnerPool, machine: &Machine) -> Result<(), Error> {
    let Some(ec2) = &pool.spec.ec2 else { return Ok(()) };
    let (record, scope) = (&machine.record, scope(ec2));
    let namespace = pool.namespace().unwrap_or_default();
    let credentials = context.shared.credentials.get_or_last(&namespace, &ec2.github.credentials_ref.name).await?;
    let runner = context.shared.github.runner_by_name(&credentials, &scope, &record.instance_id).await?;
    match verdict(machine, runner.as_ref().map(listed)) {
        Verdict::Leave => {}
        Verdict::Delete(id) => {
            remove(&context.shared, &credentials, &scope, &record.instance_id, Some(id)).await?;
        }
        Verdict::Settled => context.note_runner_gone(record).await?,
        Verdict::End(reason, why) => context.end_instance(&record.instance_id, reason, &why).await?,
    }
    Ok(())
}

/// Removes the runner that an ended machine of a deleted pool may have left: no later pass would find it. One attempt
/// only, because the credentials may be deleted already and must not block the pool's deletion.
pub async fn remove_last(context: &Ec2Context, pool: &Ec2Pool, record: &Instance) {
    if record.run_id.is_empty() && record.leaving.is_empty() {
        return;
    }
    let Some(PoolKey { namespace, .. }) = PoolKey::parse(&record.pool) else { return };
    let removed = async {
        let credentials = context.shared.credentials.get_or_last(&namespace, &pool.github.credentials_ref.name).await?;
        remove(&context.shared, &credentials, &scope(pool), &record.instance_id, None).await
    };
    match removed.await {
        Ok(Removal::Deleted | Removal::Gone) => {}
        Ok(Removal::Busy) => tracing::warn!(runner = record.instance_id, "busy runner is left at GitHub"),
        Err(error) => tracing::warn!(runner = record.instance_id, %error, "runner may be left at GitHub"),
    }
}

/// Removes a runner by its id, or by its name where the id is not known. GitHub refuses if it is busy.
async fn remove(
    shared: &Shared,
    credentials: &Credentials,
    scope: &Scope,
    name: &str,
    id: Option<i64>,
) -> Result<Removal, Error> {
    let removal = match id {
        Some(id) => shared.github.delete_runner(credentials, scope, id).await?,
        None => shared.github.remove_runner(credentials, scope, name).await?,
    };
    match removal {
        Removal::Deleted => tracing::info!(runner = name, %scope, "stale runner removed"),
        Removal::Gone => {}
        Removal::Busy => tracing::info!(runner = name, %scope, "stale runner not removed: it is busy"),
    }
    Ok(removal)
}

/// Removes our runners that have no worker.
pub async fn remove_without_worker(
    board: &BoardContext,
    credentials: &Credentials,
    scope: &Scope,
    runners: &[KnownRunner],
) -> Result<(), Error> {
    let workers = board.all_workers();
    let live = workers.iter().filter(|worker| has_runner(worker)).map(|worker| worker.name_any());
    let live: HashSet<_> = live.collect();
    let listed = runners.iter().map(|runner| (runner.name.as_str(), listed(runner)));
    let stale = without_worker(listed, &board.prefix, |name| live.contains(name));
    for (name, id) in stale.into_iter().take(MAX_REMOVALS_PER_LIST) {
        // The cache may be stale, so ask the API server.
        let has_worker = worker_exists(&board.shared, &name).await;
        if !has_worker.map_err(KubeError::new("cannot list Workers"))? {
            remove(&board.shared, credentials, scope, &name, Some(id)).await?;
        }
    }
    Ok(())
}

fn has_runner(worker: &Worker) -> bool {
    is_active(worker) || holds_runner(worker)
}

async fn worker_exists(shared: &Shared, name: &str) -> kube::Result<bool> {
    let client = shared.client.clone();
    let api: Api<Worker> = match &shared.settings.namespace {
        Some(namespace) => Api::namespaced(client, namespace),
        None => Api::all(client),
    };
    let found = api.list(&ListParams::default().fields(&format!("metadata.name={name}"))).await?;
    Ok(found.items.iter().any(has_runner))
}

fn listed(runner: &KnownRunner) -> Listed {
    Listed { id: runner.id, online: runner.status == "online", busy: runner.busy }
}

impl Ec2Context {
    /// Records that an ended machine has no runner at GitHub any more.
    async fn note_runner_gone(&self, record: &Instance) -> Result<(), Error> {
        self.ledger.apply(transition::runner_gone(record).into_iter().collect()).await?;
        Ok(())
    }
}

/// Where a pool's runners are registered.
pub fn scope(pool: &Ec2Pool) -> Scope {
    let owner = pool.github.owner.clone();
    match &pool.github.repository {
        Some(name) => Scope::Repository { owner, name: name.clone() },
        None => Scope::Organization(owner),
    }
}
