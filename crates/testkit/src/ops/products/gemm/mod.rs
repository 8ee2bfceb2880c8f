mod squares;

use crate::breadth::Breadth;
use crate::case::{Case, Outputs, Pads, in_place};
use crate::host::{HostBlock, plain};
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::ops::convert::quantize::codec;
use crate::pair::Pair;
use crate::shapes::{MoeShape, RaggedRows, Spread};
use nibble_core::formats::{BlockAxis, Format, Rounding, ScaleKind, ScaleRule};
use nibble_core::ops::{self, BF16_AGREEMENT, Gemm, GroupedGemm, GroupedWgrad, Numbers};
use nibble_core::{Agreement, DType, Groups, Kernels, Operand, Result};

/// The format of one operand.
#[derive(Debug, Clone, Copy, PartialEq)]
enum CaseOperand {
    Plain(DType),
    Block(Format, ScaleRule, BlockAxis),
}

use BlockAxis::{Col, Row, Tile};
use Format::{
    E4m3, E4m3Row, E4m3Tensor, E5m2, E5m2Row, E5m2Tensor, Hif4, Mxfp4, Mxfp6E2m3, Mxfp8E4m3, Mxint8, Nvfp4,
    Nvfp4In128,
};
use ScaleRule::{Amax, Rceil, TensorAmax};

/// A matrix in the format of an operand; `pads` marks the padding rows and says whether they hold NaN bytes or zeros.
struct Matrix<'a> {
    name: &'a str,
    input: Input,
    rows: usize,
    cols: usize,
    stack: usize,
    ragged: Option<(&'a RaggedRows, Pads)>,
}

impl Matrix<'_> {
    fn upload<B: Kernels>(&self, b: &B, stored: CaseOperand) -> Result<Operand<B>> {
        let (rows, cols) = (self.rows, self.cols);
        let mut x = self.input.values(&stream(self.name), rows * cols);
        // By contract, column blocks are zero after the end of each group, so only row blocks can be poisoned.
        let poisoned = self.ragged.filter(|(_, pads)| *pads == Pads::Poison).map(|(ragged, _)| ragged);
        if let Some((ragged, _)) = self.ragged {
            ragged.fill_pads(&mut x, cols, 0.0);
        }
        match stored {
            CaseOperand::Plain(dtype) => {
                if let Some(ragged) = poisoned {
                    ragged.fill_pads(&mut x, cols, f32::NAN);
                }
                Ok(Operand::Plain(plain(b, dtype, &x, rows, cols)?))
            }
            CaseOperand::Block(format, rule, axis) => {
                // Integers are exact only with power-of-two scales; F32 scales can be powers of two.
                let powers = format.spec().rules.contains(&Rceil);
                let exact = self.input == Input::Integers && rule == Amax && powers;
                let codec = codec(format, if exact { Rceil } else { rule }, Rounding::NearestEven);
                let mut q = HostBlock::quantize(codec, axis, &x, rows, cols, self.stack);
                if exact {
                    q = q.with_f32_scales();
                }
                if let (Some(ragged), Row) = (poisoned, axis) {
                    q.poison_pads(&ragged.is_valid());
                }
                Ok(Operand::Block(q.upload(b)?))
            }
        }
    }
}

/// Whether all scales of an operand may be powers of two.
fn may_be_exact(stored: CaseOperand) -> bool {
    match stored {
        CaseOperand::Plain(_) => true,
        CaseOperand::Block(format, rule, _) => {
            format.spec().rules.contains(&Rceil)
                && [ScaleKind::E8M0, ScaleKind::F32].contains(&format.scale_kind(rule))
        }
    }
}

impl CaseOperand {
    /// The description of the operand that GEMMs use.
    fn factor(self) -> ops::Stored {
        match self {
            Self::Plain(dtype) => ops::Stored::plain(dtype),
            Self::Block(format, rule, axis) => ops::Stored { format, rule, axis },
        }
    }

    /// A format with its default rule, in row blocks, column blocks, or as a weight.
    fn usual(format: Format, axis: BlockAxis) -> Self {
        match format.spec().default_rule() {
            None if format == Format::F32 => Self::Plain(DType::F32),
            None => Self::Plain(DType::Bf16),
            Some(rule) if axis == Tile && !format.spec().tiles => Self::Block(format, rule, Row),
            Some(rule) => Self::Block(format, rule, axis),
        }
    }
}

