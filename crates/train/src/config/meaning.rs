//! What a name of elsewhere is here, and how messages say it.

use Meaning::{Key, Said};

/// What a name of elsewhere is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// This key, of the same meaning.
    Key(&'static str),
    /// No key of the same meaning: what to do instead, on the command line.
    Said(&'static str),
}

impl Meaning {
    /// As an error about an unknown key goes on.
    pub(super) fn of_key(self) -> String {
        match self {
            Key(key) => format!("it is called `{key}` here"),
            Said(advice) => advice.to_owned(),
        }
    }

    /// As an error about an unknown option goes on, which was given this value.
    #[must_use]
    pub fn of_option(self, value: Option<&str>) -> String {
        match self {
            Key(key) => format!("write --set {key}={}", value.unwrap_or("...")),
            Said(advice) => advice.to_owned(),
        }
    }
}
