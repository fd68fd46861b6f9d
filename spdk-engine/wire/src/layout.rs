//! One table per data structure: name, byte offset and type of each field.
//!
//! The `layout!` macro turns such a table into a plain Rust struct with `parse` and `encode`, so that reading and
//! writing cannot disagree on an offset. Fields are little-endian. Bytes the table does not name are written as zero
//! and ignored when read, which is what the specification asks of reserved fields. A table whose fields overlap, are
//! out of order or leave the structure does not compile.

use std::fmt;

/// The input ends before the structure does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {got} bytes given, {needed} needed")]
pub struct ShortBuffer {
    /// Name of the structure.
    pub what: &'static str,
    /// Bytes given.
    pub got: usize,
    /// Bytes needed.
    pub needed: usize,
}

/// A text is longer than the field that should hold it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("text of {got} bytes does not fit a field of {allowed} bytes")]
pub struct TextTooLong {
    /// Length of the text in bytes.
    pub got: usize,
    /// Size of the field in bytes.
    pub allowed: usize,
}

/// A fixed-size text field of `N` bytes, filled up with the byte `PAD`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Text<const N: usize, const PAD: u8>([u8; N]);

/// A text field filled up with spaces, such as a serial number.
pub type SpacePadded<const N: usize> = Text<N, b' '>;
/// A text field filled up with NUL bytes, such as an NQN.
pub type NulPadded<const N: usize> = Text<N, 0>;

impl<const N: usize, const PAD: u8> Text<N, PAD> {
    /// The field holding `text`.
    ///
    /// # Errors
    /// [`TextTooLong`] when `text` is longer than `N` bytes.
    pub fn new(text: &str) -> Result<Self, TextTooLong> {
        let mut bytes = [PAD; N];
        let room = bytes.get_mut(..text.len()).ok_or(TextTooLong { got: text.len(), allowed: N })?;
        room.copy_from_slice(text.as_bytes());
        Ok(Self(bytes))
    }

    /// The field exactly as it is on the wire.
    pub const fn from_bytes(bytes: [u8; N]) -> Self {
        Self(bytes)
    }

    /// The bytes of the field, padding included.
    pub const fn as_bytes(&self) -> &[u8; N] {
        &self.0
    }

    /// The text up to its padding: a NUL ends it, and trailing spaces of a space-padded field are dropped. Where the
    /// bytes are not UTF-8, the valid beginning is returned.
    pub fn as_str(&self) -> &str {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(N);
        let text = match std::str::from_utf8(&self.0[..end]) {
            Ok(text) => text,
            Err(e) => std::str::from_utf8(&self.0[..e.valid_up_to()]).unwrap_or_default(),
        };
        if PAD == b' ' { text.trim_end_matches(' ') } else { text }
    }
}

impl<const N: usize, const PAD: u8> Default for Text<N, PAD> {
    /// An all-NUL field, which is how an unused field reads whatever its padding.
    fn default() -> Self {
        Self([0; N])
    }
}

impl<const N: usize, const PAD: u8> fmt::Debug for Text<N, PAD> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl<const N: usize, const PAD: u8> fmt::Display for Text<N, PAD> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl<const N: usize, const PAD: u8> TryFrom<&str> for Text<N, PAD> {
    type Error = TextTooLong;

    fn try_from(text: &str) -> Result<Self, TextTooLong> {
        Self::new(text)
    }
}

/// A value with a fixed size on the wire. `get` and `put` are given exactly `SIZE` bytes.
pub trait Field: Sized {
    /// Bytes on the wire.
    const SIZE: usize;
    /// Reads the value.
    fn get(bytes: &[u8]) -> Self;
    /// Writes the value.
    fn put(&self, bytes: &mut [u8]);
}

