use std::{path::Path, process::ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use paddock::{api, run, settings::Settings, telemetry};

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

/// Where each generated file goes, from the root of the repository.
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
