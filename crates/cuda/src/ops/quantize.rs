//! `quantize` on a GPU (`csrc/kernels/quantize*.cuh`).

use super::Instance;
use crate::backend::Buf;
use crate::device::Buffer;
use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, KernelArg, Launch, RoundingArg};
use crate::{Cuda, Device};
use nibble_core::formats::{BlockAxis, Codec, Element, Format, Rounding, ScaleKind, ScaleLayout, ScaleRule};
use nibble_core::ops::{Counts, Emitted, Planes, Quantize};
use nibble_core::{Backend, BlockScaled, DType, Data, Error, Operand, Plain, Result, Scales};
use std::ffi::c_void;

const OP: &str = "quantize";
/// Rows and columns of a cta's square; the block of FP8.
const TILE: usize = 128;
/// Columns a warp of `quantize_rows` takes at a time, and the ctas a multiprocessor holds at most.
const SEGMENT_COLS: usize = 1024;
/// Strips of 128 rows and panels of 128 columns that a cta of `quantize_cols` takes at most.
const MOST_STRIPS: usize = 4;
const MOST_PANELS: usize = 2;
const ROW_THREADS: u32 = 256;
const ROW_CTAS_PER_SM: usize = 32;
/// A matrix of less than this many numbers may be taken as one row.
const ONE_ROW_BELOW: usize = 1 << 30;

/// What decides about the kernel and its launch.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Desc {
    input: DType,
    codec: Codec,
    planes: Planes,
    /// Rows of one matrix.
    rows: usize,
    cols: usize,
    stack: usize,
    /// Rows of a column plane.
    capacity: usize,
    /// Whether some rows may be padding.
    ragged: bool,
}

/// The device's `PowerRule` (csrc/formats/e8m0.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PowerRule {
    up: u32,
    nan_from: u32,
}

// SAFETY: the value itself.
unsafe impl KernelArg for PowerRule {
    fn pointer(&self) -> *const c_void {
        std::ptr::from_ref(self).cast()
    }
    fn bytes(&self) -> usize {
        size_of::<Self>()
    }
}

impl PowerRule {
    /// For a rule that makes E8M0 scales; what the others get does not matter.
    fn of(rule: ScaleRule, element: Element) -> Self {
        const INFINITY: u32 = 0x7F80_0000;
        const MANTISSA: u32 = 0x7F_FFFF;
        let up = match rule {
            ScaleRule::Floor => 0,
            ScaleRule::Rceil | ScaleRule::Amax => MANTISSA - (element.max().to_bits() & MANTISSA),
            ScaleRule::Ceil => MANTISSA,
            ScaleRule::Even => 1 << (22 - element.mantissa_bits()),
        };
        Self { up, nan_from: if rule == ScaleRule::Even { INFINITY - up } else { INFINITY } }
    }
}

/// Which kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Path {
    /// Blocks along the rows.
    Rows,
    /// Blocks down the columns, with or without those along the rows: so many squares a cta, and bands of so many ctas.
    Cols { strips: usize, panels: usize, band: usize },
    /// Square tiles.
    Tiles,
    /// Whatever the others do not take.
    Any,
}

/// A configuration: the instance and the shape of its launch.
#[derive(Debug, Clone, PartialEq)]
struct Config {
    path: Path,
    spec: KernelSpec,
    launch: Launch,
}

/// What an instance of one of the fast kernels is made for.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Variant {
    input: DType,
    format: Format,
    kind: ScaleKind,
    rounding: Rounding,
}

impl Variant {
    /// Those that recipes ask for: activations and gradients are BF16 and may be rounded stochastically, weights are F32.
    fn all() -> impl Iterator<Item = Self> {
        let formats = [
            (Format::Mxfp4, ScaleKind::E8m0),
            (Format::E4m3, ScaleKind::E8m0),
            (Format::E4m3, ScaleKind::F32),
        ];
        let inputs = [
            (DType::Bf16, Rounding::NearestEven),
            (DType::Bf16, Rounding::Stochastic),
            (DType::F32, Rounding::NearestEven),
        ];
        let of = move |(format, kind)| inputs.map(|(input, rounding)| Self { input, format, kind, rounding });
        formats.into_iter().flat_map(of)
    }

    fn spec(&self, source: &'static str, name: &'static str) -> KernelSpec {
        KernelSpec {
            source,
            name,
            args: vec![
                ("In", input_type(self.input)),
                ("E", element_type(self.format)),
                ("kF32Scales", TemplateArg::Bool(self.kind == ScaleKind::F32)),
                ("Round", TemplateArg::Type(RoundingArg::policy(self.rounding))),
            ],
        }
    }

