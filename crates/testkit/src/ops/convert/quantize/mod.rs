mod amax;
mod scaled;
mod stacks;
mod taken;

pub use amax::measure_amax;

use crate::breadth::Breadth;
use crate::case::{Case, Outputs, Pads};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use crate::shapes::{RaggedRows, Spread, WIDTHS};
use nibble_core::formats::hadamard::LENGTHS;
use nibble_core::formats::{Codec, Format, Purpose, Rounding, ScaleRule, Stream};
use nibble_core::ops::{Delayed, Dequantize, Hadamard, Planes, Quantize, Random};
use nibble_core::{Agreement, DType, Groups, Kernels, Result, Tensor};

/// Kinds of values, through which the cases rotate.
const INPUTS: [Input; 6] = [
    Input::Normal,
    Input::ExtremeExponents,
    Input::Outliers,
    Input::NonFinite,
    Input::HeavyTailed,
    Input::SignedZeros,
];

/// All rules of all block formats, with rounding to nearest.
pub(in crate::ops) fn codecs() -> impl Iterator<Item = Codec> {
    let all = |format: Format| format.spec().rules.iter().map(move |&rule| (format, rule));
    Format::ALL.into_iter().flat_map(all).map(|(format, rule)| codec(format, rule, Rounding::NearestEven))
}

pub(in crate::ops) fn codec(format: Format, rule: ScaleRule, rounding: Rounding) -> Codec {
    Codec::new(format, rule, rounding).unwrap_or_else(|e| panic!("{e}"))
}

/// A matrix with NaN in padding that may hold any values, otherwise with zeros in the padding.
pub(in crate::ops) fn ragged_values(
    input: Input,
    name: &str,
    rows: &RaggedRows,
    cols: usize,
    pads: Pads,
) -> Vec<f32> {
    let mut x = input.values(&stream(name), rows.capacity * cols);
    rows.fill_pads(&mut x, cols, if pads == Pads::Poison { f32::NAN } else { 0.0 });
    x
}

#[derive(Debug)]
struct Dense {
    codec: Codec,
    planes: Planes,
    rows: usize,
    cols: usize,
    stack: usize,
    dtype: DType,
    input: Input,
}

impl<B: Kernels> Case<B> for Dense {
    fn agreement(&self) -> Agreement {
        Quantize::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { codec, planes, rows, cols, .. } = *self;
        let x = plain(b, self.dtype, &self.input.values(&stream("quantize"), rows * cols), rows, cols)?;
        let random = codec.draws().then(|| stream("quantize.random").into());
        let made = Quantize { stack: self.stack, random, ..Quantize::new(&x, codec, planes) }.run(b)?;
        let mut out = Outputs::default();
        out.emitted(b, "out", &made)?;
        Ok(out)
    }
}

/// A case in which the step of the random bits comes from a device buffer, of which only the first value counts.
#[derive(Debug)]
struct StepOnDevice {
    codec: Codec,
    planes: Planes,
    /// The length of a Hadamard transform whose signs also change with the step.
    hadamard: Option<usize>,
    step: u32,
}

impl<B: Kernels> Case<B> for StepOnDevice {
    fn agreement(&self) -> Agreement {
        Quantize::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { codec, planes, hadamard, step } = *self;
        let (rows, cols) = (128, 128);
        let x = Input::Normal.values(&stream("quantize"), rows * cols);
        let x = plain(b, DType::Bf16, &x, rows, cols)?;
        let signs = Stream { purpose: Purpose::Sign, ..stream("quantize.signs") };
        let made = |random: Random<'_, B>| {
            let of_step = Stream { step: random.stream.step, ..signs };
            let hadamard = hadamard.map(|len| Hadamard { len, signs: of_step, step: random.step, first: 0 });
            let random = codec.draws().then_some(random);
            let op = Quantize { random, hadamard, ..Quantize::new(&x, codec, planes) };
            let mut out = Outputs::default();
            out.emitted(b, "out", &op.run(b)?)?;
            Ok::<_, nibble_core::Error>(out)
        };
        let at = |step| Stream { step, ..stream("quantize.random") };
        let on_device = b.upload(&[step, 12345])?;
        let device = made(Random { step: Some(&on_device), ..at(777).into() })?;
        let (host, other) = (made(at(step).into())?, made(at(777).into())?);
        assert!(device == host, "{self:?}: the device's step gives the bits of the host's");
        assert!(device != other, "{self:?}: the step decides");
        Ok(device)
    }
}

