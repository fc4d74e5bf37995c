//! The control plane of a bed serves with authentication and RBAC on.

use std::{
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, Service};
use kube::{
    Api, Client, Error,
    api::{ListParams, PostParams},
};
use libtest_mimic::{Arguments, Trial};
use paddock_bed::{
    isolate::{self, Isolated, Options},
    kube::{ControlPlane, TOOLS, client_from, succeeded},
    kwok::{self, SimulatedNodes},
    wait::Wait,
};
use serde_json::json;
use tokio::runtime::Runtime;

/// Longer than anything takes on a busy machine.
const WAIT: Wait = Wait::at_most(Duration::from_secs(120)).every(Duration::from_millis(100));

struct Bed {
    plane: ControlPlane,
    isolated: Isolated,
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1); // one of them restarts the API server
    if arguments.list {
        return libtest_mimic::run(&arguments, trials(None)).exit_code();
    }
    let tools = [&TOOLS[..], &kwok::TOOLS].concat();
    let isolated = isolate::enter(Options { tools: &tools, listen: 0 }).expect("a bed of its own");
    let runtime = Arc::new(Runtime::new().expect("a runtime"));
    let start = Instant::now();
    let plane = runtime.block_on(ControlPlane::start(&isolated.dir, isolated.address)).expect("a control plane");
    println!("control plane up after {:.1?}", start.elapsed());
    let bed = Arc::new(Bed { plane, isolated });
    libtest_mimic::run(&arguments, trials(Some((bed, runtime)))).exit_code()
}

fn trials(bed: Option<(Arc<Bed>, Arc<Runtime>)>) -> Vec<Trial> {
    macro_rules! trials {
        ($($name:ident),*) => { vec![$({
            let bed = bed.clone();
            Trial::test(stringify!($name), move || {
                let (bed, runtime) = bed.expect("listed only");
                Ok(runtime.block_on($name(&bed)).map_err(|error| format!("{error:?}"))?)
            })
        }),*] };
    }
    trials!(
        an_unbound_service_account_is_denied,
        a_bound_service_account_is_allowed_that_and_no_more,
        a_request_without_credentials_is_refused,
        the_service_has_the_address_that_pods_are_told,
        a_forwarded_port_serves_the_api_to_a_user,
        the_operator_has_the_rights_of_the_chart_and_no_more,
        pods_run_on_simulated_nodes_as_far_as_their_slots_go,
        an_api_server_that_restarts_has_forgotten_nothing
    )
}

const ACCOUNTS: &str = "
apiVersion: v1
kind: ServiceAccount
metadata: {name: unbound, namespace: default}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: reader, namespace: default}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: reader, namespace: default}
rules: [{apiGroups: [''], resources: [configmaps], verbs: [list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: reader, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: reader}
subjects: [{kind: ServiceAccount, name: reader, namespace: default}]
";

async fn account(bed: &Bed, name: &str) -> Result<Client> {
    bed.plane.apply(ACCOUNTS).await?;
    client_from(&bed.plane.kubeconfig_for_service_account("default", name).await?).await
}

fn code<T>(answer: Result<T, Error>) -> Result<u16> {
    match answer {
        Ok(_) => Ok(200),
        Err(Error::Api(status)) => Ok(status.code),
        Err(error) => bail!("no answer: {error}"),
    }
}

async fn an_unbound_service_account_is_denied(bed: &Bed) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(account(bed, "unbound").await?, "default");
    ensure!(code(maps.list(&ListParams::default()).await)? == 403);
    Ok(())
}

async fn a_bound_service_account_is_allowed_that_and_no_more(bed: &Bed) -> Result<()> {
    let client = account(bed, "reader").await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    // The API server learns of a new role a moment later.
    WAIT.until_ok("the account may list ConfigMaps", async || {
        let code = code(maps.list(&ListParams::default()).await)?;
        ensure!(code == 200, "the answer is {code}");
        Ok(())
    })
    .await?;
    ensure!(code(maps.delete("kube-root-ca.crt", &Default::default()).await)? == 403);
    ensure!(code(Api::<ConfigMap>::namespaced(client, "kube-system").list(&ListParams::default()).await)? == 403);
    Ok(())
}

async fn a_request_without_credentials_is_refused(bed: &Bed) -> Result<()> {
    let args = ["--token=nonsense", "get", "namespaces", "--kubeconfig=/dev/null", "--insecure-skip-tls-verify"];
    let server = format!("--server={}", bed.plane.url());
    let output = bed.plane.kubectl(&[&args[..], &[&server]].concat()).await?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && said.contains("Unauthorized"), "{said}");
    Ok(())
}

