//! The status of the process, which code can read at any time without allocating or waiting. This module also records which code can handle
//! a failed allocation.
//!
//! The status has a phase ("step 12", "reading FILE"), a part of the phase (such as forward, backward, an all-to-all, reduce, gather,
//! optimizer, checkpoint or evaluation) and the number of the step. A part that fails stays set, so that a message can name the part.
//!
//! Code that can handle a failed allocation runs within [`may_be_refused`]. Everywhere else such a failure ends the process with an error.

use crate::visible::Visible;
use std::cell::Cell;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

thread_local! {
    static MAY_BE_REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `ask`, which must handle failed allocations of host memory itself. If an allocation fails in any code outside of such a call, the
/// `nibble` command ends.
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

/// Whether this thread is running code that was passed to [`may_be_refused`].
#[must_use]
pub fn takes_refusals() -> bool {
    MAY_BE_REFUSED.get()
}

/// The status in a buffer of fixed size, so that reading the status allocates nothing.
#[derive(Clone, Copy)]
struct Phase {
    text: [u8; 240],
    len: usize,
    part: &'static str,
}

static PHASE: Mutex<Phase> = Mutex::new(Phase { text: [0; 240], len: 0, part: "" });

/// The current step; [`NO_STEP`] before the first.
static STEP: AtomicU64 = AtomicU64::new(NO_STEP);
const NO_STEP: u64 = u64::MAX;

impl Write for Phase {
    /// Appends text, and drops the part that exceeds the buffer's capacity.
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            let Some(room) = self.text[self.len..].get_mut(..c.len_utf8()) else { return Err(fmt::Error) };
            self.len += c.encode_utf8(room).len();
        }
        Ok(())
    }
}

fn phase_now() -> MutexGuard<'static, Phase> {
    PHASE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called on each change of the status.
static ON_CHANGE: OnceLock<fn()> = OnceLock::new();

/// Registers the function `told`, which is called after each change of the status (the phase, its part and the step). The thread that makes
/// the change calls `told`, which may read the status. Only the first call of `on_change` has an effect.
pub fn on_change(told: fn()) {
    let _ = ON_CHANGE.set(told);
}

fn changed() {
    if let Some(told) = ON_CHANGE.get() {
        told();
    }
}

/// Sets the phase of the run that error messages name, for example `phase(format_args!("reading {path}"))`. Clears the part.
pub fn phase(what: fmt::Arguments<'_>) {
    let mut phase = phase_now();
    (phase.len, phase.part) = (0, "");
    // A text that is too long is cut.
    let _ = write!(Visible::new(&mut *phase), "{what}");
    drop(phase);
    changed();
}

/// Sets the part of the phase that error messages name, for example "forward". An empty text means that the phase has no parts.
pub fn part(what: &'static str) {
    phase_now().part = what;
    changed();
}

/// Sets the part of the phase, for example to "reduce", runs `work`, and restores the previous part. If `work` fails, the previous part is
/// not restored, so that the error message can name the part that failed.
///
/// # Errors
/// Errors of `work`.
pub fn in_part<R, E>(what: &'static str, work: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
    let before = std::mem::replace(&mut phase_now().part, what);
    changed();
    let done = work()?;
    part(before);
    Ok(done)
}

/// Runs `work` and then restores the phase and its part, even if `work` has changed them. Callers use this function to find out more about
/// an error.
pub fn aside<R>(work: impl FnOnce() -> R) -> R {
    let Phase { text, len, part } = *phase_now();
    let done = work();
    *phase_now() = Phase { text, len, part };
    changed();
    done
}

/// Passes the phase and its part to `tell`. The function passes empty texts if no phase has been set, or while another thread is setting
/// the phase. This function does not allocate memory, and does not wait for other threads.
pub fn with_phase<R>(tell: impl FnOnce(&str, &'static str) -> R) -> R {
    match PHASE.try_lock() {
        Ok(phase) => tell(std::str::from_utf8(&phase.text[..phase.len]).unwrap_or_default(), phase.part),
        Err(_) => tell("", ""),
    }
}

/// Sets the number of the training step whose work the host is issuing, counted from 0 as in messages; `None` means that the host is
/// issuing no step.
pub fn set_step(step: Option<u64>) {
    STEP.store(step.unwrap_or(NO_STEP), Ordering::Relaxed);
    changed();
}

/// The number that [`set_step`] has set: the training step whose work the host is issuing, counted from 0. The call does not wait for other
/// threads.
#[must_use]
pub fn step() -> Option<u64> {
    Some(STEP.load(Ordering::Relaxed)).filter(|step| *step != NO_STEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_what_was_said_last_and_never_longer_than_its_place() {
        phase(format_args!("reading {}", "a\x1bb"));
        with_phase(|text, part| assert_eq!((text, part), (r"reading a\u{1b}b", "")));
        phase(format_args!("reading {}", "é".repeat(300)));
        with_phase(|text, _| assert!(text.starts_with("reading éé") && (238..=240).contains(&text.len())));
        // The part that is set at this moment.
        let part_now = || with_phase(|_, part| part);
        part("forward");
        assert_eq!(in_part("reduce", || Ok::<_, ()>(part_now())), Ok("reduce"));
        assert_eq!(part_now(), "forward");
        assert_eq!(in_part("gather", || Err::<(), _>("why")), Err("why"));
        assert_eq!(part_now(), "gather", "where it failed");
        aside(|| phase(format_args!("looking why")));
        with_phase(|text, part| assert!(text.starts_with("reading éé") && part == "gather"));
        phase(format_args!("another"));
        assert_eq!(part_now(), "");
        set_step(Some(3));
        assert_eq!(step(), Some(3));
        set_step(None);
        assert_eq!(step(), None);
    }

    #[test]
    fn refusals_are_taken_within_and_not_after() {
        assert!(!takes_refusals());
        assert!(may_be_refused(|| may_be_refused(takes_refusals) && takes_refusals()));
        assert!(!takes_refusals());
    }
}
