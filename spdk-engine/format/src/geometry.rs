//! Where everything lies on a device: for a store about to be made, and for one found.
//!
//! ```text
//! page 0      super block
//! page 1      used-page mask, used-cluster mask (with room to grow), used-blobid mask
//! md_start    md_len metadata pages
//! rest        clusters for data, counted from the start of the device
//! ```
//! A [`Geometry`] is sound by construction: its numbers fit each other and the device, so that offsets calculated from
//! it neither overflow nor leave the device.

use thiserror::Error;

use crate::mask::{MaskKind, bytes_for};
use crate::superblock::{BsType, Region, SuperBlock};

/// The smallest metadata page, and what an old store's zero stands for.
pub const MIN_MD_PAGE: u32 = 4096;
/// The largest metadata page.
pub const MAX_MD_PAGE: u32 = 65536;
/// Cluster sizes are multiples of this, in bytes.
pub const CLUSTER_UNIT: u32 = 4096;

/// Why a store does not fit, or is not sound.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GeometryError {
    /// A field that cannot have this value.
    #[error("{field} is {value}; allowed is {allowed}")]
    Field {
        /// The field's name.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What it may be.
        allowed: String,
    },
    /// The device is smaller than the store.
    #[error("the store was made for a device of {recorded} bytes; this one has {device}")]
    Size {
        /// Bytes recorded in the super block.
        recorded: u64,
        /// Bytes of the device.
        device: u64,
    },
    /// The device is too small.
    #[error("metadata takes {metadata} clusters; the device has {clusters}")]
    Metadata {
        /// Clusters that metadata takes.
        metadata: u64,
        /// Clusters of the device.
        clusters: u64,
    },
    /// Two parts of the metadata lie on each other.
    #[error("{first} (pages {} to {}) and {second} (from page {}) lie on each other", .at.0, .at.1, .at.2)]
    Overlap {
        /// The part that begins first.
        first: &'static str,
        /// The other.
        second: &'static str,
        /// Begin and end of the first, begin of the second.
        at: (u64, u64, u64),
    },
    /// A mask has no room for its bits.
    #[error("the {kind} has {room} bytes; {needed} are needed")]
    MaskRoom {
        /// The mask.
        kind: MaskKind,
        /// Bytes there are.
        room: u64,
        /// Bytes needed.
        needed: u64,
    },
}

fn field(field: &'static str, value: impl Into<u64>, allowed: impl Into<String>) -> GeometryError {
    GeometryError::Field { field, value: value.into(), allowed: allowed.into() }
}

/// What a new store is made with.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Bytes of the device.
    pub device_size: u64,
    /// Bytes of the device's logical block; becomes the io unit.
    pub block_size: u32,
    /// Bytes of the device's physical block.
    pub physical_block_size: u32,
    /// Bytes of a cluster.
    pub cluster_size: u32,
    /// Bytes of a metadata page; 0 for the smallest possible.
    pub md_page_size: u32,
    /// Metadata pages; see [`lvs::md_pages`](crate::lvs::md_pages).
    pub md_pages: u32,
}

/// The numbers of a store, zeroes of old stores replaced by what they stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of the device that the store uses.
    pub size: u64,
    /// Bytes of a cluster.
    pub cluster_size: u32,
    /// Bytes of a metadata page.
    pub md_page_size: u32,
    /// Bytes of the smallest I/O.
    pub io_unit_size: u32,
    /// The used-page mask.
    pub used_page_mask: Region,
    /// The used-cluster mask.
    pub used_cluster_mask: Region,
    /// Pages that the used-cluster mask may grow to.
    pub cluster_mask_room: u32,
    /// The used-blobid mask; length 0 when there is none.
    pub used_blobid_mask: Region,
    /// First page of the metadata region.
    pub md_start: u32,
    /// Pages of the metadata region.
    pub md_len: u32,
    /// Clusters, those of the metadata included.
    pub total_clusters: u32,
}

