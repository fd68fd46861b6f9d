//! What is measured: cells of device, pattern, block size, depth and connections, their names, and the choice of them.
//!
//! A cell is named `device/pattern/block/qdDEPTH/cCONNECTIONS`, such as `malloc/read/4k/qd32/c1`. The depth is the
//! number of I/Os in flight over all connections. A filter is such a name in which a part may be `*`, or a list with
//! commas, and parts at the end may be left out: `malloc,null/read/4k`.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;

/// What lies behind the namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum)]
pub enum Device {
    /// Answers at once.
    Null,
    /// Memory.
    Malloc,
    /// A file, by io_uring; by libaio where a data plane has no io_uring.
    Uring,
    /// SPDK's raid1 over three malloc devices.
    Raid1,
    /// The mirror over three malloc devices; raid1 in a data plane without mirrors.
    Mirror,
    /// The mirror over three subsystems of the same data plane, by NVMe/TCP; raid1 likewise.
    MirrorTcp,
    /// The mirror over three null devices with write-intent bits: a small volume, whose regions stay hot.
    MirrorHot,
    /// The same of 1 TiB, where nearly every write is the first to its region for long.
    MirrorCold,
    /// A fully allocated logical volume.
    LvolThick,
    /// A thin logical volume: every I/O is, if it can be, the first to its cluster.
    LvolThin,
    /// A logical volume with a snapshot: every I/O is, if it can be, the first to its cluster since.
    LvolCow,
}

impl Device {
    /// All of them, in the order in which they are measured.
    pub const ALL: [Self; 11] = [
        Self::Null,
        Self::Malloc,
        Self::Uring,
        Self::Raid1,
        Self::Mirror,
        Self::MirrorTcp,
        Self::MirrorHot,
        Self::MirrorCold,
        Self::LvolThick,
        Self::LvolThin,
        Self::LvolCow,
    ];

    /// As in names of cells.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Malloc => "malloc",
            Self::Uring => "uring",
            Self::Raid1 => "raid1x3",
            Self::Mirror => "mirror3-local",
            Self::MirrorTcp => "mirror3-tcp",
            Self::MirrorHot => "mirror3-hot",
            Self::MirrorCold => "mirror3-cold",
            Self::LvolThick => "lvol-thick",
            Self::LvolThin => "lvol-thin",
            Self::LvolCow => "lvol-cow",
        }
    }

    /// For people.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::Null => "null device",
            Self::Malloc => "malloc device",
            Self::Uring => "file by io_uring",
            Self::Raid1 => "raid1 over three malloc devices",
            Self::Mirror => "mirror over three malloc devices",
            Self::MirrorTcp => "mirror over three NVMe/TCP subsystems",
            Self::MirrorHot => "mirror over three null devices, with bits, hot",
            Self::MirrorCold => "mirror over three null devices of 1 TiB, with bits, cold",
            Self::LvolThick => "thick lvol, overwritten",
            Self::LvolThin => "thin lvol, first writes",
            Self::LvolCow => "lvol with a snapshot, first writes",
        }
    }

    /// Whether what a run finds is used up by it: the device is made anew for every run, and a run has so many I/Os.
    #[must_use]
    pub const fn first_writes(self) -> bool {
        matches!(self, Self::LvolThin | Self::LvolCow)
    }

    /// The device of the same engine that it is compared with, and the least part of its IOPS promised.
    #[must_use]
    pub const fn plain(self) -> Option<(Self, f64)> {
        match self {
            Self::LvolThick => Some((Self::Malloc, 0.97)),
            Self::Mirror => Some((Self::Raid1, 0.95)),
            // What a cold volume costs is told, not promised.
            Self::MirrorCold => Some((Self::MirrorHot, 0.0)),
            _ => None,
        }
    }

    /// Whether it is a logical volume.
    #[must_use]
    pub const fn is_lvol(self) -> bool {
        matches!(self, Self::LvolThick | Self::LvolThin | Self::LvolCow)
    }
}

/// The kind of load; always in random order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pattern {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Seven reads in ten.
    Mixed,
}

/// Percentage of reads in [`Pattern::Mixed`].
pub const MIX: u32 = 70;

