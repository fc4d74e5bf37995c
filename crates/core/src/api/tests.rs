//! Tests without an API server; `tests/api` uses a real one.

use jiff::Timestamp;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{JSONSchemaProps, JSONSchemaPropsOrArray};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::*;

fn example<T: DeserializeOwned>(file: &str) -> T {
    let path = format!("{}/examples/{file}", env!("PADDOCK_SOURCE"));
    serde_saphyr::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// `object` with the fields of `patch` set, as a JSON merge patch does it.
fn with<T: serde::Serialize + DeserializeOwned>(object: &T, patch: &str) -> T {
    fn merge(into: &mut Value, patch: Value) {
        match patch {
            Value::Object(fields) => fields.into_iter().for_each(|(key, value)| match value {
                Value::Null => drop(into.as_object_mut().unwrap().remove(&key)),
                value => merge(&mut into[key], value),
            }),
            value => *into = value,
        }
    }
    let mut value = serde_json::to_value(object).unwrap();
    merge(&mut value, serde_saphyr::from_str(patch).unwrap());
    serde_json::from_value(value).unwrap()
}

#[test]
fn durations_read_what_people_write_and_write_it_shortly() {
    for (text, seconds, canonical) in [
        ("30s", 30, "30s"),
        ("10m", 600, "10m"),
        ("90s", 90, "90s"),
        ("6h", 21_600, "6h"),
        ("1h30m", 5_400, "90m"),
        ("1h30m5s", 5_405, "5405s"),
        ("525600s", 525_600, "146h"),
        ("0s", 0, "0s"),
    ] {
        let duration: Duration = text.parse().unwrap();
        assert_eq!((duration.as_secs(), duration.to_string().as_str()), (seconds, canonical), "{text}");
        assert_eq!(serde_json::from_value::<Duration>(serde_json::to_value(duration).unwrap()).unwrap(), duration);
    }
}

#[test]
fn durations_refuse_everything_else() {
    for text in ["", "s", "10", "10 m", "-5s", "1.5h", "1d", "10ms", "99999999999999999999s", "5ß"] {
        assert!(text.parse::<Duration>().is_err(), "{text}");
    }
}

#[test]
fn a_duration_after_the_end_of_time_is_the_end_of_time() {
    let start: Timestamp = "2025-05-31T12:00:00Z".parse().unwrap();
    assert_eq!(Duration::from_mins(10).after(start).to_string(), "2025-05-31T12:10:00Z");
    assert_eq!(Duration::from_secs(u64::MAX).after(start), Timestamp::MAX);
}

#[test]
fn a_condition_keeps_its_time_while_its_status_stays() {
    let [early, late]: [Timestamp; 2] = ["2025-05-31T12:00:00Z", "2025-05-31T12:05:00Z"].map(|t| t.parse().unwrap());
    let waits = |reason: ClaimReason, now| ready_condition(false, reason, "waits", Some(1), now);
    let mut conditions = vec![];
    set_condition(&mut conditions, waits(ClaimReason::QuotaReached, early));
    set_condition(&mut conditions, waits(ClaimReason::NoFreeSlot, late));
    assert_eq!((conditions.len(), conditions[0].reason.as_str()), (1, "NoFreeSlot"));
    assert_eq!(conditions[0].last_transition_time.0, early);
    set_condition(&mut conditions, ready_condition(true, ClaimReason::Ready, "", Some(1), late));
    assert_eq!(conditions[0].last_transition_time.0, late);
}

#[test]
fn a_clipped_text_keeps_its_end() {
    assert_eq!(clip("short", 5), "short");
    assert_eq!(clip("äöü and the end", 8), "…the end");
}

#[test]
fn a_phase_is_timed_when_it_is_first_entered() {
    let [early, late]: [Timestamp; 2] = ["2025-05-31T12:00:00Z", "2025-05-31T12:05:00Z"].map(|t| t.parse().unwrap());
    let mut status = RunnerClaimStatus::default();
    status.enter(ClaimPhase::Pending, early);
    status.enter(ClaimPhase::Pending, late);
    assert_eq!(status.phase_times.of(ClaimPhase::Pending).map(|time| time.0), Some(early));
    assert_eq!(status.phase_times.of(ClaimPhase::Ready), None);
}

#[test]
fn the_entity_is_the_organisation_or_the_personal_repository() {
    let claim: RunnerClaim = example("board-claim.yaml");
    assert_eq!(claim.spec.entity().as_deref(), Some("1001"));
    assert_eq!(with(&claim, "spec: {owner: {type: User}}").spec.entity().as_deref(), Some("4242"));
    assert_eq!(with(&claim, "spec: {owner: null}").spec.entity(), None);
    assert_eq!(claim.spec.repository_name(), Some("kernel"));
}

#[test]
fn names_in_code_are_the_names_on_the_wire() {
    fn check<T: serde::Serialize + Copy>(all: &[T], as_str: fn(T) -> &'static str) {
        all.iter().for_each(|value| assert_eq!(serde_json::to_value(value).unwrap(), as_str(*value)));
    }
    use ClaimPhase::{Claiming, Completed, Creating, Failed, Pending, Ready, Releasing, Validating};
    check(&[Pending, Claiming, Creating, Validating, Ready, Releasing, Completed, Failed], ClaimPhase::as_str);
    check(&[UsageClass::OnDemand, UsageClass::Spot], UsageClass::as_str);
    use WorkerState as W;
    let states = [W::Created, W::Running, W::Idle, W::Claimed, W::Terminated, W::Pending, W::Completed, W::Failed];
    check(&states, W::as_str);
    FailureReason::ALL.iter().for_each(|(reason, _)| check(&[*reason], FailureReason::as_str));
}

#[test]
fn what_the_examples_leave_out_has_the_defaults_of_the_specification() {
    let pool: RunnerPool = example("ec2-pool.yaml");
    let bare = with(&pool, "spec: {ec2: {defaults: null, minIdle: null, maxInstances: null, lifetimes: null}}");
    let ec2 = bare.spec.ec2.unwrap();
    assert_eq!(ec2.defaults, Ec2Defaults::default());
    assert_eq!((ec2.min_idle, ec2.max_instances), (0, 20));
    let Lifetimes { created, claimed, idle, max_runtime } = ec2.lifetimes;
    assert_eq!([created, claimed, idle, max_runtime].map(Duration::as_secs), [600, 300, 420, 21_600]);
    let Ec2Timeouts { registration, heartbeat, validation, deregistration, capacity } = ec2.timeouts;
    let timeouts = [registration, heartbeat, validation, deregistration, capacity];
    assert_eq!(timeouts.map(Duration::as_secs), [60, 15, 180, 120, 600]);

    let pool: RunnerPool = example("board-pool.yaml");
    let bare =
        with(&pool, "spec: {board: {resourceName: null, activeDeadline: null, timeouts: null, privileged: null}}");
    let board = bare.spec.board.unwrap();
    assert_eq!((board.resource_name.as_str(), board.active_deadline.as_secs()), ("riseproject.com/runner", 525_600));
    assert_eq!((board.timeouts, board.privileged), (BoardTimeouts::default(), false));
}

#[test]
fn rules_accept_the_examples() {
    for file in ["ec2-pool.yaml", "board-pool.yaml"] {
        example::<RunnerPool>(file).validate_cel().unwrap();
    }
    for file in ["ec2-claim.yaml", "board-claim.yaml"] {
        example::<RunnerClaim>(file).validate_cel().unwrap();
    }
}

#[test]
fn rules_refuse_pools_that_make_no_sense() {
    let (ec2, board) = (example::<RunnerPool>("ec2-pool.yaml"), example::<RunnerPool>("board-pool.yaml"));
    for (pool, patch, message) in [
        (&ec2, "spec: {ec2: null}", "exactly one of spec.ec2 and spec.board"),
        (&ec2, "spec: {ec2: {minIdle: 21}}", "minIdle must not be greater than maxInstances"),
        (&ec2, "spec: {ec2: {defaults: {resourceClass: huge}}}", "defaults.resourceClass must name one of"),
        (&ec2, "spec: {ec2: {lifetimes: {idle: 0s}}}", "must be between 1s and 8784h"),
        (&ec2, "metadata: {name: a.b}", "a pool's name is part of queue names"),
        (&board, "spec: {board: {labels: [], overrides: []}}", "a board pool needs labels or overrides"),
        (&board, "spec: {board: {labels: [[Linux, linux]]}}", "labels must differ in more than case"),
        (&board, "spec: {board: {nodeSelector: {'a b': c}}}", "each key must be a label name"),
        (&board, "spec: {board: {ephemeralStorage: {request: 91Gi}}}", "request must not be greater than limit"),
    ] {
        let refused = with(pool, patch).validate_cel().unwrap_err().to_string();
        assert!(refused.contains(message), "{patch}: {refused}");
    }
    let both = RunnerPoolSpec { ec2: ec2.spec.ec2.clone(), board: board.spec.board.clone() };
    assert_eq!(both.hardware(), None);
    assert!(RunnerPool::new("both", both).validate_cel().is_err());
}

#[test]
fn rules_refuse_changes_that_make_no_sense() {
    let (ec2, board) = (example::<RunnerPool>("ec2-pool.yaml"), example::<RunnerPool>("board-pool.yaml"));
    let refused = board.validate_cel_update(&ec2).unwrap_err().to_string();
    assert!(refused.contains("a pool cannot change between ec2 and board"), "{refused}");
    with(&ec2, "spec: {ec2: {minIdle: 5}}").validate_cel_update(&ec2).unwrap();

    let claim = example::<RunnerClaim>("ec2-claim.yaml");
    let refused = with(&claim, "spec: {count: 3}").validate_cel_update(&claim).unwrap_err().to_string();
    assert!(refused.contains("a claim cannot be changed"), "{refused}");
    with(&claim, "metadata: {labels: {a: b}}").validate_cel_update(&claim).unwrap();
}

#[test]
fn rules_refuse_claims_that_make_no_sense() {
    let claim = example::<RunnerClaim>("board-claim.yaml");
    for (patch, message) in [
        ("spec: {labels: null}", "a claim needs spec.pool, or spec.labels"),
        ("spec: {owner: {type: User}, repositoryId: null}", "set repository and repositoryId"),
        ("spec: {repository: other/kernel}", "repository must be the owner's"),
    ] {
        let refused = with(&claim, patch).validate_cel().unwrap_err().to_string();
        assert!(refused.contains(message), "{patch}: {refused}");
    }
    with(&claim, "spec: {repository: MY-ORG/kernel}").validate_cel().unwrap();
}

#[test]
fn every_field_is_explained_and_every_spec_string_and_list_has_a_limit() {
    fn walk(path: &str, schema: &JSONSchemaProps) {
        for (name, field) in schema.properties.iter().flatten() {
            let path = format!("{path}.{name}");
            let text = field.description.as_deref().unwrap_or_default();
            assert!(text.ends_with('.'), "{path} is explained as {text:?}");
            limited(&path, field);
            walk(&path, field);
        }
        if let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items {
            limited(&format!("{path}[]"), items);
            walk(&format!("{path}[]"), items);
        }
    }
    fn limited(path: &str, schema: &JSONSchemaProps) {
        let free = match schema.type_.as_deref() {
            Some("string") => schema.max_length.is_none() && schema.enum_.is_none() && schema.format.is_none(),
            Some("array") => schema.max_items.is_none() || schema.x_kubernetes_list_type.is_none(),
            _ => false,
        };
        assert!(!free, "{path} has no limit, or no list type");
    }
    for crd in crds() {
        let schema = crd.spec.versions[0].schema.as_ref().and_then(|s| s.open_api_v3_schema.as_ref()).unwrap();
        for part in ["spec", "status"] {
            walk(&format!("{}.{part}", crd.spec.names.kind), &schema.properties.as_ref().unwrap()[part]);
        }
    }
}
