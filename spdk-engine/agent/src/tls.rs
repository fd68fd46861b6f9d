//! mTLS of the agents' gRPC: both sides show a certificate of the same authority.
//!
//! *What it is.* Three PEM files: the authority, this node's certificate, its key. They are read at every new server or
//! channel, so that renewed files count without a restart of the data plane.
//!
//! *Invariants.* With TLS configured there is no way around it, in neither direction. Without it (tests, one machine
//! with nothing to protect from) everything is plain.
//!
//! *When things fail.* [`TlsError`] names the file.

use std::path::{Path, PathBuf};

use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

/// Where the PEM files are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The authority's certificate.
    pub ca: PathBuf,
    /// This node's certificate, for server and client use.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The name that other agents' certificates must carry; `None`: the address they are reached at.
    pub server_name: Option<String>,
}

/// A PEM file cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("TLS: {path}: {source}")]
pub struct TlsError {
    path: PathBuf,
    source: std::io::Error,
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError { path: path.to_owned(), source })
}

impl TlsFiles {
    /// For a server: clients must show a certificate of the authority.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn server(&self) -> Result<ServerTlsConfig, TlsError> {
        Ok(ServerTlsConfig::new()
            .identity(self.identity()?)
            .client_ca_root(Certificate::from_pem(read(&self.ca)?))
            .client_auth_optional(false))
    }

    /// For a client.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn client(&self) -> Result<ClientTlsConfig, TlsError> {
        let config =
            ClientTlsConfig::new().identity(self.identity()?).ca_certificate(Certificate::from_pem(read(&self.ca)?));
        Ok(match &self.server_name {
            Some(name) => config.domain_name(name),
            None => config,
        })
    }

    fn identity(&self) -> Result<Identity, TlsError> {
        Ok(Identity::from_pem(read(&self.cert)?, read(&self.key)?))
    }
}
