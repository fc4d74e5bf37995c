//! The chart, rendered by real Helm: what it promises about availability, security and rights, and what it refuses.

mod device_plugin;
mod values;

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output},
    sync::OnceLock,
};

use paddock_bed::operator::MEMORY;
use paddock_core::demand::quota::EntityLimits;
use serde_json::{Value, json};

const CHART: &str = concat!(env!("PADDOCK_SOURCE"), "/charts/paddock");

/// Every switch on, every list filled.
const EVERYTHING: &str = concat!(env!("PADDOCK_SOURCE"), "/tests/chart/everything.yaml");

fn helm(arguments: &[&str]) -> Output {
    static HELM: OnceLock<PathBuf> = OnceLock::new();
    let helm = HELM.get_or_init(|| paddock_bed_process::tool("helm").unwrap());
    Command::new(helm).args(arguments).output().unwrap()
}

/// `helm template` of release `paddock` in namespace `system`: its objects, or its complaint.
fn template(arguments: &[&str]) -> Result<Vec<Value>, String> {
    let output = helm(&[&["template", "paddock", CHART, "--namespace", "system"], arguments].concat());
    if !output.status.success() {
        return Err(String::from_utf8(output.stderr).unwrap());
    }
    let text = String::from_utf8(output.stdout).unwrap();
    Ok(serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{error}\n{text}")))
}

fn rendered(arguments: &[&str]) -> Vec<Value> {
    template(&[&["--set", "clusterName=test"], arguments].concat()).unwrap()
}

fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

fn the<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    match of_kind(objects, kind)[..] {
        [one] => one,
        ref all => panic!("{} objects of kind {kind}, not one", all.len()),
    }
}

fn named<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name}"))
}

fn names<'a>(objects: &[&'a Value]) -> Vec<&'a str> {
    objects.iter().map(|object| object["metadata"]["name"].as_str().unwrap()).collect()
}

/// The arguments of the operator's container.
fn arguments(objects: &[Value]) -> Vec<&str> {
    let container = &the(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0];
    container["args"].as_array().unwrap().iter().map(|argument| argument.as_str().unwrap()).collect()
}

/// The role for workflows, which the operator does not have.
const CLAIMER: &str = "paddock-claimer";

