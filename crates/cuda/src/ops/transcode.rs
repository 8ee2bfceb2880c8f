//! `transcode` on a GPU: `csrc/kernels/{lift_rows,lift_cols,shift_cols,requantize_rows}.cuh`.

use super::Instance;
use crate::Cuda;
use crate::backend::Buf;
use crate::device::Buffer;
use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, Launch};
use nibble_core::ops::{Transcode, Transcoded};
use nibble_core::{BlockScaled, Error, Result, Scales};
use nibble_formats::{BlockAxis, Format, ScaleKind, ScaleLayout, ScaleRule};

const OP: &str = "transcode";
const THREADS: u32 = 256;
/// Rows and columns of a tile of the column kernels, and the FP8 block.
const TILE: usize = 128;
/// Chunks of 512 columns that a warp of `lift_rows` takes at a time.
const LIFT_CHUNKS: usize = 4;
/// Columns that a warp of a row kernel takes at a time.
const SEGMENT_COLS: usize = 2048;

/// The kernel of a conversion, with its template arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Conversion {
    /// MXFP4 rows to E4M3 rows; `whole`: no block of 128 columns ends short.
    LiftRows { whole: bool },
    /// MXFP4 rows to E4M3 columns; likewise.
    LiftCols { whole: bool },
    /// E4M3 rows to E4M3 columns; `whole`: rows start on 16 bytes.
    ShiftCols { whole: bool },
    /// E4M3 rows to MXFP4 rows.
    RequantizeRows { source: ScaleKind, rule: ScaleRule },
}

impl Conversion {
    /// The rules of MXFP4's scales.
    const RULES: [ScaleRule; 4] = [ScaleRule::Floor, ScaleRule::Rceil, ScaleRule::Ceil, ScaleRule::Even];

    /// The kernel for this operation on a tensor of `cols` columns.
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
            (Format::Mxfp4, _, _) => Self::LiftRows { whole: cols.is_multiple_of(TILE) },
            _ => Self::ShiftCols { whole: cols.is_multiple_of(16) },
        }
    }

    fn all() -> Vec<Self> {
        let lifts = [true, false].into_iter().flat_map(|whole| {
            [Self::LiftRows { whole }, Self::LiftCols { whole }, Self::ShiftCols { whole }]
        });
        let requantize = [ScaleKind::E8m0, ScaleKind::F32]
            .into_iter()
            .flat_map(|source| Self::RULES.map(|rule| Self::RequantizeRows { source, rule }));
        lifts.chain(requantize).collect()
    }

    fn spec(self) -> KernelSpec {
        let whole = |whole| ("kWhole", TemplateArg::Bool(whole));
        let (source, name, args) = match self {
            Self::LiftRows { whole: w } => (
                "kernels/lift_rows.cuh",
                "nib::lift_rows",
                vec![whole(w), ("kChunks", TemplateArg::Int(LIFT_CHUNKS as i64))],
            ),
            Self::LiftCols { whole: w } => ("kernels/lift_cols.cuh", "nib::lift_cols", vec![whole(w)]),
            Self::ShiftCols { whole: w } => ("kernels/shift_cols.cuh", "nib::shift_cols", vec![whole(w)]),
            Self::RequantizeRows { source, rule } => {
                let scale = match source {
                    ScaleKind::E8m0 => "nib::u8",
                    ScaleKind::F32 => "float",
                };
                let args =
                    vec![("Scale", TemplateArg::Type(scale)), ("kRule", TemplateArg::Int(rule_number(rule)))];
                ("kernels/requantize_rows.cuh", "nib::requantize_rows", args)
            }
        };
        KernelSpec { source, name, args }
    }
}

/// The rule's number in `csrc/formats/e8m0.cuh`.
fn rule_number(rule: ScaleRule) -> i64 {
    match rule {
        ScaleRule::Amax => 0,
        ScaleRule::Floor => 1,
        ScaleRule::Rceil => 2,
        ScaleRule::Ceil => 3,
        ScaleRule::Even => 4,
    }
}

