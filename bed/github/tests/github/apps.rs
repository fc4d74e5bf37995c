//! Apps, installations, tokens, and access control.

use std::time::Duration;

use axum::http::Method;
use serde_json::json;

use crate::bed::Bed;

#[tokio::test]
async fn an_app_finds_its_installations_by_every_way() {
    let bed = Bed::start().await;
    bed.github.user("alice");
    bed.github.repository("alice", "dotfiles", false).unwrap();
    let personal = bed.github.install(bed.app.id, "alice").unwrap();
    assert_eq!(bed.app_get("/app").await.body["id"], bed.app.id);
    let all = bed.app_get("/app/installations").await;
    assert_eq!(all.body.as_array().unwrap().len(), 2);
    for (path, id) in [
        (format!("/app/installations/{personal}"), personal),
        ("/orgs/acme/installation".into(), bed.installation),
        ("/users/alice/installation".into(), personal),
        ("/repos/acme/app/installation".into(), bed.installation),
        ("/repos/Alice/DotFiles/installation".into(), personal),
    ] {
        let answer = bed.app_get(&path).await;
        assert_eq!((answer.status, &answer.body["id"]), (200, &json!(id)), "{path}");
    }
    assert_eq!(all.body[1]["target_type"], "User");
    assert_eq!(bed.app_get("/orgs/nobody/installation").await.status, 404);
    assert_eq!(bed.app_get("/repos/acme/unknown/installation").await.status, 404);
    assert_eq!(bed.app_get("/app/installations/1").await.status, 404);
    bed.finish().await;
}

#[tokio::test]
async fn a_jwt_must_be_signed_by_the_key_and_live_at_most_ten_minutes() {
    let bed = Bed::start().await;
    let now = jiff::Timestamp::now().as_second();
    let claims = |iss: u64, iat: i64, exp: i64| bed.jwt_with(json!({"iss": iss.to_string(), "iat": iat, "exp": exp}));
    let good = claims(bed.app.id, now - 60, now + 540);
    let altered = good.replace(&good[good.len() - 6..], "AAAAAA");
    for (jwt, status, message) in [
        (good, 200, ""),
        (altered, 401, "A JSON web token could not be decoded"),
        (claims(bed.app.id, now, now + 700), 401, "'Expiration time' claim ('exp') is too far in the future"),
        (claims(bed.app.id, now - 700, now - 1), 401, "'Expiration time' claim ('exp') must be a numeric value"),
        (claims(bed.app.id, now + 120, now + 500), 401, "'Issued at' claim ('iat') must be an Integer"),
        (claims(7, now - 60, now + 500), 404, "Integration not found"),
        (bed.token.clone(), 401, "A JSON web token could not be decoded"),
    ] {
        let answer = bed.call_as(&jwt, Method::GET, "/app", None).await;
        assert_eq!(answer.status, status, "{}", answer.body);
        assert!(answer.message().starts_with(message), "{}", answer.body);
    }
    bed.finish().await;
}

#[tokio::test]
async fn an_installation_token_lives_an_hour() {
    let bed = Bed::start().await;
    let path = format!("/app/installations/{}/access_tokens", bed.installation);
    let before = bed.github.clock().now().as_second();
    let made = bed.call_as(&bed.jwt(), Method::POST, &path, None).await;
    let after = bed.github.clock().now().as_second();
    let expiry: jiff::Timestamp = made.body["expires_at"].as_str().unwrap().parse().unwrap();
    assert!((before + 3600..=after + 3600).contains(&expiry.as_second()), "{}", made.body);
    let bed = Bed { token: made.body["token"].as_str().unwrap().to_owned(), ..bed };
    assert_eq!(bed.get("/orgs/acme/actions/runners").await.status, 200);
    // A few minutes are left, because the test itself takes time.
    bed.github.advance(Duration::from_secs(3300));
    assert_eq!(bed.get("/orgs/acme/actions/runners").await.status, 200);
    bed.github.advance(Duration::from_secs(301));
    let expired = bed.get("/orgs/acme/actions/runners").await;
    assert_eq!((expired.status, expired.message()), (401, "Bad credentials"));
    let fresh = bed.installation_token().await;
    assert_eq!(bed.call_as(&fresh, Method::GET, "/orgs/acme/actions/runners", None).await.status, 200);
    bed.finish().await;
}

#[tokio::test]
async fn suspended_and_uninstalled_apps_get_nothing() {
    let bed = Bed::start().await;
    let path = format!("/app/installations/{}/access_tokens", bed.installation);
    bed.github.suspend(bed.installation, true);
    assert_eq!(bed.call_as(&bed.jwt(), Method::POST, &path, None).await.status, 403);
    assert_eq!(bed.get("/orgs/acme/actions/runners").await.message(), "This installation has been suspended");
    assert!(!bed.app_get("/orgs/acme/installation").await.body["suspended_at"].is_null());
    bed.github.suspend(bed.installation, false);
    assert_eq!(bed.get("/orgs/acme/actions/runners").await.status, 200);
    bed.github.uninstall(bed.installation);
    assert_eq!(bed.call_as(&bed.jwt(), Method::POST, &path, None).await.status, 404);
    assert_eq!(bed.get("/orgs/acme/actions/runners").await.status, 401);
    bed.finish().await;
}

