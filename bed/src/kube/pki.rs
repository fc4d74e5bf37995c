//! The certificate authority of a bed's cluster, and its certificates.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::Result;
use base64::{Engine, prelude::BASE64_STANDARD};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, SanType,
};
use serde_json::json;

use crate::process::write_atomically;

pub struct Pki {
    dir: PathBuf,
    authority: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key, as files.
#[derive(Clone)]
pub struct Certificate {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// The credentials of a kubeconfig's user.
pub enum Identity<'a> {
    Certificate(&'a Certificate),
    Token(&'a str),
}

impl Pki {
    pub fn create(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = name("paddock-bed", &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let pki = Self { dir: dir.to_owned(), authority: CertifiedIssuer::self_signed(params, KeyPair::generate()?)? };
        fs::write(pki.authority_file(), pki.authority.pem())?;
        let accounts = KeyPair::generate()?;
        fs::write(pki.service_account_key(), accounts.serialize_pem())?;
        fs::write(pki.service_account_key().with_extension("pub"), accounts.public_key_pem())?;
        Ok(pki)
    }

    pub fn authority_file(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    /// The key that signs service account tokens; the public key is next to it, with the extension `pub`.
    pub fn service_account_key(&self) -> PathBuf {
        self.dir.join("service-account.key")
    }

    /// A client certificate for `user` in `groups`, which the API server reads from the subject.
    pub fn client(&self, user: &str, groups: &[&str]) -> Result<Certificate> {
        self.issue(user, groups, Vec::new(), ExtendedKeyUsagePurpose::ClientAuth)
    }

    /// A server certificate for `names` and `addresses`.
    pub fn server(&self, server: &str, names: &[&str], addresses: &[IpAddr]) -> Result<Certificate> {
        let names = names.iter().map(|name| Ok(SanType::DnsName((*name).try_into()?)));
        let addresses = addresses.iter().map(|address| Ok(SanType::IpAddress(*address)));
        let alternatives = names.chain(addresses).collect::<Result<_, rcgen::Error>>()?;
        self.issue(server, &[], alternatives, ExtendedKeyUsagePurpose::ServerAuth)
    }

    fn issue(
        &self,
        subject: &str,
        groups: &[&str],
        alternatives: Vec<SanType>,
        usage: ExtendedKeyUsagePurpose,
    ) -> Result<Certificate> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name(subject, groups);
        params.subject_alt_names = alternatives;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate()?;
        let file = subject.replace(':', "-");
        let issued =
            Certificate { cert: self.dir.join(format!("{file}.crt")), key: self.dir.join(format!("{file}.key")) };
        write_atomically(&issued.cert, params.signed_by(&key, &self.authority)?.pem())?;
        write_atomically(&issued.key, key.serialize_pem())?;
        Ok(issued)
    }

    /// Writes a self-contained kubeconfig.
    pub fn kubeconfig(&self, path: &Path, server: &str, namespace: &str, identity: Identity) -> Result<()> {
        let data = |file: &Path| Ok::<_, std::io::Error>(BASE64_STANDARD.encode(fs::read(file)?));
        let user = match identity {
            Identity::Token(token) => json!({ "token": token }),
            Identity::Certificate(Certificate { cert, key }) => {
                json!({ "client-certificate-data": data(cert)?, "client-key-data": data(key)? })
            }
        };
        let cluster = json!({ "server": server, "certificate-authority-data": data(&self.authority_file())? });
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "bed", "cluster": cluster }],
            "users": [{ "name": "user", "user": user }],
            "contexts": [{ "name": "bed", "context": { "cluster": "bed", "user": "user", "namespace": namespace } }],
            "current-context": "bed",
        });
        Ok(write_atomically(path, serde_json::to_vec_pretty(&config)?)?)
    }
}

fn name(common: &str, organisations: &[&str]) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    for organisation in organisations {
        name.push(DnType::OrganizationName, *organisation);
    }
    name
}
