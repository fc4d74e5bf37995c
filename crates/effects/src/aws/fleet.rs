//! EC2: `CreateFleet`.

use std::time::Duration;

use aws_sdk_ec2::{
    config::{Builder, timeout::TimeoutConfig},
    types::{
        BareMetal, BurstablePerformance, CreateFleetError, CreateFleetInstance, DefaultTargetCapacityType,
        FleetLaunchTemplateConfigRequest, FleetLaunchTemplateOverridesRequest, FleetLaunchTemplateSpecificationRequest,
        FleetOnDemandAllocationStrategy, FleetType, InstanceRequirementsRequest, MemoryMiBRequest,
        OnDemandOptionsRequest, ResourceType, SpotAllocationStrategy, SpotOptionsRequest, Tag, TagSpecification,
        TargetCapacitySpecificationRequest, VCpuCountRangeRequest,
    },
};
use paddock_core::{
    api::{IncludedTypes, LaunchOrder, UsageClass},
    ec2::launch_error::{Cause, Kind},
};

use super::{
    AwsError,
    ec2::{FleetOutcome, Launched, Machines},
    without_encoded_details, word,
};

/// EC2 answers when it has launched all machines of an instant fleet, which may be a hundred.
const FLEET_ATTEMPT_TIMEOUT: Duration = Duration::from_secs(120);
const FLEET_TIMEOUT: Duration = Duration::from_secs(180);

/// The percentage that lifts EC2's price protection.
const ANY_PRICE: i32 = 999_999;

impl Machines {
    /// Requests a fleet, of which everything is in the order. The client token makes the call idempotent, so it can be
    /// repeated after a lost response.
    pub async fn create_fleet(&self, order: &LaunchOrder) -> Result<FleetOutcome, AwsError> {
        let count = to_i32(order.requested);
        let price = order.include.any_price.then_some(ANY_PRICE);
        let requirements = requirements(order.cpu, order.memory_mib, &order.allowed_instance_types, order.include);
        let (kind, on_demand, spot, requirements) = match order.usage_class {
            UsageClass::OnDemand => {
                let requirements = requirements.set_on_demand_max_price_percentage_over_lowest_price(price);
                (DefaultTargetCapacityType::OnDemand, count, 0, requirements)
            }
            UsageClass::Spot => {
                let requirements = requirements.set_spot_max_price_percentage_over_lowest_price(price);
                (DefaultTargetCapacityType::Spot, 0, count, requirements)
            }
        };
        let requirements = requirements.build();
        let overrides = order.subnets.iter().map(|subnet| {
            FleetLaunchTemplateOverridesRequest::builder()
                .subnet_id(&subnet.id)
                .instance_requirements(requirements.clone())
                .build()
        });
        let template = FleetLaunchTemplateSpecificationRequest::builder()
            .launch_template_id(&order.launch_template.id)
            .version(order.launch_template.version.to_string())
            .build();
        let config = FleetLaunchTemplateConfigRequest::builder()
            .launch_template_specification(template)
            .set_overrides(Some(overrides.collect()))
            .build();
        let capacity = TargetCapacitySpecificationRequest::builder()
            .total_target_capacity(count)
            .on_demand_target_capacity(on_demand)
            .spot_target_capacity(spot)
            .default_target_capacity_type(kind)
            .build();
        let create = self
            .client
            .create_fleet()
            .r#type(FleetType::Instant)
            .client_token(&order.client_token)
            .launch_template_configs(config)
            .target_capacity_specification(capacity)
            .tag_specifications(tags(order));
        let strategy = order.allocation_strategy.as_str();
        let create = match order.usage_class {
            UsageClass::OnDemand => {
                let strategy = FleetOnDemandAllocationStrategy::from(strategy);
                create.on_demand_options(OnDemandOptionsRequest::builder().allocation_strategy(strategy).build())
            }
            UsageClass::Spot => {
                let strategy = SpotAllocationStrategy::from(strategy);
                create.spot_options(SpotOptionsRequest::builder().allocation_strategy(strategy).build())
            }
        };
        let timeouts = TimeoutConfig::builder()
            .operation_attempt_timeout(FLEET_ATTEMPT_TIMEOUT)
            .operation_timeout(FLEET_TIMEOUT)
            .build();
        let create = create.customize().config_override(Builder::new().timeout_config(timeouts));
        let answer = match create.send().await.map_err(word("CreateFleet")) {
            Ok(answer) => answer,
            // Quotas of the account are refused as a whole.
            Err(AwsError::Refused { code, message, .. }) if Kind::of(&code) == Kind::Capacity => {
                let causes = vec![Cause { code, message, ..Cause::default() }];
                return Ok(FleetOutcome { causes, ..FleetOutcome::default() });
            }
            Err(error) => return Err(error),
        };
        let instances = answer.instances.unwrap_or_default().into_iter();
        let mut launched: Vec<_> = instances.flat_map(|group| launched(group, order)).collect();
        let kinds = launched.iter().map(|launched| launched.instance_type.clone()).collect();
        let sizes = self.sizes.of(&self.client, &kinds).await;
        launched.iter_mut().for_each(|launched| launched.size = sizes.get(&launched.instance_type).copied());
        let causes = answer.errors.unwrap_or_default().into_iter().map(|error| cause(error, order)).collect();
        Ok(FleetOutcome { fleet_id: answer.fleet_id.unwrap_or_default(), launched, causes })
    }
}

