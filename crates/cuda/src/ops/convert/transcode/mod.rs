//! Runs `transcode` on a GPU:
//! `csrc/kernels/convert/{lift_rows,lift_cols,lift_tiles,shift_cols,requantize_rows,recut_lines}.cuh`.

mod lift_tiles;
mod limits;
pub(crate) mod short_blocks;

use crate::Buffer;
use crate::Cuda;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{column_stride, plane_args, rule_arg};
use limits::{OP, below_2_31};
use nibble_choice::transcode as sequence;
use nibble_core::ops::{Transcode, Transcoded};
use nibble_core::{BlockScaled, Error, Result};
use nibble_formats::{BlockAxis, Format, ScaleKind, ScaleRule};

const THREADS: u32 = 256;
/// Rows per strip, columns per panel, and values per FP8 block.
const TILE: usize = 128;
/// Columns per chunk of `lift_rows`; the next constant has the numbers of chunks per warp and step, because
/// more chunks are faster for long rows.
const LIFT_CHUNK_COLS: usize = 512;
const LIFT_CHUNKS: [usize; 2] = [4, 8];
/// Threads per CTA of `lift_rows`; the next constant has the segments per warp, if there may be padding (which is
/// skipped) and if there is none.
const LIFT_THREADS: u32 = 128;
const LIFT_ROUNDS: [u32; 2] = [2, 1];
/// Columns per warp and step of `requantize_rows`.
const REQUANTIZE_COLS: usize = 2048;
/// The most CTAs of `requantize_rows` per SM: more rows per warp are cheaper than more warps.
const REQUANTIZE_CTAS_PER_SM: u32 = 16;
/// Adjacent panels of 128 columns that a CTA of a column kernel processes, so that it reads 128 bytes of
/// each source row.
const LIFT_PANELS: usize = 2;
const SHIFT_PANELS: usize = 1;
/// The most strips of 128 rows that a CTA of a column kernel processes.
const MOST_DEPTH: usize = 2;

/// The kernel of a conversion, with its template arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Conversion {
    /// MXFP4 rows to E4M3 rows; `whole` means that no block of 128 columns is partial.
    LiftRows { whole: bool, chunks: usize },
    /// MXFP4 rows to E4M3 columns; `whole` means that no block of 128 columns is partial.
    LiftCols { whole: bool },
    /// E4M3 rows to E4M3 columns; `whole` means that rows are aligned to 16 bytes.
    ShiftCols { whole: bool },
    /// E4M3 rows to MXFP4 rows.
    RequantizeRows { source: ScaleKind, rule: ScaleRule },
}

impl Conversion {
    /// The scale rules that MXFP4 supports.
    const RULES: [ScaleRule; 4] = [ScaleRule::Floor, ScaleRule::Rceil, ScaleRule::Ceil, ScaleRule::Even];

    /// The kernel for this operation on a tensor of `cols` columns, except for 2-D blocks.
    fn choose(
        from: Format,
        to: Format,
        axis: BlockAxis,
        (source, rule): (ScaleKind, ScaleRule),
        cols: usize,
    ) -> Self {
        match (from, to, axis) {
            (_, Format::Mxfp4, _) => Self::RequantizeRows { source, rule },
            (Format::Mxfp4, _, BlockAxis::Col) => Self::LiftCols { whole: cols.is_multiple_of(TILE) },
            (Format::Mxfp4, _, _) => {
                let chunks = LIFT_CHUNKS[usize::from(cols > LIFT_CHUNKS[0] * LIFT_CHUNK_COLS)];
                Self::LiftRows { whole: cols.is_multiple_of(TILE), chunks }
            }
            _ => Self::ShiftCols { whole: cols.is_multiple_of(16) },
        }
    }

    fn all() -> Vec<Self> {
        let lifts = [true, false].into_iter().flat_map(|whole| {
            let [few, many] = LIFT_CHUNKS.map(|chunks| Self::LiftRows { whole, chunks });
            [few, many, Self::LiftCols { whole }, Self::ShiftCols { whole }]
        });
        let requantize = [ScaleKind::E8M0, ScaleKind::F32]
            .into_iter()
            .flat_map(|source| Self::RULES.map(|rule| Self::RequantizeRows { source, rule }));
        lifts.chain(requantize).collect()
    }

