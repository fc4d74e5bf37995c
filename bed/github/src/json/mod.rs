//! The simulator's objects as JSON of GitHub's API and webhooks: owners, repositories, Apps.

mod runs;

use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::{clock::stamp, model::*, world::World};

fn node_id(kind: &str, id: u64) -> String {
    STANDARD.encode(format!("{kind}{id}"))
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => unreachable!("json! of braces made {other}"),
    }
}

/// Adds `<key>_url` members below one base URL.
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
