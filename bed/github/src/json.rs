//! The simulator's objects in the JSON that GitHub's API and webhooks speak.

use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::{clock::stamp, model::*, world::World};

/// The commit that every run is for: runs differ, their content does not matter here.
const HEAD_SHA: &str = "0123456789abcdef0123456789abcdef01234567";

fn node_id(kind: &str, id: u64) -> String {
    STANDARD.encode(format!("{kind}{id}"))
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => unreachable!("json! of braces made {other}"),
    }
}

/// Adds `<key>_url` members that all hang below one address.
fn urls(map: &mut Map<String, Value>, base: &str, suffixes: &[(&str, &str)]) {
    for (key, suffix) in suffixes {
        map.insert(format!("{key}_url"), json!(format!("{base}{suffix}")));
    }
}

impl World {
    pub fn user_json(&self, owner: &Owner) -> Value {
        let (login, api) = (&owner.login, &self.api);
        let url = format!("{api}/users/{login}");
        let mut user = object(json!({
            "login": login,
            "id": owner.id,
            "node_id": node_id("04:User", owner.id),
            "avatar_url": format!("{}/avatars/u/{}", self.html, owner.id),
            "gravatar_id": "",
            "url": url,
            "html_url": format!("{}/{login}", self.html),
            "type": owner.kind,
            "site_admin": false,
        }));
        urls(
            &mut user,
            &url,
            &[
                ("followers", "/followers"),
                ("following", "/following{/other_user}"),
                ("gists", "/gists{/gist_id}"),
                ("starred", "/starred{/owner}{/repo}"),
                ("subscriptions", "/subscriptions"),
                ("organizations", "/orgs"),
                ("repos", "/repos"),
                ("events", "/events{/privacy}"),
                ("received_events", "/received_events"),
            ],
        );
        user.into()
    }

    pub fn login_json(&self, login: &str) -> Value {
        self.owner(login).map_or(Value::Null, |owner| self.user_json(owner))
    }

    /// An organisation as a member of a webhook payload.
    fn organization_json(&self, owner: &Owner) -> Value {
        let url = format!("{}/orgs/{}", self.api, owner.login);
        let mut organization = object(json!({
            "login": owner.login,
            "id": owner.id,
            "node_id": node_id("012:Organization", owner.id),
            "url": url,
            "avatar_url": format!("{}/avatars/u/{}", self.html, owner.id),
            "description": null,
        }));
        urls(
            &mut organization,
            &url,
            &[
                ("repos", "/repos"),
                ("events", "/events"),
                ("hooks", "/hooks"),
                ("issues", "/issues"),
                ("members", "/members{/member}"),
                ("public_members", "/public_members{/member}"),
            ],
        );
        organization.into()
    }

    pub fn full_organization_json(&self, owner: &Owner) -> Value {
        let mut organization = object(self.organization_json(owner));
        let since = stamp(Timestamp::UNIX_EPOCH);
        organization.extend(object(json!({
            "has_organization_projects": true,
            "has_repository_projects": true,
            "public_repos": 0,
            "public_gists": 0,
            "followers": 0,
            "following": 0,
            "html_url": format!("{}/{}", self.html, owner.login),
            "type": owner.kind,
            "created_at": since,
            "updated_at": since,
            "archived_at": null,
        })));
        organization.into()
    }

