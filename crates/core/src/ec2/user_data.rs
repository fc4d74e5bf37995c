//! The boot script of an EC2 instance: fetches the agent, checks it, and starts it.
//!
//! The values of a pool are untrusted data. They are embedded as base64, which a shell does not interpret, and decoded
//! into a file or a quoted variable.

use std::io::Write;

use base64::{Engine, prelude::BASE64_STANDARD};
use flate2::{Compression, write::GzEncoder};
use paddock_record::AgentConfig;

use super::network::Network;

/// EC2 refuses user data above this size, counted before it is base64-encoded for the API.
pub const USER_DATA_MAX: usize = 16 * 1024;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UserDataError {
    #[error(
        "the instance's user data would be {size} bytes, {} over EC2's limit of {USER_DATA_MAX}: shorten \
         preRunnerScript (or reuse.scrubScript, or caBundle), for example by letting it fetch what it runs",
        size - USER_DATA_MAX
    )]
    TooLong { size: usize },
    #[error("agent.url must be an http or https address without spaces or control characters, not {0:?}")]
    Url(String),
    #[error("proxy must have addresses without quotes, spaces or control characters, not {0:?}")]
    Proxy(String),
    #[error("agent.sha256 must be 64 hexadecimal digits, not {0:?}")]
    Sha256(String),
}

/// The script, not yet base64-encoded for the API. The same input always gives the same bytes, so that a launch
/// template changes only when its pool does.
pub fn user_data(
    config: &AgentConfig,
    agent_url: &str,
    agent_sha256: &str,
    network: Network,
) -> Result<String, UserDataError> {
    let script = format!("{}{}{FETCH}{START}", decode(config, agent_url, agent_sha256)?, network.script()?);
    match script.len() {
        size if size > USER_DATA_MAX => Err(UserDataError::TooLong { size }),
        _ => Ok(script),
    }
}

/// The first part of the script: writes the values of the pool where the rest expects them.
fn decode(config: &AgentConfig, url: &str, sha256: &str) -> Result<String, UserDataError> {
    let plain = |c: char| !c.is_control() && !c.is_whitespace();
    if !(url.starts_with("https://") || url.starts_with("http://")) || !url.chars().all(plain) {
        return Err(UserDataError::Url(url.to_owned()));
    }
    if sha256.len() != 64 || !sha256.chars().all(|c| c.is_ascii_hexdigit()) {
        return Err(UserDataError::Sha256(sha256.to_owned()));
    }
    let config = serde_json::to_vec(config).expect("strings and numbers are always JSON");
    Ok(DECODE
        .replace("@URL@", &BASE64_STANDARD.encode(url))
        .replace("@SHA256@", &BASE64_STANDARD.encode(sha256.to_ascii_lowercase()))
        .replace("@CONFIG@", &BASE64_STANDARD.encode(gzip(&config))))
}

pub(super) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).and_then(|()| encoder.finish()).expect("writing to memory does not fail")
}

const DECODE: &str = r#"#!/bin/bash
# Paddock: fetches the agent, checks it, and starts it. PADDOCK_ROOT moves everything below another directory.
set -euo pipefail
umask 077
root="${PADDOCK_ROOT:-}"
home="$root/opt/paddock" state="$root/var/lib/paddock" log="$root/var/log/paddock-agent.log"
mkdir -p "$home" "$state" "$root/var/log"
chmod 0755 "$home"
url="$(base64 -d <<<'@URL@')"
sha256="$(base64 -d <<<'@SHA256@')"
base64 -d <<<'@CONFIG@' | gzip -d >"$state/config.json"
rm -f "$state/environment"
"#;

/// A machine image may include the agent; only its checksum counts. An instance that cannot get its agent is useless,
/// so it shuts itself down.
const FETCH: &str = r#"
say() { echo "paddock: $*" | tee -a "$log" >&2; }
give_up() { say "$*: shutting down"; shutdown -h now; exit 1; }
checked() { (cd "$home" && sha256sum --check --status - <<<"$sha256  $1"); }
fetch() { curl --fail --silent --show-error --location --globoff --proto '=https,http' --connect-timeout 10 \
  --output "$home/fetched" --url "$url" 2>>"$log"; }
if ! checked paddock-agent 2>/dev/null; then
  for pause in 1 2 4 8 15 15 15 15 15 0; do
    fetch && break
    [ "$pause" != 0 ] || give_up "cannot fetch the agent from $url"
    sleep "$pause"
  done
  checked fetched || give_up "what $url serves does not have the checksum $sha256"
  chmod 0755 "$home/fetched"
  mv -f "$home/fetched" "$home/paddock-agent"
