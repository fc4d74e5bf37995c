//! The answer to a request for a fleet.

use crate::{
    fleet_request::{Pool, PoolError},
    form::Form,
    templates::Template,
    xml,
};

/// What of an override is repeated: its key, and its element in the answer. `LaunchTemplateAndOverrides` is the request's
/// override with the chosen type; it has a zone only if the request had one (aws/karpenter-provider-aws asks for both
/// subnet and zone, "redundant, but useful if we have to parse insufficient capacity errors by using the zone").
const REPEATED: [(&str, &str); 3] =
    [("SubnetId", "subnetId"), ("AvailabilityZone", "availabilityZone"), ("MaxPrice", "maxPrice")];

pub fn render(
    fleet: &str,
    launched: &[(Pool, Vec<String>)],
    errors: &[PoolError],
    templates: &[Template],
    older: bool,
) -> String {
    let instances: String = launched
        .iter()
        .map(|(pool, ids)| {
            let ids: String = ids.iter().map(|id| xml::element("item", id)).collect();
            let kind = xml::element("instanceType", &pool.instance_type);
            let place = if older { String::new() } else { place(pool) };
            format!("<item>{}<instanceIds>{ids}</instanceIds>{kind}{place}</item>", origin(pool, templates))
        })
        .collect();
    let errors: String = errors
        .iter()
        .map(|error| {
            let what = xml::element("errorCode", &error.code) + &xml::element("errorMessage", &error.message);
            format!("<item>{}{what}</item>", origin(&error.pool, templates))
        })
        .collect();
    let sets = format!("<errorSet>{errors}</errorSet><fleetInstanceSet>{instances}</fleetInstanceSet>");
    xml::answer("CreateFleet", &(xml::element("fleetId", fleet) + &sets))
}

/// Where instances are, which older answers leave out.
fn place(pool: &Pool) -> String {
    xml::element("availabilityZone", &pool.zone) + &xml::element("subnetId", &pool.subnet)
}

fn origin(pool: &Pool, templates: &[Template]) -> String {
    let template = &templates[pool.config];
    let specification = xml::element("launchTemplateId", &template.id) + &xml::element("version", &template.version);
    let kind = Some(&pool.instance_type).filter(|kind| !kind.is_empty());
    let mut choice = kind.map(|kind| xml::element("instanceType", kind)).unwrap_or_default();
    for (key, element) in REPEATED {
        choice += &pool.sent.get(key).map(|value| xml::element(element, value)).unwrap_or_default();
    }
    choice += &requirements(&pool.sent.below("InstanceRequirements"));
    format!(
        "<launchTemplateAndOverrides><launchTemplateSpecification>{specification}</launchTemplateSpecification>\
         <overrides>{choice}</overrides></launchTemplateAndOverrides>{}",
        xml::element("lifecycle", pool.usage.name())
    )
}

fn requirements(sent: &Form) -> String {
    let range = |key: &str, element: &str| {
        let bound = |end: &str, element: &str| {
            sent.get(&format!("{key}.{end}")).map(|value| xml::element(element, value)).unwrap_or_default()
        };
        let bounds = bound("Min", "min") + &bound("Max", "max");
        if bounds.is_empty() { bounds } else { format!("<{element}>{bounds}</{element}>") }
    };
    let list = |key: &str, element: &str| {
        let items: String = sent.values(key).iter().map(|value| xml::element("item", value)).collect();
        if items.is_empty() { items } else { format!("<{element}>{items}</{element}>") }
    };
    let content = range("VCpuCount", "vCpuCount")
        + &range("MemoryMiB", "memoryMiB")
        + &list("AllowedInstanceType", "allowedInstanceTypeSet")
        + &list("ExcludedInstanceType", "excludedInstanceTypeSet");
    if content.is_empty() { content } else { format!("<instanceRequirements>{content}</instanceRequirements>") }
}
