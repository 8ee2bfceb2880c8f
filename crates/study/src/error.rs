//! Errors of a study, a row, or a file access.

use std::path::{Path, PathBuf};

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a study cannot be read, executed or displayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A study file has an unknown key, a value of the wrong type, or values that are inconsistent.
    #[error("{}", study_message(file, key, why, suggestion.as_deref()))]
    Study {
        /// The study file.
        file: PathBuf,
        /// The key, such as `branch[0].trunk.steps`; empty if the file is not valid TOML.
        key: String,
        /// The value found, and the expected value.
        why: String,
        /// The key or name that the user probably meant.
        suggestion: Option<String>,
    },
    /// A row is damaged, or does not match its name.
    #[error("row {}: {why}", file.display())]
    Row {
        /// The row's file, or its id if it has no file yet.
        file: PathBuf,
        /// The value found, and the expected value.
        why: String,
    },
    /// The operating system refused to read or write a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error from the operating system.
        source: std::io::Error,
    },
    /// A plot could not be drawn.
    #[error("drawing the curves of {what}: {why}")]
    Picture {
        /// What the plot should have shown.
        what: String,
        /// The error from the plotting library.
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

/// The known name that is most similar to `name`, if any is similar.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    // A name that is much longer than all known names is similar to none of them, and comparing it would take long.
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
