//! Quantization to any format by the general kernel (`csrc/kernels/convert/quantize_units.cuh`), and what formats with a scale for a line or
//! for a tensor want measured first (`csrc/kernels/convert/whole_scales.cuh`).

use super::config::{QuantizeDesc, TILE, input_type};
use super::{ByBlock, OP, Planned, Source, Transform, TransformArg};
use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, KernelArg, Launch, RoundingArg, plain_args};
use crate::ops::Instance;
use crate::ops::convert::units::{LONG, RecordPlane, SQUARE, UnitFormat, tiles};
use crate::{Buffer, Cuda, Device};
use nibble_core::formats::{
    BlockAxis, Element, Format, Rounding, ScaleKind, ScaleLayout, ScaleRule, WHOLE_LINE,
};
use nibble_core::ops::{Delayed, Planes, Quantize};
use nibble_core::{BlockScaled, DType, Error, Result};

const THREADS: u32 = 256;
/// Tiles below each other that are done side by side.
const BAND: usize = 4;

/// How the kernel is launched.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct UnitsConfig {
    pub spec: KernelSpec,
    pub launch: Launch,
    pub sweep: Sweep,
}

/// In which order ctas take tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sweep {
    /// Tiles of a matrix beside each other, below each other.
    pub across: usize,
    pub down: usize,
    /// Of those below each other, how many are done side by side.
    pub band: usize,
}

impl Sweep {
    /// Columns alone lie together in memory only where they are swept from end to end, which pays where a code is more than half a byte.
    fn of(desc: &QuantizeDesc, down: usize, across: usize) -> Self {
        let is_long = desc.planes == Planes::Cols && desc.codec.format().spec().code_bits > 4;
        Self { across, down, band: if is_long { down } else { BAND.min(down) }.max(1) }
    }
}

/// The device's `ScaleArg` (csrc/formats/block_format.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ScaleArg {
    up: u32,
    up_least: u32,
    nan_from: u32,
}

impl ScaleArg {
    /// For a rule that makes powers of two; what the others get does not matter.
    fn of(rule: ScaleRule, element: Element) -> Self {
        const INFINITY: u32 = 0x7F80_0000;
        const MANTISSA: u32 = 0x7F_FFFF;
        let most = element.max().to_bits() & MANTISSA;
        // Subnormal magnitudes have no leading bit: the least scale takes 2⁻¹²⁷ · max, in their units.
        let (up, up_least) = match rule {
            ScaleRule::Floor => (0, 0),
            ScaleRule::Ceil => (MANTISSA, MANTISSA - 0x40_0000),
            ScaleRule::Even => (1 << (22 - element.mantissa_bits()), 1 << (22 - element.mantissa_bits())),
            ScaleRule::Rceil | ScaleRule::Amax | ScaleRule::TensorAmax | ScaleRule::Cann => {
                (MANTISSA - most, MANTISSA - ((0x80_0000 | most) >> 1))
            }
        };
        Self { up, up_least, nan_from: if rule == ScaleRule::Even { INFINITY - up } else { INFINITY } }
    }
}

/// The device's `RecordWords`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RecordWords {
    words: u64,
    line_stride: u64,
    next: u64,
}

impl RecordWords {
    const NONE: Self = Self { words: 0, line_stride: 0, next: 0 };

    /// A plane whose records are bytes, one after the other, and of each line a multiple of `together`; none for others.
    fn of(plane: Option<&BlockScaled<Cuda>>, together: usize) -> Self {
        let Some(plane) = plane else { return Self::NONE };
        let (_, blocks) = plane.shape_of_scales();
        let is_whole = plane.scale_layout == ScaleLayout::RowMajor && blocks.is_multiple_of(together);
        if !has_bytes(plane) || plane.axis == BlockAxis::Tile || !is_whole {
            return Self::NONE;
        }
        Self { words: plane.scales.get().address(), line_stride: blocks as u64, next: 4 }
    }
}

/// Whether a record is one byte, for 32 values at most: those are the ones that the kernel stores several at a time.
fn has_bytes(plane: &BlockScaled<Cuda>) -> bool {
    plane.scale_kind().bytes() == 1 && plane.format.spec().block <= 32
}

