//! `make bed`: runs everything that the demo and the tests use, for outside programs.
//!
//! AWS, GitHub and the operator have the same port in the bed as on the host's loopback, so that their URLs (such as a
//! queue's URL or a webhook's target) work on both sides.

mod admin;
mod doors;
mod env_file;

use std::{
    io::{Write, stderr, stdout},
    sync::Arc,
};

use anyhow::Result;
use paddock_record::table_name;
use serde_json::json;

use self::{admin::Admin, doors::Doors, env_file::EnvFile};
use crate::{
    boards::Boards,
    device_plugin::DevicePlugin,
    isolate::{self, Isolated},
    kube::succeeded,
    kwok::{self, SimulatedNodes},
    node::{self, Node},
    operator::{Additions, Supervisor},
    process::Signal,
    stage::{self, CLUSTER, ORGANIZATION, REPOSITORY, Stage, WEBHOOK_SECRET},
    terminal,
};

const NAMESPACE: &str = "bed";
const EC2_POOL: &str = "linux";
const BOARD_POOL: &str = "boards";
/// The label of jobs for the board pool.
const LABEL: &str = "riscv";
const BOARD: &str = "bed-board";
const RESOURCE: &str = "riseproject.com/runner";
/// Unlike simulated nodes not named after the board, because its runners are real.
const REAL_NODE: &str = "real-board";
const REAL_SLOTS: u32 = 1;

pub struct Options {
    /// The number of simulated nodes, with one slot each.
    pub nodes: usize,
    pub operator: bool,
}

/// Serves until Ctrl-C or SIGTERM. Prints the path of the env file to standard output.
pub fn run(options: &Options) -> Result<()> {
    let tools = [stage::TOOLS, &kwok::TOOLS, &node::TOOLS].concat();
    let isolated = isolate::enter(isolate::Options { tools: &tools, listen: Doors::COUNT })?;
    if terminal::run(serve(isolated, options))? == Some(Signal::SIGINT) {
        print("\nended: everything is gone");
    }
    Ok(())
}

async fn serve(mut isolated: Isolated, options: &Options) -> Result<()> {
    print("Paddock's bed: a cluster, AWS and GitHub of its own, on this machine alone.\n");
    let doors = Doors::open(&mut isolated)?;
    let ports = stage::Options { aws_port: doors.aws, github_port: doors.github, ..stage::Options::default() };
    let stage = step("Kubernetes, DynamoDB, SQS, EC2 and GitHub", Stage::start_with(&isolated, ports)).await?;
    let stage = Arc::new(stage);
    doors.admit_kubectl(&stage.kube)?;

    let supervisor = Arc::new(Supervisor::new(stage.clone(), Doors::address(doors.operator)));
    tokio::select! {
        never = supervisor.watch(print) => never,
        outcome = offer(options, isolated, doors, &stage, &supervisor) => outcome,
    }
}

/// Sets up everything on the stage for outside programs.
async fn offer(
    options: &Options,
    isolated: Isolated,
    doors: Doors,
    stage: &Arc<Stage>,
    supervisor: &Arc<Supervisor>,
) -> Result<()> {
    let operator = async {
        if options.operator {
            supervisor.start(Additions::default()).await?;
        }
        stage.send_webhooks_to(supervisor.address());
        pools(stage).await
    };
    let what = format!("{}one EC2 and one board pool", if options.operator { "the operator with " } else { "" });
    step(&what, operator).await?;
    let boards = async { tokio::try_join!(simulated(stage, options.nodes), real(stage, &isolated)) };
    let kubelet = if isolated.node_possible.is_ok() { " and a real kubelet" } else { "" };
    let (_simulated, real) = step(&format!("{} simulated boards{kubelet}", options.nodes), boards).await?;
    if let Err(why) = &real {
        print(&format!("    {why}"));
    }
    let slots = options.nodes + if real.is_ok() { REAL_SLOTS as usize } else { 0 };
    step("all of it ready", until_ready(stage, slots, options.operator)).await?;

    let file = EnvFile::write(isolated.shared.join("env"), &values(stage, &doors)?)?;
    let path = file.path().display();
    let _ = writeln!(stdout(), "{path}"); // standard output may be closed
    print("\nUse it from another terminal (CONTRIBUTING.md has more):\n");
    print(&format!("  . {path}"));
    print("  kubectl get rpools,rclaims,workers -n $BED_NAMESPACE");
    print("  curl $BED_ADMIN_URL/machines");
    print("\nCtrl-C or SIGTERM ends it and leaves nothing behind.");
    admin::serve(doors.admin, Admin::new(stage.clone(), supervisor.clone())).await
}

