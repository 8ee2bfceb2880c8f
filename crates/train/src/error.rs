//! The error type of this crate: what went wrong, where, and whether the user can fix it. The type wraps the errors of `formats` and
//! `core`, and adds errors of configuration (key, file, line, suggestion), data, checkpoints and I/O. There is no catch-all variant.

use nibble_core::allocation::aside;
use std::path::{Path, PathBuf};

/// The result type of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of training or of a related task.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid configuration: an unknown key, a value of the wrong type, or inconsistent numbers.
    #[error("{}", config_message(key, file.as_deref(), *line, why, suggestion.as_deref()))]
    Config {
        /// Dotted key, such as `train.batch_size`. The key is empty if the whole file could not be parsed.
        key: String,
        /// The file that set the key; `None` for an override or a default.
        file: Option<PathBuf>,
        /// Line in that file, from 1.
        line: Option<usize>,
        /// What is wrong: the value found, and the value expected.
        why: String,
        /// The key or name that was probably intended.
        suggestion: Option<String>,
    },
    /// Training or held-out data that is missing, empty, too short, or damaged.
    #[error("data {}: {why}", path.display())]
    Data {
        /// The data file.
        path: PathBuf,
        /// What is wrong with the data.
        why: String,
    },
    /// An unusable file of a tokenizer.
    #[error("tokenizer {}: {why}", path.display())]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// What is wrong with the file.
        why: String,
    },
    /// A checkpoint that is missing or damaged, or does not fit the model.
    #[error("checkpoint {}: {why}", path.display())]
    Checkpoint {
        /// The checkpoint's directory, or the file inside it.
        path: PathBuf,
        /// What is wrong with the checkpoint.
        why: String,
    },
    /// The operating system failed to read or write a file (missing, no permission, disk full).
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory that could not be read or written.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The device ran out of memory.
    #[error(
        "{when}: {source}\n{sizes}Less memory: a smaller train.batch_size, with a larger train.grad_accum for the same tokens; \
         more scopes in train.recompute; train.grad_dtype=bf16, train.moment_dtype=bf16; a shorter data.seq_len"
    )]
    OutOfMemory {
        /// What the run was doing: `step 3`, counted from 0 as in [`nibble_core::Error::NonFinite`], or `making the model`.
        when: String,
        /// The settings that need the most memory, as a sentence and a space; empty if unknown.
        sizes: String,
        /// The failed allocation.
        source: Box<nibble_core::Error>,
    },
    /// A loss or gradients of a step, or a held-out loss, are not finite.
    #[error("{source}\n{advice}. {}", what_is_left(*held_out))]
    Diverged {
        /// The most likely cause of the divergence, and remedies.
        advice: String,
        /// Whether the loss that is not finite is the held-out loss.
        held_out: bool,
        /// The tensor and the step of the value that is not finite.
        source: nibble_core::Error,
    },
    /// The run is predicted to need more memory than the device has.
    #[error("{why}")]
    Memory {
        /// Number of bytes needed per device; `usize::MAX` if the number could not be computed.
        needed: usize,
        /// Overrides that would make the run fit (`train.grad_dtype=bf16`); empty if no override would.
        settings: Vec<String>,
        /// The predicted sizes, and the settings that would make the run fit.
        why: String,
    },
    /// An error of an operation, a kernel or a collective.
    #[error(transparent)]
    Core(#[from] nibble_core::Error),
}

