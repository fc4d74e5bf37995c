//! Lightweight simulated `paddock-agent`s in this process. Each has its own key, sends a heartbeat every 5 s, polls its
//! record every 50 ms and reports at once, with the real agent's records and sealed tokens.
//!
//! They do not register with GitHub; they open the sealed token and report success. A thousand agents polling twenty
//! times a second would saturate the emulated DynamoDB. So a poll is skipped unless the front end reported a write, and
//! reads and writes are batched and bypass the front end, which counts and delays only the operator's calls.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use aws_sdk_dynamodb::{
    Client,
    types::{AttributeValue, KeysAndAttributes, PutRequest, WriteRequest},
};
use jiff::Timestamp;
use paddock_record::{HEARTBEAT, Heartbeat, Instance, KeyPair, PublicKey, Signal, State, WorkerSignal, instance_key};
use tokio::{sync::mpsc::UnboundedReceiver, task::AbortHandle};

use crate::{
    aws::{Aws, Event},
    cloud::machine_arns,
};

/// How often each agent polls its record.
pub const RECORD_POLL: Duration = Duration::from_millis(50);
/// The resolution of the agents' timers.
const TICK: Duration = Duration::from_millis(5);
/// DynamoDB's batch limits.
const READ_BATCH: usize = 100;
const WRITE_BATCH: usize = 25;

type Item = HashMap<String, AttributeValue>;

pub struct Agents {
    shared: Arc<Shared>,
    tasks: [AbortHandle; 2],
}

struct Shared {
    client: Client,
    table: String,
    start: Instant,
    agents: Mutex<HashMap<String, Agent>>,
}

/// An agent's last signal, when the record that caused it was written, and when the signal was in the table.
#[derive(Clone, Debug)]
pub struct SentSignal {
    pub signal: Signal,
    pub run_id: String,
    /// The record's number of claims.
    claims: u32,
    pub asked: Instant,
    pub at: Instant,
}

pub struct Agent {
    key: KeyPair,
    pub public: PublicKey,
    /// The offset of this agent's polls within the interval.
    phase: Duration,
    poll_at: Option<Instant>,
    /// When the record was last written, and its content when last read.
    pub written: Instant,
    pub record: Option<Instance>,
    /// When that read started.
    read_at: Instant,
    pub sent: Option<SentSignal>,
}

impl Agent {
    /// Whether its machine is in the pool, ready to be claimed.
    pub fn is_free(&self) -> bool {
        self.poll_at.is_none()
            && self.record.as_ref().is_some_and(|record| record.state == State::Idle && record.leaving.is_empty())
    }

    /// The signal that the record requires, if it is not sent yet.
    fn answer(&self, record: &Instance) -> Result<Option<(Signal, String)>> {
        let is_it = |sent: &SentSignal, signal, run: &str| {
            (sent.signal, sent.run_id.as_str(), sent.claims) == (signal, run, record.claims)
        };
        let sent = |signal, run: &str| self.sent.as_ref().is_some_and(|sent| is_it(sent, signal, run));
        let (run, leaving) = (&record.run_id, &record.leaving);
        if !run.is_empty() {
            if record.sealed.is_empty() || sent(Signal::Registered, run) {
                return Ok(None);
            }
            match self.key.open(&record.sealed) {
                Ok(token) if !token.is_empty() => Ok(Some((Signal::Registered, run.clone()))),
                other => bail!("{} cannot open its token: {:?}", record.instance_id, other.err()),
            }
        } else if !leaving.is_empty() {
            Ok((!sent(Signal::Deregistered, leaving)).then(|| (Signal::Deregistered, leaving.clone())))
        } else {
            Ok(None)
        }
    }
}

impl Agents {
    /// Simulates the agent of every instance that is launched from now on.
    pub fn start(aws: &Aws, client: Client, table: String) -> Self {
        let shared = Arc::new(Shared { client, table, start: Instant::now(), agents: Mutex::default() });
        let play = tokio::spawn(shared.clone().play(aws.watch_instances(), aws.watch_records()));
        let beat = tokio::spawn(shared.clone().beat());
        Self { shared, tasks: [play.abort_handle(), beat.abort_handle()] }
    }

