//! Verifies that a webhook comes from GitHub: an HMAC over the exact bytes of its body, with a shared secret.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The secrets that webhooks may be signed with. They are never printed.
#[derive(Clone)]
pub struct Keys(Vec<Hmac<Sha256>>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

/// Why a signature is refused. Reveals nothing about the valid one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSignature {
    #[error("X-Hub-Signature-256 is missing: give the webhook a secret at GitHub")]
    Missing,
    #[error("X-Hub-Signature-256 is missing, and SHA-1 signatures are not accepted")]
    Sha1Only,
    #[error("X-Hub-Signature-256 is not sha256= and 64 hexadecimal digits")]
    Malformed,
    #[error("the body is not signed with a secret of this installation")]
    Wrong,
}

impl Keys {
    /// One secret per line; blank lines and surrounding white space are ignored. None for a text without secrets: an
    /// empty one would accept every webhook.
    pub fn parse(text: &str) -> Option<Self> {
        let keys: Vec<_> = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .filter_map(|secret| Hmac::new_from_slice(secret.as_bytes()).ok())
            .collect();
        (!keys.is_empty()).then_some(Self(keys))
    }

    /// Whether one of the secrets signed the body. Each is compared in constant time.
    pub fn check(&self, signature: &[u8; 32], body: &[u8]) -> Result<(), BadSignature> {
        let signed = |key: &Hmac<Sha256>| key.clone().chain_update(body).verify_slice(signature).is_ok();
        if self.0.iter().any(signed) { Ok(()) } else { Err(BadSignature::Wrong) }
    }
}

/// The signature in the header, parsed before the body is read.
pub fn claimed(sha256: Option<&[u8]>, sha1: Option<&[u8]>) -> Result<[u8; 32], BadSignature> {
    let header = match (sha256, sha1) {
        (Some(header), _) => header,
        (None, Some(_)) => return Err(BadSignature::Sha1Only),
        (None, None) => return Err(BadSignature::Missing),
    };
    let digits = header.strip_prefix(b"sha256=").filter(|digits| digits.len() == 64).ok_or(BadSignature::Malformed)?;
    let mut signature = [0; 32];
    for (byte, pair) in signature.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |at: usize| char::from(pair[at]).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        let (Some(high), Some(low)) = (digit(0), digit(1)) else { return Err(BadSignature::Malformed) };
        *byte = high << 4 | low;
    }
    Ok(signature)
}

#[cfg(test)]
mod tests {
    use paddock_bed_github::signature;
    use proptest::prelude::*;

    use super::*;

    const SECRET: &str = "It's a Secret to Everybody";
    const BODY: &[u8] = b"Hello, World!";
    const SIGNED: &str = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";

    fn checked(secrets: &str, header: &str, body: &[u8]) -> Result<(), BadSignature> {
        let signature = claimed(Some(header.as_bytes()), None)?;
        Keys::parse(secrets).expect("there are secrets").check(&signature, body)
    }

    #[test]
    fn githubs_own_test_vector_is_accepted() {
        assert_eq!(checked(SECRET, SIGNED, BODY), Ok(()));
        let upper = format!("sha256={}", SIGNED[7..].to_uppercase());
        assert_eq!(checked(SECRET, &upper, BODY), Ok(()));
    }

    #[test]
    fn while_secrets_are_rotated_each_of_them_is_valid() {
        let both = format!("a newer one\r\n\n  {SECRET}  \n");
        assert_eq!(checked(&both, SIGNED, BODY), Ok(()));
        assert_eq!(checked(&both, &signature("a newer one", BODY), BODY), Ok(()));
        assert_eq!(checked("a newer one", SIGNED, BODY), Err(BadSignature::Wrong));
    }

    #[test]
    fn i9_a_text_without_secrets_opens_no_door() {
        for text in ["", "\n", " \r\n\t\n"] {
            assert!(Keys::parse(text).is_none(), "{text:?}");
        }
        for blank in ["", " "] {
            assert_eq!(checked("real\n\n", &signature(blank, BODY), BODY), Err(BadSignature::Wrong));
        }
    }

    #[test]
    fn i9_only_a_whole_sha256_signature_is_looked_at() {
        let sha1 = b"sha1=01dc10d0c83e72ed246219cdd91669667fe2ca59";
        assert_eq!(claimed(None, Some(sha1)), Err(BadSignature::Sha1Only));
        assert_eq!(claimed(None, None), Err(BadSignature::Missing));
        for header in ["", "sha256=", &SIGNED[7..], &SIGNED[..70], &format!("{SIGNED}0"), &SIGNED.replace('7', "x")] {
            assert_eq!(claimed(Some(header.as_bytes()), Some(sha1)), Err(BadSignature::Malformed), "{header}");
        }
        assert_eq!(claimed(Some(&[0xff; 71]), None), Err(BadSignature::Malformed));
    }

    proptest! {
        #[test]
        fn i9_neither_bytes_nor_signature_may_change(
            mut body in prop::collection::vec(any::<u8>(), 1..200), at in any::<prop::sample::Index>(), bit in 0u8..8,
        ) {
            let header = signature(SECRET, &body);
            prop_assert_eq!(checked(SECRET, &header, &body), Ok(()));
            let at = at.index(body.len());
            body[at] ^= 1 << bit;
            prop_assert_eq!(checked(SECRET, &header, &body), Err(BadSignature::Wrong));
        }

        #[test]
        fn i9_any_header_is_borne(header in prop::collection::vec(any::<u8>(), 0..100)) {
            let outcome = claimed(Some(&header), None).and_then(|it| Keys::parse(SECRET).unwrap().check(&it, BODY));
            prop_assert!(outcome.is_err());
        }
    }
}
