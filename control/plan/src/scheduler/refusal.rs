//! Why a node or a disk was refused, as a type and in words.

use std::collections::BTreeMap;
use std::fmt;

/// Why a node or a disk does not take a copy. Sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// The node is being removed.
    NodeDeleting,
    /// The node does not give signs of life, or its agent does not answer.
    NodeNotReady,
    /// Somebody has switched scheduling off for the node.
    NodeSchedulingDisabled,
    /// The node lacks tags.
    NodeTagsMissing(Vec<String>),
    /// The node holds a copy of the volume already.
    NodeHoldsCopy,
    /// The node has no disk.
    NoDisk,
    /// Somebody has switched scheduling off for the disk.
    DiskSchedulingDisabled,
    /// The disk cannot be used; the node's status says why.
    DiskNotReady(String),
    /// The disk lacks tags.
    DiskTagsMissing(Vec<String>),
    /// Too little would stay free.
    DiskFull {
        /// Free now.
        available: i64,
        /// What must stay free.
        keep_free: i64,
    },
    /// Too much would be promised.
    DiskOverCommitted {
        /// Promised now.
        scheduled: i64,
        /// What may be promised at most.
        limit: i64,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NodeDeleting => write!(f, "being removed"),
            Refusal::NodeNotReady => write!(f, "not ready"),
            Refusal::NodeSchedulingDisabled => write!(f, "scheduling is disabled"),
            Refusal::NodeTagsMissing(tags) => write!(f, "lacking the tags {}", tags.join(", ")),
            Refusal::NodeHoldsCopy => write!(f, "already holding a copy"),
            Refusal::NoDisk => write!(f, "without a disk"),
            Refusal::DiskSchedulingDisabled => write!(f, "scheduling is disabled"),
            Refusal::DiskNotReady(why) => write!(f, "unusable ({why})"),
            Refusal::DiskTagsMissing(tags) => write!(f, "lacking the tags {}", tags.join(", ")),
            Refusal::DiskFull { available, keep_free } => {
                write!(f, "{} free, of which {} must stay free", bytes(*available), bytes(*keep_free))
            }
            Refusal::DiskOverCommitted { scheduled, limit } => {
                write!(f, "{} of {} promised", bytes(*scheduled), bytes(*limit))
            }
        }
    }
}

/// A refusal and whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The node.
    pub node: String,
    /// The disk, if it is the disk that was refused.
    pub disk: Option<String>,
    /// Why.
    pub reason: Refusal,
}

impl Refused {
    pub(crate) fn node(node: &str, reason: Refusal) -> Self {
        Self { node: node.to_owned(), disk: None, reason }
    }

    pub(crate) fn disk(node: &str, disk: &str, reason: Refusal) -> Self {
        Self { node: node.to_owned(), disk: Some(disk.to_owned()), reason }
    }

    fn place(&self) -> String {
        match &self.disk {
            None => self.node.clone(),
            Some(disk) => format!("{}/{disk}", self.node),
        }
    }
}

/// No disk takes the copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoPlace {
    /// Size of the copy, in bytes.
    pub size: i64,
    /// Why, for each.
    pub refusals: Vec<Refused>,
}

/// How many places a sentence lists by name before it counts the rest.
const NAMED_PLACES_MAX: usize = 4;

impl fmt::Display for NoPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no place for a copy of {}: ", bytes(self.size))?;
        if self.refusals.is_empty() {
            return write!(f, "there are no nodes");
        }
        let mut by_reason: BTreeMap<&Refusal, Vec<String>> = BTreeMap::new();
        for refused in &self.refusals {
            by_reason.entry(&refused.reason).or_default().push(refused.place());
        }
        for (index, (reason, places)) in by_reason.iter().enumerate() {
            if index > 0 {
                write!(f, "; ")?;
            }
            let named = places.iter().take(NAMED_PLACES_MAX).cloned().collect::<Vec<_>>().join(", ");
            write!(f, "{named}")?;
            if places.len() > NAMED_PLACES_MAX {
                write!(f, " and {} more", places.len() - NAMED_PLACES_MAX)?;
            }
            write!(f, ": {reason}")?;
        }
        Ok(())
    }
}

/// A size for people: the largest binary unit, with one digit after the point where it is not whole.
pub(crate) fn bytes(size: i64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut divisor = 1_i64;
    while unit + 1 < UNITS.len() && size.unsigned_abs() / 1024 >= divisor.unsigned_abs() {
        divisor *= 1024;
        unit += 1;
    }
    let tenths = i128::from(size) * 10 / i128::from(divisor);
    if tenths % 10 == 0 {
        format!("{} {}", tenths / 10, UNITS[unit])
    } else {
        format!("{}.{} {}", tenths / 10, (tenths % 10).abs(), UNITS[unit])
    }
}
