//! Reads the queues of idle machines: one task per queue feeds [`IdleQueue`] and carries out what it decides.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::future::join_all;
use jiff::Timestamp;
pub use paddock_core::ec2::idle_queue::Disposition;
use paddock_core::{
    ec2::{
        idle_queue::{IdleQueue, Input, Output, Received, RequestId, Selected},
        matching::Availability,
        requirements::Requirements,
    },
    names::PoolKey,
};
use paddock_effects::{
    aws::{AwsError, sqs::Queues},
    clock,
    ledger::Ledger,
    metrics::{DiscardLabel, Metrics},
};
use paddock_record::IdleMessage;
use tokio::sync::{
    mpsc::{UnboundedReceiver, UnboundedSender, WeakUnboundedSender, unbounded_channel},
    oneshot,
};

pub struct IdleQueues {
    queues: Queues,
    ledger: Arc<Ledger>,
    metrics: Metrics,
    /// By URL and pool.
    readers: Mutex<HashMap<(String, PoolKey), UnboundedSender<ReaderEvent>>>,
}

type Answer = oneshot::Sender<Result<Picked, AwsError>>;

/// What a reader reacts to.
enum ReaderEvent {
    Request(Requirements, u32, Answer),
    Settled(Selected, Disposition),
}

/// A machine selected for a claim, which settles it.
#[derive(Debug)]
pub struct Candidate {
    pub machine: IdleMessage,
    message: Option<Received>,
    /// None once it is settled.
    reader: Option<UnboundedSender<ReaderEvent>>,
}

impl Candidate {
    pub fn settle(mut self, disposition: Disposition) {
        self.report(disposition);
    }

    fn report(&mut self, disposition: Disposition) {
        if let Some(reader) = self.reader.take() {
            let selected = Selected { machine: self.machine.clone(), message: self.message.take() };
            let _ = reader.send(ReaderEvent::Settled(selected, disposition));
        }
    }
}

impl Drop for Candidate {
    /// The fallback for a reconciliation that was cancelled or failed before it tried to claim.
    fn drop(&mut self) {
        self.report(Disposition::Unused);
    }
}

#[derive(Debug, Default)]
pub struct Picked {
    pub candidates: Vec<Candidate>,
    /// The pool has no more matching machines.
    pub exhausted: bool,
}

impl IdleQueues {
    pub fn new(queues: Queues, ledger: Arc<Ledger>, metrics: Metrics) -> Arc<Self> {
        Arc::new(Self { queues, ledger, metrics, readers: Mutex::default() })
    }

    /// Up to `count` machines of the pool's queue that meet `needs`.
    pub async fn take(
        self: &Arc<Self>,
        url: &str,
        pool: PoolKey,
        needs: Requirements,
        count: u32,
    ) -> Result<Picked, AwsError> {
        let (answer, picked) = oneshot::channel();
        self.reader(url, pool).send(ReaderEvent::Request(needs, count, answer)).ok();
        picked.await.unwrap_or_else(|_| Ok(Picked::default()))
    }

    /// For a deleted pool: its readers end.
    pub fn forget(&self, pool: &PoolKey) {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner).retain(|(_, of), _| of != pool);
    }

    fn reader(self: &Arc<Self>, url: &str, pool: PoolKey) -> UnboundedSender<ReaderEvent> {
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = readers.entry((url.to_owned(), pool)).or_insert_with_key(|(url, pool)| {
            let (sender, events) = unbounded_channel();
            let (answers, next_id) = (HashMap::new(), 0);
            let (url, pool) = (url.clone(), pool.clone());
            let reader = Reader { idle_queues: self.clone(), url, pool, sender: sender.downgrade(), answers, next_id };
            tokio::spawn(reader.run(events));
            sender
        });
        sender.clone()
    }
}

struct Reader {
    idle_queues: Arc<IdleQueues>,
    url: String,
    pool: PoolKey,
    /// Given to each candidate, which reports its disposition.
    sender: WeakUnboundedSender<ReaderEvent>,
    answers: HashMap<RequestId, Answer>,
    next_id: RequestId,
}

impl Reader {
    /// Until its pool is deleted and its candidates are settled.
    async fn run(mut self, mut events: UnboundedReceiver<ReaderEvent>) {
        let (mut queue, mut wait) = (IdleQueue::default(), None);
        loop {
            // Drain the channel before a tick, even when the wait is zero.
            let event = match events.try_recv() {
                Ok(event) => Some(event),
                Err(_) => match tokio::time::timeout(wait.unwrap_or(Duration::MAX), events.recv()).await {
                    Ok(Some(event)) => Some(event),
                    Ok(None) => return,
                    Err(_) => None,
                },
            };
            let input = event.map_or(Input::Tick, |event| self.input(event));
            wait = self.feed(&mut queue, input).await;
        }
    }

    fn input(&mut self, event: ReaderEvent) -> Input {
        match event {
            ReaderEvent::Request(needs, count, answer) => {
                self.next_id += 1;
                self.answers.insert(self.next_id, answer);
                Input::Request { id: self.next_id, needs, count }
            }
            ReaderEvent::Settled(selected, disposition) => Input::Settled(selected, disposition),
        }
    }

