use k8s_openapi::api::core::v1::Node;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{
    demand::supply::drop_records,
    fixtures::boards::{board, board_pool, claim, node, with},
};

#[path = "schedule_refusal_tests.rs"]
mod refusals;

const NOW: i64 = 1_735_700_000;

struct Scenario {
    pools: Vec<Arc<RunnerPool>>,
    claims: Vec<Arc<RunnerClaim>>,
    workers: Vec<Arc<Worker>>,
    slots: u32,
    nodes: Vec<Node>,
    limits: EntityLimits,
    not_ready: BTreeMap<PoolKey, String>,
    jobs: BTreeMap<String, JobSeen>,
    refusals: BTreeMap<Subject, Refusal>,
    now: i64,
}

impl Scenario {
    fn new(slots: u32, claims: Vec<RunnerClaim>) -> Self {
        Self {
            pools: vec![Arc::new(board_pool("p"))],
            claims: claims.into_iter().map(Arc::new).collect(),
            workers: vec![],
            slots,
            nodes: vec![],
            limits: EntityLimits::default(),
            not_ready: BTreeMap::new(),
            jobs: BTreeMap::new(),
            refusals: BTreeMap::new(),
            now: NOW,
        }
    }

    fn decide(&self) -> Vec<Decision> {
        self.plan().decisions
    }

    fn plan(&self) -> Plan {
        let plan = self.plan_with(&self.claims, &self.workers);
        let (mut claims, mut workers) = (self.claims.clone(), self.workers.clone());
        drop_records(&mut claims, &mut workers, &self.jobs);
        assert_eq!(self.plan_with(&claims, &workers), plan, "finished records change no decision");
        plan
    }

    fn plan_with(&self, claims: &[Arc<RunnerClaim>], workers: &[Arc<Worker>]) -> Plan {
        let pools = self.pools.iter().map(|pool| (PoolKey::of(pool), board(pool)));
        let nodes = self.nodes.iter().cloned().chain([node("n", self.slots)]).map(Arc::new).collect::<Vec<_>>();
        let capacity = Capacity::count(pools, &nodes, &[], workers);
        decide(DemandFacts {
            pools: &self.pools,
            claims,
            workers,
            capacity,
            limits: &self.limits,
            not_ready: &self.not_ready,
            jobs: &self.jobs,
            refusals: &self.refusals,
            prefix: "paddock-0000-",
            now: Timestamp::from_second(self.now).unwrap(),
        })
    }

    /// Decides and creates the workers; returns who got one and what the others wait for.
    fn run(&mut self) -> Vec<(String, Option<ClaimReason>)> {
        let decisions = self.decide();
        decisions
            .into_iter()
            .map(|decision| match decision {
                Decision::Provision { claim, worker } => {
                    self.workers.push(Arc::new(*worker));
                    (claim.metadata.name.clone().unwrap(), None)
                }
                Decision::Wait { claim, wait } => (claim.metadata.name.clone().unwrap(), Some(wait.reason)),
            })
            .collect()
    }

    fn set(&mut self, index: usize, status: Value) {
        self.workers[index] = Arc::new(with(&self.workers[index], json!({"status": status})));
    }
}

fn ended(state: &str, second: i64) -> Value {
    json!({"state": state, "stateSince": Timestamp::from_second(second).unwrap()})
}

fn got(name: &str) -> (String, Option<ClaimReason>) {
    (name.into(), None)
}

fn waits(name: &str, reason: ClaimReason) -> (String, Option<ClaimReason>) {
    (name.into(), Some(reason))
}

#[test]
fn the_oldest_claim_gets_the_slot_and_the_others_stand_in_line() {
    let mut scenario = Scenario::new(1, vec![claim("b", 1), claim("z", 0), claim("c", 2)]);
    let expected = [got("z"), waits("b", ClaimReason::NoFreeSlot), waits("c", ClaimReason::WaitingInLine)];
    assert_eq!(scenario.run(), expected);
    let message = |decision: &Decision| match decision {
        Decision::Wait { wait, .. } => wait.message.clone(),
        Decision::Provision { .. } => panic!("nothing is free"),
    };
    let messages: Vec<_> = scenario.decide().iter().map(message).collect();
    assert_eq!(messages, ["no free slot on board b (0 of 1)", "1 earlier claim comes first"]);
}

