//! Test controls of the simulated GitHub; `admin` exposes the same over HTTP.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::{
    auth::app_key,
    clock::Clock,
    faults::Fault,
    hooks::{Delivery, Hook, HookFault, HookSource},
    hub::Hub,
    model::*,
    world::{World, secret},
};

/// How often waits check again without a change: a runner goes offline when time passes, which is no change.
const WAIT_POLL: Duration = Duration::from_millis(200);

/// A handle of the simulator; clones share it.
#[derive(Clone)]
pub struct Control {
    pub(crate) hub: Arc<Hub>,
}

/// How often a route was called, and by whom: `app ID`, `installation ID ID`, or a user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Calls {
    pub method: String,
    pub route: String,
    pub account: String,
    pub count: u64,
}

impl Control {
    /// The value for `--github-api-url`, in the form of GitHub Enterprise Server.
    pub fn api_url(&self) -> String {
        self.hub.read(|world, _| world.api.clone())
    }

    /// The equivalent of `https://github.com`: runners register at `<this>/<owner>[/<repository>]`.
    pub fn html_url(&self) -> String {
        self.hub.read(|world, _| world.html.clone())
    }

    pub fn clock(&self) -> &Clock {
        &self.hub.clock
    }

    /// Advances the simulator's time and processes everything that became due.
    pub fn advance(&self, by: Duration) {
        self.hub.clock.advance(by);
        self.hub.change(|_, _| ());
    }

    /// Whether runners that register from now on delete themselves at GitHub by their number, as most do.
    pub fn set_admin_flow(&self, admin_flow: bool) {
        self.hub.change(|world, _| world.admin_flow = admin_flow);
    }

    /// Gives no messages to runners of this version from now on.
    pub fn refuse_version(&self, version: &str) {
        self.hub.change(|world, _| world.refused_versions.push(version.to_owned()));
    }

    /// Deletes a runner, as an admin would.
    pub fn delete_runner(&self, name: &str) {
        self.hub.change(|world, _| world.runners.retain(|_, runner| runner.name != name));
    }

    /// Takes that back.
    pub fn accept_version(&self, version: &str) {
        self.hub.change(|world, _| world.refused_versions.retain(|refused| refused != version));
    }

    pub fn organization(&self, login: &str) -> Owner {
        self.hub.change(|world, _| world.ensure_owner(login, OwnerKind::Organization))
    }

    pub fn user(&self, login: &str) -> Owner {
        self.hub.change(|world, _| world.ensure_owner(login, OwnerKind::User))
    }

    /// Creates a repository. Like at GitHub, only groups that allow public repositories serve a public one.
    pub fn repository(&self, owner: &str, name: &str, private: bool) -> Result<Repository> {
        self.hub.change(|world, _| {
            let owner = world.owner(owner).cloned().with_context(|| format!("nobody is called '{owner}'"))?;
            Ok(world.ensure_repository(&owner, name, private))
        })
    }

    pub fn rename_repository(&self, owner: &str, name: &str, new: &str) {
        self.hub.change(|world, _| world.rename_repository(owner, name, new));
    }

    pub fn rename_owner(&self, login: &str, new: &str) {
        self.hub.change(|world, _| world.rename_owner(login, new));
    }

    /// Lists another release of the runner for an owner.
    pub fn list_runner(&self, owner: &str, version: &str, checksums: bool) {
        let release = Release { version: version.to_owned(), checksums };
        self.hub.change(|world, _| world.releases.insert(owner.to_lowercase(), release));
    }

    pub fn app(&self, slug: &str) -> App {
        self.hub.change(|world, _| {
            let app = App { id: world.id(), slug: slug.to_owned(), private_key: app_key().private_pem.clone() };
            world.apps.push(app.clone());
            app
        })
    }

    /// Installs an App for all repositories of an owner, with the permissions that a runner operator needs.
    pub fn install(&self, app: u64, owner: &str) -> Result<u64> {
        self.hub.change(|world, now| {
            let owner = world.owner(owner).with_context(|| format!("nobody is called '{owner}'"))?.login.clone();
            let Value::Object(permissions) = json!({
                "actions": "write",
                "administration": "write",
                "metadata": "read",
                "organization_self_hosted_runners": "write",
            }) else {
                unreachable!("written with braces")
            };
            let id = world.id();
            world.installations.push(Installation {
                id,
                app_id: app,
                owner,
                created_at: now,
                suspended_at: None,
                permissions,
                repositories: None,
            });
            Ok(id)
        })
    }