/// The device's `UnitsArg`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
struct UnitsArg {
    x: u64,
    row_codes: u64,
    col_codes: u64,
    row_records: RecordPlane,
    col_records: RecordPlane,
    row_words: RecordWords,
    col_words: RecordWords,
    counts: u64,
    row_id: u64,
    row_amax: u64,
    col_amax: u64,
    row_any: u64,
    col_any: u64,
    tensor: u64,
    span_of_row: u64,
    found: u64,
    found_counts: u64,
    rows: i32,
    cols: i32,
    capacity: i32,
    form: i32,
    policy: i32,
    band: i32,
    id_mask: i32,
    x_aligned: u32,
    rows_aligned: u32,
    cols_aligned: u32,
    cols_in_pairs: u32,
    found_spans: i32,
    column_record: u32,
    across: i32,
    down: i32,
    stack: i32,
    by_matrix: Divider,
    by_band: Divider,
    by_height: Divider,
    by_last: Divider,
    rule: ScaleArg,
    of_bf16: u32,
    transform: TransformArg,
}

/// The device's `EarlierArg`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EarlierArg {
    expected: u64,
    stride: u64,
    spans: i32,
    pad: u32,
}
plain_args!(UnitsArg, EarlierArg);

impl EarlierArg {
    /// `check` held the records to the spans.
    fn of(op: &Quantize<'_, Cuda>) -> Self {
        let Some(Delayed { records, first, stride }) = op.delayed else {
            return Self { expected: 0, stride: 0, spans: 0, pad: 0 };
        };
        let expected = records.get().address() + (first * size_of::<f32>()) as u64;
        Self { expected, stride: stride as u64, spans: op.spans() as i32, pad: 0 }
    }
}

/// The device's number of a rounding (csrc/formats/small_elements.cuh).
fn policy(rounding: Rounding) -> i64 {
    match rounding {
        Rounding::NearestEven => 0,
        Rounding::NearestAway => 1,
        Rounding::Stochastic => 2,
        Rounding::Dither { .. } => 3,
    }
}
const ANY_POLICY: i64 = 4;

/// The instance for a format, its numbers, a rounding (none: any) and the units of a row of a tile.
fn instance(format: UnitFormat, input: DType, rounding: Option<Rounding>, across: usize) -> Instance {
    let args = vec![
        ("F", TemplateArg::Type(format.device)),
        ("In", input_type(input)),
        ("kRound", TemplateArg::Int(rounding.map_or(ANY_POLICY, policy))),
        ("kAcross", TemplateArg::Int(across as i64)),
    ];
    let spec = KernelSpec { source: "kernels/convert/quantize_units.cuh", name: "nib::quantize_units", args };
    Instance { spec, shared_bytes: format.quantize_shared_bytes(input) }
}

fn whole_spec(name: &'static str, args: Vec<(&'static str, TemplateArg)>) -> KernelSpec {
    KernelSpec { source: "kernels/convert/whole_scales.cuh", name, args }
}

fn maxima_spec(down: bool, input: DType) -> KernelSpec {
    let name = if down { "nib::column_maxima" } else { "nib::row_maxima" };
    whole_spec(name, vec![("In", input_type(input))])
}

fn transformed_maxima_spec(input: DType) -> KernelSpec {
    whole_spec("nib::hadamard_maxima", vec![("In", input_type(input))])
}

fn tensor_spec(format: Format) -> KernelSpec {
    whole_spec("nib::tensor_scales", vec![("kNvfp4", TemplateArg::Bool(format == Format::Nvfp4))])
}

/// The instances built for it.
pub(super) fn instances() -> Vec<Instance> {
    let inputs = [DType::Bf16, DType::F32];
    let mut all = Vec::new();
    for format in UnitFormat::all() {
        for &rounding in format.own {
            let shapes = [(DType::Bf16, LONG), (DType::Bf16, SQUARE), (DType::F32, SQUARE)];
            all.extend(shapes.map(|(input, across)| instance(format, input, Some(rounding), across)));
        }
        all.extend(inputs.map(|input| instance(format, input, None, SQUARE)));
    }
    let maxima =
        |input| [maxima_spec(false, input), maxima_spec(true, input), transformed_maxima_spec(input)];
    let maxima = inputs.into_iter().flat_map(maxima);
    let tensor = [Format::Nvfp4, Format::E4m3Tensor].map(tensor_spec);
    let others =
        ["nib::spans_of_rows", "nib::spread_scales", "nib::count_lines"].map(|name| whole_spec(name, vec![]));
    let plain = maxima.chain(tensor).chain(others);
    all.extend(plain.map(|spec| Instance { spec, shared_bytes: 0 }));
    all
}

