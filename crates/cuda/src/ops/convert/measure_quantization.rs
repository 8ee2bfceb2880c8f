//! Runs `measure_quantization` on a GPU, by a kernel for all formats
//! (`csrc/kernels/convert/measure_quantization.cuh`).

use super::units::{LONG, RecordPlane, SQUARE, UnitFormat, tiles};
use crate::Cuda;
use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Launch, plain_args};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{column_stride, plain_address, type_name};
use nibble_core::formats::{BlockAxis, ScaleLayout, ScaleRule};
use nibble_core::ops::MeasureQuantization;
use nibble_core::{BlockScaled, DType, Error, Result};

const OP: &str = "measure_quantization";
const THREADS: u32 = 256;

/// Mirrors the device struct `MeasuredArg`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MeasuredArg {
    codes: u64,
    x: u64,
    counts: u64,
    row_id: u64,
    records: RecordPlane,
    tensor_scale: u64,
    rows: i32,
    cols: i32,
    x_rows: i32,
    tile_lines: i32,
    matrix_lines: i32,
    matrix_tiles: i32,
    codes_aligned: u32,
    pad: u32,
}
plain_args!(MeasuredArg);

fn instance(format: UnitFormat, x: DType, down: bool) -> Instance {
    let args = vec![
        ("F", TemplateArg::Type(format.device)),
        ("X", TemplateArg::Type(type_name(x))),
        ("kDown", TemplateArg::Bool(down)),
    ];
    let (source, name) = ("kernels/convert/measure_quantization.cuh", "nib::measure_quantization");
    Instance { spec: KernelSpec { source, name, args }, shared_bytes: format.code_bytes() }
}

/// Every kernel instance of this module: every format, both plain types, blocks along rows and down columns.
pub(crate) fn instances() -> Vec<Instance> {
    let formats = UnitFormat::all().filter(|unit| unit.rule != Some(ScaleRule::Cann));
    let of = |unit| {
        [DType::Bf16, DType::F32]
            .into_iter()
            .flat_map(move |x| [false, true].map(|down| instance(unit, x, down)))
    };
    formats.flat_map(of).collect()
}

/// Runs [`MeasureQuantization`] on the GPU.
pub(crate) fn measure_quantization(cuda: &Cuda, op: MeasureQuantization<'_, Cuda>) -> Result<Buf<u64>> {
    let check = BufferCheck::by(OP, cuda);
    check.tensor("x", op.x)?;
    check.blocks("quantized", op.quantized)?;
    check.groups(op.groups)?;
    let counts = op.result(cuda)?;
    let q = op.quantized;
    if op.x.rows == 0 || op.x.cols == 0 {
        return Ok(counts);
    }
    let unit = unit_of(q)?;
    let down = q.axis == BlockAxis::Col;
    let Instance { spec, shared_bytes } = instance(unit, op.x.dtype(), down);
    let ctas = tiles(q.rows, q.cols, if down { SQUARE } else { LONG });
    let ctas = u32::try_from(ctas).ok().filter(|&ctas| ctas < 1 << 31);
    let ctas =
        ctas.ok_or_else(|| Error::shape(OP, "x", format!("{} × {}", q.rows, q.cols), "fewer tiles"))?;
    let (block, matrix_lines) = (q.format.spec().block, q.rows / q.stack);
    let (line_stride, block_stride) = match q.scale_layout {
        ScaleLayout::MnMajor => (1, column_stride(q.scale_kind(), q.cols)),
        _ => (q.shape_of_scales().1, 1),
    };
    let is_square = q.axis == BlockAxis::Tile;
    let arg = MeasuredArg {
        codes: q.codes.get().address(),
        x: plain_address(op.x),
        counts: counts.get().address(),
        row_id: op.groups.map_or(0, |groups| groups.row_id.get().address()),
        records: RecordPlane {
            records: q.scales.get().address(),
            line_stride: line_stride as u64,
            block_stride: block_stride as u64,
        },
        tensor_scale: q.tensor_scale.as_ref().map_or(0, |scales| scales.get().address()),
        rows: q.rows as i32,
        cols: q.cols as i32,
        x_rows: op.x.rows as i32,
        tile_lines: if is_square { block as i32 } else { 1 },
        matrix_lines: matrix_lines as i32,
        matrix_tiles: if is_square { matrix_lines.div_ceil(block) as i32 } else { 0 },
        codes_aligned: q.format.row_code_bytes(if down { q.rows } else { q.cols }).is_multiple_of(16).into(),
        pad: 0,
    };
    let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes };
    // SAFETY: `check` checked the lengths of x, groups and the buffers against the shape, and x has no more rows than the buffers; the
    // kernel reads within both and adds to the four counts.
    unsafe { cuda.device().kernel(&spec)?.launch(launch, &[&arg]) }?;
    Ok(counts)
}

/// The struct that decodes a tensor; both conventions of HiFloat4 decode in the same way.
fn unit_of(q: &BlockScaled<Cuda>) -> Result<UnitFormat> {
    let rule = if q.rule == ScaleRule::Cann { ScaleRule::Amax } else { q.rule };
    let is_read = q.scale_layout == ScaleLayout::RowMajor
        || (q.axis == BlockAxis::Col && q.scale_layout == ScaleLayout::MnMajor);
    match UnitFormat::of(q.format, rule) {
        Some(unit) if is_read && q.rows.max(q.cols) <= 1 << 30 => Ok(unit),
        Some(_) if is_read => Err(Error::shape(OP, "rows or cols", q.rows.max(q.cols), "at most 2^30")),
        Some(_) => Err(Error::unsupported(OP, q.format, format!("its scales are {}", q.scale_layout))),
        None => Err(Error::unsupported(OP, q.format, "it has no kernel on a GPU")),
    }
}
