//! Printed lines and number formatting. Code prints lines with `say!` and `warn!`, which never panic, and which escape control characters.

use crate::error::{Error, Result};
use nibble_core::{readable, visible};
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;

/// The first error that occurred when a line was written.
static LOST: OnceLock<std::io::Error> = OnceLock::new();

/// Prints a line to standard output, as [`line()`] does.
#[macro_export]
macro_rules! say {
    ($($arg:tt)*) => { $crate::console::line(format_args!($($arg)*)) };
}

/// Prints a line to standard error, as [`aside()`] does.
#[macro_export]
macro_rules! warn {
    ($($arg:tt)*) => { $crate::console::aside(format_args!($($arg)*)) };
}

/// Prints a line with control characters escaped. If the write fails, the command continues; [`require_said`] reports the error at the end
/// of the command.
pub fn line(text: std::fmt::Arguments<'_>) {
    let text = visible(format_args!("{text}\n"));
    keep(std::io::stdout().write_all(text.as_bytes()));
}

/// Prints a line to standard error with control characters escaped. Very long messages, and very long names in messages, are cut. Write
/// errors are ignored.
pub fn aside(text: std::fmt::Arguments<'_>) {
    let text = visible(format_args!("{}\n", readable(&text.to_string())));
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Remembers a failed write, so that [`require_said`] can report it.
pub fn keep(written: std::io::Result<()>) {
    if let Err(error) = written {
        let _ = LOST.set(error);
    }
}

/// Checks that every printed line was written. A closed pipe (`nibble recipe | head -1`) is not an error.
///
/// # Errors
/// Returns the error of the operating system, for example on a full disk.
pub fn require_said() -> Result<()> {
    match LOST.get() {
        Some(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::Failed(format!("standard output: {error}: not everything was written")))
        }
        _ => Ok(()),
    }
}

/// Converts a stream of text bytes for display on a terminal: a character is printed after all of its bytes have arrived, and control
/// characters are escaped.
#[derive(Debug, Default)]
pub struct Shown {
    /// The first bytes of an incomplete character.
    begun: Vec<u8>,
}

impl Shown {
    /// Adds bytes, and returns the characters that are now complete. A byte that belongs to no character is printed as `\x9b`.
    pub fn next(&mut self, bytes: &[u8]) -> String {
        self.begun.extend_from_slice(bytes);
        let all = std::mem::take(&mut self.begun);
        let mut text = String::new();
        let mut left = &all[..];
        loop {
            let wrong = match std::str::from_utf8(left) {
                Ok(valid) => return text + &visible(format_args!("{valid}")),
                Err(wrong) => wrong,
            };
            let (valid, rest) = left.split_at(wrong.valid_up_to());
            text += &visible(format_args!("{}", String::from_utf8_lossy(valid)));
            let Some(len) = wrong.error_len() else {
                self.begun = rest.to_vec();
                return text;
            };
            rest[..len].iter().for_each(|byte| text += &format!("\\x{byte:02x}"));
            left = &rest[len..];
        }
    }
}

/// Formats 1234567 as `1,234,567`.
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

/// Formats a number of bytes, for example 3 670 016 as `3.5 MiB`.
pub fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = (0..units.len() - 1).take_while(|p| n >> (10 * (p + 1)) > 0).count();
    if power == 0 {
        return format!("{n} B");
    }
    format!("{:.1} {}", n as f64 / (1u64 << (10 * power)) as f64, units[power])
}

/// Converts nats to bits.
pub fn bits(nats: f64) -> f64 {
    nats / std::f64::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_shown_when_they_are_whole_and_none_is_obeyed() {
        let mut shown = Shown::default();
        let all =
            ["é".as_bytes(), b"\x1b[2J\n", b"\xff", &[0xc2, 0x9b], &[0xe2, 0x80, 0xae], "→\t.".as_bytes()]
                .concat();
        let one_by_one: String = all.iter().map(|byte| shown.next(&[*byte])).collect();
        assert_eq!(one_by_one, "é\\u{1b}[2J\n\\xff\\u{9b}\\u{202e}→\t.");
        assert_eq!(Shown::default().next(&all), one_by_one);
    }

    #[test]
    fn numbers_read_well() {
        let of = |n| thousands(n);
        assert_eq!([of(0), of(999), of(1000), of(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([bytes(1023), bytes(1024), bytes(3_670_016)], ["1023 B", "1.0 KiB", "3.5 MiB"]);
        assert!((bits(std::f64::consts::LN_2) - 1.0).abs() < 1e-12);
    }
}
