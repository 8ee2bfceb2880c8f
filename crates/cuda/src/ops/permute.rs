//! `permute`, `unpermute`, `gather_scalars`, `combine_slots` on a GPU.

use super::Instance;
use crate::Cuda;
use crate::backend::Buf;
use nibble_core::ops::{CombineSlots, GatherScalars, Permute, Unpermute};
use nibble_core::{Error, Operand, Result, Tensor};

/// See [`Permute`].
pub(crate) fn permute(_cuda: &Cuda, _op: Permute<'_, Cuda>) -> Result<Operand<Cuda>> {
    Err(Error::Device { call: "permute".to_owned(), why: "no kernel yet".to_owned() })
}

/// See [`Unpermute`].
pub(crate) fn unpermute(_cuda: &Cuda, _op: Unpermute<'_, Cuda>) -> Result<Tensor<Cuda>> {
    Err(Error::Device { call: "unpermute".to_owned(), why: "no kernel yet".to_owned() })
}

/// See [`GatherScalars`].
pub(crate) fn gather_scalars(_cuda: &Cuda, _op: GatherScalars<'_, Cuda>) -> Result<Buf<f32>> {
    Err(Error::Device { call: "gather_scalars".to_owned(), why: "no kernel yet".to_owned() })
}

/// See [`CombineSlots`].
pub(crate) fn combine_slots(_cuda: &Cuda, _op: CombineSlots<'_, Cuda>) -> Result<Tensor<Cuda>> {
    Err(Error::Device { call: "combine_slots".to_owned(), why: "no kernel yet".to_owned() })
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    Vec::new()
}