impl Error {
    /// Whether the cause is the user's own input (a configuration, a data file, a recipe, a path) and not a failure of the run. The
    /// command-line program exits with code 2 for a user error and with code 1 for other errors.
    #[must_use]
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Config { .. } | Self::Data { .. } | Self::Tokenizer { .. } | Self::Memory { .. } => true,
            Self::Checkpoint { .. } | Self::OutOfMemory { .. } | Self::Diverged { .. } => false,
            Self::Core(error) => matches!(error, nibble_core::Error::Recipe { .. }),
            Self::Io { source, .. } => {
                use std::io::ErrorKind as K;
                matches!(
                    source.kind(),
                    K::NotFound
                        | K::PermissionDenied
                        | K::IsADirectory
                        | K::NotADirectory
                        | K::InvalidInput
                        | K::InvalidData
                )
            }
        }
    }

    /// Adds the time of the failure and the sizes that need the memory to an out-of-memory error. Other errors are unchanged.
    pub(crate) fn without_room(self, when: impl Into<String>, sizes: impl FnOnce() -> String) -> Self {
        match self {
            Self::Core(source @ nibble_core::Error::OutOfMemory { .. }) => {
                Self::OutOfMemory { when: when.into(), sizes: aside(sizes), source: Box::new(source) }
            }
            other => other,
        }
    }

    /// A configuration error about `key` without file and line.
    pub(crate) fn config(key: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Config { key: key.into(), file: None, line: None, why: why.into(), suggestion: None }
    }

    /// The same configuration error with this file, unless the error already names a file.
    pub(crate) fn in_file(mut self, path: &Path) -> Self {
        if let Self::Config { file: file @ None, .. } = &mut self {
            *file = Some(path.to_owned());
        }
        self
    }

    /// The same configuration error, with a suggestion.
    pub(crate) fn suggesting(mut self, meant: Option<String>) -> Self {
        if let Self::Config { suggestion, .. } = &mut self {
            *suggestion = meant;
        }
        self
    }

    /// An error about a data file.
    pub(crate) fn data(path: &Path, why: impl Into<String>) -> Self {
        Self::Data { path: path.to_path_buf(), why: why.into() }
    }

    /// An error about a checkpoint.
    pub(crate) fn checkpoint(path: &Path, why: impl Into<String>) -> Self {
        Self::Checkpoint { path: path.to_path_buf(), why: why.into() }
    }

    /// For `map_err`: adds the path of the failed operation.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_path_buf(), source }
    }
}

/// A sentence about the files that a diverged run leaves on disk.
fn what_is_left(held_out: bool) -> &'static str {
    match held_out {
        false => "No weight has changed since the step before, and checkpoints are of earlier steps",
        true => {
            "If there is a checkpoint of this step, it holds the weights that give this loss; earlier ones are intact"
        }
    }
}

/// The text of a configuration error: `tiny.toml:12: train.steps: expected an integer, got "many" (did you mean ...?)`.
fn config_message(
    key: &str,
    file: Option<&Path>,
    line: Option<usize>,
    why: &str,
    suggestion: Option<&str>,
) -> String {
    let mut message = String::new();
    if let Some(file) = file {
        message += &file.display().to_string();
        if let Some(line) = line {
            message += &format!(":{line}");
        }
        message += ": ";
    }
    if !key.is_empty() {
        message += &format!("`{key}`: ");
    }
    message += why;
    if let Some(suggestion) = suggestion {
        message += &format!("; did you mean `{suggestion}`?");
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_errors_name_file_line_key_and_suggestion() {
        let error = Error::Config {
            key: "train.stpes".into(),
            file: Some("run.toml".into()),
            line: Some(7),
            why: "unknown key".into(),
            suggestion: Some("train.steps".into()),
        };
        assert_eq!(error.to_string(), "run.toml:7: `train.stpes`: unknown key; did you mean `train.steps`?");
        assert!(error.is_user_error());
    }

    #[test]
    fn a_step_without_room_says_which_where_and_what_helps() {
        let place = "arena `activations`".to_owned();
        let core = nibble_core::Error::OutOfMemory { place, bytes: 77, why: "3 are free".into() };
        let sizes = || "Most of it: the experts. ".to_owned();
        let error = Error::from(core).without_room("step 12", sizes);
        let text = error.to_string();
        for part in [
            "step 12",
            "arena `activations`",
            "77 bytes",
            "3 are free",
            "experts. Less memory",
            "train.recompute",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!error.is_user_error());
        let other = Error::config("train.steps", "is 0");
        let same = Error::config("train.steps", "is 0").without_room("step 12", sizes);
        assert_eq!(other.to_string(), same.to_string());
    }

    #[test]
    fn a_full_disk_is_a_failed_run_and_a_missing_file_the_users_mistake() {
        let full = Error::io(Path::new("x"))(std::io::Error::from(std::io::ErrorKind::StorageFull));
        let missing = Error::io(Path::new("x"))(std::io::Error::from(std::io::ErrorKind::NotFound));
        assert!(!full.is_user_error());
        assert!(missing.is_user_error());
    }
}
