//! Named forms of texts. An unknown form is no constraint, as in Kubernetes.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::LazyLock,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use regex::Regex;

/// Whether the text has the form.
pub fn holds(format: &str, text: &str) -> bool {
    match format {
        "date-time" => text.parse::<jiff::Timestamp>().is_ok(),
        "date" => text.parse::<jiff::civil::Date>().is_ok(),
        "duration" => text.parse::<jiff::SignedDuration>().is_ok() || is_go_duration(text),
        "uuid" => uuid::Uuid::try_parse(text).is_ok(),
        "ipv4" => text.parse::<Ipv4Addr>().is_ok(),
        "ipv6" => text.parse::<Ipv6Addr>().is_ok(),
        "cidr" => is_cidr(text),
        "byte" => STANDARD.decode(text).is_ok(),
        "uri" => text.contains(':') && text.parse::<axum::http::Uri>().is_ok(),
        "hostname" => text.len() <= 253 && text.split('.').all(is_dns_label),
        "email" => text.split_once('@').is_some_and(|(user, host)| !user.is_empty() && host.contains('.')),
        _ => true,
    }
}

fn is_cidr(text: &str) -> bool {
    let Some((address, bits)) = text.split_once('/') else { return false };
    match (address.parse::<IpAddr>(), bits.parse::<u8>()) {
        (Ok(IpAddr::V4(_)), Ok(bits)) => bits <= 32,
        (Ok(IpAddr::V6(_)), Ok(bits)) => bits <= 128,
        _ => false,
    }
}

fn is_go_duration(text: &str) -> bool {
    static DURATION: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"^[+-]?([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h|d|w))+$").ok());
    text == "0" || DURATION.as_ref().is_some_and(|duration| duration.is_match(text))
}

/// Whether the text is a DNS label as in RFC 1123: at most 63 of `a-z`, `0-9`, `-`, with no `-` at the ends.
pub fn is_dns_label(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 63
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_accepts_and_refuses() {
        for (format, good, bad) in [
            ("date-time", "2026-11-30T06:00:00Z", "yesterday"),
            ("date", "2026-11-30", "2026-13-01"),
            ("duration", "1h30m", "soon"),
            ("uuid", "67e55044-10b1-426f-9247-bb680e5fe0c8", "67e55044"),
            ("ipv4", "10.0.0.1", "10.0.0.256"),
            ("ipv6", "::1", "10.0.0.1"),
            ("cidr", "10.0.0.0/8", "10.0.0.0/33"),
            ("byte", "aGk=", "%%"),
            ("uri", "s3://bucket@region/path", "no uri"),
            ("hostname", "a.example", "-a"),
            ("email", "a@b.example", "ab"),
        ] {
            assert!(holds(format, good), "{format} {good}");
            assert!(!holds(format, bad), "{format} {bad}");
        }
        assert!(holds("made-up", "anything"));
    }
}
