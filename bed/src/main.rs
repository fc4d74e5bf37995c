//! `paddock-bed`: the test bed's own program.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Result;
use clap::{Parser, Subcommand};
use paddock_bed::{bench, demo, github::runner, image::operator_image, server};

/// The test bed of Paddock.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show a claim going Ready, and stay until Ctrl-C; with CI set or without a terminal, end by itself
    Demo,
    /// Keep everything running for programs outside, until Ctrl-C or SIGTERM; print the path of the env file when it is ready
    Serve {
        /// How many board nodes to simulate, with a slot each
        #[arg(long, default_value_t = 4)]
        nodes: usize,
        /// Start no operator; `POST /operator` of the admin API does
        #[arg(long)]
        without_operator: bool,
    },
    /// Measure, beside what the bed's own parts take for the same
    Bench {
        /// All parts unless some are named
        parts: Vec<bench::Part>,
    },
    /// Build the operator's OCI image, without a container engine
    Image {
        /// The archive to write, for `docker load`, `skopeo copy oci-archive:…` or `ctr images import`
        out: PathBuf,
        /// The `paddock` program
        #[arg(long)]
        binary: PathBuf,
        /// The image's name and tag
        #[arg(long, default_value = concat!("paddock:", env!("CARGO_PKG_VERSION")))]
        tag: String,
    },
    /// Be the stand-in for GitHub's Actions runner
    #[command(disable_help_flag = true)]
    Runner {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Bench { parts } => bench::run(&parts),
        Command::Demo => demo::run(),
        Command::Image { out, binary, tag } => image(&out, &binary, &tag),
        Command::Serve { nodes, without_operator } => {
            server::run(&server::Options { nodes, operator: !without_operator })
        }
        Command::Runner { arguments } => return runner::main(arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("paddock-bed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn image(out: &Path, binary: &Path, tag: &str) -> Result<()> {
    operator_image(tag, binary)?.write(out)
}
