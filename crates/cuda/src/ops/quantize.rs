//! `quantize` on a GPU (`csrc/kernels/quantize*.cuh`).

use super::Instance;
use crate::backend::Buf;
use crate::device::Buffer;
use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, HadamardArg, KernelArg, Launch, RoundingArg};
use crate::{Cuda, Device};
use nibble_core::formats::{BlockAxis, Codec, Element, Format, Rounding, ScaleKind, ScaleLayout, ScaleRule};
use nibble_core::ops::{Counts, Emitted, Hadamard, Planes, Quantize};
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
/// Columns a warp of `hadamard_rows` takes.
const TRANSFORM_COLS: usize = 256;
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
    /// Whether a transform comes first.
    hadamard: bool,
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
    /// With a transform, which is for one plane at a time.
    hadamard: bool,
}

impl Variant {
    /// Those that recipes ask for: activations and gradients are BF16 and may be rounded stochastically and transformed,
    /// weights are F32.
    fn all() -> impl Iterator<Item = Self> {
        let formats = [
            (Format::Mxfp4, ScaleKind::E8m0),
            (Format::E4m3, ScaleKind::E8m0),
            (Format::E4m3, ScaleKind::F32),
        ];
        let inputs = [
            (DType::Bf16, Rounding::NearestEven, false),
            (DType::Bf16, Rounding::Stochastic, false),
            (DType::Bf16, Rounding::NearestEven, true),
            (DType::Bf16, Rounding::Stochastic, true),
            (DType::F32, Rounding::NearestEven, false),
        ];
        let of = move |(format, kind)| {
            inputs.map(|(input, rounding, hadamard)| Self { input, format, kind, rounding, hadamard })
        };
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
        let mut spec = self.spec("kernels/quantize.cuh", "nib::quantize_rows");
        spec.args.push(("kHadamard", TemplateArg::Bool(self.hadamard)));
        spec
    }

    fn cols_spec(&self, rows: bool) -> KernelSpec {
        let mut spec = self.spec("kernels/quantize_cols.cuh", "nib::quantize_cols");
        spec.args.push(("kRows", TemplateArg::Bool(rows)));
        spec.args.push(("kHadamard", TemplateArg::Bool(self.hadamard)));
        spec
    }

    fn tiles_spec(&self) -> KernelSpec {
        self.spec("kernels/quantize_tiles.cuh", "nib::quantize_tiles")
    }

    /// Weights are not rounded randomly, and have no tiles of MXFP4.
    fn has_tiles(&self) -> bool {
        self.format != Format::Mxfp4 && self.rounding == Rounding::NearestEven && !self.hadamard
    }

