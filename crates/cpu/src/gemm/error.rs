use std::fmt;

/// What is wrong with the arguments of a product.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GemmError {
    /// The argument, as the entry point names it.
    pub argument: &'static str,
    /// What it was.
    pub got: String,
    /// What it had to be.
    pub expected: String,
}

impl GemmError {
    pub(super) fn new(argument: &'static str, got: impl ToString, expected: impl ToString) -> Self {
        Self { argument, got: got.to_string(), expected: expected.to_string() }
    }
}

impl fmt::Display for GemmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gemm: {} is {}, expected {}", self.argument, self.got, self.expected)
    }
}

impl std::error::Error for GemmError {}