impl UnitsConfig {
    /// For any description.
    pub fn of(desc: &QuantizeDesc) -> Result<Self> {
        let (format, rule, rounding) = (desc.codec.format(), desc.codec.rule(), desc.codec.rounding());
        let Some(unit) = UnitFormat::of(format, rule) else {
            return Err(Error::unsupported(OP, format, "it has no kernel on a GPU; the CPU takes it"));
        };
        // Draws are for eight neighbours of a row.
        let has_own = unit.own.contains(&rounding) && (!rounding.is_random() || desc.cols.is_multiple_of(8));
        let own = has_own.then_some(rounding);
        let long = desc.planes == Planes::Rows && desc.input == DType::Bf16 && own.is_some();
        let across = if long { LONG } else { SQUARE };
        let Instance { spec, shared_bytes } = instance(unit, desc.input, own, across);
        let lines = if desc.planes == Planes::Rows { desc.rows } else { desc.capacity };
        let sweep = Sweep::of(desc, tiles(lines, 1, across), tiles(1, desc.cols, across));
        let ctas = desc.stack * sweep.across * sweep.down;
        let ctas = u32::try_from(ctas).ok().filter(|&ctas| ctas < 1 << 31);
        let ctas = ctas
            .ok_or_else(|| Error::shape(OP, "x", format!("{} × {}", desc.rows, desc.cols), "fewer tiles"))?;
        Ok(Self { spec, launch: Launch { ctas, threads: THREADS, cluster: 1, shared_bytes }, sweep })
    }
}

/// Where the records of a plane lie.
fn records(plane: Option<&BlockScaled<Cuda>>) -> RecordPlane {
    let Some(plane) = plane else { return RecordPlane::NONE };
    let (lines, blocks) = plane.shape_of_scales();
    let records = plane.scales.get().address();
    match plane.scale_layout {
        ScaleLayout::MnMajor => {
            let stride = nibble_core::formats::layout::mn_major_stride(lines, plane.scale_kind().bytes());
            RecordPlane { records, line_stride: 1, block_stride: stride as u64 }
        }
        _ => RecordPlane { records, line_stride: blocks as u64, block_stride: 1 },
    }
}

/// What is measured of a matrix before its values are encoded.
#[derive(Default)]
struct Measured {
    /// Of lines: bits of their largest magnitudes, and whether they get a non-zero code.
    rows: Option<(Buffer<u32>, Buffer<u8>)>,
    cols: Option<(Buffer<u32>, Buffer<u8>)>,
    /// Of tensors.
    inverses: Option<Buffer<f32>>,
    span_of_row: Option<Buffer<i32>>,
    /// Of tensors, as they are stored.
    scales: Option<Buffer<f32>>,
}

/// One matrix or a stack as the kernels see it.
struct Measure<'a> {
    device: &'a Device,
    desc: &'a QuantizeDesc,
    source: &'a Source<'a>,
    earlier: EarlierArg,
    len: Option<&'a Buffer<i32>>,
}

fn grid(threads: usize) -> Launch {
    Launch {
        ctas: threads.div_ceil(THREADS as usize).max(1) as u32,
        threads: THREADS,
        cluster: 1,
        shared_bytes: 0,
    }
}

