use crate::case::{Case, Outputs, Pads};
use crate::host::{HostBlock, plain};
use crate::input::Input;
use crate::ops::convert::quantize::{codec, ragged_values};
use crate::pair::Pair;
use crate::shapes::{MoeShape, RaggedRows, Spread, WIDTHS};
use nibble_core::formats::{BlockAxis, Format, Rounding, ScaleRule};
use nibble_core::ops::{Emit, Planes, Swiglu, SwigluBackward};
use nibble_core::{Agreement, Backend, DType, Groups, Kernels, Operand, Result};

/// The rows of a case, and their division into groups.
#[derive(Debug, Clone, Copy)]
struct SwigluRows {
    /// The spread of rows over groups; `None` for dense rows.
    spread: Option<Spread>,
    rows: usize,
    /// Number of columns of `a`; h has twice as many.
    f: usize,
    dtype: DType,
    input: Input,
    weighted: bool,
}

impl SwigluRows {
    /// The rows and groups of the case; dense rows are one group without padding.
    fn ragged(&self) -> RaggedRows {
        match self.spread {
            Some(spread) => RaggedRows::of(spread, 4, self.rows, 128),
            None => RaggedRows::new(&[self.rows], 1),
        }
    }

    fn groups<B: Backend>(&self, b: &B) -> Result<Option<Groups<B>>> {
        self.spread.map(|_| self.ragged().upload(b)).transpose()
    }

    fn weight<B: Backend>(&self, b: &B, pads: Pads) -> Result<Option<B::Buf<f32>>> {
        let weight = || ragged_values(Input::Normal, "swiglu.weight", &self.ragged(), 1, pads);
        self.weighted.then(|| b.upload(&weight())).transpose()
    }

    fn plain<B: Backend>(
        &self,
        b: &B,
        name: &str,
        cols: usize,
        pads: Pads,
    ) -> Result<nibble_core::Tensor<B>> {
        let rows = self.ragged();
        plain(b, self.dtype, &ragged_values(self.input, name, &rows, cols, pads), rows.capacity, cols)
    }
}

#[derive(Debug)]
struct Forward {
    rows: SwigluRows,
    a: Emit,
    save: bool,
}

impl<B: Kernels> Case<B> for Forward {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        Swiglu::<B>::AGREEMENT
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let h = self.rows.plain(b, "swiglu.h", 2 * self.rows.f, pads)?;
        let (weight, groups) = (self.rows.weight(b, pads)?, self.rows.groups(b)?);
        let save_h = self.save.then(|| codec(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven));
        let made =
            Swiglu { h: &h, weight: weight.as_ref(), groups: groups.as_ref(), a: self.a, save_h }.run(b)?;
        let mut out = Outputs::default();
        out.emitted(b, "a", &made.a)?;
        if made.a.rows.is_some() {
            out.require_zero_pads("a.rows", &self.rows.ragged().is_valid());
        }
        if let Some(saved) = &made.h {
            // `a` is zero in the padding; the values of h's padding are not guaranteed.
            out.block(b, "h", saved, Some(&self.rows.ragged().is_valid()))?;
        }
        Ok(out)
    }
}

/// Widths of 1/16 of the expert widths of real models.
fn widths() -> [usize; 4] {
    MoeShape::ALL.map(|s| s.scaled(16, 8).f)
}

fn block(format: Format, rule: ScaleRule, planes: Planes) -> Emit {
    Emit::block(codec(format, rule, Rounding::NearestEven), planes)
}

/// All spreads of rows with several kinds of values, and all kinds of values on dense rows.
fn all_rows() -> Vec<SwigluRows> {
    let mut all = Vec::new();
    let dtypes = crate::ops::PLAIN;
    for (i, input) in Input::ALL.into_iter().enumerate() {
        let (f, dtype) = (widths()[i % 4], dtypes[i % 2]);
        all.push(SwigluRows {
            spread: None,
            rows: [1, 7, 130][i % 3],
            f,
            dtype,
            input,
            weighted: i % 2 == 0,
        });
    }
    for (i, spread) in Spread::ALL.into_iter().enumerate() {
        for input in [Input::Normal, Input::NonFinite] {
            let (f, dtype) = (widths()[i % 3], dtypes[(i + 1) % 2]);
            all.push(SwigluRows { spread: Some(spread), rows: 200, f, dtype, input, weighted: i % 3 > 0 });
        }
    }
    // There are whole tiles in BF16, for kernels that write all results at once, and a width that no block length divides.
    for (i, input) in Input::ALL.into_iter().enumerate() {
        let spread = [None, Some(Spread::Zipf)][i % 2];
        all.push(SwigluRows { spread, rows: 140, f: 384, dtype: DType::Bf16, input, weighted: i % 3 > 0 });
        for f in [37, 80] {
            all.push(SwigluRows {
                spread,
                rows: 70,
                f,
                dtype: dtypes[i / 2 % 2],
                input,
                weighted: i % 3 > 0,
            });
        }
    }
    // The widths are those of real models, with tiles of few rows.
    let (dtype, input, weighted) = (DType::Bf16, Input::HeavyTailed, true);
    all.extend(WIDTHS.map(|f| SwigluRows { spread: None, rows: 5, f, dtype, input, weighted }));
    all
}

