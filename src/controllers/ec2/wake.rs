//! Wakes agents whose records have changed, through a queue of each machine.
//!
//! An agent whose queue is missing, or whose message is lost, reads its record by itself. So nothing waits for this, and a
//! failure is a delay.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{StreamExt, stream};
use paddock_effects::{aws::AwsError, lock};
use paddock_record::State;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Ec2Context, pool::FirstError};
use crate::controllers::{Error, Failures, every};

/// How often queues are compared with machines. A new machine polls its record until it has one.
const QUEUES_PERIOD: Duration = Duration::from_secs(10);
/// How often it is looked whether the records are loaded.
const LOAD_POLL: Duration = Duration::from_millis(200);
/// Queues created or deleted at a time.
const CONCURRENT_CHANGES: usize = 8;
/// Agents woken at a time: those of a large claim.
const CONCURRENT_WAKES: usize = 64;

#[derive(Default)]
struct Queues {
    /// Their URLs, by machine.
    urls: Mutex<HashMap<String, String>>,
    /// Those of earlier leaders are among them.
    listed: watch::Sender<bool>,
    failures: Failures<&'static str>,
}

pub async fn run(context: Arc<Ec2Context>, stop: CancellationToken) {
    // A cluster without EC2 pools has no records, and needs no AWS.
    while !context.ledger.is_loaded() {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOAD_POLL) => {}
        }
    }
    let (queues, metrics) = (Queues::default(), context.shared.metrics.clone());
    tokio::join!(
        every("wake", QUEUES_PERIOD, metrics, stop.clone(), || queues.compare(&context)),
        queues.wake_all(&context, stop),
    );
}

impl Queues {
    /// Creates the queues of new machines, and deletes those of machines that have ended.
    async fn compare(&self, context: &Ec2Context) -> Result<(), Error> {
        if !*self.listed.borrow() {
            let found = context.wake_queues.list().await?;
            lock(&self.urls).extend(found);
            self.listed.send_replace(true);
        }
        let machines = context.ledger.all().into_iter().map(|machine| machine.record);
        let live: HashSet<_> = machines.filter(|it| it.state != State::Terminated).map(|it| it.instance_id).collect();
        let (missing, left): (Vec<_>, Vec<_>) = {
            let urls = lock(&self.urls);
            let missing = live.iter().filter(|id| !urls.contains_key(*id)).cloned().collect();
            (
                missing,
                urls.iter().filter(|(id, _)| !live.contains(*id)).map(|(id, url)| (id.clone(), url.clone())).collect(),
            )
        };
        let created = stream::iter(missing).map(async |id| {
            let url = context.wake_queues.create(&id, &context.ledger.records.arns()?.arn(&id)).await?;
            lock(&self.urls).insert(id, url);
            Ok(())
        });
        let removed = stream::iter(left).map(async |(id, url)| {
            context.queues.remove(&url).await?;
            lock(&self.urls).remove(&id);
            Ok(())
        });
        let mut failures = FirstError::default();
        failures.note(each(created.buffer_unordered(CONCURRENT_CHANGES)).await);
        failures.note(each(removed.buffer_unordered(CONCURRENT_CHANGES)).await);
        Ok(failures.first()?)
    }

    async fn wake_all(&self, context: &Ec2Context, stop: CancellationToken) {
        let mut listed = self.listed.subscribe();
        tokio::select! {
            () = stop.cancelled() => return,
            _ = listed.wait_for(|listed| *listed) => {}
        }
        let woken = context.ledger.woken_instances().take_until(stop.cancelled_owned());
        woken.for_each_concurrent(CONCURRENT_WAKES, |id| self.wake(context, id)).await;
    }

    async fn wake(&self, context: &Ec2Context, id: String) {
        let Some(url) = lock(&self.urls).get(&id).cloned() else { return };
        match context.wake_queues.wake(&url).await {
            Ok(()) => self.failures.clear(&"wake"),
            // The next comparison creates it again.
            Err(error) if error.is_queue_gone() => drop(lock(&self.urls).remove(&id)),
            Err(error) => {
                if self.failures.add("wake", error.to_string()).1 {
                    tracing::warn!(machine = id, %error, "agents are not woken and read their records late");
                }
            }
        }
    }
}

/// Goes through the calls. One that fails stops no other, but what AWS denies it denies for all.
async fn each(mut calls: impl stream::Stream<Item = Result<(), AwsError>> + Unpin) -> Result<(), AwsError> {
    let mut failures = FirstError::default();
    while let Some(outcome) = calls.next().await {
        let denied = matches!(outcome, Err(AwsError::Denied { .. }));
        failures.note(outcome);
        if denied {
            break;
        }
    }
    failures.first()
}
