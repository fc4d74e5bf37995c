use paddock_bed_aws::{Aws, Service};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::support::{ec2, http};

pub async fn rules_counts_and_capacity_are_set_over_http(aws: &Aws) {
    let admin = |path: &str| format!("{}/_admin/{path}", aws.endpoint());
    let get = async |path: &str| http().get(admin(path)).send().await.unwrap().json::<Value>().await.unwrap();
    let rule =
        json!({ "service": "ec2", "action": "DescribeKeyPairs", "effect": "error", "code": "AuthFailure", "times": 1 });
    let added: Value = http().post(admin("faults")).json(&rule).send().await.unwrap().json().await.unwrap();
    let mine = |faults: Value| faults.as_array().unwrap().iter().find(|fault| fault["id"] == added["id"]).cloned();
    assert_eq!(mine(get("faults").await).unwrap()["hit"], 0);
    let calls = [ec2(aws, "DescribeKeyPairs", &[]).await, ec2(aws, "DescribeKeyPairs", &[]).await];
    assert!(calls[0].1.contains("AuthFailure") && calls[1].0 == 200, "{calls:?}");
    assert_eq!(mine(get("faults").await).unwrap()["hit"], 1);
    assert_eq!(get("calls").await["ec2"]["DescribeKeyPairs"], 2);
    assert_eq!(aws.call_count(Service::Ec2, "DescribeKeyPairs"), 2);
    let removed = http().delete(admin(&format!("faults/{}", added["id"]))).send().await.unwrap();
    assert!(removed.status().is_success() && mine(get("faults").await).is_none());

    let limit = json!({ "zone": "mars-1a", "instance_type": "m5.*", "usage": "spot", "available": 3 });
    http().post(admin("capacity")).json(&limit).send().await.unwrap().error_for_status().unwrap();
    assert!(get("capacity").await.as_array().unwrap().contains(&limit));
}

pub async fn file_is_served_with_its_digest(aws: &Aws) {
    let path = aws.dir().join("agent");
    std::fs::write(&path, "content").unwrap();
    let file = aws.serve_file(&path).unwrap();
    let content = http().get(&file.url).send().await.unwrap().bytes().await.unwrap();
    let digest: String = Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!((content.as_ref(), digest), (b"content".as_slice(), file.sha256));
}
