use std::sync::Arc;

use paddock_bed_github::schema::examples;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    super::event::{Event, Repository, read},
    *,
};
use crate::{
    api::{ANNOTATION_JOB_RUNNER, ANNOTATION_JOB_STATE, Owner, OwnerType, RunnerClaim, RunnerPool},
    demand::job_facts::JobStage,
    fixtures::boards::{board_pool, claim, with},
};

fn pools(labels: &[&str]) -> Vec<Arc<RunnerPool>> {
    vec![Arc::new(with(&board_pool("boards"), json!({"spec": {"board": {"labels": [labels]}}})))]
}

/// A job's event as GitHub sends it; the runner is null until one has the job.
fn body(action: &str) -> Value {
    let runner = matches!(action, "in_progress" | "completed");
    json!({
        "action": action,
        "workflow_job": {
            "id": 77, "run_id": 7, "name": "build", "labels": ["RV"],
            "html_url": "https://github.com/acme/rocket/actions/runs/7/job/77",
            "runner_id": runner.then_some(5), "runner_name": runner.then_some("boards-1"),
        },
        "repository": {
            "id": 3, "name": "rocket", "full_name": "acme/rocket",
            "owner": {"id": 1, "login": "acme", "type": "Organization"},
        },
        "installation": {"id": 9},
    })
}

fn job(body: &Value) -> Result<JobEvent, WebhookOutcome> {
    match read("workflow_job", body.to_string().as_bytes())? {
        Event::Job(event) => Ok(*event),
        Event::Run(_) => panic!("a job's event is read as one"),
    }
}

fn changed(mut body: Value, pointer: &str, value: Value) -> Value {
    *body.pointer_mut(pointer).unwrap() = value;
    body
}

fn made(body: &Value, pools: &[Arc<RunnerPool>]) -> RunnerClaim {
    match decide(&job(body).unwrap(), None, pools) {
        ClaimChange::Create(claim) => *claim,
        change => panic!("no claim is created, but {change:?}"),
    }
}

#[test]
fn a_queued_job_becomes_a_claim_with_all_that_is_known_of_it() {
    let claim = made(&body("queued"), &pools(&["rv"]));
    assert_eq!(
        json!(claim),
        json!({
            "apiVersion": "paddock.dev/v1alpha1", "kind": "RunnerClaim",
            "metadata": {
                "name": "job-77", "namespace": "default", "labels": {"paddock.dev/entity": "1"},
                "annotations": {ANNOTATION_JOB_STATE: "queued"}, "finalizers": ["paddock.dev/release"],
            },
            "spec": {
                "runId": "7", "count": 1, "labels": ["RV"], "repository": "acme/rocket", "repositoryId": 3,
                "owner": {"id": 1, "login": "acme", "type": "Organization"}, "installationId": 9,
                "job": {"id": 77, "name": "build", "url": "https://github.com/acme/rocket/actions/runs/7/job/77"},
            },
        })
    );
    let personal = changed(body("queued"), "/repository/owner/type", json!("User"));
    let claim = made(&personal, &pools(&["rv"]));
    assert_eq!(claim.spec.entity().as_deref(), Some("3"), "a personal account counts by repository");
}

#[test]
fn a_job_that_waits_or_has_no_pool_or_whose_name_is_taken_is_ignored() {
    let unserved = decide(&job(&body("queued")).unwrap(), None, &pools(&["rv", "big"]));
    assert_eq!(unserved, ClaimChange::Leave(WebhookOutcome::Ignored(Ignored::NoPool)));
    assert_eq!(job(&body("waiting")), Err(WebhookOutcome::Ignored(Ignored::Waiting)));
    assert_eq!(job(&body("requested")), Err(WebhookOutcome::Ignored(Ignored::OtherAction)));
    let other = claim("job-77", 0);
    let taken = decide(&job(&body("queued")).unwrap(), Some(&other), &pools(&["rv"]));
    assert_eq!(taken, ClaimChange::Leave(WebhookOutcome::Ignored(Ignored::NameTaken)));
}

/// The API server, and a replica's cache, which may be stale.
#[derive(Default)]
struct Server {
    versions: Vec<RunnerClaim>,
}

