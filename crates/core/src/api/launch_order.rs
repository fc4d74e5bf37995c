//! `status.fleet` of claims and pools, and `status.shortage` of claims: what EC2 was asked for, and did not have.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::{common::UsageClass, pool::LaunchTemplate};

/// An order for new machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LaunchOrder {
    /// Makes the order idempotent at EC2, also when the next leader sends it again.
    #[schemars(length(max = 64))]
    pub client_token: String,
    /// Which order this is, from 1: a fallback or retry of a claim is a new one.
    pub attempt: u32,
    /// How many machines were ordered.
    pub requested: u32,
    /// How they are paid for, which a fallback may have changed.
    pub usage_class: UsageClass,
    /// When the order was written down.
    pub ordered_at: Time,
    /// The launch template, and all the rest that EC2 was asked for: a repeated order must be the same in every point,
    /// whatever became of the pool or of the operator's version meanwhile.
    #[serde(default)]
    pub launch_template: LaunchTemplate,
    /// One subnet for each of at most four zones that were not known to be out of capacity.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub subnets: Vec<OrderSubnet>,
    /// The resource class that they are made for.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub resource_class: String,
    /// The least number of vCPUs.
    #[serde(default)]
    pub cpu: u32,
    /// The least memory in MiB.
    #[serde(default, rename = "memoryMiB")]
    pub memory_mib: u32,
    /// Instance types that will do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 30)), extend("x-kubernetes-list-type" = "set"))]
    pub allowed_instance_types: Vec<String>,
    /// Which of these EC2 takes although it leaves them out by default.
    #[serde(default)]
    pub include: IncludedTypes,
    /// How EC2 chooses among types and zones.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub allocation_strategy: String,
    /// Tags of the machines.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "tags_schema")]
    pub tags: BTreeMap<String, String>,
    /// The fleet, once EC2 has answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub fleet_id: Option<String>,
    /// The machines that EC2 gave.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(max = 64)), extend("x-kubernetes-list-type" = "set"))]
    pub instance_ids: Vec<String>,
}

/// A subnet that machines are ordered in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderSubnet {
    /// The subnet's id.
    #[schemars(length(max = 24))]
    pub id: String,
    /// Its zone.
    #[serde(default)]
    #[schemars(length(max = 32))]
    pub zone: String,
}

/// Instance types that EC2 leaves out by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct IncludedTypes {
    /// Those that cost much more than the cheapest one: no price protection.
    pub any_price: bool,
    /// Burstable ones.
    pub burstable: bool,
    /// Bare metal.
    pub bare_metal: bool,
}

/// The limits of EC2.
fn tags_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "maxProperties": 50, "additionalProperties": { "type": "string", "maxLength": 256 },
    })
}

/// `status.shortage` of a claim that waits, or has waited, for capacity at EC2.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CapacityShortage {
    /// Since when EC2 is known to have no capacity; absent while the claim waits for something else.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// The last order that was given up. The next one has another number, so that EC2 does not take it for the same.
    #[serde(default)]
    pub attempt: u32,
    /// EC2's reasons by zone and type.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub message: String,
}