/// All pairs of formats with blocks along these axes, each with a turn number. Each format has every turn number with some other format.
fn every_pair(a: BlockAxis, b: BlockAxis) -> Vec<(usize, (CaseOperand, CaseOperand))> {
    let with = |(i, of_a): (usize, Format)| {
        let stored =
            |(j, of_b): (usize, Format)| (i + j, (CaseOperand::usual(of_a, a), CaseOperand::usual(of_b, b)));
        Format::ALL.into_iter().enumerate().map(stored).collect::<Vec<_>>()
    };
    Format::ALL.into_iter().enumerate().flat_map(with).collect()
}

/// Which of three cases a pair of formats runs. The exhaustive suite runs all; the daily suite runs the case that the turn number selects.
/// Pairs with a plain operand always run all cases, because each of their tolerances applies to few pairs.
fn in_turn<T>(
    breadth: Breadth,
    (turn, operands): (usize, [CaseOperand; 2]),
    cases: [T; 3],
) -> impl Iterator<Item = T> {
    let plain = operands.iter().any(|of| matches!(of, CaseOperand::Plain(_)));
    let is_taken = move |at: usize| breadth.either(true, plain || at == turn % 3);
    cases.into_iter().enumerate().filter(move |(at, _)| is_taken(*at)).map(|(_, case)| case)
}

/// The required agreement of a GEMM between backends: bitwise on integers whose sums are exact. For block formats, it is the agreement of
/// the multiplied numbers, which are F32 if either operand is F32.
fn owed(agreement: Agreement, operands: [CaseOperand; 2], out: DType, input: Input) -> Agreement {
    let [a, b] = operands.map(CaseOperand::factor);
    let numbers = Numbers::of(a, b);
    let is_bf16 = [a, b].iter().any(|x| x.format == Format::Bf16) || out == DType::Bf16;
    match numbers {
        _ if input == Input::Integers && operands.into_iter().all(may_be_exact) => Agreement::Bitwise,
        Numbers::F32 if is_bf16 => BF16_AGREEMENT,
        Numbers::F32 => agreement,
        Numbers::Fp8 | Numbers::Bf16 => numbers.agreement(),
    }
}

/// The kinds of values for a pair: all kinds if strict, otherwise the kinds whose sums stay finite.
fn inputs(strict: bool) -> &'static [Input] {
    if strict { &Input::ALL } else { &Input::TAME }
}

#[derive(Debug, Clone, Copy)]
struct DenseProduct {
    a: CaseOperand,
    b: CaseOperand,
    m: usize,
    n: usize,
    k: usize,
    out: DType,
    input: Input,
}

/// Pairs of plain operands, of one type and of two types.
fn plain_pairs() -> Vec<(CaseOperand, CaseOperand)> {
    let with = |a| PLAIN.map(|b| (CaseOperand::Plain(a), CaseOperand::Plain(b)));
    PLAIN.into_iter().flat_map(with).collect()
}

/// The pairs of formats that recipes use in fprop and dgrad.
fn pairs() -> Vec<(CaseOperand, CaseOperand)> {
    let mut pairs = plain_pairs();
    for (a, b) in [
        ((E4m3, Amax), (E4m3, Amax, Tile)),
        ((E4m3, Rceil), (E4m3, Rceil, Tile)),
        ((E4m3, Rceil), (E4m3, Amax, Tile)),
        ((E4m3, Rceil), (E4m3, Rceil, Row)),
        ((E5m2, Rceil), (E4m3, Rceil, Tile)),
        ((E5m2, Amax), (E4m3, Amax, Tile)),
        ((E5m2, Amax), (E5m2, Rceil, Tile)),
        ((E5m2Row, Amax), (E4m3Row, Amax, Row)),
        ((E4m3, Amax), (E5m2, Amax, Row)),
        ((E4m3, Rceil), (E5m2, Amax, Tile)),
        ((E5m2Row, Rceil), (E5m2Row, Amax, Row)),
        ((Mxfp4, Rceil), (Mxfp4, Rceil, Row)),
        ((Mxfp8E4m3, Rceil), (Mxfp8E4m3, Rceil, Row)),
        ((Mxint8, Rceil), (Mxfp6E2m3, Rceil, Row)),
        ((Mxfp4, Rceil), (Mxfp8E4m3, Rceil, Row)),
        ((Nvfp4, TensorAmax), (Nvfp4, TensorAmax, Tile)),
        ((Nvfp4, Amax), (Nvfp4, TensorAmax, Row)),
        ((Nvfp4In128, Amax), (Nvfp4In128, Amax, Row)),
        ((Hif4, Amax), (Hif4, Amax, Row)),
        ((E4m3Row, Amax), (E4m3Row, Amax, Row)),
        ((E4m3Tensor, TensorAmax), (E4m3Tensor, TensorAmax, Tile)),
        ((E5m2Tensor, TensorAmax), (E4m3, Rceil, Tile)),
        ((E4m3Tensor, TensorAmax), (E5m2Tensor, TensorAmax, Tile)),
    ] {
        pairs.push((CaseOperand::Block(a.0, a.1, Row), CaseOperand::Block(b.0, b.1, b.2)));
    }
    pairs
}

