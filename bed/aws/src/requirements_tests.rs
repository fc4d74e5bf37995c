use super::*;
use crate::catalogue::Catalogue;

fn known(name: &str, vcpus: u32, gib: u32) -> InstanceType {
    InstanceType {
        name: name.into(),
        vcpus,
        memory_mib: gib * 1024,
        architectures: vec!["x86_64".into()],
        manufacturer: "intel".into(),
        burstable: name.starts_with('t'),
        bare_metal: name.ends_with("metal"),
        current: !name.starts_with("m4"),
        accelerators: u32::from(name.starts_with('g')),
        local_storage: false,
        usages: vec!["on-demand".into(), "spot".into()],
    }
}

/// The types that requirements leave, cheapest first.
fn left(more: &[(&str, &str)], usage: Usage) -> Vec<String> {
    let types = [
        known("c7i.large", 2, 4),
        known("m7i.large", 2, 8),
        known("r7i.large", 2, 16),
        known("m4.large", 2, 8),
        known("m7i.2xlarge", 8, 32),
        known("t3.large", 2, 8),
        known("c7i.metal", 2, 4),
        known("g6.large", 2, 8),
    ];
    let form = Form::default().with("VCpuCount.Min", "2").with("MemoryMiB.Min", "4096");
    let form = more.iter().fold(form, |form, (key, value)| form.with(*key, *value));
    let requirements = Requirements::parse(&form).unwrap();
    let catalogue = Catalogue::new(types.to_vec());
    catalogue.matching(&requirements, usage).into_iter().map(|known| known.name.clone()).collect()
}

#[test]
fn prices_are_protected_by_default() {
    let (on_demand, spot) = (Usage::OnDemand, Usage::Spot);
    assert_eq!(left(&[], on_demand), ["c7i.large", "m7i.large"], "20 % above c7i.large");
    assert_eq!(left(&[], spot), ["c7i.large", "m7i.large", "m4.large", "r7i.large"], "100 % above c7i.large");
    let all = ["c7i.large", "m7i.large", "m4.large", "r7i.large", "m7i.2xlarge", "g6.large"];
    assert_eq!(left(&[(ON_DEMAND, "999999")], on_demand), all);
    assert_eq!(left(&[(SPOT, "999999")], spot), all);
    assert_eq!(left(&[(SPOT_OF_ON_DEMAND, "999999")], spot), all);
    assert_eq!(left(&[(SPOT_OF_ON_DEMAND, "36")], spot), ["c7i.large"]);
    assert_eq!(left(&[(ON_DEMAND, "0")], on_demand), ["c7i.large"]);
}

#[test]
fn the_cheapest_type_of_all_counts_only_where_no_common_one_fits() {
    let large = [("AllowedInstanceType.1", "m7i.2xlarge"), ("AllowedInstanceType.2", "t3.large")];
    let both = [&large[..], &[("BurstablePerformance", "included")]].concat();
    assert_eq!(left(&both, Usage::OnDemand), ["t3.large", "m7i.2xlarge"], "cheaper ones are never left out");
    let named = [("AllowedInstanceType.1", "m4.*"), ("AllowedInstanceType.2", "g6.*")];
    assert_eq!(left(&named, Usage::OnDemand), ["m4.large", "g6.large"], "g6 is current, m4 is not");
    assert_eq!(left(&named[..1], Usage::OnDemand), ["m4.large"]);
}

#[test]
fn attributes_that_exclude_each_other_are_refused() {
    let refused = |fields: &[(&str, &str)]| {
        let form = fields.iter().fold(Form::default(), |form, (key, value)| form.with(*key, *value));
        Requirements::parse(&form).unwrap_err().0
    };
    assert_eq!(refused(&[(SPOT, "50"), (SPOT_OF_ON_DEMAND, "50")]), "InvalidParameterCombination");
    let lists = [("AllowedInstanceType.1", "m4.*"), ("ExcludedInstanceType.1", "m5.*")];
    assert_eq!(refused(&lists), "InvalidParameterCombination");
    assert_eq!(refused(&[("NetworkBandwidthGbps.Min", "1")]), "UnsupportedOperation");
}