    fn rows_spec(&self) -> KernelSpec {
        self.spec("kernels/quantize.cuh", "nib::quantize_rows")
    }

    fn cols_spec(&self, rows: bool) -> KernelSpec {
        let mut spec = self.spec("kernels/quantize_cols.cuh", "nib::quantize_cols");
        spec.args.push(("kRows", TemplateArg::Bool(rows)));
        spec
    }

    fn tiles_spec(&self) -> KernelSpec {
        self.spec("kernels/quantize_tiles.cuh", "nib::quantize_tiles")
    }

    /// Weights are not rounded randomly, and have no tiles of MXFP4.
    fn has_tiles(&self) -> bool {
        self.format != Format::Mxfp4 && self.rounding == Rounding::NearestEven
    }

    /// Dynamic shared memory of `quantize_cols`: `ColumnShared` of the kernel.
    fn column_shared_bytes(&self, rows: bool) -> usize {
        let blocks = TILE / self.format.spec().block;
        let col_scales = MOST_PANELS * TILE * MOST_STRIPS * blocks * self.kind.bytes();
        let row_scales = if rows { col_scales } else { 16 * self.kind.bytes() };
        let inverse = blocks * TILE * size_of::<f32>();
        // A word of magnitudes holds two BF16 numbers.
        let maxima = 8 * TILE * self.input.size_bytes();
        let total = 3 * size_of::<u32>();
        (TILE * TILE * (self.input.size_bytes() + 1) + col_scales + row_scales + inverse + maxima + total)
            .next_multiple_of(16)
    }

    /// Dynamic shared memory of `quantize_tiles`: `SquareShared` of the kernel.
    fn square_shared_bytes(&self) -> usize {
        (TILE * TILE * (self.input.size_bytes() + 1) + (8 + 3) * size_of::<u32>()).next_multiple_of(16)
    }
}

fn input_type(input: DType) -> TemplateArg {
    TemplateArg::Type(match input {
        DType::Bf16 => "nib::Bf16",
        DType::F32 => "nib::F32",
    })
}

fn element_type(format: Format) -> TemplateArg {
    TemplateArg::Type(match format {
        Format::E5m2 => "nib::E5m2",
        Format::Mxfp4 => "nib::E2m1",
        _ => "nib::E4m3",
    })
}

fn any_spec(input: DType, format: Format) -> KernelSpec {
    KernelSpec {
        source: "kernels/quantize_any.cuh",
        name: "nib::quantize_any",
        args: vec![("In", input_type(input)), ("E", element_type(format))],
    }
}

impl Desc {
    fn of(op: &Quantize<'_, Cuda>) -> Self {
        let has_cols = matches!(op.planes, Planes::Cols | Planes::Both);
        let rows = op.x.rows / op.stack.max(1);
        // A dense column plane ends with a whole block, a ragged one where its groups' capacity does.
        let dense_capacity = rows.next_multiple_of(op.codec.format().spec().block);
        let capacity = if has_cols && op.groups.is_none() { dense_capacity } else { rows };
        Self {
            input: op.x.dtype(),
            codec: op.codec,
            planes: op.planes,
            rows,
            cols: op.x.cols,
            stack: op.stack,
            capacity,
            ragged: op.groups.is_some(),
        }
    }

    fn kind(&self) -> ScaleKind {
        self.codec.rule().kind()
    }

    /// What the kernels can take beyond what the operation's own check lets in.
    fn check(&self) -> Result<()> {
        if self.planes == Planes::Tiles && self.ragged {
            return Err(Error::shape(OP, "groups", "given", "none: square tiles are for weights"));
        }
        const MOST: usize = i32::MAX as usize - 512;
        let tasks = self.rows.saturating_mul(self.cols.div_ceil(SEGMENT_COLS));
        let sizes = [
            ("rows of x", self.rows.max(self.capacity), MOST),
            ("columns of x", self.cols, MOST),
            ("squares of 128 x 128", self.squares(), MOST),
            ("rows of x, each in segments of 1024 columns", tasks, MOST),
        ];
        for (argument, value, most) in sizes {
            if value > most {
                return Err(Error::shape(OP, argument, value, format!("at most {most}")));
            }
        }
        Ok(())
    }

    /// Rows and columns as `quantize_rows` is told: one row where that saves it tails.
    fn row_shape(&self) -> (usize, usize) {
        let len = self.rows * self.cols;
        let whole = self.cols.is_multiple_of(self.codec.format().spec().block);
        if !self.ragged && whole && len < ONE_ROW_BELOW { (1, len) } else { (self.rows, self.cols) }
    }

    /// Squares of 128 x 128, of all matrices.
    fn squares(&self) -> usize {
        self.stack * self.capacity.max(self.rows).div_ceil(TILE) * self.cols.div_ceil(TILE)
    }

