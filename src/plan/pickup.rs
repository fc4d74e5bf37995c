//! Which idle instance goes to which claim.

use std::collections::HashMap;

use jiff::Timestamp;
use paddock_record::{Discard, IdleMessage};

use crate::api::{Ec2Pool, RunnerClaimSpec, UsageClass};

/// A pool that shows one id this often has nothing else to show.
pub const SEEN_LIMIT: u32 = 5;
/// One empty short poll is no proof: SQS asks only some of its servers.
pub const EMPTY_POLLS: u32 = 3;

/// What a claim asks of a machine, the pool's defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    pub usage_class: UsageClass,
    pub resource_class: String,
    pub cpu: u32,
    pub memory_mib: u32,
    pub allowed_instance_types: Vec<String>,
}

impl Needs {
    /// None if the claim names a resource class that the pool does not have.
    pub fn of(claim: &RunnerClaimSpec, pool: &Ec2Pool) -> Option<Self> {
        let class = match &claim.resource_class {
            Some(name) => pool.resource_class(name),
            None => pool.default_resource_class(),
        }?;
        Some(Self {
            usage_class: claim.usage_class.unwrap_or(pool.defaults.usage_class),
            resource_class: class.name.clone(),
            cpu: claim.cpu.unwrap_or(0).max(class.cpu),
            memory_mib: claim.memory_mib.unwrap_or(0).max(class.memory_mib),
            allowed_instance_types: claim
                .allowed_instance_types
                .clone()
                .unwrap_or_else(|| pool.defaults.allowed_instance_types.clone()),
        })
    }

    pub fn met_by(&self, offer: &IdleMessage) -> bool {
        offer.usage_class == self.usage_class.as_str()
            && offer.resource_class == self.resource_class
            && offer.cpu >= self.cpu
            && offer.mem >= self.memory_mib
            && self.allowed_instance_types.iter().any(|pattern| glob(pattern, &offer.instance_type))
    }
}

/// What is known of an offered instance, whoever wants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    Free,
    /// It is idle, and not to be had now: it still leaves its last run, or another claim has it in hand.
    Busy,
    /// Its record says that it is not idle.
    Taken,
    /// There is no such instance in this pool.
    Foreign,
}

/// What becomes of one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pickup {
    /// To the request with this index.
    Take(usize, IdleMessage),
    /// Fits nobody who waits, or not yet: shown again after a while.
    PutBack(IdleMessage),
    Discard(Discard),
}

/// Matches a batch of messages against every waiting request before anything goes back: `open` is what each still
/// wants, first come first served.
pub fn pick(
    bodies: &[String],
    open: &mut [(Needs, u32)],
    known: impl Fn(&IdleMessage) -> Known,
    now: Timestamp,
) -> Vec<Pickup> {
    let decide = |body: &String| match IdleMessage::read(body, now) {
        Err(discard) => Pickup::Discard(discard),
        Ok(offer) => match known(&offer) {
            Known::Taken => Pickup::Discard(Discard::Taken),
            Known::Foreign => Pickup::Discard(Discard::Foreign),
            Known::Busy => Pickup::PutBack(offer),
            Known::Free => match assign(&offer, open) {
                Some(index) => Pickup::Take(index, offer),
                None => Pickup::PutBack(offer),
            },
        },
    };
    bodies.iter().map(decide).collect()
}

/// The first request that an offer fits; it wants one less from then on.
pub fn assign(offer: &IdleMessage, open: &mut [(Needs, u32)]) -> Option<usize> {
    let (index, (_, left)) = open.iter_mut().enumerate().find(|(_, (needs, left))| *left > 0 && needs.met_by(offer))?;
    *left -= 1;
    Some(index)
}

/// Whether a queue has nothing for those who wait.
#[derive(Debug, Default)]
pub struct Exhaustion {
    empty_polls: u32,
    seen: HashMap<String, u32>,
}

impl Exhaustion {
    /// Takes note of one poll: the ids that went back.
    pub fn note<'a>(&mut self, received: usize, put_back: impl IntoIterator<Item = &'a str>) {
        self.empty_polls = if received == 0 { self.empty_polls + 1 } else { 0 };
        for id in put_back {
            *self.seen.entry(id.to_owned()).or_default() += 1;
        }
    }

    pub fn is_exhausted(&self) -> bool {
        self.empty_polls >= EMPTY_POLLS || self.seen.values().any(|times| *times >= SEEN_LIMIT)
    }
}

