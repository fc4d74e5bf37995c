//! The stand-in for the GitHub Actions runner, as a program.

use std::process::ExitCode;

fn main() -> ExitCode {
    paddock_bed_github::runner::main(std::env::args().skip(1).collect())
}
