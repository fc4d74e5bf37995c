//! Machines made for a claim: what is ordered, and what becomes of the answer.

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use kube::runtime::events::EventType;
use paddock_record::State;

use super::{
    Work,
    provision::{Over, Supply},
};
use crate::{
    api::{ClaimPhase, ClaimReason, FailureReason, TAG_CLAIM, TAG_CLUSTER, TAG_INITIAL_RUN_ID, TAG_POOL, UsageClass},
    controllers::pool::{at_aws, prepare_timer},
    effects::{aws::AwsError, machines::FleetOutcome},
    plan::{
        fleet::{Wanted, client_token},
        shortage::{Kind, Order, in_words, trouble},
    },
};

impl Work {
    /// Has machines created for what the pool could not give, unless EC2 is known to have none.
    pub(super) async fn create(&mut self, supply: &Supply, count: u32) -> Result<Over> {
        let (key, max) = (self.pool_key(), supply.pool.max_instances);
        let there = self.context.ledger.of_pool(&key);
        let live = there.iter().filter(|tracked| tracked.record.state != State::Terminated).count() as u32;
        let Some(_room) = self.context.launches.reserve(&key, live, count, count, max) else {
            let message = format!(
                "{count} more machines are needed, but the pool has or creates {live} of at most {max} (maxInstances)"
            );
            return self.wait(ClaimReason::PoolFull, message).await.map(Some);
        };
        let (subnets, fallback) = (&supply.pool.subnet_ids, supply.pool.fallback.spot_to_on_demand);
        let order = self.context.shortages().order(&supply.needs, subnets, fallback, Timestamp::now());
        match order {
            Order::Ask { usage_class, subnet_ids } => {
                self.place(supply, 1, count, usage_class, subnet_ids).await?;
                self.order(supply).await
            }
            Order::Wait { until, message } => {
                self.wait_until(until, ClaimReason::InsufficientCapacity, message).await.map(Some)
            }
        }
    }

    /// The intent before the effect: a successor finds the order and asks for the same fleet.
    async fn place(
        &mut self,
        supply: &Supply,
        attempt: u32,
        requested: u32,
        usage_class: UsageClass,
        subnet_ids: Vec<String>,
    ) -> Result<()> {
        let wanted = Wanted {
            client_token: client_token(&self.uid(), attempt),
            attempt,
            template: &supply.template,
            count: requested,
            usage_class,
            subnet_ids,
            needs: &supply.needs,
        };
        self.status.fleet = Some(wanted.order(Timestamp::now()).into());
        let message = format!("creating {requested} {} machines", usage_class.as_str());
        self.enter(ClaimPhase::Creating, ClaimReason::Creating, message);
        self.write().await
    }

    /// Has the persisted order carried out, and its instances entered. One that EC2 could not fulfil is followed by another
    /// where the pool's fallback allows.
    pub(super) async fn order(&mut self, supply: &Supply) -> Result<Over> {
        loop {
            let order = self.status.fleet.clone().context("there is no order")?;
            let tags = self.tags();
            let outcome = match self.context.machines.create_fleet(&order, &tags).await {
                Ok(outcome) => outcome,
                // Nothing was made. The pool makes another template, and the order goes out anew with that.
                Err(error) if error.is_template_gone() => {
                    let Some(pool) = &self.pool else { return Err(error.into()) };
                    self.context.timers.reset(&prepare_timer(pool));
                    if supply.template == order.launch_template {
                        let message = format!("{error}; the pool makes its launch template anew");
                        return self.wait(ClaimReason::PoolNotReady, message).await.map(Some);
                    }
                    let (usage_class, subnet_ids) = (order.usage_class, order.subnet_ids);
                    self.place(supply, order.attempt + 1, order.requested, usage_class, subnet_ids).await?;
                    continue;
                }
                Err(error @ (AwsError::Refused { .. } | AwsError::Denied { .. })) => {
                    self.context.launched(self.pool.as_deref(), Some(at_aws(error.clone())));
                    return self.fail(ClaimReason::AwsUnavailable, error.to_string()).await.map(Some);
                }
                Err(error) => return Err(error.into()),
            };
            let now = Timestamp::now();
            self.enter_instances(supply, &outcome, now).await?;
            self.context.shortages().note(&order, outcome.launched.len(), &outcome.causes, now);
            if outcome.launched.len() as u32 >= order.requested {
                self.context.launched(self.pool.as_deref(), None);
                if let Some(fleet) = &mut self.status.fleet {
                    fleet.fleet_id = Some(outcome.fleet_id);
                    fleet.instance_ids = outcome.launched.into_iter().map(|launched| launched.id).collect();
                }
                self.write().await?;
                return Ok(None);
            }
            if let Some(trouble) = trouble(&outcome.causes) {
                self.context.launched(self.pool.as_deref(), Some(trouble));
            }
            let why = format!(
                "EC2 gave {} of {} {} machines: {}",
                outcome.launched.len(),
                order.requested,
                order.usage_class.as_str(),
                in_words(&outcome.causes)
            );
            let capacity = outcome.causes.iter().any(|cause| cause.kind() == Kind::Capacity);
            let fallback = supply.pool.fallback.spot_to_on_demand && order.usage_class == UsageClass::Spot;
            let next = self.context.shortages().order(&supply.needs, &supply.pool.subnet_ids, fallback, now);
            let subnet_ids = match next {
                Order::Ask { usage_class: UsageClass::OnDemand, subnet_ids } if fallback && capacity => subnet_ids,
                Order::Ask { .. } | Order::Wait { .. } => {
                    let reason = if capacity { ClaimReason::InsufficientCapacity } else { ClaimReason::AwsUnavailable };
                    return self.fail(reason, why).await.map(Some);
                }
            };
            // All from one order: the few that spot gave end before others are asked for.
            for launched in &outcome.launched {
                let why = "the rest of its fleet could not be had as spot machines";
                self.context.end_instance(&launched.id, FailureReason::CreationAborted, why).await?;
            }
            self.event(EventType::Warning, "FellBack", format!("{why}; asking for on-demand machines"));
            self.place(supply, order.attempt + 1, order.requested, UsageClass::OnDemand, subnet_ids).await?;
        }
    }

    fn tags(&self) -> [(String, String); 4] {
        [
            (TAG_CLUSTER.into(), self.context.settings.cluster_name.clone()),
            (TAG_POOL.into(), self.pool_key()),
            (TAG_CLAIM.into(), self.name.clone()),
            (TAG_INITIAL_RUN_ID.into(), self.claim.spec.run_id.clone()),
        ]
    }

    async fn enter_instances(&self, supply: &Supply, outcome: &FleetOutcome, now: Timestamp) -> Result<(), AwsError> {
        let (key, run_id) = (self.pool_key(), &self.claim.spec.run_id);
        let record =
            |launched| self.context.new_instance(launched, &key, &supply.pool, &supply.needs, run_id, &self.name, now);
        self.context.ledger.create(&outcome.launched.iter().map(record).collect::<Vec<_>>()).await
    }
}
