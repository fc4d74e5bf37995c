//! Credentials of GitHub in texts that users see: logs of machines and pods, and messages of errors.

use std::{borrow::Cow, sync::LazyLock};

use regex::Regex;

/// - tokens: of an installation `ghs_<app>_<JWT>` or shorter, of users `ghp_…`, `gho_…`, `ghu_…`, `ghr_…`, `github_pat_…`
/// - JSON in base64, which starts with `eyI` or `eyJ`: JWTs, and the JIT config of a runner
/// - registration and removal tokens of runners: 29 capitals and digits
static CREDENTIAL: LazyLock<Regex> = LazyLock::new(|| {
    let text = r"(?:gh[opsur]_|github_pat_)[A-Za-z0-9_.-]{20,}|ey[IJ][A-Za-z0-9_./+=-]{40,}|\b[A-Z0-9]{29}\b";
    Regex::new(text).expect("a test has read it")
});

const REDACTED: &str = "[redacted]";

/// The text without what looks like a credential.
pub fn redact(text: &str) -> Cow<'_, str> {
    CREDENTIAL.replace_all(text, REDACTED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn todays_credentials_of_github_are_redacted_wherever_they_are() {
        let jwt = "eyJhbGciOiJSUzI1NiIsInR5cCI6IkpXVCJ9.eyJqdGkiOiJhIn0.c2lnbmF0dXJl-_x";
        let jit = "eyIucnVubmVyIjoiZXlKQloyVnVkRWxrSWpvaU1TSjkiLCIuY3JlZGVudGlhbHMiOiJleUp6In0=";
        for credential in [
            &format!("ghs_123456_{jwt}"),
            "ghs_16C7e42F292c6912E7710c838347Ae178B4a",
            "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz",
            "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
            jwt,
            jit,
            "AABF3JGZDX3P5PMEXLND6TS6FCWO6",
        ] {
            for (before, after) in
                [("", ""), ("token=", "\n"), ("https://x:", "@github.com/a"), ("\"", "\","), ("ü ", " ü")]
            {
                assert_eq!(redact(&format!("{before}{credential}{after}")), format!("{before}[redacted]{after}"));
            }
        }
    }

    #[test]
    fn what_users_need_to_read_stays() {
        for text in [
            "i-0123456789abcdef0: the runner has ended (no route to api.github.com)",
            "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            "arn:aws:ec2:us-east-1:123456789012:instance/i-0123456789abcdef0",
            "ghs_ is the prefix, ey are letters, and AN_ENVIRONMENT_VARIABLE_IS_NO_TOKEN",
            "Http response code: NotFound (Request Id: 0E1C:1F2B4:1A2B3C:4D5E6F:65F0A1B2)",
        ] {
            assert_eq!(redact(text), text);
        }
    }
}
