//! The upkeep of a pool's machines, outside of claims.

use std::{collections::HashSet, sync::Arc};

use kube::{Api, runtime::events::EventType};
use paddock_core::{
    api::{Ec2Pool, FailureReason, Queue, RunnerClaim, RunnerPool, RunnerPoolStatus},
    ec2::{
        claim::claim_ref,
        drift::Drift,
        machine::Machine,
        pool_status::PoolProblem,
        upkeep::{Upkeep, is_abandoned, is_forgotten, upkeep},
        warm,
    },
    names::PoolKey,
};
use paddock_effects::{
    aws::{
        AwsError,
        dynamodb::{MOVES_PER_WRITE, WriteOutcome},
    },
    clock,
};
use paddock_record::{Instance, State, Transition, transition};

use super::aws_problem;
use crate::controllers::ec2::{Ec2Context, machines::Returned, runner_tokens::Outage};

/// Machines ended in one pass, so that an error cannot empty the fleet.
pub const MAX_ENDS: usize = 20;

/// The first of several independent failures: one must not stop what does not depend on it.
#[derive(Default)]
pub struct FirstError(Option<AwsError>);

impl FirstError {
    pub fn note(&mut self, outcome: Result<(), AwsError>) {
        self.0 = self.0.take().or(outcome.err());
    }

    pub fn first(self) -> Result<(), AwsError> {
        self.0.map_or(Ok(()), Err)
    }
}

/// Transitions machines outside of claims, and ends expired ones.
pub(super) async fn keep_up(
    context: &Arc<Ec2Context>,
    pool: &RunnerPool,
    ec2: &Ec2Pool,
    key: &PoolKey,
    status: &RunnerPoolStatus,
) -> Result<(), PoolProblem> {
    let (now, queues, template) = (clock::now(), &status.queues, status.launch_template.as_ref());
    let (mut ends, mut failures) = (0, FirstError::default());
    let instances = context.ledger.of_pool(key);
    let (warm, drift) = (warm::kept(&instances, ec2, template), Drift::of(&instances, ec2, template));
    let (mut warming, mut returning, mut renewed, mut abandoned) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for machine in &instances {
        let keep = warm.contains(machine.record.instance_id.as_str());
        match drift.apply(machine, upkeep(machine, ec2, keep, now)) {
            Upkeep::Leave if is_abandoned(&machine.record, |record| context.claim_exists(record)) => {
                abandoned.push(machine.clone());
            }
            Upkeep::Leave => {}
            Upkeep::Warm => warming.push(machine.clone()),
            Upkeep::Pool => returning.push(machine.clone()),
            Upkeep::Renew => renewed.push(machine.clone()),
            Upkeep::End(..) if ends >= MAX_ENDS => {}
            Upkeep::End(reason, why) => {
                ends += 1;
                let id = &machine.record.instance_id;
                context.shared.events.record(
                    pool,
                    EventType::Warning,
                    "Refresh",
                    "WorkerEnded",
                    format!("{id}: {why}"),
                );
                if machine.record.state == State::Created && reason != FailureReason::SpotReclaimed {
                    context.pools.note_failed_boot(key, pool.metadata.generation, format!("{id}: {why}"));
                }
                failures.note(context.end_instance(id, reason, &why).await);
            }
        }
        if is_forgotten(&machine.record, context.shared.settings.retention, now) {
            let record = &machine.record;
            failures.note(context.ledger.forget(&record.instance_id).await);
        }
    }
    failures.note(reclaim(context, pool, ec2, key, abandoned).await);
    failures.note(return_to_pool(context, key, returning, queues).await);
    failures.note(pool_warm(context, key, warming, ec2, queues).await);
    failures.note(renew(context, key, renewed, ec2, queues).await);
    failures.note(send_missing(context, key, &context.ledger.of_pool(key), queues).await);
    failures.first().map_err(aws_problem)
}

/// Returns machines whose claim does not exist, as the claim would have done. Without a token to deregister they end.
/// The API server is asked once more: the cache of a new leader may be older than the claim.
async fn reclaim(
    context: &Ec2Context,
    pool: &RunnerPool,
    ec2: &Ec2Pool,
    key: &PoolKey,
    mut abandoned: Vec<Machine>,
) -> Result<(), AwsError> {
    let claims: Api<RunnerClaim> = Api::namespaced(context.shared.client.clone(), &key.namespace);
    let names: HashSet<_> = abandoned.iter().map(|machine| machine.record.claim.clone()).collect();
    for name in names {
        let claim = claims.get_opt(&name).await;
        abandoned.retain(|machine| match &claim {
            _ if machine.record.claim != name => true,
            Ok(claim) => claim.as_ref().is_none_or(|claim| !machine.record.serves(claim_ref(claim))),
            // The next upkeep tries again.
            Err(_) => false,
        });
    }
    for machine in &abandoned {
        let Instance { instance_id, claim, .. } = &machine.record;
        let note = format!("{instance_id}: its claim {claim} does not exist any more");
        tracing::warn!(pool = %key, instance = instance_id, claim, "machine reclaimed: its claim does not exist");
        context.shared.events.record(pool, EventType::Warning, "Refresh", "WorkerReclaimed", note);
    }
    match context.give_back(&key.namespace, ec2, &abandoned).await? {
        Returned::Done => Ok(()),
        Returned::NoToken(Outage::NoCredentials(why)) => {
            let why = format!("its claim does not exist, and its runner cannot leave GitHub: {why}");
            context.end_unreleased(&abandoned, &why).await
        }
        // The next upkeep tries again.
        Returned::NoToken(Outage::GitHub(error) | Outage::Refused(error)) => {
            tracing::warn!(pool = %key, error, "no token to return abandoned machines with");
            Ok(())
        }
    }
}

