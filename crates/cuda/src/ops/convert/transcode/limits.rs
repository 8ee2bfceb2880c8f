//! Size limits of the `transcode` kernels.

use nibble_core::{Error, Result};

/// The operation's name, for errors.
pub(super) const OP: &str = "transcode";

/// Returns an error unless `n` is below 2^31, because kernels use 32-bit signed indices.
pub(super) fn below_2_31(argument: &'static str, n: usize) -> Result<i32> {
    // The limit leaves space for the offsets that a kernel adds.
    i32::try_from(n)
        .ok()
        .filter(|&n| n < i32::MAX - 4096)
        .ok_or_else(|| Error::shape(OP, argument, n, "below 2^31 - 4096"))
}
