//! What commands print: a table for people, JSON or YAML for programs.

use anyhow::Result;
use clap::ValueEnum;
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

/// Form of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Format {
    /// Aligned columns.
    #[default]
    Table,
    Json,
    Yaml,
}

/// Prints `objects` as asked: the table's rows come from `row`.
pub fn print<T: Serialize>(
    format: Format,
    header: &[&str],
    objects: &[T],
    row: impl Fn(&T) -> Vec<String>,
) -> Result<()> {
    match format {
        Format::Json => println!("{}", serde_json::to_string_pretty(objects)?),
        Format::Yaml => print!("{}", serde_saphyr::to_string(&objects)?),
        Format::Table => println!("{}", table(header, objects.iter().map(row))),
    }
    Ok(())
}

/// Aligned columns without lines.
pub fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().map(|h| h.to_uppercase()));
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}

/// Bytes in the largest unit that divides them, else rounded.
pub fn bytes(count: i64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value.abs() >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if (value - value.round()).abs() < 0.05 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// Parses sizes such as `10GiB`, `512Mi`, `1G` (1024-based, as storage people mean it) or plain bytes.
///
/// # Errors
/// A sentence that names the value and what is allowed.
pub fn parse_size(text: &str) -> Result<i64, String> {
    let refuse =
        || format!("{text:?} is not a size: a whole number with B, KiB, MiB, GiB or TiB is allowed, such as 10GiB");
    let trimmed = text.trim();
    let digits = trimmed.chars().take_while(char::is_ascii_digit).count();
    let number: i64 = trimmed[..digits].parse().map_err(|_| refuse())?;
    let shift = match trimmed[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "ki" | "kib" => 10,
        "m" | "mi" | "mib" => 20,
        "g" | "gi" | "gib" => 30,
        "t" | "ti" | "tib" => 40,
        _ => return Err(refuse()),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is larger than any volume can be"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        assert_eq!(parse_size("1GiB").unwrap(), 1 << 30);
        assert_eq!(parse_size("512 Mi").unwrap(), 512 << 20);
        assert_eq!(parse_size("4096").unwrap(), 4096);
        for bad in ["", "-1", "1.5G", "GiB", "1 parsec", "99999999999999TiB"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert_eq!(bytes(1 << 30), "1 GiB");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(0), "0 B");
    }
}
