//! The stand-in for GitHub's Actions runner: the same commands, files and output as `config.sh` and `run.sh`, against
//! the simulator.

mod config;
pub(crate) mod files;
mod job;
mod listen;

use std::{fs, io, path::Path, process::ExitCode};

use paddock_bed_process::write_program;

/// The version that the stand-in reports.
pub const VERSION: &str = "2.330.0";

const USAGE: &str = "Commands:
  config --unattended --url URL --token T [--name N] [--labels L] [--no-default-labels] [--runnergroup G]
         [--replace] [--ephemeral] [--disableupdate] [--work DIR]
  config remove --token T
  run [--jitconfig CONFIG]
  jit        (with the config in RUNNER_JITCONFIG)";

/// Runs a command of the stand-in; `args` is what follows the program's name.
pub fn main(mut args: Vec<String>) -> ExitCode {
    args.extend(inputs(std::env::vars()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be built");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = runtime.block_on(async {
        match args.as_slice() {
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
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
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

type Outcome = Result<(), String>;

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

    fn required(&self, name: &str) -> Result<String, String> {
        let value = self.value(name).filter(|value| !value.is_empty());
        value.ok_or_else(|| format!("Invalid configuration provided for {name}. Terminating unattended configuration."))
    }
}

/// Writes `config.sh` and `run.sh`, as a machine image has them in `actions-runner/`, that run the stand-in through
/// `command` (a program, and arguments that come first). Like the real ones they refuse to run as root unless
/// `RUNNER_ALLOW_RUNASROOT` is set.
pub fn write_runner_dir(dir: &Path, command: &[&str]) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let quoted: Vec<String> = command.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
    let scripts = [("config", "Must not run with sudo"), ("run", "Must not run interactively with sudo")];
    for (name, refusal) in scripts {
        let script = format!(
            "#!/bin/bash\n\
             if [ \"$(id -u)\" -eq 0 ] && [ -z \"$RUNNER_ALLOW_RUNASROOT\" ]; then\n    \
             echo \"{refusal}\"\n    \
             exit 1\n\
             fi\n\
             cd \"$(dirname \"${{BASH_SOURCE[0]}}\")\" || exit 1\n\
             exec {} {name} \"$@\"\n",
            quoted.join(" ")
        );
        write_program(&dir.join(format!("{name}.sh")), &script)?;
    }
    Ok(())
}
