//! Hugepage sizes, as the kernel names them.
//!
//! A [`PageSize`] is a power of two of at least 64 KiB. The kernel's directory names (`hugepages-2048kB`) are the
//! only text form that is parsed; people see binary units (`2 MiB`).

use std::fmt;

use serde::{Deserialize, Serialize};

const SMALLEST_BYTES: u64 = 64 << 10;

/// Size of one hugepage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct PageSize(u64);

/// A number or a name that is no hugepage size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("hugepage size {0:?} is not allowed: a power of two of at least 65536 bytes is needed")]
pub struct ParsePageSizeError(String);

impl PageSize {
    /// 2 MiB, the size every x86-64 and arm64 host with 4 KiB base pages has.
    pub const MIB_2: Self = Self(2 << 20);
    /// 1 GiB, usually set aside only at boot.
    pub const GIB_1: Self = Self(1 << 30);

    /// Checks a size in bytes.
    ///
    /// # Errors
    /// When `bytes` is not a power of two or is below 64 KiB.
    pub fn from_bytes(bytes: u64) -> Result<Self, ParsePageSizeError> {
        if bytes.is_power_of_two() && bytes >= SMALLEST_BYTES {
            Ok(Self(bytes))
        } else {
            Err(ParsePageSizeError(bytes.to_string()))
        }
    }

    /// Reads the kernel's directory name, for example `hugepages-2048kB`.
    ///
    /// # Errors
    /// When the name has another form or the size in it is not allowed.
    pub fn from_dir_name(name: &str) -> Result<Self, ParsePageSizeError> {
        name.strip_prefix("hugepages-")
            .and_then(|rest| rest.strip_suffix("kB"))
            .and_then(|kib| kib.parse::<u64>().ok())
            .and_then(|kib| kib.checked_mul(1024))
            .and_then(|bytes| Self::from_bytes(bytes).ok())
            .ok_or_else(|| ParsePageSizeError(name.to_owned()))
    }

    /// Size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Name of the kernel's directory for this size.
    #[must_use]
    pub fn dir_name(self) -> String {
        format!("hugepages-{}kB", self.0 >> 10)
    }

    /// Binary logarithm of the size, which is how `mmap` wants it.
    #[must_use]
    pub(crate) const fn log2(self) -> u32 {
        self.0.trailing_zeros()
    }
}

impl Default for PageSize {
    fn default() -> Self {
        Self::MIB_2
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            bytes if bytes >= 1 << 30 => format!("{} GiB", bytes >> 30),
            bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
            bytes => format!("{} KiB", bytes >> 10),
        };
        f.pad(&text)
    }
}

impl TryFrom<u64> for PageSize {
    type Error = ParsePageSizeError;

    fn try_from(bytes: u64) -> Result<Self, Self::Error> {
        Self::from_bytes(bytes)
    }
}

impl From<PageSize> for u64 {
    fn from(size: PageSize) -> Self {
        size.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_names_round_trip() {
        for (name, bytes, text) in [
            ("hugepages-64kB", 64 << 10, "64 KiB"),
            ("hugepages-2048kB", 2 << 20, "2 MiB"),
            ("hugepages-1048576kB", 1 << 30, "1 GiB"),
        ] {
            let size = PageSize::from_dir_name(name).unwrap();
            assert_eq!(size.bytes(), bytes);
            assert_eq!(size.dir_name(), name);
            assert_eq!(size.to_string(), text);
        }
    }

    #[test]
    fn other_names_are_refused_by_name() {
        for name in
            ["", "hugepages-", "hugepages-3kB", "hugepages-2048", "pages-2048kB", "hugepages-18446744073709551615kB"]
        {
            let error = PageSize::from_dir_name(name).unwrap_err();
            assert!(error.to_string().contains(&format!("{name:?}")), "{error}");
        }
    }
}
