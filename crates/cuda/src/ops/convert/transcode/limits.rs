//! What the kernels of `transcode` can count.

use nibble_core::{Error, Result};

/// The operation, in errors.
pub(super) const OP: &str = "transcode";

/// Kernels count in 32-bit signed numbers.
pub(super) fn below_2_31(argument: &'static str, n: usize) -> Result<i32> {
    // What a kernel adds to it stays below 2^31 too.
    i32::try_from(n)
        .ok()
        .filter(|&n| n < i32::MAX - 4096)
        .ok_or_else(|| Error::shape(OP, argument, n, "below 2^31 - 4096"))
}