    /// The variant of the fast kernels that would do, if it is built.
    fn variant(&self) -> Option<Variant> {
        let (format, rounding) = (self.codec.format(), self.codec.rounding());
        let wanted = Variant { input: self.input, format, kind: self.kind(), rounding };
        Variant::all().find(|variant| *variant == wanted)
    }

    fn config(&self, num_sms: usize) -> Config {
        let config = |path, spec, ctas: usize, threads, shared_bytes| {
            let launch = Launch { ctas: ctas as u32, threads, cluster: 1, shared_bytes };
            Config { path, spec, launch }
        };
        let block = self.codec.format().spec().block;
        match (self.variant().filter(|_| self.cols.is_multiple_of(8)), self.planes) {
            (Some(variant), Planes::Rows) => {
                let (rows, cols) = self.row_shape();
                let warps = ROW_THREADS as usize / 32;
                let ctas =
                    (rows * cols.div_ceil(SEGMENT_COLS)).div_ceil(warps).min(ROW_CTAS_PER_SM * num_sms);
                config(Path::Rows, variant.rows_spec(), ctas, ROW_THREADS, 0)
            }
            (Some(variant), Planes::Cols | Planes::Both) if self.capacity.is_multiple_of(block) => {
                let rows = self.planes == Planes::Both;
                let (strips, panels) = (4, 2);
                let (down, across) =
                    (self.capacity.div_ceil(TILE * strips), self.cols.div_ceil(TILE * panels));
                let band = if rows { 1 } else { down };
                let (spec, shared_bytes) = (variant.cols_spec(rows), variant.column_shared_bytes(rows));
                config(Path::Cols { strips, panels, band }, spec, down * across, 256, shared_bytes)
            }
            (Some(variant), Planes::Tiles) if variant.has_tiles() && self.rows.is_multiple_of(16) => {
                config(Path::Tiles, variant.tiles_spec(), self.squares(), 256, variant.square_shared_bytes())
            }
            _ => config(Path::Any, any_spec(self.input, self.codec.format()), self.squares(), 128, 0),
        }
    }
}

/// A tensor whose planes are yet to be written.
fn unwritten(
    device: &Device,
    codec: Codec,
    axis: BlockAxis,
    (rows, cols, stack): (usize, usize, usize),
) -> Result<BlockScaled<Cuda>> {
    let format = codec.format();
    let num_scales = BlockScaled::<Cuda>::num_scales(format, axis, rows, cols, stack);
    Ok(BlockScaled {
        format,
        axis,
        rule: codec.rule(),
        rows,
        cols,
        stack,
        codes: Buf::new(device.alloc(BlockScaled::<Cuda>::code_bytes(format, axis, rows, cols))?),
        scales: match codec.rule().kind() {
            ScaleKind::E8m0 => Scales::E8m0(Buf::new(device.alloc(num_scales)?)),
            ScaleKind::F32 => Scales::F32(Buf::new(device.alloc(num_scales)?)),
        },
        scale_layout: ScaleLayout::RowMajor,
    })
}

/// The code and scale planes of a tensor as arguments; nulls for none.
fn plane_args(x: Option<&BlockScaled<Cuda>>) -> [Box<dyn KernelArg + '_>; 2] {
    fn arg<T: Plain>(buf: &Buf<T>) -> Box<dyn KernelArg + '_> {
        Box::new(Some(buf.get()))
    }
    match x {
        Some(x) => {
            let scales = match &x.scales {
                Scales::E8m0(scales) => arg(scales),
                Scales::F32(scales) => arg(scales),
            };
            [arg(&x.codes), scales]
        }
        None => [Box::new(None::<&Buffer<u8>>), Box::new(None::<&Buffer<u8>>)],
    }
}

/// See [`Quantize`].
pub(crate) fn quantize(cuda: &Cuda, op: Quantize<'_, Cuda>) -> Result<Emitted<Cuda>> {
    let device = cuda.device();
    let desc = Desc::of(&op);
    desc.check()?;
    let (codec, cols, stack) = (op.codec, op.x.cols, op.stack);
    let row_axis = if op.planes == Planes::Tiles { BlockAxis::Tile } else { BlockAxis::Row };
    let rows = match op.planes {
        Planes::Cols => None,
        _ => Some(unwritten(device, codec, row_axis, (stack * desc.rows, cols, stack))?),
    };
    let cols = match op.planes {
        Planes::Rows => None,
        Planes::Tiles => Some(unwritten(device, codec, BlockAxis::Tile, (stack * cols, desc.rows, stack))?),
        _ => Some(unwritten(device, codec, BlockAxis::Col, (desc.capacity, cols, 1))?),
    };
    let counts = device.filled::<u64>(3, 0)?;
    if op.x.rows != 0 && op.x.cols != 0 {
        launch(device, &op, &desc, (rows.as_ref(), cols.as_ref()), &counts)?;
    }
    let block = |plane: Option<BlockScaled<Cuda>>| plane.map(Operand::Block);
    Ok(Emitted { rows: block(rows), cols: block(cols), counts: Some(Counts(Buf::new(counts))) })
}

