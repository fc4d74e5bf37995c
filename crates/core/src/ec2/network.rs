//! How a machine reaches the network: proxies, and certificates that it trusts.

use base64::{Engine, prelude::BASE64_STANDARD};

use super::user_data::{UserDataError, gzip};
use crate::api::{Ec2Pool, Proxy};

/// A pool's settings of the network.
#[derive(Debug, Clone, Copy, Default)]
pub struct Network<'a> {
    pub proxy: Option<&'a Proxy>,
    /// Certificates of authorities, in PEM.
    pub ca_bundle: Option<&'a str>,
}

impl<'a> Network<'a> {
    pub fn of(pool: &'a Ec2Pool) -> Self {
        Self { proxy: pool.proxy.as_ref(), ca_bundle: pool.ca_bundle.as_deref() }
    }

    /// The part of the script that gives it to the agent, its runner and jobs.
    pub(super) fn script(self) -> Result<String, UserDataError> {
        let mut environment = String::new();
        for (name, value) in self.proxy.map(variables).unwrap_or_default() {
            if value.chars().any(|c| c.is_control() || c.is_whitespace() || "'\"\\".contains(c)) {
                return Err(UserDataError::Proxy(value));
            }
            environment += &format!("{name}={value}\n{}={value}\n", name.to_ascii_uppercase());
        }
        let mut script = String::new();
        if !environment.is_empty() {
            script += &ENVIRONMENT.replace("@ENVIRONMENT@", &BASE64_STANDARD.encode(environment));
        }
        if let Some(bundle) = self.ca_bundle {
            script += &CERTIFICATES.replace("@BUNDLE@", &BASE64_STANDARD.encode(gzip(bundle.as_bytes())));
        }
        Ok(if script.is_empty() { script } else { script + EXPORT })
    }
}

/// Reached directly: the machine itself, and EC2's metadata service.
const NO_PROXY: &str = "localhost,127.0.0.1,::1,169.254.169.254,fd00:ec2::254";

/// In lower case, as most programs read them. What is in capitals only for some follows from them.
fn variables(proxy: &Proxy) -> Vec<(&'static str, String)> {
    let addresses = [("http_proxy", &proxy.http), ("https_proxy", &proxy.https)];
    let addresses = addresses.into_iter().filter_map(|(name, address)| Some((name, address.clone()?)));
    let exceptions = [NO_PROXY].into_iter().chain(proxy.no_proxy.iter().map(String::as_str));
    addresses.chain([("no_proxy", exceptions.collect::<Vec<_>>().join(","))]).collect()
}

const ENVIRONMENT: &str = r#"
base64 -d <<<'@ENVIRONMENT@' >>"$state/environment"
"#;

/// Programs that take a bundle take no other certificates, so the image's own are in it.
const CERTIFICATES: &str = r#"
base64 -d <<<'@BUNDLE@' | gzip -d >"$home/ca.pem"
for roots in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/ca-bundle.pem /etc/ssl/cert.pem; do
  [ ! -s "$roots" ] || break
done
cat "$roots" "$home/ca.pem" >"$home/ca-bundle.pem" || cp "$home/ca.pem" "$home/ca-bundle.pem"
chmod 0644 "$home/ca.pem" "$home/ca-bundle.pem"
for name in CURL_CA_BUNDLE GIT_SSL_CAINFO REQUESTS_CA_BUNDLE SSL_CERT_FILE; do
  echo "$name=$home/ca-bundle.pem"
done >>"$state/environment"
echo "NODE_EXTRA_CA_CERTS=$home/ca.pem" >>"$state/environment"
"#;

/// The lines are what systemd reads as well.
const EXPORT: &str = r#"
while IFS= read -r line; do export "$line"; done <"$state/environment"
"#;
