//! Sizes of memory on the command line.

/// Parses a size such as `80GB` (80 · 10^9 bytes) or `74.5GiB` (74.5 · 2^30 bytes), as a number of bytes.
///
/// # Errors
/// Returns the expected form if the text has another form.
pub fn parse_size(text: &str) -> Result<usize, String> {
    const UNITS: [(&str, f64); 6] = [
        ("TiB", (1u64 << 40) as f64),
        ("GiB", (1u64 << 30) as f64),
        ("MiB", (1u64 << 20) as f64),
        ("TB", 1e12),
        ("GB", 1e9),
        ("MB", 1e6),
    ];
    let parsed = UNITS.into_iter().find_map(|(unit, factor)| {
        let number = text.strip_suffix(unit)?.trim_end();
        let number: f64 =
            number.bytes().all(|c| c.is_ascii_digit() || c == b'.').then(|| number.parse().ok())??;
        Some(number * factor)
    });
    match parsed {
        Some(bytes) if (1.0..9e15).contains(&bytes) => Ok(bytes as usize),
        _ => Err("expected a size, such as 80GB (10^9 bytes), 74.5GiB (2^30 bytes) or 900MiB".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn both_kinds_of_units_are_read() {
        for (text, bytes) in [
            ("80GB", 80_000_000_000),
            ("80 GiB", 85_899_345_920),
            ("0.5MB", 500_000),
            ("1.5GiB", 1_610_612_736),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["80", "GB", "-1GB", "80gb", "0GB", "1e3GB", "80GBit", "", "1.2.3GB", "99999999999TB"] {
            assert!(parse_size(text).unwrap_err().starts_with("expected a size"), "{text}");
        }
    }
}
