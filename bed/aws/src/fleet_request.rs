//! A request for a fleet, and the rules that moto does not enforce.

use std::collections::HashSet;

use crate::{
    capacity::Usage,
    catalogue::{Catalogue, InstanceType},
    form::Form,
    requirements::Requirements,
};

/// "Your request contains more than the maximum allowed number of InstanceRequirements (4)": osbuild/osbuild-composer
/// pull request 3946. No page of AWS has the number.
const REQUIREMENTS_MAX: usize = 4;

/// EC2's code and message.
pub type Refusal = (&'static str, String);

/// A parsed fleet request.
pub struct Request {
    pub configs: Vec<Config>,
    /// The target of each usage class, and the minimum.
    pub targets: [(Usage, u32, u32); 2],
    pub tags: Vec<(String, String)>,
}

pub struct Config {
    pub template: Form,
    overrides: Vec<Override>,
}

#[derive(Default)]
pub struct Override {
    subnet: Option<String>,
    zone: Option<String>,
    instance_type: Option<String>,
    requirements: Option<Requirements>,
    sent: Form,
}

/// Every subnet with its zone.
pub struct Zones(pub Vec<(String, String)>);

impl Request {
    pub fn parse(form: &Form) -> Result<Self, Refusal> {
        if form.get("Type") != Some("instant") {
            return Err(("UnsupportedOperation", "The test bed makes fleets of type instant only.".into()));
        }
        let Some(total) = form.number("TargetCapacitySpecification.TotalTargetCapacity") else {
            return Err(("MissingParameter", "The request must contain TotalTargetCapacity.".into()));
        };
        let spot_by_default = form.get("TargetCapacitySpecification.DefaultTargetCapacityType") == Some("spot");
        let named = |usage: &str| form.number(&format!("TargetCapacitySpecification.{usage}TargetCapacity"));
        let least = |usage: &str| form.number(&format!("{usage}Options.MinTargetCapacity")).unwrap_or(0);
        let (mut on_demand, mut spot) = (named("OnDemand").unwrap_or(0), named("Spot").unwrap_or(0));
        let rest = total.saturating_sub(on_demand + spot);
        *if spot_by_default { &mut spot } else { &mut on_demand } += rest;
        let configs: Vec<_> =
            form.items("LaunchTemplateConfigs").iter().map(Config::parse).collect::<Result<_, _>>()?;
        if configs.is_empty() {
            return Err(("MissingParameter", "The request must contain LaunchTemplateConfigs.".into()));
        }
        Ok(Self {
            configs,
            targets: [(Usage::OnDemand, on_demand, least("OnDemand")), (Usage::Spot, spot, least("Spot"))],
            tags: form.tags("instance"),
        })
    }

    /// What EC2 refuses as a whole.
    pub fn check(&self, zones: &Zones, catalogue: &Catalogue) -> Result<(), Refusal> {
        let choices = || self.configs.iter().flat_map(|config| &config.overrides);
        let wanted = choices().filter_map(|choice| choice.requirements.as_ref());
        if wanted.clone().count() > REQUIREMENTS_MAX {
            let message =
                "Your request contains more than the maximum allowed number of InstanceRequirements (4)".to_owned();
            return Err(("InvalidParameterValue", message));
        }
        let usages = || self.targets.iter().filter(|(_, wanted, _)| *wanted > 0).map(|(usage, ..)| *usage);
        let left =
            |requirements: &Requirements| usages().any(|usage| !catalogue.matching(requirements, usage).is_empty());
        if wanted.clone().next().is_some() && !wanted.clone().any(left) {
            // runs-on/runs-on issue 464.
            let message = "We couldn't find any instance pools that match your instance requirements. Change your \
                           instance requirements, and try again.";
            return Err(("InvalidParameterValue", message.to_owned()));
        }
        let places: Vec<_> = choices().filter_map(|choice| Some((choice, choice.place(zones)?))).collect();
        for (at, (choice, (subnet, zone))) in places.iter().enumerate() {
            for (other, (other_subnet, _)) in places[..at].iter().filter(|(_, (_, other))| other == zone) {
                choice.differs(other, subnet == other_subnet, catalogue)?;
            }
        }
        Ok(())
    }
}

impl Config {
    fn parse(form: &Form) -> Result<Self, Refusal> {
        let overrides = form.items("Overrides").iter().map(Override::parse).collect::<Result<Vec<_>, _>>();
        let mut overrides = overrides?;
        if overrides.is_empty() {
            overrides.push(Override::default());
        }
        Ok(Self { template: form.below("LaunchTemplateSpecification"), overrides })
    }
}

impl Override {
    fn parse(form: &Form) -> Result<Self, Refusal> {
        let requirements = form.below("InstanceRequirements");
        let text = |key| form.get(key).map(str::to_owned);
        if form.get("InstanceType").is_some() && !requirements.is_empty() {
            let message = "If you specify InstanceRequirements, you can't specify InstanceType.".to_owned();
            return Err(("InvalidParameterCombination", message));
        }
        Ok(Self {
            sent: form.clone(),
            subnet: text("SubnetId"),
            zone: text("AvailabilityZone"),
            instance_type: text("InstanceType"),
            requirements: (!requirements.is_empty()).then(|| Requirements::parse(&requirements)).transpose()?,
        })
    }
}

/// One instance type in one subnet, under one usage class.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    pub config: usize,
    pub subnet: String,
    pub zone: String,
    pub instance_type: String,
    pub usage: Usage,
    /// The override as it was sent, which answers repeat.
    pub sent: Form,
}