    /// Restricts an installation to some permissions and repositories.
    pub fn restrict(&self, installation: u64, permissions: Option<Map<String, Value>>, repositories: Option<Vec<u64>>) {
        self.hub.change(|world, _| {
            if let Some(known) = world.installations.iter_mut().find(|known| known.id == installation) {
                known.permissions = permissions.unwrap_or_else(|| known.permissions.clone());
                known.repositories = repositories.or_else(|| known.repositories.clone());
            }
        });
    }

    pub fn uninstall(&self, installation: u64) {
        self.hub.change(|world, _| world.installations.retain(|known| known.id != installation));
    }

    /// The installation of an owner; of several Apps', the oldest.
    pub fn installation_of(&self, owner: &str) -> Option<u64> {
        self.hub.read(|world, _| world.installations.iter().find(|known| same(&known.owner, owner)).map(|it| it.id))
    }

    pub fn suspend(&self, installation: u64, suspended: bool) {
        self.hub.change(|world, now| {
            if let Some(known) = world.installations.iter_mut().find(|known| known.id == installation) {
                known.suspended_at = suspended.then_some(now);
            }
        });
    }

    pub fn personal_token(&self, owners: &[&str]) -> String {
        let token = secret("ghp_");
        let kind = TokenKind::Personal { owners: owners.iter().map(|&owner| owner.to_owned()).collect() };
        self.hub.note(|world, _| world.tokens.insert(token.clone(), Token { kind, expires_at: None }));
        token
    }

    /// Creates a hook and pings it. An App has only one, which is replaced.
    pub fn hook(&self, source: HookSource, url: &str, secret: &str) -> u64 {
        let (id, ping) = self.hub.note(|world, now| {
            if matches!(source, HookSource::App(_)) {
                world.hooks.retain(|hook| hook.source != source);
            }
            let id = world.id();
            world.hooks.push(Hook { id, source, url: url.to_owned(), secret: secret.to_owned() });
            (id, world.ping(id, now))
        });
        self.hub.send([ping]);
        id
    }

    pub fn hook_fault(&self, fault: HookFault) {
        self.hub.note(|world, _| world.hook_faults.push(fault));
    }

    pub fn clear_hook_faults(&self) {
        self.hub.note(|world, _| world.hook_faults.clear());
    }

    /// Sends the webhooks that a [`crate::HookEffect::Hold`] kept back.
    pub fn release_hooks(&self, reverse: bool) {
        let held = self.hub.note(|world, _| world.release_held(reverse));
        self.hub.send(held);
    }

    pub fn deliveries(&self) -> Vec<Delivery> {
        self.hub.read(|world, _| world.deliveries.clone())
    }

    pub fn queue_job(&self, request: JobRequest) -> Result<Job> {
        self.hub.change(|world, now| {
            let id = world.queue_job(request, now).map_err(|message| anyhow!(message))?.id;
            Ok(world.jobs[&id].clone())
        })
    }

    pub fn approve_job(&self, id: u64) {
        self.hub.change(|world, _| world.approve_job(id));
    }

    /// Finishes a job; a runner that is running it is notified and ends it.
    pub fn finish_job(&self, id: u64, conclusion: Conclusion) {
        self.hub.change(|world, now| world.stop_job(id, conclusion, now));
    }

    /// Ends the job of a lost runner now, and not after `lost_after`.
    pub fn give_up_job(&self, id: u64) {
        self.hub.change(|world, now| {
            let taken_by = world.jobs.get(&id).and_then(|job| job.taken_by.as_ref()).map(|taken| taken.runner_id);
            // A lost runner gets no other job.
            if let Some(runner) = taken_by.and_then(|runner| world.runners.get_mut(&runner)) {
                runner.session = None;
            }
            world.finish_job(id, Conclusion::Failure, now);
        });
    }

    pub fn cancel_job(&self, id: u64) {
        self.finish_job(id, Conclusion::Cancelled);
    }

    /// Completes a run regardless of its jobs, as GitHub sometimes does while jobs are queued.
    pub fn finish_run(&self, id: u64, conclusion: Conclusion) {
        self.hub.change(|world, now| world.finish_run(id, conclusion, now));
    }

    pub fn jobs(&self) -> Vec<Job> {
        self.hub.read(|world, _| world.jobs.values().cloned().collect())
    }

    pub fn job(&self, id: u64) -> Option<Job> {
        self.hub.read(|world, _| world.jobs.get(&id).cloned())
    }