impl Measure<'_> {
    /// The largest magnitude of each row, or of each span: see the kernel for `by_span`.
    fn row_maxima(&self, out: &Buffer<u32>, spans: Option<&Buffer<i32>>, by_span: i32) -> Result<()> {
        let Self { device, desc, source, .. } = *self;
        let (rows, cols) = (desc.stack * desc.rows, desc.cols);
        if let Some(Transform { arg, input }) = &source.transform {
            let ctas = desc.rows.div_ceil(TILE) * desc.cols.div_ceil(TILE);
            let launch = Launch { ctas: ctas as u32, threads: THREADS, cluster: 1, shared_bytes: 0 };
            let (rows, cols, earlier) = (rows as i32, cols as i32, &self.earlier);
            let args: [&dyn KernelArg; 9] =
                [source.x, out, &source.row_id, &spans, &by_span, &rows, &cols, earlier, arg];
            // SAFETY: as below; of x there are the transform's rows.
            return unsafe { device.kernel(&transformed_maxima_spec(*input))?.launch(launch, &args) };
        }
        let launch = Launch { ctas: rows.div_ceil(32) as u32, threads: THREADS, cluster: 1, shared_bytes: 0 };
        let (matrix_rows, rows, cols) = (desc.rows.max(1) as i32, rows as i32, cols as i32);
        let (id_mask, earlier) = (&source.id_mask, &self.earlier);
        let args: [&dyn KernelArg; 10] =
            [source.x, out, &source.row_id, id_mask, &spans, &matrix_rows, &by_span, &rows, &cols, earlier];
        // SAFETY: x has rows · cols numbers and row_id and spans a number a row (`BufferCheck`); out has one for each row or span, and
        // `check` held the records to the spans.
        unsafe { device.kernel(&maxima_spec(false, desc.input))?.launch(launch, &args) }
    }

    /// The largest magnitude of each column, or of each within each span.
    fn column_maxima(&self, out: &Buffer<u32>, spans: Option<&Buffer<i32>>) -> Result<()> {
        let Self { device, desc, source, .. } = *self;
        let ctas = desc.stack * desc.rows.div_ceil(256) * desc.cols.div_ceil(256);
        let launch = Launch { ctas: ctas as u32, threads: THREADS, cluster: 1, shared_bytes: 0 };
        let (rows, cols) = (desc.rows as i32, desc.cols as i32);
        let lines = (desc.stack * desc.cols) as i32;
        let args: [&dyn KernelArg; 8] =
            [source.x, out, &source.row_id, &source.id_mask, &spans, &lines, &rows, &cols];
        // SAFETY: as above; out has one number for each column of the stack, and of each span.
        unsafe { device.kernel(&maxima_spec(true, desc.input))?.launch(launch, &args) }
    }

    /// The scales of lines: of columns one for each span of rows.
    fn lines(&self) -> Result<Measured> {
        let Self { device, desc, source, .. } = *self;
        let span_of_row = if desc.planes == Planes::Rows { None } else { self.spans()? };
        let spans = if span_of_row.is_some() { source.num_groups as usize + 1 } else { 1 };
        let mut measured = Measured::default();
        if desc.planes != Planes::Cols {
            let lines = desc.stack * desc.rows;
            let (maxima, any) = (device.alloc(lines)?, device.filled(lines, 0)?);
            self.row_maxima(&maxima, None, 0)?;
            measured.rows = Some((maxima, any));
        }
        if desc.planes != Planes::Rows {
            let lines = spans * desc.stack * desc.cols;
            let (maxima, any) = (device.filled(lines, 0)?, device.filled(lines, 0)?);
            self.column_maxima(&maxima, span_of_row.as_ref())?;
            measured.cols = Some((maxima, any));
        }
        Ok(Measured { span_of_row, ..measured })
    }

    /// The span of each row, where there are groups: the number of its group, or of groups where it is of none.
    fn spans(&self) -> Result<Option<Buffer<i32>>> {
        let Self { device, desc, source, .. } = *self;
        let Some(start) = source.start else { return Ok(None) };
        let spans = device.alloc::<i32>(desc.rows)?;
        let kernel = device.kernel(&whole_spec("nib::spans_of_rows", vec![]))?;
        let args: [&dyn KernelArg; 4] = [start, &source.num_groups, &spans, &(desc.rows as i32)];
        // SAFETY: `start` has a number more than there are groups (`BufferCheck`), and the spans are as many as the rows.
        unsafe { kernel.launch(grid(desc.rows), &args) }?;
        Ok(Some(spans))
    }

    /// The scale of each span.
    fn tensor(&self, out: &Planned<'_>) -> Result<Measured> {
        let Self { device, desc, source, earlier, len } = *self;
        let format = desc.codec.format();
        let span_of_row = self.spans()?;
        let count = if span_of_row.is_some() { source.num_groups as usize + 1 } else { desc.stack };
        let maxima = device.filled::<u32>(count, 0)?;
        // Where blocks have no record that could be marked, what is not finite marks all of the tensor.
        let marks_all = desc.codec.scale_kind().levels().is_empty();
        self.row_maxima(&maxima, span_of_row.as_ref(), if marks_all { 2 } else { 1 })?;
        let (inverses, scales) = (device.alloc::<f32>(2 * count)?, device.alloc::<f32>(count)?);
        let largest = if format == Format::Nvfp4 { 6.0 * 448.0 } else { desc.codec.element().max() };
        let (matrix_rows, cols) = (desc.rows as i32, desc.cols as i32);
        let counts = out.found.map(|found| &found.counts);
        let args: [&dyn KernelArg; 10] = [
            &maxima,
            &(count as i32),
            &largest,
            &inverses,
            &scales,
            &earlier,
            &len,
            &matrix_rows,
            &cols,
            &counts,
        ];
        // SAFETY: maxima and scales are `count`, and the inverses two for each; groups have a length each (`BufferCheck`), and where there
        // are records there are two counts.
        unsafe { device.kernel(&tensor_spec(format))?.launch(grid(count), &args) }?;
        let (inverses, scales) = (Some(inverses), Some(scales));
        Ok(Measured { inverses, span_of_row, scales, ..Measured::default() })
    }

    /// The scale of each row of what is written, from those of the spans: NaN where a value of the span was found not to be finite.
    fn spread(&self, measured: &Measured, out: &Planned<'_>) -> Result<()> {
        let (desc, Some(scales)) = (self.desc, &measured.scales) else { return Ok(()) };
        let found = out.found.map(|found| &found.amax);
        let found_spans = found.map_or(0, |found| found.len() as i32);
        let spread = |plane: Option<&BlockScaled<Cuda>>, matrix_rows: usize| -> Result<()> {
            let Some(of_rows) = plane.and_then(|plane| plane.tensor_scale.as_ref()) else { return Ok(()) };
            let rows = of_rows.get().len();
            let kernel = self.device.kernel(&whole_spec("nib::spread_scales", vec![]))?;
            let (span_of_row, matrix_rows) = (measured.span_of_row.as_ref(), matrix_rows.max(1) as i32);
            let args: [&dyn KernelArg; 7] =
                [scales, &span_of_row, &matrix_rows, of_rows.get(), &(rows as i32), &found, &found_spans];
            // SAFETY: each row's span is one of those that have a scale: a matrix of the stack, or what `spans_of_rows` wrote for it; what
            // was found has `found_spans` values.
            unsafe { kernel.launch(grid(rows), &args) }
        };
        spread(out.rows, desc.rows)?;
        spread(out.cols, if desc.planes == Planes::Tiles { desc.cols } else { desc.capacity })
    }

    /// Adds the lines with a non-zero code to the counts.
    fn count_lines(&self, measured: &Measured, counts: &Buffer<u64>) -> Result<()> {
        let Some((_, any)) = measured.rows.as_ref().or(measured.cols.as_ref()) else { return Ok(()) };
        let kernel = self.device.kernel(&whole_spec("nib::count_lines", vec![]))?;
        let args: [&dyn KernelArg; 3] = [any, &(any.len() as i32), counts];
        // SAFETY: as many flags as are said, and three counts.
        unsafe { kernel.launch(grid(any.len()), &args) }
    }
}

