//! The chart's values: what the schema refuses and with which message, and that the README documents all of them.

use std::collections::BTreeMap;

use super::*;

/// What a user sets, and the words of the refusal that say where and why.
const REFUSED: &[(&str, &str)] = &[
    ("clusterName=", "clusterName is required: a name for this installation that no other in the AWS account has"),
    ("clusterName=two words", "at '/clusterName': 'two words' does not match pattern"),
    ("watchNamespace=Team", "at '/watchNamespace': 'Team' does not match pattern"),
    ("replicas=0", "at '/replicas': minimum: got 0, want 1"),
    ("replicas=two", "at '/replicas': got string, want integer"),
    ("image.pullPolicy=Sometimes", "at '/image/pullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'"),
    ("image.digest=sha256:1", "at '/image/digest': 'sha256:1' does not match pattern"),
    ("image=null", "missing property 'image'"),
    ("webook.secretName=typo", "additional properties 'webook' not allowed"),
    ("webhook.secret=typo", "at '/webhook': additional properties 'secret' not allowed"),
    ("crds.keep=perhaps", "at '/crds/keep': got string, want boolean"),
    ("github.apiUrl=ghes.example.com", "at '/github/apiUrl': 'ghes.example.com' does not match pattern"),
    ("aws.region=Frankfurt", "at '/aws/region': 'Frankfurt' does not match pattern"),
    ("retention=tomorrow", "at '/retention': 'tomorrow' does not match pattern"),
    ("logFormat=xml", "at '/logFormat': value must be one of 'json', 'human'"),
    ("retention=null", "missing property 'retention'"),
    ("entityLimits.default=-1", "at '/entityLimits/default': minimum: got -1, want 0"),
    ("entityLimits.overrides.acme=3", "at '/entityLimits/overrides': additional properties 'acme' not allowed"),
    ("entityLimits.overrides.123=many", "at '/entityLimits/overrides/123': got string, want integer"),
    ("extraArgs=--verbose", "at '/extraArgs': got string, want array"),
    ("extraEnv[0].value=nameless", "at '/extraEnv/0': missing property 'name'"),
    ("serviceAccount.name=", "at '/serviceAccount/name': '' does not match pattern"),
    ("service.type=ExternalName", "at '/service/type': value must be one of"),
    ("service.port=70000", "at '/service/port': maximum: got 70,000, want 65,535"),
    ("ingress.enabled=true", "ingress.host is required when ingress.enabled is true"),
    ("devicePlugin.slots=0", "at '/devicePlugin/slots': minimum: got 0, want 1"),
    ("devicePlugin.slot=1", "at '/devicePlugin': additional properties 'slot' not allowed"),
    ("devicePlugin.resourceName=runner", "at '/devicePlugin/resourceName': 'runner' does not match pattern"),
    ("devicePlugin.board=two words", "at '/devicePlugin/board': 'two words' does not match pattern"),
    ("devicePlugin.kubeletDir=kubelet", "at '/devicePlugin/kubeletDir': 'kubelet' does not match pattern"),
    ("devicePlugin.image.tag=a:b", "at '/devicePlugin/image/tag': 'a:b' does not match pattern"),
    ("nodeSelector.disk=1", "at '/nodeSelector/disk': got number, want string"),
];

#[test]
fn bad_values_are_refused_with_their_place_and_reason() {
    for (set, words) in REFUSED {
        let error = template(&["--set", "clusterName=test", "--set", set]).expect_err(set);
        assert!(error.contains(words), "{set}: {error}");
    }
}

#[test]
fn optional_values_may_be_null() {
    for name in ["resources", "resources.limits", "nodeSelector", "podLabels", "extraEnv", "priorityClassName"] {
        rendered(&["--set", &format!("{name}=null")]);
    }
}

#[test]
fn names_that_look_like_numbers_stay_names() {
    let objects = rendered(&["--set-string", "watchNamespace=1e3,serviceAccount.name=007,webhook.secretName=42"]);
    assert_eq!(the(&objects, "ServiceAccount")["metadata"]["name"], "007");
    let pod = &the(&objects, "Deployment")["spec"]["template"]["spec"];
    assert_eq!(pod["serviceAccountName"], "007");
    assert_eq!(pod["volumes"][1]["secret"]["secretName"], "42");
    assert_eq!(of_kind(&objects, "RoleBinding")[0]["metadata"]["namespace"], "1e3");
}

/// `a.b.c` and its default for each value; an empty map or list is a default too.
fn leaves(prefix: &str, value: &Value, into: &mut BTreeMap<String, Value>) {
    match value.as_object() {
        Some(map) if !map.is_empty() => {
            for (key, value) in map {
                leaves(&format!("{prefix}{}{key}", if prefix.is_empty() { "" } else { "." }), value, into);
            }
        }
        _ => _ = into.insert(prefix.to_owned(), value.clone()),
    }
}

#[test]
fn the_readme_lists_every_value_with_its_default() {
    let read = |file: &str| fs::read_to_string(format!("{CHART}/{file}")).unwrap();
    let mut values = BTreeMap::new();
    leaves("", &serde_saphyr::from_str(&read("values.yaml")).unwrap(), &mut values);
    let readme = read("README.md");
    let (_, table) = readme.split_once("## Values").unwrap();
    let told: BTreeMap<_, Value> = table
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | `"))
        .map(|(name, rest)| (name.to_owned(), serde_json::from_str(rest.split_once('`').unwrap().0).unwrap()))
        .collect();
    assert_eq!(told, values);
}