    pub fn repository_json(&self, repository: &Repository) -> Value {
        let full_name = format!("{}/{}", repository.owner, repository.name);
        let (url, html) = (format!("{}/repos/{full_name}", self.api), format!("{}/{full_name}", self.html));
        let since = stamp(Timestamp::UNIX_EPOCH);
        let mut map = object(json!({
            "id": repository.id,
            "node_id": node_id("010:Repository", repository.id),
            "name": repository.name,
            "full_name": full_name,
            "owner": self.login_json(&repository.owner),
            "private": repository.private,
            "visibility": if repository.private { "private" } else { "public" },
            "html_url": html,
            "description": null,
            "fork": false,
            "url": url,
            "git_url": format!("git:{full_name}.git"),
            "ssh_url": format!("git@localhost:{full_name}.git"),
            "clone_url": format!("{html}.git"),
            "svn_url": html,
            "mirror_url": null,
            "homepage": null,
            "language": null,
            "license": null,
            "default_branch": "main",
            "has_issues": true,
            "has_projects": true,
            "has_wiki": true,
            "has_pages": false,
            "has_downloads": true,
            "has_discussions": false,
            "archived": false,
            "disabled": false,
            "pushed_at": since,
            "created_at": since,
            "updated_at": since,
        }));
        for count in [
            "forks",
            "forks_count",
            "stargazers_count",
            "watchers",
            "watchers_count",
            "size",
            "open_issues",
            "open_issues_count",
            "subscribers_count",
            "network_count",
        ] {
            map.insert(count.into(), json!(0));
        }
        urls(&mut map, &url, REPOSITORY_URLS);
        map.into()
    }

    pub fn installation_json(&self, installation: &Installation) -> Value {
        let owner = self.owner(&installation.owner).expect("installed for an owner");
        let app = self.apps.iter().find(|app| app.id == installation.app_id).expect("installed from an App");
        let since = stamp(installation.created_at);
        let page = match owner.kind {
            OwnerKind::Organization => format!("{}/organizations/{}/settings", self.html, owner.login),
            OwnerKind::User => format!("{}/settings", self.html),
        };
        json!({
            "id": installation.id,
            "account": self.user_json(owner),
            "repository_selection": if installation.repositories.is_some() { "selected" } else { "all" },
            "access_tokens_url": format!("{}/app/installations/{}/access_tokens", self.api, installation.id),
            "repositories_url": format!("{}/installation/repositories", self.api),
            "html_url": format!("{page}/installations/{}", installation.id),
            "app_id": app.id,
            "app_slug": app.slug,
            "target_id": owner.id,
            "target_type": owner.kind,
            "permissions": installation.permissions,
            "events": ["workflow_job", "workflow_run"],
            "created_at": since,
            "updated_at": since,
            "single_file_name": null,
            "suspended_by": installation.suspended_at.map(|_| self.user_json(owner)),
            "suspended_at": installation.suspended_at.map(stamp),
        })
    }

    pub fn app_json(&self, app: &App) -> Value {
        let since = stamp(Timestamp::UNIX_EPOCH);
        let maker = Owner { id: 1, login: "app-maker".into(), kind: OwnerKind::User };
        json!({
            "id": app.id,
            "slug": app.slug,
            "node_id": node_id("011:Integration", app.id),
            "owner": self.user_json(&maker),
            "name": app.slug,
            "description": null,
            "external_url": self.html,
            "html_url": format!("{}/apps/{}", self.html, app.slug),
            "created_at": since,
            "updated_at": since,
            "permissions": {"metadata": "read"},
            "events": ["workflow_job", "workflow_run"],
        })
    }

    pub fn group_json(&self, group: &Group) -> Value {
        let url = format!("{}/orgs/{}/actions/runner-groups/{}", self.api, group.owner, group.id);
        let mut map = object(json!({
            "id": group.id,
            "name": group.name,
            "visibility": group.visibility,
            "default": group.default,
            "runners_url": format!("{url}/runners"),
            "inherited": false,
            "allows_public_repositories": group.allows_public_repositories,
            "restricted_to_workflows": false,
            "selected_workflows": [],
            "workflow_restrictions_read_only": false,
        }));
        if group.visibility == "selected" {
            map.insert("selected_repositories_url".into(), json!(format!("{url}/repositories")));
        }
        map.into()
    }

