use crate::case::{Case, Outputs, Pads};
use crate::host::HostBlock;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::ops::convert::quantize::{codec, codecs_on_shapes};
use crate::pair::Pair;
use nibble_core::formats::{BlockAxis, Codec, Format, Rounding, ScaleRule};
use nibble_core::ops::{Dequantize, Planes};
use nibble_core::{Agreement, DType, Kernels, Result};

#[derive(Debug)]
struct Decoding {
    codec: Codec,
    axis: BlockAxis,
    rows: usize,
    cols: usize,
    stack: usize,
    input: Input,
    dtype: DType,
}

impl<B: Kernels> Case<B> for Decoding {
    fn agreement(&self) -> Agreement {
        Dequantize::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { codec, axis, rows, cols, stack, dtype, .. } = *self;
        let x = self.input.values(&stream("dequantize"), rows * cols);
        let x = HostBlock::quantize(codec, axis, &x, rows, cols, stack).upload(b)?;
        let mut out = Outputs::default();
        out.tensor(b, "out", &Dequantize { x: &x, dtype }.run(b)?)?;
        Ok(out)
    }
}

/// A case of all code bytes with all scale bytes.
#[derive(Debug)]
struct DecodingAny {
    format: Format,
    axis: BlockAxis,
    dtype: DType,
}

impl<B: Kernels> Case<B> for DecodingAny {
    fn agreement(&self) -> Agreement {
        Dequantize::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (rows, cols) = (128, 320);
        let x = HostBlock::random(self.format, self.axis, rows, cols, &stream("dequantize")).upload(b)?;
        let mut out = Outputs::default();
        out.tensor(b, "out", &Dequantize { x: &x, dtype: self.dtype }.run(b)?)?;
        Ok(out)
    }
}

/// The conformance test of [`Dequantize`].
pub fn dequantize<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (codec, (planes, rows, cols, stack), (i, input)) in codecs_on_shapes(pair.breadth()) {
        let axis = match planes {
            Planes::Rows => BlockAxis::Row,
            Planes::Cols => BlockAxis::Col,
            Planes::Tiles if codec.format().spec().tiles => BlockAxis::Tile,
            Planes::Tiles | Planes::Both => continue,
        };
        pair.check(&Decoding { codec, axis, rows, cols, stack, input, dtype: PLAIN[i % 2] });
    }
    // The sizes have several tiles in both dimensions, rows longer than a kernel processes at once, and lengths that are multiples of
    // neither.
    let large = [
        (Format::E4m3, BlockAxis::Row, 5, 2500, 1),
        (Format::E4m3, BlockAxis::Row, 5, 2504, 1),
        (Format::E5m2, BlockAxis::Tile, 2 * 150, 1100, 2),
        (Format::E4m3, BlockAxis::Col, 1040, 392, 1),
        (Format::Mxfp4, BlockAxis::Col, 1056, 390, 1),
        (Format::Mxfp4, BlockAxis::Row, 3, 2496, 1),
        (Format::Mxfp4, BlockAxis::Row, 9, 7168, 1),
        (Format::E4m3, BlockAxis::Row, 9, 5120, 1),
        (Format::E4m3, BlockAxis::Col, 37, 4096, 1),
        (Format::E4m3, BlockAxis::Tile, 2 * 64, 2048, 2),
        (Format::Mxfp6E3m2, BlockAxis::Row, 37, 2496, 1),
        (Format::Mxfp6E2m3, BlockAxis::Col, 384, 392, 1),
        (Format::Mxfp8E5m2, BlockAxis::Row, 20, 2504, 1),
        (Format::Mxint8, BlockAxis::Col, 256, 320, 1),
        (Format::Nvfp4, BlockAxis::Tile, 2 * 152, 1104, 2),
        (Format::Nvfp4, BlockAxis::Col, 256, 264, 1),
        (Format::Nvfp4In128, BlockAxis::Row, 33, 2112, 1),
        (Format::Nvfp4In128, BlockAxis::Col, 384, 264, 1),
        (Format::Hif4, BlockAxis::Row, 33, 2112, 1),
        (Format::Hif4, BlockAxis::Col, 320, 264, 1),
        (Format::E4m3Tensor, BlockAxis::Col, 256, 136, 1),
        (Format::E5m2Row, BlockAxis::Row, 18, 1032, 1),
    ];
    for (format, axis, rows, cols, stack) in large {
        let rules = format.spec().rules;
        let rule = if rules.contains(&ScaleRule::Rceil) { ScaleRule::Rceil } else { rules[0] };
        let (codec, input) = (codec(format, rule, Rounding::NearestEven), Input::Outliers);
        PLAIN.into_iter().for_each(|dtype| {
            pair.check(&Decoding { codec, axis, rows, cols, stack, input, dtype });
        });
    }
    // If scales are powers of two, every byte is a valid scale record; otherwise some bytes are not.
    let powers = |f: &Format| f.is_block() && f.spec().rules.contains(&ScaleRule::Rceil);
    for format in Format::ALL.into_iter().filter(powers) {
        for axis in [BlockAxis::Row, BlockAxis::Col] {
            PLAIN.into_iter().for_each(|dtype| pair.check(&DecodingAny { format, axis, dtype }));
        }
    }
}
