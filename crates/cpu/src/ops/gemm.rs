//! See `nibble_core::ops`.
