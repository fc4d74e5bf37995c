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
    ec2,
    fleet_answer::render,
    fleet_request::{Pool, PoolError, Request, Zones, pools},
    form::Form,
    front::{Failure, Front, Outcome},
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
    /// The answer leaves out where instances are.
    pub older: bool,
    /// Nothing is launched: every override has this error, code and message.
    pub error: Option<(String, String)>,
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

async fn fulfil(front: &Front, form: &Form, Quirks { invisible, limit, older, error }: Quirks) -> Outcome<Answer> {
    let refused = |(code, message): (&str, String)| Failure::refused(code, message);
    let request = Request::parse(form).map_err(refused)?;
    let zones = Zones(ec2::subnets(front).await?);
    request.check(&zones, &front.catalogue).map_err(refused)?;
    let mut templates = Vec::new();
    for config in &request.configs {
        templates.push(Template::find(front, &config.template).await?);
    }
    let defaults: Vec<_> = templates.iter().map(|template| template.instance_type.as_deref()).collect();
    let (pools, mut errors) = pools(&request, &zones, &defaults, &front.catalogue);
    let launches = match (error, limit) {
        (Some((code, message)), _) => {
            let mut pools = pools;
            pools.sort_by(|a, b| a.subnet.cmp(&b.subnet));
            pools.dedup_by(|a, b| a.sent == b.sent);
            let error = |pool| PoolError { pool, code: code.clone(), message: message.clone() };
            errors.extend(pools.into_iter().map(error));
            Vec::new()
        }
        (None, Some(limit)) => {
            let mut own = Capacity::default();
            own.set(limit);
            allocate(&request, pools, &mut own, &mut errors)
        }
        (None, None) => allocate(&request, pools, &mut front.capacity.lock().unwrap(), &mut errors),
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
    Ok(Answer::xml(render(&id, &launched, &errors, &templates, older)))
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
            if granted < remaining && usage == Usage::OnDemand {
                errors.push(no_capacity(pool));
            }
            if granted > 0 {
                chosen.push((pool.clone(), granted));
                remaining -= granted;
            }
        }
        if let (Usage::Spot, 1.., Some(pool)) = (usage, remaining, pools.iter().find(|pool| pool.usage == usage)) {
            errors.push(no_spot_capacity(pool));
        }
        if wanted - remaining >= least {
            *capacity = left;
            launches.extend(chosen);
        }
    }
    launches
}

fn no_capacity(pool: &Pool) -> PoolError {
    let Pool { instance_type, zone, .. } = pool;
    let message = format!(
        "We currently do not have sufficient {instance_type} capacity in the Availability Zone you requested ({zone})."
    );
    PoolError { pool: pool.clone(), code: "InsufficientInstanceCapacity".into(), message }
}

/// One error for all spot pools, which names no type and no zone (runs-on/runs-on issue 251).
fn no_spot_capacity(pool: &Pool) -> PoolError {
    let message =
        "Unable to fulfill capacity due to your request configuration. Please adjust your request and try again.";
    let pool = Pool { instance_type: String::new(), ..pool.clone() };
    PoolError { pool, code: "UnfulfillableCapacity".into(), message: message.into() }
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
