//! Certificates for the calls of agents: both sides show one of the cluster's authority.
//!
//! *When things fail.* PEM that cannot be used is found at the start, not at the first call.

use tonic::transport::{Certificate, ClientTlsConfig, Identity};

/// The PEM texts that a manager shows and trusts.
#[derive(Clone)]
pub struct TlsFiles {
    /// The authority that agents' certificates must come from.
    pub ca_pem: String,
    /// The manager's own certificate.
    pub cert_pem: String,
    /// The key of the certificate.
    pub key_pem: String,
}

impl std::fmt::Debug for TlsFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key stays out of logs.
        f.debug_struct("TlsFiles").finish_non_exhaustive()
    }
}

impl TlsFiles {
    pub(crate) fn client(&self) -> ClientTlsConfig {
        ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.ca_pem))
            .identity(Identity::from_pem(&self.cert_pem, &self.key_pem))
    }
}
