//! In-memory state of each pool between reconciliations. It is not persisted: the next leader prepares, sweeps and
//! sends messages again, which is harmless.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use jiff::SignedDuration;
use paddock_core::{
    api::Ec2Pool,
    clock_skew::{SkewedClock, Skews, shown},
    ec2::{failed_boots::FailedBoots, pool_status::PoolProblem, zones::Subnet},
    names::PoolKey,
};
use paddock_effects::{aws::ec2::Site, clock, lock};

/// How long a failed launch counts, unless the pool is edited or a later launch succeeds.
const LAUNCH_MEMORY: Duration = Duration::from_secs(300);

/// How soon GitHub is asked again about credentials, after it accepted and after it refused them.
const ACCEPTED_MEMORY: Duration = Duration::from_secs(300);
const REFUSED_MEMORY: Duration = Duration::from_secs(30);

#[derive(Default)]
pub struct PoolMemory {
    /// Why the last reload of the ledger failed, which concerns every pool.
    reload_problem: Mutex<Option<PoolProblem>>,
    pools: Mutex<HashMap<PoolKey, Memory>>,
}

#[derive(Default)]
struct Memory {
    /// When it was last compared with AWS, and at which generation.
    prepared: Option<(Instant, Option<i64>)>,
    /// Where its machines are launched, as EC2 described it then.
    site: Option<Site>,
    sweep_problem: Option<PoolProblem>,
    failed_launch: Option<FailedLaunch>,
    failed_boots: Option<FailedBoots>,
    credentials: Option<CredentialsCheck>,
    /// The skews of clocks that the pool's condition shows.
    skews: Skews,
    /// Machines whose idle message this leader has sent. The size of a queue is no substitute: it also counts obsolete
    /// messages.
    sent: HashSet<String>,
}

struct FailedLaunch {
    problem: PoolProblem,
    generation: Option<i64>,
    at: Instant,
}

/// Whether GitHub accepted the pool's credentials, or why not.
struct CredentialsCheck {
    answer: Result<(), String>,
    generation: Option<i64>,
    at: Instant,
}

