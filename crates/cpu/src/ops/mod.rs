//! One file an operation, named as in `nibble_core::ops`.
