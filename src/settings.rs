//! Settings of `paddock run`: flags, each also an environment variable.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};

#[derive(Args, Debug, Clone)]
pub struct Settings {
    /// Name of this cluster, unique in the AWS account and region.
    ///
    /// It names the DynamoDB table (`paddock-NAME`) and the queues, and is the value of the `paddock:cluster` tag.
    /// Two clusters with one name would terminate each other's machines.
    #[arg(long, env = "PADDOCK_CLUSTER_NAME", value_name = "NAME", value_parser = cluster_name)]
    pub cluster_name: String,

    /// Namespace to watch; all of them when left out.
    #[arg(long, env = "PADDOCK_NAMESPACE", value_name = "NAMESPACE")]
    pub namespace: Option<String>,

    /// Address of the one port that serves health, metrics, webhooks and dashboards.
    #[arg(long, env = "PADDOCK_LISTEN", value_name = "ADDRESS:PORT", default_value = "0.0.0.0:8080")]
    pub listen: SocketAddr,

    /// Base URL of GitHub's REST API; for GitHub Enterprise Server `https://HOST/api/v3`.
    #[arg(
        long,
        env = "PADDOCK_GITHUB_API_URL",
        value_name = "URL",
        default_value = "https://api.github.com",
        value_parser = http_url
    )]
    pub github_api_url: String,

    /// File with the webhook secrets, one a line, each valid; read again when it changes.
    #[arg(long, env = "PADDOCK_WEBHOOK_SECRET_FILE", value_name = "PATH")]
    pub webhook_secret_file: Option<PathBuf>,

    /// File with the cap on runners per organisation or repository: `default: 20` and `overrides: {ID: CAP}`.
    #[arg(long, env = "PADDOCK_ENTITY_LIMITS_FILE", value_name = "PATH")]
    pub entity_limits_file: Option<PathBuf>,

    /// How long finished claims and workers stay visible, such as `24h`.
    #[arg(long, env = "PADDOCK_RETENTION", value_name = "DURATION", default_value = "24h", value_parser = duration)]
    pub retention: Duration,

    /// How often GitHub is asked whether the workflow run of a claim on machines is over, in case a webhook was lost.
    #[arg(long, env = "PADDOCK_RUN_POLL", value_name = "DURATION", default_value = "5m", value_parser = duration)]
    pub run_poll: Duration,

    /// How long zones where EC2 had no capacity are not asked again for the same machines.
    #[arg(long, env = "PADDOCK_CAPACITY_MEMORY", value_name = "DURATION", default_value = "3m", value_parser = duration)]
    pub capacity_memory: Duration,

    /// How long a leader may be silent before another replica takes over.
    #[arg(long, env = "PADDOCK_LEASE_DURATION", value_name = "DURATION", default_value = "15s", value_parser = lease)]
    pub lease_duration: Duration,

    /// How log lines look: for people, or as JSON for a log store. `RUST_LOG` sets what is logged.
    #[arg(long, env = "PADDOCK_LOG_FORMAT", value_name = "FORMAT", default_value = "human")]
    pub log_format: LogFormat,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    Human,
    Json,
}

/// A table name has at most 255 characters, a queue name 80 with pool and class in it.
fn cluster_name(text: &str) -> Result<String, String> {
    let fits = (1..=32).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-');
    if fits { Ok(text.to_owned()) } else { Err("1 to 32 of a-z, 0-9 and inner dashes".into()) }
}

fn http_url(text: &str) -> Result<String, String> {
    let text = text.trim_end_matches('/');
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    if rest.is_some_and(|rest| !rest.is_empty() && !rest.contains(char::is_whitespace)) {
        Ok(text.to_owned())
    } else {
        Err("an http or https URL, such as https://github.example.com/api/v3".into())
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    text.parse::<paddock_core::api::Duration>().map(Into::into)
}

fn lease(text: &str) -> Result<Duration, String> {
    duration(text).and_then(|life| {
        if life >= Duration::from_secs(3) { Ok(life) } else { Err("at least 3s, so that a renewal fits in".into()) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_names_are_safe_in_tables_queues_and_tags() {
        assert!(cluster_name("prod-1").is_ok());
        for bad in ["", "-a", "a-", "Prod", "a_b", "a b", "a/b", &"x".repeat(33)] {
            assert!(cluster_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_api_url_loses_its_last_slash_and_must_be_http() {
        assert_eq!(http_url("https://ghes.example/api/v3/").as_deref(), Ok("https://ghes.example/api/v3"));
        for bad in ["", "https://", "ftp://x", "github.com", "https://a b"] {
            assert!(http_url(bad).is_err(), "{bad}");
        }
    }
}