/// Tests a step counter in device memory, which recorded training steps use.
fn step_on_device<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for rounding in [Rounding::Stochastic, Rounding::Dither { delta_q16: 0x4000 }] {
        for format in [Format::Mxfp4, Format::E4m3] {
            let codec = codec(format, ScaleRule::Rceil, rounding);
            for (i, planes) in [Planes::Rows, Planes::Cols, Planes::Both].into_iter().enumerate() {
                pair.check(&StepOnDevice { codec, planes, hadamard: None, step: 1 + i as u32 });
            }
            for planes in [Planes::Rows, Planes::Cols] {
                pair.check(&StepOnDevice { codec, planes, hadamard: Some(32), step: u32::MAX });
            }
        }
    }
    for (format, planes) in
        [(Format::Mxfp4, Planes::Rows), (Format::E4m3, Planes::Cols), (Format::Nvfp4, Planes::Cols)]
    {
        let codec = codec(format, format.spec().rules[0], Rounding::NearestEven);
        for len in LENGTHS {
            pair.check(&StepOnDevice { codec, planes, hadamard: Some(len), step: 9 });
        }
    }
}

#[derive(Debug)]
struct Ragged {
    codec: Codec,
    planes: Planes,
    spread: Spread,
    num_groups: usize,
    rows: usize,
    cols: usize,
    dtype: DType,
    input: Input,
}

impl<B: Kernels> Case<B> for Ragged {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        Quantize::<B>::AGREEMENT
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let Self { codec, planes, cols, .. } = *self;
        let align = if planes == Planes::Cols { 256 } else { 128 }; // strips of 128 rows consist entirely of padding
        let rows = RaggedRows::of(self.spread, self.num_groups, self.rows, align);
        let x = ragged_values(self.input, "quantize", &rows, cols, pads);
        let x = plain(b, self.dtype, &x, rows.capacity, cols)?;
        let groups = rows.upload(b)?;
        let random = codec.draws().then(|| stream("quantize.random").into());
        let made = Quantize { groups: Some(&groups), random, ..Quantize::new(&x, codec, planes) }.run(b)?;
        let mut out = Outputs::default();
        out.emitted(b, "out", &made)?;
        if made.rows.is_some() {
            out.require_zero_pads("out.rows", &rows.is_valid());
        }
        Ok(out)
    }
}

/// A matrix and its groups: rows in five groups, or dense rows if there is no spread.
pub(in crate::ops) fn matrix<B: Kernels>(
    b: &B,
    spread: Option<Spread>,
    (rows, cols): (usize, usize),
    dtype: DType,
    input: Input,
    pads: Pads,
) -> Result<(Tensor<B>, Option<Groups<B>>)> {
    let Some(spread) = spread else {
        return Ok((plain(b, dtype, &input.values(&stream("quantize"), rows * cols), rows, cols)?, None));
    };
    let rows = RaggedRows::of(spread, 5, rows, 128);
    let x = ragged_values(input, "quantize", &rows, cols, pads);
    Ok((plain(b, dtype, &x, rows.capacity, cols)?, Some(rows.upload(b)?)))
}

/// A case of delayed scaling for ragged rows, or for dense rows or a stack if there is no spread.
#[derive(Debug)]
struct OfEarlierSteps {
    codec: Codec,
    planes: Planes,
    spread: Option<Spread>,
    rows: usize,
    cols: usize,
    stack: usize,
    dtype: DType,
    input: Input,
    /// The expected amax of the first span; the other spans' values derive from it.
    expected: f32,
}