#[derive(Debug, PartialEq)]
pub struct PoolError {
    pub pool: Pool,
    pub code: String,
    pub message: String,
}

/// The capacity pools a request may use, cheapest first and then in the request's order.
pub fn pools(
    request: &Request,
    zones: &Zones,
    defaults: &[Option<&str>],
    catalogue: &Catalogue,
) -> (Vec<Pool>, Vec<PoolError>) {
    let (mut found, mut errors) = (Vec::new(), Vec::new());
    for (usage, _, _) in request.targets.iter().filter(|(_, wanted, _)| *wanted > 0) {
        for (index, (config, default)) in request.configs.iter().zip(defaults).enumerate() {
            for choice in &config.overrides {
                let pool = Pool {
                    config: index,
                    subnet: choice.subnet.clone().unwrap_or_default(),
                    zone: String::new(),
                    instance_type: choice.instance_type.as_deref().or(*default).unwrap_or_default().to_owned(),
                    usage: *usage,
                    sent: choice.sent.clone(),
                };
                match choice.open(pool, zones, catalogue) {
                    Ok(pools) => found.extend(pools),
                    Err(error) => errors.push(*error),
                }
            }
        }
    }
    found.sort_by_cached_key(|(known, pool)| (known.price(pool.usage), known.name.clone()));
    (found.into_iter().map(|(_, pool)| pool).collect(), errors)
}

impl Override {
    /// "An EC2 Fleet request can't span different subnets from the same Availability Zone" (EC2 user guide, CreateFleet);
    /// neither may one pool of a zone and a type be there twice. Code and message: github-aws-runners/
    /// terraform-aws-github-runner issue 5297, aws/aws-parallelcluster pull request 4352, runs-on/runs-on issue 476.
    fn differs(&self, other: &Self, same_subnet: bool, catalogue: &Catalogue) -> Result<(), Refusal> {
        let duplicate = match (&self.requirements, &other.requirements) {
            _ if !same_subnet => true,
            (Some(one), Some(other)) => {
                let types: HashSet<_> = catalogue.with_attributes(one).map(|known| &known.name).collect();
                if catalogue.with_attributes(other).any(|known| types.contains(&known.name)) {
                    let message = "Two or more of your InstanceRequirements structures include overlapping values. \
                                   Ensure that there is no overlap, and try again.";
                    return Err(("InvalidParameterValue", message.to_owned()));
                }
                false
            }
            (None, None) => self.instance_type == other.instance_type,
            _ => false,
        };
        match duplicate {
            true => {
                Err(("InvalidFleetConfig", "The fleet configuration contains duplicate instance pools.".to_owned()))
            }
            false => Ok(()),
        }
    }

    /// Where it launches: the subnet and its zone.
    fn place<'a>(&self, zones: &'a Zones) -> Option<(&'a str, &'a str)> {
        let fits = |(id, zone): &&(String, String)| match (&self.subnet, &self.zone) {
            (Some(wanted), _) => wanted == id,
            (None, wanted) => wanted.as_ref().is_none_or(|wanted| wanted == zone),
        };
        zones.0.iter().find(fits).map(|(subnet, zone)| (subnet.as_str(), zone.as_str()))
    }

    /// The pools of this override: its subnet, with each allowed type.
    fn open<'a>(
        &self,
        mut pool: Pool,
        zones: &Zones,
        catalogue: &'a Catalogue,
    ) -> Result<Vec<(&'a InstanceType, Pool)>, Box<PoolError>> {
        let Some((subnet, zone)) = self.place(zones) else {
            let message = format!("The subnet ID '{}' does not exist", pool.subnet);
            return Err(Box::new(PoolError { pool, code: "InvalidSubnetID.NotFound".into(), message }));
        };
        (pool.subnet, pool.zone) = (subnet.to_owned(), zone.to_owned());
        let types: Vec<_> = match &self.requirements {
            Some(requirements) => catalogue.matching(requirements, pool.usage),
            None => catalogue.get(&pool.instance_type).into_iter().collect(),
        };
        let each = |kind: &'a InstanceType| (kind, Pool { instance_type: kind.name.clone(), ..pool.clone() });
        Ok(types.into_iter().map(each).collect())
    }
}
