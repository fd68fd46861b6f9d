//! NVMe Qualified Names (Base 2.0, 4.5).
//!
//! An [`Nqn`] is always valid. The forms are those an SPDK target accepts: the discovery name,
//! `nqn.2014-08.org.nvmexpress:uuid:<uuid>`, and `nqn.yyyy-mm.<reverse domain>:<name>`, 11 to 223 bytes of UTF-8.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The well-known name of the discovery subsystem.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// What the name of a host or subsystem known by a UUID starts with.
pub const UUID_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";
/// Shortest name in bytes.
pub const MIN_LEN: usize = 11;
/// Longest name in bytes.
pub const MAX_LEN: usize = 223;
/// Longest label of a domain in bytes.
const MAX_LABEL_LEN: usize = 63;
/// Where the reverse domain starts, after `nqn.yyyy-mm.`.
const DOMAIN_START: usize = 12;

/// Why a text is not an NQN.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NqnError {
    /// Too short or too long.
    #[error("NQN of {0} bytes: {MIN_LEN} to {MAX_LEN} are allowed")]
    Length(usize),
    /// Not UTF-8.
    #[error("NQN is not UTF-8 from byte {0} on")]
    NotUtf8(usize),
    /// Contains a NUL byte.
    #[error("NQN has a NUL byte at {0}: text without NUL is allowed")]
    Nul(usize),
    /// A UUID name without a UUID.
    #[error("NQN `{0}`: after `{UUID_PREFIX}` a UUID of 8-4-4-4-12 hexadecimal digits is allowed")]
    Uuid(String),
    /// Does not start with `nqn.yyyy-mm.`.
    #[error("NQN `{0}`: must start with `nqn.yyyy-mm.`, a year of four digits and a month of two")]
    Date(String),
    /// No colon with a name after it.
    #[error("NQN `{0}`: a colon and a name must follow the reverse domain")]
    Name(String),
    /// A label of the reverse domain is malformed.
    #[error(
        "NQN `{nqn}`: domain label `{label}`: 1 to {MAX_LABEL_LEN} letters, digits and hyphens are allowed, \
         starting with a letter and ending with a letter or digit"
    )]
    Domain {
        /// The whole text.
        nqn: String,
        /// The label at fault.
        label: String,
    },
}

/// A valid NVMe Qualified Name. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Nqn(Arc<str>);

impl Nqn {
    /// Checks `text` and takes a copy.
    ///
    /// # Errors
    /// What is wrong with it, and what is allowed.
    pub fn new(text: &str) -> Result<Self, NqnError> {
        check(text).map(|()| Self(text.into()))
    }

    /// Reads the NUL-padded field of a data structure: the text ends at the first NUL.
    ///
    /// # Errors
    /// As [`Nqn::new`], and for bytes that are not UTF-8 or not ended by a NUL within the field.
    pub fn from_field(field: &[u8]) -> Result<Self, NqnError> {
        let end = field.iter().position(|b| *b == 0).ok_or(NqnError::Length(field.len()))?;
        let text = std::str::from_utf8(&field[..end]).map_err(|e| NqnError::NotUtf8(e.valid_up_to()))?;
        Self::new(text)
    }

    /// The name of the discovery subsystem.
    pub fn discovery() -> Self {
        Self(DISCOVERY_NQN.into())
    }

    /// The name made of `uuid`.
    pub fn from_uuid(uuid: uuid::Uuid) -> Self {
        Self(format!("{UUID_PREFIX}{uuid}").into())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this names the discovery subsystem.
    pub fn is_discovery(&self) -> bool {
        &*self.0 == DISCOVERY_NQN
    }

    /// The 256-byte field of a data structure.
    pub fn to_field(&self) -> crate::NulPadded<256> {
        let mut bytes = [0; 256];
        bytes[..self.0.len()].copy_from_slice(self.0.as_bytes());
        crate::NulPadded::from_bytes(bytes)
    }
}

fn check(text: &str) -> Result<(), NqnError> {
    if !(MIN_LEN..=MAX_LEN).contains(&text.len()) {
        return Err(NqnError::Length(text.len()));
    }
    if let Some(at) = text.bytes().position(|b| b == 0) {
        return Err(NqnError::Nul(at));
    }
    if text == DISCOVERY_NQN {
        return Ok(());
    }
    if let Some(uuid) = text.strip_prefix(UUID_PREFIX) {
        let hyphenated = uuid.len() == uuid::fmt::Hyphenated::LENGTH && uuid::Uuid::try_parse(uuid).is_ok();
        return if hyphenated { Ok(()) } else { Err(NqnError::Uuid(text.into())) };
    }
    if !has_date(text.as_bytes()) {
        return Err(NqnError::Date(text.into()));
    }
    let (head, name) = text.split_once(':').ok_or_else(|| NqnError::Name(text.into()))?;
    if name.is_empty() {
        return Err(NqnError::Name(text.into()));
    }
    // A colon inside the date was refused above, so that the head reaches past it.
    let domain = head.get(DOMAIN_START..).unwrap_or_default();
    match domain.split('.').find(|label| !is_label(label)) {
        Some(label) => Err(NqnError::Domain { nqn: text.into(), label: label.into() }),
        None => Ok(()),
    }
}

/// Whether `text` starts with `nqn.yyyy-mm.`.
fn has_date(text: &[u8]) -> bool {
    text.len() >= DOMAIN_START
        && text.iter().zip(b"nqn.dddd-dd.").all(|(byte, form)| match form {
            b'd' => byte.is_ascii_digit(),
            literal => byte == literal,
        })
}

fn is_label(label: &str) -> bool {
    let bytes = label.as_bytes();
    bytes.len() <= MAX_LABEL_LEN
        && bytes.first().is_some_and(u8::is_ascii_alphabetic)
        && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-')
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

impl AsRef<str> for Nqn {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl std::borrow::Borrow<str> for Nqn {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl FromStr for Nqn {
    type Err = NqnError;

    fn from_str(text: &str) -> Result<Self, NqnError> {
        Self::new(text)
    }
}

impl TryFrom<&str> for Nqn {
    type Error = NqnError;

    fn try_from(text: &str) -> Result<Self, NqnError> {
        Self::new(text)
    }
}
