use std::{fs, path::Path, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use paddock_bed_aws::{
    Aws, InstanceState, ServedFile,
    machines::{MachineState, Machines, Options},
};

use tokio::sync::{Mutex, MutexGuard};

use crate::{
    fleet::{fleet, ids, template},
    support::{ec2, eventually, texts},
};

/// Launches one instance that runs `script` and waits for `mark` in its log.
async fn launch(aws: &Aws, machines: &Machines, name: &str, script: &str, spot: bool, mark: &str) -> String {
    template(aws, name, &format!("#!/bin/bash\nset -eu\n{script}\n")).await;
    let id = launch_again(aws, name, spot).await;
    eventually(&format!("{mark:?} of {name}"), async || machines.log(&id).contains(mark).then_some(())).await;
    id
}

async fn launch_again(aws: &Aws, name: &str, spot: bool) -> String {
    let usage = if spot { "spot" } else { "on-demand" };
    let more = [("TargetCapacitySpecification.DefaultTargetCapacityType", usage)];
    let subnet = &aws.subnets()[0].0;
    let (_, text) = fleet(aws, name, 1, &[(subnet, &[("InstanceType", "m5.large")])], &more).await;
    ids(&text).pop().unwrap_or_else(|| panic!("{text}"))
}

/// Machines run the instances of all tests, so these tests run one at a time.
async fn start(aws: &Aws, options: Options) -> (MutexGuard<'static, ()>, Machines) {
    static MACHINES_LOCK: Mutex<()> = Mutex::const_new(());
    (MACHINES_LOCK.lock().await, Machines::start(aws, options).unwrap())
}

fn state(aws: &Aws, id: &str) -> InstanceState {
    aws.instances().into_iter().find(|instance| instance.id == id).unwrap().state
}

/// Whether a process with these words in its command line is running. A zombie's command line is empty.
fn lives(words: &str) -> bool {
    let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let mut lines = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    lines.any(|line| String::from_utf8_lossy(&line).replace('\0', " ").contains(words))
}

async fn until_gone(words: &str) {
    eventually(&format!("the end of {words:?}"), async || (!lives(words)).then_some(())).await;
}

pub async fn user_data_runs_with_metadata_of_its_own(aws: &Aws) {
    let ami = tempfile::tempdir_in(aws.dir()).unwrap();
    fs::create_dir(ami.path().join("opt")).unwrap();
    fs::write(ami.path().join("opt/runner"), "from the image").unwrap();
    let env = vec![("EXTRA".to_owned(), "addition".to_owned())];
    let (_turn, machines) = start(aws, Options { ami: Some(ami.path().to_owned()), env, ..Options::default() }).await;
    let script = r#"
imds=$AWS_EC2_METADATA_SERVICE_ENDPOINT/latest
echo "without a token: $(curl -s -o /dev/null -w '%{http_code}' $imds/meta-data/instance-id)"
token=$(curl -sf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 21600' $imds/api/token)
get() { curl -sf -H "X-aws-ec2-metadata-token: $token" "$imds/$1"; }
echo "id: $(get meta-data/instance-id) type: $(get meta-data/instance-type) region: $(get meta-data/placement/region)"
echo "pool: $(get meta-data/tags/instance/paddock:pool) life: $(get meta-data/instance-life-cycle)"
echo "role: $(get meta-data/iam/security-credentials/) key: $(get meta-data/iam/security-credentials/paddock-runner)"
echo "document: $(get dynamic/instance-identity/document)"
get user-data | cmp - "$0" && echo "user data is this script"
get meta-data/spot/instance-action || echo "no interruption"
cat "$PADDOCK_ROOT/opt/runner"; echo mine > "$PADDOCK_ROOT/opt/runner"; echo " $EXTRA"
echo all done"#;
    let id = launch(aws, &machines, "metadata", script, false, "all done").await;
    let log = machines.log(&id);
    let key = format!("ASIA{}", id[2..].to_uppercase());
    for expected in [
        "without a token: 401",
        &format!("id: {id} type: m5.large region: us-east-1"),
        "pool: metadata life: on-demand",
        "role: paddock-runner",
        &key,
        &format!("\"instanceId\":\"{id}\""),
        "user data is this script",
        "no interruption",
        "from the image addition",
    ] {
        assert!(log.contains(expected), "{expected:?} is not in\n{log}");
    }
    assert_eq!(fs::read_to_string(ami.path().join("opt/runner")).unwrap(), "from the image");
}

pub async fn and_dies_with_the_instance(aws: &Aws) {
    let (_turn, machines) = start(aws, Options::default()).await;
    let script = "setsid sleep 7654321 & sleep 7654322 & echo started; wait";
    let id = launch(aws, &machines, "mortal", script, false, "started").await;
    eventually("both children", async || (lives("sleep 7654321") && lives("sleep 7654322")).then_some(())).await;
    ec2(aws, "TerminateInstances", &[("InstanceId.1", &id)]).await;
    until_gone("sleep 7654321").await;
    until_gone("sleep 7654322").await;
    eventually("the end of its files", async || (!machines.root(&id).exists()).then_some(())).await;
    assert!(machines.log(&id).contains("started"));
}

pub async fn shutdown_terminates_as_the_template_says(aws: &Aws) {
    let (_turn, machines) = start(aws, Options::default()).await;
    let id = launch(aws, &machines, "suicidal", "echo bye; shutdown -h now; sleep 100", false, "bye").await;
    eventually("the termination", async || (state(aws, &id) == InstanceState::Terminated).then_some(())).await;
    let (_, text) = ec2(aws, "DescribeInstances", &[("InstanceId.1", &id)]).await;
    assert!(texts(&text, "name").contains(&"terminated".to_owned()), "{text}");
    eventually("the machine to be gone", async || (!machines.list().contains_key(&id)).then_some(())).await;
    assert!(text.contains("<code>Client.InstanceInitiatedShutdown</code>"), "{text}");
    // The console outlives the machine.
    let (_, text) = ec2(aws, "GetConsoleOutput", &[("InstanceId", &id)]).await;
    let output = STANDARD.decode(texts(&text, "output").pop().unwrap()).unwrap();
    assert!(String::from_utf8_lossy(&output).contains("bye"), "{text}");
    let (_, text) = ec2(aws, "GetConsoleOutput", &[("InstanceId", "i-00000000000000bad")]).await;
    assert!(text.contains("InvalidInstanceID.NotFound"), "{text}");
}

pub async fn spot_instance_is_announced_then_taken(aws: &Aws) {
    let (_turn, machines) = start(aws, Options::default()).await;
    let script = r#"
imds=$AWS_EC2_METADATA_SERVICE_ENDPOINT/latest
token=$(curl -sf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 21600' $imds/api/token)
echo waiting
until curl -sf -H "X-aws-ec2-metadata-token: $token" $imds/meta-data/spot/instance-action; do sleep 0.1; done
echo " warned"; sleep 100"#;
    let id = launch(aws, &machines, "reclaimed", script, true, "waiting").await;
    machines.interrupt_spot(&id, Duration::from_secs(3600)).unwrap();
    eventually("the warning", async || machines.log(&id).contains("\"action\":\"terminate\"").then_some(())).await;
    assert_eq!(state(aws, &id), InstanceState::Running, "an hour is left");
    machines.interrupt_spot(&id, Duration::from_secs(1)).unwrap();
    eventually("the end", async || (state(aws, &id) == InstanceState::Terminated).then_some(())).await;
    let (_, text) = ec2(aws, "DescribeInstances", &[("InstanceId.1", &id)]).await;
    assert!(text.contains("<code>Server.SpotInstanceTermination</code>"), "{text}");
    let steady = launch(aws, &machines, "steady", "echo up", false, "up").await;
    assert!(machines.interrupt_spot(&steady, Duration::ZERO).is_err());
}

pub async fn frozen_machine_stops_and_thaws(aws: &Aws) {
    let (_turn, machines) = start(aws, Options::default()).await;
    let script = "setsid bash -c 'while :; do echo beat; sleep 0.05; done'";
    let id = launch(aws, &machines, "heart", script, false, "beat").await;
    let beats = || machines.log(&id).matches("beat").count();
    machines.freeze(&id).unwrap();
    assert_eq!(machines.list()[&id], MachineState::Frozen);
    let frozen = beats();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(beats() <= frozen + 1, "the beat that was under way may end, no other begins");
    machines.thaw(&id).unwrap();
    eventually("more beats", async || (beats() > frozen + 2).then_some(())).await;
}

pub async fn crashed_machine_leaves_its_instance_running(aws: &Aws) {
    let (_turn, machines) = start(aws, Options::default()).await;
    let id = launch(aws, &machines, "crashed", "echo up; sleep 7654323", false, "up").await;
    machines.crash(&id).unwrap();
    until_gone("sleep 7654323").await;
    assert_eq!((state(aws, &id), machines.list()[&id]), (InstanceState::Running, MachineState::Dead));
}

pub async fn failed_boot_runs_nothing(aws: &Aws) {
    let (_turn, machines) = start(aws, Options { boot_delay: Duration::from_millis(100), ..Options::default() }).await;
    template(aws, "stillborn", "#!/bin/sh\necho alive\n").await;
    let booted = async |id: &str| eventually("the machine", async || machines.list().get(id).copied()).await;
    machines.fail_next_boots(u32::MAX);
    let dead = launch_again(aws, "stillborn", false).await;
    assert_eq!(booted(&dead).await, MachineState::Dead);
    machines.fail_next_boots(0);
    let alive = launch_again(aws, "stillborn", false).await;
    assert_eq!(booted(&alive).await, MachineState::Running);
    eventually("the user data", async || machines.log(&alive).contains("alive").then_some(())).await;
    assert!(machines.log(&dead).is_empty() && state(aws, &dead) == InstanceState::Running);
}

pub async fn nothing_is_left_when_dropped(aws: &Aws) {
    let (_turn, machines) = start(aws, Options::default()).await;
    let id = launch(aws, &machines, "dropped", "echo up; setsid sleep 7654324", false, "up").await;
    let dir = machines.root(&id).ancestors().nth(2).map(Path::to_owned).unwrap();
    drop(machines);
    until_gone("sleep 7654324").await;
    assert!(!dir.exists() && state(aws, &id) == InstanceState::Running);
}

pub async fn the_agent_is_fetched_and_checked(aws: &Aws) {
    let agent = aws.dir().join("paddock-agent");
    fs::write(&agent, "#!/bin/sh\necho the agent runs\n").unwrap();
    let ServedFile { url, sha256 } = aws.serve_file(&agent).unwrap();
    let (_turn, machines) = start(aws, Options::default()).await;
    let script =
        format!(r#"curl -fsS -o agent '{url}'; echo '{sha256}  agent' | sha256sum -c -; chmod +x agent; exec ./agent"#);
    launch(aws, &machines, "fetcher", &script, false, "the agent runs").await;
}

pub async fn a_hundred_machines_run_side_by_side(aws: &Aws) {
    let (_turn, machines) = start(aws, Options::default()).await;
    template(aws, "hundred", "#!/bin/sh\necho up\nexec sleep 7654325\n").await;
    let subnet = &aws.subnets()[0].0;
    let (_, text) = fleet(aws, "hundred", 100, &[(subnet, &[("InstanceType", "m5.large")])], &[]).await;
    let ids = ids(&text);
    assert_eq!(ids.len(), 100, "{text}");
    let up = || ids.iter().filter(|id| machines.log(id).contains("up")).count();
    eventually("all to be up", async || (up() == 100).then_some(())).await;
    let keys: Vec<_> = (1..=100).map(|index| format!("InstanceId.{index}")).collect();
    let fields: Vec<_> = keys.iter().zip(&ids).map(|(key, id)| (key.as_str(), id.as_str())).collect();
    assert_eq!(ec2(aws, "TerminateInstances", &fields).await.0, 200);
    until_gone("sleep 7654325").await;
    eventually("all to be gone", async || ids.iter().all(|id| !machines.list().contains_key(id)).then_some(())).await;
}
