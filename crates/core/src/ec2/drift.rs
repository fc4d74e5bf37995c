//! Machines that were made from an earlier template or image than their pool makes them from now.

use std::collections::HashSet;

use paddock_record::{Instance, State};

use super::{machine::Machine, upkeep::Upkeep, warm};
use crate::api::{Ec2Pool, FailureReason, LaunchTemplate};

/// Machines that are replaced at once: a template whose machines do not boot costs no more.
pub const REPLACED_AT_ONCE: usize = 3;

/// Whether a machine differs from what its pool makes machines from now. A record of an earlier version of Paddock does not
/// say what its machine was made from: it does not differ.
pub fn is_outdated(record: &Instance, template: Option<&LaunchTemplate>) -> bool {
    let differs = |of_machine: &str, of_pool: Option<&String>| {
        !of_machine.is_empty() && of_pool.is_some_and(|of_pool| of_pool != of_machine)
    };
    let template = template.filter(|_| record.state != State::Terminated);
    template
        .is_some_and(|now| differs(&record.template, now.digest.as_ref()) || differs(&record.image, now.image.as_ref()))
}

/// The outdated machines of a pool.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Drift<'a> {
    outdated: HashSet<&'a str>,
    /// Those that are terminated now.
    replaced: HashSet<&'a str>,
}

impl<'a> Drift<'a> {
    /// Idle machines beyond `minIdle` are terminated. The others are once their replacements are idle, or first where the pool
    /// has no room for both.
    pub fn of(machines: &'a [Machine], pool: &Ec2Pool, template: Option<&LaunchTemplate>) -> Self {
        let outdated: Vec<_> = machines.iter().filter(|machine| is_outdated(&machine.record, template)).collect();
        let kept = warm::kept(machines, pool, template);
        let is_kept = |machine: &&Machine| kept.contains(machine.record.instance_id.as_str());
        let (kept, surplus): (Vec<_>, Vec<_>) =
            outdated.iter().copied().filter(|machine| machine.is_free()).partition(is_kept);
        let live = machines.iter().filter(|machine| machine.record.state != State::Terminated).count();
        let booting = machines.iter().filter(|machine| warm::is_booting(machine)).count();
        let without_room = match live >= pool.max_instances as usize {
            true => REPLACED_AT_ONCE.saturating_sub(booting),
            false => 0,
        };
        let replaced = surplus.into_iter().chain(kept.into_iter().take(without_room)).take(REPLACED_AT_ONCE);
        let ids = |machine: &'a Machine| machine.record.instance_id.as_str();
        Self { replaced: replaced.map(ids).collect(), outdated: outdated.into_iter().map(ids).collect() }
    }

    /// What is done with a machine: an outdated one is terminated instead of pooled after its claim.
    pub fn apply(&self, machine: &Machine, decided: Upkeep) -> Upkeep {
        let id = machine.record.instance_id.as_str();
        match decided {
            Upkeep::Pool if self.outdated.contains(id) => end(),
            Upkeep::Leave | Upkeep::Renew if self.replaced.contains(id) => end(),
            decided => decided,
        }
    }
}

fn end() -> Upkeep {
    Upkeep::End(FailureReason::Outdated, "it was made from an earlier template or image of its pool".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::ec2::{at, leaving, pool, record, tracked};

    fn template(digest: &str, image: &str) -> LaunchTemplate {
        LaunchTemplate { digest: Some(digest.into()), image: Some(image.into()), ..LaunchTemplate::default() }
    }

    fn machine(id: &str, state: State, template: &str) -> Machine {
        let mut machine = tracked(record(id, state, "", at(0)));
        (machine.record.template, machine.record.image) = (template.into(), "ami-1".into());
        machine
    }

    fn replaced(machines: &[Machine], min_idle: u32, max_instances: u32) -> Vec<&str> {
        let pool = Ec2Pool { min_idle, max_instances, ..pool() };
        let drift = Drift::of(machines, &pool, Some(&template("new", "ami-1")));
        let mut ids: Vec<_> = drift.replaced.into_iter().collect();
        ids.sort();
        ids
    }

    #[test]
    fn a_machine_is_outdated_if_its_template_or_image_is_known_and_another() {
        let mut it = machine("i-1", State::Idle, "old").record;
        for (digest, image, outdated) in
            [("old", "ami-1", false), ("new", "ami-1", true), ("old", "ami-2", true), ("new", "ami-2", true)]
        {
            assert_eq!(is_outdated(&it, Some(&template(digest, image))), outdated, "{digest} {image}");
        }
        assert!(!is_outdated(&it, None) && !is_outdated(&it, Some(&LaunchTemplate::default())), "nothing is known");
        it.state = State::Terminated;
        assert!(!is_outdated(&it, Some(&template("new", "ami-1"))));
        (it.state, it.template, it.image) = (State::Idle, String::new(), String::new());
        assert!(!is_outdated(&it, Some(&template("new", "ami-1"))), "an earlier version made it");
    }

    #[test]
    fn warm_machines_are_replaced_when_others_are_idle_or_no_room_is_left_for_both() {
        let old = |id| machine(id, State::Idle, "old");
        let (old, new) = ([old("i-1"), old("i-2"), old("i-3"), old("i-4")], machine("i-9", State::Idle, "new"));
        let booting = machine("i-8", State::Created, "new");
        assert_eq!(replaced(&old, 4, 20), [""; 0], "replacements come first");
        assert_eq!(replaced(&[&old[..], std::slice::from_ref(&booting)].concat(), 4, 20), [""; 0], "and boot");
        assert_eq!(replaced(&[&old[..], &[new]].concat(), 4, 20).len(), 1);
        assert_eq!(replaced(&old, 4, 4).len(), REPLACED_AT_ONCE, "no room");
        assert_eq!(replaced(&[&old[..], &[booting]].concat(), 4, 5).len(), REPLACED_AT_ONCE - 1, "one is on its way");
        assert_eq!(replaced(&old, 0, 20).len(), REPLACED_AT_ONCE, "none has to stay");
    }

    #[test]
    fn busy_machines_end_when_they_are_released() {
        let (busy, released) = (machine("i-1", State::Running, "old"), machine("i-2", State::Idle, "old"));
        let released = Machine { record: leaving("7", released.record.clone()), ..released };
        let machines = [busy, released, machine("i-3", State::Created, "old")];
        let pool = Ec2Pool { max_instances: 1, ..pool() };
        let drift = Drift::of(&machines, &pool, Some(&template("new", "ami-1")));
        assert!(drift.replaced.is_empty() && drift.outdated.len() == 3, "{drift:?}");
        assert_eq!(drift.apply(&machines[0], Upkeep::Leave), Upkeep::Leave);
        assert_eq!(drift.apply(&machines[1], Upkeep::Leave), Upkeep::Leave, "it has yet to deregister");
        assert!(matches!(drift.apply(&machines[1], Upkeep::Pool), Upkeep::End(FailureReason::Outdated, _)));
        assert_eq!(drift.apply(&machines[2], Upkeep::Warm), Upkeep::Warm, "it is replaced once it is idle");
    }
}
