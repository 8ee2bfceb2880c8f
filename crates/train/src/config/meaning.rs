//! The meaning in Nibble of another project's name, and the messages that explain this meaning.

use Meaning::{Key, Said};

/// What the name of an option or key of another project means in Nibble.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// The configuration key with the same meaning.
    Key(&'static str),
    /// Advice for the command line, if no configuration key has the same meaning.
    Said(&'static str),
}

impl Meaning {
    /// The end of an error message about an unknown key.
    pub(super) fn of_key(self) -> String {
        match self {
            Key(key) => format!("it is called `{key}` here"),
            Said(advice) => advice.to_owned(),
        }
    }

    /// The end of an error message about an unknown option. `value` is the value that the user gave to the option.
    #[must_use]
    pub fn of_option(self, value: Option<&str>) -> String {
        match self {
            Key(key) => format!("write --set {key}={}", value.unwrap_or("...")),
            Said(advice) => advice.to_owned(),
        }
    }
}