#[test]
fn deciding_twice_from_the_same_view_makes_the_same_worker() {
    let scenario = Scenario::new(4, vec![with(&claim("a", 0), json!({"spec": {"count": 2}}))]);
    assert_eq!(scenario.decide(), scenario.decide());
    let names: BTreeSet<_> = scenario
        .decide()
        .iter()
        .map(|decision| match decision {
            Decision::Provision { worker, .. } => worker.metadata.name.clone().unwrap(),
            Decision::Wait { .. } => panic!("there is room"),
        })
        .collect();
    assert_eq!(names.len(), 2);
}

#[test]
fn an_owner_at_its_cap_waits_and_does_not_hold_up_others() {
    let other =
        with(&claim("other", 9), json!({"spec": {"owner": {"id": 2, "login": "other", "type": "Organization"}}}));
    let mut scenario = Scenario::new(9, vec![claim("a", 0), claim("b", 1), claim("c", 2), other]);
    scenario.limits.overrides.insert("1".into(), 1);
    let expected =
        [got("a"), waits("b", ClaimReason::QuotaReached), waits("c", ClaimReason::QuotaReached), got("other")];
    assert_eq!(scenario.run(), expected);
}

#[test]
fn a_personal_accounts_cap_counts_by_repository() {
    let user = |name: &str, repository: i64| {
        with(
            &claim(name, repository),
            json!({"spec": {
                "owner": {"id": 5, "login": "u", "type": "User"}, "repository": "u/r", "repositoryId": repository,
            }}),
        )
    };
    let mut scenario = Scenario::new(9, vec![user("a", 10), user("b", 11)]);
    scenario.limits.default = 1;
    assert_eq!(scenario.run(), [got("a"), got("b")]);
}

#[test]
fn a_failed_worker_is_no_supply_and_is_replaced_after_a_growing_wait() {
    let mut scenario = Scenario::new(9, vec![claim("a", 0), claim("later", 1)]);
    assert_eq!(scenario.run(), [got("a"), got("later")]);
    scenario.set(0, ended("failed", NOW));
    assert_eq!(scenario.run(), [waits("a", ClaimReason::WorkerLost)]);
    scenario.now = NOW + 5;
    assert_eq!(scenario.run(), [got("a")]);
    scenario.set(2, ended("failed", NOW + 5));
    scenario.now = NOW + 14;
    assert_eq!(scenario.run(), [waits("a", ClaimReason::WorkerLost)]);
    scenario.now = NOW + 15;
    assert_eq!(scenario.run(), [got("a")]);
}

#[test]
fn a_completed_worker_settles_a_claim_without_a_job() {
    let mut scenario = Scenario::new(9, vec![with(&claim("a", 0), json!({"spec": {"count": 2}}))]);
    assert_eq!(scenario.run(), [got("a"), got("a")]);
    scenario.set(0, ended("completed", NOW));
    assert_eq!(scenario.run(), []);
}

fn with_job(name: &str, second: i64) -> RunnerClaim {
    with(&claim(name, second), json!({"spec": {"job": {"id": 5}}}))
}

/// Annotates the claim as a webhook does.
fn report_job(scenario: &mut Scenario, index: usize, state: &str, runner: Option<&str>) {
    let runner = runner.map(|name| format!("7/{name}"));
    let annotations = json!({"paddock.dev/job-state": state, "paddock.dev/job-runner": runner});
    scenario.claims[index] = Arc::new(with(&scenario.claims[index], json!({"metadata": {"annotations": annotations}})));
}

fn name_of(scenario: &Scenario, index: usize) -> String {
    scenario.workers[index].metadata.name.clone().unwrap()
}

#[test]
fn a_worker_whose_webhook_was_lost_is_replaced_when_github_reports_the_job_queued() {
    let mut scenario = Scenario::new(9, vec![with_job("a", 0)]);
    assert_eq!(scenario.run(), [got("a")]);
    scenario.set(0, ended("completed", NOW));
    assert_eq!(scenario.run(), [], "it may have run the job");
    let seen = |at| JobSeen { state: JobState::Queued, runner: None, at: Timestamp::from_second(at).unwrap() };
    scenario.jobs.insert("uid-a".into(), seen(NOW - 1));
    assert_eq!(scenario.run(), [], "that was before the worker ended");
    scenario.jobs.insert("uid-a".into(), seen(NOW));
    assert_eq!(scenario.run(), [got("a")]);
}

