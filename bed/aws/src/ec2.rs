//! The emulated EC2: moto, with the missing behaviour added.

use std::{collections::HashSet, sync::Arc, time::Duration};

use anyhow::Context;
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
    instances::{Instance, InstanceState, LaunchFacts, Shutdown},
    xml,
};

/// EC2's limit on user data, before base64.
const USER_DATA_LIMIT: usize = 16 << 10;

/// EC2's bounds for `MaxResults` of `DescribeInstances`.
const PAGE: std::ops::RangeInclusive<usize> = 5..=1000;

pub async fn perform(front: &Arc<Front>, action: &str, form: Form, quirk: Option<Effect>) -> Outcome<Answer> {
    let invisible = match quirk {
        Some(Effect::Invisible { ms }) => Some(Duration::from_millis(ms)),
        _ => None,
    };
    let limit = match quirk {
        Some(Effect::Short { available, usage }) => Some(Limit::everywhere(usage, available)),
        _ => None,
    };
    let text = match action {
        "CreateFleet" => return Ok(fleet::create(front, form, fleet::Quirks { invisible, limit }).await),
        "RunInstances" => launch(front, form, invisible).await?.0,
        "DescribeInstances" => describe(front, form).await?,
        "TerminateInstances" => end(front, form, InstanceState::Terminated).await?,
        "StopInstances" => end(front, form, InstanceState::Stopped).await?,
        "DeleteLaunchTemplate" => delete_template(front, form).await?,
        "CreateTags" | "DeleteTags" => tag(front, form, action == "CreateTags").await?,
        _ => {
            check_user_data(form.get("LaunchTemplateData.UserData"))?;
            front.moto(&form).await?
        }
    };
    Ok(Answer::xml(text))
}

/// moto treats an unknown template name as a missing one.
async fn delete_template(front: &Front, form: Form) -> Outcome<String> {
    match (front.moto(&form).await, form.get("LaunchTemplateName")) {
        (Err(Failure::Refused(answer)), Some(name)) if answer.text().contains("MissingParameter") => {
            let message = format!("The specified launch template, with template name {name}, does not exist.");
            Err(Failure::refused("InvalidLaunchTemplateName.NotFoundException", message))
        }
        (outcome, _) => outcome,
    }
}

/// Terminates instances, as their owner or the cloud would.
pub async fn terminate(front: &Front, ids: &[&str]) -> Outcome<()> {
    let form = ids
        .iter()
        .zip(1..)
        .fold(Form::action("TerminateInstances"), |form, (id, index)| form.with(format!("InstanceId.{index}"), *id));
    end(front, form, InstanceState::Terminated).await.map(drop)
}

pub async fn stop(front: &Front, id: &str) -> Outcome<()> {
    let form = Form::action("StopInstances").with("InstanceId.1", id);
    end(front, form, InstanceState::Stopped).await.map(drop)
}

/// Handles a shutdown from inside the machine, which stops or terminates it as set at launch.
pub async fn shut_down(front: &Front, instance: &Instance) -> Outcome<()> {
    match instance.shutdown {
        Shutdown::Terminate => terminate(front, &[&instance.id]).await,
        Shutdown::Stop => stop(front, &instance.id).await,
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

/// A launch template's version, with the fields that moto does not apply by itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Template {
    pub id: String,
    pub version: String,
    pub image_id: String,
    pub instance_type: Option<String>,
    shutdown: Option<String>,
    profile: Option<String>,
    user_data: Option<String>,
    metadata: Vec<(&'static str, String)>,
}

impl Template {
    /// The template that `LaunchTemplateId` or `LaunchTemplateName`, and `Version`, name in a request.
    pub async fn find(front: &Front, reference: &Form) -> Outcome<Self> {
        let mut form = Form::action("DescribeLaunchTemplateVersions")
            .with("LaunchTemplateVersion.1", reference.get("Version").unwrap_or("$Default"));
        for key in ["LaunchTemplateId", "LaunchTemplateName"] {
            if let Some(value) = reference.get(key) {
                form = form.with(key, value);
            }
        }
        let text = front.moto(&form).await?;
        let document = Document::parse(&text)?;
        let versions = xml::items(document.root_element(), "launchTemplateVersionSet");
        let item = *versions.first().context("moto answers no version of the launch template")?;
        let text = |path: &[&str]| xml::text(item, path).map(str::to_owned);
        let data = |path: &[&str]| text(&[&["launchTemplateData"], path].concat());
        let option = |field: &str, key| Some((key, data(&["metadataOptions", field])?));
        let metadata = [
            option("httpTokens", "MetadataOptions.HttpTokens"),
            option("httpPutResponseHopLimit", "MetadataOptions.HttpPutResponseHopLimit"),
            option("instanceMetadataTags", "MetadataOptions.InstanceMetadataTags"),
        ];
        Ok(Self {
            id: text(&["launchTemplateId"]).unwrap_or_default(),
            version: text(&["versionNumber"]).unwrap_or_default(),
            image_id: data(&["imageId"]).unwrap_or_default(),
            instance_type: data(&["instanceType"]),
            shutdown: data(&["instanceInitiatedShutdownBehavior"]),
            profile: data(&["iamInstanceProfile", "name"]).or_else(|| data(&["iamInstanceProfile", "arn"])),
            user_data: data(&["userData"]),
            metadata: metadata.into_iter().flatten().collect(),
        })
    }
}

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
    let known = front.instances.list();
    let hidden: HashSet<&str> = known.iter().filter(|one| one.hidden()).map(|one| one.id.as_str()).collect();
    let visible = |id: &str| !hidden.contains(id) && known.iter().any(|one| one.id == id);
    let missing: Vec<_> = ids.iter().map(String::as_str).filter(|id| !visible(id)).collect();
    if !missing.is_empty() {
        let message = match missing[..] {
            [id] => format!("The instance ID '{id}' does not exist"),
            _ => format!("The instance IDs '{}' do not exist", missing.join(", ")),
        };
        return Err(Failure::refused("InvalidInstanceID.NotFound", message));
    }
    for key in ["InstanceId", "MaxResults", "NextToken"] {
        form.remove(key);
    }
    let text = front.moto(&form.with("MaxResults", "1000000")).await?;
    let view = View {
        shown: &|id| !hidden.contains(id) && (ids.is_empty() || ids.iter().any(|wanted| wanted == id)),
        reclaimed: &|id| known.iter().any(|one| one.id == id && one.reclaimed()),
        after: after.as_deref(),
        most: most.unwrap_or(*PAGE.end()),
    };
    Ok(page(&text, &view)?)
}

async fn end(front: &Front, form: Form, state: InstanceState) -> Outcome<String> {
    let text = front.moto(&form).await?;
    form.values("InstanceId").iter().for_each(|id| front.instances.ended(id, state));
    Ok(text)
}

/// Keeps the tags in the metadata service up to date.
async fn tag(front: &Front, form: Form, create: bool) -> Outcome<String> {
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
