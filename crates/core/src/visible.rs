//! Text of others, such as names of tensors and files, on its way to a terminal.

use std::fmt::{self, Write};

/// Whether a terminal would obey this character, or the eye not see it: control characters but line breaks and tabs, and
/// those that turn the direction of writing.
fn is_hidden(c: char) -> bool {
    let turns =
        matches!(c, '\u{061C}' | '\u{200E}'..='\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}');
    turns || (c.is_control() && !matches!(c, '\n' | '\t'))
}

/// Writes text to `to` with each character that a terminal would obey as an escape: `\u{1b}`.
#[derive(Debug)]
pub struct Visible<W> {
    to: W,
}

impl<W: Write> Visible<W> {
    /// Writes to `to`.
    pub fn new(to: W) -> Self {
        Self { to }
    }
}

impl<W: Write> Write for Visible<W> {
    fn write_str(&mut self, mut text: &str) -> fmt::Result {
        while let Some((at, c)) = text.char_indices().find(|(_, c)| is_hidden(*c)) {
            self.to.write_str(&text[..at])?;
            write!(self.to, "{}", c.escape_unicode())?;
            text = &text[at + c.len_utf8()..];
        }
        self.to.write_str(text)
    }
}

/// The text, with each character that a terminal would obey as an escape.
#[must_use]
pub fn visible(text: fmt::Arguments<'_>) -> String {
    let mut shown = String::new();
    // A string takes whatever it is given, and what is formatted is text that is there.
    let _ = Visible::new(&mut shown).write_fmt(text);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_shown() {
        let name = "a\x1b[2Jb\x07\r\n\tc\u{7f}\u{9b}31m\u{202e}d é→";
        let shown = visible(format_args!("<{name}>"));
        assert_eq!(shown, "<a\\u{1b}[2Jb\\u{7}\\u{d}\n\tc\\u{7f}\\u{9b}31m\\u{202e}d é→>");
    }
}
