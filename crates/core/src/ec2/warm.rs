//! Machines that `minIdle` keeps warm: which ones, and how many are missing.

use std::{cmp::Reverse, collections::HashSet};

use paddock_record::State;

use super::{
    drift::{REPLACED_AT_ONCE, is_outdated},
    machine::Machine,
    requirements::Requirements,
    reuse_scope,
};
use crate::api::{Ec2Pool, LaunchTemplate};

/// Requirements of warm machines: the pool's defaults.
pub fn requirements(pool: &Ec2Pool) -> Option<Requirements> {
    pool.default_resource_class().map(|class| Requirements::of_class(pool, class))
}

/// Whether every claim that asks for the defaults may have the machine.
fn is_default(machine: &Machine, pool: &Ec2Pool) -> bool {
    let class = pool.default_resource_class().map(|class| class.name.as_str());
    class == Some(machine.record.resource_class.as_str())
        && machine.record.usage_class == pool.defaults.usage_class.as_str()
        && reuse_scope::fits_all(&machine.record, pool)
}

/// Whether it was launched as a warm machine and has not booted yet.
pub fn is_booting(machine: &Machine) -> bool {
    machine.record.run_id.is_empty() && machine.record.state == State::Created
}

/// How many machines to launch, so that `minIdle` of them are idle or booting, and to replace outdated ones a few at a time.
pub fn missing(machines: &[Machine], pool: &Ec2Pool, template: Option<&LaunchTemplate>) -> u32 {
    let counts =
        |machine: &&Machine| is_default(machine, pool) && (is_booting(machine) || machine.record.state == State::Idle);
    let (outdated, current): (Vec<_>, Vec<_>) =
        machines.iter().filter(counts).partition(|machine| is_outdated(&machine.record, template));
    let lacking = (pool.min_idle as usize).saturating_sub(current.len());
    let missing = lacking.saturating_sub(outdated.len());
    let booting = current.iter().filter(|machine| is_booting(machine)).count();
    (missing + (lacking - missing).min(REPLACED_AT_ONCE.saturating_sub(booting))) as u32
}

/// The idle machines that are kept warm: those that expire last, outdated ones only where there are no others.
pub fn kept<'a>(machines: &'a [Machine], pool: &Ec2Pool, template: Option<&LaunchTemplate>) -> HashSet<&'a str> {
    let idle = |machine: &&Machine| machine.record.state == State::Idle && is_default(machine, pool);
    let mut idle: Vec<_> = machines.iter().filter(idle).collect();
    idle.sort_by_key(|machine| (is_outdated(&machine.record, template), Reverse(machine.record.threshold)));
    idle.into_iter().take(pool.min_idle as usize).map(|machine| machine.record.instance_id.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::ReuseScope;
    use crate::fixtures::ec2::{at, pool, record, tracked};

    fn machine(id: &str, state: State, run: &str, threshold: i64) -> Machine {
        let mut machine = tracked(record(id, state, run, at(0)));
        machine.record.threshold = Some(at(threshold));
        machine
    }

    #[test]
    fn idle_and_booting_machines_of_the_default_kind_count() {
        let pool = Ec2Pool { min_idle: 5, ..pool() };
        let mut large = machine("i-5", State::Idle, "", 9);
        large.record.resource_class = "large".into();
        let machines = [
            machine("i-1", State::Idle, "", 9),
            machine("i-2", State::Created, "", 9),
            machine("i-3", State::Created, "7", 9),
            machine("i-4", State::Running, "7", 9),
            large,
        ];
        assert_eq!(missing(&machines, &pool, None), 3);
        assert_eq!(missing(&machines, &Ec2Pool { min_idle: 1, ..pool }, None), 0);
    }

    #[test]
    fn a_machine_of_a_scope_counts_only_where_the_pool_gives_it_to_all() {
        let mut pool = Ec2Pool { min_idle: 2, ..pool() };
        let mut used = machine("i-1", State::Idle, "", 9);
        (used.record.claims, used.record.scope) = (1, "repository:acme/a".into());
        let machines = [used, machine("i-2", State::Idle, "", 5)];
        assert_eq!((missing(&machines, &pool, None), kept(&machines, &pool, None)), (1, HashSet::from(["i-2"])));
        pool.reuse.scope = ReuseScope::Pool;
        assert_eq!((missing(&machines, &pool, None), kept(&machines, &pool, None).len()), (0, 2));
    }

    #[test]
    fn outdated_machines_are_replaced_a_few_at_a_time_and_kept_until_then() {
        let template = LaunchTemplate { digest: Some("new".into()), ..LaunchTemplate::default() };
        let made = |id: &str, state, template: &str, threshold| {
            let mut machine = machine(id, state, "", threshold);
            machine.record.template = template.into();
            machine
        };
        let old = ["i-1", "i-2", "i-3", "i-4", "i-5"].map(|id| made(id, State::Idle, "old", 9));
        let booting = ["i-6", "i-7"].map(|id| made(id, State::Created, "new", 9));
        let idle = made("i-8", State::Idle, "new", 5);
        for (machines, min_idle, expected) in [
            (old.to_vec(), 5, 3),
            (old.to_vec(), 2, 2),
            (old.to_vec(), 7, 2 + 3),
            ([&old[..], &booting].concat(), 5, 1),
            ([&old[..], &booting].concat(), 2, 0),
            ([&old[..], std::slice::from_ref(&idle)].concat(), 5, 3),
            ([&old[..1], &booting, std::slice::from_ref(&idle)].concat(), 3, 0),
        ] {
            let pool = Ec2Pool { min_idle, ..pool() };
            assert_eq!(missing(&machines, &pool, Some(&template)), expected, "{min_idle} of {}", machines.len());
        }
        let (pool, machines) = (Ec2Pool { min_idle: 1, ..pool() }, [old[0].clone(), idle]);
        assert_eq!(kept(&machines, &pool, Some(&template)), HashSet::from(["i-8"]));
    }

    #[test]
    fn those_that_expire_last_are_kept() {
        let pool = Ec2Pool { min_idle: 1, ..pool() };
        let machines = [machine("i-1", State::Idle, "", 5), machine("i-2", State::Idle, "", 9)];
        assert_eq!(kept(&machines, &pool, None), HashSet::from(["i-2"]));
    }
}
