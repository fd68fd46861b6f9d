//! Which processors to run on, as SPDK's `-m` names them: a hexadecimal mask, or a list in brackets.

/// Processors: a hexadecimal mask, or a list in brackets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpus(pub Vec<u32>);

/// Parses a mask such as 0x3 or a list such as `[0,2-3]`, of processors below 1024.
///
/// # Errors
/// A sentence that names the text and what is allowed.
pub fn parse_cpus(text: &str) -> Result<Cpus, String> {
    let cpus = match text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
        Some(list) => parse_list(list),
        None => parse_mask(text.strip_prefix("0x").or(text.strip_prefix("0X")).unwrap_or(text)),
    };
    cpus.filter(|cpus| !cpus.is_empty()).map(Cpus).ok_or_else(|| {
        format!("{text:?} names no processors: a mask like 0x3, or a list like [0,2-3], of processors below 1024")
    })
}

fn parse_list(list: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= 1024 {
            return None;
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Some(cpus)
}

fn parse_mask(hex: &str) -> Option<Vec<u32>> {
    if hex.len() > 256 {
        return None;
    }
    let mut cpus = Vec::new();
    for (place, digit) in hex.chars().rev().enumerate() {
        let bits = digit.to_digit(16)?;
        cpus.extend((0..4).filter(|bit| bits >> bit & 1 == 1).map(|bit| place as u32 * 4 + bit));
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_and_lists_name_processors() {
        assert_eq!(parse_cpus("0x5").unwrap(), Cpus(vec![0, 2]));
        assert_eq!(parse_cpus("[0,2-3]").unwrap(), Cpus(vec![0, 2, 3]));
        for bad in ["0", "", "0xg", "[]", "[3-1]", "[9999]"] {
            assert!(parse_cpus(bad).is_err(), "{bad}");
        }
    }
}
