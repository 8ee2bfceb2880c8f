//! Matrices as the operations make them and pass them to kernels.

use crate::Cuda;
use crate::backend::Buf;
use crate::compile::jit::TemplateArg;
use crate::launch::KernelArg;
use crate::{Buffer, Device};
use nibble_core::formats::layout::mn_major_stride;
use nibble_core::formats::{BlockAxis, Format, ScaleKind, ScaleLayout, ScaleRule};
use nibble_core::{BlockScaled, DType, Data, Result, Tensor};

/// The device's name of a plain type.
pub(super) fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "nib::F32",
        DType::Bf16 => "nib::Bf16",
    }
}

/// Numbers in the 16 bytes that a thread loads or stores at once.
pub(super) fn numbers_per_load(dtype: DType) -> usize {
    16 / dtype.size_bytes()
}

/// The device's number of a rule (`csrc/formats/e8m0.cuh`).
pub(super) fn rule_arg(rule: ScaleRule) -> TemplateArg {
    TemplateArg::Int(match rule {
        ScaleRule::Amax => 0,
        ScaleRule::Floor => 1,
        ScaleRule::Rceil => 2,
        ScaleRule::Ceil => 3,
        ScaleRule::Even => 4,
        // Rules of the general kernels, which take no such template argument.
        ScaleRule::TensorAmax | ScaleRule::Cann => -1,
    })
}

/// A tensor whose planes a kernel is about to write in full; scales are of the rule's kind, row-major.
pub(super) fn unwritten(
    device: &Device,
    stored: (Format, ScaleRule),
    axis: BlockAxis,
    sizes: (usize, usize, usize),
) -> Result<BlockScaled<Cuda>> {
    unwritten_as(device, stored, axis, sizes, ScaleLayout::RowMajor)
}

/// Columns that a kernel is about to write in full. Scales lie strip by strip, `[capacity / block][column_stride]`:
/// this is how kernels write them and products read them fastest.
pub(super) fn unwritten_columns(
    device: &Device,
    stored: (Format, ScaleRule),
    (capacity, cols): (usize, usize),
) -> Result<BlockScaled<Cuda>> {
    unwritten_as(device, stored, BlockAxis::Col, (capacity, cols, 1), ScaleLayout::MnMajor)
}

/// Scales from one strip to the next: one for each column, padded to 16 bytes.
pub(super) fn column_stride(kind: ScaleKind, cols: usize) -> usize {
    mn_major_stride(cols, kind.bytes())
}

fn unwritten_as(
    device: &Device,
    (format, rule): (Format, ScaleRule),
    axis: BlockAxis,
    (rows, cols, stack): (usize, usize, usize),
    scale_layout: ScaleLayout,
) -> Result<BlockScaled<Cuda>> {
    let (lines, blocks) = BlockScaled::<Cuda>::scale_shape(format, axis, rows, cols, stack);
    let kind = format.scale_kind(rule);
    // Without values no kernel runs, so the scales are uploaded.
    let tensor_scale = || match cols {
        0 => device.upload(&vec![1.0f32; rows]).map(Buf::new),
        _ => device.alloc(rows).map(Buf::new),
    };
    Ok(BlockScaled {
        format,
        axis,
        rule,
        rows,
        cols,
        stack,
        codes: Buf::new(device.alloc(BlockScaled::<Cuda>::code_bytes(format, axis, rows, cols))?),
        scales: Buf::new(device.alloc(scale_layout.len(lines, blocks, kind.bytes()) * kind.bytes())?),
        tensor_scale: kind.has_tensor_scale().then(tensor_scale).transpose()?,
        scale_layout,
        shared_cols: 1,
    })
}

/// What a launch takes for a tensor's codes and scales.
pub(super) fn plane_args(x: &BlockScaled<Cuda>) -> [&dyn KernelArg; 2] {
    [x.codes.get(), x.scales.get()]
}

/// The same; nulls for none.
pub(super) fn planes_or_nulls(x: Option<&BlockScaled<Cuda>>) -> [&dyn KernelArg; 2] {
    const NONE: Option<&Buffer<u8>> = None;
    x.map_or([&NONE, &NONE], plane_args)
}

/// What a launch takes for a plain matrix, and whether it is BF16.
pub(super) fn plain_arg(x: &Tensor<Cuda>) -> (&dyn KernelArg, i32) {
    match &x.data {
        Data::F32(x) => (x.get(), 0),
        Data::Bf16(x) => (x.get(), 1),
    }
}

/// Where a plain matrix lies.
pub(super) fn plain_address(x: &Tensor<Cuda>) -> u64 {
    match &x.data {
        Data::F32(x) => x.get().address(),
        Data::Bf16(x) => x.get().address(),
    }
}

/// What a launch takes for an optional plain matrix; null if there is none.
pub(super) fn plain_or_null(x: Option<&Tensor<Cuda>>) -> &dyn KernelArg {
    const NONE: Option<&Buffer<u8>> = None;
    x.map_or(&NONE, |x| plain_arg(x).0)
}

/// A plain matrix whose values are yet to be written; without rows or without columns it is complete.
pub(super) fn unwritten_plain(
    device: &Device,
    dtype: DType,
    rows: usize,
    cols: usize,
) -> Result<Tensor<Cuda>> {
    let data = match dtype {
        DType::F32 => Data::F32(Buf::new(device.alloc(rows * cols)?)),
        DType::Bf16 => Data::Bf16(Buf::new(device.alloc(rows * cols)?)),
    };
    Tensor::new(data, rows, cols)
}
