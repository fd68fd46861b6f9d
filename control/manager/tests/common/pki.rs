//! An authority and one certificate that both sides show.

use addax_manager::TlsFiles;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tonic::transport::{Certificate, Identity, ServerTlsConfig};

/// Certificates of an authority of their own.
pub fn certificates() -> TlsFiles {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let certificate = params.signed_by(&key, &authority).unwrap();
    TlsFiles { ca_pem: authority.pem(), cert_pem: certificate.pem(), key_pem: key.serialize_pem() }
}

/// A server that wants clients of the authority.
pub fn server(files: &TlsFiles) -> ServerTlsConfig {
    ServerTlsConfig::new()
        .identity(Identity::from_pem(&files.cert_pem, &files.key_pem))
        .client_ca_root(Certificate::from_pem(&files.ca_pem))
}
