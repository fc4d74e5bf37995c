//! Runners at GitHub whose machine is gone, and machines that are silent: once in a while GitHub is asked by name.

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use jiff::Timestamp;
use paddock_record::{Instance, State};
use tokio_util::sync::CancellationToken;

use super::{Context, reference};
use crate::{
    api::{Ec2Pool, RunnerPool},
    effects::github::{Removal, Scope},
    plan::{
        instance::Tracked,
        registration::{Listed, Verdict, is_doubtful, verdict},
    },
};

/// How often machines are gone through; GitHub takes about as long to see that a runner is gone.
const ROUND: Duration = Duration::from_secs(30);
/// Machines asked about in one round, so that a fleet that ended at once does not spend GitHub's patience.
const PER_ROUND: usize = 10;

pub async fn run(context: Arc<Context>, stop: CancellationToken) {
    // Where the last round stopped: those that stay doubtful must not keep the others from their turn.
    let mut after = String::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(ROUND) => {}
        }
        let mut doubtful: Vec<_> = context
            .ledger
            .all()
            .into_iter()
            .filter_map(|tracked| Some((pool_of(&context, &tracked.record)?, tracked)))
            .filter(|(pool, tracked)| pool.spec.ec2.as_ref().is_some_and(|ec2| is_doubtful(tracked, &ec2.timeouts)))
            .collect();
        doubtful.sort_by_key(|(_, tracked)| (tracked.record.instance_id <= after, tracked.record.instance_id.clone()));
        for (pool, tracked) in doubtful.into_iter().take(PER_ROUND) {
            let id = tracked.record.instance_id.clone();
            if let Err(error) = check(&context, &pool, &tracked).await {
                tracing::warn!(instance = id, %error, "GitHub cannot be asked about a runner");
            }
            after = id;
        }
    }
}

fn pool_of(context: &Context, record: &Instance) -> Option<Arc<RunnerPool>> {
    let (namespace, name) = record.pool.split_once('/')?;
    context.stores.pools.store.get(&reference(namespace, name))
}

async fn check(context: &Context, pool: &RunnerPool, tracked: &Tracked) -> Result<()> {
    let Some(ec2) = &pool.spec.ec2 else { return Ok(()) };
    let (record, scope) = (&tracked.record, scope(ec2));
    let namespace = record.pool.split_once('/').map_or("", |(namespace, _)| namespace);
    let credentials = context.credentials.get_or_last(namespace, &ec2.github.credentials_ref.name).await?;
    let runner = context.github.runner_by_name(&credentials, &scope, &record.instance_id).await?;
    let runner = runner.map(|runner| Listed { id: runner.id, online: runner.status == "online", busy: runner.busy });
    match verdict(tracked, runner) {
        Verdict::Leave => {}
        Verdict::Delete(id) => {
            tracing::info!(instance = record.instance_id, "removing the runner of a machine that is gone");
            context.github.delete_runner(&credentials, &scope, id).await?;
        }
        Verdict::Settled => context.settled(record).await?,
        Verdict::End(reason, why) => context.end_instance(&record.instance_id, reason, &why).await?,
    }
    Ok(())
}

/// Removes the runner that an ended machine of a deleted pool may have left, as nobody looks for it later. It is tried
/// once: credentials may have gone with the namespace, and the pool has to go too.
pub async fn remove_last(context: &Context, pool: &Ec2Pool, record: &Instance) {
    if record.run_id.is_empty() && record.leaving.is_empty() {
        return;
    }
    let namespace = record.pool.split_once('/').map_or("", |(namespace, _)| namespace);
    let removed = async {
        let credentials = context.credentials.get_or_last(namespace, &pool.github.credentials_ref.name).await?;
        anyhow::Ok(context.github.remove_runner(&credentials, &scope(pool), &record.instance_id).await?)
    };
    match removed.await {
        Ok(Removal::Deleted | Removal::Gone) => {}
        Ok(Removal::Busy) => tracing::warn!(instance = record.instance_id, "GitHub keeps a runner that it calls busy"),
        Err(error) => tracing::warn!(instance = record.instance_id, %error, "a runner may be left at GitHub"),
    }
}

impl Context {
    /// Notes that nothing of an ended machine is left at GitHub.
    async fn settled(&self, record: &Instance) -> Result<()> {
        if record.state == State::Terminated {
            let next = Instance { leaving: String::new(), ..record.clone() };
            self.ledger.advance(record, &next, Timestamp::now()).await?;
        }
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
