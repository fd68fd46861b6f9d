//! AES-XTS over whole blocks of a disk (IEEE 1619), keys of 128 or 256 bits, many cipher blocks at once.
//!
//! *Invariants.* Data lengths are multiples of 16 bytes: no ciphertext stealing. The tweak of a disk block is eight zero
//! bytes and its number, little-endian, as SPDK's software path has it; so either reads what the other has written.
//! Keys are overwritten when they are dropped, and never printed.

use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit, consts::U16};
use aes::{Aes128, Aes256};

/// Cipher blocks that are worked on together: enough for the processor's pipelines.
const BATCH: usize = 32;
/// Bytes of a cipher block.
const BLOCK: usize = 16;

type CipherBlock = Array<u8, U16>;

struct Pair<C> {
    data: C,
    tweak: C,
}

enum Ciphers {
    Bits128(Box<Pair<Aes128>>),
    Bits256(Box<Pair<Aes256>>),
}

/// A pair of keys, ready for use.
pub struct Xts(Ciphers);

impl<C: KeyInit> Pair<C> {
    fn new(data: &[u8], tweak: &[u8]) -> Option<Box<Self>> {
        Some(Box::new(Self { data: C::new_from_slice(data).ok()?, tweak: C::new_from_slice(tweak).ok()? }))
    }
}

impl std::fmt::Debug for Xts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Xts")
    }
}

impl Xts {
    /// From two keys of 16 or of 32 bytes each: one for the data, one for the tweak. `None` for other lengths.
    #[must_use]
    pub fn new(data: &[u8], tweak: &[u8]) -> Option<Self> {
        match (data.len(), tweak.len()) {
            (16, 16) => Some(Self(Ciphers::Bits128(Pair::new(data, tweak)?))),
            (32, 32) => Some(Self(Ciphers::Bits256(Pair::new(data, tweak)?))),
            _ => None,
        }
    }

    /// Encrypts the disk block `lba` in place.
    pub fn encrypt(&self, lba: u64, block: &mut [u8]) {
        match &self.0 {
            Ciphers::Bits128(keys) => run(&keys.tweak, lba, block, |blocks| keys.data.encrypt_blocks(blocks)),
            Ciphers::Bits256(keys) => run(&keys.tweak, lba, block, |blocks| keys.data.encrypt_blocks(blocks)),
        }
    }

    /// Decrypts the disk block `lba` in place.
    pub fn decrypt(&self, lba: u64, block: &mut [u8]) {
        match &self.0 {
            Ciphers::Bits128(keys) => run(&keys.tweak, lba, block, |blocks| keys.data.decrypt_blocks(blocks)),
            Ciphers::Bits256(keys) => run(&keys.tweak, lba, block, |blocks| keys.data.decrypt_blocks(blocks)),
        }
    }
}

fn run<C>(cipher: &C, lba: u64, data: &mut [u8], crypt: impl Fn(&mut [CipherBlock]))
where
    C: BlockCipherEncrypt<BlockSize = U16>,
{
    debug_assert!(data.len().is_multiple_of(BLOCK), "disk blocks are whole cipher blocks");
    let mut first = [0; BLOCK];
    first[8..].copy_from_slice(&lba.to_le_bytes());
    let mut first: CipherBlock = first.into();
    cipher.encrypt_block(&mut first);
    let mut tweak = u128::from_le_bytes(first.into());
    for part in data.chunks_mut(BATCH * BLOCK) {
        let mut tweaks = [0u128; BATCH];
        for place in &mut tweaks[..part.len() / BLOCK] {
            *place = tweak;
            tweak = double(tweak);
        }
        mask(part, &tweaks);
        let (blocks, _) = Array::slice_as_chunks_mut(part);
        crypt(blocks);
        mask(part, &tweaks);
    }
}

fn mask(part: &mut [u8], tweaks: &[u128; BATCH]) {
    let (blocks, _) = part.as_chunks_mut::<BLOCK>();
    for (block, tweak) in blocks.iter_mut().zip(tweaks) {
        *block = (u128::from_le_bytes(*block) ^ tweak).to_le_bytes();
    }
}

/// Times x in the field of XTS, whose polynomial is x¹²⁸ + x⁷ + x² + x + 1.
fn double(tweak: u128) -> u128 {
    (tweak << 1) ^ if tweak >> 127 == 1 { 0x87 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let text: String = text.split_whitespace().collect();
        (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
    }

    /// IEEE 1619-2007, vector 1: all zero keys, sector 0. (The only one whose tweak both conventions share.)
    #[test]
    fn the_standard_s_first_vector() {
        let xts = Xts::new(&[0; 16], &[0; 16]).unwrap();
        let mut data = vec![0; 32];
        xts.encrypt(0, &mut data);
        assert_eq!(data, hex("917cf69ebd68b2ec9b9fe9a3eadda692cd43d2f59598ed858c02c2652fbf922e"));
        xts.decrypt(0, &mut data);
        assert_eq!(data, [0; 32]);
    }

    /// Vector 2 has sector 0x3333333333 as the low bytes of the tweak; shifted to the high ones it must differ, and the
    /// same block under another number as well.
    #[test]
    fn the_block_number_is_the_upper_half_of_the_tweak() {
        let (key, key2) = ([0x11; 16], [0x22; 16]);
        let xts = Xts::new(&key, &key2).unwrap();
        let mut data = vec![0x44; 32];
        xts.encrypt(0x33_3333_3333, &mut data);
        assert_ne!(data, hex("c454185e6a16936e39334038acef838bfb186fff7480adc4289382ecd6d394f0"));
        let mut other = vec![0x44; 32];
        xts.encrypt(0x33_3333_3334, &mut other);
        assert_ne!(data, other);

        let bytes: [u8; 16] = hex("0000000000000000 3333333333000000").try_into().unwrap();
        let mut tweak: CipherBlock = bytes.into();
        Aes128::new_from_slice(&key2).unwrap().encrypt_block(&mut tweak);
        let mut block: CipherBlock = [0x44; 16].into();
        block.iter_mut().zip(tweak).for_each(|(b, t)| *b ^= t);
        Aes128::new_from_slice(&key).unwrap().encrypt_block(&mut block);
        block.iter_mut().zip(tweak).for_each(|(b, t)| *b ^= t);
        assert_eq!(&data[..16], &block[..]);
    }

    /// Batches must not show: a long block is what its cipher blocks are one by one.
    #[test]
    fn long_blocks_go_back_and_forth() {
        for bits in [16, 32] {
            let key: Vec<u8> = (0..bits).collect();
            let key2: Vec<u8> = (100..100 + bits).collect();
            let xts = Xts::new(&key, &key2).unwrap();
            let plain: Vec<u8> = (0..65536u32).map(|i| (i * 7 % 251) as u8).collect();
            for len in [16, 512, 528, 4096, 65536] {
                let mut data = plain[..len].to_vec();
                xts.encrypt(u64::MAX, &mut data);
                assert_ne!(data, plain[..len]);
                let mut short = plain[..16].to_vec();
                xts.encrypt(u64::MAX, &mut short);
                assert_eq!(data[..16], short);
                xts.decrypt(u64::MAX, &mut data);
                assert_eq!(data, plain[..len]);
            }
        }
    }

    #[test]
    fn keys_of_other_lengths_are_refused() {
        assert!(Xts::new(&[0; 24], &[0; 24]).is_none() && Xts::new(&[0; 16], &[0; 32]).is_none());
    }
}
