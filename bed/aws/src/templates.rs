//! Launch templates: what moto does not apply of them, and that new ones become visible only after a while.

use std::{
    collections::HashMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use anyhow::Context;
use roxmltree::Document;

use crate::{
    form::Form,
    front::{Failure, Front, Outcome},
    template_fields::{Network, volume_tags},
    xml,
};

/// The versions that other calls do not see yet, by template and number.
#[derive(Default)]
pub struct Hidden(Mutex<HashMap<(String, u32), Instant>>);

impl Hidden {
    fn has(&self, template: &str, version: u32) -> bool {
        let until = self.0.lock().unwrap().get(&(template.to_owned(), version)).copied();
        until.is_some_and(|until| Instant::now() < until)
    }
}

/// The names of a template in requests.
const NAMES: [&str; 2] = ["LaunchTemplateId", "LaunchTemplateName"];

/// A launch template's version, with the fields that moto does not apply by itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Template {
    pub id: String,
    pub version: String,
    pub image_id: String,
    pub instance_type: Option<String>,
    pub shutdown: Option<String>,
    pub profile: Option<String>,
    pub user_data: Option<String>,
    pub metadata: Vec<(&'static str, String)>,
    pub network: Network,
    pub volume_tags: Vec<(String, String)>,
}

impl Template {
    /// The template that `LaunchTemplateId` or `LaunchTemplateName`, and `Version`, name in a request.
    pub async fn find(front: &Front, reference: &Form) -> Outcome<Self> {
        let mut form = Form::action("DescribeLaunchTemplateVersions")
            .with("LaunchTemplateVersion.1", reference.get("Version").unwrap_or("$Default"));
        for key in NAMES {
            if let Some(value) = reference.get(key) {
                form = form.with(key, value);
            }
        }
        let text = versions(front, form).await?;
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
            network: xml::child(item, "launchTemplateData").map(Network::read).unwrap_or_default(),
            volume_tags: xml::child(item, "launchTemplateData").map(volume_tags).unwrap_or_default(),
        })
    }
}

/// `CreateLaunchTemplate` and `CreateLaunchTemplateVersion`: the new version may stay invisible for a while.
pub async fn create(front: &Front, form: Form, invisible: Option<Duration>) -> Outcome<String> {
    if form.get("Action") == Some("CreateLaunchTemplateVersion") {
        visible(front, &form).await?;
    }
    let text = front.moto(&form).await?;
    let document = Document::parse(&text)?;
    let made = |field: &str| xml::find(&document, field).and_then(|node| node.text());
    if let (Some(time), Some(id)) = (invisible, made("launchTemplateId")) {
        let version = made("versionNumber").and_then(|number| number.parse().ok()).unwrap_or(1);
        front.templates.0.lock().unwrap().insert((id.to_owned(), version), Instant::now() + time);
    }
    Ok(text)
}

/// moto treats an unknown template name as a missing one.
pub async fn delete(front: &Front, form: Form) -> Outcome<String> {
    visible(front, &form).await?;
    front.moto(&form).await
}

/// `DescribeLaunchTemplateVersions` without what is invisible.
pub async fn versions(front: &Front, form: Form) -> Outcome<String> {
    if front.templates.0.lock().unwrap().is_empty() {
        return front.moto(&form).await;
    }
    let latest = visible(front, &form).await?;
    let mut chosen = form.clone();
    for (index, wanted) in form.values("LaunchTemplateVersion").iter().enumerate() {
        let key = format!("LaunchTemplateVersion.{}", index + 1);
        let hidden = |latest: &Latest| {
            wanted.parse().is_ok_and(|number| front.templates.has(&latest.id, number) || number > latest.version)
        };
        match &latest {
            Some(latest) if wanted == "$Latest" => {
                chosen.remove(&key);
                chosen = chosen.with(key, latest.version.to_string());
            }
            Some(latest) if hidden(latest) => {
                let message = format!(
                    "Could not find the specified version {wanted} for the launch template with ID {}.",
                    latest.id
                );
                return Err(Failure::refused("InvalidLaunchTemplateId.VersionNotFound", message));
            }
            _ => {}
        }
    }
    front.moto(&chosen).await
}

/// The newest version of a template that a request may see.
struct Latest {
    id: String,
    version: u32,
}

/// Refuses a request for a template that is not there or not visible yet. None if the request names no template.
async fn visible(front: &Front, form: &Form) -> Outcome<Option<Latest>> {
    let Some((key, wanted)) = NAMES.iter().find_map(|key| Some((*key, form.get(key)?))) else { return Ok(None) };
    let ask = Form::action("DescribeLaunchTemplateVersions").with(key, wanted);
    let text = front.moto(&ask.with("LaunchTemplateVersion.1", "$Latest")).await?;
    let document = Document::parse(&text)?;
    let value = |name: &str| xml::find(&document, name).and_then(|node| node.text());
    let id = value("launchTemplateId").context("a version of no launch template")?.to_owned();
    let newest: u32 = value("versionNumber").context("a version without number")?.parse()?;
    match (1..=newest).rev().find(|version| !front.templates.has(&id, *version)) {
        Some(version) => Ok(Some(Latest { id, version })),
        None => Err(not_found(key, wanted)),
    }
}

fn not_found(key: &str, wanted: &str) -> Failure {
    if key == NAMES[0] {
        let message = format!("The specified launch template, with template ID {wanted}, does not exist.");
        return Failure::refused("InvalidLaunchTemplateId.NotFound", message);
    }
    let message = format!("The specified launch template, with template name {wanted}, does not exist.");
    Failure::refused("InvalidLaunchTemplateName.NotFoundException", message)
}
