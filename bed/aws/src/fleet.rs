//! `CreateFleet`, which moto implements only partially. Adds instance requirements, limited capacity, partial results
//! and idempotent client tokens.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use roxmltree::Document;

use crate::{
    call::{Answer, Service},
    capacity::{Capacity, Limit, Usage},
    catalogue::{Catalogue, InstanceType},
    ec2,
    form::Form,
    front::{Failure, Front, Outcome},
    requirements::Requirements,
    templates::Template,
    xml,
};

/// A request and its response, which is repeated for retries.
type Made = (Form, Shared<BoxFuture<'static, Answer>>);

/// The fleets by client token.
#[derive(Default)]
pub struct Fleets(Mutex<HashMap<String, Made>>);

/// What is special about one fleet.
#[derive(Clone, Default)]
pub struct Quirks {
    pub invisible: Option<Duration>,
    /// Counts in place of the limits for all fleets.
    pub limit: Option<Limit>,
}

/// Answers a request. A repeated client token gets the first response again.
pub async fn create(front: &Arc<Front>, mut form: Form, quirks: Quirks) -> Answer {
    let token = form.get("ClientToken").map(str::to_owned);
    form.remove("ClientToken");
    let Some(token) = token else { return fulfil(front, &form, quirks).await.unwrap_or_else(Failure::into_answer) };
    let answer = {
        let mut fleets = front.fleets.0.lock().unwrap();
        match fleets.get(&token) {
            Some((request, answer)) if *request == form => answer.clone(),
            Some(_) => {
                let message = "The client token was used before, with other parameters.";
                return Answer::error(Service::Ec2, "IdempotentParameterMismatch", message, None);
            }
            None => {
                let (front, request) = (front.clone(), form.clone());
                let work = async move { fulfil(&front, &request, quirks).await.unwrap_or_else(Failure::into_answer) };
                let answer = work.boxed().shared();
                fleets.insert(token.clone(), (form, answer.clone()));
                answer
            }
        }
    };
    let answer = answer.await;
    if !answer.ok() {
        front.fleets.0.lock().unwrap().remove(&token);
    }
    answer
}

async fn fulfil(front: &Front, form: &Form, Quirks { invisible, limit }: Quirks) -> Outcome<Answer> {
    let request = Request::parse(form).map_err(|(code, message)| Failure::refused(code, message))?;
    let subnets = ec2::subnets(front).await?;
    let mut templates = Vec::new();
    for config in &request.configs {
        templates.push(Template::find(front, &config.template).await?);
    }
    let defaults: Vec<_> = templates.iter().map(|template| template.instance_type.as_deref()).collect();
    let (pools, mut errors) = pools(&request, &subnets, &defaults, &front.catalogue);
    let launches = match limit {
        Some(limit) => {
            let mut own = Capacity::default();
            own.set(limit);
            allocate(&request, pools, &mut own, &mut errors)
        }
        None => allocate(&request, pools, &mut front.capacity.lock().unwrap(), &mut errors),
    };

    let id = fleet_id();
    let mut launched = Vec::new();
    for (pool, count) in launches {
        let run = run_instances(&id, &request, &pool, &templates[pool.config], count);
        match ec2::launch(front, run, invisible).await {
            Ok((_, ids)) => launched.push((pool, ids)),
            Err(Failure::Refused(answer)) => errors.push(refusal(pool, &answer)),
            Err(broken) => return Err(broken),
        }
    }
    Ok(Answer::xml(render(&id, &launched, &errors, &templates)))
}

/// EC2's code and message.
type Refusal = (&'static str, String);

/// A parsed fleet request.
struct Request {
    configs: Vec<Config>,
    /// The target of each usage class, and the minimum.
    targets: [(Usage, u32, u32); 2],
    tags: Vec<(String, String)>,
}

struct Config {
    template: Form,
    overrides: Vec<Override>,
}

#[derive(Default)]
struct Override {
    subnet: Option<String>,
    zone: Option<String>,
    instance_type: Option<String>,
    requirements: Option<Requirements>,
}

impl Request {
    fn parse(form: &Form) -> Result<Self, Refusal> {
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
        Ok(Self {
            subnet: text("SubnetId"),
            zone: text("AvailabilityZone"),
            instance_type: text("InstanceType"),
            requirements: (!requirements.is_empty()).then(|| Requirements::parse(&requirements)).transpose()?,
        })
    }
}

/// One instance type in one subnet, under one usage class.
#[derive(Clone, Debug, PartialEq)]
struct Pool {
    config: usize,
    subnet: String,
    zone: String,
    instance_type: String,
    usage: Usage,
}

#[derive(Debug, PartialEq)]
struct PoolError {
    pool: Pool,
    code: String,
    message: String,
}

/// The capacity pools a request may use, cheapest first and then in the request's order.
fn pools(
    request: &Request,
    subnets: &[(String, String)],
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
                };
                match choice.open(pool, subnets, catalogue) {
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
    /// The pools of this override: its subnet, with each allowed type.
    fn open<'a>(
        &self,
        mut pool: Pool,
        subnets: &[(String, String)],
        catalogue: &'a Catalogue,
    ) -> Result<Vec<(&'a InstanceType, Pool)>, Box<PoolError>> {
        let fits = |(id, zone): &&(String, String)| match (&self.subnet, &self.zone) {
            (Some(wanted), _) => wanted == id,
            (None, wanted) => wanted.as_ref().is_none_or(|wanted| wanted == zone),
        };
        let Some((subnet, zone)) = subnets.iter().find(fits) else {
            let message = format!("The subnet ID '{}' does not exist", pool.subnet);
            return Err(Box::new(PoolError { pool, code: "InvalidSubnetID.NotFound".into(), message }));
        };
        (pool.subnet, pool.zone) = (subnet.clone(), zone.clone());
        let types: Vec<_> = match &self.requirements {
            Some(requirements) => catalogue.matching(requirements, pool.usage),
            None => catalogue.get(&pool.instance_type).into_iter().collect(),
        };
        if types.is_empty() {
            let message =
                "Unable to fulfill capacity due to your request configuration: no instance type matches.".into();
            return Err(Box::new(PoolError { pool, code: "UnfulfillableCapacity".into(), message }));
        }
        let each = |kind: &'a InstanceType| (kind, Pool { instance_type: kind.name.clone(), ..pool.clone() });
        Ok(types.into_iter().map(each).collect())
    }
}

/// Fills the targets from the pools as far as capacity allows. Each pool that falls short adds an error.
fn allocate(
    request: &Request,
    pools: Vec<Pool>,
    capacity: &mut Capacity,
    errors: &mut Vec<PoolError>,
) -> Vec<(Pool, u32)> {
    let mut launches = Vec::new();
    for (usage, wanted, least) in request.targets {
        let (mut left, mut remaining, mut chosen) = (capacity.clone(), wanted, Vec::new());
        for pool in pools.iter().filter(|pool| pool.usage == usage) {
            if remaining == 0 {
                break;
            }
            let granted = left.take(&pool.zone, &pool.instance_type, usage, remaining);
            if granted < remaining {
                errors.push(no_capacity(pool));
            }
            if granted > 0 {
                chosen.push((pool.clone(), granted));
                remaining -= granted;
            }
        }
        if wanted - remaining >= least {
            *capacity = left;
            launches.extend(chosen);
        }
    }
    launches
}

fn no_capacity(pool: &Pool) -> PoolError {
    let Pool { instance_type, zone, usage, .. } = pool;
    let message = match usage {
        Usage::Spot => "There is no Spot capacity available that matches your request.".to_owned(),
        Usage::OnDemand => format!(
            "We currently do not have sufficient {instance_type} capacity in the Availability Zone you requested ({zone})."
        ),
    };
    PoolError { pool: pool.clone(), code: "InsufficientInstanceCapacity".into(), message }
}

/// A launch that moto refused.
fn refusal(pool: Pool, answer: &Answer) -> PoolError {
    let text = answer.text();
    let document = Document::parse(&text).ok();
    let find =
        |name| document.as_ref().and_then(|xml| xml::find(xml, name)?.text()).unwrap_or("InternalError").to_owned();
    PoolError { pool, code: find("Code"), message: find("Message") }
}

fn run_instances(fleet: &str, request: &Request, pool: &Pool, template: &Template, count: u32) -> Form {
    let count = count.to_string();
    let mut form = Form::action("RunInstances")
        .with("MinCount", &count)
        .with("MaxCount", &count)
        .with("LaunchTemplate.LaunchTemplateId", &template.id)
        .with("LaunchTemplate.Version", &template.version)
        .with("InstanceType", &pool.instance_type)
        .with("SubnetId", &pool.subnet);
    if pool.usage == Usage::Spot {
        form = form.with("InstanceMarketOptions.MarketType", "spot");
    }
    let own = [("aws:ec2:fleet-id".to_owned(), fleet.to_owned())];
    form = form.with("TagSpecification.1.ResourceType", "instance");
    for ((key, value), index) in own.iter().chain(&request.tags).zip(1..) {
        let tag = format!("TagSpecification.1.Tag.{index}");
        form = form.with(format!("{tag}.Key"), key).with(format!("{tag}.Value"), value);
    }
    form
}

fn fleet_id() -> String {
    let (a, b) = (rand::random::<u64>(), rand::random::<u64>());
    format!(
        "fleet-{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        a >> 32,
        a >> 16 & 0xffff,
        a & 0xffff,
        b >> 48,
        b & 0xffff_ffff_ffff
    )
}

fn render(fleet: &str, launched: &[(Pool, Vec<String>)], errors: &[PoolError], templates: &[Template]) -> String {
    let origin = |pool: &Pool| {
        let template = &templates[pool.config];
        let specification =
            xml::element("launchTemplateId", &template.id) + &xml::element("version", &template.version);
        let choice = xml::element("instanceType", &pool.instance_type)
            + &xml::element("subnetId", &pool.subnet)
            + &xml::element("availabilityZone", &pool.zone);
        format!(
            "<launchTemplateAndOverrides><launchTemplateSpecification>{specification}</launchTemplateSpecification>\
             <overrides>{choice}</overrides></launchTemplateAndOverrides>{}",
            xml::element("lifecycle", pool.usage.name())
        )
    };
    let instances: String = launched
        .iter()
        .map(|(pool, ids)| {
            let ids: String = ids.iter().map(|id| xml::element("item", id)).collect();
            let kind = xml::element("instanceType", &pool.instance_type);
            format!("<item>{}<instanceIds>{ids}</instanceIds>{kind}</item>", origin(pool))
        })
        .collect();
    let errors: String = errors
        .iter()
        .map(|error| {
            let what = xml::element("errorCode", &error.code) + &xml::element("errorMessage", &error.message);
            format!("<item>{}{what}</item>", origin(&error.pool))
        })
        .collect();
    format!(
        "{}<CreateFleetResponse xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\"><requestId>bed</requestId>{}\
         <errorSet>{errors}</errorSet><fleetInstanceSet>{instances}</fleetInstanceSet></CreateFleetResponse>",
        xml::PROLOG,
        xml::element("fleetId", fleet),
    )
}
