//! The pickup manager: one per queue, serving everyone who waits for it at once.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use jiff::Timestamp;
use paddock_record::IdleMessage;
use tokio::sync::{mpsc, oneshot};

use crate::{
    effects::{
        aws::AwsError,
        queues::{PUT_BACK_DELAY, Queues, Received},
    },
    metrics::{DiscardLabel, Metrics},
    plan::pickup::{Exhaustion, Needs, Pickup, pick},
};

pub struct Pickups {
    queues: Queues,
    metrics: Metrics,
    managers: Mutex<HashMap<String, mpsc::UnboundedSender<Ask>>>,
}

struct Ask {
    needs: Needs,
    count: u32,
    answer: oneshot::Sender<Result<Picked, AwsError>>,
}

/// An offer, and the message it came in: to be deleted once the instance is claimed, or put back.
#[derive(Debug, Clone)]
pub struct Candidate {
    pub offer: IdleMessage,
    pub message: Received,
}

#[derive(Debug, Default)]
pub struct Picked {
    pub candidates: Vec<Candidate>,
    /// The pool has nothing more that fits.
    pub exhausted: bool,
}

impl Pickups {
    pub fn new(queues: Queues, metrics: Metrics) -> Arc<Self> {
        Arc::new(Self { queues, metrics, managers: Mutex::default() })
    }

    /// Up to `count` offers of the queue that meet `needs`.
    pub async fn take(self: &Arc<Self>, url: &str, needs: Needs, count: u32) -> Result<Picked, AwsError> {
        let (answer, picked) = oneshot::channel();
        self.manager(url).send(Ask { needs, count, answer }).ok();
        picked.await.unwrap_or_else(|_| Ok(Picked::default()))
    }

    fn manager(self: &Arc<Self>, url: &str) -> mpsc::UnboundedSender<Ask> {
        let mut managers = self.managers.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = managers.entry(url.to_owned()).or_insert_with(|| {
            let (sender, asks) = mpsc::unbounded_channel();
            tokio::spawn(self.clone().manage(url.to_owned(), asks));
            sender
        });
        sender.clone()
    }

    async fn manage(self: Arc<Self>, url: String, mut asks: mpsc::UnboundedReceiver<Ask>) {
        while let Some(first) = asks.recv().await {
            let mut waiting = vec![(first, Picked::default(), Exhaustion::default())];
            while !waiting.is_empty() {
                while let Ok(ask) = asks.try_recv() {
                    waiting.push((ask, Picked::default(), Exhaustion::default()));
                }
                match self.poll(&url, &mut waiting).await {
                    Ok(()) => {
                        for (_, picked, exhaustion) in &mut waiting {
                            picked.exhausted = exhaustion.is_exhausted();
                        }
                    }
                    Err(error) => {
                        for (ask, picked, _) in waiting.drain(..) {
                            self.give_back(&url, picked.candidates).await;
                            let _ = ask.answer.send(Err(error.clone()));
                        }
                    }
                }
                let done = |(ask, picked, _): &mut (Ask, Picked, Exhaustion)| {
                    picked.exhausted || picked.candidates.len() as u32 >= ask.count
                };
                for (ask, picked, _) in waiting.extract_if(.., done) {
                    if let Err(Ok(unheard)) = ask.answer.send(Ok(picked)) {
                        self.give_back(&url, unheard.candidates).await;
                    }
                }
            }
        }
    }

    /// One receive, matched against all who wait.
    async fn poll(&self, url: &str, waiting: &mut [(Ask, Picked, Exhaustion)]) -> Result<(), AwsError> {
        let messages = self.queues.receive(url).await?;
        let bodies: Vec<_> = messages.iter().map(|message| message.body.clone()).collect();
        let left = |(ask, picked, _): &(Ask, Picked, Exhaustion)| {
            (ask.needs.clone(), ask.count.saturating_sub(picked.candidates.len() as u32))
        };
        let mut open: Vec<_> = waiting.iter().map(left).collect();
        let received = messages.len();
        let (mut put_back, mut discarded) = (Vec::new(), Vec::new());
        for (message, pickup) in messages.into_iter().zip(pick(&bodies, &mut open, Timestamp::now())) {
            match pickup {
                Pickup::Take(index, offer) => waiting[index].1.candidates.push(Candidate { offer, message }),
                Pickup::PutBack(offer) => put_back.push((offer.instance_id, message)),
                Pickup::Discard(why) => {
                    tracing::warn!(reason = why.reason(), ?why, "threw a message of the idle pool away");
                    self.metrics.discarded_messages.get_or_create(&DiscardLabel { reason: why.reason() }).inc();
                    discarded.push(message);
                }
            }
        }
        for (_, _, exhaustion) in waiting.iter_mut() {
            exhaustion.note(received, put_back.iter().map(|(id, _)| id.as_str()));
        }
        // Should one of these fail, the message comes back by itself when its visibility runs out.
        let returns = put_back.iter().map(|(_, message)| self.queues.put_back(url, message, PUT_BACK_DELAY));
        let (returned, deleted) = tokio::join!(futures::future::join_all(returns), self.queues.delete(url, &discarded));
        for error in returned.into_iter().chain([deleted]).filter_map(Result::err) {
            tracing::warn!(%error, "a message stays hidden for a while");
        }
        Ok(())
    }

    async fn give_back(&self, url: &str, candidates: Vec<Candidate>) {
        for candidate in candidates {
            let _ = self.queues.put_back(url, &candidate.message, std::time::Duration::ZERO).await;
        }
    }
}