impl<B: Kernels> Case<B> for DenseProduct {
    fn agreement(&self) -> Agreement {
        owed(Gemm::<B>::AGREEMENT, [self.a, self.b], self.out, self.input)
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { m, n, k, input, .. } = *self;
        let matrix = |name, rows| Matrix { name, input, rows, cols: k, stack: 1, ragged: None };
        let (x, w) = (matrix("gemm.a", m).upload(b, self.a)?, matrix("gemm.b", n).upload(b, self.b)?);
        let mut out = Outputs::default();
        out.tensor(b, "out", &Gemm { a: &x, b: &w, out: self.out }.run(b)?)?;
        Ok(out)
    }
}

/// The conformance test of [`Gemm`].
pub fn gemm<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    squares::gemm(pair);
    // The GEMMs are those of a router with few experts: its logits, and the gradient of its input.
    for (a, b) in plain_pairs() {
        for (m, n, k) in [(320, 8, 256), (320, 256, 8)] {
            for out in PLAIN {
                pair.check(&DenseProduct { a, b, m, n, k, out, input: Input::Normal });
            }
        }
    }
    let mut shapes =
        vec![(1, 1, 32), (7, 13, 64), (70, 33, 160), (129, 65, 128), (300, 40, 512), (300, 40, 512)];
    shapes.extend(MoeShape::ALL[..3].iter().map(|s| s.scaled(16, 8)).map(|s| (20, s.f, s.d)));
    let (pairs, inputs) = (pairs(), inputs(pair.strict));
    for [of, input, i] in pair.breadth().cross([pairs.len(), inputs.len(), shapes.len()]) {
        let ((a, b), (m, n, k)) = (pairs[of], shapes[i]);
        pair.check(&DenseProduct { a, b, m, n, k, out: PLAIN[i % 2], input: inputs[input] });
    }
    for (a, b) in pairs {
        // The contraction lengths, some odd and some even, end inside a block.
        for k in [33, 48, 104, 201] {
            pair.check(&DenseProduct { a, b, m: 5, n: 9, k, out: DType::F32, input: Input::Normal });
        }
    }
    // The sizes fit tensor cores, and one contraction is odd. Some rows have much larger values than others; a lift rounds the blocks with
    // small values.
    for (turn, (a, b)) in every_pair(Row, Tile) {
        let cases = [(Input::Normal, 160), (Input::HeavyTailed, 320), (Input::Normal, 131)];
        for (input, k) in in_turn(pair.breadth(), (turn, [a, b]), cases) {
            pair.check(&DenseProduct { a, b, m: 33, n: 24, k, out: PLAIN[(turn + k) % 2], input });
        }
    }
}

#[derive(Debug)]
struct Grouped {
    x: CaseOperand,
    w: CaseOperand,
    spread: Spread,
    rows: usize,
    n: usize,
    k: usize,
    out: DType,
    input: Input,
}

/// Plain GEMMs need no alignment; with block formats, groups start at multiples of 128.
fn align(operands: [CaseOperand; 2]) -> usize {
    if operands.iter().all(|x| matches!(x, CaseOperand::Plain(_))) { 1 } else { 128 }
}

const GROUPS: usize = 5;
/// Number of rows of balanced groups for which the middle of the capacity is not padding, so that errors there are detected.
const MIDDLE_IN_A_GROUP: usize = 1000;

