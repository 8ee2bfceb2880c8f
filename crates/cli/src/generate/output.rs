//! Writes generated text to standard output.

use nibble_command::console::Shown;
use nibble_command::error::{Error, Result};
use std::io::{ErrorKind, IsTerminal, Write};

/// Standard output, to which generated text is written. On a terminal, control characters are displayed as text and have no effect;
/// elsewhere, bytes are written unchanged.
pub struct Output {
    shown: Option<Shown>,
}

impl Output {
    pub fn new() -> Self {
        Self { shown: std::io::stdout().is_terminal().then(Shown::default) }
    }

    /// Writes and flushes the bytes; returns false if the reader has closed the stream. The argument is bytes, because a character may span
    /// several tokens.
    pub fn emit(&mut self, bytes: &[u8]) -> Result<bool> {
        let shown = self.shown.as_mut().map(|shown| shown.next(bytes));
        let bytes = shown.as_deref().map_or(bytes, str::as_bytes);
        let mut out = std::io::stdout();
        match out.write_all(bytes).and_then(|()| out.flush()) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
            Err(e) => Err(Error::Failed(format!("standard output: {e}"))),
        }
    }
}