    pub fn runners(&self) -> Vec<Runner> {
        self.hub.read(|world, _| world.runners.values().cloned().collect())
    }

    pub fn runner(&self, name: &str) -> Option<Runner> {
        self.runners().into_iter().find(|runner| same(&runner.name, name))
    }

    /// Creates a leftover runner: same scope and labels as `like`, but without a process.
    pub fn add_runner(&self, like: &Runner, name: &str) {
        self.hub.change(|world, now| {
            let mut runner = world.add_runner(like.scope.clone(), name, like.group_id, true, now);
            runner.labels.clone_from(&like.labels);
            world.runners.insert(runner.id, runner);
        });
    }

    pub fn is_online(&self, name: &str) -> bool {
        self.runner(name).is_some_and(|runner| runner.online(self.hub.clock.now(), self.hub.options.offline_after))
    }

    /// Simulates the runner: it is online, takes a job and finishes it after its duration.
    pub fn play_runner(&self, name: &str) -> Result<()> {
        self.set_session(name, Session::Played)
    }

    /// Ends the runner's session, as if its machine had died; its job fails after `lost_after`.
    pub fn lose_runner(&self, name: &str) -> Result<()> {
        let now = self.hub.clock.now();
        self.set_session(name, Session::Connected { polls: 0, last_seen: now })
    }

    fn set_session(&self, name: &str, session: Session) -> Result<()> {
        self.hub.change(|world, _| {
            let runner = world.runners.values_mut().find(|runner| same(&runner.name, name));
            let runner = runner.with_context(|| format!("no runner is called '{name}'"))?;
            (runner.session, runner.os) = (Some(session), "Linux");
            Ok(())
        })
    }

    pub fn fault(&self, fault: Fault) {
        self.hub.note(|world, _| world.faults.push(fault));
    }

    pub fn faults(&self) -> Vec<Fault> {
        self.hub.read(|world, _| world.faults.clone())
    }

    pub fn clear_faults(&self) {
        self.hub.note(|world, _| world.faults.clear());
    }

    pub fn calls(&self) -> Vec<Calls> {
        let counted: BTreeMap<_, _> = self.hub.read(|world, _| world.calls.clone());
        let calls = counted.into_iter();
        calls.map(|((method, route, account), count)| Calls { method, route, account, count }).collect()
    }

    /// Calls of a route (`/orgs/{org}/actions/runners`) by all callers.
    pub fn count(&self, method: &str, route: &str) -> u64 {
        let fitting = self.calls().into_iter().filter(|call| call.method == method && call.route == route);
        fitting.map(|call| call.count).sum()
    }

    pub fn reset_calls(&self) {
        self.hub.note(|world, _| world.calls.clear());
    }

    /// Where the simulator or a caller violated GitHub's published schemas; empty without `validate`.
    pub async fn violations(&self) -> Vec<String> {
        match &self.hub.checker {
            Some(checker) => checker.violations().await,
            None => vec![],
        }
    }

    /// Waits until a job is as wanted; after `deadline` the error shows it.
    pub async fn until_job(&self, id: u64, deadline: Duration, wanted: impl Fn(&Job) -> bool) -> Result<Job> {
        let found = self.until(deadline, |world, _| world.jobs.get(&id).filter(|job| wanted(job)).cloned()).await;
        found.with_context(|| format!("job {id} is not as expected after {deadline:?}: {:?}", self.job(id)))
    }

    pub async fn until_online(&self, name: &str, online: bool, deadline: Duration) -> Result<()> {
        let offline_after = self.hub.options.offline_after;
        let seen = |world: &World, now: Timestamp| {
            let runner = world.runners.values().find(|runner| same(&runner.name, name));
            (runner.is_some_and(|runner| runner.online(now, offline_after)) == online).then_some(())
        };
        let found = self.until(deadline, seen).await;
        found.with_context(|| {
            format!("runner {name} is not online={online} after {deadline:?}: {:?}", self.runner(name))
        })
    }

    async fn until<R>(&self, deadline: Duration, mut check: impl FnMut(&World, Timestamp) -> Option<R>) -> Option<R> {
        let start = Instant::now();
        loop {
            let left = deadline.checked_sub(start.elapsed())?;
            if let Ok(found) = tokio::time::timeout(left.min(WAIT_POLL), self.hub.until(&mut check)).await {
                return Some(found);
            }
        }
    }
}
