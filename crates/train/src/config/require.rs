//! Checks of single numbers of a configuration, and their errors.

use crate::error::{Error, Result};

/// The error of a key, as a [`Result`].
pub(super) fn fail(key: &str, why: impl Into<String>) -> Result<()> {
    Err(Error::config(key, why))
}

/// Returns an error about a key, unless the condition holds.
pub(super) fn require(holds: bool, key: &str, why: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { fail(key, why()) }
}

pub(super) fn positive(key: &str, value: f64) -> Result<()> {
    // Kernels compute in single precision, which would round a smaller number to zero.
    let single = value as f32;
    require(single.is_finite() && single > 0.0, key, || {
        format!("is {value:?}, expected a number above 0 in the range of single precision")
    })
}

pub(super) fn not_negative(key: &str, value: f64) -> Result<()> {
    require(value.is_finite() && value >= 0.0, key, || {
        format!("is {value:?}, expected a number of at least 0")
    })
}