impl Server {
    /// Handles an event like a replica whose cache has the versions up to `seen`.
    fn take(&mut self, event: &JobEvent, seen: usize, pools: &[Arc<RunnerPool>]) {
        let mut known = seen.checked_sub(1).map(|last| self.versions[last].clone());
        loop {
            let next = match decide(event, known.as_ref(), pools) {
                ClaimChange::Leave(outcome) => {
                    assert_eq!(outcome, WebhookOutcome::Known);
                    return;
                }
                ClaimChange::Create(claim) => *claim,
                ClaimChange::Annotate(facts) => {
                    with(known.as_ref().unwrap(), json!({"metadata": {"annotations": facts.annotations()}}))
                }
            };
            // A create, or an update of an old version, is refused when another replica was faster.
            if known.as_ref() == self.versions.last() {
                self.versions.push(next);
                return;
            }
            known = self.versions.last().cloned();
        }
    }
}

proptest! {
    /// I6, I9: whatever the order and repetition of a job's webhooks, and however stale the replicas' caches, the claim
    /// ends with the same annotations, and they only move forward.
    #[test]
    fn i6_i9_webhooks_in_any_order_and_repetition_end_the_same(
        order in Just(vec!["queued", "waiting", "in_progress", "completed"]).prop_shuffle(),
        more in prop::collection::vec(prop::sample::select(vec!["queued", "waiting", "in_progress", "completed"]), 0..8),
        at in prop::collection::vec(any::<prop::sample::Index>(), 12),
        seen in prop::collection::vec(any::<prop::sample::Index>(), 12),
        length in 0usize..12,
    ) {
        let mut actions = order;
        for (action, at) in more.into_iter().zip(at) {
            actions.insert(at.index(actions.len() + 1), action);
        }
        actions.truncate(length);
        let mut server = Server::default();
        for (action, seen) in actions.iter().zip(&seen) {
            match job(&body(action)) {
                Ok(event) => server.take(&event, seen.index(server.versions.len() + 1), &pools(&["rv"])),
                Err(outcome) => prop_assert_eq!(outcome, WebhookOutcome::Ignored(Ignored::Waiting)),
            }
        }
        let stages: Vec<_> = server.versions.iter().map(|claim| JobFacts::of(claim).job.unwrap()).collect();
        prop_assert!(stages.is_sorted_by(|a, b| a < b), "never back, and never written twice: {:?}", stages);
        let furthest = actions.iter().filter_map(|action| JobStage::parse(action)).max();
        prop_assert_eq!(stages.last().copied(), furthest);
        if let Some(last) = server.versions.last() {
            let runner = last.metadata.annotations.as_ref().unwrap().get(ANNOTATION_JOB_RUNNER).map(String::as_str);
            prop_assert_eq!(runner, (furthest > Some(JobStage::Queued)).then_some("5/boards-1"));
        }
    }

    #[test]
    fn i9_any_bytes_are_borne(event in "workflow_job|workflow_run|ping|.{0,8}", body in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(read(&event, &body).is_err());
    }
}

proptest! {
    // Inputs of a megabyte are slow.
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Text from a workflow is data, cut to what the API accepts.
    #[test]
    fn i9_hostile_text_is_data_within_the_limits(name in hostile(), url in hostile(), runner in hostile(), label in hostile()) {
        let mut body = body("completed");
        body["workflow_job"]["name"] = json!(name);
        body["workflow_job"]["html_url"] = json!(url);
        body["workflow_job"]["runner_name"] = json!(runner);
        let claim = made(&body, &pools(&["rv"]));
        let job = claim.spec.job.as_ref().unwrap();
        let kept = job.name.as_ref().unwrap();
        prop_assert!(kept.chars().count() <= 1024);
        prop_assert!(kept == &name || kept.ends_with('…') && name.starts_with(kept.trim_end_matches('…')));
        prop_assert!(job.url.is_none(), "no such text is a URL");
        let facts = JobFacts::of(&claim);
        prop_assert_eq!(facts.runner.is_some(), !runner.is_empty());
        prop_assert!(facts.runner.is_none_or(|runner| runner.name.chars().count() <= 256));
        body["workflow_job"]["labels"] = json!([label, "rv"]);
        let change = decide(&super::tests::job(&body).unwrap(), None, &pools(&["rv"]));
        prop_assert_eq!(change, ClaimChange::Leave(WebhookOutcome::Ignored(Ignored::NoPool)));
    }

    #[test]
    fn i9_a_body_with_anything_in_it_is_read_or_refused(
        pointer in prop::sample::select(POINTERS), value in json_value(), action in prop::sample::select(ACTIONS),
    ) {
        let body = changed(body(action), pointer, value);
        if let Ok(event) = job(&body) {
            let change = decide(&event, None, &pools(&["rv"]));
            prop_assert!(matches!(
                change,
                ClaimChange::Create(_) | ClaimChange::Leave(WebhookOutcome::Ignored(Ignored::NoPool))
            ));
        }
    }
}

