//! Tests of operands that are quantized only for GEMMs. Instead of codes, a backend may write the numbers that GEMMs read, which must equal
//! those computed from the codes.

use super::{INPUTS, Spread, codec, codecs, matrix};
use crate::case::{Case, Outputs, Pads};
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use half::bf16;
use nibble_core::formats::hadamard::LENGTHS;
use nibble_core::formats::{BlockAxis, Codec, Format, LIFTED_BLOCK, Purpose, Rounding, Scale, Stream};
use nibble_core::ops::{Dequantize, Hadamard, Numbers, Planes, Quantize, Stored, Taken};
use nibble_core::{Agreement, BlockScaled, DType, Kernels, Operand, Result};

#[derive(Debug)]
struct ForProducts {
    codec: Codec,
    planes: Planes,
    numbers: Numbers,
    spread: Option<Spread>,
    rows: usize,
    cols: usize,
    len: Option<usize>,
    dtype: DType,
    input: Input,
}

impl<B: Kernels> Case<B> for ForProducts {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        Quantize::<B>::AGREEMENT
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let Self { codec, planes, numbers, cols, len, .. } = *self;
        let (x, groups) = matrix(b, self.spread, (self.rows, cols), self.dtype, self.input, pads)?;
        let signs = Stream { purpose: Purpose::Sign, ..stream("quantize.signs") };
        let hadamard = len.map(|len| Hadamard { len, signs, step: None, first: 0 });
        let random = codec.draws().then(|| stream("quantize.random").into());
        let op = Quantize { groups: groups.as_ref(), random, hadamard, ..Quantize::new(&x, codec, planes) };
        let made = Quantize { only_for: Some(numbers), ..op }.run(b)?;
        let mut out = Outputs::default();
        for (name, plane) in [("rows", &made.rows), ("cols", &made.cols)] {
            if let Some(Operand::Block(q)) = plane {
                taken(b, &mut out, name, q, numbers)?;
            }
        }
        if let Some(counts) = &made.counts {
            out.counts(b, "out", counts)?;
        }
        Ok(out)
    }
}

/// The numbers that GEMMs of these types read from a quantized operand, and its tensor scale.
fn taken<B: Kernels>(
    b: &B,
    out: &mut Outputs,
    name: &str,
    q: &BlockScaled<B>,
    numbers: Numbers,
) -> Result<()> {
    out.shape(name, &[q.rows, q.cols, q.axis as usize, q.format as usize]);
    if let Some(scales) = &q.tensor_scale {
        out.buf(b, &format!("{name} of the tensor"), scales, None)?;
    }
    match (q.taken, numbers.takes(Stored::block(q))) {
        (Taken::AsIs, Taken::Decoded) => {
            let ones = q.tensor_scale.as_ref().map(|_| b.upload(&vec![1.0; q.rows])).transpose()?;
            let bare = BlockScaled { tensor_scale: ones, ..q.clone() };
            out.tensor(b, name, &Dequantize { x: &bare, dtype: DType::Bf16 }.run(b)?)
        }
        (Taken::Decoded, _) => {
            let bytes = b.download(&q.codes)?;
            let bits = bytes.chunks_exact(2).map(|two| bf16::from_le_bytes([two[0], two[1]]));
            out.shape(name, &[q.rows, q.cols]);
            out.values(name, bits.collect::<Vec<_>>());
            Ok(())
        }
        (Taken::AsIs, Taken::Lifted) => lifted_codes(b, out, name, q),
        (Taken::Lifted, _) => {
            let (format, rule) = Format::LIFTED;
            let q = BlockScaled { format, rule, taken: Taken::AsIs, ..q.clone() };
            put(out, name, b.download(&q.codes)?, q.records(b)?);
            Ok(())
        }
        (Taken::AsIs, Taken::AsIs) => out.block(b, name, q, None),
    }
}

