//! Untrusted text, such as names of tensors and files, for output to a terminal.

use std::borrow::Cow;
use std::fmt::{self, Write};

/// Whether a terminal would interpret this character, or a reader would not see it. Hidden characters are control characters other than
/// line breaks and tabs, and characters that change the direction of writing.
fn is_hidden(c: char) -> bool {
    let turns =
        matches!(c, '\u{061C}' | '\u{200E}'..='\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}');
    turns || (c.is_control() && !matches!(c, '\n' | '\t'))
}

/// A writer that passes text to another writer, and replaces each invisible character by an escape such as `\u{1b}`.
#[derive(Debug)]
pub struct Visible<W> {
    to: W,
}

impl<W: Write> Visible<W> {
    /// A writer that passes the escaped text to `to`.
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

/// The text, with each hidden character replaced by an escape.
#[must_use]
pub fn visible(text: fmt::Arguments<'_>) -> String {
    let mut shown = String::new();
    // Writing to a string cannot fail.
    let _ = Visible::new(&mut shown).write_fmt(text);
    shown
}

/// Maximum number of characters of a name or a value that a message repeats.
const REPEATED: usize = 100;

/// Maximum number of bytes of a name in a message; file paths are not longer.
const LONGEST_NAME: usize = 4096;

/// Maximum number of bytes of a message.
const LONGEST_MESSAGE: usize = 64 << 10;

/// An untrusted value in a form for messages. If the value is long, it is cut, and its length is added.
#[must_use]
pub fn shortened(value: &str) -> Cow<'_, str> {
    match value.char_indices().nth(REPEATED).filter(|_| value.chars().nth(2 * REPEATED).is_some()) {
        Some((end, _)) => format!("{}... ({} characters)", &value[..end], value.chars().count()).into(),
        None => value.into(),
    }
}

/// The message, cut to at most 64 KiB. Any word that is longer than a file path can be is cut as well.
#[must_use]
pub fn readable(message: &str) -> Cow<'_, str> {
    if message.len() <= LONGEST_NAME {
        return message.into();
    }
    let word = |word: &str| {
        let name = word.trim_end();
        let is_short = name.len() <= LONGEST_NAME;
        if is_short { word.to_owned() } else { format!("{}{}", shortened(name), &word[name.len()..]) }
    };
    let mut text: String = message.split_inclusive(char::is_whitespace).map(word).collect();
    if let Some((end, _)) = text.char_indices().find(|(at, _)| *at >= LONGEST_MESSAGE) {
        let rest = text.len() - end;
        text.truncate(end);
        text += &format!("... (and {rest} bytes more)");
    }
    text.into()
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

    #[test]
    fn long_names_and_long_messages_have_their_beginnings() {
        let path = "/a".repeat(2000);
        for short in ["`train.steps`: is 0", &format!("{path}: is a directory")] {
            assert_eq!(readable(short), short);
        }
        let name = "é".repeat(1 << 20);
        let text = readable(&format!("m.safetensors: has no tensor `{name}`\nsecond line")).into_owned();
        // The number of characters includes the two quotes.
        let end = "... (1048578 characters)\nsecond line";
        assert!(text.starts_with("m.safetensors: has no tensor `é") && text.ends_with(end), "{text}");
        let spaced = readable(&"word ".repeat(1 << 20)).into_owned();
        assert!(spaced.len() < (64 << 10) + 100 && spaced.ends_with("bytes more)"));
        assert_eq!(shortened(&"x".repeat(200)), "x".repeat(200));
        assert_eq!(shortened(&"x".repeat(201)), format!("{}... (201 characters)", "x".repeat(100)));
    }
}
