//! Output of measurements on several ranks: one rank prints, and the slowest rank's time counts.

use nibble_command::device::{Device, On};
use nibble_command::error::Result;

/// Prints a line once for all ranks.
macro_rules! tell {
    ($on:expr, $($text:tt)*) => {
        if $on.is_first() {
            nibble_command::say!($($text)*);
        }
    };
}
pub(crate) use tell;

/// The maximum over all ranks.
pub(crate) fn slowest<B: Device>(on: &On<'_, B>, seconds: f64) -> Result<f64> {
    Ok(on.on_all_ranks(seconds)?.into_iter().fold(f64::NEG_INFINITY, f64::max))
}
