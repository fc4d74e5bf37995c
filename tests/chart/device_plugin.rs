//! The device plugin's DaemonSet: what its pods may do on a node, and to nodes.

use super::*;

const ON: &[&str] = &["--set", "devicePlugin.enabled=true"];

fn pod(objects: &[Value]) -> &Value {
    &the(objects, "DaemonSet")["spec"]["template"]["spec"]
}

fn plugin_arguments(objects: &[Value]) -> Vec<&str> {
    let arguments = pod(objects)["containers"][0]["args"].as_array().unwrap();
    arguments.iter().map(|argument| argument.as_str().unwrap()).collect()
}

#[test]
fn boards_are_found_by_their_architecture_and_named_by_their_device_tree() {
    let objects = rendered(ON);
    let pod = pod(&objects);
    assert_eq!(pod["nodeSelector"], json!({"kubernetes.io/arch": "riscv64"}));
    assert_eq!(pod["containers"][0]["image"], "paddock:0.1.0");
    let volumes = pod["volumes"].as_array().unwrap();
    let path =
        |name: &str| volumes.iter().find(|volume| volume["name"] == name).map(|volume| &volume["hostPath"]["path"]);
    assert_eq!(path("device-plugins"), Some(&json!("/var/lib/kubelet/device-plugins")));
    assert_eq!(path("device-tree"), Some(&json!("/sys/firmware/devicetree/base")));
    assert!(plugin_arguments(&objects).contains(&"--device-tree=/host/device-tree"));
    let node = json!([{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]);
    assert_eq!(pod["containers"][0]["env"], node);
}

#[test]
fn every_value_reaches_the_plugin() {
    let objects = rendered(&["--values", EVERYTHING]);
    assert_eq!(
        plugin_arguments(&objects),
        ["device-plugin", "--slots=4", "--resource-name=example.com/runner", "--board=pioneer", "--log-format=human"]
    );
    let pod = pod(&objects);
    assert_eq!(pod["containers"][0]["image"], "registry.example.com/paddock-riscv64:1.2.3");
    assert_eq!(pod["containers"][0]["imagePullPolicy"], "Always");
    assert_eq!(pod["imagePullSecrets"], json!([{"name": "pull"}]));
    assert_eq!(pod["priorityClassName"], "system-cluster-critical");
    assert_eq!(pod["tolerations"], json!([{"key": "board", "operator": "Exists"}]));
    assert_eq!(pod["volumes"].as_array().unwrap().len(), 1, "a board that is told needs no device tree");
    assert_eq!(pod["volumes"][0]["hostPath"]["path"], "/var/lib/k0s/kubelet/device-plugins");
    assert_eq!(the(&objects, "DaemonSet")["spec"]["updateStrategy"]["type"], "OnDelete");
}

#[test]
fn the_plugin_understands_every_argument() {
    for values in [ON, &["--values", EVERYTHING]] {
        let objects = rendered(values);
        let mut plugin = Command::new(env!("CARGO_BIN_EXE_paddock"));
        let output = plugin.args(plugin_arguments(&objects)).arg("--help").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_plugin_is_root_without_any_power() {
    let objects = rendered(ON);
    let pod = pod(&objects);
    let container = &pod["containers"][0]["securityContext"];
    assert_eq!(container["capabilities"], json!({"drop": ["ALL"]}));
    assert_eq!(container["allowPrivilegeEscalation"], false);
    assert_eq!(container["readOnlyRootFilesystem"], true);
    assert_eq!(container["privileged"], Value::Null);
    assert_eq!((&pod["hostNetwork"], &pod["hostPID"]), (&Value::Null, &Value::Null));
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
}

/// Otherwise webhooks would reach the boards, and a drain would wait for the wrong pods.
#[test]
fn a_plugin_is_not_taken_for_an_operator() {
    let objects = rendered(&["--values", EVERYTHING]);
    let labels = &the(&objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"];
    for selector in [
        &the(&objects, "Service")["spec"]["selector"],
        &the(&objects, "Deployment")["spec"]["selector"]["matchLabels"],
        &the(&objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        &the(&objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ] {
        let selected = selector.as_object().unwrap().iter().all(|(key, value)| labels[key] == *value);
        assert!(!selected, "{selector} selects {labels}");
    }
}

#[test]
fn a_plugin_reads_and_labels_nodes_and_no_more() {
    let (with, without) = (rendered(ON), rendered(&[]));
    let mut more = grants(&with, &["Role", "ClusterRole"]);
    for known in grants(&without, &["Role", "ClusterRole"]) {
        let index = more.iter().position(|grant| *grant == known).expect("the operator keeps its rights");
        more.swap_remove(index);
    }
    more.sort();
    let nodes = |verb: &str| (String::new(), "nodes".to_owned(), verb.to_owned());
    assert_eq!(more, ["list", "patch", "watch"].map(nodes));

    let policy = the(&with, "ValidatingAdmissionPolicy");
    let account = "request.userInfo.username == \"system:serviceaccount:system:paddock-device-plugin\"";
    assert_eq!(policy["spec"]["matchConditions"][0]["expression"], account);
    let binding = the(&with, "ValidatingAdmissionPolicyBinding");
    assert_eq!(binding["spec"]["policyName"], policy["metadata"]["name"]);
    let open = rendered(&[ON, &["--set", "devicePlugin.admissionPolicy=false"]].concat());
    assert!(of_kind(&open, "ValidatingAdmissionPolicy").is_empty());
}
