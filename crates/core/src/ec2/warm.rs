//! Machines that `minIdle` keeps warm: which ones, and how many are missing.

use std::{cmp::Reverse, collections::HashSet};

use paddock_record::State;

use super::{machine::Machine, requirements::Requirements, reuse_scope};
use crate::api::Ec2Pool;

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

/// How many machines to launch, so that `minIdle` of them are idle or booting.
pub fn missing(machines: &[Machine], pool: &Ec2Pool) -> u32 {
    let counts =
        |machine: &&Machine| is_default(machine, pool) && (is_booting(machine) || machine.record.state == State::Idle);
    pool.min_idle.saturating_sub(machines.iter().filter(counts).count() as u32)
}

/// The idle machines that are kept warm: those that expire last.
pub fn kept<'a>(machines: &'a [Machine], pool: &Ec2Pool) -> HashSet<&'a str> {
    let idle = |machine: &&Machine| machine.record.state == State::Idle && is_default(machine, pool);
    let mut idle: Vec<_> = machines.iter().filter(idle).collect();
    idle.sort_by_key(|machine| Reverse(machine.record.threshold));
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
        assert_eq!(missing(&machines, &pool), 3);
        assert_eq!(missing(&machines, &Ec2Pool { min_idle: 1, ..pool }), 0);
    }

    #[test]
    fn a_machine_of_a_scope_counts_only_where_the_pool_gives_it_to_all() {
        let mut pool = Ec2Pool { min_idle: 2, ..pool() };
        let mut used = machine("i-1", State::Idle, "", 9);
        (used.record.claims, used.record.scope) = (1, "repository:acme/a".into());
        let machines = [used, machine("i-2", State::Idle, "", 5)];
        assert_eq!((missing(&machines, &pool), kept(&machines, &pool)), (1, HashSet::from(["i-2"])));
        pool.reuse.scope = ReuseScope::Pool;
        assert_eq!((missing(&machines, &pool), kept(&machines, &pool).len()), (0, 2));
    }

    #[test]
    fn those_that_expire_last_are_kept() {
        let pool = Ec2Pool { min_idle: 1, ..pool() };
        let machines = [machine("i-1", State::Idle, "", 5), machine("i-2", State::Idle, "", 9)];
        assert_eq!(kept(&machines, &pool), HashSet::from(["i-2"]));
    }
}