impl Geometry {
    /// The geometry of a new store.
    pub fn plan(plan: &Plan) -> Result<Self, GeometryError> {
        let md_page_size = MIN_MD_PAGE.max(plan.md_page_size).max(plan.physical_block_size);
        check_sizes(plan.cluster_size, md_page_size, plan.block_size)?;
        if plan.md_pages == 0 {
            return Err(field("md_len", plan.md_pages, "1 or more"));
        }
        let total_clusters = clusters(plan.device_size, plan.cluster_size)?;
        let pages = |bits| u32::try_from(bytes_for(bits).div_ceil(u64::from(md_page_size))).unwrap_or(u32::MAX);
        let (page_len, cluster_len) = (pages(plan.md_pages), pages(total_clusters));
        let cluster_mask_room = cluster_len.max(page_len);
        let used_page_mask = Region { start: 1, len: page_len };
        let used_cluster_mask = Region { start: 1 + page_len, len: cluster_len };
        let used_blobid_mask = Region { start: used_cluster_mask.start + cluster_mask_room, len: page_len };
        let geometry = Self {
            size: plan.device_size,
            cluster_size: plan.cluster_size,
            md_page_size,
            io_unit_size: plan.block_size,
            used_page_mask,
            used_cluster_mask,
            cluster_mask_room,
            used_blobid_mask,
            md_start: used_blobid_mask.start + page_len,
            md_len: plan.md_pages,
            total_clusters,
        };
        geometry.check_metadata_fits()?;
        Ok(geometry)
    }

    /// The geometry of a store found on a device of `device_size` bytes.
    pub fn of(sb: &SuperBlock, device_size: u64) -> Result<Self, GeometryError> {
        if sb.size > device_size {
            return Err(GeometryError::Size { recorded: sb.size, device: device_size });
        }
        let or = |value, default| if value == 0 { default } else { value };
        let size = if sb.size == 0 { device_size } else { sb.size };
        let md_page_size = or(sb.md_page_size, MIN_MD_PAGE);
        let io_unit_size = or(sb.io_unit_size, 4096);
        check_sizes(sb.cluster_size, md_page_size, io_unit_size)?;
        if sb.md_len == 0 {
            return Err(field("md_len", sb.md_len, "1 or more"));
        }
        let room = [sb.used_page_mask.start, sb.used_blobid_mask.start, sb.md_start]
            .into_iter()
            .filter_map(|start| start.checked_sub(sb.used_cluster_mask.start))
            .filter(|room| *room > 0)
            .min()
            .unwrap_or(sb.used_cluster_mask.len);
        let geometry = Self {
            size,
            cluster_size: sb.cluster_size,
            md_page_size,
            io_unit_size,
            used_page_mask: sb.used_page_mask,
            used_cluster_mask: sb.used_cluster_mask,
            cluster_mask_room: room,
            used_blobid_mask: sb.used_blobid_mask,
            md_start: sb.md_start,
            md_len: sb.md_len,
            total_clusters: clusters(size, sb.cluster_size)?,
        };
        geometry.check_regions()?;
        geometry.check_masks()?;
        geometry.check_metadata_fits()?;
        Ok(geometry)
    }

    /// The geometry after the device has grown to `device_size` bytes. The used-cluster mask must stay within the room
    /// that was left when the store was made.
    pub fn grown(&self, device_size: u64) -> Result<Self, GeometryError> {
        if device_size < self.size {
            return Err(GeometryError::Size { recorded: self.size, device: device_size });
        }
        let total_clusters = clusters(device_size, self.cluster_size)?;
        let len = bytes_for(total_clusters).div_ceil(u64::from(self.md_page_size));
        let Some(len) = u32::try_from(len).ok().filter(|len| *len <= self.cluster_mask_room) else {
            let room = u64::from(self.cluster_mask_room) * u64::from(self.md_page_size);
            return Err(GeometryError::MaskRoom { kind: MaskKind::Clusters, room, needed: bytes_for(total_clusters) });
        };
        let used_cluster_mask = Region { len, ..self.used_cluster_mask };
        Ok(Self { size: device_size, total_clusters, used_cluster_mask, ..*self })
    }

    /// The super block of a new store, not clean and without super blob.
    pub fn super_block(&self, bstype: BsType) -> SuperBlock {
        let mut sb = SuperBlock::new(bstype);
        sb.cluster_size = self.cluster_size;
        sb.used_page_mask = self.used_page_mask;
        sb.used_cluster_mask = self.used_cluster_mask;
        sb.used_blobid_mask = self.used_blobid_mask;
        sb.md_start = self.md_start;
        sb.md_len = self.md_len;
        sb.size = self.size;
        sb.io_unit_size = self.io_unit_size;
        sb.md_page_size = self.md_page_size;
        sb
    }

    /// Whole metadata pages in a cluster; at least 1.
    pub fn pages_per_cluster(&self) -> u32 {
        self.cluster_size / self.md_page_size
    }