/// Applies a transition to machines in one batch. Returns those whose write won.
async fn apply(
    context: &Ec2Context,
    machines: Vec<Machine>,
    change: impl Fn(&Machine) -> Option<Transition>,
) -> Result<Vec<Machine>, AwsError> {
    let changed = machines.into_iter().filter_map(|machine| Some((change(&machine)?, machine)));
    let (transitions, machines): (Vec<_>, Vec<_>) = changed.unzip();
    let outcomes = context.ledger.apply(transitions).await?;
    let won = machines.into_iter().zip(outcomes).filter_map(|(machine, outcome)| match outcome {
        WriteOutcome::Won(record) => Some(Machine { record, ..machine }),
        WriteOutcome::Lost(_) => None,
    });
    Ok(won.collect())
}

/// Renews machines and sends new messages, because the old ones carry the old threshold. Either is valid.
async fn renew(
    context: &Ec2Context,
    key: &PoolKey,
    machines: Vec<Machine>,
    ec2: &Ec2Pool,
    queues: &[Queue],
) -> Result<(), AwsError> {
    let now = clock::now();
    let threshold = ec2.lifetimes.idle.after(now);
    let renewed = apply(context, machines, |machine| transition::renew(&machine.record, threshold, now)).await?;
    send_messages(context, key, &renewed, queues).await
}

/// Moves warm machines created → running → idle, without a run, and sends their messages.
async fn pool_warm(
    context: &Ec2Context,
    key: &PoolKey,
    machines: Vec<Machine>,
    ec2: &Ec2Pool,
    queues: &[Queue],
) -> Result<(), AwsError> {
    let now = clock::now();
    let threshold = ec2.lifetimes.idle.after(now);
    let (created, mut running): (Vec<_>, _) =
        machines.into_iter().partition(|machine| machine.record.state == State::Created);
    let warm_up = |machine: &Machine| transition::warm_up(&machine.record, machine.public_key(), threshold, now);
    running.extend(apply(context, created, warm_up).await?);
    let idle = apply(context, running, |machine| transition::make_idle(&machine.record, threshold, now)).await?;
    if !idle.is_empty() {
        context.pools.note_boot(key);
    }
    send_messages(context, key, &idle, queues).await
}

/// Sends the messages first, then writes the records. After a crash in between they are sent again, which is harmless.
async fn return_to_pool(
    context: &Ec2Context,
    key: &PoolKey,
    machines: Vec<Machine>,
    queues: &[Queue],
) -> Result<(), AwsError> {
    let batches = machines.chunks(MOVES_PER_WRITE).map(async |machines| {
        send_messages(context, key, machines, queues).await?;
        apply(context, machines.to_vec(), |machine| transition::pool(&machine.record)).await
    });
    futures::future::try_join_all(batches).await.map(drop)
}

/// Sends messages for the idle machines that this leader has not sent yet.
async fn send_missing(
    context: &Ec2Context,
    key: &PoolKey,
    instances: &[Machine],
    queues: &[Queue],
) -> Result<(), AwsError> {
    let free: HashSet<_> = instances.iter().filter(|t| t.is_free()).map(|t| t.record.instance_id.as_str()).collect();
    let missing = context.pools.unsent(key, &free);
    let missing: Vec<_> = instances.iter().filter(|t| missing.contains(&t.record.instance_id)).cloned().collect();
    send_messages(context, key, &missing, queues).await
}

/// Sends idle messages. A machine whose class was removed from the pool gets none: it cannot be claimed and expires.
async fn send_messages(
    context: &Ec2Context,
    key: &PoolKey,
    machines: &[Machine],
    queues: &[Queue],
) -> Result<(), AwsError> {
    for queue in queues {
        let of_class = |machine: &&Machine| machine.record.resource_class == queue.resource_class;
        let machines: Vec<_> = machines.iter().filter(of_class).collect();
        // Earlier messages may carry a threshold that is about to pass.
        machines.iter().for_each(|machine| context.pools.forget_sent(key, &machine.record.instance_id));
        let messages: Vec<_> = machines.iter().map(|machine| machine.idle_message().write()).collect();
        context.queues.send(&queue.url, &messages).await?;
        machines.iter().for_each(|machine| context.pools.note_sent(key, &machine.record.instance_id));
    }
    Ok(())
}

/// Sends the messages of all idle machines again where a queue has fewer messages than machines.
pub async fn restore_messages(context: &Ec2Context, key: &PoolKey, queues: &[Queue]) -> Result<(), AwsError> {
    for queue in queues {
        let mut idle = context.ledger.of_pool(key);
        idle.retain(|machine| machine.is_free() && machine.record.resource_class == queue.resource_class);
        if !idle.is_empty() && (context.queues.size(&queue.url).await? as usize) < idle.len() {
            send_messages(context, key, &idle, queues).await?;
        }
    }
    Ok(())
}