fn launch(
    device: &Device,
    op: &Quantize<'_, Cuda>,
    desc: &Desc,
    (row_plane, col_plane): (Option<&BlockScaled<Cuda>>, Option<&BlockScaled<Cuda>>),
    counts: &Buffer<u64>,
) -> Result<()> {
    let (x, len): (&dyn KernelArg, _) = match &op.x.data {
        Data::F32(x) => (x.get(), Cuda::len(x)),
        Data::Bf16(x) => (x.get(), Cuda::len(x)),
    };
    if len != op.x.rows * op.x.cols {
        return Err(Error::shape(OP, "x.data", format!("{len} values"), op.x.rows * op.x.cols));
    }
    let row_id = match op.groups {
        Some(groups) if Cuda::len(&groups.row_id) != op.x.rows => {
            return Err(Error::shape(OP, "groups.row_id", Cuda::len(&groups.row_id), op.x.rows));
        }
        groups => groups.map(|groups| groups.row_id.get()),
    };
    let config = desc.config(device.info().num_sms as usize);
    let kernel = device.kernel(&config.spec)?;
    let rule = PowerRule::of(op.codec.rule(), op.codec.element());
    let rounding = RoundingArg::new(op.codec.rounding(), op.random.as_ref());
    let ([row_codes, row_scales], [col_codes, col_scales]) = (plane_args(row_plane), plane_args(col_plane));
    let planes: [&dyn KernelArg; 5] = [x, &*row_codes, &*row_scales, &*col_codes, &*col_scales];
    let (rows, cols, capacity) = (desc.rows as i32, desc.cols as i32, desc.capacity as i32);
    let launch = |args: &[&dyn KernelArg]| {
        let args = [args, &[&rule, &rounding]].concat();
        // SAFETY: planes have the lengths that follow from the sizes passed, x and row_id were just held to them, and the
        // planes and counts are new, so that nobody else writes or reads them.
        unsafe { kernel.launch(config.launch, &args) }
    };
    match config.path {
        Path::Rows => {
            let (rows, cols) = desc.row_shape();
            let segments = cols.div_ceil(SEGMENT_COLS) as u32;
            let (rows, cols, by_segments) = (rows as i32, cols as i32, Divider::by(segments));
            launch(&[x, &*row_codes, &*row_scales, counts, &row_id, &rows, &cols, &by_segments, &segments])
        }
        Path::Cols { strips, panels, band } => {
            let (strips, panels, band) = (strips as i32, panels as i32, band as i32);
            let sizes: [&dyn KernelArg; 8] =
                [counts, &row_id, &rows, &cols, &capacity, &strips, &panels, &band];
            launch(&[&planes[..], &sizes].concat())
        }
        Path::Tiles => launch(&[&planes[..], &[counts, &rows, &cols]].concat()),
        Path::Any => {
            let form = match desc.planes {
                Planes::Rows => 1,
                Planes::Cols => 2,
                Planes::Both => 3,
                Planes::Tiles => 4,
            };
            let policy = match op.codec.rounding() {
                Rounding::NearestEven => 0,
                Rounding::NearestAway => 1,
                Rounding::Stochastic => 2,
                Rounding::Dither { .. } => 3,
            };
            let is_f32 = i32::from(desc.kind() == ScaleKind::F32);
            let sizes: [&dyn KernelArg; 8] =
                [counts, &row_id, &rows, &cols, &capacity, &form, &is_f32, &policy];
            launch(&[&planes[..], &sizes].concat())
        }
    }
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    let mut all = Vec::new();
    for variant in Variant::all() {
        all.push(Instance { spec: variant.rows_spec(), shared_bytes: 0 });
        all.extend([false, true].map(|rows| Instance {
            spec: variant.cols_spec(rows),
            shared_bytes: variant.column_shared_bytes(rows),
        }));
        if variant.has_tiles() {
            all.push(Instance { spec: variant.tiles_spec(), shared_bytes: variant.square_shared_bytes() });
        }
    }
    for input in [DType::Bf16, DType::F32] {
        let formats = [Format::Mxfp4, Format::E4m3, Format::E5m2];
        all.extend(formats.map(|format| Instance { spec: any_spec(input, format), shared_bytes: 0 }));
    }
    all
}
