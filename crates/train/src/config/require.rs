//! What one number of a configuration must satisfy, and how its error is said.

use crate::error::{Error, Result};

/// The error of a key.
pub(super) fn fail(key: &str, why: impl Into<String>) -> Result<()> {
    Err(Error::config(key, why))
}

/// That error, unless what a key must satisfy holds.
pub(super) fn require(holds: bool, key: &str, why: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { fail(key, why()) }
}

pub(super) fn positive(key: &str, value: f64) -> Result<()> {
    // Kernels compute with single precision, in which a smaller number is zero.
    let single = value as f32;
    require(single.is_finite() && single > 0.0, key, || {
        format!("is {value:?}, expected a number above 0 that single precision holds")
    })
}

pub(super) fn not_negative(key: &str, value: f64) -> Result<()> {
    require(value.is_finite() && value >= 0.0, key, || {
        format!("is {value:?}, expected a number of at least 0")
    })
}