async fn the_service_has_the_address_that_pods_are_told(bed: &Bed) -> Result<()> {
    let services: Api<Service> = Api::default_namespaced(bed.plane.client());
    // The API server creates it when it is ready, or a moment later.
    let service = WAIT.until_ok("the service exists", async || Ok(services.get("kubernetes").await?)).await?;
    let address = service.spec.and_then(|spec| spec.cluster_ip);
    ensure!(address == Some(isolate::SERVICE_ADDRESS.to_string()), "{address:?}");
    if !bed.plane.address().is_loopback() {
        tokio::net::TcpStream::connect((isolate::SERVICE_ADDRESS, 443)).await?;
    }
    Ok(())
}

async fn a_forwarded_port_serves_the_api_to_a_user(bed: &Bed) -> Result<()> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    tokio::spawn(isolate::forward(listener, (bed.plane.address(), bed.plane.port()).into()));
    let path: PathBuf = bed.isolated.shared.join("kubeconfig");
    bed.plane.kubeconfig_for_host(&path, port)?;
    let namespaces: Api<Namespace> = Api::all(client_from(&path).await?);
    namespaces.get("default").await.context("through the forward")?;
    Ok(())
}

async fn the_operator_has_the_rights_of_the_chart_and_no_more(bed: &Bed) -> Result<()> {
    let kubeconfig = bed.plane.install_chart_rbac(&[]).await?;
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let answered = async |verb: &str, what: &str, answer: &str| {
        let output = bed.plane.kubectl(&["auth", "can-i", verb, what, "--all-namespaces", &kubeconfig]).await?;
        ensure!(String::from_utf8_lossy(&output.stdout).trim() == answer, "{verb} {what}: {output:?}");
        anyhow::Ok(())
    };
    // The API server learns of a new role, and kubectl of a new kind, a moment later.
    WAIT.until_ok("the operator may list claims", async || answered("list", "runnerclaims", "yes").await).await?;
    answered("list", "secrets", "no").await?;
    answered("delete", "nodes", "no").await
}

async fn pods_run_on_simulated_nodes_as_far_as_their_slots_go(bed: &Bed) -> Result<()> {
    let nodes = SimulatedNodes::start(&bed.plane).await?;
    nodes.add("board", 3, &[("board", "test")], &[("example.com/slot", "2")]).await?;
    let pods: Api<Pod> = Api::default_namespaced(bed.plane.client());
    for i in 0..7 {
        let slot = json!({ "limits": { "example.com/slot": "1" } });
        let spec = json!({
            "nodeSelector": { "board": "test" },
            "containers": [{ "name": "main", "image": "none", "resources": slot }],
        });
        let pod = serde_json::from_value(json!({ "metadata": { "name": format!("pod-{i}") }, "spec": spec }))?;
        pods.create(&PostParams::default(), &pod).await?;
    }
    WAIT.until_ok("six pods run and one waits", async || {
        let phases = pods.list(&ListParams::default()).await?.items.into_iter();
        let phases: Vec<_> = phases.filter_map(|pod| pod.status?.phase).collect();
        let count = |phase| phases.iter().filter(|other| *other == phase).count();
        ensure!((count("Running"), count("Pending")) == (6, 1), "{phases:?}");
        Ok(())
    })
    .await
}

async fn an_api_server_that_restarts_has_forgotten_nothing(bed: &Bed) -> Result<()> {
    succeeded("kubectl", bed.plane.kubectl(&["create", "namespace", "remembered"]).await?)?;
    bed.plane.restart_apiserver().await?;
    let namespaces: Api<Namespace> = Api::all(bed.plane.client());
    // A connection to the API server as it was may be tried first; what it does not know is an answer.
    let look = async || {
        let code = code(namespaces.get("remembered").await)?;
        ensure!(code == 200 || code == 404, "the answer is {code}");
        Ok(code)
    };
    let code = WAIT.until_ok("the API server answers", look).await?;
    ensure!(code == 200, "the namespace is forgotten");
    Ok(())
}
