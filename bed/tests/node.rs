//! A real kubelet runs real pods from images that the repository builds.

use std::{
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::{
    authentication::v1::SelfSubjectReview,
    core::v1::{Node as KubeNode, Pod},
};
use kube::{
    Api, Config,
    api::{LogParams, PostParams},
};
use libtest_mimic::{Arguments, Trial};
use paddock_bed::{
    image::Image,
    isolate::{self, Isolated, Options},
    kube::{ControlPlane, TOOLS, client_with},
    node::{self, Node},
    wait::{Check, Wait},
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// Longer than anything takes on a busy machine.
const DEADLINE: Duration = Duration::from_secs(240);
const PAUSE: Duration = Duration::from_millis(100);
const IMAGE: &str = "paddock-bed/test:1";

struct Bed {
    plane: ControlPlane,
    node: Node,
}

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("in-cluster") {
        return in_cluster();
    }
    let arguments = Arguments::from_args();
    if arguments.list {
        return libtest_mimic::run(&arguments, trials(None, false)).exit_code();
    }
    let tools = [&TOOLS[..], &node::TOOLS].concat();
    let isolated = isolate::enter(Options { tools: &tools, listen: 0 }).expect("a bed of its own");
    if let Err(why) = &isolated.node_possible {
        println!("skipped: {why}");
        return libtest_mimic::run(&arguments, trials(None, true)).exit_code();
    }
    let runtime = Arc::new(Runtime::new().expect("a runtime"));
    let bed = runtime.block_on(start(&isolated)).unwrap_or_else(|error| panic!("a bed with a node: {error:?}"));
    libtest_mimic::run(&arguments, trials(Some((Arc::new(bed), runtime)), false)).exit_code()
}

async fn start(isolated: &Isolated) -> Result<Bed> {
    let plane = ControlPlane::start(&isolated.dir, isolated.address).await?;
    let start = Instant::now();
    let node = Node::start(&plane, "node-1", &[("riseproject.dev/board", "test-board")]).await?;
    println!("node ready after {:.1?}", start.elapsed());
    let archive = isolated.dir.join("test.tar");
    Image::new(IMAGE)
        .busybox()?
        .file("/greeting", "built by the bed", 0o644)
        .binary_with_libraries("/usr/local/bin/test", &std::env::current_exe()?)?
        .write(&archive)?;
    node.import_image(&archive).await?;
    Ok(Bed { plane, node })
}

fn trials(bed: Option<(Arc<Bed>, Arc<Runtime>)>, ignored: bool) -> Vec<Trial> {
    macro_rules! trials {
        ($($name:ident),*) => { vec![$({
            let bed = bed.clone();
            Trial::test(stringify!($name), move || {
                let (bed, runtime) = bed.expect("listed or skipped only");
                Ok(runtime.block_on($name(&bed)).map_err(|error| format!("{error:?}"))?)
            })
            .with_ignored_flag(ignored)
        }),*] };
    }
    trials!(
        a_pod_runs_an_image_the_repository_built_and_its_logs_come_through_the_api_server,
        a_pod_reaches_the_api_server_as_in_cluster_configuration_says,
        a_pod_reaches_a_server_of_the_bed,
        a_privileged_pod_with_much_ephemeral_storage_and_the_hosts_network_fits,
        the_node_has_its_labels,
        a_failing_pod_shows_its_exit_code
    )
}

/// Creates a pod that never pulls and never restarts, and waits for the end of its container.
async fn run(bed: &Bed, name: &str, script: &str, extra: Value) -> Result<(String, i32)> {
    let mut spec = json!({
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sh", "-c", script] }],
    });
    merge(&mut spec, extra);
    let pods: Api<Pod> = Api::default_namespaced(bed.plane.client());
    let pod = serde_json::from_value(json!({ "metadata": { "name": name }, "spec": spec }))?;
    pods.create(&PostParams::default(), &pod).await?;
    let ended = async || {
        let containers = pods.get(name).await?.status.and_then(|status| status.container_statuses);
        let container = containers.as_deref().and_then(<[_]>::first).and_then(|container| container.state.clone());
        let Some(ended) = container.and_then(|state| state.terminated) else {
            return Ok(Check::NotYet("its container has not ended".into()));
        };
        Ok(match pods.logs(name, &LogParams::default()).await {
            Ok(log) => Check::Found((log, ended.exit_code)),
            // A busy kubelet is asked again.
            Err(error) => Check::NotYet(format!("no log ({error})")),
        })
    };
    match Wait::at_most(DEADLINE).every(PAUSE).until(&format!("{name} ends"), ended).await {
        Ok(found) => Ok(found),
        Err(error) => {
            let events = bed.plane.kubectl(&["describe", "pod", name]).await?;
            bail!("{error:#}: {}", String::from_utf8_lossy(&events.stdout))
        }
    }
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(from)) => into.iter_mut().zip(from).for_each(|(a, b)| merge(a, b)),
        (into, from) => *into = from,
    }
}

