//! What is known where the system refuses memory: what the process is doing, and who can go on without.

use crate::visible::Visible;
use std::cell::Cell;
use std::fmt::{self, Write};
use std::sync::{Mutex, PoisonError};

thread_local! {
    static MAY_BE_REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// Asks for memory in a way that takes a refusal for an answer. Elsewhere a refusal ends the `nibble` command.
pub fn may_be_refused<R>(ask: impl FnOnce() -> R) -> R {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            MAY_BE_REFUSED.set(self.0);
        }
    }
    let _before = Before(MAY_BE_REFUSED.replace(true));
    ask()
}

/// Whether this thread is within [`may_be_refused`].
#[must_use]
pub fn takes_refusals() -> bool {
    MAY_BE_REFUSED.get()
}

/// What the process is doing, in a place of its own: telling of it takes no memory.
struct Phase {
    text: [u8; 240],
    len: usize,
}

static PHASE: Mutex<Phase> = Mutex::new(Phase { text: [0; 240], len: 0 });

impl Write for Phase {
    /// What there is no room for is left away.
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            let Some(room) = self.text[self.len..].get_mut(..c.len_utf8()) else { return Err(fmt::Error) };
            self.len += c.encode_utf8(room).len();
        }
        Ok(())
    }
}

/// Says what the process does from now on, for the message if memory is refused: `phase(format_args!("reading {path}"))`.
pub fn phase(what: fmt::Arguments<'_>) {
    let mut phase = PHASE.lock().unwrap_or_else(PoisonError::into_inner);
    phase.len = 0;
    // A text that is too long is cut.
    let _ = write!(Visible::new(&mut *phase), "{what}");
}

/// Gives what the process is doing to `tell`: an empty text where nothing is known, or where a thread is saying it just now. Takes no
/// memory, and waits for nobody.
pub fn with_phase<R>(tell: impl FnOnce(&str) -> R) -> R {
    match PHASE.try_lock() {
        Ok(phase) => tell(std::str::from_utf8(&phase.text[..phase.len]).unwrap_or_default()),
        Err(_) => tell(""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_what_was_said_last_and_never_longer_than_its_place() {
        phase(format_args!("reading {}", "a\x1bb"));
        with_phase(|text| assert_eq!(text, r"reading a\u{1b}b"));
        phase(format_args!("reading {}", "é".repeat(300)));
        with_phase(|text| assert!(text.starts_with("reading éé") && (238..=240).contains(&text.len())));
    }

    #[test]
    fn refusals_are_taken_within_and_not_after() {
        assert!(!takes_refusals());
        assert!(may_be_refused(|| may_be_refused(takes_refusals) && takes_refusals()));
        assert!(!takes_refusals());
    }
}
