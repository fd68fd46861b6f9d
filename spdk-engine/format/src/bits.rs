//! An array of bits, in the order of the masks on disk: bit `n` is bit `n % 8` of byte `n / 8`.

/// A fixed number of bits. Reading outside gives "not set"; writing outside does nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bits {
    words: Vec<u64>,
    len: u32,
}

impl Bits {
    /// `len` clear bits.
    pub fn new(len: u32) -> Self {
        Self { words: vec![0; len.div_ceil(64) as usize], len }
    }

    /// The first `len` bits of `bytes`; bits beyond the bytes are clear.
    pub fn from_bytes(bytes: &[u8], len: u32) -> Self {
        let mut bits = Self::new(len);
        for (word, chunk) in bits.words.iter_mut().zip(bytes.chunks(8)) {
            let mut raw = [0; 8];
            raw[..chunk.len()].copy_from_slice(chunk);
            *word = u64::from_le_bytes(raw);
        }
        bits.clear_tail();
        bits
    }

    /// Writes the bits to the start of `out`, as far as it reaches.
    pub fn write_to(&self, out: &mut [u8]) {
        for (chunk, word) in out.chunks_mut(8).zip(&self.words) {
            let raw = word.to_le_bytes();
            let n = chunk.len();
            chunk.copy_from_slice(&raw[..n]);
        }
    }

    /// Number of bits.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether there is no bit at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes it `len` bits: cut off, or with clear bits added.
    pub fn resize(&mut self, len: u32) {
        self.words.resize(len.div_ceil(64) as usize, 0);
        self.len = len;
        self.clear_tail();
    }

    /// Whether bit `n` is set.
    pub fn get(&self, n: u32) -> bool {
        self.words.get(n as usize / 64).is_some_and(|w| w >> (n % 64) & 1 == 1)
    }

    /// Sets bit `n`; returns whether it was clear before (false also when there is no such bit).
    pub fn set(&mut self, n: u32) -> bool {
        if n >= self.len {
            return false;
        }
        let word = &mut self.words[n as usize / 64];
        let before = *word;
        *word |= 1 << (n % 64);
        *word != before
    }

    /// Clears bit `n`; returns whether it was set before.
    pub fn clear(&mut self, n: u32) -> bool {
        if n >= self.len {
            return false;
        }
        let word = &mut self.words[n as usize / 64];
        let before = *word;
        *word &= !(1 << (n % 64));
        *word != before
    }

    /// Number of set bits.
    pub fn count(&self) -> u32 {
        self.words.iter().map(|w| w.count_ones()).sum()
    }

    /// The lowest set bit at or above `from`.
    pub fn first_set(&self, from: u32) -> Option<u32> {
        self.first(from, |w| w)
    }

    /// The lowest clear bit at or above `from`.
    pub fn first_clear(&self, from: u32) -> Option<u32> {
        self.first(from, |w| !w)
    }

    /// All set bits, rising.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let mut from = Some(0);
        std::iter::from_fn(move || {
            let n = self.first_set(from?)?;
            from = n.checked_add(1);
            Some(n)
        })
    }

    fn first(&self, from: u32, of: impl Fn(u64) -> u64) -> Option<u32> {
        let start = from as usize / 64;
        let mut hide = (1u64 << (from % 64)) - 1;
        for (i, word) in self.words.iter().enumerate().skip(start) {
            let found = of(*word) & !hide;
            hide = 0;
            if found != 0 {
                let n = i as u64 * 64 + u64::from(found.trailing_zeros());
                return u32::try_from(n).ok().filter(|n| *n < self.len);
            }
        }
        None
    }

    fn clear_tail(&mut self) {
        if let Some(last) = self.words.last_mut()
            && !self.len.is_multiple_of(64)
        {
            *last &= (1 << (self.len % 64)) - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn like_a_vector_of_bools(len in 0u32..300, ops in prop::collection::vec((0u32..310, any::<bool>()), 0..80)) {
            let mut bits = Bits::new(len);
            let mut model = vec![false; len as usize];
            for (n, on) in ops {
                let was = model.get(n as usize).copied();
                if on {
                    prop_assert_eq!(bits.set(n), was == Some(false));
                } else {
                    prop_assert_eq!(bits.clear(n), was == Some(true));
                }
                if let Some(bit) = model.get_mut(n as usize) {
                    *bit = on;
                }
            }
            let set: Vec<u32> = (0..len).filter(|n| model[*n as usize]).collect();
            prop_assert_eq!(bits.iter().collect::<Vec<_>>(), set.clone());
            prop_assert_eq!(bits.count() as usize, set.len());
            for from in 0..len + 2 {
                prop_assert_eq!(bits.first_clear(from), (from..len).find(|n| !model[*n as usize]));
            }
            let mut bytes = vec![0; len.div_ceil(8) as usize];
            bits.write_to(&mut bytes);
            prop_assert_eq!(Bits::from_bytes(&bytes, len), bits);
        }
    }
}
