//! The configuration of AWS clients. Where the pool has a proxy they have an HTTP client of their own: the SDK's ignores the
//! environment.

use aws_config::{BehaviorVersion, Region, SdkConfig, timeout::TimeoutConfig};
use aws_sdk_dynamodb::config::SharedHttpClient;
use aws_smithy_http_client::{
    Builder, Connector,
    proxy::ProxyConfig,
    tls::{Provider, rustls_provider::CryptoMode},
};

use crate::limits::{STORE_CALL_TIMEOUT, backoff};

/// What user data sets where the pool has a proxy.
const VARIABLES: [&str; 2] = ["http_proxy", "https_proxy"];

/// The instance's credentials, in the given region or the instance's own. Retries until the region is known.
pub async fn connect(region: Option<String>) -> SdkConfig {
    let timeouts =
        TimeoutConfig::builder().operation_timeout(STORE_CALL_TIMEOUT).connect_timeout(STORE_CALL_TIMEOUT / 2).build();
    let mut failures = 0;
    loop {
        let mut loader = aws_config::defaults(BehaviorVersion::latest()).timeout_config(timeouts.clone());
        if let Some(http) = through_proxy() {
            loader = loader.http_client(http);
        }
        if let Some(region) = &region {
            loader = loader.region(Region::new(region.clone()));
        }
        let config = loader.load().await;
        if config.region().is_some() {
            return config;
        }
        tracing::warn!("AWS region unknown: neither in the environment nor from the metadata service; retrying");
        failures += 1;
        tokio::time::sleep(backoff(failures)).await;
    }
}

/// None without a proxy.
fn through_proxy() -> Option<SharedHttpClient> {
    VARIABLES.iter().any(|name| std::env::var_os(name).is_some()).then(client)
}

fn client() -> SharedHttpClient {
    Builder::new().build_with_connector_fn(|settings, components| {
        let mut connector = Connector::builder().proxy_config(ProxyConfig::from_env());
        connector.set_connector_settings(settings.cloned());
        connector.set_sleep_impl(components.and_then(|components| components.sleep_impl()));
        connector.tls_provider(Provider::Rustls(CryptoMode::AwsLc)).build()
    })
}
