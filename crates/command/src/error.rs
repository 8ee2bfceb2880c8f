//! The errors of commands: each has a message and an exit code.
//!
//! The exit code is 0 for success, 1 if the run failed, and 2 if the request cannot be carried out as given. The exit code is 130, 143 or
//! 129 if SIGINT, SIGTERM or SIGHUP stopped the run. Library crates do not use exit codes.

use crate::allocation;
use std::fmt;
use std::io::Write;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, PoisonError};

/// The result type of commands.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a command failed.
#[derive(Debug)]
pub enum Error {
    /// The request cannot be carried out as given: exit code 2.
    Usage(String),
    /// The run failed: exit code 1.
    Failed(String),
    /// The error is a consequence of another rank's failure: exit code 1. This error is not reported if the cause is known.
    Echo(String),
    /// A signal stopped the run, which has already reported it: exit code 128 + signal.
    Stopped(usize),
    /// Another process reports the error; this process only ends with this exit code.
    Told(u8),
}

impl Error {
    /// Creates an error that the user can correct.
    pub fn usage(message: impl fmt::Display) -> Self {
        Self::Usage(message.to_string())
    }

    /// Creates an error about reading or writing `path`.
    pub fn io(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| nibble_train::Error::Io { path: path.to_owned(), source }.into()
    }

    /// The exit code with which the process ends.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failed(_) | Self::Echo(_) => 1,
            // Signal numbers are below 65.
            Self::Stopped(signal) => 128 + *signal as u8,
            Self::Told(code) => *code,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(message) | Self::Failed(message) | Self::Echo(message) => f.write_str(message),
            Self::Stopped(signal) => write!(f, "stopped by {}", signal_name(*signal)),
            Self::Told(code) => write!(f, "another process tells why; exit code {code}"),
        }
    }
}

/// The name of a signal that ends a run.
pub fn signal_name(signal: usize) -> &'static str {
    match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        _ => "SIGTERM",
    }
}

impl From<nibble_train::Error> for Error {
    fn from(error: nibble_train::Error) -> Self {
        match &error {
            e if e.is_user_error() => Self::Usage(error.to_string()),
            nibble_train::Error::Core(nibble_core::Error::Comm { .. }) => Self::Echo(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

impl From<nibble_core::Error> for Error {
    fn from(error: nibble_core::Error) -> Self {
        nibble_train::Error::from(error).into()
    }
}

/// Message and source position of the first panic in the process.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// From now on, the message of the first panic is stored instead of printed.
pub fn keep_panics() {
    panic::set_hook(Box::new(|info| {
        let payload = info.payload();
        let message = payload.downcast_ref::<&str>().map(ToString::to_string);
        let message = message.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        if is_refused_thread(&message) {
            allocation::end(|to, phase| write!(to, "{phase}: a thread could not be started: {message}"));
        }
        let place = info.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        let mut first = PANIC.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(format!("{message}{place}"));
    }));
}

/// Runs a command, and converts a panic, which only a bug of Nibble can cause, to an error.
pub fn catch(command: impl FnOnce() -> Result<()>) -> Result<()> {
    panic::catch_unwind(AssertUnwindSafe(command)).unwrap_or_else(|_| Err(panicked()))
}

/// Whether this is the standard library's panic that occurs if a new thread gets no memory for its signal stack. The panic cannot unwind.
fn is_refused_thread(message: &str) -> bool {
    ["failed to allocate an alternative stack", "failed to set up alternative stack"]
        .iter()
        .any(|refusal| message.starts_with(refusal))
}

/// The error for a thread that panicked.
pub fn panicked() -> Error {
    let first = PANIC.lock().unwrap_or_else(PoisonError::into_inner);
    let what = first.as_deref().unwrap_or("a thread ended without a message");
    Error::Failed(format!("internal error, a defect of nibble: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_that_end_a_run_are_named() {
        for (number, name) in [(1, "SIGHUP"), (2, "SIGINT"), (15, "SIGTERM")] {
            assert_eq!(signal_name(number), name);
        }
    }
}
