//! Certificates of a local cluster: one authority, one certificate per party, all made by `addax up`.
//!
//! *Invariants.* Keys are readable by their owner only. Every certificate is for servers and clients both, since agents
//! are either. What exists and is complete is kept, so that a cluster survives `up` again.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};

use super::layout::write_durable;

/// Paths of one party's certificate.
#[derive(Debug, Clone)]
pub struct Identity {
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Identity {
    /// The party's files in the folder.
    pub fn of(pki: &Path, party: &str) -> Self {
        Self { ca: pki.join("ca.crt"), cert: pki.join(format!("{party}.crt")), key: pki.join(format!("{party}.key")) }
    }

    /// The three texts: authority, certificate, key.
    pub fn read(&self) -> Result<(String, String, String)> {
        let read = |path: &Path| fs::read_to_string(path).with_context(|| format!("read {}", path.display()));
        Ok((read(&self.ca)?, read(&self.cert)?, read(&self.key)?))
    }
}

/// Makes what is missing: the authority, and a certificate for each party with its addresses.
pub fn ensure(pki: &Path, parties: &[(String, Vec<IpAddr>)]) -> Result<()> {
    fs::create_dir_all(pki).with_context(|| format!("make folder {}", pki.display()))?;
    let (ca_cert, ca_key) = (pki.join("ca.crt"), pki.join("ca.key"));
    if !ca_key.exists() || !ca_cert.exists() {
        make_ca(&ca_cert, &ca_key)?;
    }
    let ca_pem = fs::read_to_string(&ca_cert)?;
    let key = KeyPair::from_pem(&fs::read_to_string(&ca_key)?).context("the authority's key is damaged")?;
    let issuer = Issuer::from_ca_cert_pem(&ca_pem, key).context("the authority's certificate is damaged")?;
    for (party, addresses) in parties {
        let identity = Identity::of(pki, party);
        if identity.key.exists() && identity.cert.exists() {
            continue;
        }
        make_party(&identity, party, addresses, &issuer)?;
    }
    Ok(())
}

fn make_ca(cert: &Path, key: &Path) -> Result<()> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "addax local authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let pair = KeyPair::generate()?;
    let made = params.self_signed(&pair)?;
    write_durable(key, pair.serialize_pem().as_bytes(), 0o600)?;
    write_durable(cert, made.pem().as_bytes(), 0o644)
}

fn make_party(identity: &Identity, party: &str, addresses: &[IpAddr], issuer: &Issuer<'_, KeyPair>) -> Result<()> {
    let mut params = CertificateParams::new(vec![party.to_owned()])?;
    params.distinguished_name.push(DnType::CommonName, party);
    params.subject_alt_names.extend(addresses.iter().copied().map(SanType::IpAddress));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let pair = KeyPair::generate()?;
    let made = params.signed_by(&pair, issuer)?;
    write_durable(&identity.key, pair.serialize_pem().as_bytes(), 0o600)?;
    write_durable(&identity.cert, made.pem().as_bytes(), 0o644)
}

/// A kubeconfig for `party`, with everything in it.
pub fn kubeconfig(pki: &Path, party: &str, url: &str) -> Result<String> {
    use base64::Engine;
    let encode = |text: String| base64::engine::general_purpose::STANDARD.encode(text);
    let (ca, cert, key) = Identity::of(pki, party).read()?;
    Ok(format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: addax\nclusters:\n- name: addax\n  cluster:\n    server: {url}\n    \
         certificate-authority-data: {}\nusers:\n- name: {party}\n  user:\n    client-certificate-data: {}\n    \
         client-key-data: {}\ncontexts:\n- name: addax\n  context:\n    cluster: addax\n    user: {party}\n    \
         namespace: {}\n",
        encode(ca),
        encode(cert),
        encode(key),
        addax_api::NAMESPACE
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn certificates_are_made_once_and_keys_are_private() {
        let dir = tempfile::tempdir().unwrap();
        let parties = [("admin".to_owned(), vec![]), ("node-1".to_owned(), vec!["127.0.0.1".parse().unwrap()])];
        ensure(dir.path(), &parties).unwrap();
        let first = Identity::of(dir.path(), "node-1").read().unwrap();
        ensure(dir.path(), &parties).unwrap();
        assert_eq!(first, Identity::of(dir.path(), "node-1").read().unwrap());
        let mode = fs::metadata(dir.path().join("node-1.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0);
        assert!(
            kubeconfig(dir.path(), "admin", "https://127.0.0.1:1").unwrap().contains("server: https://127.0.0.1:1")
        );
    }
}
