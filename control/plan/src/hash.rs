//! Hashes that every manager computes alike: for choosing successors and for making names.
//!
//! They spread, they do not protect. FNV-1a over the parts with a separator, then a finaliser, because FNV alone leaves
//! the high bits of short inputs alike.

/// Hashes a sequence of strings; `["ab"]` and `["a", "b"]` differ.
pub fn hash(parts: &[&str]) -> u64 {
    let mut state: u64 = 0xcbf2_9ce4_8422_2325;
    for part in parts {
        for byte in part.bytes().chain([0xff]) {
            state = (state ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// A hash as so many lower-case letters and digits.
pub fn suffix(parts: &[&str], length: usize) -> String {
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let mut rest = hash(parts);
    let mut text = String::with_capacity(length);
    for _ in 0..length {
        text.push(char::from(DIGITS[(rest % 36) as usize]));
        rest /= 36;
    }
    text
}

/// The member that all who know the same members choose for a key; when a member goes, only its keys move.
pub fn rendezvous<'a>(members: impl Iterator<Item = &'a str>, key: &[&str]) -> Option<&'a str> {
    members.max_by_key(|member| {
        let mut parts = vec![*member];
        parts.extend_from_slice(key);
        (hash(&parts), *member)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_count_and_suffixes_have_their_length() {
        assert_ne!(hash(&["ab"]), hash(&["a", "b"]));
        assert_ne!(hash(&["a", ""]), hash(&["a"]));
        assert_eq!(suffix(&["x"], 8).len(), 8);
        assert_eq!(suffix(&["x"], 8), suffix(&["x"], 8));
    }

    #[test]
    fn only_the_keys_of_a_lost_member_move() {
        let members = ["n1", "n2", "n3", "n4"];
        let mut counts = [0; 4];
        for key in 0..1000 {
            let key = key.to_string();
            let chosen = rendezvous(members.into_iter(), &[&key]).unwrap();
            counts[members.iter().position(|member| *member == chosen).unwrap()] += 1;
            let without = members.into_iter().filter(|member| *member != "n2");
            if chosen != "n2" {
                assert_eq!(rendezvous(without, &[&key]), Some(chosen));
            }
        }
        assert!(counts.iter().all(|count| *count > 150), "{counts:?}");
        assert_eq!(rendezvous(std::iter::empty(), &["k"]), None);
    }
}