impl PoolMemory {
    fn pools(&self) -> MutexGuard<'_, HashMap<PoolKey, Memory>> {
        lock(&self.pools)
    }

    fn with<T>(&self, pool: &PoolKey, act: impl FnOnce(&mut Memory) -> T) -> T {
        act(self.pools().entry(pool.clone()).or_default())
    }

    /// For a deleted pool.
    pub fn forget(&self, pool: &PoolKey) {
        self.pools().remove(pool);
    }

    /// Whether this generation of the pool was not compared with AWS within `period`; if so, it counts as compared now.
    pub fn is_prepare_due(&self, pool: &PoolKey, generation: Option<i64>, period: Duration) -> bool {
        self.with(pool, |memory| {
            let due = !memory.prepared.is_some_and(|(at, seen)| seen == generation && at.elapsed() < period);
            if due {
                memory.prepared = Some((Instant::now(), generation));
            }
            due
        })
    }

    /// Makes the next reconciliation compare the pool with AWS, because a resource may be missing.
    pub fn prepare_again(&self, pool: &PoolKey) {
        self.with(pool, |memory| memory.prepared = None);
    }

    pub fn note_site(&self, pool: &PoolKey, site: Site) {
        self.with(pool, |memory| memory.site = Some(site));
    }

    /// Where the pool's machines are launched, unless this leader has not asked yet about each of its subnets.
    pub fn site(&self, pool: &PoolKey, spec: &Ec2Pool) -> Option<Site> {
        let site = self.pools().get(pool)?.site.clone()?;
        let subnets: Vec<_> = site.subnets.into_iter().filter(|subnet| spec.subnet_ids.contains(&subnet.id)).collect();
        (subnets.len() == spec.subnet_ids.len()).then_some(Site { subnets, ..site })
    }

    /// The pool's subnets; none while they are not known.
    pub fn subnets(&self, pool: &PoolKey, spec: &Ec2Pool) -> Vec<Subnet> {
        self.site(pool, spec).map(|site| site.subnets).unwrap_or_default()
    }

    /// Ignored if the pool was deleted during its sweep.
    pub fn note_sweep(&self, pool: &PoolKey, problem: Option<PoolProblem>) {
        if let Some(memory) = self.pools().get_mut(pool) {
            memory.sweep_problem = problem;
        }
    }

    pub fn note_reload(&self, problem: Option<PoolProblem>) {
        *lock(&self.reload_problem) = problem;
    }

    /// Why the upkeep of the pool's machines fails.
    pub fn upkeep_problem(&self, pool: &PoolKey) -> Option<PoolProblem> {
        lock(&self.reload_problem).clone().or_else(|| self.pools().get(pool)?.sweep_problem.clone())
    }

    pub fn note_launch(&self, pool: &PoolKey, generation: Option<i64>, problem: Option<PoolProblem>) {
        let failed = problem.map(|problem| FailedLaunch { problem, generation, at: Instant::now() });
        self.with(pool, |memory| memory.failed_launch = failed);
    }

    /// Why the last launch for this generation of the pool failed, and how long ago.
    pub fn launch_problem(&self, pool: &PoolKey, generation: Option<i64>) -> Option<(PoolProblem, Duration)> {
        let pools = self.pools();
        let failed = pools.get(pool)?.failed_launch.as_ref()?;
        let age = failed.at.elapsed();
        (failed.generation == generation && age < LAUNCH_MEMORY).then(|| (failed.problem.clone(), age))
    }

    /// Stores GitHub's answer about the pool's credentials.
    pub fn note_credentials(&self, pool: &PoolKey, generation: Option<i64>, answer: Result<(), String>) {
        let check = CredentialsCheck { answer, generation, at: Instant::now() };
        self.with(pool, |memory| memory.credentials = Some(check));
    }

    /// Makes the next reconciliation ask GitHub about the pool's credentials.
    pub fn forget_credentials(&self, pool: &PoolKey) {
        self.with(pool, |memory| memory.credentials = None);
    }

    /// GitHub's last answer about the credentials of this generation of the pool, unless it is to be asked again.
    pub fn credentials(&self, pool: &PoolKey, generation: Option<i64>) -> Option<Result<(), String>> {
        let pools = self.pools();
        let check = pools.get(pool)?.credentials.as_ref()?;
        let memory = if check.answer.is_ok() { ACCEPTED_MEMORY } else { REFUSED_MEMORY };
        (check.generation == generation && check.at.elapsed() < memory).then(|| check.answer.clone())
    }

    /// A machine has failed after its launch.
    pub fn note_failed_boot(&self, pool: &PoolKey, generation: Option<i64>, failure: String) {
        let now = clock::now();
        self.with(pool, |memory| {
            memory.failed_boots = Some(FailedBoots::add(memory.failed_boots.take(), generation, failure, now));
        });
    }

    /// A machine has booted.
    pub fn note_boot(&self, pool: &PoolKey) {
        self.with(pool, |memory| memory.failed_boots = None);
    }

    /// Warm machines were launched.
    pub fn note_warm_launch(&self, pool: &PoolKey) {
        self.with(pool, |memory| memory.failed_boots.iter_mut().for_each(FailedBoots::launched));
    }

    /// The machines that failed after their launch, at this generation of the pool.
    pub fn failed_boots(&self, pool: &PoolKey, generation: Option<i64>) -> Option<FailedBoots> {
        let boots = self.pools().get(pool)?.failed_boots.clone()?;
        boots.problem(generation).is_some().then_some(boots)
    }

    /// The skews of clocks that the pool's condition is to show.
    pub fn show_skews(
        &self,
        pool: &PoolKey,
        measured: impl IntoIterator<Item = (SkewedClock, SignedDuration)>,
    ) -> Skews {
        self.with(pool, |memory| {
            memory.skews = shown(&memory.skews, measured);
            memory.skews.clone()
        })
    }

    pub fn note_sent(&self, pool: &PoolKey, id: &str) {
        self.with(pool, |memory| memory.sent.insert(id.to_owned()));
    }

    pub fn forget_sent(&self, pool: &PoolKey, id: &str) {
        self.with(pool, |memory| memory.sent.remove(id));
    }

    /// The `free` machines whose message was not sent yet. Those that are not free any more are forgotten.
    pub fn unsent(&self, pool: &PoolKey, free: &HashSet<&str>) -> HashSet<String> {
        self.with(pool, |memory| {
            memory.sent.retain(|id| free.contains(id.as_str()));
            free.iter().filter(|id| !memory.sent.contains(**id)).map(|id| (*id).to_owned()).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use paddock_core::{
        api::PoolReason,
        fixtures::ec2::{pool, subnets},
    };

    use super::*;

    fn linux() -> PoolKey {
        PoolKey::new("ci", "linux")
    }

    #[test]
    fn a_failed_launch_counts_until_one_succeeds_or_the_pool_is_edited() {
        let memory = PoolMemory::default();
        let bad = || Some((PoolReason::InvalidSpec, "no such subnet".to_owned()));
        let problem = |generation| memory.launch_problem(&linux(), Some(generation)).map(|(problem, _)| problem);
        memory.note_launch(&linux(), Some(1), bad());
        assert_eq!((problem(1), problem(2)), (bad(), None));
        assert_eq!(memory.launch_problem(&PoolKey::new("ci", "arm"), Some(1)), None);
        memory.note_launch(&linux(), Some(1), None);
        assert_eq!(problem(1), None);
    }

    #[test]
    fn subnets_are_known_once_ec2_has_described_each_of_the_pools() {
        let (memory, mut spec) = (PoolMemory::default(), pool());
        assert_eq!(memory.subnets(&linux(), &spec), []);
        let other = Subnet { id: "subnet-0123abcd".into(), ..subnets().remove(0) };
        let described = [subnets(), vec![other.clone()]].concat();
        memory.note_site(&linux(), Site { subnets: described, architecture: "x86_64".into() });
        assert_eq!(memory.subnets(&linux(), &spec), subnets(), "one that was removed from the pool is not used");
        spec.subnet_ids.push(other.id.clone());
        assert_eq!(memory.subnets(&linux(), &spec), [subnets(), vec![other]].concat());
        spec.subnet_ids.push("subnet-11111111".into());
        assert_eq!(memory.subnets(&linux(), &spec), [], "one is new");
    }

    #[test]
    fn a_message_is_unsent_until_it_is_sent_and_again_after_its_machine_was_taken() {
        let memory = PoolMemory::default();
        let free = HashSet::from(["i-1", "i-2"]);
        memory.note_sent(&linux(), "i-1");
        assert_eq!(memory.unsent(&linux(), &free), HashSet::from(["i-2".to_owned()]));
        memory.note_sent(&linux(), "i-2");
        assert!(memory.unsent(&linux(), &free).is_empty());
        assert!(memory.unsent(&linux(), &HashSet::from(["i-2"])).is_empty(), "i-1 is claimed");
        assert_eq!(memory.unsent(&linux(), &free), HashSet::from(["i-1".to_owned()]), "and free again");
        memory.forget_sent(&linux(), "i-2");
        assert_eq!(memory.unsent(&linux(), &free).len(), 2);
        memory.forget(&linux());
        assert_eq!(memory.unsent(&linux(), &free).len(), 2);
    }

    #[test]
    fn a_pool_is_prepared_once_per_period_generation_and_when_something_is_missing() {
        let memory = PoolMemory::default();
        let due = |generation| memory.is_prepare_due(&linux(), Some(generation), Duration::from_secs(300));
        assert!(due(1) && !due(1), "once");
        assert!(due(2) && !due(2), "and again when it is edited");
        memory.prepare_again(&linux());
        assert!(due(2));
        assert!(memory.is_prepare_due(&linux(), Some(2), Duration::ZERO), "and after the period");
    }

    #[test]
    fn a_sweep_that_ends_after_its_pool_was_deleted_leaves_nothing() {
        let memory = PoolMemory::default();
        memory.note_sent(&linux(), "i-1");
        memory.forget(&linux());
        memory.note_sweep(&linux(), Some((PoolReason::AwsUnavailable, "it ended late".to_owned())));
        assert_eq!(memory.upkeep_problem(&linux()), None);
    }
}