impl Pattern {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Mixed];

    /// As in names of cells.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Mixed => "mixed",
        }
    }

    /// As the load generators, both of them, call it.
    #[must_use]
    pub const fn rw(self) -> &'static str {
        match self {
            Self::Read => "randread",
            Self::Write => "randwrite",
            Self::Mixed => "randrw",
        }
    }

    /// Percentage of reads.
    #[must_use]
    pub const fn read_percent(self) -> u32 {
        match self {
            Self::Read => 100,
            Self::Write => 0,
            Self::Mixed => MIX,
        }
    }
}

/// Block sizes of the matrix, in bytes.
pub const BLOCKS: [u32; 5] = [512, 4 << 10, 16 << 10, 128 << 10, 1 << 20];
/// Depths of the matrix.
pub const DEPTHS: [u16; 5] = [1, 8, 16, 32, 128];
/// Connections of the matrix.
pub const CONNECTIONS: [u16; 2] = [1, 4];

/// One thing to measure; see the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cell {
    pub device: Device,
    pub pattern: Pattern,
    /// Bytes of an I/O.
    pub block: u32,
    /// I/Os in flight over all connections.
    pub depth: u16,
    /// TCP connections for I/O.
    pub connections: u16,
}

impl Cell {
    /// Block size of the namespace, in bytes: 4 KiB unless I/Os are smaller.
    #[must_use]
    pub fn lba(&self) -> u32 {
        self.block.min(4096)
    }

    /// Whether it means anything: each connection has something in flight, and first writes are writes of at most a
    /// cluster.
    #[must_use]
    pub fn is_meaningful(&self) -> bool {
        let first =
            !self.device.first_writes() || (self.pattern == Pattern::Write && self.block <= super::setup::CLUSTER);
        self.depth >= self.connections && first
    }
}

fn block_name(block: u32) -> String {
    match block {
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{}m", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{}k", b >> 10),
        b => b.to_string(),
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, pattern, block, depth, connections } = self;
        write!(f, "{}/{}/{}/qd{depth}/c{connections}", device.name(), pattern.name(), block_name(*block))
    }
}

impl FromStr for Cell {
    type Err = String;

    /// A full name, in which each part is one that the matrix has.
    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split('/').collect();
        full()
            .into_iter()
            .find(|cell| parts == cell.parts())
            .ok_or_else(|| format!("{text:?} is no cell: a name such as malloc/read/4k/qd32/c1 is needed"))
    }
}

impl Cell {
    fn parts(&self) -> [String; 5] {
        let Self { device, pattern, block, depth, connections } = self;
        [
            device.name().to_owned(),
            pattern.name().to_owned(),
            block_name(*block),
            format!("qd{depth}"),
            format!("c{connections}"),
        ]
    }
}

/// Every meaningful cell, in the order in which they are measured: all of one device and block size of it together.
#[must_use]
pub fn full() -> Vec<Cell> {
    let mut cells = Vec::new();
    for device in Device::ALL {
        for block in BLOCKS {
            for pattern in Pattern::ALL {
                for depth in DEPTHS {
                    cells.extend(CONNECTIONS.map(|connections| Cell { device, pattern, block, depth, connections }));
                }
            }
        }
    }
    cells.retain(Cell::is_meaningful);
    cells
}

/// What is measured unless something is asked for: the cells that the project promises something about, and one or two
/// of each other device.
const QUICK: [&str; 11] = [
    "null,malloc,raid1x3/read,write/4k/qd1,qd32,qd128/c1",
    "malloc,null/read,write/128k/qd16/c1",
    "malloc/mixed/4k/qd32/c1",
    "malloc/read/4k/qd128/c4",
    "uring/read,write/4k/qd32/c1",
    "mirror3-local/write/4k/qd1,qd32/c1",
    "mirror3-tcp/write/4k/qd32/c1",
    "mirror3-cold/write/4k/qd32/c1",
    "lvol-thick/write/4k/qd32/c1",
    "lvol-thin/write/4k/qd32/c1",
    "lvol-cow/write/4k/qd32/c1",
];

/// The quick subset.
#[must_use]
pub fn quick() -> Vec<Cell> {
    let filters: Vec<Filter> = QUICK.iter().filter_map(|text| text.parse().ok()).collect();
    select(&filters)
}

