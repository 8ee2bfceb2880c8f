//! What can be wrong with a study, a row or a place on the disk.

use std::path::{Path, PathBuf};

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a study cannot be read, run or shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A study file with an unknown key, a value of the wrong type, or values that do not fit each other.
    #[error("{}", study_message(file, key, why, suggestion.as_deref()))]
    Study {
        /// The study file.
        file: PathBuf,
        /// The key, such as `branch[0].trunk.steps`; empty when the file is no TOML.
        key: String,
        /// What it was, and what was expected.
        why: String,
        /// The key or name that was probably meant.
        suggestion: Option<String>,
    },
    /// A row that is damaged, or that does not fit its name.
    #[error("row {}: {why}", file.display())]
    Row {
        /// The row's file, or its id where it has no file yet.
        file: PathBuf,
        /// What it was, and what was expected.
        why: String,
    },
    /// The operating system refused to read or write a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A picture that could not be drawn.
    #[error("drawing the curves of {what}: {why}")]
    Picture {
        /// Whose curves.
        what: String,
        /// What the plotting library said.
        why: String,
    },
}

impl Error {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn row(file: impl Into<PathBuf>, why: impl Into<String>) -> Self {
        Self::Row { file: file.into(), why: why.into() }
    }
}

fn study_message(file: &Path, key: &str, why: &str, suggestion: Option<&str>) -> String {
    let mut text = format!("study {}: ", file.display());
    if !key.is_empty() {
        text += &format!("`{key}`: ");
    }
    text += why;
    if let Some(suggestion) = suggestion {
        text += &format!("; did you mean `{suggestion}`?");
    }
    text
}

/// The known name most like `name`, if any is like it at all.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    // A name much longer than any known one is like none of them, and comparing it takes long.
    if name.len() > 200 {
        return None;
    }
    known
        .into_iter()
        .map(|known| (strsim::jaro_winkler(name, known), known))
        .filter(|(likeness, _)| *likeness > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, known)| known.to_owned())
}
