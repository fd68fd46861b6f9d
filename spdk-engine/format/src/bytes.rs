//! Little-endian fields at fixed offsets. A field outside the slice reads as zero and is not written: callers check
//! lengths first, and a wrong offset here must not panic on hostile input.

pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    if let Some(field) = bytes.get(at..at.saturating_add(N)) {
        out.copy_from_slice(field);
    }
    out
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

pub(crate) fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    if let Some(place) = bytes.get_mut(at..at.saturating_add(field.len())) {
        place.copy_from_slice(field);
    }
}
