//! Claims that are Ready: they stay so until their machines are gone.

use anyhow::Result;
use jiff::Timestamp;
use kube::runtime::{controller::Action, events::EventType};
use paddock_record::{Instance, State};

use super::Work;
use crate::{
    api::{ClaimPhase, ClaimReason, FailureReason, READY},
    plan::claim::surplus,
};

impl Work {
    pub(super) async fn watch_over(&mut self) -> Result<Action> {
        let held = self.held();
        let spare = surplus(&held, self.claim.spec.count, true);
        if let Some(over) = self.let_go(&held, &spare).await? {
            return Ok(over);
        }
        let held = self.held();
        self.list_workers(&held);
        let (count, lost) = (self.claim.spec.count, self.lost());
        if held.is_empty() {
            let (phase, reason, message) = how_it_ended(&lost);
            self.enter(phase, reason, message);
        } else if (held.len() as u32) < count && !lost.is_empty() {
            let message = format!("{} of {count} runners are left; lost: {}", held.len(), in_words(&lost));
            let told = self.status.conditions.iter().any(|known| known.type_ == READY && known.message == message);
            if !told {
                self.event(EventType::Warning, ClaimReason::WorkerLost.as_str(), message.clone());
            }
            self.enter(ClaimPhase::Ready, ClaimReason::WorkerLost, message);
        }
        self.write().await?;
        Ok(Action::await_change())
    }

    /// The records of machines that this very claim had, and that ended.
    fn lost(&self) -> Vec<Instance> {
        let began = self.claim.metadata.creation_timestamp.as_ref().map_or(Timestamp::MIN, |time| time.0);
        let ready = self.status.phase_times.ready.as_ref().map_or(began, |time| time.0);
        let ours = self.context.ledger.of_claim(&self.pool_key(), &self.name).into_iter().map(|tracked| tracked.record);
        ours.filter(|record| record.state == State::Terminated && record.updated_at >= ready).collect()
    }
}

/// Why a claim that was Ready has no machines any more.
fn how_it_ended(lost: &[Instance]) -> (ClaimPhase, ClaimReason, String) {
    let in_time = |record: &&Instance| record.failure_reason == FailureReason::ThresholdPassed.as_str();
    if lost.is_empty() {
        let message = "its machines and their records are gone";
        (ClaimPhase::Failed, ClaimReason::WorkerLost, message.into())
    } else if lost.iter().all(|record| in_time(&record)) {
        let message = "its machines have served for as long as they may (maxRuntime), and were ended";
        (ClaimPhase::Completed, ClaimReason::MaxRuntimeReached, message.into())
    } else {
        let lost: Vec<_> = lost.iter().filter(|record| !in_time(record)).cloned().collect();
        (ClaimPhase::Failed, ClaimReason::WorkerLost, in_words(&lost))
    }
}

fn in_words(lost: &[Instance]) -> String {
    let each = lost
        .iter()
        .map(|record| format!("{} ({}: {})", record.instance_id, record.failure_reason, record.failure_message));
    each.collect::<Vec<_>>().join("; ")
}
