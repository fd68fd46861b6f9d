//! The data path of this crate: byte ranges of a blob, cluster by cluster.
//!
//! Every access to the disk by a map lookup is counted in an epoch of the store ([`Inner::grace`]), and every request in
//! the blob's gate, so that neither a release nor a change of the map pulls a cluster away under it.

use super::{Blob, Fill, Inner};
use crate::{
    device::{Device, DeviceError},
    error::Error,
    map::Place,
    store::IN_FLIGHT,
    sync::all,
};
use futures::StreamExt;
use std::ops::Range;

/// Part of a request within one cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    cluster: u64,
    /// Bytes from the start of the cluster.
    at: u64,
    len: u64,
    /// Bytes from the start of the request.
    from: u64,
}

/// Splits a byte range at cluster borders.
fn pieces(offset: u64, len: u64, cluster_size: u64) -> impl Iterator<Item = Piece> {
    let mut from = 0;
    std::iter::from_fn(move || {
        if from >= len {
            return None;
        }
        let (cluster, at) = ((offset + from) / cluster_size, (offset + from) % cluster_size);
        let piece = Piece { cluster, at, len: (cluster_size - at).min(len - from), from };
        from += piece.len;
        Some(piece)
    })
}

/// Reads any bytes of a device, whatever its block size.
async fn read_bytes(device: &dyn Device, offset: u64, len: u64) -> Result<Vec<u8>, DeviceError> {
    let block = u64::from(device.block_size().max(1));
    let (start, end) = (offset / block * block, (offset + len).next_multiple_of(block));
    let mut bytes = device.read(start, (end - start) as usize).await?;
    bytes.drain(..(offset - start) as usize);
    bytes.truncate(len as usize);
    Ok(bytes)
}

impl Inner {
    /// Checks that a request lies within the blob and fits its I/O unit.
    pub(crate) fn check_range(&self, blob: &Blob, offset: u64, len: u64) -> Result<(), Error> {
        let (unit, size) = (u64::from(self.geometry().io_unit_size), blob.num_clusters() * self.cluster_size());
        let fits = offset.checked_add(len).is_some_and(|end| end <= size);
        if !fits || !offset.is_multiple_of(unit) || !len.is_multiple_of(unit) {
            return Err(Error::Invalid(format!(
                "a request of {len} bytes at {offset} is not within {size} bytes in units of {unit}"
            )));
        }
        Ok(())
    }

    /// The clusters that a byte range touches.
    fn clusters_of(&self, offset: u64, len: u64) -> Range<u64> {
        let size = self.cluster_size();
        offset / size..(offset + len).div_ceil(size)
    }

    pub(crate) async fn read(&self, blob: &Blob, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
        self.check_range(blob, offset, len as u64)?;
        let jobs = pieces(offset, len as u64, self.cluster_size()).map(|piece| self.read_piece(blob, piece));
        let mut reads = futures::stream::iter(jobs).buffered(IN_FLIGHT);
        let (mut out, mut result) = (Vec::with_capacity(len), Ok(()));
        while let Some(read) = reads.next().await {
            match read {
                Ok(bytes) => out.extend(bytes),
                Err(error) => result = result.and(Err(error)),
            }
        }
        result.map(|()| out)
    }

    async fn read_piece(&self, blob: &Blob, piece: Piece) -> Result<Vec<u8>, Error> {
        let _access = self.accesses.enter();
        match blob.map.view().place(piece.cluster) {
            Place::Own(at) | Place::Ancestor(at) => {
                Ok(self.device.read(self.geometry().cluster_offset(at) + piece.at, piece.len as usize).await?)
            }
            Place::Zeroes => Ok(vec![0; piece.len as usize]),
            Place::External => {
                let offset = piece.cluster * self.cluster_size() + piece.at;
                let (device, shown) = self.external_of(blob, offset, piece.len)?;
                let mut bytes = if shown > 0 { read_bytes(&*device, offset, shown).await? } else { Vec::new() };
                bytes.resize(piece.len as usize, 0);
                Ok(bytes)
            }
        }
    }

    pub(crate) async fn write(&self, blob: &Blob, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.check_range(blob, offset, data.len() as u64)?;
        self.allocate(blob, self.clusters_of(offset, data.len() as u64), Fill::Shown).await?;
        let jobs = pieces(offset, data.len() as u64, self.cluster_size()).map(|piece| {
            let data = &data[piece.from as usize..(piece.from + piece.len) as usize];
            self.write_piece(blob, piece, data)
        });
        all(IN_FLIGHT, jobs).await
    }

    async fn write_piece(&self, blob: &Blob, piece: Piece, data: &[u8]) -> Result<(), Error> {
        loop {
            let access = self.accesses.enter();
            match blob.map.table().get(piece.cluster) {
                0 => {
                    // An unmap beside this write released the cluster again.
                    drop(access);
                    self.allocate(blob, piece.cluster..piece.cluster + 1, Fill::Shown).await?;
                }
                at => return Ok(self.device.write(self.geometry().cluster_offset(at) + piece.at, data).await?),
            }
        }
    }

    /// Makes a range read as zeroes; `unmap` says that its space is not wanted either.
    pub(crate) async fn zero(&self, blob: &Blob, offset: u64, len: u64, unmap: bool) -> Result<(), Error> {
        self.check_range(blob, offset, len)?;
        let size = self.cluster_size();
        let whole: Vec<u64> = pieces(offset, len, size).filter(|p| p.len == size).map(|p| p.cluster).collect();
        self.release(blob, &whole).await?;
        let jobs = pieces(offset, len, size).map(|piece| self.zero_piece(blob, piece, unmap));
        all(IN_FLIGHT, jobs).await
    }

    async fn zero_piece(&self, blob: &Blob, piece: Piece, unmap: bool) -> Result<(), Error> {
        let fill = if piece.len == self.cluster_size() { Fill::Zeroes } else { Fill::Shown };
        loop {
            let access = self.accesses.enter();
            match blob.map.view().place(piece.cluster) {
                Place::Own(at) => {
                    let offset = self.geometry().cluster_offset(at) + piece.at;
                    return if unmap {
                        self.zero_bytes(offset, piece.len).await
                    } else {
                        Ok(self.device.write_zeroes(offset, piece.len).await?)
                    };
                }
                Place::Zeroes => return Ok(()),
                Place::External => {
                    let offset = piece.cluster * self.cluster_size();
                    if self.external_of(blob, offset, self.cluster_size())?.1 == 0 {
                        return Ok(());
                    }
                }
                Place::Ancestor(_) => {}
            }
            // The parent shows data here: only a cluster of its own hides it.
            drop(access);
            self.allocate(blob, piece.cluster..piece.cluster + 1, fill).await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_split_at_cluster_borders() {
        let all: Vec<Piece> = pieces(3000, 6000, 4096).collect();
        let piece = |cluster, at, len, from| Piece { cluster, at, len, from };
        assert_eq!(all, [piece(0, 3000, 1096, 0), piece(1, 0, 4096, 1096), piece(2, 0, 808, 5192)]);
        assert_eq!(pieces(4096, 0, 4096).count(), 0);
    }
}
