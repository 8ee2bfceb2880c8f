//! Runs `dequantize` on a GPU: E2M1 and FP8 with one scale per block have a separate kernel
//! (`csrc/kernels/convert/dequantize.cuh`); all other formats use the kernel for all formats.

mod units;

use crate::Cuda;
use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{DecodeArg, Divider, KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{column_stride, numbers_per_load, type_name};
use crate::{Buffer, Device};
use nibble_core::ops::Dequantize;
use nibble_core::{BlockScaled, DType, Data, Error, Plain, Result, Tensor};
use nibble_formats::{BlockAxis, Element, Format, ScaleKind, ScaleLayout};
use units::OP;

const THREADS: u32 = 256;
/// Columns that a warp processes at a time if blocks run along the rows.
const SEGMENT: usize = 1024;
/// Rows and columns of a tile if blocks run down the columns.
const TILE: usize = 128;
/// Vertically adjacent tiles that are processed before the next column of tiles.
const BAND: i32 = 4;
/// The most elements that may be passed as one row.
const ONE_ROW: usize = 1 << 30;

/// Runs [`Dequantize`] on the GPU.
pub(crate) fn dequantize(cuda: &Cuda, op: Dequantize<'_, Cuda>) -> Result<Tensor<Cuda>> {
    op.check()?;
    let out = op.result(cuda)?;
    decode_to(cuda.device(), op.x, false, &out)?;
    Ok(out)
}

/// The values in BF16: codes times the scales of their blocks, without the tensor scale.
pub(crate) fn bare(device: &Device, x: &BlockScaled<Cuda>) -> Result<Tensor<Cuda>> {
    let op = Dequantize { x, dtype: DType::Bf16 };
    op.check()?;
    let out = Data::Bf16(Buf::new(device.alloc(x.rows * x.cols)?));
    let out = Tensor::new(out, x.rows, x.cols)?;
    decode_to(device, x, true, &out)?;
    Ok(out)
}

/// The complete values in F32, including the tensor scale.
pub(crate) fn whole(device: &Device, x: &BlockScaled<Cuda>) -> Result<Tensor<Cuda>> {
    Dequantize { x, dtype: DType::F32 }.check()?;
    let out = Tensor::new(Data::F32(Buf::new(device.alloc(x.rows * x.cols)?)), x.rows, x.cols)?;
    decode_to(device, x, false, &out)?;
    Ok(out)
}

fn decode_to(device: &Device, x: &BlockScaled<Cuda>, bare: bool, out: &Tensor<Cuda>) -> Result<()> {
    BufferCheck::on(OP, device).blocks("x", x)?;
    let desc = DequantizeDesc::of(x, out.dtype())?;
    match &out.data {
        Data::F32(out) => decode(device, &desc, x, bare, out.get()),
        Data::Bf16(out) => decode(device, &desc, x, bare, out.get()),
    }
}

/// Describes a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DequantizeDesc {
    format: Format,
    axis: BlockAxis,
    rows: usize,
    cols: usize,
    stack: usize,
    dtype: DType,
}

impl DequantizeDesc {
    fn of(x: &BlockScaled<Cuda>, dtype: DType) -> Result<Self> {
        let desc = Self { format: x.format, axis: x.axis, rows: x.rows, cols: x.cols, stack: x.stack, dtype };
        if !x.format.is_block() {
            return Err(Error::unsupported(OP, x.format, "it has no block scales to decode by"));
        }
        let read = x.scale_layout == ScaleLayout::RowMajor
            || (x.axis == BlockAxis::Col && x.scale_layout == ScaleLayout::MnMajor);
        if !read {
            let why = format!("its scales are {}; row-major here, or of columns mn-major", x.scale_layout);
            return Err(Error::unsupported(OP, x.format, why));
        }
        if x.stack == 0 || !x.rows.is_multiple_of(x.stack) {
            return Err(Error::shape(OP, "stack", x.stack, format!("a divisor of the {} rows", x.rows)));
        }
        for (argument, len) in [("rows", x.rows), ("cols", x.cols)] {
            if len > ONE_ROW {
                return Err(Error::shape(OP, argument, len, "at most 2^30"));
            }
        }
        Ok(desc)
    }

