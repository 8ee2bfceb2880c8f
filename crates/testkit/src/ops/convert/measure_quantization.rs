use crate::case::{Case, Outputs, Pads};
use crate::host::{HostBlock, plain};
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::ops::convert::quantize::{SHAPES, codec, codecs, ragged_values};
use crate::pair::Pair;
use crate::shapes::{RaggedRows, Spread};
use half::bf16;
use nibble_core::formats::{BlockAxis, Codec, Format, Rounding, ScaleRule};
use nibble_core::ops::{MeasureQuantization, Planes};
use nibble_core::{Agreement, DType, Groups, Kernels, Result};

const NAME: &str = "measure_quantization";

/// Rounds values to the type of the plain tensor.
fn rounded(x: Vec<f32>, dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F32 => x,
        DType::Bf16 => x.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect(),
    }
}

fn measured<B: Kernels>(
    b: &B,
    (x, dtype): (&[f32], DType),
    quantized: &HostBlock,
    groups: Option<&Groups<B>>,
) -> Result<Outputs> {
    let x = plain(b, dtype, x, x.len() / quantized.cols.max(1), quantized.cols)?;
    let counts = MeasureQuantization { x: &x, quantized: &quantized.upload(b)?, groups }.run(b)?;
    let mut out = Outputs::default();
    out.buf(b, "counts", &counts, None)?;
    Ok(out)
}

#[derive(Debug)]
struct Dense {
    codec: Codec,
    axis: BlockAxis,
    rows: usize,
    cols: usize,
    stack: usize,
    dtype: DType,
    input: Input,
}

impl<B: Kernels> Case<B> for Dense {
    fn agreement(&self) -> Agreement {
        MeasureQuantization::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { codec, axis, rows, cols, stack, dtype, .. } = *self;
        let x = rounded(self.input.values(&stream(NAME), rows * cols), dtype);
        measured(b, (&x, dtype), &HostBlock::quantize(codec, axis, &x, rows, cols, stack), None)
    }
}

/// A case of all codes with all scales, compared with unrelated values; the values have fewer rows than the codes.
#[derive(Debug)]
struct Unrelated {
    format: Format,
    axis: BlockAxis,
    dtype: DType,
}

impl<B: Kernels> Case<B> for Unrelated {
    fn agreement(&self) -> Agreement {
        MeasureQuantization::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (rows, cols) = (128, 320);
        let x = rounded(Input::Outliers.values(&stream(NAME), (rows - 3) * cols), self.dtype);
        let quantized =
            HostBlock::random(self.format, self.axis, rows, cols, &stream("measure_quantization.codes"));
        measured(b, (&x, self.dtype), &quantized, None)
    }
}

/// A case in which padding rows must not count, whatever they hold.
#[derive(Debug)]
struct Ragged {
    codec: Codec,
    axis: BlockAxis,
    spread: Spread,
    cols: usize,
    dtype: DType,
}

impl<B: Kernels> Case<B> for Ragged {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        MeasureQuantization::<B>::AGREEMENT
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let Self { codec, axis, cols, dtype, .. } = *self;
        let rows = RaggedRows::of(self.spread, 5, 300, 128);
        let values = |pads| rounded(ragged_values(Input::Normal, NAME, &rows, cols, pads), dtype);
        let quantized = HostBlock::quantize(codec, axis, &values(Pads::Zero), rows.capacity, cols, 1);
        measured(b, (&values(pads), dtype), &quantized, Some(&rows.upload(b)?))
    }
}

/// The conformance test of [`MeasureQuantization`].
pub fn measure_quantization<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (turn, codec) in codecs().enumerate() {
        for (i, (planes, rows, cols, stack)) in SHAPES.into_iter().enumerate() {
            let axis = match planes {
                Planes::Rows => BlockAxis::Row,
                Planes::Cols => BlockAxis::Col,
                Planes::Tiles if codec.format().spec().tiles => BlockAxis::Tile,
                Planes::Tiles | Planes::Both => continue,
            };
            // Together, the cases combine each shape and each format with every kind of input.
            let (input, dtype) = (Input::ALL[(turn + i) % Input::ALL.len()], PLAIN[(turn + i) % 2]);
            pair.check(&Dense { codec, axis, rows, cols, stack, dtype, input });
        }
    }
    for (turn, format) in Format::ALL.into_iter().filter(|format| format.is_block()).enumerate() {
        let codec = codec(format, format.spec().rules[0], Rounding::NearestEven);
        for (i, axis) in [BlockAxis::Row, BlockAxis::Col].into_iter().enumerate() {
            // The shapes have several tiles of a GPU's kernel in both dimensions, and sizes that are multiples of neither.
            let (rows, cols, input) = ([37, 260][i], [2100, 264][i], Input::Outliers);
            pair.check(&Dense { codec, axis, rows, cols, stack: 1, dtype: PLAIN[i], input });
            let spread = Spread::ALL[(turn + i) % Spread::ALL.len()];
            pair.check(&Ragged { codec, axis, spread, cols: 72, dtype: PLAIN[1 - i] });
        }
    }
    let powers = |format: &Format| format.is_block() && format.spec().rules.contains(&ScaleRule::Rceil);
    for format in Format::ALL.into_iter().filter(powers) {
        for axis in [BlockAxis::Row, BlockAxis::Col] {
            PLAIN.into_iter().for_each(|dtype| pair.check(&Unrelated { format, axis, dtype }));
        }
    }
}
