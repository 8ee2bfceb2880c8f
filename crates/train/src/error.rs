//! The one error type of this crate: what went wrong, where, and whether the user can put it right. It wraps the errors of `formats` and
//! `core` and adds those of configuration (key, file, line, suggestion), data, checkpoints and I/O. There is no catch-all variant.

use nibble_core::allocation::aside;
use std::path::{Path, PathBuf};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why training, or something around it, could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration that cannot be used: an unknown key, a value of the wrong type, or numbers that do not
    /// fit each other.
    #[error("{}", config_message(key, file.as_deref(), *line, why, suggestion.as_deref()))]
    Config {
        /// Dotted key, such as `train.batch_size`; empty when the whole file could not be parsed.
        key: String,
        /// The file that set the key; `None` when it came from an override or is a default.
        file: Option<PathBuf>,
        /// Line in that file, counted from 1.
        line: Option<usize>,
        /// What was wrong: what it was, and what was expected.
        why: String,
        /// The key or name that was probably meant.
        suggestion: Option<String>,
    },
    /// Training or held-out data that is missing, empty, too short, or damaged.
    #[error("data {}: {why}", path.display())]
    Data {
        /// The data file.
        path: PathBuf,
        /// What was wrong with it.
        why: String,
    },
    /// A tokenizer's file that cannot be used.
    #[error("tokenizer {}: {why}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What was wrong with it.
        why: String,
    },
    /// A checkpoint that is missing, damaged, or does not fit the model that wants it.
    #[error("checkpoint {}: {why}", path.display())]
    Checkpoint {
        /// The checkpoint's directory, or the file inside it.
        path: PathBuf,
        /// What was wrong with it.
        why: String,
    },
    /// The operating system refused to read or write a file (missing, no permission, disk full).
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Something that the device has no room for.
    #[error(
        "{when}: {source}\n{sizes}Less memory: a smaller train.batch_size, with a larger train.grad_accum for the same tokens; \
         more scopes in train.recompute; train.grad_dtype=bf16, train.moment_dtype=bf16; a shorter data.seq_len"
    )]
    OutOfMemory {
        /// What was done: `step 3`, counted from 0 as for [`nibble_core::Error::NonFinite`], or `making the model`.
        when: String,
        /// Which sizes of the configuration need the most, a sentence and a space; empty where that is not known.
        sizes: String,
        /// Where, and how many bytes were asked for.
        source: Box<nibble_core::Error>,
    },
    /// A step of a run whose loss or gradients are no numbers, or a held-out loss of it that is none.
    #[error("{source}\n{advice}. {}", what_is_left(*held_out))]
    Diverged {
        /// What most likely is the cause, and what helps.
        advice: String,
        /// Whether it is the held-out loss.
        held_out: bool,
        /// Where.
        source: nibble_core::Error,
    },
    /// A run that needs more memory than the device has.
    #[error("{why}")]
    Memory {
        /// Bytes needed of one device; `usize::MAX` where they were not counted to the end.
        needed: usize,
        /// What would make it fit, as overrides (`train.grad_dtype=bf16`); empty if nothing that can be set does.
        settings: Vec<String>,
        /// The numbers, and what would make it fit.
        why: String,
    },
    /// What an operation, a kernel or a collective refused.
    #[error(transparent)]
    Core(#[from] nibble_core::Error),
}

impl Error {
    /// Whether the user's own input (a configuration, a data file, a checkpoint of another model) is at fault, as
    /// opposed to a run that failed. A command line exits with 2 for the former and with 1 for the latter.
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

    /// Says when the device had no room, and which sizes need it; of other errors nothing.
    pub(crate) fn without_room(self, when: impl Into<String>, sizes: impl FnOnce() -> String) -> Self {
        match self {
            Self::Core(source @ nibble_core::Error::OutOfMemory { .. }) => {
                Self::OutOfMemory { when: when.into(), sizes: aside(sizes), source: Box::new(source) }
            }
            other => other,
        }
    }

    /// A configuration error about `key` whose file and line are not known (yet).
    pub(crate) fn config(key: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Config { key: key.into(), file: None, line: None, why: why.into(), suggestion: None }
    }

    /// The same about a configuration, of which it is known now in which file it stands.
    pub(crate) fn in_file(mut self, path: &Path) -> Self {
        if let Self::Config { file: file @ None, .. } = &mut self {
            *file = Some(path.to_owned());
        }
        self
    }

    /// The same about a configuration, with what was probably meant.
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

    /// For `map_err`: attaches the path that the operation was about.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_path_buf(), source }
    }
}

/// What a run that diverges has on the disk.
fn what_is_left(held_out: bool) -> &'static str {
    match held_out {
        false => "No weight has changed since the step before, and checkpoints are of earlier steps",
        true => {
            "If there is a checkpoint of this step, it holds the weights that give this loss; earlier ones are intact"
        }
    }
}

/// `tiny.toml:12: train.steps: expected an integer, got "many" (did you mean ...?)`.
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
