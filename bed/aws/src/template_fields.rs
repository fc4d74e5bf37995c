//! What a launch template may have that moto does not know or apply: an image that is looked up in SSM, a network interface,
//! and tags of volumes. Source: the service model of EC2 (botocore 1.44, `ec2/2016-11-15/service-2.json`).

use std::{collections::BTreeMap, sync::Mutex};

use roxmltree::{Document, Node};

use crate::{
    form::Form,
    front::{Failure, Front, Outcome},
    templates, xml,
};

/// How EC2 marks an image that it looks up in SSM (`RequestLaunchTemplateData.ImageId`).
const PREFIX: &str = "resolve:ssm:";

/// SSM's parameters by name.
#[derive(Default)]
pub struct Parameters(Mutex<BTreeMap<String, String>>);

impl Parameters {
    pub fn set(&self, name: &str, value: &str) {
        self.0.lock().unwrap().insert(name.to_owned(), value.to_owned());
    }

    /// The id of an image, given as such or as a parameter. The code for a missing parameter is in no model: not measured.
    pub fn image(&self, image: &str) -> Outcome<String> {
        let Some(name) = image.strip_prefix(PREFIX) else { return Ok(image.to_owned()) };
        let found = self.0.lock().unwrap().get(name).cloned();
        let message = format!("The Systems Manager parameter {name} does not exist or cannot be read");
        found.ok_or_else(|| Failure::refused("InvalidParameterValue", message))
    }
}

/// `DescribeLaunchTemplateVersions`: with `ResolveAlias`, the answer has the id of the image in place of its parameter.
pub async fn describe_versions(front: &Front, mut form: Form) -> Outcome<String> {
    let resolve = form.get("ResolveAlias") == Some("true");
    form.remove("ResolveAlias");
    let mut text = templates::versions(front, form).await?;
    for image in if resolve { images(&text)? } else { Vec::new() } {
        let id = front.parameters.image(&image)?;
        text = text.replace(&xml::element("imageId", &image), &xml::element("imageId", &id));
    }
    Ok(text)
}

fn images(text: &str) -> Outcome<Vec<String>> {
    let document = Document::parse(text)?;
    let nodes = document.descendants().filter(|node| node.tag_name().name() == "imageId");
    Ok(nodes.filter_map(|node| node.text().map(str::to_owned)).collect())
}

/// The network of a template: either security groups, or an interface that has its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Network {
    groups: bool,
    interface: Option<(Option<String>, Vec<String>)>,
}

impl Network {
    /// Reads `launchTemplateData`.
    pub fn read(data: Node<'_, '_>) -> Self {
        let interfaces = xml::items(data, "networkInterfaceSet");
        let interface = interfaces.first().map(|interface| {
            let groups = xml::items(*interface, "groupSet").into_iter().filter_map(|group| group.text());
            let public = xml::text(*interface, &["associatePublicIpAddress"]);
            (public.map(str::to_owned), groups.map(str::to_owned).collect())
        });
        let groups = ["securityGroupIdSet", "securityGroupSet"];
        Self { groups: groups.iter().any(|name| !xml::items(data, name).is_empty()), interface }
    }

    /// Adds it to a `RunInstances`, whose subnet moves into the interface.
    pub fn complete(&self, mut form: Form) -> Outcome<Form> {
        let Some((public, groups)) = &self.interface else { return Ok(form) };
        if self.groups {
            let message =
                "Network interfaces and an instance-level security groups may not be specified on the same request";
            return Err(Failure::refused("InvalidParameterCombination", message));
        }
        let key = |field: &str| format!("NetworkInterface.1.{field}");
        if let Some(subnet) = form.get("SubnetId").map(str::to_owned) {
            form.remove("SubnetId");
            form = form.with(key("SubnetId"), subnet);
        }
        form = form.with(key("DeviceIndex"), "0");
        if let Some(public) = public {
            form = form.with(key("AssociatePublicIpAddress"), public);
        }
        let groups = groups.iter().zip(1..);
        Ok(groups.fold(form, |form, (group, index)| form.with(key(&format!("SecurityGroupId.{index}")), group)))
    }
}

/// The tags for volumes in `launchTemplateData`.
pub fn volume_tags(data: Node<'_, '_>) -> Vec<(String, String)> {
    let specifications = xml::items(data, "tagSpecificationSet").into_iter();
    let of_volumes = specifications.filter(|item| xml::text(*item, &["resourceType"]) == Some("volume"));
    of_volumes.flat_map(xml::tags).collect()
}

/// Adds tags for volumes to a `RunInstances`.
pub fn tag_volumes(mut form: Form, tags: &[(String, String)]) -> Form {
    let specification = format!("TagSpecification.{}", form.items("TagSpecification").len() + 1);
    if !tags.is_empty() {
        form = form.with(format!("{specification}.ResourceType"), "volume");
    }
    for ((key, value), index) in tags.iter().zip(1..) {
        let tag = format!("{specification}.Tag.{index}");
        form = form.with(format!("{tag}.Key"), key).with(format!("{tag}.Value"), value);
    }
    form
}