    /// Clusters taken by metadata: clusters 0 up to this one.
    pub fn md_clusters(&self) -> u32 {
        let pages = u64::from(self.md_start) + u64::from(self.md_len);
        // Not more than total_clusters, which was checked.
        pages.div_ceil(u64::from(self.pages_per_cluster())) as u32
    }

    /// Clusters for data.
    pub fn data_clusters(&self) -> u32 {
        self.total_clusters - self.md_clusters()
    }

    /// Byte offset of a cluster.
    pub fn cluster_offset(&self, cluster: u32) -> u64 {
        u64::from(cluster) * u64::from(self.cluster_size)
    }

    /// Byte offset of a page of the metadata region, by its index there.
    pub fn page_offset(&self, index: u32) -> u64 {
        (u64::from(self.md_start) + u64::from(index)) * u64::from(self.md_page_size)
    }

    /// Byte offset and length of a run of pages.
    pub fn region_bytes(&self, region: Region) -> (u64, u64) {
        let page = u64::from(self.md_page_size);
        (u64::from(region.start) * page, u64::from(region.len) * page)
    }

    /// Where a mask lies.
    pub fn mask(&self, kind: MaskKind) -> Region {
        match kind {
            MaskKind::Pages => self.used_page_mask,
            MaskKind::Clusters => self.used_cluster_mask,
            MaskKind::BlobIds => self.used_blobid_mask,
        }
    }

    /// How many bits a mask has.
    pub fn mask_bits(&self, kind: MaskKind) -> u32 {
        match kind {
            MaskKind::Clusters => self.total_clusters,
            MaskKind::Pages | MaskKind::BlobIds => self.md_len,
        }
    }

    /// Bytes that the store may grow to, as SPDK reports them: what a used-cluster mask of as many pages as the
    /// used-page mask can count.
    pub fn max_growable_size(&self) -> u64 {
        let page = u64::from(self.md_page_size);
        let bytes = bytes_for(self.md_len).div_ceil(page) * page - crate::mask::HEADER as u64;
        bytes * 8 * u64::from(self.cluster_size)
    }

    fn check_metadata_fits(&self) -> Result<(), GeometryError> {
        let pages = u64::from(self.md_start) + u64::from(self.md_len);
        let metadata = pages.div_ceil(u64::from(self.pages_per_cluster()));
        let clusters = u64::from(self.total_clusters);
        if metadata > clusters {
            return Err(GeometryError::Metadata { metadata, clusters });
        }
        Ok(())
    }

    fn check_regions(&self) -> Result<(), GeometryError> {
        let md = Region { start: self.md_start, len: self.md_len };
        let mut parts = vec![
            ("the super block", Region { start: 0, len: 1 }),
            ("the used-page mask", self.used_page_mask),
            ("the used-cluster mask", self.used_cluster_mask),
            ("the metadata region", md),
        ];
        if self.used_blobid_mask.len > 0 {
            parts.push(("the used-blobid mask", self.used_blobid_mask));
        }
        parts.sort_by_key(|(_, region)| region.start);
        for pair in parts.windows(2) {
            let ((first, a), (second, b)) = (pair[0], pair[1]);
            if a.end() > u64::from(b.start) {
                return Err(GeometryError::Overlap { first, second, at: (a.start.into(), a.end(), b.start.into()) });
            }
        }
        let end = parts.last().map_or(0, |(_, region)| region.end()) * u64::from(self.md_page_size);
        if end > self.size {
            return Err(field("md_start", self.md_start, format!("metadata that ends within {} bytes", self.size)));
        }
        Ok(())
    }

    fn check_masks(&self) -> Result<(), GeometryError> {
        for kind in [MaskKind::Pages, MaskKind::Clusters, MaskKind::BlobIds] {
            let region = self.mask(kind);
            let (room, needed) = (self.region_bytes(region).1, bytes_for(self.mask_bits(kind)));
            if room < needed && !(kind == MaskKind::BlobIds && region.len == 0) {
                return Err(GeometryError::MaskRoom { kind, room, needed });
            }
        }
        Ok(())
    }
}

fn check_sizes(cluster_size: u32, md_page_size: u32, io_unit_size: u32) -> Result<(), GeometryError> {
    if !md_page_size.is_power_of_two() || !(MIN_MD_PAGE..=MAX_MD_PAGE).contains(&md_page_size) {
        return Err(field("md_page_size", md_page_size, "a power of two from 4096 to 65536"));
    }
    if cluster_size < md_page_size || !cluster_size.is_multiple_of(CLUSTER_UNIT) {
        return Err(field("cluster_size", cluster_size, format!("a multiple of 4096, at least {md_page_size}")));
    }
    if io_unit_size == 0 || !cluster_size.is_multiple_of(io_unit_size) {
        return Err(field("io_unit_size", io_unit_size, format!("a divisor of the cluster size, {cluster_size}")));
    }
    Ok(())
}

