//! Transport addresses as RPC gives them (`trtype`, `adrfam`, `traddr`, `trsvcid`).

use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;
use serde_json::{Value, json};

/// An address as a caller wrote it.
#[derive(Debug, Clone, Deserialize)]
pub struct TransportId {
    pub trtype: String,
    #[serde(default)]
    pub adrfam: Option<String>,
    pub traddr: String,
    #[serde(default)]
    pub trsvcid: Option<String>,
}

/// A TCP address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(pub SocketAddr);

/// Why an address is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("trtype {0}: TCP is allowed")]
    Transport(String),
    #[error("adrfam {0}: IPv4 or IPv6, as the address is, is allowed")]
    Family(String),
    #[error("traddr {0}: an IP address is allowed")]
    Ip(String),
    #[error("trsvcid {0}: a port from 1 to 65535 is allowed")]
    Port(String),
}

impl TransportId {
    /// Whether the port is left out.
    #[must_use]
    pub fn lacks_port(&self) -> bool {
        self.trsvcid.as_deref().unwrap_or_default().is_empty()
    }

    /// The address.
    ///
    /// # Errors
    /// Which member is wrong, and what is allowed.
    pub fn parse(&self) -> Result<Address, AddressError> {
        if !self.trtype.eq_ignore_ascii_case("tcp") {
            return Err(AddressError::Transport(self.trtype.clone()));
        }
        let ip: IpAddr = self.traddr.parse().map_err(|_| AddressError::Ip(self.traddr.clone()))?;
        let family = if ip.is_ipv4() { "ipv4" } else { "ipv6" };
        if let Some(given) = &self.adrfam
            && !given.eq_ignore_ascii_case(family)
        {
            return Err(AddressError::Family(given.clone()));
        }
        let text = self.trsvcid.clone().unwrap_or_default();
        let port: u16 = text.parse().ok().filter(|p| *p != 0).ok_or(AddressError::Port(text))?;
        Ok(Address(SocketAddr::new(ip, port)))
    }
}

impl Address {
    /// SPDK's JSON of it.
    #[must_use]
    pub fn to_json(self) -> Value {
        socket_json(self.0)
    }
}

/// SPDK's JSON of a socket address.
#[must_use]
pub fn socket_json(address: SocketAddr) -> Value {
    json!({ "trtype": "TCP", "adrfam": if address.is_ipv4() { "IPv4" } else { "IPv6" },
        "traddr": address.ip().to_string(), "trsvcid": address.port().to_string() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn id(trtype: &str, adrfam: Option<&str>, traddr: &str, port: Option<&str>) -> TransportId {
        TransportId {
            trtype: trtype.into(),
            adrfam: adrfam.map(Into::into),
            traddr: traddr.into(),
            trsvcid: port.map(Into::into),
        }
    }

    #[test]
    fn accepts_and_refuses() {
        assert!(id("tcp", None, "127.0.0.1", Some("4420")).parse().is_ok());
        assert!(id("TCP", Some("IPv6"), "::1", Some("1")).parse().is_ok());
        assert!(id("RDMA", None, "127.0.0.1", Some("4420")).parse().is_err());
        assert!(id("TCP", Some("IPv6"), "127.0.0.1", Some("4420")).parse().is_err());
        for port in [None, Some(""), Some("0"), Some("65536"), Some("http")] {
            assert!(id("TCP", None, "127.0.0.1", port).parse().is_err(), "{port:?}");
        }
        assert!(id("TCP", None, "localhost", Some("4420")).parse().is_err());
    }
}
