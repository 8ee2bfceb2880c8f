use crate::case::{Case, Outputs, Pads};
use crate::host::HostBlock;
use crate::input::{Input, stream};
use crate::ops::convert::quantize::{codec, ragged_values};
use crate::pair::Pair;
use crate::shapes::{MoeShape, RaggedRows, Spread, WIDTHS};
use nibble_core::formats::{BlockAxis, Format, Rounding, ScaleRule};
use nibble_core::ops::Transcode;
use nibble_core::{Agreement, Kernels, Result};

/// The origin of the source's codes and scales.
#[derive(Debug, Clone, Copy)]
enum CodeOrigin {
    /// Values of this kind, quantized with this rule.
    Values(Input, ScaleRule),
    /// Random codes with random scales; the scales of a row differ by up to 24 powers of two.
    Any,
}

#[derive(Debug, Clone, Copy)]
struct Conversion {
    from: Format,
    to: Format,
    axis: BlockAxis,
    rule: ScaleRule,
}

#[derive(Debug)]
struct Dense {
    conversion: Conversion,
    source: CodeOrigin,
    rows: usize,
    cols: usize,
}

impl CodeOrigin {
    fn block(self, from: Format, rows: usize, cols: usize, x: impl FnOnce(Input) -> Vec<f32>) -> HostBlock {
        match self {
            CodeOrigin::Any => HostBlock::random(from, BlockAxis::Row, rows, cols, &stream("transcode")),
            CodeOrigin::Values(input, rule) => {
                let codec = codec(from, rule, Rounding::NearestEven);
                HostBlock::quantize(codec, BlockAxis::Row, &x(input), rows, cols, 1)
            }
        }
    }
}

impl<B: Kernels> Case<B> for Dense {
    fn agreement(&self) -> Agreement {
        Transcode::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (Conversion { from, to, axis, rule }, rows, cols) = (self.conversion, self.rows, self.cols);
        let values = |input: Input| input.values(&stream("transcode"), rows * cols);
        let x = self.source.block(from, rows, cols, values).upload(b)?;
        let made = Transcode { x: &x, to, axis, rule, groups: None }.run(b)?;
        let mut out = Outputs::default();
        out.block(b, "out", &made.out, None)?;
        out.counts(b, "out", &made.counts)?;
        Ok(out)
    }
}

#[derive(Debug)]
struct Ragged {
    conversion: Conversion,
    source: CodeOrigin,
    spread: Spread,
    cols: usize,
}

impl<B: Kernels> Case<B> for Ragged {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        Transcode::<B>::AGREEMENT
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let (Conversion { from, to, axis, rule }, cols) = (self.conversion, self.cols);
        let rows = RaggedRows::of(self.spread, 4, 200, 128);
        let is_valid = rows.is_valid();
        let values = |input| ragged_values(input, "transcode", &rows, cols, Pads::Zero);
        let mut x = self.source.block(from, rows.capacity, cols, values);
        if pads == Pads::Poison {
            x.poison_pads(&is_valid);
        }
        let (x, groups) = (x.upload(b)?, rows.upload(b)?);
        let made = Transcode { x: &x, to, axis, rule, groups: Some(&groups) }.run(b)?;
        let mut out = Outputs::default();
        // Column codes are zero after the end of each group; the values of padding rows are not guaranteed.
        let compared = (axis == BlockAxis::Row).then_some(&is_valid[..]);
        out.block(b, "out", &made.out, compared)?;
        out.counts(b, "out", &made.counts)?;
        Ok(out)
    }
}

/// A case of stacked weights that are converted to 2-D blocks.
#[derive(Debug)]
struct Tiles {
    source: CodeOrigin,
    stack: usize,
    n: usize,
    k: usize,
}

