//! Matrices as kernel arguments.

use crate::Buffer;
use crate::Cuda;
use crate::compile::jit::TemplateArg;
use crate::launch::KernelArg;
use nibble_core::formats::layout::mn_major_stride;
use nibble_core::formats::{ScaleKind, ScaleRule};
use nibble_core::{BlockScaled, DType, Data, Tensor};

/// The device's name of a plain type.
pub(super) fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "nib::F32",
        DType::Bf16 => "nib::Bf16",
    }
}

/// The number of elements in the 16 bytes that a thread loads or stores at once.
pub(super) fn numbers_per_load(dtype: DType) -> usize {
    16 / dtype.size_bytes()
}

/// The number of a scale rule on the device (`csrc/formats/e8m0.cuh`).
pub(super) fn rule_arg(rule: ScaleRule) -> TemplateArg {
    TemplateArg::Int(match rule {
        ScaleRule::Amax => 0,
        ScaleRule::Floor => 1,
        ScaleRule::Rceil => 2,
        ScaleRule::Ceil => 3,
        ScaleRule::Even => 4,
        // The rules TensorAmax and Cann belong to the kernels for all formats, which have no such
        // template argument.
        ScaleRule::TensorAmax | ScaleRule::Cann => -1,
    })
}

/// The distance of scales from one strip to the next: one scale per column, padded to 16 bytes.
pub(super) fn column_stride(kind: ScaleKind, cols: usize) -> usize {
    mn_major_stride(cols, kind.bytes())
}

/// A tensor's codes and scales as kernel arguments.
pub(super) fn plane_args(x: &BlockScaled<Cuda>) -> [&dyn KernelArg; 2] {
    [x.codes.get(), x.scales.get()]
}

/// A tensor's codes and scales as kernel arguments; null pointers for `None`.
pub(super) fn planes_or_nulls(x: Option<&BlockScaled<Cuda>>) -> [&dyn KernelArg; 2] {
    const NONE: Option<&Buffer<u8>> = None;
    x.map_or([&NONE, &NONE], plane_args)
}

/// A plain matrix as a kernel argument, and whether its type is BF16.
pub(super) fn plain_arg(x: &Tensor<Cuda>) -> (&dyn KernelArg, i32) {
    match &x.data {
        Data::F32(x) => (x.get(), 0),
        Data::Bf16(x) => (x.get(), 1),
    }
}

/// The device address of a plain matrix.
pub(super) fn plain_address(x: &Tensor<Cuda>) -> u64 {
    match &x.data {
        Data::F32(x) => x.get().address(),
        Data::Bf16(x) => x.get().address(),
    }
}

/// An optional plain matrix as a kernel argument; null if there is none.
pub(super) fn plain_or_null(x: Option<&Tensor<Cuda>>) -> &dyn KernelArg {
    const NONE: Option<&Buffer<u8>> = None;
    x.map_or(&NONE, |x| plain_arg(x).0)
}