fn clusters(size: u64, cluster_size: u32) -> Result<u32, GeometryError> {
    let clusters = size / u64::from(cluster_size);
    let allowed = || format!("{cluster_size} up to {} clusters of that many bytes", u32::MAX);
    u32::try_from(clusters).ok().filter(|n| *n > 0).ok_or_else(|| field("size", size, allowed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_a_512_mib_device() {
        let plan = Plan {
            device_size: 512 << 20,
            block_size: 512,
            physical_block_size: 512,
            cluster_size: 1 << 20,
            md_page_size: 0,
            md_pages: 512,
        };
        let g = Geometry::plan(&plan).unwrap();
        assert_eq!(g.used_page_mask, Region { start: 1, len: 1 });
        assert_eq!(g.used_cluster_mask, Region { start: 2, len: 1 });
        assert_eq!(g.used_blobid_mask, Region { start: 3, len: 1 });
        assert_eq!((g.md_start, g.md_clusters(), g.data_clusters()), (4, 3, 509));
        assert_eq!(Geometry::of(&g.super_block(BsType::LVOLSTORE), plan.device_size), Ok(g));
        assert_eq!(g.max_growable_size(), 34_317_795_328);
        let grown = g.grown(34_317_795_328).unwrap();
        assert_eq!(grown.used_cluster_mask.len, 1);
        assert!(g.grown(34_317_795_328 + (1 << 20)).is_err());
    }

    #[test]
    fn the_cluster_mask_has_room_for_as_many_clusters_as_pages() {
        let plan = Plan {
            device_size: 64 << 20,
            block_size: 512,
            physical_block_size: 4096,
            cluster_size: 1 << 20,
            md_page_size: 0,
            md_pages: 10_000,
        };
        // 64 clusters need one page; 10000 bits take 1255 bytes, still one.
        assert_eq!(Geometry::plan(&plan).unwrap().cluster_mask_room, 1);
        // 100000 bits take 12505 bytes: four pages, of which the present mask needs one.
        let g = Geometry::plan(&Plan { device_size: 1 << 30, md_pages: 100_000, ..plan }).unwrap();
        assert_eq!((g.used_page_mask.len, g.used_cluster_mask.len, g.cluster_mask_room), (4, 1, 4));
        assert_eq!((g.used_cluster_mask.start, g.used_blobid_mask.start, g.md_start), (5, 9, 13));
        assert_eq!(Geometry::of(&g.super_block(BsType::LVOLSTORE), 1 << 30), Ok(g));
        assert_eq!(g.grown(g.max_growable_size()).unwrap().used_cluster_mask.len, 4);
        assert!(g.grown(g.max_growable_size() + (1 << 20)).is_err());
    }

    #[test]
    fn numbers_that_fit_nothing_are_refused() {
        let plan = Plan {
            device_size: 64 << 20,
            block_size: 512,
            physical_block_size: 512,
            cluster_size: 1 << 20,
            md_page_size: 0,
            md_pages: 64,
        };
        let good = Geometry::plan(&plan).unwrap().super_block(BsType::LVOLSTORE);
        let refused = |change: fn(&mut SuperBlock)| {
            let mut sb = good.clone();
            change(&mut sb);
            Geometry::of(&sb, plan.device_size).unwrap_err().to_string()
        };
        assert!(refused(|sb| sb.cluster_size = 0).contains("cluster_size is 0"));
        assert!(refused(|sb| sb.cluster_size = 5000).contains("cluster_size is 5000; allowed is a multiple of 4096"));
        assert!(refused(|sb| sb.md_page_size = 5000).contains("md_page_size is 5000"));
        assert!(refused(|sb| sb.io_unit_size = 3).contains("io_unit_size is 3"));
        assert!(refused(|sb| sb.md_len = 0).contains("md_len is 0"));
        assert!(refused(|sb| sb.md_len = u32::MAX).contains("metadata"));
        assert!(refused(|sb| sb.md_start = 2).contains("lie on each other"));
        assert!(refused(|sb| sb.used_cluster_mask.len = 0).contains("used-cluster mask has 0 bytes; 13 are needed"));
        assert!(refused(|sb| sb.size += 1).contains("this one has 67108864"));
        assert!(refused(|sb| sb.size = 4096).contains("4096"));
    }
}