impl<B: Kernels> Case<B> for Grouped {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        owed(GroupedGemm::<B>::AGREEMENT, [self.x, self.w], self.out, self.input)
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let Self { n, k, input, .. } = *self;
        // The capacity is one row more than needed even without alignment, so that there is padding.
        let mut ragged = RaggedRows::of(self.spread, GROUPS, self.rows, align([self.x, self.w]));
        ragged.pad_to(ragged.capacity + align([self.x, self.w]));
        let x = Matrix {
            name: "grouped.x",
            input,
            rows: ragged.capacity,
            cols: k,
            stack: 1,
            ragged: Some((&ragged, pads)),
        };
        let w = Matrix { name: "grouped.w", input, rows: GROUPS * n, cols: k, stack: GROUPS, ragged: None };
        let (x, w, groups) = (x.upload(b, self.x)?, w.upload(b, self.w)?, ragged.upload(b)?);
        let mut out = Outputs::default();
        out.tensor(b, "out", &GroupedGemm { x: &x, w: &w, groups: &groups, out: self.out }.run(b)?)?;
        out.require_zero_pads("out", &ragged.is_valid());
        Ok(out)
    }
}

/// The conformance test of [`GroupedGemm`].
pub fn grouped_gemm<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    squares::grouped_gemm(pair);
    let widths = MoeShape::ALL.map(|s| s.scaled(32, 8)).map(|s| (s.f, s.d));
    let pairs = pairs();
    for [i, j, integers] in pair.breadth().cross([pairs.len(), Spread::ALL.len(), 2]) {
        let ((x, w), spread, (f, d)) = (pairs[i], Spread::ALL[j], widths[(i + j) % 3]);
        // The cases alternate between the first and the second GEMM of an expert.
        let (n, k, out) = if j % 2 == 0 { (2 * f, d, DType::Bf16) } else { (d, f, DType::F32) };
        let input = [Input::Normal, Input::Integers][integers];
        pair.check(&Grouped { x, w, spread, rows: 100, n, k, out, input });
    }
    for (x, w) in pairs {
        let (n, k) = (33, 160);
        for &input in inputs(pair.strict) {
            pair.check(&Grouped { x, w, spread: Spread::Zipf, rows: 40, n, k, out: DType::F32, input });
        }
        for k in [80, 131] {
            let (spread, out, input) = (Spread::Zipf, DType::F32, Input::Normal);
            pair.check(&Grouped { x, w, spread, rows: 40, n, k, out, input });
        }
    }
    for (turn, (x, w)) in every_pair(Row, Tile) {
        let taking_turns = Spread::ALL[turn % Spread::ALL.len()];
        let cases = [
            (Spread::Balanced, MIDDLE_IN_A_GROUP, 24, 160),
            (taking_turns, 40, 24, 160),
            (taking_turns, 40, 7, 131),
        ];
        for (spread, rows, n, k) in in_turn(pair.breadth(), (turn, [x, w]), cases) {
            pair.check(&Grouped { x, w, spread, rows, n, k, out: PLAIN[turn % 2], input: Input::Normal });
        }
    }
}

#[derive(Debug)]
struct Wgrad {
    dy: CaseOperand,
    x: CaseOperand,
    spread: Spread,
    rows: usize,
    n: usize,
    k: usize,
    grad: DType,
    accumulate: bool,
    input: Input,
    /// Whether the groups are shards: groups of known, equal length, without padding.
    shards: bool,
}

impl<B: Kernels> Case<B> for Wgrad {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        owed(GroupedWgrad::<B>::AGREEMENT, [self.dy, self.x], self.grad, self.input)
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let Self { n, k, input, accumulate, .. } = *self;
        let mut ragged = RaggedRows::of(self.spread, GROUPS, self.rows, align([self.dy, self.x]));
        match self.shards {
            true => ragged.trim(),
            false => ragged.pad_to(ragged.capacity + align([self.dy, self.x])),
        }
        let matrix = |name, cols| Matrix {
            name,
            input,
            rows: ragged.capacity,
            cols,
            stack: 1,
            ragged: Some((&ragged, pads)),
        };
        let (dy, x) = (matrix("wgrad.dy", n).upload(b, self.dy)?, matrix("wgrad.x", k).upload(b, self.x)?);
        let groups = match self.shards {
            true => Groups::uniform(b, GROUPS, self.rows / GROUPS, align([self.dy, self.x]), 0)?,
            false => ragged.upload(b)?,
        };
        let grad = Input::Integers.values(&stream("wgrad.grad"), GROUPS * n * k);
        let grad = plain(b, self.grad, &grad, GROUPS * n, k)?;
        let (grad, ()) = in_place(b, &grad, |grad| {
            GroupedWgrad { dy: &dy, x: &x, groups: &groups, grad, accumulate }.run(b)
        })?;
        let mut out = Outputs::default();
        out.tensor(b, "grad", &grad)?;
        Ok(out)
    }
}

