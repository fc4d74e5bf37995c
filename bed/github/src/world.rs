//! The state of the simulated GitHub and its transitions. Nothing here waits or uses the network: events for webhooks
//! go to the outbox.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Duration,
};

use jiff::Timestamp;
use rand::{SeedableRng, rngs::StdRng};
use serde_json::{Map, Value};

use crate::{
    faults::Fault,
    hooks::{Delivery, Hook, HookFault},
    model::*,
    rate::Window,
    runner::VERSION,
};

/// An event for webhooks.
pub struct Event {
    pub name: &'static str,
    pub action: String,
    pub repository: u64,
    pub run: u64,
    pub payload: Map<String, Value>,
}

/// Timeouts after which a silent runner counts as offline or lost.
#[derive(Clone, Copy, Debug)]
pub struct OfflineTimeouts {
    /// A runner without a connection is offline after this time.
    pub offline_after: Duration,
    /// The job of a runner that stays offline fails after this time ("lost communication with the server").
    pub lost_after: Duration,
}

pub struct World {
    pub html: String,
    pub api: String,
    pub timeouts: OfflineTimeouts,
    pub owners: Vec<Owner>,
    pub repositories: Vec<Repository>,
    /// Former owners and names of repositories, with their numbers.
    pub former_names: Vec<(String, String, u64)>,
    pub apps: Vec<App>,
    pub installations: Vec<Installation>,
    pub tokens: HashMap<String, Token>,
    pub runner_tokens: HashMap<String, RunnerToken>,
    pub groups: Vec<Group>,
    pub runners: BTreeMap<u64, Runner>,
    pub jobs: BTreeMap<u64, Job>,
    pub runs: BTreeMap<u64, Run>,
    /// Whether runners that register from now on delete themselves at GitHub by their number.
    pub admin_flow: bool,
    /// Versions of the runner that get no messages any more.
    pub refused_versions: Vec<String>,
    pub hooks: Vec<Hook>,
    pub hook_faults: Vec<HookFault>,
    pub deliveries: Vec<Delivery>,
    pub faults: Vec<Fault>,
    pub calls: BTreeMap<(String, String, String), u64>,
    pub windows: HashMap<String, Window>,
    pub jit_configs: HashMap<String, VecDeque<Timestamp>>,
    pub in_flight: usize,
    pub outbox: Vec<Event>,
    last_id: u64,
    pub random: StdRng,
    /// The release of the runner that an owner is shown, where it is another than [`VERSION`].
    pub releases: HashMap<String, Release>,
}

impl World {
    pub fn new(html: String, timeouts: OfflineTimeouts, seed: u64) -> Self {
        Self {
            api: format!("{html}/api/v3"),
            html,
            timeouts,
            owners: vec![],
            repositories: vec![],
            former_names: vec![],
            apps: vec![],
            installations: vec![],
            tokens: HashMap::new(),
            runner_tokens: HashMap::new(),
            groups: vec![],
            runners: BTreeMap::new(),
            jobs: BTreeMap::new(),
            runs: BTreeMap::new(),
            admin_flow: true,
            refused_versions: vec![],
            hooks: vec![],
            hook_faults: vec![],
            deliveries: vec![],
            faults: vec![],
            calls: BTreeMap::new(),
            windows: HashMap::new(),
            jit_configs: HashMap::new(),
            in_flight: 0,
            outbox: vec![],
            last_id: 1000,
            random: StdRng::seed_from_u64(seed),
            releases: HashMap::new(),
        }
    }

    pub fn id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub fn owner(&self, login: &str) -> Option<&Owner> {
        self.owners.iter().find(|owner| same(&owner.login, login))
    }

    pub fn release(&self, owner: &str) -> Release {
        let listed = self.releases.get(&owner.to_lowercase()).cloned();
        listed.unwrap_or_else(|| Release { version: VERSION.to_owned(), checksums: true })
    }

    pub fn repository(&self, owner: &str, name: &str) -> Option<&Repository> {
        self.repositories.iter().find(|repository| same(&repository.owner, owner) && same(&repository.name, name))
    }

    /// The number of a repository that had this name, unless another one has it now.
    pub fn renamed(&self, owner: &str, name: &str) -> Option<u64> {
        let former = self.former_names.iter().rev().find(|(of, had, _)| same(of, owner) && same(had, name));
        former.filter(|_| self.repository(owner, name).is_none()).map(|(.., id)| *id)
    }

    pub fn rename_repository(&mut self, owner: &str, name: &str, new: &str) {
        let found = self.repositories.iter_mut().find(|known| same(&known.owner, owner) && same(&known.name, name));
        let Some(repository) = found else { return };
        self.former_names.push((repository.owner.clone(), repository.name.clone(), repository.id));
        new.clone_into(&mut repository.name);
        for runner in self.runners.values_mut() {
            if let Scope::Repository(of, had) = &mut runner.scope
                && same(of, owner)
                && same(had, name)
            {
                new.clone_into(had);
            }
        }
    }