/// Every (apiGroup, resource, verb) that roles of these kinds grant, but for that for workflows.
fn grants(objects: &[Value], kinds: &[&str]) -> Vec<(String, String, String)> {
    let words = |rule: &Value, list: &str| -> Vec<String> {
        rule[list].as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    let mut all = Vec::new();
    let is_ours = |object: &&Value| object["metadata"]["name"] != CLAIMER;
    let of_kinds = objects.iter().filter(|object| kinds.iter().any(|kind| object["kind"] == *kind));
    for role in of_kinds.filter(is_ours) {
        for rule in role["rules"].as_array().unwrap() {
            for group in words(rule, "apiGroups") {
                for resource in words(rule, "resources") {
                    all.extend(words(rule, "verbs").into_iter().map(|verb| (group.clone(), resource.clone(), verb)));
                }
            }
        }
    }
    all
}

#[test]
fn lint_has_nothing_to_say() {
    for values in [&[][..], &["--values", EVERYTHING]] {
        let output = helm(&[&["lint", "--strict", CHART], values].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn two_replicas_of_which_one_may_be_evicted() {
    let objects = rendered(&[]);
    let deployment = &the(&objects, "Deployment")["spec"];
    let budget = &the(&objects, "PodDisruptionBudget")["spec"];
    assert_eq!(deployment["replicas"], 2);
    assert_eq!(budget["minAvailable"], 1);
    assert_eq!(budget["selector"], deployment["selector"]);
    let pod = &deployment["template"];
    assert_eq!(pod["spec"]["topologySpreadConstraints"][0]["labelSelector"], deployment["selector"]);
    for (label, value) in deployment["selector"]["matchLabels"].as_object().unwrap() {
        assert_eq!(&pod["metadata"]["labels"][label], value);
        assert_eq!(&the(&objects, "Service")["spec"]["selector"][label], value);
    }
    assert!(of_kind(&rendered(&["--set", "replicas=1"]), "PodDisruptionBudget").is_empty(), "it would block drains");
}

#[test]
fn pods_pass_the_restricted_standard() {
    for values in [&[][..], &["--values", EVERYTHING]] {
        let objects = rendered(values);
        let pod = &the(&objects, "Deployment")["spec"]["template"]["spec"];
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        assert_eq!(pod["securityContext"]["runAsUser"], 65532);
        assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
        assert_eq!(
            pod["containers"][0]["securityContext"],
            json!({
                "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true,
                "capabilities": {"drop": ["ALL"]},
            })
        );
        assert_eq!(pod["hostNetwork"], Value::Null);
    }
}

#[test]
fn probes_and_service_lead_to_the_http_port() {
    let objects = rendered(&[]);
    let container = &the(&objects, "Deployment")["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["ports"], json!([{"name": "http", "containerPort": 8080}]));
    assert_eq!(container["livenessProbe"]["httpGet"], json!({"path": "/health", "port": "http"}));
    assert_eq!(container["readinessProbe"]["httpGet"], json!({"path": "/readyz", "port": "http"}));
    let port = &the(&objects, "Service")["spec"]["ports"][0];
    assert_eq!((&port["port"], &port["targetPort"]), (&json!(80), &json!("http")));
}

#[test]
fn nothing_is_granted_by_wildcard() {
    for values in [&[][..], &["--values", EVERYTHING]] {
        let all = grants(&rendered(values), &["Role", "ClusterRole"]);
        assert!(!all.is_empty());
        for (group, resource, verb) in all {
            assert!(![&group, &resource, &verb].iter().any(|word| word.contains('*')), "{verb} {resource}.{group}");
        }
    }
}

#[test]
fn secrets_cannot_be_listed() {
    let all = grants(&rendered(&[]), &["Role", "ClusterRole"]);
    let mut verbs: Vec<_> =
        all.iter().filter(|(_, resource, _)| resource == "secrets").map(|(.., verb)| verb).collect();
    verbs.sort();
    assert_eq!(verbs, ["create", "delete", "get", "patch"]);
}

#[test]
fn one_namespace_means_no_cluster_right_but_reading_nodes() {
    let objects = rendered(&["--set", "watchNamespace=team"]);
    let mut cluster = grants(&objects, &["ClusterRole"]);
    cluster.sort();
    let nodes = |verb: &str| (String::new(), "nodes".to_owned(), verb.to_owned());
    assert_eq!(cluster, ["list", "watch"].map(nodes));
    assert_eq!(names(&of_kind(&objects, "ClusterRoleBinding")), ["paddock-system-nodes"]);
    let places: Vec<_> = of_kind(&objects, "Role").iter().map(|role| role["metadata"]["namespace"].clone()).collect();
    assert_eq!(places, ["team", "system"]);
    assert!(arguments(&objects).contains(&"--namespace=team"));
    // The same rights as for all namespaces, in fewer places.
    let (mut narrow, mut wide) =
        (grants(&objects, &["Role", "ClusterRole"]), grants(&rendered(&[]), &["Role", "ClusterRole"]));
    narrow.sort();
    wide.sort();
    assert_eq!(narrow, wide);
}

#[test]
fn leases_are_granted_in_the_release_namespace_alone_and_only_what_an_election_does() {
    let objects = rendered(&[]);
    let cluster = grants(&objects, &["ClusterRole"]);
    assert!(cluster.iter().all(|(group, ..)| group != "coordination.k8s.io"), "{cluster:?}");
    assert_eq!(the(&objects, "Role")["metadata"]["namespace"], "system");
    let mut verbs: Vec<_> = grants(&objects, &["Role"]).into_iter().map(|(.., verb)| verb).collect();
    verbs.sort();
    assert_eq!(verbs, ["create", "get", "list", "update", "watch"]);
}

#[test]
fn every_binding_names_a_role_and_the_service_account_that_exist() {
    for values in [&[][..], &["--set", "watchNamespace=team"], &["--values", EVERYTHING]] {
        let objects = rendered(values);
        let programs = ["Deployment", "DaemonSet"].iter().flat_map(|kind| of_kind(&objects, kind));
        let accounts: Vec<_> =
            programs.map(|object| &object["spec"]["template"]["spec"]["serviceAccountName"]).collect();
        assert_eq!(of_kind(&objects, "ServiceAccount").len(), accounts.len(), "each program has an account of its own");
        for binding in ["RoleBinding", "ClusterRoleBinding"].iter().flat_map(|kind| of_kind(&objects, kind)) {
            let role = objects.iter().find(|object| {
                object["kind"] == binding["roleRef"]["kind"]
                    && object["metadata"]["name"] == binding["roleRef"]["name"]
                    && object["metadata"]["namespace"] == binding["metadata"]["namespace"]
            });
            assert!(role.is_some(), "{binding}");
            let [subject] = &binding["subjects"].as_array().unwrap()[..] else { panic!("{binding}") };
            assert_eq!((&subject["kind"], &subject["namespace"]), (&json!("ServiceAccount"), &json!("system")));
            assert!(accounts.contains(&&subject["name"]), "{binding}");
            named(&objects, "ServiceAccount", subject["name"].as_str().unwrap());
        }
    }
}

#[test]
fn crds_are_upgraded_with_the_release_and_outlive_it() {
    const KEEP: &str = "helm.sh/resource-policy";
    let objects = rendered(&[]);
    let crds = of_kind(&objects, "CustomResourceDefinition");
    assert_eq!(
        names(&crds),
        ["runnerclaims.paddock.dev", "runnerpools.paddock.dev", "workers.paddock.dev"],
        "run `make generate`"
    );
    for crd in crds {
        assert_eq!(crd["metadata"]["annotations"][KEEP], "keep");
        let plural = crd["spec"]["names"]["plural"].as_str().unwrap();
        let file = format!("{}/crds/paddock.dev_{plural}.yaml", env!("PADDOCK_SOURCE"));
        let generated: Value = serde_saphyr::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!(crd["spec"], generated["spec"], "{file}: run `make generate`");
    }
    let objects = rendered(&["--set", "crds.keep=false"]);
    let crds = of_kind(&objects, "CustomResourceDefinition");
    assert!(crds.len() == 3 && crds.iter().all(|crd| crd["metadata"]["annotations"][KEEP].is_null()));
    assert!(of_kind(&rendered(&["--set", "crds.install=false"]), "CustomResourceDefinition").is_empty());
}

#[test]
fn only_what_is_asked_for_is_installed() {
    let objects = rendered(&[]);
    for kind in ["Ingress", "NetworkPolicy", "ServiceMonitor", "DaemonSet", "ValidatingAdmissionPolicy"] {
        assert!(of_kind(&objects, kind).is_empty(), "{kind}");
    }
    assert_eq!(names(&of_kind(&objects, "ClusterRole")), ["paddock-system-nodes", "paddock-system", CLAIMER]);
}

#[test]
fn workflows_have_a_role_that_can_only_claim() {
    let objects = rendered(&[]);
    let rules = json!([{
        "apiGroups": ["paddock.dev"], "resources": ["runnerclaims"], "verbs": ["create", "delete", "get", "list", "watch"],
    }]);
    assert_eq!(named(&objects, "ClusterRole", CLAIMER)["rules"], rules);
    let without = rendered(&["--set", "rbac.claimerRole=false"]);
    assert!(!names(&of_kind(&without, "ClusterRole")).contains(&CLAIMER));
}

#[test]
fn everything_on_reaches_the_pod() {
    let objects = rendered(&["--values", EVERYTHING]);
    for flag in [
        "--cluster-name=test",
        "--namespace=team",
        "--github-api-url=https://ghes.example.com/api/v3",
        "--webhook-secret-file=/etc/paddock/webhook/secrets",
        "--entity-limits-file=/etc/paddock/config/entity-limits.yaml",
        "--retention=1h30m",
        "--log-format=human",
        "--lease-duration=20s",
    ] {
        assert!(arguments(&objects).contains(&flag), "{flag}");
    }
    let pod = &the(&objects, "Deployment")["spec"]["template"]["spec"];
    let environment = pod["containers"][0]["env"].as_array().unwrap();
    let given = |(name, value): &(&str, &str)| environment.contains(&json!({"name": name, "value": value}));
    assert!(MEMORY.iter().all(given), "the bed measures what the chart sets: {environment:?}");
    assert!([("AWS_REGION", "eu-central-1"), ("RUST_LOG", "debug")].iter().all(given), "{environment:?}");
    let secret = json!({"secretName": "hooks", "items": [{"key": "lines", "path": "secrets"}]});
    assert!(pod["volumes"].as_array().unwrap().iter().any(|volume| volume["secret"] == secret), "{pod}");
    let limits: EntityLimits =
        serde_saphyr::from_str(the(&objects, "ConfigMap")["data"]["entity-limits.yaml"].as_str().unwrap()).unwrap();
    assert_eq!((limits.of("1"), limits.of("152654596")), (5, 40));
    assert_eq!(
        named(&objects, "ServiceAccount", "runner-operator")["metadata"]["annotations"]["eks.amazonaws.com/role-arn"],
        "arn:aws:iam::123456789012:role/paddock"
    );
    assert_eq!(the(&objects, "ServiceMonitor")["spec"]["endpoints"][0]["path"], "/metrics");
}

#[test]
fn the_operator_understands_every_argument() {
    for values in [&[][..], &["--values", EVERYTHING]] {
        let objects = rendered(values);
        // With --help at their end the arguments are parsed and checked, and nothing runs.
        let mut operator = Command::new(env!("CARGO_BIN_EXE_paddock"));
        let output = operator.args(arguments(&objects)).arg("--help").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn the_ingress_exposes_the_webhook_alone() {
    let objects = rendered(&["--values", EVERYTHING]);
    let rules = &the(&objects, "Ingress")["spec"]["rules"];
    assert_eq!(rules.as_array().unwrap().len(), 1);
    assert_eq!(rules[0]["host"], "paddock.example.com");
    let paths = rules[0]["http"]["paths"].as_array().unwrap();
    assert_eq!(paths.len(), 1);
    assert_eq!((&paths[0]["path"], &paths[0]["pathType"]), (&json!("/webhook"), &json!("Exact")));
}

#[test]
fn the_network_policy_lets_out_dns_the_api_server_and_https() {
    let objects = rendered(&["--set", "networkPolicy.enabled=true"]);
    let policy = &the(&objects, "NetworkPolicy")["spec"];
    assert_eq!(policy["ingress"], json!([{"ports": [{"protocol": "TCP", "port": "http"}]}]));
    let ports = policy["egress"].as_array().unwrap().iter().flat_map(|rule| rule["ports"].as_array().unwrap());
    let ports: Vec<_> =
        ports.map(|port| (port["protocol"].as_str().unwrap(), port["port"].as_u64().unwrap())).collect();
    assert_eq!(ports, [("UDP", 53), ("TCP", 53), ("TCP", 443), ("TCP", 6443)]);
}

#[test]
fn a_change_of_limits_rolls_the_pods() {
    let checksum = |objects: &[Value]| {
        the(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/config"].clone()
    };
    assert_ne!(checksum(&rendered(&[])), checksum(&rendered(&["--set", "entityLimits.default=21"])));
}