    pub fn runner_json(&self, runner: &Runner, now: Timestamp) -> Value {
        let label = |(at, name): (usize, &String)| {
            if at < runner.default_labels {
                json!({"id": at + 1, "name": name, "type": "read-only"})
            } else {
                json!({"id": at + 1, "name": name, "type": "custom"})
            }
        };
        json!({
            "id": runner.id,
            "name": runner.name,
            "os": runner.os,
            "status": if runner.online(now, self.patience.offline_after) { "online" } else { "offline" },
            "busy": runner.job.is_some(),
            "ephemeral": runner.ephemeral,
            "labels": runner.labels.iter().enumerate().map(label).collect::<Vec<_>>(),
            "runner_group_id": runner.group_id,
        })
    }

    /// A job as both the API and the webhooks show it.
    pub fn job_json(&self, job: &Job) -> Value {
        let run = &self.runs[&job.run_id];
        let repository = self.repository_by_id(run.repository);
        let full_name = format!("{}/{}", repository.owner, repository.name);
        let url = format!("{}/repos/{full_name}", self.api);
        let taken = job.taken_by.as_ref();
        let step = job.started_at.filter(|_| taken.is_some()).map(|started| {
            json!({
                "name": "Set up job",
                "status": job.status,
                "conclusion": job.conclusion,
                "number": 1,
                "started_at": stamp(started),
                "completed_at": job.completed_at.map(stamp),
            })
        });
        json!({
            "id": job.id,
            "run_id": job.run_id,
            "run_url": format!("{url}/actions/runs/{}", job.run_id),
            "run_attempt": 1,
            "node_id": node_id("CR_", job.id),
            "head_sha": HEAD_SHA,
            "head_branch": "main",
            "url": format!("{url}/actions/jobs/{}", job.id),
            "html_url": format!("{}/{full_name}/actions/runs/{}/job/{}", self.html, job.run_id, job.id),
            "check_run_url": format!("{url}/check-runs/{}", job.id),
            "status": job.status,
            "conclusion": job.conclusion,
            "created_at": stamp(job.created_at),
            "started_at": stamp(job.started_at.unwrap_or(job.created_at)),
            "completed_at": job.completed_at.map(stamp),
            "name": job.name,
            "workflow_name": run.workflow,
            "labels": job.labels,
            "steps": step.into_iter().collect::<Vec<_>>(),
            "runner_id": taken.map(|taken| taken.runner_id),
            "runner_name": taken.map(|taken| &taken.runner_name),
            "runner_group_id": taken.map(|taken| taken.group_id),
            "runner_group_name": taken.map(|taken| &taken.group_name),
        })
    }

    pub fn run_json(&self, run: &Run) -> Value {
        let repository = self.repository_by_id(run.repository);
        let full_name = format!("{}/{}", repository.owner, repository.name);
        let api = format!("{}/repos/{full_name}", self.api);
        let url = format!("{api}/actions/runs/{}", run.id);
        let person = json!({"name": "Octo Cat", "email": "octocat@example.com"});
        let mut map = object(json!({
            "id": run.id,
            "name": run.workflow,
            "display_title": run.workflow,
            "node_id": node_id("WFR_", run.id),
            "head_branch": "main",
            "head_sha": HEAD_SHA,
            "path": ".github/workflows/ci.yml",
            "run_number": run.number,
            "run_attempt": 1,
            "event": "push",
            "status": run.status,
            "conclusion": run.conclusion,
            "workflow_id": run.repository,
            "check_suite_id": run.id,
            "check_suite_node_id": node_id("CS_", run.id),
            "check_suite_url": format!("{api}/check-suites/{}", run.id),
            "workflow_url": format!("{api}/actions/workflows/{}", run.repository),
            "url": url,
            "html_url": format!("{}/{full_name}/actions/runs/{}", self.html, run.id),
            "pull_requests": [],
            "created_at": stamp(run.created_at),
            "updated_at": stamp(run.updated_at),
            "run_started_at": stamp(run.created_at),
            "previous_attempt_url": null,
            "actor": self.login_json(&repository.owner),
            "triggering_actor": self.login_json(&repository.owner),
            "head_commit": {
                "id": HEAD_SHA,
                "tree_id": HEAD_SHA,
                "message": "Change something",
                "timestamp": stamp(run.created_at),
                "author": person,
                "committer": person,
            },
            "repository": self.repository_json(repository),
            "head_repository": self.repository_json(repository),
        }));
        let below = ["jobs", "logs", "artifacts", "cancel", "rerun"];
        map.extend(below.map(|what| (format!("{what}_url"), json!(format!("{url}/{what}")))));
        map.into()
    }