async fn a_pod_runs_an_image_the_repository_built_and_its_logs_come_through_the_api_server(bed: &Bed) -> Result<()> {
    let (log, code) = run(bed, "greeting", "cat /greeting", json!({})).await?;
    ensure!(code == 0 && log == "built by the bed", "{code}: {log}");
    Ok(())
}

/// What this program does inside a pod: it asks who it is.
fn in_cluster() -> ExitCode {
    let ask = async {
        let config = Config::incluster()?;
        println!("{}", config.cluster_url);
        let review = Api::<SelfSubjectReview>::all(client_with(config)?);
        let answer = review.create(&PostParams::default(), &SelfSubjectReview::default()).await?;
        let user = answer.status.and_then(|status| status.user_info).unwrap_or_default();
        println!("{}", user.username.unwrap_or_default());
        anyhow::Ok(())
    };
    match Runtime::new().expect("a runtime").block_on(ask) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error:?}");
            ExitCode::FAILURE
        }
    }
}

async fn a_pod_reaches_the_api_server_as_in_cluster_configuration_says(bed: &Bed) -> Result<()> {
    let (log, code) = run(bed, "in-cluster", "/usr/local/bin/test in-cluster", json!({})).await?;
    let lines: Vec<_> = log.lines().collect();
    let expected =
        [format!("https://{}/", isolate::SERVICE_ADDRESS), "system:serviceaccount:default:default".to_owned()];
    ensure!(code == 0 && lines == expected, "{code}: {log}");
    Ok(())
}

async fn a_pod_reaches_a_server_of_the_bed(bed: &Bed) -> Result<()> {
    let app = axum::Router::new().route("/", axum::routing::get(async || "hello from the bed"));
    let listener = tokio::net::TcpListener::bind((bed.plane.address(), 0)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, app).await });
    let (log, code) = run(bed, "outward", &format!("wget -q -O - {url}"), json!({})).await?;
    ensure!(code == 0 && log == "hello from the bed", "{code}: {log}");
    Ok(())
}

async fn a_privileged_pod_with_much_ephemeral_storage_and_the_hosts_network_fits(bed: &Bed) -> Result<()> {
    let resources = json!({
        "requests": { "ephemeral-storage": "40Gi" },
        "limits": { "ephemeral-storage": "90Gi" },
    });
    let extra = json!({
        "hostNetwork": true,
        "activeDeadlineSeconds": 525600,
        "nodeSelector": { "riseproject.dev/board": "test-board" },
        "containers": [{ "resources": resources, "securityContext": { "privileged": true } }],
    });
    let (log, code) = run(bed, "board", "mkdir /tmp/m && id -u", extra).await?;
    ensure!(code == 0 && log == "0\n", "{code}: {log}");
    Ok(())
}

async fn the_node_has_its_labels(bed: &Bed) -> Result<()> {
    let node = Api::<KubeNode>::all(bed.plane.client()).get(bed.node.name()).await?;
    let labels = node.metadata.labels.unwrap_or_default();
    ensure!(labels.get("riseproject.dev/board").map(String::as_str) == Some("test-board"), "{labels:?}");
    Ok(())
}

async fn a_failing_pod_shows_its_exit_code(bed: &Bed) -> Result<()> {
    let (log, code) = run(bed, "failing", "echo no such luck; exit 3", json!({})).await?;
    ensure!(code == 3 && log == "no such luck\n", "{code}: {log}");
    Ok(())
}
