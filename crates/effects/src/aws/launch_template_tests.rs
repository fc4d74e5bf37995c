use axum::http::StatusCode;

use super::{super::ec2_stand_in::ec2, *};

fn template(digest: &str) -> TemplateRequest {
    TemplateRequest {
        name: "paddock-t".into(),
        image: "ami-1".into(),
        instance_profile: "runner".into(),
        security_group_ids: Vec::new(),
        block_devices: Vec::new(),
        public_address: None,
        hop_limit: 1,
        user_data: String::new(),
        tags: Vec::new(),
        digest: digest.into(),
    }
}

#[tokio::test]
async fn a_template_version_that_is_not_visible_yet_is_not_made_again() {
    let (machines, requests) = ec2(|fields| {
        let action = fields["Action"].as_str();
        let version = |number: u32, digest: &str| {
            format!(
                "<launchTemplateId>lt-1</launchTemplateId><versionNumber>{number}</versionNumber>\
                 <versionDescription>{digest}</versionDescription>"
            )
        };
        let inner = match action {
            // The version that was made is never shown.
            "DescribeLaunchTemplateVersions" => {
                format!("<launchTemplateVersionSet><item>{}</item></launchTemplateVersionSet>", version(1, "old"))
            }
            _ => format!("<launchTemplateVersion>{}</launchTemplateVersion>", version(2, "new")),
        };
        (StatusCode::OK, format!("<{action}Response>{inner}</{action}Response>"))
    })
    .await;
    for _ in 0..3 {
        let ensured = machines.ensure_template(&template("new")).await.unwrap();
        assert_eq!((ensured.id.as_str(), ensured.version), ("lt-1", 2));
    }
    let made = || {
        let requests = requests.lock().unwrap();
        requests.iter().filter(|fields| fields["Action"] == "CreateLaunchTemplateVersion").count()
    };
    assert_eq!(made(), 1);
    machines.ensure_template(&template("newer")).await.unwrap();
    assert_eq!(made(), 2, "for another spec");
}
