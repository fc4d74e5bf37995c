//! The HTTP client of the AWS SDK where the pool has a proxy: the SDK's own one ignores the environment.

use aws_sdk_dynamodb::config::SharedHttpClient;
use aws_smithy_http_client::{
    Builder, Connector,
    proxy::ProxyConfig,
    tls::{Provider, rustls_provider::CryptoMode},
};

/// What user data sets where the pool has a proxy.
const VARIABLES: [&str; 2] = ["http_proxy", "https_proxy"];

/// None without a proxy.
pub fn through_proxy() -> Option<SharedHttpClient> {
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
