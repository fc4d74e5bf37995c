//! Redirects of renamed repositories. They are followed on the same host only: the token is for no other.

use http::{HeaderMap, StatusCode, header::LOCATION};

use super::error::GitHubError;

/// GitHub's own redirects lead to the resource at once.
pub const MAX_REDIRECTS: usize = 3;

/// The route to follow, if the answer is a redirect. The method stays the same, as GitHub documents.
pub fn target(api_url: &str, status: StatusCode, headers: &HeaderMap) -> Result<Option<String>, GitHubError> {
    if !matches!(status.as_u16(), 301 | 302 | 307 | 308) {
        return Ok(None);
    }
    let location = headers.get(LOCATION).and_then(|location| location.to_str().ok()).unwrap_or_default();
    let elsewhere = || GitHubError::Unexpected(format!("a redirect to {location:?}, which is not its API"));
    route(api_url, location).map(Some).ok_or_else(elsewhere)
}

fn route(api_url: &str, location: &str) -> Option<String> {
    let base = api_url.trim_end_matches('/');
    let host = base.split_once("://").map_or(base, |(_, host)| host);
    let path = host.find('/').map_or("", |slash| &host[slash..]);
    let route = location.strip_prefix(base).or_else(|| location.strip_prefix(path))?;
    (route.starts_with('/') && !route.starts_with("//")).then(|| route.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_api_itself_is_followed() {
        for (api, location, expected) in [
            ("https://api.github.com", "https://api.github.com/repositories/7/x?a=b", Some("/repositories/7/x?a=b")),
            ("https://api.github.com/", "/repositories/7", Some("/repositories/7")),
            ("https://ghes.example/api/v3", "https://ghes.example/api/v3/repositories/7", Some("/repositories/7")),
            ("https://ghes.example/api/v3", "/api/v3/repositories/7", Some("/repositories/7")),
            ("https://ghes.example/api/v3", "https://ghes.example/login", None),
            ("https://api.github.com", "http://api.github.com/repositories/7", None),
            ("https://api.github.com", "https://api.github.com.evil.example/x", None),
            ("https://api.github.com", "https://api.github.com@evil.example/x", None),
            ("https://api.github.com", "https://api.github.com:444/x", None),
            ("https://api.github.com", "//evil.example/x", None),
            ("https://api.github.com", "", None),
        ] {
            assert_eq!(route(api, location).as_deref(), expected, "{location}");
        }
    }
}
