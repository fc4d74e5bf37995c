//! The pickup manager: one per queue, serving everyone who waits for it at once.
//!
//! No machine is created while one that fits is idle. So the manager knows what it has shown to whom, takes messages
//! that it has put back when somebody comes for whom they are right, and, once the queue has nothing more, asks the
//! ledger: a message is a hint, and one that a crash hides for a while is not waited for.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use futures::future::join_all;
use jiff::Timestamp;
use paddock_record::{IdleMessage, State};
use tokio::sync::{
    mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    oneshot,
};

use crate::{
    effects::{
        aws::AwsError,
        ledger::Ledger,
        queues::{BATCH, PUT_BACK_DELAY, Queues, Received},
    },
    metrics::{DiscardLabel, Metrics},
    plan::pickup::{Exhaustion, Known, Needs, Pickup, assign, pick},
};

/// Receives at once: a hundred machines a round are more than are claimed meanwhile.
const RECEIVES: usize = 10;
/// How long deletions wait for others, so that many go in one call.
const LINGER: Duration = Duration::from_secs(1);
/// How long to wait for the outcome of other claims before the queue is asked again.
const OTHERS: Duration = Duration::from_millis(20);
/// How long before it shows itself again a message that was put back can still be taken as it is.
const MARGIN: Duration = Duration::from_millis(500);

pub struct Pickups {
    queues: Queues,
    ledger: Arc<Ledger>,
    metrics: Metrics,
    managers: Mutex<HashMap<String, UnboundedSender<Note>>>,
}

/// What the manager of a queue is told.
enum Note {
    Ask(Ask),
    /// A candidate has left the hand it was in.
    Settled(IdleMessage, Option<Received>, Fate),
}

struct Ask {
    /// `namespace/name`.
    pool: String,
    needs: Needs,
    count: u32,
    answer: oneshot::Sender<Result<Picked, AwsError>>,
}

/// What became of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Claimed, or not to be had by anybody: its message goes.
    Over,
    /// Not yet to be had: shown again after a while.
    Busy,
    /// Nobody tried: shown again at once.
    Unused,
}

/// An offer in the hand of a claim, which says what became of it; [`Fate::Unused`] if it does not.
#[derive(Debug)]
pub struct Candidate {
    pub offer: IdleMessage,
    /// None where the ledger knew of the machine and the queue did not.
    message: Option<Received>,
    fate: Fate,
    manager: UnboundedSender<Note>,
}

impl Candidate {
    pub fn settle(mut self, fate: Fate) {
        self.fate = fate;
    }
}

impl Drop for Candidate {
    fn drop(&mut self) {
        let _ = self.manager.send(Note::Settled(self.offer.clone(), self.message.take(), self.fate));
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
        Arc::new(Self { queues, ledger, metrics, managers: Mutex::default() })
    }

    /// Up to `count` offers of the pool's queue that meet `needs`.
    pub async fn take(self: &Arc<Self>, url: &str, pool: String, needs: Needs, count: u32) -> Result<Picked, AwsError> {
        let (answer, picked) = oneshot::channel();
        self.manager(url).send(Note::Ask(Ask { pool, needs, count, answer })).ok();
        picked.await.unwrap_or_else(|_| Ok(Picked::default()))
    }

    fn manager(self: &Arc<Self>, url: &str) -> UnboundedSender<Note> {
        let mut managers = self.managers.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = managers.entry(url.to_owned()).or_insert_with(|| {
            let (sender, notes) = unbounded_channel();
            tokio::spawn(self.clone().manage(Line::new(url.to_owned(), sender.clone()), notes));
            sender
        });
        sender.clone()
    }

    async fn manage(self: Arc<Self>, mut line: Line, mut notes: UnboundedReceiver<Note>) {
        loop {
            let pause = match (line.waiting.is_empty(), line.rests, line.over.is_empty()) {
                (false, false, _) => Duration::ZERO,
                (false, true, _) => OTHERS,
                (true, _, false) => LINGER,
                (true, _, true) => Duration::MAX,
            };
            let quiet = match tokio::time::timeout(pause, notes.recv()).await {
                Ok(Some(note)) => {
                    line.hear(note);
                    false
                }
                Ok(None) => return,
                Err(_) => true,
            };
            while let Ok(note) = notes.try_recv() {
                line.hear(note);
            }
            self.send_off(&mut line, quiet);
            if !line.waiting.is_empty() {
                self.round(&mut line).await;
                line.answer();
            }
        }
    }

