//! Logs, for people or as JSON.

use tracing_subscriber::{EnvFilter, fmt, prelude::*};

use crate::settings::LogFormat;

/// The filter when `RUST_LOG` is not set. Clients that both log and return a failure are off: we log what they return.
const DEFAULT_FILTER: &str = "info,kube_runtime=warn,kube_client=off,octocrab=off,aws_config=warn";

pub fn start(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| DEFAULT_FILTER.into());
    let registry = tracing_subscriber::registry().with(filter);
    match format {
        LogFormat::Human => registry.with(fmt::layer().with_target(false).with_writer(std::io::stderr)).init(),
        LogFormat::Json => registry.with(fmt::layer().json().flatten_event(true).with_writer(std::io::stderr)).init(),
    }
}
