//! The available instance types, with prices.

use std::{collections::HashMap, path::Path};

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    capacity::Usage,
    model::unzipped,
    requirements::{Requirements, protected},
};

#[derive(Clone, Debug, PartialEq)]
pub struct InstanceType {
    pub name: String,
    pub vcpus: u32,
    pub memory_mib: u32,
    pub architectures: Vec<String>,
    pub manufacturer: String,
    pub burstable: bool,
    pub bare_metal: bool,
    pub current: bool,
    pub accelerators: u32,
    pub local_storage: bool,
    pub usages: Vec<String>,
}

/// Prices stand in for AWS's, which moto does not have. They are in millionths of a dollar an hour: so much for a vCPU
/// and a GiB that `c5.large`, `m5.large` and `r5.large` cost about what they do in us-east-1,
const VCPU_PRICE: u64 = 37_000;
const GIB_PRICE: u64 = 2_900;
/// and so many per cent of that for what else is in the name of a family: (part of the name, per cent).
const FACTORS: [(&str, u64); 7] = [("a", 90), ("b", 120), ("d", 118), ("g", 80), ("n", 125), ("z", 190), ("flex", 95)];
const ACCELERATED_PERCENT: u64 = 500;
/// A family before the current generations costs more for the same.
const PREVIOUS_PERCENT: u64 = 115;
const BURSTABLE_PERCENT: u64 = 87;
/// What spot capacity costs of the price on demand. It changes at AWS, and differs by type and zone.
const SPOT_PERCENT: u64 = 35;

impl InstanceType {
    pub fn price(&self, usage: Usage) -> u64 {
        let family = self.name.split('.').next().unwrap_or_default();
        let options = family.trim_start_matches(|c: char| c.is_ascii_alphabetic()).trim_start_matches(char::is_numeric);
        let base = u64::from(self.vcpus) * VCPU_PRICE + u64::from(self.memory_mib) * GIB_PRICE / 1024;
        let mut price = FACTORS
            .iter()
            .filter(|(part, _)| options.split('-').any(|word| word == *part || part.len() == 1 && word.contains(part)))
            .fold(base, |price, (_, percent)| price * percent / 100);
        let others = [
            (!self.current, PREVIOUS_PERCENT),
            (self.burstable, BURSTABLE_PERCENT),
            (self.accelerators > 0, ACCELERATED_PERCENT),
            (usage == Usage::Spot, SPOT_PERCENT),
        ];
        for (_, percent) in others.iter().filter(|(applies, _)| *applies) {
            price = price * percent / 100;
        }
        price
    }

    /// Whether it is of a family for general use: C, M or R.
    pub fn is_common(&self) -> bool {
        let family = self.name.split('.').next().unwrap_or_default();
        ["c", "m", "r"].contains(&family.split(|c: char| c.is_ascii_digit()).next().unwrap_or_default())
    }
}

/// All types, cheapest first.
pub struct Catalogue(Vec<InstanceType>);

impl Catalogue {
    /// Reads moto's own catalogue.
    pub fn of_moto(packages: &Path) -> Result<Self> {
        let file = packages.join("moto/ec2/resources/instance_types.json.gz");
        let entries: HashMap<String, Entry> =
            serde_json::from_slice(&unzipped(&file)?).context("instance types of moto")?;
        Ok(Self::new(entries.into_values().map(InstanceType::from).collect()))
    }

    pub fn new(mut types: Vec<InstanceType>) -> Self {
        types.sort_by_cached_key(|known| (known.price(Usage::OnDemand), known.name.clone()));
        Self(types)
    }

    pub fn get(&self, name: &str) -> Option<&InstanceType> {
        self.0.iter().find(|known| known.name == name)
    }

    /// The types that a fleet launches by these requirements, cheapest first.
    pub fn matching(&self, requirements: &Requirements, usage: Usage) -> Vec<&InstanceType> {
        let offered = |known: &&InstanceType| known.usages.iter().any(|offered| offered == usage.name());
        protected(self.with_attributes(requirements).filter(offered).collect(), requirements, usage)
    }

    /// The types with these attributes, whatever they cost.
    pub fn with_attributes(&self, requirements: &Requirements) -> impl Iterator<Item = &InstanceType> {
        self.0.iter().filter(move |known| requirements.met_by(known))
    }
}

/// The fields of an entry of moto's file that are used here.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    instance_type: String,
    #[serde(rename = "VCpuInfo")]
    vcpu_info: VCpus,
    memory_info: Memory,
    processor_info: Processor,
    burstable_performance_supported: bool,
    bare_metal: bool,
    current_generation: bool,
    instance_storage_supported: bool,
    #[serde(default)]
    gpu_info: Value,
    #[serde(default)]
    fpga_info: Value,
    #[serde(default)]
    inference_accelerator_info: Value,
    #[serde(default)]
    media_accelerator_info: Value,
    supported_usage_classes: Vec<String>,
}

#[derive(Deserialize)]
struct VCpus {
    #[serde(rename = "DefaultVCpus")]
    default: u32,
}

#[derive(Deserialize)]
struct Memory {
    #[serde(rename = "SizeInMiB")]
    mib: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Processor {
    supported_architectures: Vec<String>,
    #[serde(default)]
    manufacturer: String,
}

impl From<Entry> for InstanceType {
    fn from(entry: Entry) -> Self {
        let accelerators = [
            &entry.gpu_info["Gpus"],
            &entry.fpga_info["Fpgas"],
            &entry.inference_accelerator_info["Accelerators"],
            &entry.media_accelerator_info["Accelerators"],
        ];
        let accelerators = accelerators.iter().filter_map(|list| list.as_array()).flatten();
        let accelerators: u64 = accelerators.map(|one| one["Count"].as_u64().unwrap_or(1)).sum();
        let manufacturer = match entry.processor_info.manufacturer.as_str() {
            "AWS" => "amazon-web-services".to_owned(),
            other => other.to_lowercase(),
        };
        Self {
            name: entry.instance_type,
            vcpus: entry.vcpu_info.default,
            memory_mib: entry.memory_info.mib,
            architectures: entry.processor_info.supported_architectures,
            manufacturer,
            burstable: entry.burstable_performance_supported,
            bare_metal: entry.bare_metal,
            current: entry.current_generation,
            accelerators: accelerators.try_into().unwrap_or(u32::MAX),
            local_storage: entry.instance_storage_supported,
            usages: entry.supported_usage_classes,
        }
    }
}