    /// Whether rows or columns of sub-byte codes end inside a block, which only the kernel for all formats
    /// supports.
    fn ends_short(&self) -> bool {
        let (spec, len) =
            (self.format.spec(), if self.axis == BlockAxis::Col { self.rows } else { self.cols });
        spec.code_bits < 8 && !len.is_multiple_of(spec.block)
    }

    /// The configuration of the fast kernel; `None` if there is no work.
    fn config(&self, num_sms: u32) -> Result<Option<DequantizeConfig>> {
        let Self { format, axis, rows, cols, dtype, .. } = *self;
        let (bits, block) = (format.spec().code_bits as usize, format.spec().block);
        if rows == 0 || cols == 0 {
            return Ok(None);
        }
        let instance =
            |aligned| DequantizeVariant { down: axis == BlockAxis::Col, bits, block, dtype, aligned };
        let whole = cols.is_multiple_of(numbers_per_load(dtype));
        let most = |tasks: usize| {
            let tasks = u32::try_from(tasks).ok().filter(|&tasks| tasks < 1 << 31);
            tasks.ok_or_else(|| {
                Error::shape(OP, "x", format!("{rows} × {cols}"), "fewer than 2^31 pieces of 1024")
            })
        };
        if axis == BlockAxis::Col {
            let kind = instance(whole && (bits == 4 || rows.is_multiple_of(16)));
            let ctas = most(cols.div_ceil(TILE).saturating_mul(rows.div_ceil(TILE)))?;
            return Ok(Some(DequantizeConfig { kind, rows, cols, segments: 0, ctas }));
        }
        let flat = axis == BlockAxis::Row
            && cols.is_multiple_of(block)
            && rows.checked_mul(cols).is_some_and(|n| n <= ONE_ROW);
        let (rows, cols) = if flat { (1, rows * cols) } else { (rows, cols) };
        let segments = cols.div_ceil(SEGMENT);
        let tasks = most(rows.saturating_mul(segments))?;
        let ctas = tasks.div_ceil(THREADS / 32).min(128 * num_sms);
        Ok(Some(DequantizeConfig { kind: instance(whole), rows, cols, segments: segments as u32, ctas }))
    }

    /// The layout of the scales, for the kernel.
    fn decode_arg(&self, x: &BlockScaled<Cuda>) -> DecodeArg {
        let (block, matrix_lines) = (self.format.spec().block, self.rows / self.stack);
        let (line_stride, block_stride) = match x.scale_layout {
            ScaleLayout::MnMajor => (1, column_stride(x.scale_kind(), x.cols)),
            _ => (x.shape_of_scales().1, 1),
        };
        DecodeArg {
            is_f32: (x.scale_kind() == ScaleKind::F32).into(),
            line_stride: line_stride as u32,
            block_stride: block_stride as u32,
            is_e5m2: (self.format.spec().element == Some(Element::E5M2)).into(),
            tile_lines: if self.axis == BlockAxis::Tile { block as u32 } else { 1 },
            matrix_lines: matrix_lines as u32,
            matrix_tiles: matrix_lines.div_ceil(block) as u32,
        }
    }
}

/// The template instance of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DequantizeVariant {
    /// Whether blocks run down the columns.
    down: bool,
    bits: usize,
    block: usize,
    dtype: DType,
    aligned: bool,
}

impl DequantizeVariant {
    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: "kernels/convert/dequantize.cuh",
            name: if self.down { "nib::dequantize_cols" } else { "nib::dequantize_rows" },
            args: vec![
                ("kBits", TemplateArg::Int(self.bits as i64)),
                ("kBlock", TemplateArg::Int(self.block as i64)),
                ("Out", TemplateArg::Type(type_name(self.dtype))),
                ("kAligned", TemplateArg::Bool(self.aligned)),
            ],
        }
    }
}

/// The configuration of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DequantizeConfig {
    kind: DequantizeVariant,
    /// The shape that the kernel gets: if blocks run along rows and none is short, all rows are
    /// passed as one long row.
    rows: usize,
    cols: usize,
    /// Segments per row; 0 if blocks run down the columns.
    segments: u32,
    ctas: u32,
}

/// Runs the kernel for the description.
fn decode<T: Plain>(
    device: &Device,
    desc: &DequantizeDesc,
    x: &BlockScaled<Cuda>,
    bare: bool,
    out: &Buffer<T>,
) -> Result<()> {
    if units::takes(x.format, x.rule)? || desc.ends_short() {
        if desc.rows != 0 && desc.cols != 0 {
            units::launch(device, x, desc.dtype, bare, out)?;
        }
        return Ok(());
    }
    match desc.config(device.info().num_sms)? {
        Some(config) => launch(device, desc, &config, x, out),
        None => Ok(()),
    }
}

