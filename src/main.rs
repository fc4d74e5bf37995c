use std::{path::Path, process::ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use paddock::{
    api, run,
    settings::{LogFormat, Settings},
    telemetry,
};
use paddock_device_plugin::settings::Settings as PluginSettings;

/// GitHub Actions runners for Kubernetes: a warm pool of EC2 machines, and RISC-V boards.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the operator.
    ///
    /// AWS and Kubernetes are reached by the standard means of their SDKs: AWS_REGION, AWS_ENDPOINT_URL, a profile or a
    /// role for the one, KUBECONFIG or the pod's service account for the other.
    Run(Box<Settings>),
    /// Advertise this board's runner slots to its kubelet, and label its node with the board.
    ///
    /// Kubernetes is reached by KUBECONFIG or the pod's service account.
    DevicePlugin {
        #[command(flatten)]
        settings: PluginSettings,
        /// How log lines look: for people, or as JSON for a log store. `RUST_LOG` sets what is logged.
        #[arg(long, env = "PADDOCK_LOG_FORMAT", value_name = "FORMAT", default_value = "human")]
        log_format: LogFormat,
    },
    /// Print the custom resource definitions as YAML.
    Crds,
    /// Write the generated files of the repository: definitions, chart copies, reference.
    #[command(hide = true)]
    Generate,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Run(settings) => {
            telemetry::start(settings.log_format);
            run::run(*settings)
        }
        Command::DevicePlugin { settings, log_format } => {
            telemetry::start(log_format);
            run::device_plugin(settings)
        }
        Command::Crds => {
            for (_, yaml) in api::crds_yaml() {
                print!("---\n{yaml}");
            }
            Ok(())
        }
        Command::Generate => generate(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("paddock: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Writes each generated file, relative to the root of the repository.
fn generate() -> Result<()> {
    for (name, yaml) in api::crds_yaml() {
        for directory in ["crds", "charts/paddock/files/crds"] {
            write(&Path::new(directory).join(&name), &yaml)?;
        }
    }
    write(Path::new("docs/reference.md"), &api::reference_markdown())
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
