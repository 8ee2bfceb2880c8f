//! The one error type of this crate.

/// A request that the number formats cannot satisfy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A name that no variant has; `expected` lists the known names.
    #[error("unknown {what} `{got}`: expected one of {expected}")]
    UnknownName {
        /// What kind of thing the name should denote, e.g. `format`.
        what: &'static str,
        /// The name given.
        got: String,
        /// The known names, separated by commas.
        expected: String,
    },
    /// An invalid combination of format, scale rule and rounding.
    #[error("format `{format}` does not go with {with}: {why}")]
    Unsupported {
        /// Name of the format.
        format: &'static str,
        /// The rest of the combination.
        with: String,
        /// Why the combination is invalid, or which combinations are valid.
        why: String,
    },
    /// An argument of the wrong length or shape.
    #[error("`{argument}`: got {got}, expected {expected}")]
    Shape {
        /// Name of the argument.
        argument: &'static str,
        /// Length or extent of the argument.
        got: usize,
        /// What was expected, in words or figures.
        expected: String,
    },
    /// An argument outside its range.
    #[error("`{argument}`: got {got}, expected {expected}")]
    Value {
        /// Name of the argument.
        argument: &'static str,
        /// The given value, as text.
        got: String,
        /// The expected range of values.
        expected: String,
    },
}

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Finds the variant whose `Display` is `name`; the error lists the known names.
pub(crate) fn find_by_name<T: Copy + std::fmt::Display>(
    what: &'static str,
    all: &[T],
    name: &str,
) -> Result<T> {
    all.iter().copied().find(|v| v.to_string() == name).ok_or_else(|| {
        let names: Vec<String> = all.iter().map(T::to_string).collect();
        Error::UnknownName { what, got: name.to_owned(), expected: names.join(", ") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_name_lists_the_names_there_are() {
        let e = find_by_name("colour", &["red", "blue"], "green").unwrap_err();
        assert_eq!(e.to_string(), "unknown colour `green`: expected one of red, blue");
        assert_eq!(find_by_name("colour", &["red", "blue"], "blue"), Ok("blue"));
    }
}
