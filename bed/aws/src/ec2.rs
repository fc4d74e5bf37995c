//! The emulated EC2: moto, with the missing behaviour added.

use std::{collections::HashSet, sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use roxmltree::Document;

use crate::{
    call::Answer,
    capacity::Limit,
    describe::{View, page},
    faults::Effect,
    fleet,
    form::Form,
    front::{Failure, Front, Outcome},
    instances::{
        END_OF_CONSOLE, Ending, Instance,
        InstanceState::{Stopped, Terminated},
        LaunchFacts, Shutdown,
    },
    requirements::Requirements,
    template_fields,
    templates::{self, Template},
    xml,
};

/// EC2's limit on user data, before base64.
const USER_DATA_LIMIT: usize = 16 << 10;

/// EC2's bounds for `MaxResults` of `DescribeInstances`.
const PAGE: std::ops::RangeInclusive<usize> = 5..=1000;

/// And of `GetInstanceTypesFromInstanceRequirements`.
const PREVIEW_PAGE: std::ops::RangeInclusive<usize> = 1..=1000;

pub async fn perform(front: &Arc<Front>, action: &str, form: Form, quirk: Option<Effect>) -> Outcome<Answer> {
    let mut quirks = fleet::Quirks::default();
    match quirk {
        Some(Effect::Invisible { ms }) => quirks.invisible = Some(Duration::from_millis(ms)),
        Some(Effect::Short { available, usage }) => quirks.limit = Some(Limit::everywhere(usage, available)),
        Some(Effect::FleetError { code, message }) => quirks.error = Some((code, message)),
        Some(Effect::Older) => quirks.older = true,
        _ => {}
    }
    let invisible = quirks.invisible;
    let text = match action {
        "CreateFleet" => return Ok(fleet::create(front, form, quirks).await),
        "RunInstances" => launch(front, form, invisible).await?.0,
        "DescribeInstances" => describe(front, form).await?,
        "GetConsoleOutput" => console(front, &form)?,
        "TerminateInstances" | "StopInstances" => {
            existing(front, &form.values("InstanceId"))?;
            end(front, form, Ending::user()).await?
        }
        "CreateLaunchTemplate" | "CreateLaunchTemplateVersion" => {
            check_user_data(form.get("LaunchTemplateData.UserData"))?;
            templates::create(front, form, invisible).await?
        }
        "DescribeLaunchTemplateVersions" => template_fields::describe_versions(front, form).await?,
        "DeleteLaunchTemplate" => templates::delete(front, form).await?,
        // moto calls the root device of an image that was registered without one "standard".
        "DescribeImages" => front.moto(&form).await?.replace(">standard</rootDeviceType>", ">ebs</rootDeviceType>"),
        "GetInstanceTypesFromInstanceRequirements" => preview(front, &form)?,
        "CreateTags" | "DeleteTags" => tag(front, form, action == "CreateTags").await?,
        _ => front.moto(&form).await?,
    };
    Ok(Answer::xml(text))
}

/// Terminates an instance for this reason.
pub async fn terminate(front: &Front, id: &str, why: Ending) -> Outcome<()> {
    end(front, Form::action("TerminateInstances").with("InstanceId.1", id), why).await.map(drop)
}

pub async fn stop(front: &Front, id: &str, why: Ending) -> Outcome<()> {
    end(front, Form::action("StopInstances").with("InstanceId.1", id), why).await.map(drop)
}

/// Handles a shutdown from inside the machine, which stops or terminates it as set at launch.
pub async fn shut_down(front: &Front, instance: &Instance) -> Outcome<()> {
    match instance.shutdown {
        Shutdown::Terminate => terminate(front, &instance.id, Ending::instance()).await,
        Shutdown::Stop => stop(front, &instance.id, Ending::instance()).await,
    }
}

/// Every subnet with its zone.
pub async fn subnets(front: &Front) -> Outcome<Vec<(String, String)>> {
    let text = front.moto(&Form::action("DescribeSubnets")).await?;
    let document = Document::parse(&text)?;
    let set = xml::items(document.root_element(), "subnetSet");
    let pair =
        |item| Some((xml::text(item, &["subnetId"])?.to_owned(), xml::text(item, &["availabilityZone"])?.to_owned()));
    Ok(set.into_iter().filter_map(pair).collect())
}

/// The only instance profile.
const PROFILE: &str = "paddock-runner";

/// `RunInstances`, with the template fields that moto ignores; returns moto's response and the ids.
pub async fn launch(front: &Front, mut form: Form, invisible: Option<Duration>) -> Outcome<(String, Vec<String>)> {
    let reference = form.below("LaunchTemplate");
    let template = if reference.is_empty() { Template::default() } else { Template::find(front, &reference).await? };
    let profile = form.get("IamInstanceProfile.Name").or(form.get("IamInstanceProfile.Arn")).map(str::to_owned);
    // IAM is not emulated, so moto would refuse the profile.
    form.remove("IamInstanceProfile");
    let role = profile.or(template.profile).map(|profile| profile.rsplit('/').next().unwrap_or_default().to_owned());
    if let Some(role) = role.as_deref().filter(|role| *role != PROFILE) {
        let message = format!(
            "Value ({role}) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name"
        );
        return Err(Failure::refused("InvalidParameterValue", message));
    }
    let user_data = form.get("UserData").map(str::to_owned).or(template.user_data);
    let shutdown = form.get("InstanceInitiatedShutdownBehavior").map(str::to_owned).or(template.shutdown);
    let mut complete = |key: &str, value: Option<&str>| {
        if let (None, Some(value)) = (form.get(key), value) {
            form = std::mem::take(&mut form).with(key, value);
        }
    };
    complete("ImageId", Some(template.image_id.as_str()).filter(|id| !id.is_empty()));
    complete("InstanceInitiatedShutdownBehavior", shutdown.as_deref());
    template.metadata.iter().for_each(|(key, value)| complete(key, Some(value)));
    if let Some(image) = form.get("ImageId").map(str::to_owned) {
        form.remove("ImageId");
        form = form.with("ImageId", front.parameters.image(&image)?);
    }
    form = template_fields::tag_volumes(template.network.complete(form)?, &template.volume_tags);
    let facts = LaunchFacts {
        shutdown: if shutdown.as_deref() == Some("terminate") { Shutdown::Terminate } else { Shutdown::Stop },
        role,
        user_data: check_user_data(user_data.as_deref())?,
        invisible,
    };
    let text = front.moto(&form).await?;
    let document = Document::parse(&text)?;
    let items = xml::items(document.root_element(), "instancesSet");
    let launched: Vec<_> = items.into_iter().map(|item| Instance::read(item, &facts)).collect();
    let ids = launched.iter().map(|instance| instance.id.clone()).collect();
    launched.into_iter().for_each(|instance| front.instances.launched(instance));
    Ok((text, ids))
}

fn check_user_data(encoded: Option<&str>) -> Outcome<Vec<u8>> {
    let bad = |message: &str| Failure::refused("InvalidParameterValue", message);
    let Some(encoded) = encoded else { return Ok(Vec::new()) };
    let data = STANDARD.decode(encoded).map_err(|_| bad("Invalid BASE64 encoding of user data."))?;
    if data.len() > USER_DATA_LIMIT {
        return Err(bad(&format!("User data is limited to {USER_DATA_LIMIT} bytes")));
    }
    Ok(data)
}

async fn describe(front: &Front, mut form: Form) -> Outcome<String> {
    let ids = form.values("InstanceId");
    let most = form.number("MaxResults").map(|most| most as usize);
    let after = form.get("NextToken").map(str::to_owned);
    if !ids.is_empty() && most.is_some() {
        let message = "The parameter instancesSet cannot be used with the parameter maxResults";
        return Err(Failure::refused("InvalidParameterCombination", message));
    }
    if most.is_some_and(|most| !PAGE.contains(&most)) {
        let message = format!("maxResults must be between {} and {}", PAGE.start(), PAGE.end());
        return Err(Failure::refused("InvalidParameterValue", message));
    }
    existing(front, &ids)?;
    let known = front.instances.list();
    let hidden: HashSet<&str> = known.iter().filter(|one| one.hidden()).map(|one| one.id.as_str()).collect();
    for key in ["InstanceId", "MaxResults", "NextToken"] {
        form.remove(key);
    }
    let text = front.moto(&form.with("MaxResults", "1000000")).await?;
    let view = View {
        shown: &|id| !hidden.contains(id) && (ids.is_empty() || ids.iter().any(|wanted| wanted == id)),
        ending: &|id| known.iter().find(|one| one.id == id)?.ending.clone(),
        after: after.as_deref(),
        most: most.unwrap_or(*PAGE.end()),
    };
    Ok(page(&text, &view)?)
}

/// Refuses a call for instances of which one does not exist, or not for other calls yet. Nothing happens to the others:
/// "If you specify multiple instances and the request fails (for example, because of a single incorrect instance ID),
/// none of the instances are terminated" (TerminateInstances in the API reference).
fn existing(front: &Front, ids: &[String]) -> Outcome<()> {
    let known = front.instances.list();
    let there = |id: &str| known.iter().any(|one| one.id == id && !one.hidden());
    let missing: Vec<_> = ids.iter().map(String::as_str).filter(|id| !there(id)).collect();
    let message = match missing[..] {
        [] => return Ok(()),
        [id] => format!("The instance ID '{id}' does not exist"),
        _ => format!("The instance IDs '{}' do not exist", missing.join(", ")),
    };
    Err(Failure::refused("InvalidInstanceID.NotFound", message))
}

/// The most that EC2 keeps of an instance's output.
const CONSOLE_LIMIT: usize = 64 << 10;

/// What the machine has printed, also after its end. EC2 has it some time later, and only what was printed when the
/// instance changed its state (AWS docs, GetConsoleOutput).
fn console(front: &Front, form: &Form) -> Outcome<String> {
    let id = form.get("InstanceId").unwrap_or_default();
    let Some(instance) = front.instances.get(id) else {
        let message = format!("The instance ID '{id}' does not exist");
        return Err(Failure::refused("InvalidInstanceID.NotFound", message));
    };
    let output = instance.console.and_then(|path| std::fs::read(path).ok()).unwrap_or_default();
    let printed = output.windows(END_OF_CONSOLE.len()).position(|part| part == END_OF_CONSOLE).unwrap_or(output.len());
    let shown = &output[printed.saturating_sub(CONSOLE_LIMIT)..printed];
    let output = xml::element("output", &STANDARD.encode(shown));
    let now = xml::element("timestamp", &jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    Ok(xml::answer("GetConsoleOutput", &(xml::element("instanceId", id) + &now + &output)))
}

async fn end(front: &Front, form: Form, why: Ending) -> Outcome<String> {
    let text = front.moto(&form).await?;
    let state = if form.get("Action") == Some("StopInstances") { Stopped } else { Terminated };
    form.values("InstanceId").iter().for_each(|id| front.instances.ended(id, state, why.clone()));
    Ok(text)
}

/// The types that a fleet could launch, capacity and prices aside.
fn preview(front: &Front, form: &Form) -> Outcome<String> {
    let requirements = Requirements::parse(&form.below("InstanceRequirements"))
        .map_err(|(code, message)| Failure::refused(code, message))?
        .for_architectures(form.values("ArchitectureType"));
    let most = form.number("MaxResults").map_or(*PREVIEW_PAGE.end(), |most| most as usize);
    if !PREVIEW_PAGE.contains(&most) {
        let message = format!("maxResults must be between {} and {}", PREVIEW_PAGE.start(), PREVIEW_PAGE.end());
        return Err(Failure::refused("InvalidParameterValue", message));
    }
    // Other types have other virtualization; those in the catalogue all have this one.
    let hvm = form.values("VirtualizationType").iter().any(|kind| kind == "hvm");
    let all: Vec<_> = front.catalogue.with_attributes(&requirements).filter(|_| hvm).collect();
    let after = form.get("NextToken");
    let start = after.and_then(|last| all.iter().position(|known| known.name == last)).map_or(0, |at| at + 1);
    let end = all.len().min(start + most);
    let item = |name: &str| format!("<item>{}</item>", xml::element("instanceType", name));
    let items: String = all[start..end].iter().map(|known| item(&known.name)).collect();
    let last = all[start..end].last().filter(|_| end < all.len());
    let token = last.map(|known| xml::element("nextToken", &known.name)).unwrap_or_default();
    let set = format!("<instanceTypeSet>{items}</instanceTypeSet>{token}");
    Ok(xml::answer("GetInstanceTypesFromInstanceRequirements", &set))
}

/// Keeps the tags in the metadata service up to date.
async fn tag(front: &Front, form: Form, create: bool) -> Outcome<String> {
    let instances: Vec<_> = form.values("ResourceId").into_iter().filter(|id| id.starts_with("i-")).collect();
    existing(front, &instances)?;
    let text = front.moto(&form).await?;
    let tags = form.items("Tag");
    for id in form.values("ResourceId") {
        front.instances.update(&id, |instance| {
            for (key, value) in tags.iter().filter_map(Form::tag) {
                if create {
                    instance.tags.insert(key, value);
                } else {
                    instance.tags.remove(&key);
                }
            }
        });
    }
    Ok(text)
}