    fn spec(self) -> KernelSpec {
        let int = |value: usize| TemplateArg::Int(value as i64);
        let turn = |whole, panels| vec![("kWhole", TemplateArg::Bool(whole)), ("kPanels", int(panels))];
        let (source, name, args) = match self {
            Self::LiftRows { whole, chunks } => {
                let args = vec![("kWhole", TemplateArg::Bool(whole)), ("kChunks", int(chunks))];
                ("kernels/convert/lift_rows.cuh", "nib::lift_rows", args)
            }
            Self::LiftCols { whole } => {
                ("kernels/convert/lift_cols.cuh", "nib::lift_cols", turn(whole, LIFT_PANELS))
            }
            Self::ShiftCols { whole } => {
                ("kernels/convert/shift_cols.cuh", "nib::shift_cols", turn(whole, SHIFT_PANELS))
            }
            Self::RequantizeRows { source, rule } => {
                let scale = if source == ScaleKind::F32 { "float" } else { "nib::u8" };
                let args = vec![("Scale", TemplateArg::Type(scale)), ("kRule", rule_arg(rule))];
                ("kernels/convert/requantize_rows.cuh", "nib::requantize_rows", args)
            }
        };
        KernelSpec { source, name, args }
    }

    /// Dynamic shared memory in bytes: the size of `TurnShared` or `ShiftShared` of the kernels.
    const fn shared_bytes(self) -> usize {
        match self {
            Self::LiftRows { .. } | Self::RequantizeRows { .. } => 0,
            Self::LiftCols { .. } => turn_shared_bytes(TILE / 2, 4, LIFT_PANELS),
            Self::ShiftCols { .. } => {
                turn_shared_bytes(TILE, 1, SHIFT_PANELS) + MOST_DEPTH * 8 * SHIFT_PANELS * 4 * 8
            }
        }
    }
}

/// The size of `TurnShared`, for rows of 128 columns with `row_bytes` bytes of codes and `blocks`
/// scales.
const fn turn_shared_bytes(row_bytes: usize, blocks: usize, panels: usize) -> usize {
    let codes = MOST_DEPTH * 8 * (16 * row_bytes * panels + 16);
    let scales = MOST_DEPTH * blocks * panels * (TILE + 8);
    (codes + scales + MOST_DEPTH * 16 + 3 * 4).next_multiple_of(16)
}

/// How a column kernel divides its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ColPlan {
    rows: i32,
    cols: i32,
    capacity: i32,
    depth: i32,
    ctas: u32,
    threads: u32,
}

impl ColPlan {
    /// The plan for CTAs of `panels` panels.
    fn new(rows: usize, cols: usize, panels: usize) -> Result<Self> {
        let strips = rows.div_ceil(TILE);
        let depth = strips.min(MOST_DEPTH);
        let ctas = strips.div_ceil(depth) * cols.div_ceil(panels * TILE);
        Ok(Self {
            rows: below_2_31("x.rows", rows)?,
            cols: below_2_31("x.cols", cols)?,
            capacity: below_2_31("x.rows", strips * TILE)?,
            depth: depth as i32,
            ctas: below_2_31("strips · panels", ctas)? as u32,
            threads: (panels * TILE) as u32,
        })
    }
}

/// How a row kernel divides its rows into segments, one per warp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RowPlan {
    rows: i32,
    cols: i32,
    segments: u32,
    /// Segments per warp of `lift_rows`.
    rounds: u32,
    threads: u32,
    ctas: u32,
}

impl RowPlan {
    /// The shape of rows that may be passed as one long row because nothing distinguishes them: (1, all columns), if that fits.
    fn joined(rows: usize, cols: usize) -> (usize, usize) {
        if rows * cols < 1 << 30 { (1, rows * cols) } else { (rows, cols) }
    }

    fn new(rows: usize, cols: usize, segment_cols: usize) -> Result<Self> {
        let segments = cols.div_ceil(segment_cols);
        let tasks = below_2_31("rows · segments", rows * segments)?;
        Ok(Self {
            rows: below_2_31("x.rows", rows)?,
            cols: below_2_31("x.cols", cols)?,
            segments: segments as u32,
            rounds: 1,
            threads: THREADS,
            ctas: (tasks as u32).div_ceil(THREADS / 32),
        })
    }

    /// The plan for `lift_rows`.
    fn of_lift(self, is_ragged: bool) -> Self {
        let rounds = LIFT_ROUNDS[usize::from(!is_ragged)];
        let tasks = self.rows as u32 * self.segments;
        Self { rounds, threads: LIFT_THREADS, ctas: tasks.div_ceil(LIFT_THREADS / 32 * rounds), ..self }
    }

