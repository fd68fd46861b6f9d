//! TLS of the server: its certificate, and client certificates signed by one authority.

use std::sync::Arc;

use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};

/// Certificates and keys in PEM.
#[derive(Clone)]
pub struct TlsConfig {
    /// The authority that signs client certificates.
    pub ca_pem: String,
    /// The server's certificate, followed by any intermediate ones.
    pub cert_pem: String,
    /// The server's private key.
    pub key_pem: String,
    /// Whether clients must show a certificate.
    pub require_client_certificate: bool,
}

impl std::fmt::Debug for TlsConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key stays out of logs.
        f.debug_struct("TlsConfig")
            .field("require_client_certificate", &self.require_client_certificate)
            .finish_non_exhaustive()
    }
}

/// TLS that cannot be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A PEM text holds no such thing.
    #[error("{field} is not PEM of the expected kind: {source}")]
    Pem {
        /// `ca_pem`, `cert_pem` or `key_pem`.
        field: &'static str,
        /// The parser's error.
        source: rustls::pki_types::pem::Error,
    },
    /// The certificates are refused.
    #[error("certificates: {0}")]
    Rustls(#[from] rustls::Error),
    /// The authority is refused.
    #[error("ca_pem: {0}")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
}

/// The configuration for accepting connections.
///
/// # Errors
/// Names the part that cannot be used.
pub fn server_config(tls: &TlsConfig) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    for certificate in certificates("ca_pem", &tls.ca_pem)? {
        roots.add(certificate)?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let verifier = if tls.require_client_certificate { verifier } else { verifier.allow_unauthenticated() };
    let key = PrivateKeyDer::from_pem_slice(tls.key_pem.as_bytes())
        .map_err(|source| TlsError::Pem { field: "key_pem", source })?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier.build()?)
        .with_single_cert(certificates("cert_pem", &tls.cert_pem)?, key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn certificates(field: &'static str, pem: &str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    match certificates {
        Ok(found) if found.is_empty() => {
            Err(TlsError::Pem { field, source: rustls::pki_types::pem::Error::NoItemsFound })
        }
        other => other.map_err(|source| TlsError::Pem { field, source }),
    }
}
