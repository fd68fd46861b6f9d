//! Sizes, times, processors and addresses as people write them, and back.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// Port of NVMe/TCP I/O controllers.
pub const DEFAULT_PORT: u16 = 4420;

/// A size: digits and a suffix of K, M, G or T (powers of 1024; `KiB` and `kb` mean the same).
pub fn parse_size(text: &str) -> Result<u64, String> {
    let allowed = || format!("{text:?} is not a size: a number with K, M, G or T, such as 4k or 256M");
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, suffix) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| allowed())?;
    let shift = match suffix.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(allowed()),
    };
    number.checked_mul(1 << shift).ok_or_else(allowed)
}

/// A time: a number with ms, s (the default), m or h.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let allowed = || format!("{text:?} is not a time: a number with ms, s, m or h, such as 500ms or 10s");
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let (number, suffix) = text.split_at(digits);
    let number: f64 = number.parse().map_err(|_| allowed())?;
    let seconds = match suffix {
        "ms" => number / 1e3,
        "" | "s" => number,
        "m" | "min" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(allowed()),
    };
    Duration::try_from_secs_f64(seconds).ok().filter(|t| t.as_secs() < 1 << 32).ok_or_else(allowed)
}

/// `address`, `address:port` or `[v6]:port`; names are looked up. The port is 4420 unless given.
pub fn parse_target(text: &str) -> Result<SocketAddr, String> {
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    if let Ok(ip) = bare.parse::<std::net::IpAddr>() {
        return Ok(SocketAddr::new(ip, DEFAULT_PORT));
    }
    let with_port = if text.contains(':') { text.to_owned() } else { format!("{text}:{DEFAULT_PORT}") };
    let mut found = with_port.to_socket_addrs().map_err(|e| format!("{text:?} is not an address: {e}"))?;
    found.next().ok_or_else(|| format!("{text:?} has no address"))
}

/// Bytes for people.
#[derive(Debug, Clone, Copy)]
pub struct Bytes(pub f64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut value, mut unit) = (self.0, "B");
        for larger in ["KiB", "MiB", "GiB", "TiB"] {
            if value < 1024.0 {
                break;
            }
            (value, unit) = (value / 1024.0, larger);
        }
        let digits = if unit == "B" || value.fract() == 0.0 { 0 } else { 1 };
        write!(f, "{value:.digits$} {unit}")
    }
}

/// Nanoseconds for people.
#[derive(Debug, Clone, Copy)]
pub struct Time(pub f64);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ns if ns < 1e6 => write!(f, "{:.1} us", ns / 1e3),
            ns if ns < 1e9 => write!(f, "{:.2} ms", ns / 1e6),
            ns => write!(f, "{:.2} s", ns / 1e9),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!(parse_size("4k"), Ok(4096));
        assert_eq!(parse_size("256M"), Ok(256 << 20));
        assert_eq!(parse_size("1GiB"), Ok(1 << 30));
        assert_eq!(parse_size("512"), Ok(512));
        for bad in ["", "k", "-1", "1.5M", "4x", "99999999999T"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_have_units() {
        assert_eq!(parse_time("10"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_time("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_time("1.5m"), Ok(Duration::from_secs(90)));
        for bad in ["", "s", "-1s", "1d", "1e99"] {
            assert!(parse_time(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_port_may_be_left_out() {
        let v4 = |port| SocketAddr::from(([127, 0, 0, 1], port));
        assert_eq!(parse_target("127.0.0.1"), Ok(v4(4420)));
        assert_eq!(parse_target("127.0.0.1:5000"), Ok(v4(5000)));
        assert_eq!(parse_target("[::1]:5000").map(|a| a.port()), Ok(5000));
        assert_eq!(parse_target("::1").map(|a| a.port()), Ok(4420));
        assert!(parse_target("127.0.0.1:notaport").is_err());
    }

    #[test]
    fn numbers_are_shown_with_their_unit() {
        assert_eq!(Bytes(4096.0).to_string(), "4 KiB");
        assert_eq!(Bytes(1.5 * 1024.0 * 1024.0).to_string(), "1.5 MiB");
        assert_eq!(Time(1500.0).to_string(), "1.5 us");
        assert_eq!(Time(2.5e9).to_string(), "2.50 s");
    }
}
