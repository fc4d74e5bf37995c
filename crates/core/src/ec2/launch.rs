//! Requests to EC2 for pools and claims.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use sha2::{Digest, Sha256};

use super::{pool_status::PoolProblem, requirements::Requirements};
use crate::{
    api::{
        BlockDevice, Ec2Pool, IncludedTypes, LaunchOrder, LaunchTemplate, OrderSubnet, PoolReason, TAG_CLAIM,
        TAG_CLUSTER, TAG_INITIAL_RUN_ID, TAG_POOL, UsageClass,
    },
    names::PoolKey,
};

/// The launch template of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateRequest {
    pub name: String,
    /// The image's id, or the SSM parameter that has it.
    pub image: String,
    pub instance_profile: String,
    pub security_group_ids: Vec<String>,
    pub block_devices: Vec<BlockDevice>,
    pub public_address: Option<bool>,
    /// How many hops the answers of the metadata service go.
    pub hop_limit: u8,
    /// In base64, as EC2 takes it.
    pub user_data: String,
    /// Of instances and volumes.
    pub tags: Vec<(String, String)>,
    /// Digest of all the above; stored as the description of the template's version to detect drift.
    pub digest: String,
}

/// Input of a launch order, which is recorded before it is sent.
#[derive(Debug)]
pub struct Wanted<'a> {
    pub client_token: String,
    pub attempt: u32,
    pub template: &'a LaunchTemplate,
    pub count: u32,
    pub usage_class: UsageClass,
    pub subnets: Vec<OrderSubnet>,
    pub needs: &'a Requirements,
    pub tags: BTreeMap<String, String>,
}

impl Wanted<'_> {
    pub fn order(self, now: Timestamp) -> LaunchOrder {
        LaunchOrder {
            client_token: self.client_token,
            attempt: self.attempt,
            requested: self.count,
            usage_class: self.usage_class,
            ordered_at: Time(now),
            launch_template: self.template.clone(),
            subnets: self.subnets,
            resource_class: self.needs.resource_class.clone(),
            cpu: self.needs.cpu,
            memory_mib: self.needs.memory_mib,
            allowed_instance_types: self.needs.allowed_instance_types.clone(),
            include: included(&self.needs.allowed_instance_types),
            allocation_strategy: allocation_strategy(self.usage_class).into(),
            tags: self.tags,
            fleet_id: None,
            instance_ids: Vec::new(),
        }
    }
}

/// The cheapest machines, and of spot machines those that EC2 takes back least.
const fn allocation_strategy(usage_class: UsageClass) -> &'static str {
    match usage_class {
        UsageClass::OnDemand => "lowest-price",
        UsageClass::Spot => "price-capacity-optimized",
    }
}

/// What EC2 leaves out by default, and must not where the allowed types name it.
pub fn included(allowed_types: &[String]) -> IncludedTypes {
    let all = |fits: fn(&str) -> bool| !allowed_types.is_empty() && allowed_types.iter().all(|kind| fits(kind));
    IncludedTypes {
        any_price: all(is_named),
        burstable: all(is_burstable),
        bare_metal: allowed_types.iter().any(|kind| kind.contains(".metal")),
    }
}

/// Whether a pattern says more than "any type".
fn is_named(pattern: &str) -> bool {
    pattern.contains(|c| c != '*' && c != '.')
}

