//! Quantizes to any format with the kernel for all formats
//! (`csrc/kernels/convert/quantize_units.cuh`).

use super::args::{ByBlock, MatrixArgs, Planned, TransformArg};
use super::config::{OP, QuantizeDesc, QuantizePath, input_type};
use super::measure::{self, EarlierArg, Measure, Measured};
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, Launch, RoundingArg, plain_args};
use crate::ops::Instance;
use crate::ops::convert::units::{LONG, RecordPlane, SQUARE, UnitFormat, VALUES_PER_UNIT, tiles};
use crate::{Buffer, Cuda, Device};
use nibble_choice::quantize::DECODED;
use nibble_core::formats::{
    BlockAxis, Candidates, Correction, Element, Rounding, ScaleKind, ScaleLayout, ScaleRule, Scaling,
    WHOLE_LINE,
};
use nibble_core::ops::{Planes, Quantize, Taken};
use nibble_core::{BlockScaled, DType, Error, Result};

const THREADS: u32 = 256;
/// How many vertically adjacent tiles form a band.
const BAND: usize = 4;

/// The configuration of a launch.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct UnitsConfig {
    pub spec: KernelSpec,
    pub launch: Launch,
    pub sweep: Sweep,
}

/// The order in which CTAs process tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sweep {
    /// The number of tiles across a matrix; the next field is the number of tiles down a matrix.
    pub across: usize,
    pub down: usize,
    /// How many vertically adjacent tiles form a band.
    pub band: usize,
}

impl Sweep {
    /// If only column codes are written, they are contiguous in memory only if whole columns of tiles are swept, which is faster
    /// for codes of more than half a byte.
    fn of(desc: &QuantizeDesc, down: usize, across: usize) -> Self {
        let is_long = desc.planes == Planes::Cols && desc.codec.format().spec().code_bits > 4;
        Self { across, down, band: if is_long { down } else { BAND.min(down) }.max(1) }
    }
}

/// Mirrors the device struct `ScaleArg` (csrc/formats/block_format.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ScaleArg {
    up: u32,
    up_least: u32,
    nan_from: u32,
}

impl ScaleArg {
    /// The parameters for a rule that gives powers of two; other rules ignore these values.
    fn of(rule: ScaleRule, element: Element) -> Self {
        const INFINITY: u32 = 0x7F80_0000;
        const MANTISSA: u32 = 0x7F_FFFF;
        let most = element.max().to_bits() & MANTISSA;
        // Subnormal magnitudes have no leading bit, so the least scale covers 2⁻¹²⁷ · max, in units of
        // the subnormal bits.
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

/// Mirrors the device struct `ScalingArg` (csrc/formats/block_format.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
struct ScalingArg {
    headroom: f32,
    thresholds: [f32; 2],
    divides: u32,
    corrects: u32,
    candidates: u32,
}

impl ScalingArg {
    fn of(scaling: Scaling) -> Self {
        Self {
            headroom: scaling.headroom.factor(),
            thresholds: scaling.thresholds.bounds().map(|bound| bound as f32),
            divides: scaling.thresholds.divides().into(),
            corrects: (scaling.correction != Correction::None).into(),
            candidates: match scaling.candidates {
                Candidates::Six => 0,
                Candidates::FourOrSixMse => 1,
                Candidates::FourOrSixMae => 2,
            },
        }
    }
}

/// Mirrors the device struct `RecordWords`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RecordWords {
    words: u64,
    line_stride: u64,
    next: u64,
}

impl RecordWords {
    const NONE: Self = Self { words: 0, line_stride: 0, next: 0 };