    /// Limits the number of CTAs; each warp then loops over several segments.
    fn at_most(self, ctas: u32) -> Self {
        Self { ctas: self.ctas.min(ctas), ..self }
    }
}

/// Runs [`Transcode`] on the GPU.
pub(crate) fn transcode(cuda: &Cuda, op: Transcode<'_, Cuda>) -> Result<Transcoded<Cuda>> {
    op.check()?;
    let (x, buffers) = (op.x, BufferCheck::by(OP, cuda));
    buffers.blocks("x", x)?;
    buffers.groups(op.groups)?;
    if op.to == Format::Mxfp4 && op.to.scale_kind(op.rule) != ScaleKind::E8M0 {
        return Err(Error::unsupported(
            OP,
            op.to,
            format!("its scales are powers of two, which {} has not", op.rule.name()),
        ));
    }
    if op.to != Format::Mxfp4 {
        x.e8m0_scales(OP)?;
    }
    sequence::transcode(cuda, op)
}

/// Runs a conversion whose rows are whole blocks of MXFP4, if source or result is MXFP4.
pub(crate) fn transcode_whole_blocks(cuda: &Cuda, op: Transcode<'_, Cuda>) -> Result<Transcoded<Cuda>> {
    let x = op.x;
    if op.axis == BlockAxis::Tile {
        return lift_tiles::run(cuda, op);
    }
    let row_id = op.groups.map(|groups| groups.row_id.get());
    if op.axis == BlockAxis::Col && row_id.is_some() && !x.rows.is_multiple_of(TILE) {
        return Err(Error::shape(OP, "groups.capacity", x.rows, "a multiple of e4m3's block of 128"));
    }
    let made = op.result(cuda)?;
    if x.rows != 0 && x.cols != 0 {
        launch(cuda, &op, row_id, &made.out, made.counts.0.get())?;
    }
    Ok(made)
}

fn launch(
    cuda: &Cuda,
    op: &Transcode<'_, Cuda>,
    row_id: Option<&Buffer<i32>>,
    out: &BlockScaled<Cuda>,
    counts: &Buffer<u64>,
) -> Result<()> {
    let x = op.x;
    let source = x.scale_kind();
    let (rows, cols) = if op.axis == BlockAxis::Row && row_id.is_none() && x.cols.is_multiple_of(TILE) {
        RowPlan::joined(x.rows, x.cols)
    } else {
        (x.rows, x.cols)
    };
    let conversion = Conversion::choose(x.format, op.to, op.axis, (source, op.rule), cols);
    let segment_cols = match conversion {
        Conversion::LiftRows { chunks, .. } => chunks * LIFT_CHUNK_COLS,
        Conversion::RequantizeRows { .. } => REQUANTIZE_COLS,
        Conversion::LiftCols { .. } => {
            let plan = ColPlan::new(rows, cols, LIFT_PANELS)?;
            return launch_cols(cuda, op, (conversion, plan), row_id, out, counts);
        }
        Conversion::ShiftCols { .. } => {
            let plan = ColPlan::new(rows, cols, SHIFT_PANELS)?;
            return launch_cols(cuda, op, (conversion, plan), row_id, out, counts);
        }
    };
    let plan = RowPlan::new(rows, cols, segment_cols)?;
    let is_lift = matches!(conversion, Conversion::LiftRows { .. });
    let plan = if is_lift {
        plan.of_lift(row_id.is_some())
    } else {
        plan.at_most(REQUANTIZE_CTAS_PER_SM * cuda.device().info().num_sms)
    };
    let RowPlan { rows, cols, segments, rounds, threads, ctas } = plan;
    let by_segments = Divider::by(segments);
    let ([codes, scales], out_codes, out_scales) =
        (plane_args(x), out.codes.get(), out.e8m0_scales(OP)?.get());
    let kernel = cuda.device().kernel(&conversion.spec())?;
    let shape = Launch { ctas, threads, cluster: 1, shared_bytes: 0 };
    let mut args: Vec<&dyn KernelArg> =
        vec![codes, scales, out_codes, out_scales, counts, &row_id, &rows, &cols, &by_segments, &segments];
    args.extend(is_lift.then_some(&rounds as &dyn KernelArg));
    // SAFETY: `BufferCheck` checked the buffers of x, and `Transcode::result` allocated those of the output, for the sizes passed
    // here; the kernel does not go past these sizes. The instance is that of these scales, rows that are passed as one row are
    // contiguous, and row_id has one value per row.
    unsafe { kernel.launch(shape, &args) }
}

