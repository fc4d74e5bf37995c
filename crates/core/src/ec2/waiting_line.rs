//! Which claims on a pool can be served now.
//!
//! A claim takes machines only when it can have all of them, so that a claim that waits holds nothing. Claims of one
//! pool and resource class are served oldest first. One that does not fit is passed by younger ones that do, until it
//! has waited [`PASSED_FOR_MAX`]: from then on they wait behind it.

use jiff::{SignedDuration, Timestamp};
use paddock_record::Instance;

use super::{
    capacity_memory::{CapacityMemory, LaunchChoice},
    requirements::Requirements,
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
    /// Machines that exist or are being launched.
    pub live: u32,
    pub capacity: &'a CapacityMemory,
}

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
pub fn admit_last(line: &[OpenClaim], stock: Stock, now: Timestamp) -> Result<(), Obstacle> {
    let Some(own) = line.last() else { return Ok(()) };
    // Mostly there is enough for all, which is found out without a look at each claim's needs.
    let wanted = line.iter().fold(0_usize, |sum, claim| sum.saturating_add(claim.missing as usize));
    let fitting = stock.idle.iter().filter(|machine| own.needs.met_by_record(machine));
    if fitting.take(wanted).count() == wanted && !line.iter().any(|claim| claim.may_block(now)) {
        return Ok(());
    }
    admit(line, stock, now).pop().unwrap_or(Ok(()))
}

/// Whether each claim of `line`, which is of one resource class and ordered by age, can have its machines.
pub fn admit(line: &[OpenClaim], mut stock: Stock, now: Timestamp) -> Vec<Result<(), Obstacle>> {
    let mut blocked_by = None;
    let admit = |claim: &OpenClaim| {
        if let Some(first) = &blocked_by {
            return Err(Obstacle::Behind(String::clone(first)));
        }
        let admitted = stock.take(claim, now);
        if admitted.is_err() && claim.may_block(now) {
            blocked_by = Some(claim.name.clone());
        }
        admitted
    };
    line.iter().map(admit).collect()
}

impl OpenClaim {
    fn may_block(&self, now: Timestamp) -> bool {
        now.duration_since(self.since) >= PASSED_FOR_MAX
    }
}

impl Stock<'_> {
    /// Takes what the claim needs, or nothing.
    fn take(&mut self, claim: &OpenClaim, now: Timestamp) -> Result<(), Obstacle> {
        let fits = |machine: &Instance| claim.needs.met_by_record(machine);
        let idle = self.idle.iter().filter(|machine| fits(machine)).take(claim.missing as usize).count() as u32;
        let new = claim.missing - idle;
        if new > 0 {
            if self.live.saturating_add(new) > self.spec.max_instances {
                return Err(Obstacle::NoRoom { new, live: self.live });
            }
            let fallback = self.spec.fallback.spot_to_on_demand;
            if let LaunchChoice::Wait { until, message } =
                self.capacity.order(&claim.needs, &self.spec.subnet_ids, fallback, now)
            {
                return Err(Obstacle::NoCapacity { until, message });
            }
            self.live += new;
        }
        let mut left = idle;
        self.idle.retain(|machine| {
            let taken = left > 0 && fits(machine);
            left -= u32::from(taken);
            !taken
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use paddock_record::State;

    use super::*;
    use crate::{
        api::{LaunchTemplate, UsageClass},
        ec2::{launch::Wanted, launch_error::Cause},
        fixtures::ec2::{at, ec2_claim, pool, record},
    };

    const NOW: i64 = 1000;

    fn claim(name: &str, missing: u32, since: i64) -> OpenClaim {
        let needs = Requirements::of(&ec2_claim(missing, "1").spec, &pool()).unwrap();
        OpenClaim { name: name.into(), needs, missing, since: at(since) }
    }

    fn spot(mut claim: OpenClaim) -> OpenClaim {
        claim.needs.usage_class = UsageClass::Spot;
        claim
    }

    /// What each claim gets from `idle` on-demand machines and room for `room` more.
    fn admitted(line: &[OpenClaim], idle: usize, room: u32, capacity: &CapacityMemory) -> Vec<Result<(), Obstacle>> {
        let spec = Ec2Pool { max_instances: idle as u32 + room, ..pool() };
        let idle: Vec<_> = (0..idle).map(|n| record(&format!("i-{n}"), State::Idle, "", at(0))).collect();
        let stock = Stock { spec: &spec, live: idle.len() as u32, idle: idle.iter().collect(), capacity };
        let each = admit(line, stock.clone(), at(NOW));
        for youngest in 1..=line.len() {
            assert_eq!(admit_last(&line[..youngest], stock.clone(), at(NOW)), each[youngest - 1], "{youngest}");
        }
        each
    }

    fn plenty() -> CapacityMemory {
        CapacityMemory::new(std::time::Duration::from_mins(3))
    }

    const fn no_room(new: u32, live: u32) -> Result<(), Obstacle> {
        Err(Obstacle::NoRoom { new, live })
    }

    #[test]
    fn the_oldest_take_idle_machines_first_and_room_for_the_rest() {
        let line = [claim("a", 2, NOW), claim("b", 2, NOW), claim("c", 1, NOW)];
        assert_eq!(admitted(&line, 5, 0, &plenty()), [Ok(()), Ok(()), Ok(())]);
        assert_eq!(admitted(&line, 3, 1, &plenty()), [Ok(()), Ok(()), no_room(1, 4)]);
        assert_eq!(admitted(&line, 0, 3, &plenty()), [Ok(()), no_room(2, 2), Ok(())]);
    }

    #[test]
    fn a_claim_that_does_not_fit_is_passed_for_five_minutes_only() {
        let waited = NOW - PASSED_FOR_MAX.as_secs();
        let line = |since| [claim("large", 3, since), claim("small", 1, NOW)];
        assert_eq!(admitted(&line(waited + 1), 1, 1, &plenty()), [no_room(2, 1), Ok(())]);
        let behind = Err(Obstacle::Behind("large".into()));
        assert_eq!(admitted(&line(waited), 1, 1, &plenty()), [no_room(2, 1), behind]);
        assert_eq!(admitted(&line(waited), 4, 0, &plenty()), [Ok(()), Ok(())]);
        let other = [spot(claim("spot", 1, waited)), claim("small", 1, NOW)];
        assert_eq!(admitted(&other, 2, 0, &plenty()), [no_room(1, 2), Err(Obstacle::Behind("spot".into()))]);
    }

    #[test]
    fn a_claim_without_capacity_takes_no_idle_machine_either() {
        let mut capacity = plenty();
        let (needs, template) = (&claim("a", 1, NOW).needs, &LaunchTemplate::default());
        let (client_token, subnet_ids, usage_class) = ("t".into(), pool().subnet_ids, needs.usage_class);
        let order =
            Wanted { client_token, attempt: 1, template, count: 1, usage_class, subnet_ids, needs }.order(at(NOW));
        let code = "InsufficientInstanceCapacity".into();
        let cause = Cause { code, subnet: "subnet-12345678".into(), ..Cause::default() };
        capacity.note(&order, 0, &[cause], at(NOW));
        let line = [claim("a", 2, NOW), claim("b", 1, NOW)];
        let found = admitted(&line, 1, 9, &capacity);
        assert!(matches!(found[0], Err(Obstacle::NoCapacity { .. })), "{found:?}");
        assert_eq!(found[1], Ok(()));
    }
}