const ACTIONS: &[&str] = &["queued", "waiting", "in_progress", "completed"];
const POINTERS: &[&str] = &[
    "/action",
    "/workflow_job",
    "/workflow_job/id",
    "/workflow_job/run_id",
    "/workflow_job/labels",
    "/workflow_job/runner_id",
    "/repository",
    "/repository/id",
    "/repository/name",
    "/repository/owner",
    "/repository/owner/login",
    "/repository/owner/type",
    "/installation",
    "/installation/id",
];

fn hostile() -> impl Strategy<Value = String> {
    prop_oneof![
        "[ -~]{0,20}".prop_map(|text| format!("$({text})")),
        any::<String>().prop_map(|text| format!("\u{0}\n{text}\"'`")),
        Just("ß\u{202e}名\n".repeat(500)),
        Just("x".repeat(1_000_000)),
        Just(String::new()),
    ]
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        Just(json!(u64::MAX)),
    ];
    leaf.prop_recursive(4, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..20).prop_map(Value::from),
            prop::collection::hash_map(".{0,5}", inner, 0..4).prop_map(|map| map.into_iter().collect()),
        ]
    })
}

#[test]
fn i9_each_fault_is_refused_in_its_own_words() {
    let deep = format!("{{\"action\": \"queued\", \"workflow_job\": {}", "[".repeat(100_000));
    for (body, words) in [
        (String::new(), "EOF"),
        ("payload=%7B%7D".into(), "expected value"),
        ("{}".into(), "missing field `action`"),
        (deep, "invalid type: sequence"),
        (
            format!("{{\"x\": {}1{}, \"action\": 1}}", "[".repeat(50_000), "]".repeat(50_000)),
            "invalid type: integer `1`",
        ),
        (changed(body("queued"), "/workflow_job/id", json!(0)).to_string(), "workflow_job.id is not a number"),
        (changed(body("queued"), "/workflow_job/id", json!(1e300)).to_string(), "invalid type: floating point"),
        (changed(body("queued"), "/workflow_job/run_id", json!(-1)).to_string(), "workflow_job.run_id is not a number"),
        (changed(body("queued"), "/workflow_job/labels", json!("rv")).to_string(), "invalid type: string"),
        (changed(body("queued"), "/repository/owner/login", json!("a/b")).to_string(), "repository.owner.login is not"),
        (changed(body("queued"), "/repository/name", json!("")).to_string(), "repository.name is not"),
        (changed(body("queued"), "/repository/owner/type", json!("Cat")).to_string(), "unknown variant `Cat`"),
        (changed(body("queued"), "/installation/id", json!(0)).to_string(), "installation.id is not a number"),
    ] {
        match read("workflow_job", body.as_bytes()) {
            Err(WebhookOutcome::Malformed(why)) => assert!(why.contains(words) && why.len() <= 210, "{words}: {why}"),
            other => panic!("{words}: {other:?}"),
        }
    }
}

#[test]
fn labels_count_once_whatever_their_case_and_a_thousand_match_no_pool() {
    let twice = changed(body("queued"), "/workflow_job/labels", json!(["rv", "Big", "RV", "big"]));
    assert_eq!(made(&twice, &pools(&["big", "rv"])).spec.labels.unwrap(), ["rv", "Big"]);
    let many: Vec<_> = (0..1000).map(|number| format!("l{number}")).collect();
    let many = job(&changed(body("queued"), "/workflow_job/labels", json!(many))).unwrap();
    assert_eq!(decide(&many, None, &pools(&["rv"])), ClaimChange::Leave(WebhookOutcome::Ignored(Ignored::NoPool)));
}