impl<B: Kernels> Case<B> for OfEarlierSteps {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        Quantize::<B>::AGREEMENT
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let Self { codec, planes, cols, stack, .. } = *self;
        let (x, groups) = matrix(b, self.spread, (self.rows, cols), self.dtype, self.input, pads)?;
        let random = codec.draws().then(|| stream("quantize.random").into());
        let op = Quantize { groups: groups.as_ref(), stack, random, ..Quantize::new(&x, codec, planes) };
        // Records have five values and start at the third value; every third span has no known amax.
        let (first, stride) = (3, 5);
        let mut records = vec![f32::NAN; first + op.spans() * stride];
        for span in 0..op.spans() {
            let known = if span % 3 == 2 { 0.0 } else { self.expected * 0.25f32.powi(span as i32) };
            records[first + span * stride] = known;
        }
        let records = b.upload(&records)?;
        let made = Quantize { delayed: Some(Delayed { records: &records, first, stride }), ..op }.run(b)?;
        let mut out = Outputs::default();
        out.emitted(b, "out", &made)?;
        Ok(out)
    }
}

/// Tests an expected amax that is met, exceeded or unknown, for every layout.
fn of_earlier_steps<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (first, stride) in [(0, 2), (4, 0), (0, usize::MAX / 2 + 1), (usize::MAX, 0), (usize::MAX - 1, 1)] {
        pair.check_refused(&RecordsTooFar { first, stride }, |e| e.to_string().contains("3 spans"));
    }
    let formats = Format::ALL.into_iter().filter(|format| format.may_be_delayed());
    let inputs =
        [Input::Normal, Input::NonFinite, Input::Outliers, Input::ExtremeExponents, Input::SignedZeros];
    for (i, format) in formats.enumerate() {
        for (j, rounding) in [Rounding::NearestEven, Rounding::Stochastic].into_iter().enumerate() {
            let codec = codec(format, ScaleRule::TensorAmax, rounding);
            for (k, expected) in [0.0, 0.5, 4.0, 1e30].into_iter().enumerate() {
                let (dtype, input) = (PLAIN[(i + j + k) % 2], inputs[(i + 2 * j + k) % inputs.len()]);
                let case = |planes, spread, rows, cols, stack| OfEarlierSteps {
                    codec,
                    planes,
                    spread,
                    rows,
                    cols,
                    stack,
                    dtype,
                    input,
                    expected,
                };
                // Random bits do not depend on the expected amax, so few cases need them.
                if j > 0 && k != 2 {
                    continue;
                }
                for (planes, spread) in [
                    (Planes::Rows, Spread::Zipf),
                    (Planes::Cols, Spread::EmptyGroups),
                    (Planes::Both, Spread::OneTakesMost),
                ] {
                    pair.check(&case(planes, None, 150, 200, 1));
                    pair.check(&case(planes, Some(spread), 300, 136, 1));
                }
                pair.check(&case(Planes::Rows, None, 20, 1920, 1));
                pair.check(&case(Planes::Rows, Some(Spread::Zipf), 40, 896, 1));
                pair.check(&case(Planes::Tiles, None, 3 * 140, 136, 3));
            }
        }
    }
}

/// A case in which the indices of records overflow.
#[derive(Debug)]
struct RecordsTooFar {
    first: usize,
    stride: usize,
}

impl<B: Kernels> Case<B> for RecordsTooFar {
    fn agreement(&self) -> Agreement {
        Quantize::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { first, stride } = *self;
        let x = plain(b, DType::F32, &[1.0; 3 * 128], 3, 128)?;
        let codec = codec(Format::E4m3Tensor, ScaleRule::TensorAmax, Rounding::NearestEven);
        let records = b.zeros(4)?;
        let delayed = Some(Delayed { records: &records, first, stride });
        Quantize { stack: 3, delayed, ..Quantize::new(&x, codec, Planes::Tiles) }.run(b)?;
        Ok(Outputs::default())
    }
}