/// The instances of one type in one zone.
fn launched(group: CreateFleetInstance, order: &LaunchOrder) -> Vec<Launched> {
    let chosen = group.launch_template_and_overrides.and_then(|chosen| chosen.overrides);
    let (subnet, zone) = chosen.map_or((None, None), |chosen| (chosen.subnet_id, chosen.availability_zone));
    let zone = group.availability_zone.or(zone).or_else(|| zone_of(group.subnet_id.or(subnet), order));
    let zone = zone.unwrap_or_default();
    let instance_type = group.instance_type.map(|kind| kind.as_str().to_owned()).unwrap_or_default();
    let ids = group.instance_ids.unwrap_or_default().into_iter();
    let launched = |id| Launched {
        id,
        instance_type: instance_type.clone(),
        zone: zone.clone(),
        usage_class: order.usage_class,
        size: None,
    };
    ids.map(launched).collect()
}

/// EC2 may name the subnet alone.
fn zone_of(subnet: Option<String>, order: &LaunchOrder) -> Option<String> {
    let named = order.subnets.iter().find(|known| Some(&known.id) == subnet.as_ref());
    named.map(|known| known.zone.clone())
}

fn cause(error: CreateFleetError, order: &LaunchOrder) -> Cause {
    let chosen = error.launch_template_and_overrides.and_then(|chosen| chosen.overrides);
    let (subnet, zone, kind) =
        chosen.map_or((None, None, None), |chosen| (chosen.subnet_id, chosen.availability_zone, chosen.instance_type));
    Cause {
        code: error.error_code.unwrap_or_default(),
        message: without_encoded_details(&error.error_message.unwrap_or_default()).to_owned(),
        zone: zone.or_else(|| zone_of(subnet.clone(), order)).unwrap_or_default(),
        subnet: subnet.unwrap_or_default(),
        instance_type: kind.map(|kind| kind.as_str().to_owned()).unwrap_or_default(),
    }
}

/// What a machine must have. Price protection is not part of it, because only a fleet has one.
pub(super) fn requirements(
    cpu: u32,
    memory_mib: u32,
    allowed_types: &[String],
    include: IncludedTypes,
) -> aws_sdk_ec2::types::builders::InstanceRequirementsRequestBuilder {
    let (burstable, bare_metal) = (
        if include.burstable { BurstablePerformance::Included } else { BurstablePerformance::Excluded },
        if include.bare_metal { BareMetal::Included } else { BareMetal::Excluded },
    );
    InstanceRequirementsRequest::builder()
        .v_cpu_count(VCpuCountRangeRequest::builder().min(to_i32(cpu)).build())
        .memory_mib(MemoryMiBRequest::builder().min(to_i32(memory_mib)).build())
        .set_allowed_instance_types(Some(allowed_types.to_vec()))
        .burstable_performance(burstable)
        .bare_metal(bare_metal)
}

fn tags(order: &LaunchOrder) -> TagSpecification {
    let tags = order.tags.iter().map(|(key, value)| Tag::builder().key(key).value(value).build());
    TagSpecification::builder().resource_type(ResourceType::Instance).set_tags(Some(tags.collect())).build()
}

pub(super) fn to_i32(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
mod tests;
