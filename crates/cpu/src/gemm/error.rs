use std::fmt;

/// An invalid argument of a GEMM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GemmError {
    /// The argument's name in the public function.
    pub argument: &'static str,
    /// The value passed.
    pub got: String,
    /// The value required.
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
