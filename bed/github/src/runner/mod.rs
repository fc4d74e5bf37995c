//! The stand-in for GitHub's Actions runner: the same commands, files, output and exit statuses as `config.sh` and
//! `run.sh`, against the simulator. What it follows is actions/runner v2.336.0; comments name the file.

mod config;
pub(crate) mod files;
mod job;
mod listen;

use std::{
    fs,
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

use paddock_bed_process::write_program;

/// The version that the stand-in reports, unless a file `.version` in its directory has another.
pub const VERSION: &str = "2.330.0";

const USAGE: &str = "Commands:
  config --unattended --url URL --token T [--name N] [--labels L] [--no-default-labels] [--runnergroup G]
         [--replace] [--ephemeral] [--disableupdate] [--work DIR]
  config remove --token T
  config --version
  listener warmup
  run [--jitconfig CONFIG]
  jit        (with the config in RUNNER_JITCONFIG)";

/// Runs a command of the stand-in; `args` is what follows the program's name.
pub fn main(mut args: Vec<String>) -> ExitCode {
    args.extend(inputs(std::env::vars()));
    note(&format!("INFO Listener] Arguments parsed: {}", args.first().map_or("", String::as_str)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be built");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = runtime.block_on(async {
        match args.as_slice() {
            // Runner.cs handles `--version` before every command.
            ["config", "--version"] => {
                println!("{}", version());
                Ok(())
            }
            // Runner.cs loads all assemblies and prints nothing.
            ["listener", "warmup"] => {
                note("INFO Runner] Load assembly: all of them.");
                Ok(())
            }
            ["config", "remove", options @ ..] => config::remove(&Options(options)).await,
            ["config", options @ ..] => config::configure(&Options(options)).await,
            ["run", options @ ..] => match Options(options).value("jitconfig") {
                Some(config) => listen::run_jit(&config).await,
                None => listen::run_configured().await,
            },
            ["jit"] => match std::env::var("RUNNER_JITCONFIG") {
                Ok(config) => listen::run_jit(&config).await,
                Err(_) => Err("RUNNER_JITCONFIG holds no JIT config".into()),
            },
            _ => Err(USAGE.into()),
        }
    });
    // Background tasks, such as an open long poll, must not delay the exit.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { status, message }) => {
            eprintln!("{message}");
            note(&format!("ERR  Listener] {message}"));
            status.into()
        }
    }
}

/// The version of this runner.
fn version() -> String {
    fs::read_to_string(".version").map_or_else(|_| VERSION.to_owned(), |version| version.trim().to_owned())
}

/// Writes a line of the runner's log about itself, where it is installed in the current directory.
fn note(line: &str) {
    let now = jiff::Timestamp::now();
    if Path::new("run.sh").exists() && fs::create_dir_all("_diag").is_ok() {
        let name = format!("_diag/Runner_{}-utc.log", now.strftime("%Y%m%d-%H%M%S"));
        if let Ok(mut file) = fs::File::options().create(true).append(true).open(name) {
            let _ = writeln!(file, "[{} {line}", now.strftime("%Y-%m-%d %H:%M:%SZ"));
        }
    }
}

/// Options from `ACTIONS_RUNNER_INPUT_<NAME>`, which keeps secrets off the command line. Arguments take precedence.
fn inputs(variables: impl Iterator<Item = (String, String)>) -> Vec<String> {
    let option = |(name, value): (String, String)| {
        let name = name.strip_prefix("ACTIONS_RUNNER_INPUT_")?;
        Some([format!("--{}", name.to_lowercase()), value])
    };
    variables.filter_map(option).flatten().collect()
}

/// Why the runner ends, and with which exit status (`src/Runner.Common/Constants.cs`).
struct Failure {
    status: u8,
    message: String,
}

/// A terminated error, which run.sh does not retry.
impl<T: Into<String>> From<T> for Failure {
    fn from(message: T) -> Self {
        Self { status: 1, message: message.into() }
    }
}

type Outcome<T = ()> = Result<T, Failure>;

