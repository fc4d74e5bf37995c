//! Logs, for people or as JSON.

use tracing_subscriber::{EnvFilter, fmt, prelude::*};

use crate::settings::LogFormat;

/// What is logged when `RUST_LOG` says nothing. Clients that log a failure and return it too would tell it twice.
const DEFAULT_FILTER: &str = "info,kube_runtime=warn,kube_client=off,octocrab=off,aws_config=warn";

pub fn start(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| DEFAULT_FILTER.into());
    let registry = tracing_subscriber::registry().with(filter);
    match format {
        LogFormat::Human => registry.with(fmt::layer().with_target(false).with_writer(std::io::stderr)).init(),
        LogFormat::Json => registry.with(fmt::layer().json().flatten_event(true).with_writer(std::io::stderr)).init(),
    }
}
