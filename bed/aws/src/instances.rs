//! Tracks instances by the launches and terminations that pass through the front end.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::Mutex,
    time::{Duration, Instant},
};

use roxmltree::Node;
use serde::Serialize;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::{capacity::Usage, xml};

/// What follows in a machine's log is not of its console.
pub const END_OF_CONSOLE: &[u8] = b"\n--- files in /var/log:\n";

/// What happens to an instance that shuts itself down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Shutdown {
    Stop,
    Terminate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum InstanceState {
    Running,
    Stopped,
    Terminated,
}

/// Why an instance stopped or was terminated. The texts are those of `StateReason` in the EC2 API reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ending {
    pub code: String,
    pub message: String,
    /// `StateTransitionReason`.
    pub reason: String,
}

impl Ending {
    /// By a call of the account.
    pub fn user() -> Self {
        Self::new("Client.UserInitiatedShutdown", "User initiated shutdown", "User initiated")
    }

    /// By a shutdown from inside the machine.
    pub fn instance() -> Self {
        Self::new("Client.InstanceInitiatedShutdown", "Instance initiated shutdown", "Instance initiated")
    }

    /// EC2 took spot capacity back.
    pub fn reclaimed() -> Self {
        Self::server("Server.SpotInstanceTermination", "Spot instance termination")
    }

    /// EC2 ended it, for example as it could not start: `Server.InternalError`, `Client.VolumeLimitExceeded`.
    pub fn server(code: &str, message: &str) -> Self {
        Self::new(code, message, "Server initiated")
    }

    fn new(code: &str, message: &str, who: &str) -> Self {
        let time = jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M:%S");
        Self { code: code.into(), message: format!("{code}: {message}"), reason: format!("{who} ({time} GMT)") }
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct Instance {
    pub id: String,
    pub state: InstanceState,
    /// None while it runs.
    pub ending: Option<Ending>,
    pub instance_type: String,
    pub image_id: String,
    pub zone: String,
    pub private_ip: String,
    pub usage: Usage,
    pub tags: BTreeMap<String, String>,
    /// Whether the metadata service shows the tags, which must be enabled at launch.
    pub metadata_tags: bool,
    pub shutdown: Shutdown,
    /// The role of its instance profile.
    pub role: Option<String>,
    /// The time of the spot interruption (ISO 8601), once it is announced.
    pub spot_notice: Option<String>,
    #[serde(skip)]
    pub user_data: Vec<u8>,
    /// What its machine prints.
    #[serde(skip)]
    pub console: Option<PathBuf>,
    #[serde(skip)]
    hidden_until: Option<Instant>,
}

/// The parts of an instance that are in the request but not in the answer.
pub struct LaunchFacts {
    pub shutdown: Shutdown,
    pub role: Option<String>,
    pub user_data: Vec<u8>,
    pub invisible: Option<Duration>,
}

impl Instance {
    /// Reads an item of `instancesSet`.
    pub fn read(item: Node<'_, '_>, facts: &LaunchFacts) -> Self {
        let text = |path: &[&str]| xml::text(item, path).unwrap_or_default().to_owned();
        Self {
            id: text(&["instanceId"]),
            state: InstanceState::Running,
            ending: None,
            instance_type: text(&["instanceType"]),
            image_id: text(&["imageId"]),
            zone: text(&["placement", "availabilityZone"]),
            private_ip: text(&["privateIpAddress"]),
            usage: if text(&["instanceLifecycle"]) == "spot" { Usage::Spot } else { Usage::OnDemand },
            tags: xml::tags(item).into_iter().collect(),
            metadata_tags: text(&["metadataOptions", "instanceMetadataTags"]) == "enabled",
            shutdown: facts.shutdown,
            role: facts.role.clone(),
            spot_notice: None,
            console: None,
            user_data: facts.user_data.clone(),
            hidden_until: facts.invisible.map(|time| Instant::now() + time),
        }
    }

    pub fn hidden(&self) -> bool {
        self.hidden_until.is_some_and(|until| Instant::now() < until)
    }
}

#[derive(Clone, Debug)]
pub enum Event {
    Launched(Box<Instance>),
    /// Terminated or stopped: in both cases its processes are gone.
    Ended(String),
}

#[derive(Default)]
pub struct Instances(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    all: BTreeMap<String, Instance>,
    watchers: Vec<UnboundedSender<Event>>,
}

impl Inner {
    fn notify(&mut self, event: &Event) {
        self.watchers.retain(|watcher| watcher.send(event.clone()).is_ok());
    }
}

impl Instances {
    pub fn launched(&self, instance: Instance) {
        let mut inner = self.0.lock().unwrap();
        inner.all.insert(instance.id.clone(), instance.clone());
        inner.notify(&Event::Launched(Box::new(instance)));
    }

    pub fn ended(&self, id: &str, state: InstanceState, why: Ending) {
        let mut inner = self.0.lock().unwrap();
        let Some(instance) = inner.all.get_mut(id) else { return };
        if instance.state != InstanceState::Terminated {
            instance.ending = Some(why);
        }
        let was = std::mem::replace(&mut instance.state, state);
        if was == InstanceState::Running {
            inner.notify(&Event::Ended(id.to_owned()));
        }
    }

    pub fn update(&self, id: &str, change: impl FnOnce(&mut Instance)) {
        self.0.lock().unwrap().all.get_mut(id).map(change);
    }

    pub fn get(&self, id: &str) -> Option<Instance> {
        self.0.lock().unwrap().all.get(id).cloned()
    }

    pub fn list(&self) -> Vec<Instance> {
        self.0.lock().unwrap().all.values().cloned().collect()
    }

    /// All future events, preceded by a launch event for each running instance.
    pub fn watch(&self) -> UnboundedReceiver<Event> {
        let (watcher, events) = unbounded_channel();
        let mut inner = self.0.lock().unwrap();
        for instance in inner.all.values().filter(|instance| instance.state == InstanceState::Running) {
            let _ = watcher.send(Event::Launched(Box::new(instance.clone())));
        }
        inner.watchers.push(watcher);
        events
    }
}