/// Whether a pattern names burstable types only: those of the families T2, T3, T3a, T4g. `t*` also names `trn1`.
fn is_burstable(pattern: &str) -> bool {
    pattern.strip_prefix('t').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// The tags of an order's machines: those of a claim by its name and run, or those that are kept warm.
pub fn tags(cluster: &str, pool: &PoolKey, claim: Option<(&str, &str)>) -> BTreeMap<String, String> {
    let run = claim.map_or("", |(_, run)| run);
    let all = [
        (TAG_CLUSTER, Some(cluster.to_owned())),
        (TAG_POOL, Some(pool.to_string())),
        (TAG_CLAIM, claim.map(|(name, _)| name.to_owned())),
        (TAG_INITIAL_RUN_ID, Some(run.to_owned())),
    ];
    all.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

pub fn template(
    cluster: &str,
    key: &PoolKey,
    pool: &Ec2Pool,
    user_data: String,
) -> Result<TemplateRequest, PoolProblem> {
    let moved = || (PoolReason::InvalidSpec, "spec.ec2.amiId has moved: set spec.ec2.ami.id instead".to_owned());
    let mut request = TemplateRequest {
        name: template_name(cluster, key),
        image: pool.ami.reference().ok_or_else(moved)?,
        instance_profile: pool.instance_profile.clone(),
        security_group_ids: pool.security_group_ids.clone(),
        block_devices: pool.block_devices.clone(),
        public_address: pool.public_address,
        hop_limit: pool.metadata.hop_limit,
        user_data,
        tags: [("Name".into(), format!("paddock {key}"))]
            .into_iter()
            .chain(pool.tags.clone())
            .chain([(TAG_CLUSTER.into(), cluster.into()), (TAG_POOL.into(), key.to_string())])
            .collect::<BTreeMap<_, _>>()
            .into_iter()
            .collect(),
        digest: String::new(),
    };
    request.digest = hex(&format!("{request:?}"));
    Ok(request)
}

/// EC2 allows 128 characters.
pub fn template_name(cluster: &str, pool: &PoolKey) -> String {
    unique(&["paddock", cluster, &pool.namespace, &pool.name], 128)
}

/// The queue of a pool's resource class; SQS allows 80 characters.
pub fn queue_name(cluster: &str, pool: &PoolKey, class: &str) -> String {
    unique(&["paddock", cluster, &pool.namespace, &pool.name, class], 80)
}

/// The same order always has the same token, across crashes and replicas; a further attempt has another.
pub fn client_token(uid: &str, attempt: u32) -> String {
    format!("paddock-{}-{attempt}", &hex(uid)[..40])
}

/// The parts joined by dashes, cut where they are too long together, with a digest: parts contain dashes themselves, so
/// that different parts may look the same. None contains a slash, so the digest differs for every split.
fn unique(parts: &[&str], max: usize) -> String {
    let (readable, digest) = (parts.join("-"), &hex(&parts.join("/"))[..16]);
    format!("{}-{digest}", &readable[..readable.len().min(max - digest.len() - 1)])
}

fn hex(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::{api::Ami, fixtures::ec2::pool};

    #[test]
    fn names_of_different_clusters_namespaces_pools_and_classes_differ() {
        let (mut queues, mut templates) = (HashSet::new(), HashSet::new());
        let parts = ["a", "b", "a-b", "b-a", "a-b-a"];
        for cluster in parts {
            for pool in parts.iter().flat_map(|namespace| parts.map(|name| PoolKey::new(*namespace, name))) {
                templates.insert(template_name(cluster, &pool));
                queues.extend(parts.map(|class| queue_name(cluster, &pool, class)));
            }
        }
        assert_eq!((queues.len(), templates.len()), (625, 125));
        let small = queue_name("prod", &PoolKey::new("ci", "linux-arm"), "small");
        assert_ne!(queue_name("prod", &PoolKey::new("ci", "linux"), "arm-small"), small);
        assert!(small.starts_with("paddock-prod-ci-linux-arm-small-"), "{small}");
    }

    #[test]
    fn long_names_are_cut() {
        let (long, cluster) = ("n".repeat(63), "c".repeat(63));
        let pool = PoolKey::new(long, "p".repeat(40));
        let (a, b) = (queue_name(&cluster, &pool, "medium"), queue_name(&cluster, &pool, "large"));
        assert_eq!((a.len(), b.len(), template_name(&cluster, &pool).len()), (80, 80, 128));
        assert_ne!(a, b);
    }

    #[test]
    fn named_types_are_ordered_at_any_price_and_burstable_ones_only_by_name() {
        let include = |types: &str| {
            let types: Vec<_> = types.split(' ').filter(|kind| !kind.is_empty()).map(str::to_owned).collect();
            let IncludedTypes { any_price, burstable, bare_metal } = included(&types);
            (any_price, burstable, bare_metal)
        };
        for (types, expected) in [
            ("*", (false, false, false)),
            ("*.*", (false, false, false)),
            ("", (false, false, false)),
            ("c7i.* *", (false, false, false)),
            ("c7i.*", (true, false, false)),
            ("m3.large r5.24xlarge", (true, false, false)),
            ("t3.medium t4g.*", (true, true, false)),
            ("t3.medium c7i.large", (true, false, false)),
            ("t*", (true, false, false)),
            ("trn1.2xlarge", (true, false, false)),
            ("m5.metal m5.large", (true, false, true)),
        ] {
            assert_eq!(include(types), expected, "{types:?}");
        }
    }

    #[test]
    fn an_order_has_all_that_ec2_is_sent() {
        let needs = Requirements {
            usage_class: UsageClass::Spot,
            resource_class: "medium".into(),
            cpu: 2,
            memory_mib: 4096,
            allowed_instance_types: vec!["t3.*".into()],
            scope: String::new(),
        };
        let wanted = Wanted {
            client_token: "t".into(),
            attempt: 1,
            template: &LaunchTemplate { id: "lt-1".into(), version: 2, ..LaunchTemplate::default() },
            count: 3,
            usage_class: UsageClass::Spot,
            subnets: vec![OrderSubnet { id: "subnet-1".into(), zone: "a".into() }],
            needs: &needs,
            tags: tags("prod", &PoolKey::new("ci", "linux"), Some(("build", "77"))),
        };
        let order = wanted.order(Timestamp::UNIX_EPOCH);
        let stored: LaunchOrder = serde_json::from_value(serde_json::to_value(&order).unwrap()).unwrap();
        assert_eq!(stored, order, "as the next leader reads it");
        assert_eq!(order.allocation_strategy, "price-capacity-optimized");
        assert!(order.include.any_price && order.include.burstable);
        let tags: Vec<_> = order.tags.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let expected = ["InitialRunId=77", "paddock:claim=build", "paddock:cluster=prod", "paddock:pool=ci/linux"];
        assert_eq!(tags, expected);
    }

    #[test]
    fn a_template_has_the_pools_tags_and_ours_and_another_digest_for_everything_else() {
        let of = |pool: &Ec2Pool| template("prod", &PoolKey::new("ci", "linux"), pool, String::new());
        let base = pool();
        let digest = |pool: &Ec2Pool| of(pool).unwrap().digest;
        let tags =
            [("Name", "mine"), ("team", "a"), (TAG_POOL, "forged")].map(|(key, value)| (key.into(), value.into()));
        let tagged = Ec2Pool { tags: tags.into(), ..base.clone() };
        let names = of(&tagged).unwrap().tags;
        let names: Vec<_> = names.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(names, [("Name", "mine"), (TAG_CLUSTER, "prod"), (TAG_POOL, "ci/linux"), ("team", "a")]);
        let parameter = Ami { id: None, ssm_parameter: Some("/ci/image".into()) };
        assert_eq!(of(&Ec2Pool { ami: parameter.clone(), ..base.clone() }).unwrap().image, "resolve:ssm:/ci/image");
        let device = serde_json::from_value(serde_json::json!({ "deviceName": "/dev/xvda", "size": 8 })).unwrap();
        for changed in [
            tagged,
            Ec2Pool { ami: parameter, ..base.clone() },
            Ec2Pool { block_devices: vec![device], ..base.clone() },
            Ec2Pool { public_address: Some(false), ..base.clone() },
            Ec2Pool { security_group_ids: vec!["sg-1".into()], ..base.clone() },
        ] {
            assert_ne!(digest(&changed), digest(&base), "{changed:?}");
        }
        assert_eq!(digest(&Ec2Pool { min_idle: 9, ..base.clone() }), digest(&base), "no part of it");
        let moved = Ec2Pool { ami: Ami::default(), ami_id: Some("ami-12345678".into()), ..base };
        assert!(of(&moved).is_err_and(|(reason, why)| reason == PoolReason::InvalidSpec && why.contains("ami.id")));
    }

    #[test]
    fn a_token_depends_on_claim_and_attempt_alone_and_fits_64_characters() {
        assert_eq!(client_token("uid-1", 1), client_token("uid-1", 1));
        assert_ne!(client_token("uid-1", 1), client_token("uid-1", 2));
        assert_ne!(client_token("uid-1", 1), client_token("uid-2", 1));
        assert!(client_token("uid-1", u32::MAX).len() <= 64);
    }
}