/// A case of quantization after a Hadamard transform; rows are dense if there is no spread.
#[derive(Debug)]
struct Transformed {
    codec: Codec,
    planes: Planes,
    len: usize,
    /// The position of the first row of each group in a longer group.
    first: u64,
    spread: Option<Spread>,
    rows: usize,
    cols: usize,
    dtype: DType,
    input: Input,
}

impl<B: Kernels> Case<B> for Transformed {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        Quantize::<B>::AGREEMENT
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let Self { codec, planes, len, first, cols, .. } = *self;
        let (x, groups) = matrix(b, self.spread, (self.rows, cols), self.dtype, self.input, pads)?;
        let random = codec.draws().then(|| stream("quantize.random").into());
        let signs = Stream { purpose: Purpose::Sign, ..stream("quantize.signs") };
        let hadamard = Some(Hadamard { len, signs, step: None, first });
        let made = Quantize { groups: groups.as_ref(), random, hadamard, ..Quantize::new(&x, codec, planes) }
            .run(b)?;
        let mut out = Outputs::default();
        out.emitted(b, "out", &made)?;
        // A backend may choose any layout of the column scales, but must read them in the same layout.
        if let Some(columns) = &made.cols {
            let x = columns.block("quantize")?;
            out.tensor(b, "decoded", &Dequantize { x, dtype: DType::F32 }.run(b)?)?;
        }
        Ok(out)
    }
}

/// Tests all transform lengths, along the rows and along the columns, with groups that end inside a transform block.
fn transformed<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let codecs = [
        codec(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven),
        codec(Format::Mxfp4, ScaleRule::Floor, Rounding::Stochastic),
        codec(Format::E4m3, ScaleRule::Rceil, Rounding::NearestEven),
        codec(Format::E4m3, ScaleRule::Amax, Rounding::Stochastic),
        codec(Format::E5m2, ScaleRule::Rceil, Rounding::NearestEven),
        codec(Format::Mxfp8E4m3, ScaleRule::Rceil, Rounding::NearestEven),
        codec(Format::Nvfp4, ScaleRule::TensorAmax, Rounding::Stochastic),
        codec(Format::Nvfp4, ScaleRule::TensorAmax, Rounding::NearestEven),
        codec(Format::Nvfp4In128, ScaleRule::Amax, Rounding::Stochastic),
        codec(Format::Nvfp4In128, ScaleRule::Amax, Rounding::NearestEven),
        codec(Format::Hif4, ScaleRule::Amax, Rounding::NearestAway),
        codec(Format::Hif4, ScaleRule::Cann, Rounding::NearestEven),
        codec(Format::E4m3Tensor, ScaleRule::TensorAmax, Rounding::NearestEven),
        codec(Format::E4m3Row, ScaleRule::Amax, Rounding::NearestEven),
    ];
    let inputs =
        [Input::Normal, Input::NonFinite, Input::SignedZeros, Input::ExtremeExponents, Input::Outliers];
    for (i, codec) in codecs.into_iter().enumerate() {
        for (j, len) in LENGTHS.into_iter().enumerate() {
            let (dtype, input) = (PLAIN[(i + j) % 2], inputs[(i + 2 * j) % inputs.len()]);
            // Some columns go on in the middle of a longer group.
            let part = if (i + j) % 2 == 0 { 0 } else { 3 * len as u64 };
            let case = |planes, spread, rows, cols| {
                let first = if planes == Planes::Cols { part } else { 0 };
                Transformed { codec, planes, len, first, spread, rows, cols, dtype, input }
            };
            // The matrix has fewer rows than a block if the format allows it.
            let rows = if codec.format().column_step() >= 128 { 3 * len + 5 } else { 384 };
            pair.check(&case(Planes::Rows, None, 37, 384));
            // The width is not a multiple of 16, so a strip's scales are padded where they are stored together.
            pair.check(&case(Planes::Cols, None, rows, 72));
            pair.check(&case(Planes::Rows, Some(Spread::Zipf), 70, 2 * len.max(32)));
            for spread in [Spread::Zipf, Spread::EmptyGroups, Spread::OneRowEach] {
                pair.check(&case(Planes::Cols, Some(spread), 300, 160));
            }
        }
    }
}