    /// One round: what was put back a moment ago, then receives in parallel, each message matched against all who wait.
    async fn round(&self, line: &mut Line) {
        self.recall(line);
        let missing: usize = line.waiting.iter().map(Waiting::missing).sum();
        if missing == 0 {
            return;
        }
        let receives = (0..missing.div_ceil(BATCH).clamp(1, RECEIVES)).map(|_| self.queues.receive(&line.url));
        let (mut messages, mut trouble) = (Vec::new(), None);
        for received in join_all(receives).await {
            match received {
                Ok(received) => messages.extend(received),
                Err(error) => trouble = Some(error),
            }
        }
        match trouble {
            Some(error) if messages.is_empty() => line.fail(&error),
            _ => self.sort_out(line, messages),
        }
    }

    /// What becomes of an offer hangs on its record, where that is known.
    fn known(&self, line: &Line, pool: &str, offer: &IdleMessage) -> Known {
        match self.ledger.get(&offer.instance_id).filter(|tracked| tracked.record.pool == pool) {
            None => Known::Foreign,
            Some(tracked) if tracked.record.state != State::Idle => Known::Taken,
            Some(_) if line.hands.contains_key(&offer.instance_id) => Known::Busy,
            Some(tracked) if tracked.is_claimable(Timestamp::now()) => Known::Free,
            Some(_) => Known::Busy,
        }
    }

    /// Messages that were put back for want of somebody whom they fit are still ours until they show themselves again.
    fn recall(&self, line: &mut Line) {
        line.aside.retain(|(_, _, since)| since.elapsed() + MARGIN < PUT_BACK_DELAY);
        let mut open: Vec<_> = line.waiting.iter().map(Waiting::open).collect();
        let pool = line.waiting.first().map(|waiting| waiting.ask.pool.clone()).unwrap_or_default();
        for (offer, message, since) in std::mem::take(&mut line.aside) {
            let free = self.known(line, &pool, &offer) == Known::Free;
            match free.then(|| assign(&offer, &mut open)).flatten() {
                Some(index) => line.give(index, offer, Some(message)),
                None => line.aside.push((offer, message, since)),
            }
        }
    }

    fn sort_out(&self, line: &mut Line, messages: Vec<Received>) {
        let Some(pool) = line.waiting.first().map(|waiting| waiting.ask.pool.clone()) else { return };
        let bodies: Vec<_> = messages.iter().map(|message| message.body.clone()).collect();
        let mut open: Vec<_> = line.waiting.iter().map(Waiting::open).collect();
        let picks = pick(&bodies, &mut open, |offer| self.known(line, &pool, offer), Timestamp::now());
        let (received, mut shown) = (messages.len(), Vec::new());
        for (message, pickup) in messages.into_iter().zip(picks) {
            match pickup {
                Pickup::Take(index, offer) => line.give(index, offer, Some(message)),
                Pickup::PutBack(offer) => {
                    shown.push(offer.instance_id.clone());
                    line.later.push((offer, message));
                }
                Pickup::Discard(why) => {
                    tracing::info!(
                        reason = why.reason(),
                        ?why,
                        body = message.body,
                        "threw a message of the idle pool away"
                    );
                    self.metrics.discarded_messages.get_or_create(&DiscardLabel { reason: why.reason() }).inc();
                    line.over.push(message);
                }
            }
        }
        line.rests = false;
        for index in 0..line.waiting.len() {
            let exhaustion = &mut line.waiting[index].exhaustion;
            exhaustion.note(received, shown.iter().map(String::as_str));
            if exhaustion.is_exhausted() && line.waiting[index].missing() > 0 {
                self.last_resort(line, index);
            }
        }
    }

    /// The queue has nothing more for this one: machines that the ledger knows to be free, or may become so when others
    /// let go of them, come before new ones.
    fn last_resort(&self, line: &mut Line, index: usize) {
        let (ask, now) = (&line.waiting[index].ask, Timestamp::now());
        // What it has in hand itself is nothing to wait for: it is claimed as soon as there is an answer. Nor is what those
        // have who came later: they wait for this one, and two must not wait for each other.
        let in_hand = line.waiting[index..].iter().flat_map(|waiting| &waiting.picked.candidates);
        let own: Vec<_> = in_hand.map(|candidate| candidate.offer.instance_id.clone()).collect();
        let mut fitting = self
            .ledger
            .find(&ask.pool, |tracked| tracked.is_claimable(now) && ask.needs.met_by(&tracked.idle_message()));
        fitting.retain(|tracked| !own.contains(&tracked.record.instance_id));
        let missing = line.waiting[index].missing();
        let (shown, free): (Vec<_>, Vec<_>) =
            fitting.into_iter().partition(|tracked| line.hands.contains_key(&tracked.record.instance_id));
        for tracked in free.iter().take(missing) {
            line.give(index, tracked.idle_message(), None);
        }
        let waiting = &mut line.waiting[index];
        if waiting.missing() == 0 {
            return;
        }
        match shown.is_empty() {
            true => waiting.picked.exhausted = true,
            false => (waiting.exhaustion, line.rests) = (Exhaustion::default(), true),
        }
    }