    /// For contiguous one-byte records, whose number per row or column is a multiple of `together`;
    /// `NONE` for all others.
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

/// Whether a record is one byte for at most 32 values, in which case the kernel stores several records
/// at a time.
fn has_bytes(plane: &BlockScaled<Cuda>) -> bool {
    plane.scale_kind().bytes() == 1 && plane.format.spec().block <= 32
}

/// Mirrors the device struct `UnitsArg`.
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
    scaling: ScalingArg,
}

plain_args!(UnitsArg);

/// The number of a rounding mode on the device (csrc/formats/small_elements.cuh).
fn policy(rounding: Rounding) -> i64 {
    match rounding {
        Rounding::NearestEven => 0,
        Rounding::NearestAway => 1,
        Rounding::Stochastic => 2,
        Rounding::Dither { .. } => 3,
    }
}
const ANY_POLICY: i64 = 4;

/// The instance for a format, its input type, a rounding mode (`None`: any mode) and the number of
/// units per tile row.
fn instance(format: UnitFormat, input: DType, rounding: Option<Rounding>, across: usize) -> Instance {
    let shared_bytes = format.quantize_shared_bytes(input, false);
    Instance { spec: spec(format.device, input, rounding, across), shared_bytes }
}

/// The instance for non-default scales; `device` is [`UnitFormat::chosen`].
fn chosen_instance(format: UnitFormat, device: &'static str, input: DType) -> Instance {
    let shared_bytes = format.quantize_shared_bytes(input, true);
    Instance { spec: spec(device, input, None, SQUARE), shared_bytes }
}

/// The instance for 2-D blocks of weights; `device` is [`UnitFormat::squared`].
fn squared_instance(format: UnitFormat, device: &'static str, input: DType) -> Instance {
    Instance { spec: spec(device, input, None, SQUARE), shared_bytes: format.squared_shared_bytes(input) }
}

/// As [`instance`], but it writes BF16 values instead of codes.
fn decoded_instance(format: UnitFormat, input: DType, rounding: Rounding, across: usize) -> Instance {
    let spec = spec(format.device, input, Some(rounding), across);
    let spec = KernelSpec { name: "nib::quantize_units_decoded", ..spec };
    let both = across == SQUARE && decodes_both(input, rounding);
    Instance { spec, shared_bytes: format.decoded_shared_bytes(input, both) }
}

/// The kernel's `kDecodesBoth`: such an instance holds the decoded BF16 values for rows and for columns in shared memory. Two launches,
/// which read the values twice, take less time, unless generating random bits dominates.
fn decodes_both(input: DType, rounding: Rounding) -> bool {
    input == DType::F32 || rounding.is_random()
}

/// Input types, and units per tile row, of the instances for a single rounding mode.
const SHAPES: [(DType, usize); 3] = [(DType::Bf16, LONG), (DType::Bf16, SQUARE), (DType::F32, SQUARE)];

fn spec(device: &'static str, input: DType, rounding: Option<Rounding>, across: usize) -> KernelSpec {
    let args = vec![
        ("F", TemplateArg::Type(device)),
        ("In", input_type(input)),
        ("kRound", TemplateArg::Int(rounding.map_or(ANY_POLICY, policy))),
        ("kAcross", TemplateArg::Int(across as i64)),
    ];
    KernelSpec { source: "kernels/convert/quantize_units.cuh", name: "nib::quantize_units", args }
}

/// Every kernel instance of this module.
pub(super) fn instances() -> Vec<Instance> {
    let inputs = [DType::Bf16, DType::F32];
    let mut all = Vec::new();
    for format in UnitFormat::all() {
        for &rounding in format.own {
            all.extend(SHAPES.map(|(input, across)| instance(format, input, Some(rounding), across)));
        }
        let decoded = DECODED.iter().filter(|(of, _)| *of == format.format);
        for &rounding in decoded.flat_map(|(_, roundings)| roundings.iter()) {
            all.extend(SHAPES.map(|(input, across)| decoded_instance(format, input, rounding, across)));
        }
        all.extend(inputs.map(|input| instance(format, input, None, SQUARE)));
        if let Some(device) = format.chosen() {
            all.extend(inputs.map(|input| chosen_instance(format, device, input)));
        }
        if let Some(device) = format.squared() {
            all.extend(inputs.map(|input| squared_instance(format, device, input)));
        }
    }
    all.extend(measure::instances().map(|spec| Instance { spec, shared_bytes: 0 }));
    all
}

impl UnitsConfig {
    /// The configuration for any quantization path.
    pub fn of(path: &QuantizePath) -> Result<Self> {
        let desc = &path.last;
        let (format, rule, rounding) = (desc.codec.format(), desc.codec.rule(), desc.codec.rounding());
        let Some(unit) = UnitFormat::of(format, rule) else {
            return Err(Error::unsupported(OP, format, "it has no kernel on a GPU; the CPU takes it"));
        };
        // Random bits are generated for eight adjacent values of a row.
        let has_own = unit.own.contains(&rounding) && (!rounding.is_random() || desc.cols.is_multiple_of(8));
        let is_default = desc.codec.scaling().is_default_in_blocks();
        let own = has_own.then_some(rounding).filter(|_| is_default);
        // Tiles with rows of `long_cols` values are read and written fastest, if the data fills
        // most of them.
        let long_cols = LONG * VALUES_PER_UNIT;
        let is_filled = 4 * desc.cols >= 3 * desc.cols.next_multiple_of(long_cols);
        let long = desc.planes == Planes::Rows && desc.input == DType::Bf16 && own.is_some() && is_filled;
        let across = if long { LONG } else { SQUARE };
        let squared = unit.squared().filter(|_| desc.codec.scaling().is_square());
        let Instance { spec, shared_bytes } = match (squared, unit.chosen().filter(|_| !is_default)) {
            (Some(device), _) => squared_instance(unit, device, desc.input),
            _ if path.taken == Taken::Decoded => decoded_instance(unit, desc.input, rounding, across),
            (_, Some(device)) => chosen_instance(unit, device, desc.input),
            (_, None) => instance(unit, desc.input, own, across),
        };
        let lines = if desc.planes == Planes::Rows { desc.rows } else { desc.capacity };
        let sweep = Sweep::of(desc, tiles(lines, 1, across), tiles(1, desc.cols, across));
        let ctas = desc.stack * sweep.across * sweep.down;
        let ctas = u32::try_from(ctas).ok().filter(|&ctas| ctas < 1 << 31);
        let ctas = ctas
            .ok_or_else(|| Error::shape(OP, "x", format!("{} × {}", desc.rows, desc.cols), "fewer tiles"))?;
        Ok(Self { spec, launch: Launch { ctas, threads: THREADS, cluster: 1, shared_bytes }, sweep })
    }
}

/// The layout of a buffer's scale records.
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

/// The paths of a quantization, one per launch.
pub(super) fn passes(path: &QuantizePath) -> Vec<QuantizePath> {
    let QuantizeDesc { planes, input, codec, .. } = path.last;
    let is_apart = path.taken == Taken::Decoded && !decodes_both(input, codec.rounding());
    let of = |planes| QuantizePath { last: QuantizeDesc { planes, ..path.last }, ..*path };
    if is_apart && planes == Planes::Both {
        [Planes::Rows, Planes::Cols].map(of).to_vec()
    } else {
        vec![*path]
    }
}

/// Quantizes values, without first writing a transform to memory.
pub(super) fn launch(
    device: &Device,
    op: &Quantize<'_, Cuda>,
    path: &QuantizePath,
    source: &MatrixArgs<'_>,
    out: &Planned<'_>,
) -> Result<()> {
    let len = op.groups.map(|groups| groups.len.get());
    let (desc, earlier) = (&path.last, EarlierArg::of(op));
    let measure = Measure { device, desc, source, earlier, len, amax: op.amax };
    let by_line = desc.codec.format().spec().block == WHOLE_LINE;
    let measured = match (by_line, desc.kind().has_tensor_scale()) {
        (true, _) => measure.lines()?,
        (false, true) => measure.tensor(out)?,
        (false, false) => Measured::default(),
    };
    for (pass, path) in passes(path).iter().enumerate() {
        // If both rows and columns are written, the blocks of the rows are counted, and magnitudes for delayed scales
        // are found only once.
        let counts = if pass == 0 { out.counts.address() } else { 0 };
        let out = Planned {
            rows: out.rows.filter(|_| path.last.planes != Planes::Cols),
            cols: out.cols.filter(|_| path.last.planes != Planes::Rows),
            found: out.found.filter(|_| pass == 0),
            ..*out
        };
        encode(device, op, (path, source, &out), &measured, counts)?;
    }
    measure.spread(&measured, out)?;
    measure.count_lines(&measured, out.counts)
}

/// Encodes the outputs of one launch, from values that have already been measured. `counts` is an
/// address, or 0.
fn encode(
    device: &Device,
    op: &Quantize<'_, Cuda>,
    (path, source, out): (&QuantizePath, &MatrixArgs<'_>, &Planned<'_>),
    measured: &Measured,
    counts: u64,
) -> Result<()> {
    let (config, desc) = (UnitsConfig::of(path)?, &path.last);
    let (sweep, codec) = (config.sweep, desc.codec);
    let format = codec.format();
    let address = |plane: Option<&BlockScaled<Cuda>>| plane.map_or(0, |plane| plane.codes.get().address());
    let form = match desc.planes {
        Planes::Rows => 1,
        Planes::Cols => 2,
        Planes::Tiles if format.spec().tiles => 4,
        Planes::Both | Planes::Tiles => 3,
    };
    let is_decoded = path.taken == Taken::Decoded;
    // Decoded values are row-major for rows and for columns.
    let whole = |codes: usize| match is_decoded {
        true => u32::from((desc.cols * DType::Bf16.size_bytes()).is_multiple_of(16)),
        false => u32::from(format.row_code_bytes(codes).is_multiple_of(16)),
    };
    // A thread has 64 values of one row.
    let of_rows = RecordWords::of(out.rows, 64 / format.spec().block.clamp(1, 64));
    let by_word = ByBlock::new(device, path)?;
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
        counts,
        row_id: source.row_id.map_or(0, Buffer::address),
        row_amax: measured.rows.as_ref().map_or(0, |(maxima, _)| maxima.address()),
        col_amax: measured.cols.as_ref().map_or(0, |(maxima, _)| maxima.address()),
        row_any: measured.rows.as_ref().map_or(0, |(_, any)| any.address()),
        col_any: measured.cols.as_ref().map_or(0, |(_, any)| any.address()),
        tensor: measured.inverses.as_ref().map_or(0, Buffer::address),
        span_of_row: measured.span_of_row.as_ref().map_or(0, Buffer::address),
        found: out.found.map_or(0, |found| found.amax.get().address()),
        found_counts: out.found.map_or(0, |found| found.counts.get().address()),
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
        found_spans: out.found.map_or(0, |found| found.amax.get().len() as i32),
        // The transposed buffer of a weight has one scale for each of its rows.
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
        scaling: ScalingArg::of(codec.scaling()),
    };
    let rounding = RoundingArg::new(codec, op.random);
    // SAFETY: buffers have the lengths that follow from the sizes passed, and `BufferCheck` checked x and the groups against these sizes.
    // What was measured has one value per row, column or span; a word has four bytes for four blocks. Buffers, words and counts are new, so
    // nothing else accesses them.
    unsafe { device.kernel(&config.spec)?.launch(config.launch, &[&arg, &rounding]) }?;
    if let (Some(words), Some(rows)) = (&by_word, out.rows) {
        // A word of scales is transposed like an F32 scale.
        words.transpose(device, ScaleKind::F32, rows.scales.get())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use nibble_core::formats::Format;
    use std::mem::offset_of;

    /// Checks that the layout of the argument is that of the device's struct.
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
            offset_of!(UnitsArg, scaling),
        ];
        assert_eq!((offsets, size_of::<UnitsArg>()), ([24, 120, 176, 200, 240, 252, 296, 312, 440], 464));
    }

    /// Checks the scale of every subnormal magnitude, and of normal magnitudes around a power of two, against the
    /// specification.
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

    /// Checks `Nvfp4Block::pair_code` and `PairCode` of the device (csrc/formats), for every scale byte and every BF16 magnitude, against
    /// the code of the product with the scale's inverse in F32.
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
