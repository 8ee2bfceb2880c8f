//! Dequantizes any format with the kernel for all formats
//! (`csrc/kernels/convert/dequantize_units.cuh`).

use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Launch, plain_args};
use crate::ops::Instance;
use crate::ops::convert::units::{LONG, RecordPlane, SQUARE, UnitFormat, tiles};
use crate::ops::planes::{column_stride, type_name};
use crate::{Buffer, Cuda, Device};
use nibble_core::formats::{BlockAxis, Element, Format, ScaleKind, ScaleLayout, ScaleRule};
use nibble_core::{BlockScaled, DType, Error, Plain, Result};

/// The operation's name, for errors.
pub(super) const OP: &str = "dequantize";

const THREADS: u32 = 256;

/// Mirrors the device struct `DecodedArg`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DecodedArg {
    codes: u64,
    out: u64,
    records: RecordPlane,
    tensor_scale: u64,
    rows: i32,
    cols: i32,
    tile_lines: i32,
    matrix_lines: i32,
    matrix_tiles: i32,
    codes_aligned: u32,
    out_aligned: u32,
    pad: u32,
}
plain_args!(DecodedArg);

const fn across(down: bool) -> usize {
    if down { SQUARE } else { LONG }
}

fn instance(format: UnitFormat, out: DType, down: bool) -> Instance {
    let args = vec![
        ("F", TemplateArg::Type(format.device)),
        ("Out", TemplateArg::Type(type_name(out))),
        ("kDown", TemplateArg::Bool(down)),
    ];
    let spec =
        KernelSpec { source: "kernels/convert/dequantize_units.cuh", name: "nib::dequantize_units", args };
    Instance { spec, shared_bytes: format.dequantize_shared_bytes(out) }
}

/// The struct that decodes a format under a scale rule; both conventions of HiFloat4 decode in the
/// same way.
fn decoder(format: Format, rule: ScaleRule) -> Option<UnitFormat> {
    UnitFormat::of(format, if rule == ScaleRule::Cann { ScaleRule::Amax } else { rule })
}

/// Whether the kernel for all formats decodes this format.
///
/// # Errors
/// [`Error::Unsupported`] for a format without any kernel.
pub(super) fn takes(format: Format, rule: ScaleRule) -> Result<bool> {
    decoder(format, rule).ok_or_else(|| Error::unsupported(OP, format, "it has no kernel on a GPU"))?;
    Ok(!has_kernel(format))
}

/// Whether the fast kernel decodes the format: E2M1 or FP8 codes with one scale per block, and a block size that has an
/// instance.
fn has_kernel(format: Format) -> bool {
    let spec = format.spec();
    let is_one = |&rule: &ScaleRule| matches!((spec.scales)(rule), ScaleKind::E8M0 | ScaleKind::F32);
    spec.rules.iter().all(is_one)
        && match spec.element {
            Some(Element::E2M1) => spec.block == 32,
            Some(Element::E4M3 | Element::E5M2) => matches!(spec.block, 32 | 128),
            _ => false,
        }
}

/// Every kernel instance of this module. Packed formats of the fast kernel are included, because this kernel decodes them if rows or
/// columns end inside a block.
pub(super) fn instances() -> Vec<Instance> {
    let packed = |unit: &UnitFormat| unit.format.spec().code_bits < 8;
    let ours = UnitFormat::all()
        .filter(move |unit| (!has_kernel(unit.format) || packed(unit)) && unit.rule != Some(ScaleRule::Cann));
    let of = |unit| {
        [DType::Bf16, DType::F32]
            .into_iter()
            .flat_map(move |out| [false, true].map(|down| instance(unit, out, down)))
    };
    ours.flat_map(of).collect()
}

/// Whether there is an instance for these arguments.
#[cfg(test)]
pub(super) fn is_built(format: Format, rule: ScaleRule, out: DType, down: bool) -> bool {
    decoder(format, rule).is_some_and(|unit| instances().contains(&instance(unit, out, down)))
}

/// Decodes to `out`, which has as many values; `bare` omits the tensor scale.
pub(super) fn launch<T: Plain>(
    device: &Device,
    x: &BlockScaled<Cuda>,
    dtype: DType,
    bare: bool,
    out: &Buffer<T>,
) -> Result<()> {
    let (format, rows, cols) = (x.format, x.rows, x.cols);
    let Some(unit) = decoder(format, x.rule) else {
        return Err(Error::unsupported(OP, format, "it has no block scales to decode by"));
    };
    let down = x.axis == BlockAxis::Col;
    let Instance { spec, shared_bytes } = instance(unit, dtype, down);
    let ctas = tiles(rows, cols, across(down));
    let ctas = u32::try_from(ctas).ok().filter(|&ctas| ctas < 1 << 31);
    let ctas = ctas.ok_or_else(|| Error::shape(OP, "x", format!("{rows} × {cols}"), "fewer tiles"))?;
    let (block, matrix_lines) = (format.spec().block, rows / x.stack);
    let (line_stride, block_stride) = match x.scale_layout {
        ScaleLayout::MnMajor => (1, column_stride(x.scale_kind(), cols)),
        _ => (x.shape_of_scales().1, 1),
    };
    let is_square = x.axis == BlockAxis::Tile;
    let scales = x.tensor_scale.as_ref().filter(|_| !bare);
    let arg = DecodedArg {
        codes: x.codes.get().address(),
        out: out.address(),
        records: RecordPlane {
            records: x.scales.get().address(),
            line_stride: line_stride as u64,
            block_stride: block_stride as u64,
        },
        tensor_scale: scales.map_or(0, |scales| scales.get().address()),
        rows: rows as i32,
        cols: cols as i32,
        tile_lines: if is_square { block as i32 } else { 1 },
        matrix_lines: matrix_lines as i32,
        matrix_tiles: if is_square { matrix_lines.div_ceil(block) as i32 } else { 0 },
        codes_aligned: format.row_code_bytes(if down { rows } else { cols }).is_multiple_of(16).into(),
        out_aligned: (cols * dtype.size_bytes()).is_multiple_of(16).into(),
        pad: 0,
    };
    let launch = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes };
    // SAFETY: `BufferCheck` checked codes, scales and tensor scales against the shape, and `out` has as many values. The kernel stays
    // within the shape, and accesses 16 bytes at a time only if rows are multiples of 16 bytes.
    unsafe { device.kernel(&spec)?.launch(launch, &[&arg]) }
}
