use base64::{Engine, prelude::BASE64_STANDARD};
use crypto_box::{SecretKey, aead::OsRng};

/// The key to which the operator seals an instance's tokens, because every instance can read the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicKey(crypto_box::PublicKey);

/// The agent's key pair; the secret key never leaves the instance.
pub struct KeyPair(SecretKey);

#[derive(Debug, PartialEq, Eq)]
pub enum SealError {
    /// Not a key or a sealed text in base64.
    Malformed,
    /// Sealed to another instance's key.
    NotForUs,
}

impl PublicKey {
    pub fn parse(text: &str) -> Result<Self, SealError> {
        let bytes = BASE64_STANDARD.decode(text).map_err(|_| SealError::Malformed)?;
        let key: [u8; 32] = bytes.try_into().map_err(|_| SealError::Malformed)?;
        Ok(Self(key.into()))
    }

    pub fn seal(&self, secret: &str) -> String {
        let sealed = self.0.seal(&mut OsRng, secret.as_bytes()).expect("a token is far below the cipher's limit");
        BASE64_STANDARD.encode(sealed)
    }
}

impl std::fmt::Display for PublicKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&BASE64_STANDARD.encode(self.0.as_bytes()))
    }
}

impl KeyPair {
    pub fn generate() -> Self {
        Self(SecretKey::generate(&mut OsRng))
    }

    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes.into())
    }

    pub fn to_bytes(&self) -> [u8; 32] {
        self.0.to_bytes()
    }

    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.public_key())
    }

    pub fn open(&self, sealed: &str) -> Result<String, SealError> {
        let bytes = BASE64_STANDARD.decode(sealed).map_err(|_| SealError::Malformed)?;
        let plain = self.0.unseal(&bytes).map_err(|_| SealError::NotForUs)?;
        String::from_utf8(plain).map_err(|_| SealError::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_owner_of_the_key_opens_what_was_sealed_to_it() {
        let (ours, theirs) = (KeyPair::generate(), KeyPair::generate());
        let sealed = PublicKey::parse(&ours.public().to_string()).unwrap().seal("AABF3JGZ");
        assert!(!sealed.contains("AABF3JGZ"));
        assert_eq!(ours.open(&sealed).as_deref(), Ok("AABF3JGZ"));
        assert_eq!(KeyPair::from_bytes(ours.to_bytes()).open(&sealed).as_deref(), Ok("AABF3JGZ"));
        assert_eq!(theirs.open(&sealed), Err(SealError::NotForUs));
        assert_eq!(ours.open("%"), Err(SealError::Malformed));
        assert_eq!(PublicKey::parse("AAAA"), Err(SealError::Malformed));
    }
}