/// Whether `text` fits `pattern`, in which `*` stands for any text.
pub(super) fn glob(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    let mut last = None;
    for part in parts {
        if let Some(middle) = last.replace(part) {
            match rest.split_once(middle) {
                Some((_, after)) => rest = after,
                None => return false,
            }
        }
    }
    last.map_or(rest.is_empty(), |end| rest.ends_with(end))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn offer(id: &str, class: &str, kind: &str) -> IdleMessage {
        IdleMessage {
            instance_id: id.into(),
            usage_class: "on-demand".into(),
            instance_type: kind.into(),
            cpu: 2,
            mem: 4096,
            resource_class: class.into(),
            threshold: "2030-01-01T00:00:00Z".into(),
        }
    }

    fn needs(types: &str) -> Needs {
        Needs {
            usage_class: UsageClass::OnDemand,
            resource_class: "medium".into(),
            cpu: 2,
            memory_mib: 4096,
            allowed_instance_types: vec![types.into()],
        }
    }

    #[test]
    fn globs_match_as_create_fleet_reads_them() {
        for (pattern, text, fits) in [
            ("*", "c6i.large", true),
            ("c*", "c6i.large", true),
            ("c6i.large", "c6i.large", true),
            ("c6i.large", "c6i.xlarge", false),
            ("*.large", "c6i.large", true),
            ("c*i.*large", "c6i.2xlarge", true),
            ("m*", "c6i.large", false),
            ("c*c", "c", false),
            ("*6*6*", "c6i", false),
            ("", "c6i", false),
        ] {
            assert_eq!(glob(pattern, text), fits, "{pattern} {text}");
        }
    }

    #[test]
    fn every_need_is_checked() {
        let good = offer("i-1", "medium", "c6i.large");
        assert!(needs("c*").met_by(&good));
        assert!(!needs("m*").met_by(&good));
        assert!(!needs("c*").met_by(&IdleMessage { usage_class: "spot".into(), ..good.clone() }));
        assert!(!needs("c*").met_by(&IdleMessage { resource_class: "large".into(), ..good.clone() }));
        assert!(!needs("c*").met_by(&IdleMessage { cpu: 1, ..good.clone() }));
        assert!(!needs("c*").met_by(&IdleMessage { mem: 4095, ..good }));
    }

    #[test]
    fn a_batch_is_matched_against_all_who_wait_before_anything_goes_back() {
        let bodies = [
            offer("i-1", "medium", "m6i.large").write(),
            "garbage".into(),
            offer("i-2", "medium", "c6i.large").write(),
            offer("i-3", "medium", "c6i.large").write(),
        ];
        let mut open = [(needs("c*"), 1), (needs("m*"), 1)];
        let picks = pick(&bodies, &mut open, |_| Known::Free, NOW);
        assert!(matches!(&picks[0], Pickup::Take(1, offer) if offer.instance_id == "i-1"));
        assert!(matches!(&picks[1], Pickup::Discard(Discard::Malformed(_))));
        assert!(matches!(&picks[2], Pickup::Take(0, offer) if offer.instance_id == "i-2"));
        assert!(matches!(&picks[3], Pickup::PutBack(offer) if offer.instance_id == "i-3"));
        assert_eq!(open.map(|(_, left)| left), [0, 0]);
    }

    #[test]
    fn a_pool_is_exhausted_by_empty_polls_in_a_row_or_one_id_seen_too_often() {
        let mut global = Exhaustion::default();
        for received in [0, 0, 1, 0, 0] {
            global.note(received, []);
            assert!(!global.is_exhausted());
        }
        global.note(0, []);
        assert!(global.is_exhausted());

        let mut local = Exhaustion::default();
        for _ in 1..SEEN_LIMIT {
            local.note(1, ["i-1"]);
        }
        assert!(!local.is_exhausted());
        local.note(1, ["i-1"]);
        assert!(local.is_exhausted());
    }

    #[test]
    fn a_message_of_a_machine_that_nobody_can_have_goes_and_one_that_is_busy_waits() {
        let bodies = ["i-free", "i-busy", "i-taken", "i-foreign"].map(|id| offer(id, "medium", "c6i.large").write());
        let known = |offer: &IdleMessage| match offer.instance_id.as_str() {
            "i-free" => Known::Free,
            "i-busy" => Known::Busy,
            "i-taken" => Known::Taken,
            _ => Known::Foreign,
        };
        let picks = pick(&bodies, &mut [(needs("*"), 9)], known, NOW);
        assert!(matches!(&picks[0], Pickup::Take(0, _)));
        assert!(matches!(&picks[1], Pickup::PutBack(_)));
        assert_eq!(picks[2..], [Pickup::Discard(Discard::Taken), Pickup::Discard(Discard::Foreign)]);
    }

    /// Offers that differ in all that a claim may ask for, some of them dead, some of machines that are not to be had.
    fn offers() -> impl Strategy<Value = Vec<(IdleMessage, Known)>> {
        let known = prop_oneof![6 => Just(Known::Free), 1 => Just(Known::Busy), 1 => Just(Known::Taken), 1 => Just(Known::Foreign)];
        let parts = (any::<bool>(), 0..3usize, 1..4u32, 0..2usize, prop::bool::weighted(0.9), known);
        let offer = |(spot, kind, cpu, class, alive, known): (bool, usize, u32, usize, bool, Known)| {
            let message = IdleMessage {
                usage_class: if spot { "spot" } else { "on-demand" }.into(),
                cpu,
                threshold: if alive { "2030-01-01T00:00:00Z" } else { "1969-12-31T00:00:00Z" }.into(),
                ..offer("", ["medium", "large"][class], ["c6i.large", "c6g.large", "m6i.large"][kind])
            };
            (message, known)
        };
        let numbered = |offers: Vec<(IdleMessage, Known)>| {
            let number = |(index, (offer, known))| (IdleMessage { instance_id: format!("i-{index}"), ..offer }, known);
            offers.into_iter().enumerate().map(number).collect()
        };
        prop::collection::vec(parts.prop_map(offer), 0..30).prop_map(numbered)
    }

    fn requests() -> impl Strategy<Value = Vec<(Needs, u32)>> {
        let parts = (any::<bool>(), 0..4usize, 1..4u32, 0..5u32);
        let request = |(spot, types, cpu, count): (bool, usize, u32, u32)| {
            let usage_class = if spot { UsageClass::Spot } else { UsageClass::OnDemand };
            (Needs { usage_class, cpu, ..needs(["*", "c*", "m*", "*g.*"][types]) }, count)
        };
        prop::collection::vec(parts.prop_map(request), 0..6)
    }

    proptest! {
        #[test]
        fn any_body_is_taken_put_back_or_discarded_without_a_panic(bodies in proptest::collection::vec(".*", 0..8)) {
            prop_assert_eq!(pick(&bodies, &mut [(needs("*"), 3)], |_| Known::Free, NOW).len(), bodies.len());
        }

        /// Each message has one end; what is taken fits, in order of arrival, and nobody gets more than was asked for;
        /// what goes back fits nobody who still waits; only the dead, the taken and the foreign are thrown away.
        #[test]
        fn no_message_is_lost_and_first_come_is_first_served(offers in offers(), requests in requests()) {
            let bodies: Vec<_> = offers.iter().map(|(offer, _)| offer.write()).collect();
            let known = |offer: &IdleMessage| offers.iter().find(|(o, _)| o == offer).map_or(Known::Foreign, |(_, k)| *k);
            let mut open = requests.clone();
            let picks = pick(&bodies, &mut open, known, NOW);
            prop_assert_eq!(picks.len(), offers.len());
            let mut left: Vec<_> = requests.iter().map(|(_, count)| *count).collect();
            for ((offer, known), pickup) in offers.iter().zip(&picks) {
                let alive = offer.threshold.starts_with("2030");
                let first = (0..requests.len()).find(|index| left[*index] > 0 && requests[*index].0.met_by(offer));
                match pickup {
                    Pickup::Take(index, taken) => {
                        prop_assert!(alive && *known == Known::Free && taken == offer);
                        prop_assert_eq!(Some(*index), first);
                        left[*index] -= 1;
                    }
                    Pickup::PutBack(back) => {
                        prop_assert!(alive && back == offer);
                        prop_assert!(*known == Known::Busy || (*known == Known::Free && first.is_none()));
                    }
                    Pickup::Discard(Discard::Expired) => prop_assert!(!alive),
                    Pickup::Discard(Discard::Taken) => prop_assert!(alive && *known == Known::Taken),
                    Pickup::Discard(Discard::Foreign) => prop_assert!(alive && *known == Known::Foreign),
                    Pickup::Discard(Discard::Malformed(why)) => prop_assert!(false, "{}", why),
                }
            }
            prop_assert_eq!(open.into_iter().map(|(_, left)| left).collect::<Vec<_>>(), left);
        }
    }
}