    /// Deletes, returns and puts aside what has gathered; nobody waits for that. Should it fail, the messages show
    /// themselves again when their time is up, and do no harm.
    fn send_off(&self, line: &mut Line, quiet: bool) {
        let over = if quiet || line.over.len() >= BATCH { std::mem::take(&mut line.over) } else { Vec::new() };
        let unused = std::mem::take(&mut line.unused);
        let later = std::mem::take(&mut line.later);
        if over.is_empty() && unused.is_empty() && later.is_empty() {
            return;
        }
        let back: Vec<_> = later.iter().map(|(_, message)| message.clone()).collect();
        line.aside.extend(later.into_iter().map(|(offer, message)| (offer, message, Instant::now())));
        let (queues, url) = (self.queues.clone(), line.url.clone());
        tokio::spawn(async move {
            let (deleted, returned, put_back) = tokio::join!(
                queues.delete(&url, &over),
                queues.put_back(&url, &unused, Duration::ZERO),
                queues.put_back(&url, &back, PUT_BACK_DELAY),
            );
            for error in [deleted, returned, put_back].into_iter().filter_map(Result::err) {
                tracing::warn!(%error, "messages of the idle pool stay hidden for a while");
            }
        });
    }
}

/// What the manager of one queue keeps in mind. All of it can be lost.
struct Line {
    url: String,
    sender: UnboundedSender<Note>,
    waiting: Vec<Waiting>,
    /// How often each instance is in somebody's hand.
    hands: HashMap<String, u32>,
    /// Everybody waits for what others make of their candidates.
    rests: bool,
    /// Messages to be deleted, to be shown again at once, and to be shown again later.
    over: Vec<Received>,
    unused: Vec<Received>,
    later: Vec<(IdleMessage, Received)>,
    /// Put back so long ago, and still to be had without a receive.
    aside: Vec<(IdleMessage, Received, Instant)>,
}

struct Waiting {
    ask: Ask,
    picked: Picked,
    exhaustion: Exhaustion,
}

impl Waiting {
    fn missing(&self) -> usize {
        (self.ask.count as usize).saturating_sub(self.picked.candidates.len())
    }

    fn open(&self) -> (Needs, u32) {
        (self.ask.needs.clone(), self.missing() as u32)
    }
}

impl Line {
    fn new(url: String, sender: UnboundedSender<Note>) -> Self {
        Self {
            url,
            sender,
            waiting: Vec::new(),
            hands: HashMap::new(),
            rests: false,
            over: Vec::new(),
            unused: Vec::new(),
            later: Vec::new(),
            aside: Vec::new(),
        }
    }

    fn hear(&mut self, note: Note) {
        match note {
            Note::Ask(ask) => {
                self.rests = false;
                let (picked, exhaustion) = (Picked::default(), Exhaustion::default());
                self.waiting.push(Waiting { ask, picked, exhaustion });
            }
            Note::Settled(offer, message, fate) => {
                if let Some(times) = self.hands.get_mut(&offer.instance_id) {
                    *times -= 1;
                    if *times == 0 {
                        self.hands.remove(&offer.instance_id);
                    }
                }
                match (message, fate) {
                    (None, _) => {}
                    (Some(message), Fate::Over) => self.over.push(message),
                    (Some(message), Fate::Busy) => self.later.push((offer, message)),
                    (Some(message), Fate::Unused) => self.unused.push(message),
                }
            }
        }
    }

    fn give(&mut self, index: usize, offer: IdleMessage, message: Option<Received>) {
        *self.hands.entry(offer.instance_id.clone()).or_default() += 1;
        let manager = self.sender.clone();
        self.waiting[index].picked.candidates.push(Candidate { offer, message, fate: Fate::Unused, manager });
    }

    /// Answers those who have all they asked for, or all there is.
    fn answer(&mut self) {
        let done = |waiting: &mut Waiting| waiting.picked.exhausted || waiting.missing() == 0;
        for waiting in self.waiting.extract_if(.., done) {
            // One who does not listen any more drops what it gets, and that comes back to us.
            let _ = waiting.ask.answer.send(Ok(waiting.picked));
        }
    }

    fn fail(&mut self, error: &AwsError) {
        for waiting in self.waiting.drain(..) {
            let _ = waiting.ask.answer.send(Err(error.clone()));
        }
    }
}
