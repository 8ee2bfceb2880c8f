//! Lifts blocks along rows or columns to FP8 along the same direction or in 2-D blocks, for GEMMs
//! (`csrc/kernels/convert/lift_lines.cuh`); [`Format::lift`] defines the result.

use super::units::{RecordPlane, UnitFormat};
use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch, plain_args};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::column_stride;
use crate::{Cuda, Device};
use nibble_core::formats::{BlockAxis, Format, ScaleLayout};
use nibble_core::{BlockScaled, Error, Result};

const OP: &str = "lift";
const THREADS: u32 = 256;
/// Values per thread and step.
const UNIT: usize = 16;
/// Rows per CTA, and values of each row.
const TILE: (usize, usize) = (32, 512);

plain_args!(RecordPlane);

fn spec(format: UnitFormat, whole: bool, squares: bool) -> KernelSpec {
    let args = vec![
        ("F", TemplateArg::Type(format.device)),
        ("kWhole", TemplateArg::Bool(whole)),
        ("kSquares", TemplateArg::Bool(squares)),
    ];
    KernelSpec { source: "kernels/convert/lift_lines.cuh", name: "nib::lift_lines", args }
}

/// Whether a format can be lifted under every scale rule.
pub(super) fn is_lifted(format: Format) -> bool {
    format.spec().rules.iter().all(|rule| format.lift(*rule, BlockAxis::Row).is_some())
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let formats = UnitFormat::all().filter(|unit| is_lifted(unit.format));
    let ways = [true, false].into_iter().flat_map(|whole| [true, false].map(|squares| (whole, squares)));
    let each = formats.flat_map(|unit| ways.clone().map(move |(whole, squares)| spec(unit, whole, squares)));
    each.map(|spec| Instance { spec, shared_bytes: 0 }).collect()
}

/// The layout of the scale records, for the kernel.
pub(super) fn records(x: &BlockScaled<Cuda>) -> Result<RecordPlane> {
    let (line_stride, block_stride) = match (x.scale_layout, x.axis) {
        (ScaleLayout::RowMajor, _) => (x.shape_of_scales().1, 1),
        (ScaleLayout::MnMajor, BlockAxis::Col) => (1, column_stride(x.scale_kind(), x.cols)),
        (layout, _) => {
            let why = format!("its scales are {layout}; row-major here, or of columns mn-major");
            return Err(Error::unsupported(OP, x.format, why));
        }
    };
    let [line_stride, block_stride] = [line_stride, block_stride].map(|stride| stride as u64);
    Ok(RecordPlane { records: x.scales.get().address(), line_stride, block_stride })
}

/// Lifts `x` to buffers with `codes` and `scales` bytes, with scales in `layout`. `axis` is that of x, or `Tile` for 2-D blocks of the
/// rows of `matrices` matrices.
pub(crate) fn lift(
    device: &Device,
    x: &BlockScaled<Cuda>,
    (axis, matrices): (BlockAxis, usize),
    (codes, scales, layout): (usize, usize, ScaleLayout),
) -> Result<BlockScaled<Cuda>> {
    BufferCheck::on(OP, device).blocks("x", x)?;
    let unit = UnitFormat::of(x.format, x.rule).filter(|_| x.format.lift(x.rule, x.axis).is_some());
    let unit = unit.ok_or_else(|| Error::unsupported(OP, x.format, "it is not lifted"))?;
    let (format, rule) = Format::LIFTED;
    let [codes, scales] = [device.alloc(codes)?, device.alloc(scales)?].map(Buf::new);
    let squares = axis == BlockAxis::Tile;
    let stack = if squares { matrices } else { x.stack };
    let made = BlockScaled { format, rule, codes, scales, scale_layout: layout, axis, stack, ..x.clone() };
    let code_bytes = BlockScaled::<Cuda>::code_bytes(format, x.axis, x.rows, x.cols);
    let lengths = [(code_bytes, made.codes.get().len()), (made.scale_bytes(), made.scales.get().len())];
    for (argument, (expected, got)) in ["codes", "scales"].into_iter().zip(lengths) {
        if got != expected {
            return Err(Error::shape(OP, argument, got, expected));
        }
    }
    let (lines, len) = if x.axis == BlockAxis::Col { (x.cols, x.rows) } else { (x.rows, x.cols) };
    let matrices = if squares { matrices } else { 1 };
    if matrices == 0 || !lines.is_multiple_of(matrices) {
        return Err(Error::shape(OP, "rows of x", lines, format!("those of {matrices} matrices")));
    }
    let n = lines / matrices;
    let ctas = matrices.saturating_mul(n.div_ceil(TILE.0)).saturating_mul(len.div_ceil(TILE.1));
    let (Ok(ctas), Ok(_), Ok(len_of_line)) = (i32::try_from(ctas), i32::try_from(lines), i32::try_from(len))
    else {
        return Err(Error::shape(OP, "x", format!("{} × {}", x.rows, x.cols), "fewer values"));
    };
    if ctas == 0 {
        return Ok(made);
    }
    let (from, to) = (records(x)?, records(&made)?);
    let kernel = device.kernel(&spec(unit, len.is_multiple_of(UNIT), squares))?;
    let launch = Launch { ctas: ctas as u32, threads: THREADS, cluster: 1, shared_bytes: 0 };
    // `n` is at most the number of rows, which fits an i32.
    let n = n as i32;
    let args: [&dyn KernelArg; 6] = [x.codes.get(), &from, made.codes.get(), &to, &n, &len_of_line];
    // SAFETY: `BufferCheck` checked the buffers of x against its shape, and those of `made` were checked here. The kernel stays within rows
    // of this length and the records of their blocks, and uses whole words only if every row starts on a word. A device's buffers are
    // aligned to 16 bytes.
    unsafe { kernel.launch(launch, &args) }?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each format that GEMMs lift has an instance under every rule.
    #[test]
    fn every_lifted_format_is_built() {
        let built: Vec<_> = instances().into_iter().map(|instance| instance.spec).collect();
        for format in Format::ALL {
            for &rule in format.spec().rules {
                if format.lift(rule, BlockAxis::Row).is_some() {
                    let unit = UnitFormat::of(format, rule).unwrap();
                    for (whole, squares) in [(true, true), (true, false), (false, true), (false, false)] {
                        assert!(built.contains(&spec(unit, whole, squares)), "{format} {rule}");
                    }
                }
            }
        }
        assert!(!built.is_empty());
    }
}