fn launch_cols(
    cuda: &Cuda,
    op: &Transcode<'_, Cuda>,
    (conversion, plan): (Conversion, ColPlan),
    row_id: Option<&Buffer<i32>>,
    out: &BlockScaled<Cuda>,
    counts: &Buffer<u64>,
) -> Result<()> {
    let x = op.x;
    let kernel = cuda.device().kernel(&conversion.spec())?;
    let scales = x.e8m0_scales(OP)?.get();
    let (out_codes, out_scales) = (out.codes.get(), out.e8m0_scales(OP)?.get());
    let ColPlan { rows, cols, capacity, depth, ctas, threads } = plan;
    let scale_stride = column_stride(out.scale_kind(), x.cols) as i32;
    let shape = Launch { ctas, threads, cluster: 1, shared_bytes: conversion.shared_bytes() };
    // SAFETY: the conditions are those of `launch`; the output's scales are stored strip by strip,
    // `scale_stride` apart.
    unsafe {
        kernel.launch(
            shape,
            &[
                x.codes.get(),
                scales,
                out_codes,
                out_scales,
                counts,
                &row_id,
                &rows,
                &cols,
                &capacity,
                &scale_stride,
                &depth,
            ],
        )
    }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let conversions = Conversion::all().into_iter().map(|c| (c.spec(), c.shared_bytes()));
    let others = conversions.map(|(spec, shared_bytes)| Instance { spec, shared_bytes });
    others.chain(lift_tiles::instances()).chain([short_blocks::instance()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_is_built() {
        let built = Conversion::all();
        for cols in [32, 40, 96, 128, 7168] {
            for source in [ScaleKind::E8M0, ScaleKind::F32] {
                for rule in Conversion::RULES {
                    for (from, to, axis) in [
                        (Format::Mxfp4, Format::E4m3, BlockAxis::Row),
                        (Format::Mxfp4, Format::E4m3, BlockAxis::Col),
                        (Format::E4m3, Format::E4m3, BlockAxis::Col),
                        (Format::E4m3, Format::Mxfp4, BlockAxis::Row),
                    ] {
                        let choice = Conversion::choose(from, to, axis, (source, rule), cols);
                        assert!(built.contains(&choice), "{choice:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn ctas_cover_all_strips_and_columns() {
        let plan = ColPlan::new(32768, 7168, 2).unwrap();
        assert_eq!((plan.depth, plan.ctas), (2, 128 * 28));
        let plan = ColPlan::new(4096, 7168, 1).unwrap();
        assert_eq!((plan.depth, plan.ctas), (2, 16 * 56));
        let plan = ColPlan::new(130, 96, 2).unwrap();
        assert_eq!((plan.capacity, plan.depth, plan.ctas), (256, 2, 1));
        let plan = ColPlan::new(128, 96, 2).unwrap();
        assert_eq!((plan.capacity, plan.depth, plan.ctas), (128, 1, 1));
        for conversion in Conversion::all() {
            assert!(conversion.shared_bytes() <= 232_448, "{conversion:?}");
        }
    }

    #[test]
    fn rows_pass_as_one_as_long_as_that_fits() {
        assert_eq!(RowPlan::joined(32768, 7168), (1, 32768 * 7168));
        assert_eq!(RowPlan::joined(1 << 18, 7168), (1 << 18, 7168));
        let plan = RowPlan::new(1, 32768 * 7168, 2048).unwrap();
        assert_eq!(plan.ctas, 32768 * 7168 / 2048 / 8);
        let plan = RowPlan::new(3, 160, 2048).unwrap();
        assert_eq!((plan.segments, plan.ctas), (1, 1));
        let plan = RowPlan::new(1000, 7168, 4096).unwrap();
        assert_eq!(
            [plan.of_lift(false), plan.of_lift(true)].map(|p| (p.rounds, p.ctas)),
            [(1, 500), (2, 250)]
        );
        let error = RowPlan::new(1 << 30, 7168, 2048).expect_err("too many").to_string();
        assert!(error.contains("segments"), "{error}");
    }
}