fi
"#;

/// The unit is enabled, because cloud-init runs user data at the first boot only. `--no-block`: cloud-init itself may be what
/// the network waits for. KillMode=process: the runner, and with it a job, outlives an agent that dies; the next agent
/// takes it over.
const START: &str = r#"
if [ -d "$root/run/systemd/system" ]; then
  units="$root/etc/systemd/system"
  mkdir -p "$units"
  cat >"$units/paddock-agent.service" <<UNIT
[Unit]
Description=Paddock agent
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
EnvironmentFile=-$state/environment
ExecStart="$home/paddock-agent" --config "$state/config.json"
Restart=always
RestartSec=5
KillMode=process

[Install]
WantedBy=multi-user.target
UNIT
  chmod 0644 "$units/paddock-agent.service"
  systemctl daemon-reload && systemctl enable paddock-agent.service || give_up "systemd does not take the agent's unit"
  exec systemctl start --no-block paddock-agent.service
fi
exec "$home/paddock-agent" --config "$state/config.json" >>"$log" 2>&1
"#;

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        fs,
        net::TcpListener,
        os::unix::fs::PermissionsExt,
        path::Path,
        process::{Command, Output, Stdio},
        time::Duration,
    };

    use paddock_bed_process::write_program;
    use paddock_record::RunnerArchive;
    use proptest::prelude::*;
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::api::Proxy;

    const SHA256: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn config(script: &str) -> AgentConfig {
        let config = AgentConfig::new("prod", "ci/linux", Duration::from_secs(600));
        AgentConfig { pre_runner_script: script.to_owned(), ..config }
    }

    fn bash(script: &str, args: &[&str], root: &Path) -> Output {
        let mut child = Command::new("bash")
            .args(args)
            .env("PADDOCK_ROOT", root)
            .env("PATH", format!("{}:{}", root.join("bin").display(), std::env::var("PATH").unwrap()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }

    /// A root whose `shutdown` only writes a file.
    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("bin")).unwrap();
        write_program(&root.path().join("bin/shutdown"), "#!/bin/sh\necho \"$*\" >\"$PADDOCK_ROOT/shutdown\"\n")
            .unwrap();
        root
    }

    /// Serves `body` to each request on a free port of loopback, and returns the address.
    fn serve(body: Vec<u8>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/paddock-agent", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let _ = std::io::Read::read(&mut stream, &mut [0; 4096]);
                let _ =
                    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
                let _ = stream.write_all(&body);
            }
        });
        url
    }

    fn hex(bytes: &[u8]) -> String {
        Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Text that means something to a shell, to JSON, or to neither.
    fn hostile() -> impl Strategy<Value = String> {
        prop_oneof![
            any::<String>(),
            Just("'; touch /tmp/paddock-was-here; '\"$(id)`id`\n\0\\\r\nEOF\n@CONFIG@ @URL@ ${HOME} %s ü𝄞".to_owned()),
            proptest::collection::vec(
                prop_oneof![
                    Just("'"),
                    Just("\""),
                    Just("\n"),
                    Just("$("),
                    Just(")"),
                    Just("\0"),
                    Just("`"),
                    Just("\\"),
                    Just("é")
                ],
                0..40
            )
            .prop_map(|parts| parts.concat()),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        #[test]
        fn the_values_of_a_pool_arrive_unchanged_and_are_never_run(
            texts in proptest::collection::vec(hostile(), 11),
            tail in "[!-~]{0,40}",
            numbers in any::<[u64; 3]>(),
        ) {
            let config = AgentConfig {
                cluster: texts[0].clone(),
                pool: texts[1].clone(),
                table: texts[2].clone(),
                region: Some(texts[3].clone()),
                pre_runner_script: texts[4].clone(),
                scrub_script: Some(texts[5].clone()),
                runner_version: Some(texts[6].clone()),
                runner_archives: BTreeMap::from([(
                    texts[7].clone(),
                    RunnerArchive { url: texts[8].clone(), sha256: Some(texts[9].clone()) },
                )]),
                listed_runner_version: Some(texts[10].clone()),
                runner_metadata_access: true,
                created_lifetime_seconds: numbers[0],
                heartbeat_seconds: numbers[1],
                poll_milliseconds: numbers[2],
            };
            let url = format!("https://example.com/{tail}");
            let root = machine();
            let whole = user_data(&config, &url, SHA256, Network::default()).unwrap();
            let syntax = bash(&whole, &["-n"], root.path());
            prop_assert!(syntax.status.success(), "{}", String::from_utf8_lossy(&syntax.stderr));

            let show = "printf '%s\\n%s' \"$url\" \"$sha256\"";
            let run = bash(&(decode(&config, &url, SHA256).unwrap() + show), &[], root.path());
            prop_assert_eq!(String::from_utf8_lossy(&run.stderr), "");
            prop_assert_eq!(String::from_utf8_lossy(&run.stdout), format!("{url}\n{SHA256}"));
            let written = root.path().join("var/lib/paddock/config.json");
            prop_assert_eq!(fs::metadata(&written).unwrap().permissions().mode() & 0o777, 0o600);
            prop_assert_eq!(serde_json::from_slice::<AgentConfig>(&fs::read(written).unwrap()).unwrap(), config);
        }
    }

    #[test]
    fn an_agent_with_the_right_checksum_is_installed_and_started() {
        let agent = b"#!/bin/sh\necho \"started with $*\"\n".to_vec();
        let root = machine();
        let run =
            |url: &str| bash(&user_data(&config(""), url, &hex(&agent), Network::default()).unwrap(), &[], root.path());
        let log = || fs::read_to_string(root.path().join("var/log/paddock-agent.log")).unwrap();
        let started = format!("started with --config {}/var/lib/paddock/config.json\n", root.path().display());

        assert!(run(&serve(agent.clone())).status.success(), "{}", log());
        assert_eq!(log(), started);
        // The second boot finds the agent there and needs no network.
        assert!(run("http://127.0.0.1:1/gone").status.success(), "{}", log());
        assert_eq!(log(), started.repeat(2));
        assert!(!root.path().join("etc").exists(), "without systemd there is no unit");
    }

    #[test]
    fn where_there_is_systemd_the_agent_is_a_unit_that_comes_back_after_a_reboot() {
        let agent = b"#!/bin/sh\necho \"started with $*\"\n".to_vec();
        let root = machine();
        let stub = "#!/bin/sh\necho \"$*\" >>\"$PADDOCK_ROOT/systemctl\"\n";
        write_program(&root.path().join("bin/systemctl"), stub).unwrap();
        fs::create_dir_all(root.path().join("run/systemd/system")).unwrap();
        let run = bash(
            &user_data(&config(""), &serve(agent.clone()), &hex(&agent), Network::default()).unwrap(),
            &[],
            root.path(),
        );
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        let read = |name: &str| fs::read_to_string(root.path().join(name)).unwrap_or_default();
        let calls = "daemon-reload\nenable paddock-agent.service\nstart --no-block paddock-agent.service\n";
        assert_eq!(read("systemctl"), calls);
        assert!(!read("var/log/paddock-agent.log").contains("started"), "systemd starts it, and not the script");

        let unit = read("etc/systemd/system/paddock-agent.service");
        assert!(unit.contains("\nRestart=always\n") && unit.contains("\nKillMode=process\n"), "{unit}");
        assert!(unit.contains("[Install]\nWantedBy=multi-user.target\n"), "{unit}");
        // A reboot: the script does not run again, and systemd starts what is enabled.
        let started = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
        let again = bash(started, &[], root.path());
        let config = root.path().join("var/lib/paddock/config.json");
        let said = String::from_utf8_lossy(&again.stdout).into_owned();
        assert_eq!(said, format!("started with --config {}\n", config.display()));
    }

    #[test]
    fn an_agent_comes_through_the_proxy_and_inherits_it_with_the_certificates() {
        let agent = b"#!/bin/sh\nenv\n".to_vec();
        let root = machine();
        // It answers every request, those to a proxy too.
        let proxy = serve(agent.clone()).replace("/paddock-agent", "");
        let proxy = Proxy { http: Some(proxy), https: None, no_proxy: vec![".internal".into(), "10.0.0.0/8".into()] };
        let ours = "-----BEGIN CERTIFICATE-----\nb3Vycw==\n-----END CERTIFICATE-----\n";
        let network = Network { proxy: Some(&proxy), ca_bundle: Some(ours) };
        let script = user_data(&config(""), "http://agents.invalid/agent", &hex(&agent), network).unwrap();
        let run = bash(&script, &[], root.path());
        let log = fs::read_to_string(root.path().join("var/log/paddock-agent.log")).unwrap();
        assert!(run.status.success(), "{log}");
        let home = root.path().join("opt/paddock");
        for (name, value) in [
            ("http_proxy", proxy.http.clone().unwrap()),
            ("HTTP_PROXY", proxy.http.clone().unwrap()),
            ("no_proxy", "localhost,127.0.0.1,::1,169.254.169.254,fd00:ec2::254,.internal,10.0.0.0/8".into()),
            ("CURL_CA_BUNDLE", home.join("ca-bundle.pem").display().to_string()),
            ("SSL_CERT_FILE", home.join("ca-bundle.pem").display().to_string()),
            ("NODE_EXTRA_CA_CERTS", home.join("ca.pem").display().to_string()),
        ] {
            assert!(log.lines().any(|line| line == format!("{name}={value}")), "{name}: {log}");
        }
        assert_eq!(fs::read_to_string(home.join("ca.pem")).unwrap(), ours);
        let bundle = fs::read(home.join("ca-bundle.pem")).unwrap();
        assert!(bundle.ends_with(ours.as_bytes()));
        let system = fs::read("/etc/ssl/certs/ca-certificates.crt").unwrap_or_default();
        assert!(bundle.starts_with(&system), "the image's own certificates are kept");
        assert_eq!(fs::metadata(home.join("ca-bundle.pem")).unwrap().permissions().mode() & 0o777, 0o644, "for jobs");
    }

    #[test]
    fn a_proxy_that_systemd_would_read_as_something_else_is_refused() {
        for address in ["http://a b", "http://a'b", "http://a\"b", "http://a\nPATH=/tmp", "http://a\\b"] {
            let proxy = Proxy { https: Some(address.into()), ..Proxy::default() };
            let network = Network { proxy: Some(&proxy), ca_bundle: None };
            let refused = user_data(&config(""), "https://a", SHA256, network);
            assert_eq!(refused, Err(UserDataError::Proxy(address.to_owned())));
        }
    }

    #[test]
    fn an_agent_with_a_wrong_checksum_is_never_run_and_the_instance_ends_itself() {
        let root = machine();
        let url = serve(b"#!/bin/sh\ntouch \"$PADDOCK_ROOT/pwned\"\n".to_vec());
        let run = bash(&user_data(&config(""), &url, SHA256, Network::default()).unwrap(), &[], root.path());
        assert!(!run.status.success());
        assert!(!root.path().join("pwned").exists() && !root.path().join("opt/paddock/paddock-agent").exists());
        assert_eq!(fs::read_to_string(root.path().join("shutdown")).unwrap(), "-h now\n");
        let log = fs::read_to_string(root.path().join("var/log/paddock-agent.log")).unwrap();
        assert!(log.contains(&format!("what {url} serves does not have the checksum {SHA256}")), "{log}");
    }

    #[test]
    fn a_script_that_does_not_fit_says_by_how_much_and_what_to_shorten() {
        // Random letters, because repeated ones compress to nothing.
        let letters = |n: usize| (0..n).map(|i| hex(&i.to_le_bytes())[..2].to_owned()).collect::<String>();
        let url = "https://example.com/agent";
        assert!(
            user_data(&config(&letters(8_000)), url, SHA256, Network::default())
                .is_ok_and(|script| script.len() <= USER_DATA_MAX)
        );
        let error = user_data(&config(&letters(20_000)), url, SHA256, Network::default()).unwrap_err();
        let UserDataError::TooLong { size } = error else { panic!("{error}") };
        assert!(
            error
                .to_string()
                .contains(&format!("{} over EC2's limit of 16384: shorten preRunnerScript", size - USER_DATA_MAX)),
            "{error}"
        );
    }

    #[test]
    fn an_address_or_checksum_that_is_none_is_refused() {
        let of = |url: &str, sha256: &str| user_data(&config(""), url, sha256, Network::default()).map(|_| ());
        for url in ["", "s3://bucket/agent", "file:///etc/passwd", "https://a b", "https://a\n", "https://a\0"] {
            assert_eq!(of(url, SHA256), Err(UserDataError::Url(url.to_owned())));
        }
        for sha256 in ["", "abc", &SHA256.replace('e', "g"), &SHA256[1..], &format!("{SHA256}\n")] {
            assert_eq!(of("https://a", sha256), Err(UserDataError::Sha256(sha256.to_owned())));
        }
    }
}
