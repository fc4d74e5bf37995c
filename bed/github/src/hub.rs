//! All state changes go through here: each change settles the world, wakes waiting tasks and sends webhooks.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use jiff::Timestamp;
use tokio::sync::watch;

use crate::{
    Options,
    clock::Clock,
    hooks::{self, LastDeliveries, PendingDelivery},
    schema::Checker,
    world::World,
};

pub struct Hub {
    world: Mutex<World>,
    /// Held from a change until its webhooks are queued, so that they are sent in the order of the changes.
    change_lock: Mutex<()>,
    pub clock: Clock,
    pub options: Options,
    pub http: reqwest::Client,
    pub checker: Option<Checker>,
    pub(crate) last_deliveries: Mutex<LastDeliveries>,
    changed: watch::Sender<u64>,
    due: watch::Sender<Option<Timestamp>>,
}

impl Hub {
    pub fn new(world: World, options: Options) -> Self {
        Self {
            world: Mutex::new(world),
            change_lock: Mutex::new(()),
            clock: Clock::default(),
            // A new connection for each webhook: the receiver may have closed a kept one.
            http: reqwest::Client::builder().pool_max_idle_per_host(0).build().expect("a client can be built"),
            checker: options.validate.then(Checker::start),
            options,
            last_deliveries: Mutex::new(HashMap::new()),
            changed: watch::Sender::new(0),
            due: watch::Sender::new(None),
        }
    }

    pub fn read<R>(&self, read: impl FnOnce(&World, Timestamp) -> R) -> R {
        read(&self.world.lock().expect("no panic while held"), self.clock.now())
    }

    /// Changes state that no task waits for (counters, logs).
    pub fn note<R>(&self, change: impl FnOnce(&mut World, Timestamp) -> R) -> R {
        change(&mut self.world.lock().expect("no panic while held"), self.clock.now())
    }

    pub fn change<R>(self: &Arc<Self>, change: impl FnOnce(&mut World, Timestamp) -> R) -> R {
        let _lock = self.change_lock.lock().expect("no panic while held");
        let (result, due, deliveries) = self.note(|world, now| {
            let result = change(world, now);
            let due = world.settle(now);
            let events = std::mem::take(&mut world.outbox);
            let deliveries: Vec<PendingDelivery> =
                events.into_iter().flat_map(|event| world.enqueue(event, now)).collect();
            (result, due, deliveries)
        });
        self.due.send_replace(due);
        self.changed.send_modify(|version| *version += 1);
        self.send(deliveries);
        result
    }

    pub(crate) fn send(self: &Arc<Self>, deliveries: impl IntoIterator<Item = PendingDelivery>) {
        for delivery in deliveries {
            hooks::send(self, delivery);
        }
    }

    /// Waits until `check` returns something; it runs again after each change.
    pub async fn until<R>(&self, mut check: impl FnMut(&World, Timestamp) -> Option<R>) -> R {
        let mut changes = self.changed.subscribe();
        loop {
            changes.borrow_and_update();
            if let Some(found) = self.read(&mut check) {
                return found;
            }
            changes.changed().await.expect("the hub outlives its waiters");
        }
    }

    /// Settles the world whenever something becomes due.
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