impl<B: Kernels> Case<B> for Tiles {
    fn agreement(&self) -> Agreement {
        Transcode::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (rows, cols) = (self.stack * self.n, self.k);
        let values = |input: Input| input.values(&stream("transcode"), rows * cols);
        let mut x = self.source.block(Format::Mxfp4, rows, cols, values);
        x.stack = self.stack;
        let (x, axis) = (x.upload(b)?, BlockAxis::Tile);
        let made = Transcode { x: &x, to: Format::E4m3, axis, rule: x.rule, groups: None }.run(b)?;
        let mut out = Outputs::default();
        out.block(b, "out", &made.out, None)?;
        let transposed = made.transposed.expect("of tiles both planes are made");
        out.block(b, "transposed", &transposed, None)?;
        out.counts(b, "out", &made.counts)?;
        Ok(out)
    }
}

/// Tests matrices of whole tiles and with all kinds of partial tiles, and scaled-down expert weights of models.
fn tiles<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let of = |input| [ScaleRule::Rceil, ScaleRule::Floor].map(|rule| CodeOrigin::Values(input, rule));
    let sources = Input::ALL.into_iter().flat_map(of).chain([CodeOrigin::Any]);
    for source in sources {
        for (stack, n, k) in [(1, 1, 32), (1, 70, 160), (2, 144, 96), (3, 20, 288), (2, 37, 80), (3, 16, 147)]
        {
            pair.check(&Tiles { source, stack, n, k });
        }
    }
    let source = CodeOrigin::Any;
    for shape in MoeShape::ALL.map(|s| s.scaled(8, 8)) {
        pair.check(&Tiles { source, stack: 4, n: 2 * shape.f, k: shape.d });
        pair.check(&Tiles { source, stack: 4, n: shape.d, k: shape.f });
    }
    for (stack, n, k) in [(1, 256, 256), (2, 384, 448), (2, 130, 640), (1, 0, 64), (2, 3, 0)] {
        pair.check(&Tiles { source, stack, n, k });
    }
}

/// The conformance test of [`Transcode`] with all conversions, exact and inexact, dense and ragged.
pub fn transcode<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    use BlockAxis::{Col, Row};
    use Format::{E4m3, Mxfp4};
    use ScaleRule::{Amax, Ceil, Even, Floor, Rceil};
    let mut cases = Vec::new();
    for axis in [Row, Col] {
        cases.push((Conversion { from: Mxfp4, to: E4m3, axis, rule: Rceil }, vec![Rceil, Floor]));
    }
    cases.push((Conversion { from: E4m3, to: E4m3, axis: Col, rule: Rceil }, vec![Rceil, Ceil]));
    for rule in [Rceil, Floor, Ceil, Even] {
        cases.push((Conversion { from: E4m3, to: Mxfp4, axis: Row, rule }, vec![Amax, Rceil]));
    }
    for (conversion, source_rules) in cases {
        let of = |input: Input| source_rules.iter().map(move |&rule| CodeOrigin::Values(input, rule));
        let values = Input::ALL.into_iter().flat_map(of);
        for (i, source) in values.chain([CodeOrigin::Any]).enumerate() {
            for (rows, cols) in [(1, 32), (70, 160), (130, 96), (35, 104), (3, 33)] {
                pair.check(&Dense { conversion, source, rows, cols });
            }
            let spread = Spread::ALL[i % Spread::ALL.len()];
            pair.check(&Ragged { conversion, source, spread, cols: 96 });
        }
        for spread in Spread::ALL {
            for cols in [160, 48, 131] {
                pair.check(&Ragged { conversion, source: CodeOrigin::Any, spread, cols });
            }
        }
        // The last block is short: it is the only block, follows whole source blocks, or has an odd number of codes.
        for (rows, cols) in [(1, 1), (5, 31), (17, 130), (300, 1000), (129, 2049)] {
            pair.check(&Dense { conversion, source: CodeOrigin::Any, rows, cols });
        }
        pair.check(&Dense { conversion, source: CodeOrigin::Any, rows: 384, cols: 448 });
        for cols in WIDTHS {
            pair.check(&Dense { conversion, source: CodeOrigin::Any, rows: 37, cols });
        }
        pair.check(&Ragged { conversion, source: CodeOrigin::Any, spread: Spread::OneTakesMost, cols: 2048 });
    }
    tiles(pair);
}
