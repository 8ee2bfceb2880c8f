//! Size limits of the `transcode` kernels.

use nibble_core::{Error, Result};

/// The operation's name, for errors.
pub(super) const OP: &str = "transcode";

/// Kernels index with 32-bit signed integers.
pub(super) fn below_2_31(argument: &'static str, n: usize) -> Result<i32> {
    // Offsets that a kernel adds stay below 2^31 too.
    i32::try_from(n)
        .ok()
        .filter(|&n| n < i32::MAX - 4096)
        .ok_or_else(|| Error::shape(OP, argument, n, "below 2^31 - 4096"))
}