/// The two pools; the EC2 pool keeps one machine warm.
async fn pools(stage: &Stage) -> Result<()> {
    stage.namespace(NAMESPACE).await?;
    let ec2 = stage.ec2_pool(NAMESPACE, EC2_POOL, json!({ "minIdle": 1, "maxInstances": 20 }));
    let boards = stage.board_pool(NAMESPACE, BOARD_POOL, BOARD, LABEL, json!({ "resourceName": RESOURCE }));
    stage.kube.apply(&format!("{ec2}\n---\n{boards}\n")).await
}

/// The board's simulated nodes, and the runners in their pods.
async fn simulated(stage: &Stage, count: usize) -> Result<(SimulatedNodes, Boards)> {
    let nodes = SimulatedNodes::start(&stage.kube).await?;
    Boards::add(&nodes, BOARD, count, RESOURCE).await?;
    Ok((nodes, Boards::play(stage.kube.client(), stage.github.control(), BOARD)))
}

/// One more node of the board with a real kubelet; or why there is none, in one sentence.
async fn real(stage: &Stage, isolated: &Isolated) -> Result<Result<(Node, DevicePlugin), String>> {
    if let Err(why) = &isolated.node_possible {
        return Ok(Err(why.clone()));
    }
    let start = async {
        let node = stage.board_node(REAL_NODE).await?;
        let plugin = DevicePlugin::start(&stage.kube, &node, BOARD, RESOURCE, REAL_SLOTS).await?;
        anyhow::Ok((node, plugin))
    };
    Ok(start.await.map_err(|error| {
        let error = format!("{error:#}");
        format!("the real kubelet did not start: {}", error.lines().next().unwrap_or_default())
    }))
}

async fn until_ready(stage: &Stage, slots: usize, operator: bool) -> Result<()> {
    if slots > 0 {
        let wait = ["wait", "--for=condition=Ready", "--timeout=300s", "nodes", "--all"];
        succeeded("kubectl wait", stage.kube.kubectl(&wait).await?)?;
    }
    if operator {
        stage.until(NAMESPACE, &format!("rpool/{EC2_POOL}"), "{.status.workers.idle}=1").await?;
    }
    if operator && slots > 0 {
        stage.until(NAMESPACE, &format!("rpool/{BOARD_POOL}"), &format!("{{.status.slots.free}}={slots}")).await?;
    }
    Ok(())
}

/// The variables of the env file.
fn values(stage: &Stage, doors: &Doors) -> Result<Vec<(&'static str, String)>> {
    let url = |port: u16| format!("http://{}", Doors::address(port));
    let aws = |name: &str| stage.aws.env().into_iter().find(|(key, _)| key == name).map_or(String::new(), |(_, v)| v);
    Ok(vec![
        ("KUBECONFIG", doors.kubeconfig.display().to_string()),
        ("AWS_ENDPOINT_URL", aws("AWS_ENDPOINT_URL")),
        ("AWS_ACCESS_KEY_ID", aws("AWS_ACCESS_KEY_ID")),
        ("AWS_SECRET_ACCESS_KEY", aws("AWS_SECRET_ACCESS_KEY")),
        ("AWS_REGION", aws("AWS_REGION")),
        ("PADDOCK_TABLE", table_name(CLUSTER)),
        ("PADDOCK_URL", url(doors.operator)),
        // The operator serves all of these on one port.
        ("PADDOCK_INTERNAL_URL", url(doors.operator)),
        ("PADDOCK_PAGES_URL", url(doors.operator)),
        ("WEBHOOK_SECRET", WEBHOOK_SECRET.to_owned()),
        ("GITHUB_API_URL", format!("{}/api/v3", url(doors.github))),
        ("GITHUB_ADMIN_URL", format!("{}/_admin", url(doors.github))),
        ("AWS_ADMIN_URL", format!("{}/_admin", url(doors.aws))),
        ("BED_ADMIN_URL", format!("http://{}", doors.admin.local_addr()?)),
        ("BED_NAMESPACE", NAMESPACE.to_owned()),
        ("BED_OWNER", ORGANIZATION.to_owned()),
        ("BED_REPOSITORY", REPOSITORY.to_owned()),
    ])
}

async fn step<T>(what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    terminal::step(stderr(), what, work).await
}

/// Prints to standard error: standard output is for programs.
fn print(text: &str) {
    eprintln!("{text}");
}