/// The conformance test of [`GroupedWgrad`].
pub fn grouped_wgrad<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let mut stored = plain_pairs();
    for (dy, x) in [
        ((E4m3, Amax), (E4m3, Amax)),
        ((E4m3, Rceil), (E4m3, Rceil)),
        ((E5m2, Rceil), (E4m3, Amax)),
        ((E5m2, Rceil), (E4m3, Rceil)),
        ((E5m2, Amax), (E4m3, Amax)),
        ((E4m3, Rceil), (E5m2, Amax)),
        ((E5m2, Amax), (E5m2, Rceil)),
        ((E5m2Tensor, TensorAmax), (E4m3Tensor, TensorAmax)),
        ((Mxfp4, Rceil), (Mxfp4, Rceil)),
        ((Mxfp8E4m3, Rceil), (Mxfp8E4m3, Rceil)),
        ((Nvfp4, TensorAmax), (Nvfp4, TensorAmax)),
        ((Nvfp4In128, Amax), (Nvfp4In128, Amax)),
        ((Hif4, Amax), (Hif4, Amax)),
        ((E4m3Tensor, TensorAmax), (E4m3Tensor, TensorAmax)),
        ((E4m3Row, Amax), (E4m3Row, Amax)),
        ((E5m2Row, Rceil), (E4m3Row, Amax)),
        ((E4m3Tensor, TensorAmax), (E5m2Tensor, TensorAmax)),
        ((E4m3Row, Amax), (E5m2Row, Rceil)),
    ] {
        stored.push((CaseOperand::Block(dy.0, dy.1, Col), CaseOperand::Block(x.0, x.1, Col)));
    }
    let widths = MoeShape::ALL.map(|s| s.scaled(32, 8)).map(|s| (s.f, s.d));
    for [i, j, integers] in pair.breadth().cross([stored.len(), Spread::ALL.len(), 2]) {
        let ((dy, x), spread, (n, k)) = (stored[i], Spread::ALL[j], widths[(i + j) % 3]);
        let (grad, accumulate) = (PLAIN[(i + j / 2) % 2], j % 2 == 0);
        let input = [Input::Normal, Input::Integers][integers];
        pair.check(&Wgrad { dy, x, spread, rows: 200, n, k, grad, accumulate, input, shards: false });
    }
    for (i, (dy, x)) in stored.into_iter().enumerate() {
        if matches!(x, CaseOperand::Plain(_)) {
            let (spread, accumulate, input) = (Spread::Balanced, i % 2 == 0, Input::Normal);
            for grad in PLAIN {
                pair.check(&Wgrad {
                    dy,
                    x,
                    spread,
                    rows: 320,
                    n: 8,
                    k: 256,
                    grad,
                    accumulate,
                    input,
                    shards: false,
                });
            }
        }
        // The shards are so long, and the gradient so small, that a GPU splits the contraction of each shard into several row ranges.
        let (spread, rows, shards) = (Spread::Balanced, GROUPS * 2176, true);
        for (input, grad) in
            [(Input::Normal, DType::Bf16), (Input::Normal, DType::F32), (Input::Integers, DType::F32)]
        {
            let accumulate = i % 2 == 0;
            pair.check(&Wgrad { dy, x, spread, rows, n: 8, k: 32, grad, accumulate, input, shards });
        }
        for (j, &input) in inputs(pair.strict).iter().enumerate() {
            let (spread, accumulate) = (Spread::Zipf, j % 2 == 0);
            for grad in PLAIN {
                pair.check(&Wgrad {
                    dy,
                    x,
                    spread,
                    rows: 90,
                    n: 33,
                    k: 20,
                    grad,
                    accumulate,
                    input,
                    shards: false,
                });
            }
        }
    }
    for (turn, (dy, x)) in every_pair(Col, Col) {
        let taking_turns = Spread::ALL[turn % Spread::ALL.len()];
        let cases = [
            (Spread::Balanced, MIDDLE_IN_A_GROUP, 24, 40),
            (taking_turns, 90, 24, 40),
            (taking_turns, 90, 7, 13),
        ];
        for (spread, rows, n, k) in in_turn(pair.breadth(), (turn, [dy, x]), cases) {
            let (grad, accumulate, input) = (PLAIN[turn % 2], turn % 4 < 2, Input::Normal);
            pair.check(&Wgrad { dy, x, spread, rows, n, k, grad, accumulate, input, shards: false });
        }
    }
}
