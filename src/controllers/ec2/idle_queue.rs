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
    ledger::Ledger,
    metrics::{DiscardLabel, Metrics},
};
use paddock_record::IdleMessage;
use tokio::sync::{
    mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    oneshot,
};

pub struct Pickups {
    queues: Queues,
    ledger: Arc<Ledger>,
    metrics: Metrics,
    /// By URL and pool.
    readers: Mutex<HashMap<(String, PoolKey), UnboundedSender<Note>>>,
}

type Answer = oneshot::Sender<Result<Picked, AwsError>>;

/// What a reader is told.
enum Note {
    Request(Requirements, u32, Answer),
    Settled(Selected, Disposition),
}

/// A machine handed out to a claim, which settles it.
#[derive(Debug)]
pub struct Candidate {
    pub offer: IdleMessage,
    message: Option<Received>,
    /// None once it is settled.
    reader: Option<UnboundedSender<Note>>,
}

impl Candidate {
    pub fn settle(mut self, disposition: Disposition) {
        self.report(disposition);
    }

    fn report(&mut self, disposition: Disposition) {
        if let Some(reader) = self.reader.take() {
            let selected = Selected { machine: self.offer.clone(), message: self.message.take() };
            let _ = reader.send(Note::Settled(selected, disposition));
        }
    }
}

impl Drop for Candidate {
    /// The fallback for a claim that was cancelled or failed before it tried.
    fn drop(&mut self) {
        self.report(Disposition::Unused);
    }
}

#[derive(Debug, Default)]
pub struct Picked {
    pub candidates: Vec<Candidate>,
    /// The pool has nothing more that fits.
    pub exhausted: bool,
}

impl Pickups {
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
        self.reader(url, pool).send(Note::Request(needs, count, answer)).ok();
        picked.await.unwrap_or_else(|_| Ok(Picked::default()))
    }

    fn reader(self: &Arc<Self>, url: &str, pool: PoolKey) -> UnboundedSender<Note> {
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = readers.entry((url.to_owned(), pool)).or_insert_with_key(|(url, pool)| {
            let (sender, notes) = unbounded_channel();
            let (answers, next_id) = (HashMap::new(), 0);
            let (url, pool) = (url.clone(), pool.clone());
            let reader = Reader { pickups: self.clone(), url, pool, sender: sender.clone(), answers, next_id };
            tokio::spawn(reader.run(notes));
            sender
        });
        sender.clone()
    }
}

struct Reader {
    pickups: Arc<Pickups>,
    url: String,
    pool: PoolKey,
    /// For the candidates, which report to it.
    sender: UnboundedSender<Note>,
    answers: HashMap<RequestId, Answer>,
    next_id: RequestId,
}

impl Reader {
    async fn run(mut self, mut notes: UnboundedReceiver<Note>) {
        let (mut queue, mut wait) = (IdleQueue::default(), None);
        loop {
            // All that is there is read before a tick, also when there is no time to wait.
            let note = match notes.try_recv() {
                Ok(note) => Some(note),
                Err(_) => tokio::time::timeout(wait.unwrap_or(Duration::MAX), notes.recv()).await.ok().flatten(),
            };
            let input = note.map_or(Input::Tick, |note| self.input(note));
            wait = self.feed(&mut queue, input).await;
        }
    }

    fn input(&mut self, note: Note) -> Input {
        match note {
            Note::Request(needs, count, answer) => {
                self.next_id += 1;
                self.answers.insert(self.next_id, answer);
                Input::Request { id: self.next_id, needs, count }
            }
            Note::Settled(selected, disposition) => Input::Settled(selected, disposition),
        }
    }

    /// Carries out what follows from `input`; gives the time until the next tick.
    async fn feed(&mut self, queue: &mut IdleQueue, input: Input) -> Option<Duration> {
        let (mut next, mut wait, mut error) = (Some(input), None, None);
        while let Some(input) = next.take() {
            let now = Timestamp::now();
            for output in queue.step(input, |id| self.availability(id, now), now) {
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
                    Output::Delete(messages) => self.send_off(messages, None),
                    Output::PutBack(messages, delay) => self.send_off(messages, Some(delay)),
                    Output::Discarded(message, why) => {
                        let (reason, body) = (why.reason(), message.body);
                        tracing::info!(reason, ?why, body, "discarded a message of the idle pool");
                        self.pickups.metrics.discarded_messages.get_or_create(&DiscardLabel { reason }).inc();
                    }
                    Output::Wait(time) => wait = Some(time),
                }
            }
        }
        wait
    }

    fn availability(&self, id: &str, now: Timestamp) -> Availability {
        let machine = self
            .pickups
            .ledger
            .get(id)
            .filter(|machine| PoolKey::parse(&machine.record.pool).as_ref() == Some(&self.pool));
        Availability::of(machine.as_ref(), now)
    }

    fn list_free(&self, needs: &[Requirements], now: Timestamp) -> Vec<IdleMessage> {
        let fits = |message: &IdleMessage| needs.iter().any(|needs| needs.met_by(message));
        let free =
            self.pickups.ledger.find(&self.pool, |machine| machine.is_claimable(now) && fits(&machine.idle_message()));
        free.iter().map(|machine| machine.idle_message()).collect()
    }

    /// What came, and the last error if there was one.
    async fn receive(&self, batches: usize) -> (Vec<Received>, Option<AwsError>) {
        let receives = (0..batches).map(|_| self.pickups.queues.receive(&self.url));
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
        Candidate { offer: machine, message, reader: Some(self.sender.clone()) }
    }

    /// A claim that no longer listens drops its candidates, which then come back.
    fn answer(&mut self, request: RequestId, picked: Result<Picked, AwsError>) {
        if let Some(answer) = self.answers.remove(&request) {
            let _ = answer.send(picked);
        }
    }

    /// Deletes messages, or shows them again after `delay`, in the background. Should it fail, they become visible again
    /// at their visibility timeout and do no harm.
    fn send_off(&self, messages: Vec<Received>, delay: Option<Duration>) {
        let (queues, url) = (self.pickups.queues.clone(), self.url.clone());
        tokio::spawn(async move {
            let sent = match delay {
                None => queues.delete(&url, &messages).await,
                Some(delay) => queues.put_back(&url, &messages, delay).await,
            };
            if let Err(error) = sent {
                tracing::warn!(%error, "messages of the idle pool stay hidden for a while");
            }
        });
    }
}