/// Lifts codes one at a time, as the definition of a lift says.
fn lifted_codes<B: Kernels>(b: &B, out: &mut Outputs, name: &str, q: &BlockScaled<B>) -> Result<()> {
    let (lines, len) = if q.axis == BlockAxis::Col { (q.cols, q.rows) } else { (q.rows, q.cols) };
    let lift = q.format.lift(q.rule, q.axis).unwrap_or_else(|| panic!("{} is lifted", q.format));
    let (spec, packed, records) = (q.format.spec(), b.download(&q.codes)?, q.records(b)?);
    let (bits, block, per_line) = (spec.code_bits as usize, spec.block, len.div_ceil(spec.block));
    let line_bytes = q.format.row_code_bytes(len);
    let code = |line: usize, i: usize| {
        let at = |byte: usize| {
            let in_line = i * bits / 8 + byte;
            if in_line < line_bytes { u16::from(packed[line * line_bytes + in_line]) } else { 0 }
        };
        ((at(0) | at(1) << 8) >> (i * bits % 8)) as u8 & ((1u16 << bits) - 1) as u8
    };
    let (mut codes, mut targets) = (Vec::new(), Vec::new());
    for line in 0..lines {
        let scales = &records[line * per_line..(line + 1) * per_line];
        for first in (0..len).step_by(LIFTED_BLOCK) {
            let run = first..len.min(first + LIFTED_BLOCK);
            let target =
                lift.target(scales[first / block..run.end.div_ceil(block)].iter().map(|s| s.0 as u8));
            targets.push(Scale::byte(target));
            codes.extend(run.map(|i| lift.code(code(line, i), scales[i / block].0 as u8, target).0));
        }
    }
    put(out, name, codes, targets);
    Ok(())
}

fn put(out: &mut Outputs, name: &str, codes: Vec<u8>, scales: Vec<Scale>) {
    out.values(&format!("{name}.codes"), codes);
    out.values(&format!("{name}.scales"), scales.into_iter().map(|scale| scale.0).collect::<Vec<_>>());
}

/// Tests every format whose codes GEMMs do not read directly, with every rule and for both kinds of GEMM; shapes and kinds of values
/// rotate.
pub(super) fn for_products<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let roundings = [Rounding::NearestEven, Rounding::Stochastic, Rounding::NearestAway];
    // The shapes have whole tiles of a GPU's kernels in both dimensions, rows that end inside a tile, and groups.
    let shapes = [
        (None, 37, 1920),
        (Some(Spread::Zipf), 300, 256),
        (None, 96, 136),
        (None, 256, 320),
        (Some(Spread::EmptyGroups), 200, 96),
        (Some(Spread::Zipf), 150, 896),
    ];
    let kinds = [Numbers::Bf16, Numbers::Fp8].into_iter().flat_map(|numbers| {
        codecs().map(move |of| (numbers, of.format(), of.rule())).filter(|(numbers, format, rule)| {
            numbers.takes(Stored { format: *format, rule: *rule, axis: BlockAxis::Row }) != Taken::AsIs
        })
    });
    // There is no FP8 GEMM for a format that is not lifted.
    let kinds = kinds.filter(|(numbers, format, rule)| {
        *numbers == Numbers::Bf16 || format.lift(*rule, BlockAxis::Row).is_some()
    });
    for (i, (numbers, format, rule)) in kinds.enumerate() {
        for (j, rounding) in roundings.into_iter().enumerate() {
            let codec = codec(format, rule, rounding);
            let check = |planes, (spread, rows, cols), len, (dtype, input)| {
                pair.check(&ForProducts { codec, planes, numbers, spread, rows, cols, len, dtype, input });
            };
            for (k, planes) in [Planes::Rows, Planes::Cols, Planes::Both].into_iter().enumerate() {
                for (l, dtype) in PLAIN.into_iter().enumerate() {
                    let turn = i + j + k + l;
                    if !pair.breadth().either(true, turn % 3 == 0) {
                        continue;
                    }
                    check(planes, shapes[turn % shapes.len()], None, (dtype, INPUTS[turn % INPUTS.len()]));
                }
            }
            for (k, len) in LENGTHS.into_iter().enumerate() {
                if !pair.breadth().either(true, (i + j + k) % 3 == 0) {
                    continue;
                }
                let (planes, dtype) = ([Planes::Cols, Planes::Rows][k % 2], PLAIN[(i + j + k / 2) % 2]);
                // The last tile is short, but does not end inside a transform block.
                let shape = match planes {
                    Planes::Rows => ([None, Some(Spread::Zipf)][(j + k) % 2], 200, 384),
                    _ if j % 2 == 0 => (None, 256 + len, 200),
                    _ => (Some(Spread::Zipf), 256, 200),
                };
                check(planes, shape, Some(len), (dtype, INPUTS[(i + j + k) % INPUTS.len()]));
            }
        }
    }
}
