//! Terminal output of the bed's programs, and their interruption by the user.

use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

use anyhow::Result;
use tokio::signal::unix::{SignalKind, signal};

use crate::process::Signal;

/// Runs `work` until it completes, or until Ctrl-C or SIGTERM: then it is dropped with all that it started, and the
/// signal is returned.
pub fn run(work: impl Future<Output = Result<()>>) -> Result<Option<Signal>> {
    tokio::runtime::Runtime::new()?.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            outcome = work => outcome.map(|()| None),
            _ = interrupt.recv() => Ok(Some(Signal::SIGINT)),
            _ = terminate.recv() => Ok(Some(Signal::SIGTERM)),
        }
    })
}

/// Prints the current step and how long it took.
pub async fn step<T>(mut out: impl Write + IsTerminal, what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    let start = Instant::now();
    let live = out.is_terminal();
    let mut work = std::pin::pin!(work);
    let outcome = loop {
        if live {
            let _ = write!(out, "\r\x1b[K  … {what} ({} s)", start.elapsed().as_secs());
            let _ = out.flush();
        }
        tokio::select! {
            outcome = &mut work => break outcome,
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
    };
    let wipe = if live { "\r\x1b[K" } else { "" };
    let _ = match &outcome {
        Ok(_) => writeln!(out, "{wipe}  ✓ {what} ({:.1} s)", start.elapsed().as_secs_f64()),
        Err(_) => writeln!(out, "{wipe}  ✗ {what}"),
    };
    outcome
}