fn launch<T: Plain>(
    device: &Device,
    desc: &DequantizeDesc,
    config: &DequantizeConfig,
    x: &BlockScaled<Cuda>,
    out: &Buffer<T>,
) -> Result<()> {
    let kernel = device.kernel(&config.kind.spec())?;
    let launch = Launch { ctas: config.ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
    let (arg, codes, scales) = (desc.decode_arg(x), x.codes.get(), x.scales.get());
    let [rows, cols] = [config.rows as i32, config.cols as i32];
    let by_segments = Divider::by(config.segments.max(1));
    let shape: &[&dyn KernelArg] = if config.kind.down {
        &[&rows, &cols, &BAND]
    } else {
        &[&rows, &cols, &by_segments, &config.segments]
    };
    let args = [&[codes as &dyn KernelArg, scales, out, &arg], shape].concat();
    // SAFETY: `BufferCheck` checked codes and scales against the shape, and `out` is allocated for it; the kernel stays
    // within the shape. The kernel accesses 16 bytes at a time only if every row is a multiple of 16 bytes.
    unsafe { kernel.launch(launch, &args) }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let mut all = Vec::new();
    let blocks = [(4, 32), (8, 32), (8, 128)];
    for (down, (bits, block)) in [false, true].into_iter().flat_map(|down| blocks.map(|of| (down, of))) {
        for dtype in [DType::Bf16, DType::F32] {
            // Rows of four-bit codes are whole blocks, which are aligned.
            let alignments: &[bool] = if !down && bits == 4 { &[true] } else { &[true, false] };
            for &aligned in alignments {
                let kind = DequantizeVariant { down, bits, block, dtype, aligned };
                all.push(Instance { spec: kind.spec(), shared_bytes: 0 });
            }
        }
    }
    all.extend(units::instances());
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const DESC: DequantizeDesc = DequantizeDesc {
        format: Format::E4m3,
        axis: BlockAxis::Row,
        rows: 3,
        cols: 2048,
        stack: 1,
        dtype: DType::Bf16,
    };

    #[test]
    fn whole_blocks_are_one_row_and_short_ones_are_not() {
        let whole = DESC.config(132).unwrap().unwrap();
        assert_eq!((whole.rows, whole.cols, whole.segments, whole.ctas), (1, 6144, 6, 1));
        let short = DequantizeDesc { cols: 2040, ..DESC }.config(132).unwrap().unwrap();
        assert_eq!((short.rows, short.cols, short.segments), (3, 2040, 2));
        let tiles = DequantizeDesc { axis: BlockAxis::Tile, ..DESC }.config(132).unwrap().unwrap();
        assert_eq!((tiles.rows, tiles.cols, tiles.segments), (3, 2048, 2));
        assert_eq!(DequantizeDesc { rows: 0, ..DESC }.config(132).unwrap(), None);
    }

    #[test]
    fn every_description_has_an_instance() {
        let specs: Vec<_> = instances().into_iter().map(|i| i.spec).collect();
        for format in [Format::Mxfp4, Format::E4m3, Format::E5m2, Format::Mxfp8E4m3, Format::Mxfp8E5m2] {
            for axis in [BlockAxis::Row, BlockAxis::Col, BlockAxis::Tile] {
                for (rows, cols) in [(96, 32), (32, 96), (35, 37), (64, 36), (36, 64)] {
                    for dtype in [DType::F32, DType::Bf16] {
                        let desc = DequantizeDesc { format, axis, rows, cols, stack: 1, dtype };
                        let short = format == Format::Mxfp4
                            && !(if axis == BlockAxis::Col { rows } else { cols }).is_multiple_of(32);
                        assert_eq!(desc.ends_short(), short, "{desc:?}");
                        if short {
                            assert!(units::is_built(
                                format,
                                nibble_core::formats::ScaleRule::Rceil,
                                dtype,
                                axis == BlockAxis::Col
                            ));
                            continue;
                        }
                        let kind = desc.config(132).unwrap().unwrap().kind;
                        assert!(specs.contains(&kind.spec()), "{desc:?}: {}", kind.spec());
                    }
                }
            }
        }
    }
}
