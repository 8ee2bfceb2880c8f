//! Runs `quantize` and `measure_amax` on a GPU (`csrc/kernels/convert/quantize*.cuh`).

mod args;
mod config;
mod measure;
mod pack;
mod units;

pub(crate) use measure::measure_amax;
pub(crate) use pack::quantize_pack;

use crate::Buffer;
use crate::launch::tensor_map::{self, Swizzle, TensorMap, Tiles};
use crate::launch::{Divider, HadamardArg, KernelArg, Launch, RoundingArg};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{column_stride, planes_or_nulls};
use crate::{Cuda, Device};
use args::{ByBlock, FoldedRows, MatrixArgs, Planned, Transform, TransformArg};
use config::{OP, QuantizeDesc, QuantizeKernel, QuantizePath, TRANSFORM_COLS, UNIT_COLS};
use nibble_choice::quantize::TransformMade;
use nibble_core::formats::{Element, ScaleRule};
use nibble_core::ops::{Counts, Emitted, Planes, Quantize};
use nibble_core::{Data, Result, Tensor};
use std::ffi::c_void;

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    [config::instances(), units::instances()].concat()
}

/// Mirrors the device struct `PowerRule` (csrc/formats/e8m0.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PowerRule {
    up: u32,
    nan_from: u32,
}

// SAFETY: the pointer and the size are those of the value itself.
unsafe impl KernelArg for PowerRule {
    fn pointer(&self) -> *const c_void {
        std::ptr::from_ref(self).cast()
    }
    fn bytes(&self) -> usize {
        size_of::<Self>()
    }
}

impl PowerRule {
    /// The parameters for a rule that gives E8M0 scales; other rules ignore these values.
    fn of(rule: ScaleRule, element: Element) -> Self {
        const INFINITY: u32 = 0x7F80_0000;
        const MANTISSA: u32 = 0x7F_FFFF;
        let up = match rule {
            ScaleRule::Floor => 0,
            ScaleRule::Rceil | ScaleRule::Amax | ScaleRule::TensorAmax | ScaleRule::Cann => {
                MANTISSA - (element.max().to_bits() & MANTISSA)
            }
            ScaleRule::Ceil => MANTISSA,
            ScaleRule::Even => 1 << (22 - element.mantissa_bits()),
        };
        Self { up, nan_from: if rule == ScaleRule::Even { INFINITY - up } else { INFINITY } }
    }
}

/// Runs [`Quantize`] on the GPU.
pub(crate) fn quantize(cuda: &Cuda, op: Quantize<'_, Cuda>) -> Result<Emitted<Cuda>> {
    quantize_counting(cuda, op, None)
}

/// Quantizes like [`quantize`], and adds the counts to `counts` if given. The counts must be on
/// this device.
pub(crate) fn quantize_counting(
    cuda: &Cuda,
    op: Quantize<'_, Cuda>,
    counts: Option<&Counts<Cuda>>,
) -> Result<Emitted<Cuda>> {
    op.check()?;
    let device = cuda.device();
    check_buffers(cuda, &op)?;
    let path = QuantizePath::of_op(&op);
    config::check(&path.asked)?;
    let made = match counts {
        Some(counts) => Emitted { counts: Some(counts.clone()), ..op.uncounted_as(cuda, path.taken)? },
        None => op.result_as(cuda, path.taken)?,
    };
    if op.x.rows == 0 || op.x.cols == 0 {
        return Ok(made);
    }
    let (source, out) = (MatrixArgs::of(&op), Planned::of(&made)?);
    let (Some(transform), Some(at)) = (op.hadamard, path.transform) else {
        launch(device, &op, &path, &source, &out)?;
        return Ok(made);
    };
    let id_mask = if op.planes == Planes::Cols { -(transform.len as i32) } else { -1 };
    let arg = TransformArg::new(&source, &path.asked, &transform)?;
    match at {
        TransformMade::AsItReads => {
            let transform = Some(Transform { arg, input: path.asked.input });
            launch(device, &op, &path, &MatrixArgs { id_mask, transform, ..source }, &out)?;
        }
        TransformMade::First => {
            let transformed = transform_first(device, &source, &path, &arg)?;
            let address = transformed.address();
            // The transform has turned padding into ordinary values wherever a transform block has a valid row. The kernel for all
            // formats handles padding that became ordinary values; for all other kernels zeros are ordinary values too.
            let row_id = source.row_id.filter(|_| path.kernels.is_none());
            let source = MatrixArgs { x: &transformed, address, row_id, id_mask, ..source };
            launch(device, &op, &path, &source, &out)?;
        }
    }
    Ok(made)
}

/// Checks lengths and devices of the inputs.
fn check_buffers(cuda: &Cuda, op: &Quantize<'_, Cuda>) -> Result<()> {
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("x", op.x)?;
    buffers.groups(op.groups)?;
    if let Some(step) = op.random.and_then(|random| random.step) {
        buffers.buffer("random.step", step)?;
    }
    if let Some(step) = op.hadamard.and_then(|hadamard| hadamard.step) {
        buffers.buffer("hadamard.step", step)?;
    }
    if let Some(delayed) = &op.delayed {
        buffers.buffer("delayed.records", delayed.records)?;
    }
    match op.amax {
        Some(amax) => buffers.buffer("amax", amax).map(drop),
        None => Ok(()),
    }
}