#[test]
fn a_runner_that_took_another_job_leaves_no_job_waiting() {
    let mut scenario = Scenario::new(9, vec![with_job("a", 0), with_job("b", 1)]);
    assert_eq!(scenario.run(), [got("a"), got("b")]);
    let [of_a, of_b] = [name_of(&scenario, 0), name_of(&scenario, 1)];
    report_job(&mut scenario, 1, "in_progress", Some(&of_a));
    assert_eq!(scenario.plan().bindings, BTreeMap::from([(of_a.clone(), Binding::Busy)]));
    assert_eq!(scenario.run(), [waits("a", ClaimReason::WaitingInLine)], "b's worker will take a's job");
    scenario.set(1, ended("failed", NOW - 60));
    assert_eq!(scenario.run(), [got("a")], "b's worker failed, and a's is busy with b's job");
    scenario.set(0, ended("completed", NOW));
    assert_eq!(scenario.run(), [], "a has its second worker, and the end of b's job is not reported yet");
    report_job(&mut scenario, 1, "completed", Some(&of_a));
    assert_eq!((scenario.plan().surplus, of_b.is_empty()), (BTreeSet::new(), false));
}

#[test]
fn a_job_that_is_over_before_it_was_served_takes_no_slot() {
    let mut scenario = Scenario::new(9, vec![with_job("a", 0)]);
    report_job(&mut scenario, 0, "completed", None);
    assert_eq!(scenario.run(), []);
}

#[test]
fn a_cancelled_jobs_worker_goes_unless_another_job_needs_it_or_it_is_busy() {
    let mut scenario = Scenario::new(9, vec![with_job("a", 0), with_job("b", 1)]);
    assert_eq!(scenario.run(), [got("a"), got("b")]);
    let [of_a, of_b] = [name_of(&scenario, 0), name_of(&scenario, 1)];
    assert_eq!(scenario.plan().surplus, BTreeSet::new());
    report_job(&mut scenario, 0, "completed", None);
    assert_eq!(scenario.plan().surplus, BTreeSet::from([of_a.clone()]));
    report_job(&mut scenario, 1, "in_progress", Some(&of_a));
    assert_eq!(scenario.plan().surplus, BTreeSet::from([of_b]), "a's worker is busy with b's job");
    scenario.claims.push(Arc::new(with_job("c", 2)));
    assert_eq!(scenario.plan().surplus, BTreeSet::new(), "c's job will find b's worker");
    assert_eq!(scenario.run(), [waits("c", ClaimReason::WaitingInLine)]);
    report_job(&mut scenario, 1, "completed", Some(&of_a));
    let done = Binding::Done(Timestamp::from_second(NOW).unwrap());
    assert_eq!(scenario.plan().bindings, BTreeMap::from([(of_a, done)]), "its one job is over");
}

#[test]
fn a_pool_that_is_not_ready_makes_no_worker_superfluous() {
    let mut scenario = Scenario::new(9, vec![with_job("a", 0), claim("b", 1)]);
    assert_eq!(scenario.run(), [got("a"), got("b")]);
    scenario.not_ready.insert(PoolKey::new("default", "p"), "no Secret".into());
    assert_eq!(scenario.plan().surplus, BTreeSet::new());
    scenario.pools.clear();
    assert_eq!(scenario.plan().surplus, BTreeSet::new());
}

#[test]
fn a_full_or_missing_board_blocks_no_other_one() {
    let on = |name: &str, second, pool: &str| with(&claim(name, second), json!({"spec": {"pool": pool}}));
    let claims = vec![on("a", 0, "p"), on("b", 1, "p"), on("c", 2, "free"), on("d", 3, "free")];
    let mut scenario = Scenario::new(0, claims);
    scenario.pools.push(Arc::new(with(&board_pool("free"), json!({"spec": {"board": {"board": "b2"}}}))));
    scenario.nodes.push(with(&node("m", 1), json!({"metadata": {"labels": {"riseproject.dev/board": "b2"}}})));
    let (full, line) = (ClaimReason::NoFreeSlot, ClaimReason::WaitingInLine);
    assert_eq!(scenario.run(), [waits("a", full), waits("b", line), got("c"), waits("d", full)]);
}

#[test]
fn a_spare_runner_with_the_same_labels_serves_the_next_claim() {
    let mut scenario = Scenario::new(9, vec![claim("a", 0), claim("b", 1)]);
    assert_eq!(scenario.run(), [got("a"), got("b")]);
    // a is over although its worker still waits for a job: that worker takes c's.
    scenario.claims[0] = Arc::new(with(&scenario.claims[0], json!({"status": {"phase": "Completed"}})));
    scenario.claims.push(Arc::new(claim("c", 2)));
    assert_eq!(scenario.run(), [waits("c", ClaimReason::WaitingInLine)]);
    let going = json!({"metadata": {"deletionTimestamp": "2025-01-01T00:00:00Z"}});
    scenario.workers[0] = Arc::new(with(&scenario.workers[0], going));
    assert_eq!(scenario.run(), [got("c")], "a worker that is being deleted takes no other job");
}