/// The cells of the full matrix that any of the filters lets through.
#[must_use]
pub fn select(filters: &[Filter]) -> Vec<Cell> {
    full().into_iter().filter(|cell| filters.iter().any(|filter| filter.allows(cell))).collect()
}

/// Which cells; see the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// For each part of a name the values allowed; any value when empty.
    parts: Vec<Vec<String>>,
}

impl Filter {
    /// Whether a cell is meant.
    #[must_use]
    pub fn allows(&self, cell: &Cell) -> bool {
        cell.parts().iter().zip(&self.parts).all(|(part, allowed)| allowed.is_empty() || allowed.contains(part))
    }
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = |what: String| {
            format!(
                "{text:?}: {what}; DEVICE/PATTERN/BLOCK/qdDEPTH/cCONNECTIONS is needed, as in malloc/read/4k/qd32/c1 \
                 or null,malloc/*/4k"
            )
        };
        let all: Vec<[String; 5]> = full().iter().map(Cell::parts).collect();
        let mut parts = Vec::new();
        for (index, part) in text.split('/').enumerate() {
            if index >= 5 {
                return Err(refuse("it has more than five parts".to_owned()));
            }
            let values: Vec<String> = match part {
                "*" => Vec::new(),
                list => list.split(',').map(str::to_lowercase).collect(),
            };
            if let Some(unknown) = values.iter().find(|value| all.iter().all(|cell| cell[index] != **value)) {
                return Err(refuse(format!("no cell has {unknown:?} as its part {}", index + 1)));
            }
            parts.push(values);
        }
        Ok(Self { parts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_cells() {
        for cell in full() {
            assert_eq!(cell.to_string().parse(), Ok(cell));
        }
        let cell: Cell = "malloc/read/4k/qd32/c1".parse().unwrap();
        assert_eq!((cell.block, cell.depth, cell.connections, cell.lba()), (4096, 32, 1, 4096));
        assert_eq!("null/read/512/qd1/c1".parse::<Cell>().unwrap().lba(), 512);
        for bad in ["", "malloc", "malloc/read/4k/qd32", "malloc/read/3k/qd32/c1", "malloc/read/4k/qd1/c4"] {
            assert!(bad.parse::<Cell>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_full_matrix_has_every_meaningful_cell_once() {
        let cells = full();
        let set: std::collections::BTreeSet<String> = cells.iter().map(Cell::to_string).collect();
        assert_eq!(set.len(), cells.len());
        // Nine depths with connections each; first writes only write, and at most a cluster.
        assert_eq!(cells.len(), 9 * (3 * 5 * 9) + 2 * 3 * 9);
        assert!(!set.contains("lvol-thin/read/4k/qd1/c1") && set.contains("lvol-thin/write/16k/qd128/c4"));
    }

    #[test]
    fn the_quick_subset_has_what_is_promised() {
        let quick: Vec<String> = quick().iter().map(Cell::to_string).collect();
        assert!(QUICK.iter().all(|text| text.parse::<Filter>().is_ok()));
        for device in ["null", "malloc", "raid1x3"] {
            for pattern in ["read", "write"] {
                for depth in [1, 32, 128] {
                    assert!(quick.contains(&format!("{device}/{pattern}/4k/qd{depth}/c1")));
                }
            }
        }
        assert!(quick.contains(&"malloc/read/128k/qd16/c1".to_owned()));
        assert!((20..=34).contains(&quick.len()), "{} cells take more than ten minutes", quick.len());
    }

    #[test]
    fn filters_may_be_short_and_have_lists() {
        let count = |text: &str| select(&[text.parse().unwrap()]).len();
        assert_eq!(count("malloc/read/4k/qd32/c1"), 1);
        assert_eq!(count("malloc/read/4k/qd32"), 2);
        assert_eq!(count("malloc,null/READ/4k/qd32/c1"), 2);
        assert_eq!(count("*/write/4k/qd1"), 11);
        for bad in ["nothing", "malloc/read/4k/qd32/c1/x", "malloc/write/3k", "malloc//4k", "malloc/read/4k/32"] {
            assert!(bad.parse::<Filter>().is_err(), "{bad}");
        }
    }
}
