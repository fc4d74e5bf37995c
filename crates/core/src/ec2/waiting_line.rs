//! Which claims on a pool can be served now.
//!
//! A claim takes machines only when it can have all of them, so that a claim that waits holds nothing. Claims of one
//! pool and resource class are served oldest first. One that does not fit is passed by younger ones that do, until it
//! has waited [`PASSED_FOR_MAX`]: from then on they wait behind it.
//!
//! Where `maxInstances` leaves no room for new machines, idle ones of another scope make room: those that have been idle
//! longest, as many as the claim needs, and none that an older waiting claim could use.

use std::collections::HashMap;

use jiff::{SignedDuration, Timestamp};
use paddock_record::Instance;

use super::{
    capacity_memory::{CapacityMemory, LaunchChoice},
    launch_error::in_words,
    requirements::Requirements,
    reuse_scope,
    zones::Subnet,
};
use crate::api::Ec2Pool;

/// How long a claim that does not fit is passed by younger ones.
pub const PASSED_FOR_MAX: SignedDuration = SignedDuration::from_mins(5);

/// A claim without all its machines.
#[derive(Debug, Clone)]
pub struct OpenClaim {
    pub name: String,
    pub needs: Requirements,
    /// The machines that it neither holds nor has ordered.
    pub missing: u32,
    /// Since when it is known to this operator.
    pub since: Timestamp,
}

/// What the claims of a pool can have.
#[derive(Clone)]
pub struct Stock<'a> {
    pub spec: &'a Ec2Pool,
    /// The idle machines that can be claimed.
    pub idle: Vec<&'a Instance>,
    /// No claim gets one of them: the queue had none for it.
    pub exhausted: bool,
    /// Machines that exist or are being launched.
    pub live: u32,
    pub capacity: &'a CapacityMemory,
    /// The pool's subnets; empty while they are not known.
    pub subnets: &'a [Subnet],
}

/// The idle machines that are terminated to make room for a claim's new ones, where it can have its machines.
pub type Admission = Result<Vec<String>, Obstacle>;

/// Why a claim cannot have its machines now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// It needs this many new machines, more than `maxInstances` leaves beside `live` machines and those that older
    /// claims get.
    NoRoom { new: u32, live: u32 },
    /// EC2 is known to have no capacity for the new machines that it needs.
    NoCapacity { until: Timestamp, message: String },
    /// It waits behind this claim.
    Behind(String),
}

/// Whether the youngest claim of `line` can have its machines.
pub fn admit_last(line: &[OpenClaim], stock: Stock, now: Timestamp) -> Admission {
    let Some(own) = line.last() else { return Ok(Vec::new()) };
    // Mostly there is enough for all of its class, which is found out without a look at each claim's needs.
    let of_class = |claim: &&OpenClaim| claim.needs.resource_class == own.needs.resource_class;
    let wanted = line.iter().filter(of_class).fold(0_usize, |sum, claim| sum.saturating_add(claim.missing as usize));
    let fitting = stock.idle.iter().filter(|machine| !stock.exhausted && own.needs.met_by_record(machine));
    let may_block = line.iter().filter(of_class).any(|claim| claim.may_block(now));
    if fitting.take(wanted).count() == wanted && !may_block {
        return Ok(Vec::new());
    }
    admit(line, stock, now).pop().unwrap_or(Ok(Vec::new()))
}

/// Whether each claim of `line`, which is ordered by age, can have its machines.
pub fn admit(line: &[OpenClaim], mut stock: Stock, now: Timestamp) -> Vec<Admission> {
    // Machines with a scope are taken first: those without are left for others.
    stock.idle.sort_by_key(|machine| reuse_scope::of_machine(machine).is_empty());
    let (mut blocked_by, mut waiting, mut admissions) = (HashMap::<&str, &str>::new(), Vec::new(), Vec::new());
    for claim in line {
        let class = claim.needs.resource_class.as_str();
        let admission = match blocked_by.get(class) {
            Some(first) => Err(Obstacle::Behind((*first).to_owned())),
            None => stock.take(claim, &waiting, now),
        };
        if admission.is_err() && claim.may_block(now) {
            blocked_by.entry(class).or_insert(&claim.name);
        }
        if admission.is_err() || stock.exhausted {
            waiting.push(&claim.needs);
        }
        admissions.push(admission);
    }
    admissions
}

impl OpenClaim {
    fn may_block(&self, now: Timestamp) -> bool {
        now.duration_since(self.since) >= PASSED_FOR_MAX
    }
}