/// The conformance test of [`Swiglu`].
pub fn swiglu<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let emits = [
        Emit::Plain(DType::F32),
        Emit::Plain(DType::Bf16),
        block(Format::E4m3, ScaleRule::Amax, Planes::Rows),
        block(Format::E4m3, ScaleRule::Rceil, Planes::Rows),
        block(Format::E4m3, ScaleRule::Amax, Planes::Both),
        block(Format::E4m3, ScaleRule::Rceil, Planes::Both),
        block(Format::E4m3, ScaleRule::Rceil, Planes::Cols),
        block(Format::E5m2, ScaleRule::Rceil, Planes::Both),
        block(Format::Mxfp4, ScaleRule::Rceil, Planes::Rows),
    ];
    for (i, rows) in all_rows().into_iter().enumerate() {
        for (j, a) in emits.into_iter().enumerate() {
            pair.check(&Forward { rows, a, save: (i + j) % 2 == 0 });
        }
    }
}

#[derive(Debug)]
struct Backward {
    rows: SwigluRows,
    /// Whether h is saved in MXFP4 row blocks instead of a plain tensor.
    saved: bool,
    dh: Emit,
    a: Option<Emit>,
}

impl<B: Kernels> Case<B> for Backward {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        SwigluBackward::<B>::AGREEMENT
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let (rows, cols) = (self.rows.ragged(), 2 * self.rows.f);
        let h = if self.saved {
            let x = ragged_values(self.rows.input, "swiglu.h", &rows, cols, Pads::Zero);
            let codec = codec(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven);
            let mut h = HostBlock::quantize(codec, BlockAxis::Row, &x, rows.capacity, cols, 1);
            if pads == Pads::Poison {
                h.poison_pads(&rows.is_valid());
            }
            Operand::Block(h.upload(b)?)
        } else {
            Operand::Plain(self.rows.plain(b, "swiglu.h", cols, pads)?)
        };
        let da = self.rows.plain(b, "swiglu.da", self.rows.f, pads)?;
        let (weight, groups) = (self.rows.weight(b, pads)?, self.rows.groups(b)?);
        let grads = SwigluBackward {
            h: &h,
            da: &da,
            weight: weight.as_ref(),
            groups: groups.as_ref(),
            dh: self.dh,
            a: self.a,
        }
        .run(b)?;
        let mut out = Outputs::default();
        out.emitted(b, "dh", &grads.dh)?;
        let a_rows = grads.a.as_ref().and_then(|a| a.rows.as_ref());
        if let Some(a) = &grads.a {
            out.emitted(b, "a", a)?;
        }
        out.buf(b, "dweight", &grads.dweight, None)?;
        for (name, made) in [("dh.rows", grads.dh.rows.as_ref()), ("a.rows", a_rows)] {
            if made.is_some() {
                out.require_zero_pads(name, &rows.is_valid());
            }
        }
        out.require_zero_pads("dweight", &rows.is_valid());
        Ok(out)
    }
}

/// The conformance test of [`SwigluBackward`].
pub fn swiglu_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let emits = [
        (Emit::Plain(DType::F32), Emit::Plain(DType::F32)),
        (Emit::Plain(DType::Bf16), Emit::Plain(DType::Bf16)),
        (
            block(Format::E4m3, ScaleRule::Rceil, Planes::Both),
            block(Format::E4m3, ScaleRule::Rceil, Planes::Cols),
        ),
        (
            block(Format::E4m3, ScaleRule::Amax, Planes::Both),
            block(Format::E4m3, ScaleRule::Amax, Planes::Cols),
        ),
        (block(Format::E4m3, ScaleRule::Rceil, Planes::Rows), Emit::Plain(DType::Bf16)),
    ];
    for (i, rows) in all_rows().into_iter().enumerate() {
        for (j, (dh, a)) in emits.into_iter().enumerate() {
            // The cases alternate between plain and saved h; widths for which each has its own kernel run both.
            let by_turns = (i + j) % 2 == 0;
            let forms = match rows.f {
                384 | 2048.. => vec![false, true],
                _ => vec![by_turns],
            };
            for saved in forms {
                pair.check(&Backward { rows, saved, dh, a: Some(a) });
                if i % 3 == 0 {
                    pair.check(&Backward { rows, saved, dh, a: None });
                }
            }
        }
    }
}
