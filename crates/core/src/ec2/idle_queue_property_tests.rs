//! The state machine under random events.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{
    tests::{at, machine},
    *,
};
use crate::ec2::matching::tests::{NOW, needs};

/// Where a received message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// With the state machine.
    Queue,
    /// Put back with delay: the state machine may still hand it out.
    Hidden,
    Claim,
    Returned,
    Deleted,
}

#[derive(Debug, Clone)]
enum Event {
    Request {
        types: usize,
        count: u32,
    },
    /// One of the machines that are handed out.
    Settle(usize, Disposition),
    /// Time passes, then inputs are awaited; a receive shows this many messages, or fails.
    Tick {
        millis: u64,
        shown: usize,
        fails: bool,
    },
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let disposition = prop_oneof![Just(Disposition::Over), Just(Disposition::Busy), Just(Disposition::Unused)];
    let event = prop_oneof![
        1 => (0..3usize, 0..4u32).prop_map(|(types, count)| Event::Request { types, count }),
        2 => (any::<usize>(), disposition).prop_map(|(index, disposition)| Event::Settle(index, disposition)),
        4 => (0..2000u64, 0..6usize, prop::bool::weighted(0.1))
            .prop_map(|(millis, shown, fails)| Event::Tick { millis, shown, fails }),
    ];
    prop::collection::vec(event, 0..80)
}

/// Models SQS, the ledger and claims around the state machine.
#[derive(Default)]
struct World {
    queue: IdleQueue,
    millis: u64,
    /// When the message of each machine becomes visible; None: deleted.
    visible: BTreeMap<String, Option<u64>>,
    /// Not idle any more.
    claimed: Vec<String>,
    /// By receipt.
    places: BTreeMap<String, Place>,
    handed_out: Vec<Selected>,
    /// Those that are not answered.
    requests: BTreeMap<RequestId, (Requirements, u32)>,
    requested: RequestId,
    ticks: bool,
}

impl World {
    fn availability(claimed: &[String], id: &str) -> Availability {
        if claimed.iter().any(|claimed| claimed == id) { Availability::Taken } else { Availability::Free }
    }

    fn move_message(&mut self, place: Place, from: &[Place], message: &Received) {
        let was = self.places.insert(message.receipt.clone(), place);
        assert!(was.is_some_and(|was| from.contains(&was)), "{message:?}: {was:?} → {place:?}");
    }

    fn feed(&mut self, input: Input, shown: usize, fails: bool) {
        let mut next = Some(input);
        while let Some(input) = next.take() {
            self.ticks = false;
            let outputs = self.queue.step(
                input,
                |machine| Self::availability(&self.claimed, &machine.instance_id),
                at(self.millis),
            );
            for output in outputs {
                assert!(next.is_none(), "{output:?} after a question");
                match output {
                    Output::Receive(batches) => {
                        assert!(batches > 0);
                        let messages = if fails { vec![] } else { self.receive(shown) };
                        next = Some(Input::Received { messages, failed: fails });
                    }
                    Output::ListFree(wanted) => next = Some(Input::Listed(self.free(&wanted))),
                    Output::Answer { request, selected, exhausted } => self.answer(request, selected, exhausted),
                    Output::Fail(request) => assert!(fails && self.requests.remove(&request).is_some()),
                    Output::Delete(messages) => {
                        for message in messages {
                            self.move_message(Place::Deleted, &[Place::Queue], &message);
                            self.visible.insert(id_of(&message), None);
                        }
                    }
                    Output::PutBack(messages, delay) => {
                        for message in messages {
                            let place = if delay.is_zero() { Place::Returned } else { Place::Hidden };
                            // What was recalled for a request that failed is shown at once.
                            let from =
                                if delay.is_zero() { &[Place::Queue, Place::Hidden][..] } else { &[Place::Queue] };
                            self.move_message(place, from, &message);
                            if let Some(Some(visible)) = self.visible.get_mut(&id_of(&message)) {
                                *visible = self.millis + delay.as_millis() as u64;
                            }
                        }
                    }
                    Output::Discarded(message, why) => {
                        assert_eq!(why, Discard::Taken);
                        assert_eq!(self.places[&message.receipt], Place::Queue);
                    }
                    Output::Wait(_) => self.ticks = true,
                }
            }
        }
    }