    /// Renames an account: its repositories redirect, and its old name is unknown (docs.github.com, "Renaming an
    /// organization": API requests with the old name return 404).
    pub fn rename_owner(&mut self, login: &str, new: &str) {
        let rename = |owner: &mut String| {
            if same(owner, login) {
                new.clone_into(owner);
            }
        };
        for repository in self.repositories.iter_mut().filter(|known| same(&known.owner, login)) {
            self.former_names.push((repository.owner.clone(), repository.name.clone(), repository.id));
            rename(&mut repository.owner);
        }
        self.owners.iter_mut().for_each(|owner| rename(&mut owner.login));
        self.installations.iter_mut().for_each(|installation| rename(&mut installation.owner));
        self.groups.iter_mut().for_each(|group| rename(&mut group.owner));
        for runner in self.runners.values_mut() {
            match &mut runner.scope {
                Scope::Organization(owner) | Scope::Repository(owner, _) => rename(owner),
            }
        }
    }

    pub fn repository_by_id(&self, id: u64) -> &Repository {
        self.repositories.iter().find(|repository| repository.id == id).expect("repositories are never removed")
    }

    pub fn installation(&self, id: u64) -> Option<&Installation> {
        self.installations.iter().find(|installation| installation.id == id)
    }

    pub fn ensure_owner(&mut self, login: &str, kind: OwnerKind) -> Owner {
        if let Some(owner) = self.owner(login) {
            return owner.clone();
        }
        let owner = Owner { id: self.id(), login: login.to_owned(), kind };
        self.owners.push(owner.clone());
        if kind == OwnerKind::Organization {
            // Every organisation has a default group that cannot be deleted; it does not serve public repositories.
            self.groups.push(Group {
                id: DEFAULT_GROUP,
                owner: login.to_owned(),
                name: "Default".into(),
                default: true,
                visibility: "all".into(),
                selected_repositories: vec![],
                allows_public_repositories: false,
            });
        }
        owner
    }

    pub fn ensure_repository(&mut self, owner: &Owner, name: &str, private: bool) -> Repository {
        if let Some(repository) = self.repository(&owner.login, name) {
            return repository.clone();
        }
        let repository = Repository { id: self.id(), owner: owner.login.clone(), name: name.to_owned(), private };
        self.repositories.push(repository.clone());
        repository
    }

    pub fn group(&self, owner: &str, id: u64) -> Option<&Group> {
        self.groups.iter().find(|group| group.id == id && same(&group.owner, owner))
    }

    pub fn runners_of(&self, scope: &Scope) -> impl Iterator<Item = &Runner> {
        self.runners.values().filter(move |runner| same_scope(&runner.scope, scope))
    }

    pub fn runner_in(&self, scope: &Scope, id: u64) -> Option<&Runner> {
        self.runners.get(&id).filter(|runner| same_scope(&runner.scope, scope))
    }

    /// The group shown for a runner of a repository: repositories have no groups.
    pub fn group_name(&self, runner: &Runner) -> String {
        let group = self.group(runner.scope.owner(), runner.group_id);
        group.map_or_else(|| "Default".to_owned(), |group| group.name.clone())
    }

    pub fn add_runner(&mut self, scope: Scope, name: &str, group_id: u64, ephemeral: bool, now: Timestamp) -> Runner {
        let runner = Runner {
            id: self.id(),
            name: name.to_owned(),
            scope,
            group_id,
            labels: vec![],
            default_labels: 0,
            ephemeral,
            secret: secret(""),
            session: None,
            job: None,
            os: "unknown",
            created_at: now,
        };
        self.runners.insert(runner.id, runner.clone());
        runner
    }

    /// Whether the runner may take jobs of the repository: its own, or its organisation's if the group allows it.
    pub fn visible(&self, runner: &Runner, repository: &Repository) -> bool {
        match &runner.scope {
            Scope::Repository(owner, name) => same(owner, &repository.owner) && same(name, &repository.name),
            Scope::Organization(owner) => {
                same(owner, &repository.owner)
                    && self.group(owner, runner.group_id).is_some_and(|group| {
                        (repository.private || group.allows_public_repositories)
                            && match group.visibility.as_str() {
                                "selected" => group.selected_repositories.contains(&repository.id),
                                "private" => repository.private,
                                _ => true,
                            }
                    })
            }
        }
    }
}

pub fn same_scope(a: &Scope, b: &Scope) -> bool {
    match (a, b) {
        (Scope::Organization(a), Scope::Organization(b)) => same(a, b),
        (Scope::Repository(a, x), Scope::Repository(b, y)) => same(a, b) && same(x, y),
        _ => false,
    }
}

/// Part of every secret that the simulator issues, so that tests can search for leaks. Registration and removal tokens
/// have it in capitals.
pub const CANARY: &str = "PaddockCanary";

/// A random secret with a prefix like GitHub's.
pub fn secret(prefix: &str) -> String {
    let random: [u8; 18] = rand::random();
    prefix.chars().chain(CANARY.chars()).chain(random.iter().map(|byte| ALPHABET[usize::from(byte % 62)])).collect()
}

const ALPHABET: [char; 62] = {
    let text = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    let mut letters = ['A'; 62];
    let mut at = 0;
    while at < 62 {
        letters[at] = text[at] as char;
        at += 1;
    }
    letters
};