#[test]
fn claims_that_cannot_be_served_say_why() {
    let deleted = json!({"metadata": {"deletionTimestamp": "2025-01-01T00:00:00Z"}});
    let mut scenario = Scenario::new(
        9,
        vec![
            with(&claim("anonymous", 0), json!({"spec": {"owner": null}})),
            with(&claim("unknown", 1), json!({"spec": {"labels": ["x"]}})),
            with(&claim("lost", 2), json!({"spec": {"pool": "gone"}})),
            with(&claim("over", 3), json!({"status": {"phase": "Failed"}})),
            with(&claim("deleted", 4), deleted.clone()),
        ],
    );
    assert_eq!(
        scenario.run(),
        [
            waits("anonymous", ClaimReason::InvalidSpec),
            waits("unknown", ClaimReason::NoPoolForLabels),
            waits("lost", ClaimReason::PoolNotFound),
        ]
    );
    let mut scenario = Scenario::new(9, vec![claim("a", 0)]);
    scenario.not_ready.insert(PoolKey::new("default", "p"), "no Secret".into());
    assert_eq!(scenario.run(), [waits("a", ClaimReason::PoolNotReady)]);
    scenario.not_ready.clear();
    scenario.pools[0] = Arc::new(with(&scenario.pools[0], deleted));
    assert_eq!(scenario.run(), [waits("a", ClaimReason::NoPoolForLabels)]);
}

fn any_claim() -> impl Strategy<Value = (u32, i64, i64)> {
    (1..4u32, 0..4i64, 1..4i64)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// For any claims and any history: caps and slots hold, no deficit is filled twice, and claims of one owner and
    /// label set are served in order.
    #[test]
    fn caps_slots_and_the_line_hold(
        claims in prop::collection::vec(any_claim(), 0..20),
        states in prop::collection::vec(0..5u8, 0..40),
        slots in 0..12u32,
        cap in 0..8u32,
        rounds in 1..4usize,
    ) {
        let claims = claims.iter().enumerate().map(|(index, (count, second, owner))| {
            with(&claim(&format!("c{index:02}"), *second), json!({"spec": {"count": count, "owner": {"id": owner}}}))
        }).collect();
        let mut scenario = Scenario::new(slots, claims);
        scenario.limits.default = cap;
        for _ in 0..rounds {
            let first_new = scenario.workers.len();
            scenario.run();
            let active: Vec<_> = scenario.workers.iter().filter(|worker| is_active(worker)).collect();
            prop_assert!(active.len() <= slots as usize);
            for owner in 1..4i64 {
                let entity = owner.to_string();
                let of = |worker: &&&Arc<Worker>| worker.spec.board.as_ref().unwrap().entity == entity;
                prop_assert!(active.iter().filter(of).count() <= cap as usize);
            }
            for claim in &scenario.claims {
                let own = active.iter().filter(|worker| worker::serves(worker, claim)).count();
                prop_assert!(own <= claim.spec.count as usize);
            }
            let made: Vec<_> = scenario.workers[first_new..].iter().map(|worker| {
                let claim = scenario.claims.iter().find(|claim| worker::serves(worker, claim)).unwrap();
                let created = claim.metadata.creation_timestamp.clone().unwrap();
                (worker.spec.board.as_ref().unwrap().entity.clone(), created, claim.metadata.name.clone())
            }).collect();
            for entity in ["1", "2", "3"] {
                prop_assert!(made.iter().filter(|(of, ..)| of == entity).is_sorted());
            }
            let names: BTreeSet<_> = scenario.workers.iter().map(|worker| &worker.metadata.name).collect();
            prop_assert_eq!(names.len(), scenario.workers.len());
            prop_assert_eq!(scenario.plan().surplus, BTreeSet::new(), "no claim loses a worker that it asked for");
            for (index, state) in states.iter().enumerate().take(scenario.workers.len()) {
                let name = ["pending", "running", "running", "completed", "failed"][usize::from(*state)];
                if is_active(&scenario.workers[index]) {
                    scenario.set(index, ended(name, scenario.now));
                }
            }
            scenario.now += 3600;
        }
    }
}
