//! The one place where state changes: each change settles the world, wakes who waits and sends what was said.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use jiff::Timestamp;
use tokio::sync::watch;

use crate::{
    Options,
    clock::Clock,
    hooks::{self, Parcel, Tails},
    schema::Checker,
    world::World,
};

pub struct Hub {
    world: Mutex<World>,
    /// Held from a change until all that follows from it is said: what came later is never said before.
    turn: Mutex<()>,
    pub clock: Clock,
    pub options: Options,
    pub http: reqwest::Client,
    pub checker: Option<Checker>,
    pub(crate) tails: Mutex<Tails>,
    changed: watch::Sender<u64>,
    due: watch::Sender<Option<Timestamp>>,
}

impl Hub {
    pub fn new(world: World, options: Options) -> Self {
        Self {
            world: Mutex::new(world),
            turn: Mutex::new(()),
            clock: Clock::default(),
            // A connection for each webhook: one that is kept may have lost its other end when the next is sent.
            http: reqwest::Client::builder().pool_max_idle_per_host(0).build().expect("a client can be built"),
            checker: options.validate.then(Checker::start),
            options,
            tails: Mutex::new(HashMap::new()),
            changed: watch::Sender::new(0),
            due: watch::Sender::new(None),
        }
    }

    pub fn read<R>(&self, look: impl FnOnce(&World, Timestamp) -> R) -> R {
        look(&self.world.lock().expect("no panic while held"), self.clock.now())
    }

    /// Changes something that nobody waits for (counters, logs).
    pub fn note<R>(&self, change: impl FnOnce(&mut World, Timestamp) -> R) -> R {
        change(&mut self.world.lock().expect("no panic while held"), self.clock.now())
    }

    pub fn change<R>(self: &Arc<Self>, change: impl FnOnce(&mut World, Timestamp) -> R) -> R {
        let _turn = self.turn.lock().expect("no panic while held");
        let (result, due, parcels) = self.note(|world, now| {
            let result = change(world, now);
            let due = world.settle(now);
            let events = std::mem::take(&mut world.outbox);
            let parcels: Vec<Parcel> = events.into_iter().flat_map(|event| world.enqueue(event, now)).collect();
            (result, due, parcels)
        });
        self.due.send_replace(due);
        self.changed.send_modify(|version| *version += 1);
        self.send(parcels);
        result
    }

    pub(crate) fn send(self: &Arc<Self>, parcels: impl IntoIterator<Item = Parcel>) {
        for parcel in parcels {
            hooks::send(self, parcel);
        }
    }

    /// Waits until `look` finds what it looks for, looking again at each change.
    pub async fn until<R>(&self, mut look: impl FnMut(&World, Timestamp) -> Option<R>) -> R {
        let mut changes = self.changed.subscribe();
        loop {
            changes.borrow_and_update();
            if let Some(found) = self.read(&mut look) {
                return found;
            }
            changes.changed().await.expect("the hub outlives those who wait");
        }
    }

    /// Lets the passing of time do its part.
    pub async fn keep_time(self: Arc<Self>) {
        let mut due = self.due.subscribe();
        loop {
            let next = *due.borrow_and_update();
            let moment = async {
                match next {
                    Some(moment) => self.clock.sleep_until(moment).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = moment => self.change(|_, _| ()),
                _ = due.changed() => {}
            }
        }
    }
}
