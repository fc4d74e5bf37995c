//! Groups, runners, jobs, runs, and their webhooks.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::{node_id, object};
use crate::{clock::stamp, model::*, world::World};

/// The commit of every run.
const HEAD_SHA: &str = "0123456789abcdef0123456789abcdef01234567";

impl World {
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
            "status": if runner.online(now, self.timeouts.offline_after) { "online" } else { "offline" },
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
            "run_attempt": job.attempt,
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
            "run_attempt": run.attempt,
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
            "previous_attempt_url": (run.attempt > 1).then(|| format!("{url}/attempts/{}", run.attempt - 1)),
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

    /// The fields that every webhook of a repository has.
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