    /// What every webhook of a repository carries.
    fn payload(&self, action: &str, repository: u64) -> Map<String, Value> {
        let repository = self.repository_by_id(repository);
        let owner = self.owner(&repository.owner).expect("a repository has an owner");
        let mut payload = object(json!({
            "action": action,
            "repository": self.repository_json(repository),
            "sender": self.user_json(owner),
        }));
        if owner.kind == OwnerKind::Organization {
            payload.insert("organization".into(), self.organization_json(owner));
        }
        payload
    }

    pub fn job_payload(&self, id: u64, action: &str) -> Map<String, Value> {
        let job = &self.jobs[&id];
        let mut payload = self.payload(action, self.runs[&job.run_id].repository);
        payload.insert("workflow_job".into(), self.job_json(job));
        payload
    }

    pub fn run_payload(&self, id: u64) -> Map<String, Value> {
        let run = &self.runs[&id];
        let mut payload = self.payload("completed", run.repository);
        let repository = self.repository_by_id(run.repository);
        let full_name = format!("{}/{}", repository.owner, repository.name);
        let since = stamp(Timestamp::UNIX_EPOCH);
        payload.insert("workflow_run".into(), self.run_json(run));
        let workflow = json!({
            "id": run.repository,
            "node_id": node_id("W_", run.repository),
            "name": run.workflow,
            "path": ".github/workflows/ci.yml",
            "state": "active",
            "created_at": since,
            "updated_at": since,
            "url": format!("{}/repos/{full_name}/actions/workflows/{}", self.api, run.repository),
            "html_url": format!("{}/{full_name}/blob/main/.github/workflows/ci.yml", self.html),
            "badge_url": format!("{}/{full_name}/workflows/ci/badge.svg", self.html),
        });
        payload.insert("workflow".into(), workflow);
        payload
    }
}

const REPOSITORY_URLS: &[(&str, &str)] = &[
    ("archive", "/{archive_format}{/ref}"),
    ("assignees", "/assignees{/user}"),
    ("blobs", "/git/blobs{/sha}"),
    ("branches", "/branches{/branch}"),
    ("collaborators", "/collaborators{/collaborator}"),
    ("comments", "/comments{/number}"),
    ("commits", "/commits{/sha}"),
    ("compare", "/compare/{base}...{head}"),
    ("contents", "/contents/{+path}"),
    ("contributors", "/contributors"),
    ("deployments", "/deployments"),
    ("downloads", "/downloads"),
    ("events", "/events"),
    ("forks", "/forks"),
    ("git_commits", "/git/commits{/sha}"),
    ("git_refs", "/git/refs{/sha}"),
    ("git_tags", "/git/tags{/sha}"),
    ("hooks", "/hooks"),
    ("issue_comment", "/issues/comments{/number}"),
    ("issue_events", "/issues/events{/number}"),
    ("issues", "/issues{/number}"),
    ("keys", "/keys{/key_id}"),
    ("labels", "/labels{/name}"),
    ("languages", "/languages"),
    ("merges", "/merges"),
    ("milestones", "/milestones{/number}"),
    ("notifications", "/notifications{?since,all,participating}"),
    ("pulls", "/pulls{/number}"),
    ("releases", "/releases{/id}"),
    ("stargazers", "/stargazers"),
    ("statuses", "/statuses/{sha}"),
    ("subscribers", "/subscribers"),
    ("subscription", "/subscription"),
    ("tags", "/tags"),
    ("teams", "/teams"),
    ("trees", "/git/trees{/sha}"),
];