macro_rules! integer_field {
    ($($ty:ty),*) => {$(
        impl Field for $ty {
            const SIZE: usize = size_of::<$ty>();
            fn get(bytes: &[u8]) -> Self {
                let mut raw = [0; size_of::<$ty>()];
                raw.copy_from_slice(bytes);
                <$ty>::from_le_bytes(raw)
            }
            fn put(&self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
integer_field!(u8, u16, u32, u64, u128);

impl<T: Field, const N: usize> Field for [T; N] {
    const SIZE: usize = N * T::SIZE;
    fn get(bytes: &[u8]) -> Self {
        std::array::from_fn(|i| T::get(&bytes[i * T::SIZE..(i + 1) * T::SIZE]))
    }
    fn put(&self, bytes: &mut [u8]) {
        for (value, out) in self.iter().zip(bytes.chunks_exact_mut(T::SIZE)) {
            value.put(out);
        }
    }
}

impl<const N: usize, const PAD: u8> Field for Text<N, PAD> {
    const SIZE: usize = N;
    fn get(bytes: &[u8]) -> Self {
        Self(<[u8; N]>::get(bytes))
    }
    fn put(&self, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.0);
    }
}

/// Whether fields given as (offset, size) are in ascending order, apart, and inside `total` bytes.
pub const fn fields_fit(fields: &[(usize, usize)], total: usize) -> bool {
    let mut end = 0;
    let mut i = 0;
    while i < fields.len() {
        if fields[i].0 < end {
            return false;
        }
        end = fields[i].0 + fields[i].1;
        i += 1;
    }
    end <= total
}

/// Reads entry `index` of a table of fixed-size entries; `None` past the end.
pub(crate) fn entry<T: Field>(bytes: &[u8], index: usize) -> Option<T> {
    let start = index.checked_mul(T::SIZE)?;
    bytes.get(start..start.checked_add(T::SIZE)?).map(T::get)
}

/// Declares a data structure from its table; see the module documentation.
macro_rules! layout {
    (
        $(#[$meta:meta])*
        pub struct $name:ident[$size:literal] {
            $( $(#[$fmeta:meta])* $off:literal $field:ident: $ty:ty, )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $name { $( $(#[$fmeta])* pub $field: $ty, )* }

        impl $name {
            /// Bytes on the wire.
            pub const SIZE: usize = $size;

            /// Reads the structure from the start of `bytes`; what follows is ignored.
            ///
            /// # Errors
            /// [`ShortBuffer`](crate::ShortBuffer) when `bytes` ends too early.
            pub fn parse(bytes: &[u8]) -> Result<Self, crate::ShortBuffer> {
                let short = crate::ShortBuffer { what: stringify!($name), got: bytes.len(), needed: $size };
                bytes.get(..$size).map(<Self as crate::layout::Field>::get).ok_or(short)
            }

            /// Writes the structure over all of `out`, reserved bytes as zero.
            pub fn encode_into(&self, out: &mut [u8; $size]) {
                crate::layout::Field::put(self, out);
            }

            /// The structure as bytes.
            pub fn encode(&self) -> [u8; $size] {
                let mut out = [0; $size];
                self.encode_into(&mut out);
                out
            }
        }

        impl crate::layout::Field for $name {
            const SIZE: usize = $size;
            fn get(bytes: &[u8]) -> Self {
                Self { $( $field: <$ty as crate::layout::Field>::get(
                    &bytes[$off..$off + <$ty as crate::layout::Field>::SIZE]), )* }
            }
            fn put(&self, bytes: &mut [u8]) {
                bytes.fill(0);
                $( crate::layout::Field::put(
                    &self.$field, &mut bytes[$off..$off + <$ty as crate::layout::Field>::SIZE]); )*
            }
        }

        impl Default for $name {
            fn default() -> Self {
                <Self as crate::layout::Field>::get(&[0; $size])
            }
        }

        const _: () = assert!(crate::layout::fields_fit(
            &[$( ($off, <$ty as crate::layout::Field>::SIZE) ),*], $size), "field offsets");
    };
}