/// The real runner's prefix for options in the environment.
const INPUT: &str = "ACTIONS_RUNNER_INPUT_";

/// `--name value` and `--flag`, like the real runner.
struct Options<'a>(&'a [&'a str]);

impl Options<'_> {
    fn position(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|arg| arg.strip_prefix("--").is_some_and(|arg| arg.eq_ignore_ascii_case(name)))
    }

    fn value(&self, name: &str) -> Option<String> {
        let given = self.position(name).and_then(|at| self.0.get(at + 1)).filter(|value| !value.starts_with("--"));
        given.map(|&value| value.to_owned()).or_else(|| std::env::var(format!("{INPUT}{}", name.to_uppercase())).ok())
    }

    fn flag(&self, name: &str) -> bool {
        self.position(name).is_some() || self.value(name).is_some_and(|value| value.eq_ignore_ascii_case("true"))
    }

    fn required(&self, name: &str) -> Outcome<String> {
        let value = self.value(name).filter(|value| !value.is_empty());
        let missing = || format!("Invalid configuration provided for {name}. Terminating unattended configuration.");
        value.ok_or_else(|| missing().into())
    }
}

/// Writes `config.sh`, `run.sh` and `bin/Runner.Listener`, as a machine image has them in `actions-runner/`, that run the
/// stand-in through `command` (a program, and arguments that come first). Like the real ones they refuse to run as root
/// unless `RUNNER_ALLOW_RUNASROOT` is set. Where a file `.missing` is there, its text stands for a missing library.
pub fn write_runner_dir(dir: &Path, command: &[&str]) -> io::Result<()> {
    fs::create_dir_all(dir.join("bin"))?;
    let quoted: Vec<String> = command.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
    let scripts = [("config.sh", CONFIG), ("run.sh", RUN), ("bin/Runner.Listener", LISTENER)];
    for (name, script) in scripts {
        write_program(&dir.join(name), script.replace("@COMMAND@", &quoted.join(" ")))?;
    }
    Ok(())
}

/// `src/Misc/layoutroot/config.sh`, which checks libraries before anything else, and `env.sh`.
const CONFIG: &str = r#"#!/bin/bash
if [ "$(id -u)" -eq 0 ] && [ -z "$RUNNER_ALLOW_RUNASROOT" ]; then
    echo "Must not run with sudo"
    exit 1
fi
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
if [ -s .missing ]; then
    cat .missing
    echo "Execute sudo ./bin/installdependencies.sh to install any missing Dotnet Core 6.0 dependencies."
    exit 1
fi
[ -f .env ] || : >.env
echo "$PATH" >.path
exec @COMMAND@ config "$@"
"#;

/// `src/Misc/layoutroot/run.sh` and `run-helper.sh.template`: what the listener's exit status comes to.
const RUN: &str = r#"#!/bin/bash
if [ "$(id -u)" -eq 0 ] && [ -z "$RUNNER_ALLOW_RUNASROOT" ]; then
    echo "Must not run interactively with sudo"
    echo "Exiting runner..."
    exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
while :; do
    @COMMAND@ run "$@"
    code=$?
    status=0
    case $code in
    0) echo "Runner listener exit with 0 return code, stop the service, no retry needed." ;;
    1) echo "Runner listener exit with terminated error, stop the service, no retry needed." ;;
    2)
        echo "Runner listener exit with retryable error, re-launch runner in 5 seconds."
        sleep 5
        echo "Restarting runner..."
        continue
        ;;
    5) echo "Runner listener exit with Session Conflict error, stop the service, no retry needed." ;;
    *)
        if [ "$code" = 7 ] && [ "$ACTIONS_RUNNER_RETURN_VERSION_DEPRECATED_EXIT_CODE" = 1 ]; then
            echo "Runner listener exit with deprecated version exit code: 7."
            status=7
        else
            echo "Exiting with unknown error code: $code"
        fi
        ;;
    esac
    echo "Exiting runner..."
    exit $status
done
"#;

const LISTENER: &str = r#"#!/bin/bash
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
exec @COMMAND@ listener "$@"
"#;