/// How a row kernel goes over its rows: each in segments, one a warp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RowPlan {
    rows: i32,
    cols: i32,
    segments: u32,
    ctas: u32,
}

impl RowPlan {
    /// `joined`: nothing distinguishes one row from the next, so that all of them may pass as one long row.
    fn new(rows: usize, cols: usize, joined: bool) -> Result<Self> {
        let (rows, cols) = if joined && rows * cols < 1 << 30 { (1, rows * cols) } else { (rows, cols) };
        let segments = cols.div_ceil(SEGMENT_COLS);
        let tasks = below_2_31("rows · segments", rows * segments)?;
        Ok(Self {
            rows: below_2_31("x.rows", rows)?,
            cols: below_2_31("x.cols", cols)?,
            segments: segments as u32,
            ctas: (tasks as u32).div_ceil(THREADS / 32),
        })
    }
}

/// Kernels count in 32-bit signed numbers.
fn below_2_31(argument: &'static str, n: usize) -> Result<i32> {
    // What a kernel adds to it stays below 2^31 too.
    i32::try_from(n)
        .ok()
        .filter(|&n| n < i32::MAX - 4096)
        .ok_or_else(|| Error::shape(OP, argument, n, "below 2^31 - 4096"))
}

/// A tensor of power-of-two scales whose planes are yet to be written.
fn unwritten(
    cuda: &Cuda,
    op: &Transcode<'_, Cuda>,
    rule: ScaleRule,
    rows: usize,
) -> Result<BlockScaled<Cuda>> {
    let (format, axis, cols) = (op.to, op.axis, op.x.cols);
    let scales = BlockScaled::<Cuda>::num_scales(format, axis, rows, cols, 1);
    Ok(BlockScaled {
        format,
        axis,
        rule,
        rows,
        cols,
        stack: 1,
        codes: Buf::new(cuda.device().alloc(BlockScaled::<Cuda>::code_bytes(format, axis, rows, cols))?),
        scales: Scales::E8m0(Buf::new(cuda.device().alloc(scales)?)),
        scale_layout: ScaleLayout::RowMajor,
    })
}

/// See [`Transcode`].
pub(crate) fn transcode(cuda: &Cuda, op: Transcode<'_, Cuda>) -> Result<Transcoded<Cuda>> {
    let x = op.x;
    if op.to == Format::Mxfp4 && op.rule.kind() != ScaleKind::E8m0 {
        return Err(Error::unsupported(
            OP,
            op.to,
            format!("its scales are powers of two, which {} has not", op.rule.name()),
        ));
    }
    if x.format == Format::Mxfp4 && !x.cols.is_multiple_of(Format::Mxfp4.spec().block) {
        return Err(Error::shape(OP, "x.cols", x.cols, "a multiple of mxfp4's block of 32"));
    }
    if op.to != Format::Mxfp4 {
        x.e8m0_scales(OP)?;
    }
    let row_id = op.groups.map(|groups| groups.row_id.get());
    if let Some(ids) = row_id.filter(|ids| ids.len() != x.rows) {
        return Err(Error::shape(OP, "groups.row_id.len()", ids.len(), x.rows));
    }
    let capacity = match op.axis {
        BlockAxis::Col => x.rows.next_multiple_of(TILE),
        BlockAxis::Row | BlockAxis::Tile => x.rows,
    };
    if op.axis == BlockAxis::Col && row_id.is_some() && capacity != x.rows {
        return Err(Error::shape(OP, "groups.capacity", x.rows, "a multiple of e4m3's block of 128"));
    }
    let rule = if op.to == Format::Mxfp4 { op.rule } else { x.rule };
    let out = unwritten(cuda, &op, rule, capacity)?;
    let counts = super::counts(cuda)?;
    if x.rows != 0 && x.cols != 0 {
        launch(cuda, &op, row_id, &out, counts.0.get())?;
    }
    Ok(Transcoded { out, counts })
}