impl Stock<'_> {
    /// Takes what the claim needs, or nothing. `waiting`: what older claims need that are yet to get it.
    fn take(&mut self, claim: &OpenClaim, waiting: &[&Requirements], now: Timestamp) -> Admission {
        let exhausted = self.exhausted;
        let fits = |machine: &Instance| !exhausted && claim.needs.met_by_record(machine);
        let idle = self.idle.iter().filter(|machine| fits(machine)).take(claim.missing as usize).count() as u32;
        let new = claim.missing - idle;
        let excess = self.live.saturating_add(new).saturating_sub(self.spec.max_instances);
        let mut ends = Vec::new();
        if new > 0 {
            if excess > 0 {
                ends = self.evictable(claim, waiting);
                ends.truncate(excess as usize);
                if ends.len() < excess as usize {
                    return Err(Obstacle::NoRoom { new, live: self.live });
                }
            }
            let fallback = self.spec.fallback.spot_to_on_demand;
            if let LaunchChoice::Wait { until, causes } = self.capacity.order(&claim.needs, self.subnets, fallback, now)
                && !self.subnets.is_empty()
            {
                return Err(Obstacle::NoCapacity { until, message: in_words(&causes) });
            }
            self.live += new;
            self.live -= excess;
        }
        let mut left = idle;
        self.idle.retain(|machine| {
            let taken = left > 0 && fits(machine);
            left -= u32::from(taken);
            !taken && !ends.contains(&machine.instance_id)
        });
        Ok(ends)
    }

    /// The idle machines that may end for a claim's new ones: those of another scope, longest idle first.
    fn evictable(&self, claim: &OpenClaim, waiting: &[&Requirements]) -> Vec<String> {
        let is_awaited = |machine: &Instance| waiting.iter().any(|needs| needs.met_by_record(machine));
        let of_another = |machine: &&&Instance| !claim.needs.fits_scope(machine) && !is_awaited(machine);
        let mut found: Vec<_> = self.idle.iter().filter(of_another).collect();
        found.sort_by_key(|machine| (machine.updated_at, &machine.instance_id));
        found.into_iter().map(|machine| machine.instance_id.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use paddock_record::State;

    use super::*;
    use crate::{
        api::{LaunchTemplate, OrderSubnet, UsageClass},
        ec2::launch::Wanted,
        fixtures::ec2::{at, ec2_claim, pool, record, subnets},
    };

    const NOW: i64 = 1000;

    fn claim(name: &str, missing: u32, since: i64) -> OpenClaim {
        let needs = Requirements::of(&ec2_claim(missing, "1").spec, "ci", &pool()).unwrap();
        OpenClaim { name: name.into(), needs, missing, since: at(since) }
    }

    fn spot(mut claim: OpenClaim) -> OpenClaim {
        claim.needs.usage_class = UsageClass::Spot;
        claim
    }

    /// What each claim gets from `idle` on-demand machines and room for `room` more.
    fn admitted(line: &[OpenClaim], idle: usize, room: u32, capacity: &CapacityMemory) -> Vec<Admission> {
        let idle: Vec<_> = (0..idle).map(|n| record(&format!("i-{n}"), State::Idle, "", at(0))).collect();
        admitted_beside(line, &idle, 0, room, capacity)
    }

    /// The same with these idle machines, and `busy` others.
    fn admitted_beside(
        line: &[OpenClaim],
        idle: &[Instance],
        busy: u32,
        room: u32,
        capacity: &CapacityMemory,
    ) -> Vec<Admission> {
        let live = idle.len() as u32 + busy;
        let spec = Ec2Pool { max_instances: live + room, ..pool() };
        let subnets = &subnets();
        let stock = Stock { spec: &spec, live, idle: idle.iter().collect(), exhausted: false, capacity, subnets };
        let each = admit(line, stock.clone(), at(NOW));
        for youngest in 1..=line.len() {
            assert_eq!(admit_last(&line[..youngest], stock.clone(), at(NOW)), each[youngest - 1], "{youngest}");
        }
        each
    }

    fn plenty() -> CapacityMemory {
        CapacityMemory::new(std::time::Duration::from_mins(3))
    }

    const fn no_room(new: u32, live: u32) -> Admission {
        Err(Obstacle::NoRoom { new, live })
    }

    const fn whole() -> Admission {
        Ok(Vec::new())
    }

    /// The claim is served once these machines have ended.
    fn after(ids: &[&str]) -> Admission {
        Ok(ids.iter().map(|id| (*id).to_owned()).collect())
    }

    /// An idle machine of the repository, since so long.
    fn used(id: &str, repository: &str, since: i64) -> Instance {
        let mut used = record(id, State::Idle, "", at(since));
        (used.claims, used.scope) = (1, format!("repository:acme/{repository}"));
        used
    }

    fn of_repository(repository: &str, mut claim: OpenClaim) -> OpenClaim {
        claim.needs.scope = format!("repository:acme/{repository}");
        claim
    }

    #[test]
    fn the_oldest_take_idle_machines_first_and_room_for_the_rest() {
        let line = [claim("a", 2, NOW), claim("b", 2, NOW), claim("c", 1, NOW)];
        assert_eq!(admitted(&line, 5, 0, &plenty()), [whole(), whole(), whole()]);
        assert_eq!(admitted(&line, 3, 1, &plenty()), [whole(), whole(), no_room(1, 4)]);
        assert_eq!(admitted(&line, 0, 3, &plenty()), [whole(), no_room(2, 2), whole()]);
    }

    #[test]
    fn a_claim_that_does_not_fit_is_passed_for_five_minutes_only() {
        let waited = NOW - PASSED_FOR_MAX.as_secs();
        let line = |since| [claim("large", 3, since), claim("small", 1, NOW)];
        assert_eq!(admitted(&line(waited + 1), 1, 1, &plenty()), [no_room(2, 1), whole()]);
        let behind = Err(Obstacle::Behind("large".into()));
        assert_eq!(admitted(&line(waited), 1, 1, &plenty()), [no_room(2, 1), behind]);
        assert_eq!(admitted(&line(waited), 4, 0, &plenty()), [whole(), whole()]);
        let other = [spot(claim("spot", 1, waited)), claim("small", 1, NOW)];
        assert_eq!(admitted(&other, 2, 0, &plenty()), [no_room(1, 2), Err(Obstacle::Behind("spot".into()))]);
    }

    #[test]
    fn a_claim_without_capacity_takes_no_idle_machine_either() {
        let mut capacity = plenty();
        let (needs, template) = (&claim("a", 1, NOW).needs, &LaunchTemplate::default());
        let (client_token, usage_class) = ("t".into(), needs.usage_class);
        let (subnets, tags) = (subnets().iter().map(OrderSubnet::from).collect(), BTreeMap::new());
        let order =
            Wanted { client_token, attempt: 1, template, count: 1, usage_class, subnets, needs, tags }.order(at(NOW));
        capacity.note(&order, 0, &[], at(NOW));
        let line = [claim("a", 2, NOW), claim("b", 1, NOW)];
        let found = admitted(&line, 1, 9, &capacity);
        assert!(matches!(found[0], Err(Obstacle::NoCapacity { .. })), "{found:?}");
        assert_eq!(found[1], whole());
    }

    #[test]
    fn machines_that_have_been_idle_longest_make_room_and_no_more_than_needed() {
        let (a, b) = (|missing| of_repository("a", claim("a", missing, NOW)), of_repository("b", claim("b", 1, NOW)));
        let idle = [used("i-3", "b", 3), used("i-1", "b", 1), used("i-2", "b", 2), used("i-9", "a", 0)];
        let gets = |missing, room| admitted_beside(&[a(missing)], &idle, 0, room, &plenty()).remove(0);
        assert_eq!(gets(1, 0), whole(), "its own machine");
        assert_eq!(gets(2, 0), after(&["i-1"]));
        assert_eq!(gets(3, 0), after(&["i-1", "i-2"]));
        assert_eq!(gets(3, 1), after(&["i-1"]), "and the room there is");
        assert_eq!(gets(5, 0), no_room(4, 4), "none ends where that is not enough");
        let new = [record("i-0", State::Idle, "", at(0)), used("i-1", "b", 1)];
        let line = [of_repository("c", claim("c", 3, NOW))];
        assert_eq!(admitted_beside(&line, &new, 1, 0, &plenty()), [no_room(2, 3)], "one that any claim may use stays");
        let line = [a(2), b];
        assert_eq!(admitted_beside(&line, &idle, 0, 0, &plenty()), [after(&["i-1"]), whole()]);
    }

    #[test]
    fn a_machine_makes_no_room_that_an_older_claim_takes_or_waits_for() {
        let older = |missing| of_repository("b", claim("older", missing, NOW));
        let own = of_repository("a", claim("own", 1, NOW));
        let idle = [used("i-1", "b", 1), used("i-2", "b", 2)];
        let gets = |line: &[OpenClaim], busy| admitted_beside(line, &idle, busy, 0, &plenty());
        assert_eq!(gets(&[older(1), own.clone()], 0), [whole(), after(&["i-2"])]);
        assert_eq!(gets(&[older(3), own.clone()], 3), [no_room(1, 5), no_room(1, 5)], "it may have both soon");
        let mut large = used("i-3", "b", 0);
        large.resource_class = "large".into();
        let mut of_large = older(2);
        of_large.needs.resource_class = "large".into();
        let idle = [large, used("i-4", "c", 4)];
        let gets = |line: &[OpenClaim]| admitted_beside(line, &idle, 3, 0, &plenty());
        assert_eq!(gets(std::slice::from_ref(&own)), [after(&["i-3"])], "of another class");
        assert_eq!(gets(&[of_large.clone(), own.clone()]), [after(&["i-4"]), no_room(1, 5)]);
        of_large.missing = 9;
        assert_eq!(gets(&[of_large, own]), [no_room(8, 5), after(&["i-4"])]);
    }

    #[test]
    fn classes_share_the_room_and_block_only_their_own() {
        let waited = NOW - PASSED_FOR_MAX.as_secs();
        let mut large = claim("large", 3, waited);
        large.needs.resource_class = "large".into();
        let line = |missing| [OpenClaim { missing, ..large.clone() }, claim("small", 2, NOW)];
        assert_eq!(admitted(&line(3), 0, 2, &plenty()), [no_room(3, 0), whole()]);
        assert_eq!(admitted(&line(1), 0, 2, &plenty()), [whole(), no_room(2, 1)]);
    }
}