/// Quantizes values as they stand.
pub(super) fn launch(
    device: &Device,
    op: &Quantize<'_, Cuda>,
    desc: &QuantizeDesc,
    source: &Source<'_>,
    out: &Planned<'_>,
) -> Result<()> {
    let config = UnitsConfig::of(desc)?;
    let sweep = config.sweep;
    let len = op.groups.map(|groups| groups.len.get());
    let (codec, measure) = (desc.codec, Measure { device, desc, source, earlier: EarlierArg::of(op), len });
    let format = codec.format();
    let by_line = format.spec().block == WHOLE_LINE;
    let measured = match (by_line, codec.scale_kind().has_tensor_scale()) {
        (true, _) => measure.lines()?,
        (false, true) => measure.tensor(out)?,
        (false, false) => Measured::default(),
    };
    let address = |plane: Option<&BlockScaled<Cuda>>| plane.map_or(0, |plane| plane.codes.get().address());
    let form = match desc.planes {
        Planes::Rows => 1,
        Planes::Cols => 2,
        Planes::Tiles if format.spec().tiles => 4,
        Planes::Both | Planes::Tiles => 3,
    };
    let whole = |codes: usize| u32::from(format.row_code_bytes(codes).is_multiple_of(16));
    // A thread has 64 values of a row.
    let of_rows = RecordWords::of(out.rows, 64 / format.spec().block.clamp(1, 64));
    let by_word =
        out.rows.filter(|_| desc.has_words()).map(|rows| ByBlock::words(device, rows)).transpose()?;
    let in_pairs = |plane: &BlockScaled<Cuda>| {
        has_bytes(plane) && plane.scale_layout == ScaleLayout::MnMajor && desc.cols.is_multiple_of(2)
    };
    let arg = UnitsArg {
        x: source.address,
        row_codes: address(out.rows),
        col_codes: address(out.cols),
        row_records: records(out.rows),
        col_records: records(out.cols),
        row_words: by_word.as_ref().map_or(of_rows, |words| RecordWords {
            words: words.scales.address(),
            line_stride: 4,
            next: 4 * words.plane.stride as u64,
        }),
        col_words: RecordWords::of(out.cols, 4),
        counts: out.counts.address(),
        row_id: source.row_id.map_or(0, Buffer::address),
        row_amax: measured.rows.as_ref().map_or(0, |(maxima, _)| maxima.address()),
        col_amax: measured.cols.as_ref().map_or(0, |(maxima, _)| maxima.address()),
        row_any: measured.rows.as_ref().map_or(0, |(_, any)| any.address()),
        col_any: measured.cols.as_ref().map_or(0, |(_, any)| any.address()),
        tensor: measured.inverses.as_ref().map_or(0, Buffer::address),
        span_of_row: measured.span_of_row.as_ref().map_or(0, Buffer::address),
        found: out.found.map_or(0, |found| found.amax.address()),
        found_counts: out.found.map_or(0, |found| found.counts.address()),
        rows: desc.rows as i32,
        cols: desc.cols as i32,
        capacity: desc.capacity as i32,
        form,
        policy: policy(codec.rounding()) as i32,
        band: sweep.band as i32,
        id_mask: source.id_mask,
        x_aligned: u32::from((desc.cols * desc.input.size_bytes()).is_multiple_of(16)),
        rows_aligned: whole(desc.cols),
        cols_aligned: whole(desc.capacity),
        cols_in_pairs: out.cols.is_some_and(in_pairs).into(),
        found_spans: out.found.map_or(0, |found| found.amax.len() as i32),
        // The transposed plane of a weight has a scale for each of its rows.
        column_record: if desc.planes == Planes::Tiles { desc.capacity } else { format.column_step() } as u32,
        across: sweep.across as i32,
        down: sweep.down as i32,
        stack: desc.stack as i32,
        by_matrix: Divider::by((sweep.across * sweep.down) as u32),
        by_band: Divider::by((sweep.across * sweep.band) as u32),
        by_height: Divider::by(sweep.band as u32),
        by_last: Divider::by((sweep.down % sweep.band) as u32),
        rule: ScaleArg::of(codec.rule(), codec.element()),
        of_bf16: source.transform.is_some_and(|transform| transform.input == DType::Bf16).into(),
        transform: source.transform.map_or(TransformArg::NONE, |transform| transform.arg),
    };
    let rounding = RoundingArg::new(codec.rounding(), op.random);
    // SAFETY: planes have the lengths that follow from the sizes passed, `BufferCheck` held x and the groups to them, what was measured has
    // a number for each line or span, words have four bytes for four blocks of each line, and planes, words and counts are new, so that nobody else writes or reads them.
    unsafe { device.kernel(&config.spec)?.launch(config.launch, &[&arg, &rounding]) }?;
    if let (Some(words), Some(rows)) = (&by_word, out.rows) {
        // A word is moved as an F32 scale is.
        words.transpose(device, ScaleKind::F32, rows.scales.get())?;
    }
    measure.spread(&measured, out)?;
    measure.count_lines(&measured, out.counts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use std::mem::offset_of;

    /// As the compiler lays the device's struct out.
    #[test]
    fn the_argument_lies_as_the_device_has_it() {
        let offsets = [
            offset_of!(UnitsArg, row_records),
            offset_of!(UnitsArg, counts),
            offset_of!(UnitsArg, span_of_row),
            offset_of!(UnitsArg, rows),
            offset_of!(UnitsArg, cols_in_pairs),
            offset_of!(UnitsArg, across),
            offset_of!(UnitsArg, rule),
            offset_of!(UnitsArg, transform),
        ];
        assert_eq!((offsets, size_of::<UnitsArg>()), ([24, 120, 176, 200, 240, 252, 296, 312], 432));
    }

    /// The scale of every subnormal and of normal magnitudes around a power of two, against the specification.
    #[test]
    fn what_is_added_to_a_magnitude_makes_the_scale_of_its_rule() {
        for element in Format::ALL.into_iter().filter_map(|format| format.spec().element) {
            for rule in [ScaleRule::Floor, ScaleRule::Rceil, ScaleRule::Ceil, ScaleRule::Even] {
                let ScaleArg { up, up_least, nan_from } = ScaleArg::of(rule, element);
                let normal = (0..2000u32).map(|i| 0x3F80_0000 + i * 4194);
                let last = (0..2000u32).map(|i| 0x7F00_0000 + i * 4194).filter(|bits| *bits < 0x7F80_0000);
                for bits in (0..0x80_0000)
                    .step_by(257)
                    .chain(normal)
                    .chain(last)
                    .chain([0x7F_0000, 0x7F_0001, 0x7E_0001])
                {
                    let up = if element.emax() == 0 && bits < 0x80_0000 { up_least } else { up };
                    let byte = (((bits + up) >> 23) as i32 - element.emax()).clamp(0, 254) as u8;
                    let byte = if bits >= nan_from { 0xFF } else { byte };
                    let want = nibble_core::formats::e8m0::encode(rule, element, f32::from_bits(bits));
                    assert_eq!(byte, want, "{element} {rule} {bits:#x}");
                }
            }
        }
    }

    /// `Nvfp4Block::pair_code` and `PairCode` of the device (csrc/formats), of every scale byte and every BF16 magnitude, against the code of
    /// the product with the scale's inverse in F32.
    #[test]
    fn quotients_in_f16_have_the_codes_of_products_in_f32() {
        let whole = |x: f64| x.round_ties_even() as u8;
        for byte in 0..Element::E4M3.nan_code() {
            let scale = Element::E4M3.decode(byte);
            let inverse = if byte == 0 { f32::MAX } else { 1.0 / scale };
            let mantissa = f32::from_bits((scale.to_bits() & 0x7F_FFFF) | 0x3F80_0000);
            let larger = u16::from(mantissa == 1.375 || mantissa == 1.875);
            let (factor, below, limit) = match byte {
                0 => (0x47FF, 0, 192),
                _ => {
                    let limit = f16::from_f32(mantissa * 6.0 / 64.0).to_bits() >> 3;
                    let factor = f16::from_f32(1.0 / mantissa).to_bits() + larger - 7 * 1024;
                    (factor, (9 - (scale.to_bits() >> 23) as i32) * 128, i32::from(limit))
                }
            };
            for bits in 0..0x7F80_u16 {
                let scaled = f16::from_bits((i32::from(bits) + below).clamp(0, limit) as u16 * 8);
                let quotient =
                    f16::from_f64(scaled.to_f64() * f16::from_bits(factor).to_f64()).to_f64() * 8192.0;
                let code = whole(2.0 * quotient).min(2 + whole(quotient)).min(4 + whole(quotient / 2.0));
                let want = Element::E2M1.encode(bf16::from_bits(bits).to_f32() * inverse);
                assert_eq!(code, want, "scale byte {byte:#x}, number {bits:#x}");
            }
        }
    }
}