    /// Reads the state of all agents, by instance id.
    pub fn read<T>(&self, read: impl FnOnce(&HashMap<String, Agent>) -> T) -> T {
        read(&self.shared.agents())
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl Shared {
    fn agents(&self) -> MutexGuard<'_, HashMap<String, Agent>> {
        self.agents.lock().expect("no agent panics")
    }

    async fn play(self: Arc<Self>, mut machines: UnboundedReceiver<Event>, mut records: UnboundedReceiver<String>) {
        let mut ticks = tokio::time::interval(TICK);
        loop {
            ticks.tick().await;
            let mut launched = Vec::new();
            while let Ok(event) = machines.try_recv() {
                match event {
                    Event::Launched(instance) => launched.push(instance.id.clone()),
                    Event::Ended(id) => drop(self.agents().remove(&id)),
                }
            }
            if !launched.is_empty() {
                tokio::spawn(self.clone().boot(launched));
            }
            while let Ok(id) = records.try_recv() {
                self.notice(&id);
            }
            let now = Instant::now();
            let mut due = Vec::new();
            for (id, agent) in self.agents().iter_mut() {
                if agent.poll_at.take_if(|at| *at <= now).is_some() {
                    due.push((id.clone(), agent.written));
                }
            }
            for due in due.chunks(READ_BATCH) {
                tokio::spawn(self.clone().serve(due.to_vec()));
            }
        }
    }

    /// A record was written: its agent sees that at its next poll.
    fn notice(&self, id: &str) {
        let now = Instant::now();
        if let Some(agent) = self.agents().get_mut(id) {
            agent.written = now;
            let since = now.duration_since(self.start).saturating_sub(agent.phase);
            let polls = since.as_nanos().div_euclid(RECORD_POLL.as_nanos()) as u32 + 1;
            agent.poll_at = Some(self.start + agent.phase + RECORD_POLL * polls);
        }
    }

    /// Simulates a boot: the agent has a key, and its script has succeeded.
    async fn boot(self: Arc<Self>, ids: Vec<String>) {
        let keys = ids.iter().map(|_| KeyPair::generate()).map(|key| (key.public(), key));
        let keys: Vec<_> = keys.collect();
        let (now, stamp) = (Instant::now(), Timestamp::now());
        let beats = ids.iter().zip(&keys).map(|(id, (public, _))| beat(id, public, stamp).to_item(&machine_arns()));
        self.put(beats.collect()).await;
        let ready = |id: &String| WorkerSignal::new(id, Signal::ScriptOk, "", 0, stamp).to_item(&machine_arns());
        self.put(ids.iter().map(ready).collect()).await;
        let mut agents = self.agents();
        for (id, (public, key)) in ids.into_iter().zip(keys) {
            let phase = RECORD_POLL.mul_f64(rand::random());
            // The record may have been written before the agent started.
            let poll_at = Some(Instant::now());
            agents.insert(
                id,
                Agent { key, public, phase, poll_at, written: now, record: None, read_at: now, sent: None },
            );
        }
    }

    /// Reads the records of the agents that are due, and sends their signals.
    async fn serve(self: Arc<Self>, due: Vec<(String, Instant)>) {
        let read_at = Instant::now();
        let records = match self.read(&due).await {
            Ok(records) => records,
            Err(error) => return eprintln!("agents cannot read their records: {error:#}"),
        };
        let asked: HashMap<_, _> = due.into_iter().collect();
        let stamp = Timestamp::now();
        let mut answers = Vec::new();
        for record in records {
            let id = record.instance_id.clone();
            let mut agents = self.agents();
            // A read that started later may have finished first, with newer content.
            let Some(agent) = agents.get_mut(&id).filter(|agent| agent.read_at <= read_at) else { continue };
            match agent.answer(&record) {
                Ok(Some((signal, run_id))) => {
                    answers.push(WorkerSignal::new(&id, signal, &run_id, record.claims, stamp))
                }
                Ok(None) => {}
                Err(error) => eprintln!("{error:#}"),
            }
            (agent.record, agent.read_at) = (Some(record), read_at);
        }
        self.put(answers.iter().map(|answer| answer.to_item(&machine_arns())).collect()).await;
        let at = Instant::now();
        let mut agents = self.agents();
        for WorkerSignal { instance_id: id, signal, run_id, claims, .. } in answers {
            if let Some(agent) = agents.get_mut(&id) {
                let claims = claims.unwrap_or_default();
                agent.sent = Some(SentSignal { signal, run_id, claims, asked: asked[&id], at });
            }
        }
    }

    async fn read(&self, due: &[(String, Instant)]) -> Result<Vec<Instance>> {
        let keys = due.iter().map(|(id, _)| instance_key(id));
        let wanted = KeysAndAttributes::builder().set_keys(Some(keys.collect())).consistent_read(true).build()?;
        let answer = self.client.batch_get_item().request_items(&self.table, wanted).send().await?;
        ensure!(answer.unprocessed_keys.unwrap_or_default().is_empty(), "the emulator left keys out");
        let items = answer.responses.unwrap_or_default().remove(&self.table).unwrap_or_default();
        Ok(items.iter().map(Instance::from_item).collect())
    }

    async fn put(&self, items: Vec<Item>) {
        let writes = items.chunks(WRITE_BATCH).map(async |items| {
            let puts = items.iter().map(|item| {
                let put = PutRequest::builder().set_item(Some(item.clone())).build().expect("an item is set");
                WriteRequest::builder().put_request(put).build()
            });
            self.client.batch_write_item().request_items(&self.table, puts.collect()).send().await
        });
        for written in futures::future::join_all(writes).await {
            if let Err(error) = written {
                eprintln!("agents cannot write: {}", aws_sdk_dynamodb::error::DisplayErrorContext(error));
            }
        }
    }

    /// Spreads the heartbeats over the period, so that not all are sent at once.
    async fn beat(self: Arc<Self>) {
        const GROUPS: u32 = 10;
        let mut ticks = tokio::time::interval(HEARTBEAT / GROUPS);
        for group in 0.. {
            ticks.tick().await;
            let own = |agent: &Agent| (agent.phase.as_nanos() * u128::from(GROUPS) / RECORD_POLL.as_nanos()) as u32;
            let keys: Vec<_> = {
                let agents = self.agents();
                let mine = agents.iter().filter(|(_, agent)| own(agent) == group % GROUPS);
                mine.map(|(id, agent)| (id.clone(), agent.public.clone())).collect()
            };
            let now = Timestamp::now();
            self.put(keys.iter().map(|(id, key)| beat(id, key, now).to_item(&machine_arns())).collect()).await;
        }
    }
}

fn beat(id: &str, key: &PublicKey, now: Timestamp) -> Heartbeat {
    Heartbeat::new(id, Some(key.clone()), now)
}