#[test]
fn githubs_own_examples_are_understood() {
    let (mut stages, mut personal) = (Vec::new(), 0);
    for example in examples("workflow_job") {
        let labels: Vec<&str> =
            example["workflow_job"]["labels"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        match job(&example) {
            Ok(event) => {
                assert!(matches!(
                    decide(&event, None, &pools(&["other"])),
                    ClaimChange::Leave(WebhookOutcome::Ignored(Ignored::NoPool))
                ));
                let claim = made(&example, &pools(&labels));
                // Not `full_name`: in one example GitHub forgot to change it with the owner.
                let repository = &example["repository"];
                let named = format!("{}/{}", repository["owner"]["login"], repository["name"]).replace('"', "");
                assert_eq!(claim.spec.repository, Some(named));
                assert_eq!(claim.spec.installation_id, example["installation"]["id"].as_i64());
                let facts = JobFacts::of(&claim);
                let runner = facts.runner.as_ref().and_then(|runner| runner.id);
                if facts.job > Some(JobStage::Queued) {
                    assert_eq!(runner, example["workflow_job"]["runner_id"].as_i64());
                }
                personal += usize::from(example["repository"]["owner"]["type"] == "User");
                stages.push(facts.job.unwrap().as_str());
            }
            Err(outcome) => {
                assert_eq!(outcome, WebhookOutcome::Ignored(Ignored::Waiting));
                stages.push("waiting");
            }
        }
    }
    stages.sort_unstable();
    let expected =
        ["completed", "completed", "in_progress", "in_progress", "in_progress", "queued", "queued", "waiting"];
    assert_eq!((stages.as_slice(), personal), (&expected[..], 2));
    let runs: Vec<_> =
        examples("workflow_run").iter().map(|it| read("workflow_run", it.to_string().as_bytes())).collect();
    let ended = runs.iter().filter(|run| matches!(run, Ok(Event::Run(run)) if run.id > 0)).count();
    let begun = runs.iter().filter(|run| **run == Err(WebhookOutcome::Ignored(Ignored::OtherAction))).count();
    assert_eq!((ended, begun), (3, 2));
    assert_eq!(read("ping", examples("ping")[0].to_string().as_bytes()), Err(WebhookOutcome::Ignored(Ignored::Ping)));
    assert_eq!(read("push", b"not even JSON"), Err(WebhookOutcome::Ignored(Ignored::OtherEvent)));
}

#[test]
fn a_claim_is_marked_once_and_keeps_its_other_facts() {
    let queued = with(&claim("c", 0), json!({"metadata": {"annotations": {"paddock.dev/job-state": "queued"}}}));
    let ClaimChange::Annotate(facts) = mark_over(Some(&queued)) else { panic!("the claim is not marked yet") };
    let marked = with(&queued, json!({"metadata": {"annotations": facts.annotations()}}));
    assert_eq!(JobFacts::of(&marked), JobFacts { run_completed: true, ..JobFacts::of(&queued) });
    assert_eq!(mark_over(Some(&marked)), ClaimChange::Leave(WebhookOutcome::Known));
    assert_eq!(mark_over(None), ClaimChange::Leave(WebhookOutcome::Known));
}

#[test]
fn only_open_ec2_claims_of_that_run_and_attempt_are_concerned() {
    let ec2 = serde_json::to_value(crate::fixtures::ec2::pool()).unwrap();
    let ec2: RunnerPool =
        serde_json::from_value(json!({"metadata": {"name": "ec2", "namespace": "default"}, "spec": {"ec2": ec2}}))
            .unwrap();
    let pools = [Arc::new(board_pool("board")), Arc::new(ec2)];
    let owner = Owner { id: 1, login: "Acme".into(), type_: OwnerType::Organization };
    let created = claim("c", 0).metadata.creation_timestamp.unwrap().0;
    let event = RunEvent {
        id: 1,
        repository: Repository { id: 5, name: "rocket".into(), owner },
        ended_at: created + jiff::SignedDuration::from_secs(60),
    };
    let on = |second: i64, change: Value| {
        let claim = with(&claim("c", second), json!({"spec": {"pool": "ec2", "labels": null}}));
        Arc::new(with(&claim, change))
    };
    let interrupted = |rerun: Value| {
        let interruptions = json!([{"worker": "i-1", "since": "2025-01-01T00:00:00Z"}]);
        json!({"phase": "Failed", "interruptions": interruptions, "rerun": rerun})
    };
    for (claim, concerned, why) in [
        (on(0, json!({})), true, "no repository is named"),
        (on(60, json!({"spec": {"repository": "acme/Rocket"}})), true, "names are compared without case"),
        (on(0, json!({"spec": {"repository": "acme/other"}})), false, "another repository"),
        (on(0, json!({"spec": {"runId": "2"}})), false, "another run"),
        (on(61, json!({})), false, "a later attempt"),
        (on(0, json!({"spec": {"pool": "board"}})), false, "its job's own webhooks end it"),
        (on(0, json!({"spec": {"pool": "gone"}})), false, "its pool does not exist"),
        (on(0, json!({"status": {"phase": "Failed"}})), false, "finished"),
        (on(0, json!({"status": interrupted(json!({}))})), true, "its interrupted jobs may be run again"),
        (on(0, json!({"status": interrupted(json!({"outcome": "Done"}))})), false, "they were"),
        (on(0, json!({"metadata": {"deletionTimestamp": "2025-01-01T00:00:00Z"}})), false, "being deleted"),
    ] {
        assert_eq!(ended_by(&event, [&claim], &pools).len() == 1, concerned, "{why}");
    }
}
