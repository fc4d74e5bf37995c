//! Giving back what a claim holds.

use anyhow::Result;
use jiff::Timestamp;
use kube::runtime::controller::Action;
use paddock_record::{Instance, State};
use secrecy::ExposeSecret;

use super::{LOOK_AGAIN, Outage, STALE, TokenKind, Work};
use crate::{
    api::{ClaimPhase, ClaimReason, FailureReason},
    controllers::objects,
    plan::instance::Tracked,
};

impl Work {
    /// A claim that is over holds nothing.
    pub(super) async fn settle_over(&mut self) -> Result<Action> {
        if let Some(waiting) = self.give_all_back().await? {
            return Ok(waiting);
        }
        self.list_workers(&[]);
        self.write().await?;
        Ok(Action::await_change())
    }

    pub(super) async fn release(&mut self) -> Result<Action> {
        if self.status.phase != Some(ClaimPhase::Releasing) {
            self.enter(ClaimPhase::Releasing, ClaimReason::Releasing, "giving the machines back to the pool".into());
            self.write().await?;
        }
        match self.give_all_back().await? {
            None => {
                objects::remove_finalizer(&self.context.client, &*self.claim).await?;
                Ok(Action::requeue(STALE))
            }
            // The condition says what is waited for.
            Some(waiting) => Ok(waiting),
        }
    }

    /// The workflow run is over: everything goes back, and the claim stays to be looked at. What is written first makes
    /// whoever leads next go on, whatever told us.
    pub(super) async fn finish(&mut self) -> Result<Action> {
        if self.status.phase != Some(ClaimPhase::Releasing) {
            let message = "its workflow run is over: giving the machines back to the pool";
            self.enter(ClaimPhase::Releasing, ClaimReason::Releasing, message.into());
            self.write().await?;
        }
        if let Some(waiting) = self.give_all_back().await? {
            return Ok(waiting);
        }
        self.list_workers(&[]);
        let message = "its workflow run is over, and its machines are given back";
        self.enter(ClaimPhase::Completed, ClaimReason::Completed, message.into());
        self.write().await?;
        Ok(Action::await_change())
    }

    pub(super) async fn fail(&mut self, reason: ClaimReason, message: String) -> Result<Action> {
        if let Some(waiting) = self.give_all_back().await? {
            return Ok(waiting);
        }
        self.list_workers(&[]);
        self.status.set_progress(0, self.claim.spec.count);
        self.enter(ClaimPhase::Failed, reason, message);
        self.write().await?;
        Ok(Action::await_change())
    }

    async fn give_all_back(&mut self) -> Result<Option<Action>> {
        if let Some(waiting) = self.give_back(&self.held()).await? {
            return Ok(Some(waiting));
        }
        match self.held().is_empty() {
            true => Ok(None),
            false => Ok(Some(Action::requeue(LOOK_AGAIN))),
        }
    }

    /// Returns machines of the pool to it, and ends those that never served; an answer means that it has to wait.
    pub(super) async fn give_back(&mut self, held: &[Tracked]) -> Result<Option<Action>> {
        if held.is_empty() {
            return Ok(None);
        }
        let Some(ec2) = self.pool.as_ref().and_then(|pool| pool.spec.ec2.clone()) else { return Ok(None) };
        let token = match self.token(&ec2, TokenKind::Removal).await {
            Ok(token) => token,
            // A deleted claim goes in any case: its machines end, and what GitHub knows of them is nobody's to remove.
            Err(Outage::NoCredentials(why)) if self.claim.metadata.deletion_timestamp.is_some() => {
                let why = format!("the claim was deleted, and its runner cannot leave GitHub: {why}");
                for tracked in held {
                    let id = &tracked.record.instance_id;
                    self.context.end_instance(id, FailureReason::DeregistrationFailed, &why).await?;
                }
                return Ok(None);
            }
            Err(error) => return self.wait_for_github(error).await.map(Some),
        };
        let now = Timestamp::now();
        let mut moves = Vec::new();
        for tracked in held {
            let record = &tracked.record;
            let key = tracked.vitals.heartbeat.as_ref().and_then(|beat| beat.public_key.as_ref());
            match (record.state, key) {
                (State::Running | State::Claimed, Some(key)) => {
                    let next = Instance {
                        state: State::Idle,
                        run_id: String::new(),
                        claim: String::new(),
                        leaving: record.run_id.clone(),
                        threshold: Some(ec2.lifetimes.idle.after(now)),
                        updated_at: now,
                        sealed: key.seal(token.expose_secret()),
                        ..record.clone()
                    };
                    moves.push((record.clone(), next));
                }
                (State::Idle | State::Terminated, _) => {}
                (State::Created | State::Running | State::Claimed, _) => {
                    let why = "the claim ended before the machine served";
                    self.context.end_instance(&record.instance_id, FailureReason::CreationAborted, why).await?;
                }
            }
        }
        self.context.ledger.advance_all(&moves, now).await?;
        Ok(None)
    }
}