#[tokio::test]
async fn a_token_sees_its_own_owner_and_no_other() {
    let bed = Bed::start().await;
    bed.github.organization("rival");
    bed.github.user("alice");
    bed.github.repository("rival", "secret", true).unwrap();
    for path in [
        "/orgs/rival/actions/runners",
        "/repos/rival/secret/actions/runners",
        "/repos/rival/secret/actions/jobs/1",
        "/repos/acme/unknown/actions/runners",
        "/orgs/alice/actions/runners",
    ] {
        let answer = bed.get(path).await;
        assert_eq!((answer.status, answer.message()), (404, "Not Found"), "{path}");
    }
    let anonymous = bed.call_as("", Method::GET, "/orgs/acme/actions/runners", None).await;
    assert_eq!((anonymous.status, anonymous.message()), (401, "Requires authentication"));
    let unknown = bed.call_as("ghs_guessed", Method::GET, "/orgs/acme/actions/runners", None).await;
    assert_eq!((unknown.status, unknown.message()), (401, "Bad credentials"));
    let personal = bed.github.personal_token(&["rival"]);
    assert_eq!(bed.call_as(&personal, Method::GET, "/orgs/rival/actions/runners", None).await.status, 200);
    assert_eq!(bed.call_as(&personal, Method::GET, "/orgs/acme/actions/runners", None).await.status, 404);
    bed.finish().await;
}

#[tokio::test]
async fn permissions_and_repositories_narrow_what_a_token_may_do() {
    let bed = Bed::start().await;
    let other = bed.github.repository("acme", "other", true).unwrap();
    let path = format!("/app/installations/{}/access_tokens", bed.installation);
    let narrow = bed.call_as(&bed.jwt(), Method::POST, &path, Some(json!({"repositories": ["other"]}))).await;
    assert_eq!(narrow.body["repository_selection"], "selected");
    let narrow = narrow.body["token"].as_str().unwrap();
    let seen = bed.call_as(narrow, Method::GET, "/installation/repositories", None).await;
    assert_eq!((&seen.body["total_count"], &seen.body["repositories"][0]["id"]), (&json!(1), &json!(other.id)));
    assert_eq!(bed.call_as(narrow, Method::GET, "/repos/acme/app/actions/runners", None).await.status, 404);
    let unknown = bed.call_as(&bed.jwt(), Method::POST, &path, Some(json!({"repository_ids": [1]}))).await;
    assert_eq!(unknown.status, 422);

    let read_only = json!({"metadata": "read", "organization_self_hosted_runners": "read"});
    bed.github.restrict(bed.installation, read_only.as_object().cloned(), None);
    assert_eq!(bed.get("/orgs/acme/actions/runners").await.status, 200);
    let refused = bed.jit("r1", &["x"]).await;
    assert_eq!((refused.status, refused.message()), (403, "Resource not accessible by integration"));
    bed.finish().await;
}

#[tokio::test]
async fn owners_and_repositories_can_be_looked_up() {
    let bed = Bed::start().await;
    assert_eq!(bed.get("/orgs/acme").await.body["login"], "acme");
    let repository = bed.get("/repos/acme/app").await;
    assert_eq!(repository.body["full_name"], "acme/app");
    assert_eq!(bed.get("/installation/repositories").await.body["repositories"][0]["private"], true);
    assert_eq!(bed.get("/meta").await.status, 200);
    let unprefixed = format!("{}/orgs/acme", bed.github.html_url());
    assert_eq!(bed.get(&unprefixed).await.status, 200);
    bed.finish().await;
}

#[tokio::test]
async fn a_renamed_repository_is_found_by_its_number_and_a_renamed_organization_is_not() {
    let bed = Bed::start().await;
    let job = bed.github.queue_job(bed.job(&["x"])).unwrap().id;
    let by_name = format!("/repos/acme/app/actions/jobs/{job}");
    assert_eq!(bed.get(&by_name).await.status, 200);
    bed.github.rename_repository("acme", "app", "application");
    // The client follows redirects.
    assert_eq!(bed.get(&by_name).await.status, 200);
    assert_eq!(bed.app_get("/repos/acme/app/installation").await.status, 200);
    let path = "/repos/acme/app/actions/runners/registration-token";
    let token = bed.call_as(&bed.token, Method::POST, path, None).await;
    assert_eq!(token.status, 201, "{}", token.body);
    bed.github.rename_owner("acme", "apex");
    assert_eq!(bed.get(&by_name).await.status, 200);
    assert_eq!(bed.get("/orgs/acme/actions/runners").await.status, 404);
    assert_eq!(bed.get("/orgs/apex/actions/runners").await.status, 200);
    bed.finish().await;
}