    /// Feeds `input` to the queue and applies its outputs. Returns the time until the next tick.
    async fn feed(&mut self, queue: &mut IdleQueue, input: Input) -> Option<Duration> {
        let (mut next, mut wait, mut error) = (Some(input), None, None);
        while let Some(input) = next.take() {
            let now = clock::now();
            for output in queue.step(input, |message| self.availability(message, now), now) {
                match output {
                    Output::Receive(batches) => {
                        let messages;
                        (messages, error) = self.receive(batches).await;
                        next = Some(Input::Received { messages, failed: error.is_some() });
                    }
                    Output::ListFree(needs) => next = Some(Input::Listed(self.list_free(&needs, now))),
                    Output::Answer { request, selected, exhausted } => {
                        let candidates = selected.into_iter().map(|selected| self.candidate(selected)).collect();
                        self.answer(request, Ok(Picked { candidates, exhausted }));
                    }
                    Output::Fail(request) => {
                        if let Some(error) = &error {
                            self.answer(request, Err(error.clone()));
                        }
                    }
                    Output::Delete(messages) => self.update_messages(messages, None),
                    Output::PutBack(messages, delay) => self.update_messages(messages, Some(delay)),
                    Output::Discarded(message, why) => {
                        let (reason, body) = (why.reason(), message.body);
                        tracing::info!(reason, ?why, body, "idle message discarded");
                        self.idle_queues.metrics.discarded_messages.get_or_create(&DiscardLabel { reason }).inc();
                    }
                    Output::Wait(time) => wait = Some(time),
                }
            }
        }
        wait
    }

    fn availability(&self, message: &IdleMessage, now: Timestamp) -> Availability {
        let machine = self
            .idle_queues
            .ledger
            .get(&message.instance_id)
            .filter(|machine| PoolKey::parse(&machine.record.pool).as_ref() == Some(&self.pool));
        Availability::of(machine.as_ref(), message, now)
    }

    fn list_free(&self, needs: &[Requirements], now: Timestamp) -> Vec<IdleMessage> {
        let fits = |message: &IdleMessage| needs.iter().any(|needs| needs.met_by(message));
        let free = self
            .idle_queues
            .ledger
            .find(&self.pool, |machine| machine.is_claimable(now) && fits(&machine.idle_message()));
        free.iter().map(|machine| machine.idle_message()).collect()
    }

    /// The received messages, and the last error if there was one.
    async fn receive(&self, batches: usize) -> (Vec<Received>, Option<AwsError>) {
        let receives = (0..batches).map(|_| self.idle_queues.queues.receive(&self.url));
        let (mut messages, mut last_error) = (Vec::new(), None);
        for received in join_all(receives).await {
            match received {
                Ok(received) => messages.extend(received),
                Err(error) => last_error = Some(error),
            }
        }
        (messages, last_error)
    }

    fn candidate(&self, Selected { machine, message }: Selected) -> Candidate {
        Candidate { machine, message, reader: self.sender.upgrade() }
    }

    /// If the claim no longer waits, its candidates are dropped and so reported as unused.
    fn answer(&mut self, request: RequestId, picked: Result<Picked, AwsError>) {
        if let Some(answer) = self.answers.remove(&request) {
            let _ = answer.send(picked);
        }
    }

    /// Deletes messages, or makes them visible again after `delay`, in the background. After a failure they become
    /// visible at their visibility timeout, which is harmless.
    fn update_messages(&self, messages: Vec<Received>, delay: Option<Duration>) {
        let (queues, url) = (self.idle_queues.queues.clone(), self.url.clone());
        tokio::spawn(async move {
            let updated = match delay {
                None => queues.delete(&url, &messages).await,
                Some(delay) => queues.put_back(&url, &messages, delay).await,
            };
            if let Err(error) = updated {
                tracing::warn!(%error, "idle messages not deleted or put back");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use aws_sdk_dynamodb::config::BehaviorVersion;
    use paddock_effects::{aws::dynamodb::Records, kube::lanes::Lanes};

    use super::*;

    #[tokio::test]
    async fn the_reader_of_a_deleted_pool_ends() {
        let latest = BehaviorVersion::latest;
        let sqs = aws_sdk_sqs::Client::from_conf(aws_sdk_sqs::Config::builder().behavior_version(latest()).build());
        let dynamodb =
            aws_sdk_dynamodb::Client::from_conf(aws_sdk_dynamodb::Config::builder().behavior_version(latest()).build());
        let ledger = Arc::new(Ledger::new(Records::new(dynamodb, "t".into()), Lanes::default()));
        let idle_queues = IdleQueues::new(Queues::new(sqs), ledger, Metrics::default());
        let pool = PoolKey::new("ci", "linux");
        let sender = idle_queues.reader("https://sqs/linux", pool.clone());
        idle_queues.reader("https://sqs/arm", PoolKey::new("ci", "arm"));
        let readers = || Arc::strong_count(&idle_queues) - 1;
        assert_eq!(readers(), 2);
        idle_queues.forget(&pool);
        tokio::task::yield_now().await;
        assert_eq!(readers(), 2, "a candidate is yet to be settled");
        drop(sender);
        let deadline = Instant::now() + Duration::from_secs(30);
        while readers() > 1 && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(readers(), 1);
    }
}