/// Writes the transform of a matrix as F32, for kernels that do not apply the transform themselves.
fn transform_first(
    device: &Device,
    source: &MatrixArgs<'_>,
    path: &QuantizePath,
    transform: &TransformArg,
) -> Result<Buffer<f32>> {
    let desc = &path.asked;
    let out_rows = desc.stack * path.last.rows;
    let out = device.alloc::<f32>(out_rows * desc.cols)?;
    let (spec, ctas) = config::transform(desc);
    let launch = Launch { ctas: ctas as u32, threads: 256, cluster: 1, shared_bytes: 0 };
    let kernel = device.kernel(&spec)?;
    let MatrixArgs { x, row_id, .. } = *source;
    let (rows, cols, out_rows) = ((desc.stack * desc.rows) as i32, desc.cols as i32, out_rows as i32);
    // SAFETY: `BufferCheck` checked x and the groups against the sizes passed, and `out` is new and has out_rows · cols
    // values.
    unsafe {
        if desc.planes == Planes::Rows {
            let segments = desc.cols.div_ceil(TRANSFORM_COLS) as u32;
            let (by_segments, hadamard) = (Divider::by(segments), &transform.hadamard);
            kernel.launch(launch, &[x, &out, &row_id, &rows, &cols, &by_segments, &segments, hadamard])?;
        } else {
            kernel.launch(launch, &[x, &out, &row_id, &cols, &out_rows, transform])?;
        }
    }
    Ok(out)
}

/// A tensor map of x as `quantize_hadamard_rows` reads it: column units stacked vertically, one warp's
/// units at a time.
fn unit_map(x: &Tensor<Cuda>, desc: &QuantizeDesc) -> Result<TensorMap> {
    let Data::Bf16(x) = &x.data else { unreachable!("the kernel's variants are of BF16") };
    Tiles {
        element: tensor_map::Element::Bf16,
        address: x.get().address(),
        rows: config::units(desc),
        cols: UNIT_COLS,
        row_stride_bytes: UNIT_COLS * size_of::<u16>(),
        tile_rows: 32,
        tile_cols: UNIT_COLS,
        swizzle: Swizzle::Bytes128,
    }
    .encode()
}

fn launch(
    device: &Device,
    op: &Quantize<'_, Cuda>,
    path: &QuantizePath,
    source: &MatrixArgs<'_>,
    out: &Planned<'_>,
) -> Result<()> {
    let Some(config) = config::config(path, device.info().num_sms as usize) else {
        return units::launch(device, op, path, source, out);
    };
    let desc = &path.last;
    let kernel = device.kernel(&config.spec)?;
    let MatrixArgs { x, row_id, start, num_groups, .. } = *source;
    let counts = out.counts;
    let rule = PowerRule::of(op.codec.rule(), op.codec.element());
    let rounding = RoundingArg::new(op.codec, op.random);
    let hadamard = op.hadamard.as_ref().map_or(Ok(HadamardArg::NONE), HadamardArg::new)?;
    let ([row_codes, row_scales], [col_codes, col_scales]) =
        (planes_or_nulls(out.rows), planes_or_nulls(out.cols));
    let planes: [&dyn KernelArg; 5] = [x, row_codes, row_scales, col_codes, col_scales];
    let (rows, cols, capacity) = (desc.rows as i32, desc.cols as i32, desc.capacity as i32);
    let launch = |args: &[&[&dyn KernelArg]]| {
        // SAFETY: the buffers have the lengths that follow from the sizes passed, `BufferCheck` checked x and the groups against
        // these sizes, and the buffers and counts are new, so nothing else accesses them.
        unsafe { kernel.launch(config.launch, &args.concat()) }
    };
    let sizes: [&dyn KernelArg; 5] = [counts, &row_id, &rows, &cols, &capacity];
    let scale_stride = column_stride(op.codec.scale_kind(), desc.cols) as i32;
    match config.kernel {
        QuantizeKernel::Rows { segments, rounds } => {
            let (rows, cols) = config::row_shape(path);
            let is_folded = desc.ragged && rows == 1;
            let folded = FoldedRows::of(row_id.filter(|_| is_folded), desc.cols);
            let row_id = row_id.filter(|_| !is_folded);
            let (segments, rounds) = (segments as u32, rounds as u32);
            let (rows, cols, by_segments) = (rows as i32, cols as i32, Divider::by(segments));
            let sizes: [&dyn KernelArg; 7] =
                [counts, &row_id, &rows, &cols, &by_segments, &segments, &rounds];
            launch(&[&planes[..3], &sizes, &[&folded, &rule, &rounding]])
        }
        QuantizeKernel::HadamardRows => {
            let map = unit_map(op.x, desc)?;
            let units = (desc.cols / UNIT_COLS) as u32;
            let by_units = Divider::by(units);
            let sizes: [&dyn KernelArg; 6] = [counts, &row_id, &rows, &cols, &by_units, &units];
            launch(&[&[&map, row_codes, row_scales], &sizes, &[&rule, &rounding, &hadamard]])
        }
        QuantizeKernel::Cols { band } => {
            let (band, by_block) = (band as i32, ByBlock::new(device, path)?);
            let row_scales_by_block = by_block.as_ref().map(|by_block| &by_block.scales);
            launch(&[
                &[x, row_codes, &row_scales_by_block, col_codes, col_scales],
                &sizes,
                &[&scale_stride, &band, &rule, &rounding],
            ])?;
            by_block.map_or(Ok(()), |by_block| by_block.transpose(device, desc.kind(), row_scales))
        }
        QuantizeKernel::HadamardCols => {
            let by_height = Divider::by(config::lines_height(path) as u32);
            launch(&[
                &[x, col_codes, col_scales],
                &sizes,
                &[&scale_stride, &by_height, &rule, &rounding, &hadamard, &start, &num_groups],
            ])
        }
        QuantizeKernel::Tiles => launch(&[&planes, &[counts, &rows, &cols], &[&rule, &rounding]]),
    }
}