fn launch(
    cuda: &Cuda,
    op: &Transcode<'_, Cuda>,
    row_id: Option<&Buffer<i32>>,
    out: &BlockScaled<Cuda>,
    counts: &Buffer<u64>,
) -> Result<()> {
    let x = op.x;
    let source = match x.scales {
        Scales::E8m0(_) => ScaleKind::E8m0,
        Scales::F32(_) => ScaleKind::F32,
    };
    let conversion = Conversion::choose(x.format, op.to, op.axis, (source, op.rule), x.cols);
    let kernel = cuda.device().kernel(&conversion.spec())?;
    let (codes, out_codes, out_scales) = (x.codes.get(), out.codes.get(), out.e8m0_scales(OP)?.get());
    if let Conversion::LiftCols { .. } | Conversion::ShiftCols { .. } = conversion {
        let scales = x.e8m0_scales(OP)?.get();
        let (strips, panels) = (out.rows / TILE, x.cols.div_ceil(TILE));
        let ctas = below_2_31("tiles of 128 × 128", strips * panels)? as u32;
        let [rows, cols] = [below_2_31("x.rows", x.rows)?, below_2_31("x.cols", x.cols)?];
        let [capacity, band] = [below_2_31("x.rows", out.rows)?, strips as i32];
        let shape = Launch { ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
        // SAFETY: the operation's check held the planes of x, and `unwritten` those of the output, to the sizes passed here,
        // past which the kernel does not go; row_id has a number for each row.
        return unsafe {
            kernel.launch(
                shape,
                &[codes, scales, out_codes, out_scales, counts, &row_id, &rows, &cols, &capacity, &band],
            )
        };
    }
    let plan = RowPlan::new(x.rows, x.cols, row_id.is_none() && x.cols.is_multiple_of(TILE))?;
    let shape = Launch { ctas: plan.ctas, threads: THREADS, cluster: 1, shared_bytes: 0 };
    let by_segments = Divider::by(plan.segments);
    let (rows, cols, segments) = (plan.rows, plan.cols, plan.segments);
    macro_rules! launch_rows {
        ($scales:expr) => {
            // SAFETY: as above; rows passed as one lie one after the other.
            unsafe {
                kernel.launch(
                    shape,
                    &[
                        codes,
                        $scales,
                        out_codes,
                        out_scales,
                        counts,
                        &row_id,
                        &rows,
                        &cols,
                        &by_segments,
                        &segments,
                    ],
                )
            }
        };
    }
    match &x.scales {
        Scales::E8m0(scales) => launch_rows!(scales.get()),
        Scales::F32(scales) => launch_rows!(scales.get()),
    }
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    Conversion::all().into_iter().map(|c| Instance { spec: c.spec(), shared_bytes: 0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_is_built() {
        let built = Conversion::all();
        for cols in [32, 40, 96, 128, 7168] {
            for source in [ScaleKind::E8m0, ScaleKind::F32] {
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
    fn joined_rows_are_one_row_as_long_as_that_fits() {
        let plan = RowPlan::new(32768, 7168, true).unwrap();
        assert_eq!((plan.rows, plan.cols as usize, plan.ctas), (1, 32768 * 7168, 32768 * 7168 / 2048 / 8));
        let plan = RowPlan::new(1 << 18, 7168, true).unwrap();
        assert_eq!((plan.rows, plan.cols, plan.segments), (1 << 18, 7168, 4));
        let plan = RowPlan::new(3, 160, false).unwrap();
        assert_eq!((plan.segments, plan.ctas), (1, 1));
        let error = RowPlan::new(1 << 30, 7168, false).expect_err("too many").to_string();
        assert!(error.contains("segments"), "{error}");
    }
}
