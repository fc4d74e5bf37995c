//! The available instance types, matched against a fleet's requirements.

use std::{collections::HashMap, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::{
    capacity::{Usage, glob},
    form::Form,
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
    pub usages: Vec<String>,
}

/// All types, cheapest first: fewest vCPUs, then least memory.
pub struct Catalogue(Vec<InstanceType>);

impl Catalogue {
    /// Reads moto's own catalogue.
    pub fn of_moto(packages: &Path) -> Result<Self> {
        let file = packages.join("moto/ec2/resources/instance_types.json.gz");
        let output = Command::new("gzip").arg("-dc").arg(&file).output().context("gzip")?;
        ensure!(output.status.success(), "cannot read {}", file.display());
        let entries: HashMap<String, Entry> =
            serde_json::from_slice(&output.stdout).context("instance types of moto")?;
        Ok(Self::new(entries.into_values().map(InstanceType::from).collect()))
    }

    pub fn new(mut types: Vec<InstanceType>) -> Self {
        types.sort_by(|a, b| (a.vcpus, a.memory_mib, &a.name).cmp(&(b.vcpus, b.memory_mib, &b.name)));
        Self(types)
    }

    pub fn get(&self, name: &str) -> Option<&InstanceType> {
        self.0.iter().find(|known| known.name == name)
    }

    /// The types that meet `requirements`, cheapest first.
    pub fn matching(&self, requirements: &Requirements, usage: Usage) -> impl Iterator<Item = &InstanceType> {
        self.0.iter().filter(move |known| requirements.met_by(known, usage))
    }
}

/// `InstanceRequirements` of a fleet: attributes instead of a type.
#[derive(Clone, Debug, PartialEq)]
pub struct Requirements {
    vcpus: (u32, u32),
    memory_mib: (u32, u32),
    allowed: Vec<String>,
    excluded: Vec<String>,
    manufacturers: Vec<String>,
    generations: Vec<String>,
    burstable: Kind,
    bare_metal: Kind,
}

/// Burstable and bare metal types are excluded unless requested.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Excluded,
    Included,
    Required,
}

impl Kind {
    fn parse(text: Option<&str>) -> Self {
        match text {
            Some("included") => Self::Included,
            Some("required") => Self::Required,
            _ => Self::Excluded,
        }
    }

    fn admits(self, is: bool) -> bool {
        match self {
            Self::Excluded => !is,
            Self::Included => true,
            Self::Required => is,
        }
    }
}

impl Requirements {
    pub fn parse(form: &Form) -> Self {
        let range = |key: &str| {
            let bound = |end: &str, default| form.number(&format!("{key}.{end}")).unwrap_or(default);
            (bound("Min", 0), bound("Max", u32::MAX))
        };
        Self {
            vcpus: range("VCpuCount"),
            memory_mib: range("MemoryMiB"),
            allowed: form.values("AllowedInstanceType"),
            excluded: form.values("ExcludedInstanceType"),
            manufacturers: form.values("CpuManufacturer"),
            generations: form.values("InstanceGeneration"),
            burstable: Kind::parse(form.get("BurstablePerformance")),
            bare_metal: Kind::parse(form.get("BareMetal")),
        }
    }

    /// A request that names a manufacturer of ARM processors gets these; every other one gets x86-64.
    fn architecture(&self) -> &'static str {
        if self.manufacturers.iter().any(|name| name == "amazon-web-services") { "arm64" } else { "x86_64" }
    }

    fn met_by(&self, known: &InstanceType, usage: Usage) -> bool {
        let within = |(min, max): (u32, u32), value| (min..=max).contains(&value);
        let listed = |list: &[String], name: &str| list.iter().any(|pattern| glob(pattern, name));
        let generation = if known.current { "current" } else { "previous" };
        within(self.vcpus, known.vcpus)
            && within(self.memory_mib, known.memory_mib)
            && (self.allowed.is_empty() || listed(&self.allowed, &known.name))
            && !listed(&self.excluded, &known.name)
            && (self.manufacturers.is_empty() || listed(&self.manufacturers, &known.manufacturer))
            && (self.generations.is_empty() || listed(&self.generations, generation))
            && self.burstable.admits(known.burstable)
            && self.bare_metal.admits(known.bare_metal)
            && listed(&known.architectures, self.architecture())
            && listed(&known.usages, usage.name())
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
            usages: entry.supported_usage_classes,
        }
    }
}