/// Shapes for each layout: whole blocks of most formats, and rows and columns of even and odd lengths that end inside a block. Weights have
/// 2-D blocks, or row blocks for formats without 2-D blocks.
pub(in crate::ops) const SHAPES: [(Planes, usize, usize, usize); 10] = [
    (Planes::Rows, 37, 200, 1),
    (Planes::Cols, 37, 200, 1),
    (Planes::Both, 37, 200, 1),
    (Planes::Both, 96, 96, 1),
    (Planes::Rows, 9, 33, 1),
    (Planes::Both, 33, 131, 1),
    (Planes::Tiles, 140, 70, 1),
    (Planes::Tiles, 3 * 20, 130, 3),
    (Planes::Tiles, 2 * 33, 47, 2),
    // These columns are shorter than the part of a column that a warp processes.
    (Planes::Tiles, 16, 64, 1),
];

/// Combines every codec with nearest rounding, each of [`SHAPES`], and each kind of values with its index. The daily suite covers pairs of
/// these choices, except for formats with specialised code, for which it covers all combinations.
pub(in crate::ops) fn codecs_on_shapes(
    breadth: Breadth,
) -> impl Iterator<Item = (Codec, (Planes, usize, usize, usize), (usize, Input))> {
    let (fast, general): (Vec<Codec>, Vec<Codec>) =
        codecs().partition(|codec| [Format::Mxfp4, Format::E4m3].contains(&codec.format()));
    [(fast, Breadth::Whole), (general, breadth)].into_iter().flat_map(|(codecs, breadth)| {
        let choices = breadth.cross([codecs.len(), SHAPES.len(), Input::ALL.len()]);
        choices.into_iter().map(move |[codec, shape, i]| (codecs[codec], SHAPES[shape], (i, Input::ALL[i])))
    })
}

/// Tests all roundings of all formats, with whole tiles and with groups that end inside a tile.
fn general<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let roundings = [
        Rounding::NearestEven,
        Rounding::NearestAway,
        Rounding::Stochastic,
        Rounding::Dither { delta_q16: 0x3000 },
    ];
    let codecs: Vec<Codec> = codecs().collect();
    // There are three shapes of dense rows and two spreads.
    for [i, j, shape] in pair.breadth().cross([codecs.len(), roundings.len(), 5]) {
        let (format, rule) = (codecs[i].format(), codecs[i].rule());
        let (codec, dtype) = (codec(format, rule, roundings[j]), PLAIN[(i + j) % 2]);
        let dense =
            [(Planes::Rows, 20, 1920, 1), (Planes::Both, 160, 192, 1), (Planes::Tiles, 2 * 40, 72, 2)];
        if let Some(&(planes, rows, cols, stack)) = dense.get(shape) {
            let input = [Input::Normal, Input::Outliers, Input::ExtremeExponents][(i + j) % 3];
            pair.check(&Dense { codec, planes, rows, cols, stack, dtype, input });
            continue;
        }
        let k = shape - dense.len();
        let (planes, spread) = ([Planes::Both, Planes::Cols][k], [Spread::Zipf, Spread::EmptyGroups][k]);
        let input = [Input::Normal, Input::NonFinite, Input::SignedZeros][(i + j + k) % 3];
        pair.check(&Ragged { codec, planes, spread, num_groups: 3, rows: 200, cols: 96, dtype, input });
    }
}

