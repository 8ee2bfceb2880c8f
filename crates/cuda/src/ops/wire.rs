//! `pack_rows`, `unpack_rows` on a GPU.

use super::Instance;
use crate::Cuda;
use crate::backend::Buf;
use nibble_core::ops::{PackRows, UnpackRows};
use nibble_core::{Error, Operand, Result};

/// See [`PackRows`].
pub(crate) fn pack_rows(_cuda: &Cuda, _op: PackRows<'_, Cuda>) -> Result<Buf<u8>> {
    Err(Error::Device { call: "pack_rows".to_owned(), why: "no kernel yet".to_owned() })
}

/// See [`UnpackRows`].
pub(crate) fn unpack_rows(_cuda: &Cuda, _op: UnpackRows<'_, Cuda>) -> Result<Operand<Cuda>> {
    Err(Error::Device { call: "unpack_rows".to_owned(), why: "no kernel yet".to_owned() })
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    Vec::new()
}
