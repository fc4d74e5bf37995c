//! What GitHub or the API server refused, and who waits for it.

use super::*;

#[test]
fn what_github_refuses_waits_and_is_then_tried_with_one_worker() {
    for subject in [
        Subject::Owner(Registration { scope: Scope::Organization("acme".into()), ..registration() }),
        Subject::credentials(&registration()),
    ] {
        let mut scenario = Scenario::new(9, vec![claim("a", 0), claim("b", 1)]);
        scenario.refusals.insert(subject, refusal());
        let waiting = |name: &str| waits(name, ClaimReason::GitHubUnavailable);
        assert_eq!(scenario.run(), [waiting("a"), waiting("b")]);
        scenario.now = NOW + 60;
        assert_eq!(scenario.run(), [got("a"), waiting("b")]);
        assert_eq!(scenario.run(), [waiting("b")], "one trial is enough");
        scenario.refusals.clear();
        assert_eq!(scenario.run(), [got("b")]);
    }
}

fn registration() -> Registration {
    Registration { namespace: "default".into(), secret: "app".into(), scope: Scope::Organization("acmee".into()) }
}

fn refusal() -> Refusal {
    let moment = |second| Timestamp::from_second(second).unwrap();
    Refusal { why: "no".into(), since: moment(NOW), retry_at: moment(NOW + 60) }
}

#[test]
fn a_claim_with_a_wrong_owner_and_other_credentials_hold_up_nobody() {
    let wrong = with(&claim("wrong", 0), json!({"spec": {"owner": {"login": "acmee"}}}));
    let mut scenario = Scenario::new(9, vec![wrong, claim("right", 1)]);
    scenario.refusals.insert(Subject::Owner(registration()), refusal());
    let other = Registration { secret: "other".into(), ..registration() };
    scenario.refusals.insert(Subject::credentials(&other), refusal());
    assert_eq!(scenario.run(), [waits("wrong", ClaimReason::GitHubUnavailable), got("right")]);
}

#[test]
fn a_claim_whose_worker_the_api_server_refuses_backs_off_alone() {
    let mut scenario = Scenario::new(9, vec![claim("refused", 0), claim("other", 1)]);
    scenario.refusals.insert(Subject::Claim("uid-refused".into()), refusal());
    assert_eq!(scenario.run(), [waits("refused", ClaimReason::InternalError), got("other")]);
    scenario.now = NOW + 60;
    assert_eq!(scenario.run(), [got("refused")]);
}