/// Tests widths of real models: a few rows, two uneven groups, 2-D blocks, and a transform.
fn wide<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let codecs = [
        codec(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven),
        codec(Format::E4m3, ScaleRule::Amax, Rounding::NearestEven),
        codec(Format::Mxfp4, ScaleRule::Rceil, Rounding::Stochastic),
        codec(Format::E4m3, ScaleRule::Rceil, Rounding::NearestEven),
        codec(Format::Mxfp8E4m3, ScaleRule::Rceil, Rounding::NearestEven),
        codec(Format::Mxfp6E2m3, ScaleRule::Rceil, Rounding::NearestEven),
        codec(Format::Nvfp4, ScaleRule::TensorAmax, Rounding::NearestEven),
        codec(Format::Nvfp4In128, ScaleRule::Amax, Rounding::NearestEven),
        codec(Format::Hif4, ScaleRule::Amax, Rounding::NearestAway),
    ];
    let (dtype, input) = (DType::Bf16, Input::Outliers);
    for (i, codec) in codecs.into_iter().enumerate() {
        let spec = codec.format().spec();
        let rows = 37;
        for cols in WIDTHS {
            for planes in [Planes::Rows, Planes::Both] {
                pair.check(&Dense { codec, planes, rows, cols, stack: 1, dtype, input });
            }
        }
        let cols = WIDTHS[i % WIDTHS.len()];
        if spec.tiles {
            let (planes, dtype) = (Planes::Tiles, DType::F32);
            pair.check(&Dense { codec, planes, rows: 160, cols, stack: 2, dtype, input });
        } else {
            let (planes, len, spread) = (Planes::Rows, 64, None);
            pair.check(&Transformed { codec, planes, len, first: 0, spread, rows, cols, dtype, input });
        }
        // One group has a single row, and the other group ends within its second block.
        let (planes, spread) = ([Planes::Cols, Planes::Both][i % 2], Spread::OneTakesMost);
        pair.check(&Ragged { codec, planes, spread, num_groups: 2, rows: 150, cols, dtype, input });
    }
}

/// The conformance test of [`Quantize`]. The test covers all formats, rules, layouts, kinds of values, roundings and scaling options. The
/// test also covers ragged rows, parts of matrices, and transforms.
pub fn quantize<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    taken::for_products(pair);
    of_earlier_steps(pair);
    amax::parts(pair);
    stacks::parts_of_stacks(pair);
    for (codec, (planes, rows, cols, stack), (i, input)) in codecs_on_shapes(pair.breadth()) {
        pair.check(&Dense { codec, planes, rows, cols, stack, dtype: PLAIN[i % 2], input });
    }
    let roundings = [
        Rounding::NearestAway,
        Rounding::Stochastic,
        Rounding::Dither { delta_q16: 0x4000 },
        Rounding::NearestEven,
    ];
    for rounding in roundings {
        for (format, rule) in [
            (Format::Mxfp4, ScaleRule::Rceil),
            (Format::E4m3, ScaleRule::Amax),
            (Format::E4m3, ScaleRule::Rceil),
        ] {
            let codec = codec(format, rule, rounding);
            for dtype in PLAIN {
                let (planes, input) = (Planes::Both, Input::Normal);
                // The matrix is large enough for several threads, and has 1/16 of DeepSeek-V3's widths.
                pair.check(&Dense { codec, planes, rows: 320, cols: 448, stack: 1, dtype, input });
            }
            for (i, spread) in Spread::ALL.into_iter().enumerate() {
                let input = [Input::HeavyTailed, Input::NonFinite, Input::SignedZeros][i % 3];
                let dtype = PLAIN[(i + 1) % 2];
                pair.check(&Ragged {
                    codec,
                    planes: Planes::Both,
                    spread,
                    num_groups: 5,
                    rows: 300,
                    cols: 96,
                    dtype,
                    input,
                });
            }
            let spread = Spread::Zipf;
            for planes in [Planes::Rows, Planes::Cols] {
                let (num_groups, input) = (5, Input::Normal);
                // The rows end inside a block, or consist of whole blocks, or are as wide as a warp's segment.
                for (cols, dtype) in
                    [(64, DType::Bf16), (256, DType::Bf16), (384, DType::F32), (2048, DType::Bf16)]
                {
                    pair.check(&Ragged { codec, planes, spread, num_groups, rows: 200, cols, dtype, input });
                }
            }
        }
    }
    step_on_device(pair);
    general(pair);
    scaled::scaled_blocks(pair);
    transformed(pair);
    wide(pair);
}