    /// Dynamic shared memory of `quantize_cols`: `ColumnShared` of the kernel.
    fn column_shared_bytes(&self, rows: bool) -> usize {
        let blocks = TILE / self.format.spec().block;
        let col_scales = MOST_PANELS * TILE * MOST_STRIPS * blocks * self.kind.bytes();
        let row_scales = if rows { col_scales } else { 16 * self.kind.bytes() };
        let inverse = blocks * TILE * size_of::<f32>();
        let (turned, number) = match self.hadamard {
            true => (TILE * TILE * size_of::<f32>(), size_of::<f32>()),
            false => (TILE * TILE, self.input.size_bytes()),
        };
        let maxima = 8 * TILE * number;
        let (signs, total) = (TILE / 8, 3 * size_of::<u32>());
        let input = TILE * TILE * self.input.size_bytes();
        (input + turned + col_scales + row_scales + inverse + maxima + signs + total).next_multiple_of(16)
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

/// The transform of a matrix to F32.
fn transform_instance(input: DType, down: bool) -> Instance {
    let name = if down { "nib::hadamard_cols" } else { "nib::hadamard_rows" };
    let spec = KernelSpec { source: "kernels/hadamard.cuh", name, args: vec![("In", input_type(input))] };
    let tile = TILE * TILE * size_of::<f32>() + TILE / 8;
    Instance { spec, shared_bytes: if down { tile } else { 0 } }
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
            hadamard: op.hadamard.is_some(),
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
        let tasks = self.rows.saturating_mul(self.cols.div_ceil(TRANSFORM_COLS));
        let sizes = [
            ("rows of x", self.rows.max(self.capacity), MOST),
            ("columns of x", self.cols, MOST),
            ("squares of 128 x 128", self.squares(), MOST),
            ("rows of x, each in segments of 256 columns", tasks, MOST),
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
        if !self.ragged && !self.hadamard && whole && len < ONE_ROW_BELOW {
            (1, len)
        } else {
            (self.rows, self.cols)
        }
    }

    /// Squares of 128 x 128, of all matrices.
    fn squares(&self) -> usize {
        self.stack * self.capacity.max(self.rows).div_ceil(TILE) * self.cols.div_ceil(TILE)
    }

    /// The variant of the fast kernels that does it, if one is built and takes the shape.
    fn variant(&self) -> Option<Variant> {
        let (format, rounding) = (self.codec.format(), self.codec.rounding());
        let wanted =
            Variant { input: self.input, format, kind: self.kind(), rounding, hadamard: self.hadamard };
        let whole_lines = match self.planes {
            Planes::Rows => true,
            Planes::Cols | Planes::Both => self.capacity.is_multiple_of(format.spec().block),
            Planes::Tiles => wanted.has_tiles() && self.rows.is_multiple_of(16),
        };
        let takes_shape = self.cols.is_multiple_of(8) && whole_lines;
        Variant::all().find(|variant| takes_shape && *variant == wanted)
    }

    /// What is left to do once the transform has been made.
    fn transformed(&self) -> Self {
        let rows = if self.planes == Planes::Rows { self.rows } else { self.capacity };
        let ragged = self.ragged && self.codec.rounding().is_random();
        Self { input: DType::F32, rows, ragged, hadamard: false, ..*self }
    }

    /// The kernel that makes it, and its ctas.
    fn transform(&self) -> (Instance, usize) {
        let instance = transform_instance(self.input, self.planes == Planes::Cols);
        if self.planes == Planes::Rows {
            (instance, (self.rows * self.cols.div_ceil(TRANSFORM_COLS)).div_ceil(8))
        } else {
            (instance, self.squares())
        }
    }

    fn config(&self, num_sms: usize) -> Config {
        let config = |path, spec, ctas: usize, threads, shared_bytes| {
            let launch = Launch { ctas: ctas as u32, threads, cluster: 1, shared_bytes };
            Config { path, spec, launch }
        };
        match (self.variant(), self.planes) {
            (Some(variant), Planes::Rows) => {
                let (rows, cols) = self.row_shape();
                let warps = ROW_THREADS as usize / 32;
                let ctas =
                    (rows * cols.div_ceil(SEGMENT_COLS)).div_ceil(warps).min(ROW_CTAS_PER_SM * num_sms);
                config(Path::Rows, variant.rows_spec(), ctas, ROW_THREADS, 0)
            }
            (Some(variant), Planes::Cols | Planes::Both) => {
                let rows = self.planes == Planes::Both;
                let (strips, panels) = (4, 2);
                let (down, across) =
                    (self.capacity.div_ceil(TILE * strips), self.cols.div_ceil(TILE * panels));
                let band = if rows { 1 } else { down };
                let (spec, shared_bytes) = (variant.cols_spec(rows), variant.column_shared_bytes(rows));
                config(Path::Cols { strips, panels, band }, spec, down * across, 256, shared_bytes)
            }
            (Some(variant), Planes::Tiles) => {
                config(Path::Tiles, variant.tiles_spec(), self.squares(), 256, variant.square_shared_bytes())
            }
            (None, _) => config(Path::Any, any_spec(self.input, self.codec.format()), self.squares(), 128, 0),
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
        let source = Source::of(&op)?;
        let out = Planned { rows: rows.as_ref(), cols: cols.as_ref(), counts: &counts };
        match (op.hadamard, desc.variant()) {
            (Some(transform), None) => {
                let transformed = transform_first(device, &source, &desc, &transform)?;
                let (desc, draws) = (desc.transformed(), codec.rounding().is_random());
                // Padding has become numbers like others; its ids matter to random bits only.
                let row_id = source.row_id.filter(|_| draws);
                let source = Source { x: &transformed, row_id, every_row: true, ..source };
                launch(device, &op, &desc, &source, &out)?;
            }
            _ => launch(device, &op, &desc, &source, &out)?,
        }
    }
    let block = |plane: Option<BlockScaled<Cuda>>| plane.map(Operand::Block);
    Ok(Emitted { rows: block(rows), cols: block(cols), counts: Some(Counts(Buf::new(counts))) })
}

/// The matrix and its groups, as arguments.
#[derive(Clone, Copy)]
struct Source<'a> {
    x: &'a dyn KernelArg,
    row_id: Option<&'a Buffer<i32>>,
    start: Option<&'a Buffer<i32>>,
    num_groups: i32,
    /// Whether rows count whatever their id.
    every_row: bool,
}

impl<'a> Source<'a> {
    /// With lengths held to the shape.
    fn of(op: &Quantize<'a, Cuda>) -> Result<Self> {
        let expect = |argument, got: usize, expected: usize| {
            if got == expected { Ok(()) } else { Err(Error::shape(OP, argument, got, expected)) }
        };
        let (x, len): (&dyn KernelArg, _) = match &op.x.data {
            Data::F32(x) => (x.get(), Cuda::len(x)),
            Data::Bf16(x) => (x.get(), Cuda::len(x)),
        };
        expect("x.data.len()", len, op.x.rows * op.x.cols)?;
        let Some(groups) = op.groups else {
            return Ok(Self { x, row_id: None, start: None, num_groups: 0, every_row: false });
        };
        expect("groups.row_id.len()", Cuda::len(&groups.row_id), op.x.rows)?;
        expect("groups.start.len()", Cuda::len(&groups.start), groups.num_groups + 1)?;
        let (row_id, start) = (Some(groups.row_id.get()), Some(groups.start.get()));
        Ok(Self { x, row_id, start, num_groups: groups.num_groups as i32, every_row: false })
    }
}

/// What is to be written.
struct Planned<'a> {
    rows: Option<&'a BlockScaled<Cuda>>,
    cols: Option<&'a BlockScaled<Cuda>>,
    counts: &'a Buffer<u64>,
}

/// The transform of a matrix as F32, for kernels that do not make it as they read.
fn transform_first(
    device: &Device,
    source: &Source<'_>,
    desc: &Desc,
    transform: &Hadamard,
) -> Result<Buffer<f32>> {
    let out = device.alloc::<f32>(desc.transformed().rows * desc.cols)?;
    let (instance, ctas) = desc.transform();
    let launch = Launch { ctas: ctas as u32, threads: 256, cluster: 1, shared_bytes: instance.shared_bytes };
    let kernel = device.kernel(&instance.spec)?;
    let Source { x, row_id, start, num_groups, .. } = *source;
    let (rows, cols, out_rows) = (desc.rows as i32, desc.cols as i32, desc.transformed().rows as i32);
    let hadamard = HadamardArg::new(transform)?;
    // SAFETY: x and the groups were held to the sizes passed, and `out` is new and has out_rows · cols numbers.
    unsafe {
        if desc.planes == Planes::Rows {
            let segments = desc.cols.div_ceil(TRANSFORM_COLS) as u32;
            let by_segments = Divider::by(segments);
            kernel.launch(launch, &[x, &out, &row_id, &rows, &cols, &by_segments, &segments, &hadamard])?;
        } else {
            let args: [&dyn KernelArg; 9] =
                [x, &out, &row_id, &start, &num_groups, &rows, &cols, &out_rows, &hadamard];
            kernel.launch(launch, &args)?;
        }
    }
    Ok(out)
}

fn launch(
    device: &Device,
    op: &Quantize<'_, Cuda>,
    desc: &Desc,
    source: &Source<'_>,
    out: &Planned<'_>,
) -> Result<()> {
    let config = desc.config(device.info().num_sms as usize);
    let kernel = device.kernel(&config.spec)?;
    let Source { x, row_id, start, num_groups, .. } = *source;
    let (every_row, counts) = (i32::from(source.every_row), out.counts);
    let rule = PowerRule::of(op.codec.rule(), op.codec.element());
    let rounding = RoundingArg::new(op.codec.rounding(), op.random.as_ref());
    let hadamard = HadamardArg::new(&op.hadamard.unwrap_or(Hadamard::new(0, 0)))?;
    let ([row_codes, row_scales], [col_codes, col_scales]) = (plane_args(out.rows), plane_args(out.cols));
    let planes: [&dyn KernelArg; 5] = [x, &*row_codes, &*row_scales, &*col_codes, &*col_scales];
    let (rows, cols, capacity) = (desc.rows as i32, desc.cols as i32, desc.capacity as i32);
    let launch = |args: &[&[&dyn KernelArg]]| {
        // SAFETY: planes have the lengths that follow from the sizes passed, x and the groups were held to them, and the
        // planes and counts are new, so that nobody else writes or reads them.
        unsafe { kernel.launch(config.launch, &args.concat()) }
    };
    match config.path {
        Path::Rows => {
            let (rows, cols) = desc.row_shape();
            let segments = cols.div_ceil(SEGMENT_COLS) as u32;
            let (rows, cols, by_segments) = (rows as i32, cols as i32, Divider::by(segments));
            let sizes: [&dyn KernelArg; 6] = [counts, &row_id, &rows, &cols, &by_segments, &segments];
            launch(&[&planes[..3], &sizes, &[&rule, &rounding, &hadamard]])
        }
        Path::Cols { strips, panels, band } => {
            let (strips, panels, band) = (strips as i32, panels as i32, band as i32);
            let sizes: [&dyn KernelArg; 8] =
                [counts, &row_id, &rows, &cols, &capacity, &strips, &panels, &band];
            launch(&[&planes, &sizes, &[&rule, &rounding, &hadamard, &start, &num_groups]])
        }
        Path::Tiles => launch(&[&planes, &[counts, &rows, &cols], &[&rule, &rounding]]),
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
            let sizes: [&dyn KernelArg; 9] =
                [counts, &row_id, &rows, &cols, &capacity, &form, &is_f32, &policy, &every_row];
            launch(&[&planes, &sizes, &[&rule, &rounding]])
        }
    }
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    let mut all = Vec::new();
    for variant in Variant::all() {
        all.push(Instance { spec: variant.rows_spec(), shared_bytes: 0 });
        // A transform is for one plane.
        let forms = [false, true].into_iter().filter(|rows| !(*rows && variant.hadamard));
        all.extend(forms.map(|rows| Instance {
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
        all.extend([false, true].map(|down| transform_instance(input, down)));
    }
    all
}