    fn receive(&mut self, shown: usize) -> Vec<Received> {
        let visible = self.visible.iter_mut().filter(|(_, visible)| visible.is_some_and(|at| at <= self.millis));
        let mut messages = Vec::new();
        for (id, visible) in visible.take(shown) {
            *visible = Some(self.millis + 30_000);
            let receipt = format!("receipt {} of {id}", self.places.len());
            self.places.insert(receipt.clone(), Place::Queue);
            messages.push(Received { receipt, body: machine(id).write() });
        }
        messages
    }

    fn free(&self, wanted: &[Requirements]) -> Vec<IdleMessage> {
        let free = self.visible.keys().filter(|id| !self.claimed.contains(id)).map(|id| machine(id));
        free.filter(|machine| wanted.iter().any(|needs| needs.met_by(machine))).collect()
    }

    fn answer(&mut self, request: RequestId, selected: Vec<Selected>, exhausted: bool) {
        let (needs, count) = self.requests.remove(&request).expect("each request is answered once");
        assert!(selected.len() <= count as usize && (exhausted || selected.len() == count as usize));
        assert!(selected.iter().all(|selected| needs.met_by(&selected.machine)));
        for message in selected.iter().filter_map(|selected| selected.message.as_ref()) {
            self.move_message(Place::Claim, &[Place::Queue, Place::Hidden], message);
        }
        self.handed_out.extend(selected);
        // No machine is created while an idle one fits.
        let left = self.free(&[needs]);
        assert!(!exhausted || left.iter().all(|machine| self.queue.handed_out.contains_key(&machine.instance_id)));
    }

    fn settle(&mut self, index: usize, disposition: Disposition) {
        let selected = self.handed_out.swap_remove(index);
        if let Some(message) = &selected.message {
            self.move_message(Place::Queue, &[Place::Claim], message);
        }
        if disposition == Disposition::Over {
            self.claimed.push(selected.machine.instance_id.clone());
        }
        self.feed(Input::Settled(selected, disposition), 0, false);
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Request { types, count } => {
                self.requested += 1;
                let needs = needs(["*", "c*", "m*"][types]);
                self.requests.insert(self.requested, (needs.clone(), count));
                self.feed(Input::Request { id: self.requested, needs, count }, 0, false);
            }
            Event::Settle(_, _) if self.handed_out.is_empty() => {}
            Event::Settle(index, disposition) => self.settle(index % self.handed_out.len(), disposition),
            Event::Tick { millis, shown, fails } => {
                self.millis += millis;
                if self.ticks {
                    self.feed(Input::Tick, shown, fails);
                }
            }
        }
    }
}

fn id_of(message: &Received) -> String {
    IdleMessage::read(&message.body, NOW).unwrap().instance_id
}

proptest! {
    /// Whatever happens, each request is answered once, and each message that was received is in the end deleted or shown
    /// again.
    #[test]
    fn every_message_ends_in_one_place(cs in 0..6usize, ms in 0..6usize, events in events()) {
        let mut world = World::default();
        let ids = (0..cs).map(|number| format!("c-{number}")).chain((0..ms).map(|number| format!("m-{number}")));
        world.visible.extend(ids.map(|id| (id, Some(0))));
        events.into_iter().for_each(|event| world.apply(event));
        for _ in 0..200 {
            while !world.handed_out.is_empty() {
                world.settle(0, Disposition::Over);
            }
            world.apply(Event::Tick { millis: 20, shown: 6, fails: false });
        }
        prop_assert!(world.requests.is_empty() && !world.ticks);
        prop_assert!(world.queue.handed_out.is_empty());
        for (receipt, place) in world.places {
            prop_assert!(matches!(place, Place::Hidden | Place::Returned | Place::Deleted), "{receipt}: {place:?}");
        }
    }
}
