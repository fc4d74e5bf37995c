//! `InstanceRequirements` of a fleet: attributes instead of a type. Source: `InstanceRequirementsRequest` in the EC2 API
//! reference, which is also the documentation in botocore's `ec2/2016-11-15/service-2.json`.

use crate::{
    capacity::{Usage, glob},
    catalogue::InstanceType,
    form::Form,
};

/// How much more than the cheapest type another may cost, in per cent, where a request does not say.
const ON_DEMAND_PROTECTION: u64 = 20;
const SPOT_PROTECTION: u64 = 100;

/// What a request may ask for here. Anything else would be ignored without a word.
const KNOWN: [&str; 14] = [
    "VCpuCount",
    "MemoryMiB",
    "MemoryGiBPerVCpu",
    "AllowedInstanceType",
    "ExcludedInstanceType",
    "CpuManufacturer",
    "InstanceGeneration",
    "BurstablePerformance",
    "BareMetal",
    "LocalStorage",
    "AcceleratorCount",
    ON_DEMAND,
    SPOT,
    SPOT_OF_ON_DEMAND,
];
const ON_DEMAND: &str = "OnDemandMaxPricePercentageOverLowestPrice";
const SPOT: &str = "SpotMaxPricePercentageOverLowestPrice";
const SPOT_OF_ON_DEMAND: &str = "MaxSpotPriceAsPercentageOfOptimalOnDemandPrice";

#[derive(Clone, Debug, PartialEq)]
pub struct Requirements {
    vcpus: (u32, u32),
    memory_mib: (u32, u32),
    gib_per_vcpu: (f64, f64),
    accelerators: (u32, u32),
    allowed: Vec<String>,
    excluded: Vec<String>,
    manufacturers: Vec<String>,
    generations: Vec<String>,
    /// Any of them, or what the image has.
    architectures: Vec<String>,
    burstable: Kind,
    bare_metal: Kind,
    local_storage: Kind,
    on_demand_protection: Option<u32>,
    spot_protection: Option<u32>,
    spot_of_on_demand: Option<u32>,
    /// As sent, for answers that repeat them.
    pub form: Form,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Excluded,
    Included,
    Required,
}

impl Kind {
    fn parse(text: Option<&str>, default: Self) -> Self {
        match text {
            Some("excluded") => Self::Excluded,
            Some("included") => Self::Included,
            Some("required") => Self::Required,
            _ => default,
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
    /// The error is EC2's code and message.
    pub fn parse(form: &Form) -> Result<Self, (&'static str, String)> {
        if let Some((key, _)) =
            form.fields().find(|(key, _)| !KNOWN.iter().any(|known| key.split('.').next() == Some(known)))
        {
            return Err(("UnsupportedOperation", format!("The test bed does not know the requirement {key}.")));
        }
        let both = |one: &str, other: &str| {
            let message = format!("Only one of {one} or {other} can be specified.");
            let given = |name: &str| form.fields().any(|(key, _)| key.split('.').next() == Some(name));
            if given(one) && given(other) { Err(("InvalidParameterCombination", message)) } else { Ok(()) }
        };
        both(SPOT, SPOT_OF_ON_DEMAND)?;
        both("AllowedInstanceType", "ExcludedInstanceType")?;
        let range = |key: &str| {
            let bound = |end: &str, default| form.number(&format!("{key}.{end}")).unwrap_or(default);
            (bound("Min", 0), bound("Max", u32::MAX))
        };
        let ratio = |end: &str| form.get(&format!("MemoryGiBPerVCpu.{end}")).and_then(|text| text.parse().ok());
        let manufacturers = form.values("CpuManufacturer");
        // The image decides at EC2. Here a request for Amazon's processors means an image for them.
        let arm = manufacturers.iter().any(|name| name == "amazon-web-services");
        Ok(Self {
            vcpus: range("VCpuCount"),
            memory_mib: range("MemoryMiB"),
            gib_per_vcpu: (ratio("Min").unwrap_or(0.0), ratio("Max").unwrap_or(f64::MAX)),
            accelerators: range("AcceleratorCount"),
            allowed: form.values("AllowedInstanceType"),
            excluded: form.values("ExcludedInstanceType"),
            architectures: vec![if arm { "arm64" } else { "x86_64" }.to_owned()],
            manufacturers,
            generations: form.values("InstanceGeneration"),
            burstable: Kind::parse(form.get("BurstablePerformance"), Kind::Excluded),
            bare_metal: Kind::parse(form.get("BareMetal"), Kind::Excluded),
            local_storage: Kind::parse(form.get("LocalStorage"), Kind::Included),
            on_demand_protection: form.number(ON_DEMAND),
            spot_protection: form.number(SPOT),
            spot_of_on_demand: form.number(SPOT_OF_ON_DEMAND),
            form: form.clone(),
        })
    }

    #[must_use]
    pub fn for_architectures(self, architectures: Vec<String>) -> Self {
        Self { architectures, ..self }
    }

    pub fn met_by(&self, known: &InstanceType) -> bool {
        let within = |(min, max): (u32, u32), value| (min..=max).contains(&value);
        let listed = |list: &[String], name: &str| list.iter().any(|pattern| glob(pattern, name));
        let generation = if known.current { "current" } else { "previous" };
        let (least, most) = self.gib_per_vcpu;
        within(self.vcpus, known.vcpus)
            && within(self.memory_mib, known.memory_mib)
            && within(self.accelerators, known.accelerators)
            && (least..=most).contains(&(f64::from(known.memory_mib) / 1024.0 / f64::from(known.vcpus)))
            && (self.allowed.is_empty() || listed(&self.allowed, &known.name))
            && !listed(&self.excluded, &known.name)
            && (self.manufacturers.is_empty() || listed(&self.manufacturers, &known.manufacturer))
            && (self.generations.is_empty() || listed(&self.generations, generation))
            && self.burstable.admits(known.burstable)
            && self.bare_metal.admits(known.bare_metal)
            && self.local_storage.admits(known.local_storage)
            && self.architectures.iter().any(|architecture| known.architectures.contains(architecture))
    }
}

/// Leaves out types that cost much more than the cheapest: the cheapest current one of C, M or R; if there is none, the
/// cheapest current one; or else the cheapest.
pub fn protected<'a>(types: Vec<&'a InstanceType>, requirements: &Requirements, usage: Usage) -> Vec<&'a InstanceType> {
    let cheapest = |usage: Usage, counts: fn(&InstanceType) -> bool| {
        types.iter().filter(|known| counts(known)).map(|known| known.price(usage)).min()
    };
    let identified = |usage: Usage| {
        cheapest(usage, |known| known.current && known.is_common())
            .or_else(|| cheapest(usage, |known| known.current))
            .or_else(|| cheapest(usage, |_| true))
            .unwrap_or_default()
    };
    let above = |percent: Option<u32>, default: u64| 100 + percent.map_or(default, u64::from);
    let most = match (usage, requirements.spot_of_on_demand) {
        (Usage::OnDemand, _) => identified(usage) * above(requirements.on_demand_protection, ON_DEMAND_PROTECTION),
        (Usage::Spot, Some(percent)) => identified(Usage::OnDemand) * u64::from(percent),
        (Usage::Spot, None) => identified(usage) * above(requirements.spot_protection, SPOT_PROTECTION),
    };
    types.into_iter().filter(|known| known.price(usage) * 100 <= most).collect()
}

#[cfg(test)]
#[path = "requirements_tests.rs"]
mod tests;
