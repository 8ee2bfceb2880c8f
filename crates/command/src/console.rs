//! Lines for people, and numbers as people read them.

use crate::error::{Error, Result};
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;

/// Why a line did not get out, the first of them.
static LOST: OnceLock<std::io::Error> = OnceLock::new();

/// Prints a line to standard output.
#[macro_export]
macro_rules! say {
    ($($arg:tt)*) => { $crate::console::line(format_args!($($arg)*)) };
}

/// Prints a line. The command goes on if it does not get out, and [`require_said`] tells at its end.
pub fn line(text: std::fmt::Arguments<'_>) {
    if let Err(error) = writeln!(std::io::stdout(), "{text}") {
        let _ = LOST.set(error);
    }
}

/// Checks that every line got out. A reader that has gone away (`nibble recipe | head -1`) wanted no more of them.
///
/// # Errors
/// What the system said, of a full disk say.
pub fn require_said() -> Result<()> {
    match LOST.get() {
        Some(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::Failed(format!("standard output: {error}: not everything was written")))
        }
        _ => Ok(()),
    }
}

/// 1234567 → `1,234,567`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// 3 670 016 → `3.5 MiB`.
pub fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = (0..units.len() - 1).take_while(|p| n >> (10 * (p + 1)) > 0).count();
    if power == 0 {
        return format!("{n} B");
    }
    format!("{:.1} {}", n as f64 / (1u64 << (10 * power)) as f64, units[power])
}

/// Nats as bits.
pub fn bits(nats: f64) -> f64 {
    nats / std::f64::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        let of = |n| thousands(n);
        assert_eq!([of(0), of(999), of(1000), of(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([bytes(1023), bytes(1024), bytes(3_670_016)], ["1023 B", "1.0 KiB", "3.5 MiB"]);
        assert!((bits(std::f64::consts::LN_2) - 1.0).abs() < 1e-12);
    }
}
