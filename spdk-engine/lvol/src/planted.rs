//! Steps that a test can leave out on purpose, to show that the tests notice.
//!
//! Without the feature `planted-bugs` [`is`] is always false and costs nothing.

/// A step that is left out or done too early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A copied or zeroed cluster is not durable when an extent page names it.
    ExtentBeforeData,
    /// The root page is written before the chain pages that it names are durable.
    RootBeforeChain,
    /// Clusters are given to others before the metadata that named them is durably gone.
    ReuseBeforeUnnamed,
    /// A commit is reported before it is durable.
    CommitNotDurable,
    /// A snapshot in the making bears no mark.
    NoMark,
    /// Half-made and half-deleted snapshots are taken for whole ones.
    NoRepair,
    /// Metadata pages that nothing names any more are not given back.
    LeakPages,
    /// The clusters of a deleted snapshot that its clone has of its own are not given back.
    LeakClusters,
    /// A new cluster is not zeroed on a disk that may show old data.
    NoZeroing,
    /// A copy on write copies nothing.
    NoCopy,
    /// The super block says clean while the store is in use.
    StaysClean,
    /// A flush of a volume does not reach the disk.
    NoFlush,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::ExtentBeforeData,
        Self::RootBeforeChain,
        Self::ReuseBeforeUnnamed,
        Self::CommitNotDurable,
        Self::NoMark,
        Self::NoRepair,
        Self::LeakPages,
        Self::LeakClusters,
        Self::NoZeroing,
        Self::NoCopy,
        Self::StaysClean,
        Self::NoFlush,
    ];
}

#[cfg(feature = "planted-bugs")]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Plants a bug for this thread, or removes it.
#[cfg(feature = "planted-bugs")]
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// Whether this bug is planted.
#[cfg(feature = "planted-bugs")]
pub(crate) fn is(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

/// Whether this bug is planted: never.
#[cfg(not(feature = "planted-bugs"))]
#[inline]
pub(crate) const fn is(_bug: Bug) -> bool {
    false
}
