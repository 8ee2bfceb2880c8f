use crate::case::{Case, Outputs, Pads, in_place};
use crate::host::{HostBlock, plain};
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::ops::convert::quantize::codec;
use crate::pair::Pair;
use nibble_core::formats::{BlockAxis, Codec, Format, Purpose, Rounding, ScaleRule, Stream, hadamard};
use nibble_core::ops::{
    Control, Counts, Hadamard, HeadCodecs, HeadLoss, HeadLossGrad, HeadRandom, Random, Stored,
};
use nibble_core::{Agreement, DType, Error, Kernels, Operand, Result};

#[derive(Debug, Clone, Copy)]
struct Head {
    tokens: usize,
    d: usize,
    vocab: usize,
    shards: usize,
    chunk: usize,
    dtype: DType,
    codecs: HeadCodecs,
    /// Type of the weight's gradient, and whether the gradient is accumulated; `None` if only the loss is computed.
    grad: Option<(DType, bool)>,
    values: Values,
    /// Codecs of the weight and of its transpose, if they differ from those of the other operand.
    weights: Option<[Option<Codec>; 2]>,
    /// Random bits and transforms; `None` if there are none.
    drawn: Option<Drawn>,
}

/// The random bits and the transforms of x and of the gradients of the logits.
#[derive(Debug, Clone, Copy)]
struct Drawn {
    /// Lengths of the transforms in the products that compute the logits, dx and dw.
    transforms: [Option<usize>; 3],
    /// Whether rows have ids that differ from their indices.
    ids: bool,
}

/// The buffers of [`Drawn`].
struct DrawnBuffers<B: Kernels> {
    step: B::Buf<u32>,
    row_id: Option<B::Buf<i32>>,
}

impl Drawn {
    fn buffers<B: Kernels>(&self, b: &B, tokens: usize) -> Result<DrawnBuffers<B>> {
        let ids: Vec<i32> = (0..tokens).map(|t| 3 * t as i32 + 5).collect();
        Ok(DrawnBuffers { step: b.upload(&[9])?, row_id: self.ids.then(|| b.upload(&ids)).transpose()? })
    }

    /// The stream of the signs of a product.
    fn signs(product: &str) -> Stream {
        Stream { purpose: Purpose::Sign, ..stream(&format!("head.{product}")) }
    }

    /// The argument of the op. Products whose operand has no codec have no transform.
    fn random<'a, B: Kernels>(
        &self,
        codecs: HeadCodecs,
        DrawnBuffers { step, row_id }: &'a DrawnBuffers<B>,
    ) -> HeadRandom<'a, B> {
        let bits = |name| Some(Random { step: Some(step), ..stream(name).into() });
        let of = |at: usize, product, codec: Option<Codec>| {
            let len = self.transforms[at].filter(|_| codec.is_some())?;
            Some(Hadamard { len, signs: Self::signs(product), step: None, first: 0 })
        };
        HeadRandom {
            x: bits("head.random.x"),
            dlogits: bits("head.random.dlogits"),
            fprop: of(0, "fprop", codecs.fprop_x),
            dgrad: of(1, "dgrad", codecs.dgrad_dy),
            wgrad: of(2, "wgrad", codecs.wgrad_dy),
            row_id: row_id.as_ref(),
        }
    }
}

/// How the values of x and of the weight are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Values {
    /// Values of this kind, with a separate stream for each tensor.
    Of(Input),
    /// Quantization changes x, but the logits are sums of few bits, which are exact in any order on any tensor core. So everything before
    /// the last GEMMs has the same bits on all backends. A check of equal bits is stronger than any bound on quantized gradients.
    ExactLogits,
}

use Values::{ExactLogits, Of};

/// Columns of x, as `(every, first)`, that have the largest magnitude of their row and block.
const LARGEST_OF_X: (usize, usize) = (8, 3);
/// Columns of the weight, as `(every, first)`, that have the largest magnitude of their row and block.
const LARGEST_OF_W: (usize, usize) = (8, 5);

impl Head {
    /// The largest magnitude of a block, chosen so that the block's scale is a power of two with any rule. This magnitude is a power of two
    /// times the element's largest number, here 7 or 6.
    fn largest(&self) -> f32 {
        let element = self.codecs.fprop_x.and_then(|codec| codec.format().spec().element);
        let largest = element.map_or(7.0, |element| element.max());
        largest * 2.0f32.powi(2 - largest.log2().floor() as i32)
    }

    /// x `[t, d]`. For exact logits, x holds integers from 17 up to 28 or 24, which take five bits, one bit more than any element format
    /// has here.
    fn x(&self) -> Vec<f32> {
        let (bits, len) = (stream("head.x"), self.tokens * self.d);
        match self.values {
            Of(input) => input.values(&bits, len),
            ExactLogits => integers(&bits, (len, self.d), LARGEST_OF_X, 4.0 * self.largest(), |random| {
                17.0 + (random % (4.0 * self.largest() - 17.0) as u32) as f32
            }),
        }
    }

    /// The weight `[v, d]`. For exact logits, it holds 0, 1, 2 and a few 7s or 6s, times a power of two for which the logits spread by 1 to
    /// 3.
    fn w(&self) -> Vec<f32> {
        let (bits, len) = (stream("head.w"), self.vocab * self.d);
        match self.values {
            Of(input) => input.values(&bits, len),
            ExactLogits => {
                let small = |random: u32| (random % 3) as f32;
                let w = integers(&bits, (len, self.d), LARGEST_OF_W, self.largest(), small);
                w.into_iter().map(|w| w / 256.0).collect()
            }
        }
    }

    /// The weight as `[v, d]` and as `[d, v]`.
    fn weights<B: Kernels>(&self, b: &B) -> Result<[Operand<B>; 2]> {
        let Self { d, vocab, dtype, .. } = *self;
        let w = self.w();
        let wt: Vec<f32> = (0..d * vocab).map(|i| w[i % vocab * d + i / vocab]).collect();
        let operand = |w: &[f32], of: Option<Codec>, rows, cols, (at, product)| match of {
            None => plain(b, dtype, w, rows, cols).map(Operand::Plain),
            Some(of_operand) => {
                let codec = codec(of_operand.format(), of_operand.rule(), Rounding::NearestEven);
                let transform = self.drawn.and_then(|drawn| drawn.transforms[at]);
                let tiles = codec.format().spec().tiles && transform.is_none();
                let axis = if tiles { BlockAxis::Tile } else { BlockAxis::Row };
                let mut w = w.to_vec();
                if let Some(len) = transform {
                    let mut signs = vec![0.0; cols];
                    hadamard::fill_signs(&Drawn::signs(product), 0, &mut signs);
                    w.chunks_exact_mut(cols).try_for_each(|row| hadamard::rht(row, &signs, len))?;
                }
                HostBlock::quantize(codec, axis, &w, rows, cols, 1).upload(b).map(Operand::Block)
            }
        };
        let [of_w, of_wt] = self.weight_codecs();
        Ok([operand(&w, of_w, vocab, d, (0, "fprop"))?, operand(&wt, of_wt, d, vocab, (1, "dgrad"))?])
    }

    fn weight_codecs(&self) -> [Option<Codec>; 2] {
        self.weights.unwrap_or([self.codecs.fprop_x, self.codecs.dgrad_dy])
    }

    /// The required agreement of the gradient GEMM for `result`.
    fn of_gradient<B: Kernels>(&self, result: &str) -> Agreement {
        let (codecs, [_, wt]) = (self.codecs, self.weight_codecs());
        let (axis, operands) = match result {
            "dx" => (BlockAxis::Row, [codecs.dgrad_dy, wt]),
            _ => (BlockAxis::Col, [codecs.wgrad_dy, codecs.wgrad_x]),
        };
        let [dlogits, beside] = operands.map(|codec| Stored::made(codec, axis, self.dtype));
        HeadLoss::<B>::gradient_agreement(dlogits, beside)
    }

    /// Target ids: some are negative, and one is past the vocabulary.
    fn targets(&self) -> Vec<i32> {
        let bits = stream("head.targets");
        let target = |t: usize| match t {
            0 => self.vocab as i32,
            t => (bits.u32_at(t as u64) as usize % (self.vocab + 2)) as i32 - 2,
        };
        (0..self.tokens).map(target).collect()
    }
}

/// Values of random signs in rows of `d`. Columns `(every, first)` have this magnitude; the other values are computed from 31 random bits.
fn integers(
    bits: &Stream,
    (len, d): (usize, usize),
    (every, first): (usize, usize),
    largest: f32,
    magnitude: impl Fn(u32) -> f32,
) -> Vec<f32> {
    let value = |i: usize| {
        let random = bits.u32_at(i as u64);
        let magnitude = if i % d % every == first { largest } else { magnitude(random >> 1) };
        if random & 1 == 0 { magnitude } else { -magnitude }
    };
    (0..len).map(value).collect()
}

impl<B: Kernels> Case<B> for Head {
    fn agreement(&self) -> Agreement {
        if self.codecs.is_plain() && self.weight_codecs() == [None, None] {
            HeadLoss::<B>::agreement(self.dtype)
        } else {
            HeadLoss::<B>::QUANTIZED_AGREEMENT
        }
    }

    fn owed(&self, result: &str) -> Agreement {
        match (self.values, result) {
            (Of(_), _) => Case::<B>::agreement(self),
            (ExactLogits, "dx" | "dw") => self.of_gradient::<B>(result),
            (ExactLogits, _) => Agreement::Bitwise,
        }
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { tokens, d, vocab, shards, chunk, dtype, codecs, .. } = *self;
        let x = plain(b, dtype, &self.x(), tokens, d)?;
        let [w, wt] = self.weights(b)?;
        let targets = b.upload(&self.targets())?;
        let drawn = self.drawn.map(|drawn| Ok::<_, Error>((drawn, drawn.buffers(b, tokens)?))).transpose()?;
        let random = |codecs| match &drawn {
            Some((drawn, buffers)) => drawn.random(codecs, buffers),
            None => HeadRandom::default(),
        };
        let mut out = Outputs::default();
        let made = match self.grad {
            None => {
                let codecs = HeadCodecs { fprop_x: codecs.fprop_x, ..HeadCodecs::default() };
                let (random, targets) = (random(codecs), &targets);
                HeadLoss { x: &x, w: &w, codecs, random, targets, shards, chunk, grad: None }.run(b)?
            }
            Some((type_of_dw, accumulate)) => {
                let before = Input::Normal.values(&stream("head.dw"), shards * vocab * d);
                let before = plain(b, type_of_dw, &before, shards * vocab, d)?;
                let control = &b.upload(&Control::with_loss_scale(0.013))?;
                let (dw, made) = in_place(b, &before, |dw| {
                    let grad = Some(HeadLossGrad { wt: &wt, control, dw, accumulate });
                    let (random, targets) = (random(codecs), &targets);
                    HeadLoss { x: &x, w: &w, codecs, random, targets, shards, chunk, grad }.run(b)
                })?;
                out.tensor(b, "dw", &dw)?;
                made
            }
        };
        out.buf(b, "shard_nats", &made.shard_nats, None)?;
        out.buf(b, "bad_ids", &made.bad_ids, None)?;
        if let Some(dx) = &made.dx {
            out.tensor(b, "dx", dx)?;
        }
        if let Some(Counts(counts)) = &made.x_counts {
            out.buf(b, "x_counts", counts, None)?;
        }
        if let Some(Counts(counts)) = &made.dlogits_counts {
            match self.values {
                ExactLogits => out.buf(b, "dlogits_counts", counts, None)?,
                // The number of nonzero codes depends on the last bits of the logits, but the number of non-finite blocks does not.
                Of(_) => {
                    let non_finite = b.download(counts)?[Counts::<B>::NON_FINITE];
                    out.values("non-finite blocks of dlogits", vec![non_finite]);
                }
            }
        }
        Ok(out)
    }
}

/// The conformance test of [`HeadLoss`]. The test also checks that odd chunks, and shards that do not divide the tokens, are refused.
pub fn head_loss<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let inputs = if pair.strict { &Input::ALL[..] } else { &[Input::Normal, Input::Integers][..] };
    // A chunk has several shards, one shard, or a part of a shard; some shards have odd lengths.
    let sizes = [
        (1, 8, 5, 1, 2),
        (64, 32, 64, 4, 32),
        (66, 20, 33, 2, 512),
        (130, 64, 300, 2, 24),
        (96, 24, 1030, 1, 64),
    ];
    let grads = [None, Some((DType::F32, false)), Some((DType::F32, true)), Some((DType::Bf16, true))];
    for dtype in PLAIN {
        for (i, &input) in inputs.iter().enumerate() {
            for (j, (tokens, d, vocab, shards, chunk)) in sizes.into_iter().enumerate() {
                let grad = grads[(i + j) % grads.len()];
                let (codecs, values) = (HeadCodecs::default(), Of(input));
                pair.check(&Head {
                    tokens,
                    d,
                    vocab,
                    shards,
                    chunk,
                    dtype,
                    codecs,
                    grad,
                    values,
                    weights: None,
                    drawn: None,
                });
            }
        }
    }
    // These cases are for tensor cores: shards split into chunks that are not multiples of a tile, several shards per chunk, and a large
    // vocabulary.
    let all = [(DType::F32, false), (DType::F32, true), (DType::Bf16, false), (DType::Bf16, true)];
    for (tokens, d, vocab, shards, chunk) in
        [(200, 64, 512, 1, 48), (256, 64, 520, 4, 128), (24, 16, 32_768, 1, 8)]
    {
        for grad in all.map(Some) {
            let (dtype, values, codecs) = (DType::Bf16, Of(Input::Normal), HeadCodecs::default());
            pair.check(&Head {
                tokens,
                d,
                vocab,
                shards,
                chunk,
                dtype,
                codecs,
                grad,
                values,
                weights: None,
                drawn: None,
            });
        }
    }
    // One, two or eight multiprocessors of a GPU hold a row, and there are more rows than such groups. A CPU needs no such cases.
    let rows = if pair.strict { &[][..] } else { &[(600, 4096), (300, 32_776), (80, 151_936)][..] };
    for &(tokens, vocab) in rows {
        for grad in [None, Some((DType::Bf16, false))] {
            let (dtype, values, codecs) = (DType::Bf16, Of(Input::Normal), HeadCodecs::default());
            pair.check(&Head {
                tokens,
                d: 16,
                vocab,
                shards: 1,
                chunk: tokens,
                dtype,
                codecs,
                grad,
                values,
                weights: None,
                drawn: None,
            });
        }
    }
    quantized(pair);
    drawn(pair);
    let good = Head {
        tokens: 12,
        d: 8,
        vocab: 9,
        shards: 2,
        chunk: 4,
        dtype: DType::F32,
        codecs: HeadCodecs::default(),
        grad: None,
        values: Of(Input::Normal),
        weights: None,
        drawn: None,
    };
    let columns = HeadCodecs { fprop_x: None, dgrad_dy: None, ..all_of(ScaleRule::Rceil) };
    let gradients = Head { codecs: columns, grad: Some((DType::F32, false)), ..good };
    let stochastic = codec(Format::Mxfp4, ScaleRule::Rceil, Rounding::Stochastic);
    let lines = HeadCodecs { fprop_x: Some(stochastic), ..HeadCodecs::default() };
    let transformed = |len, ids| Some(Drawn { transforms: [None, None, Some(len)], ids });
    for (argument, bad) in [
        ("random", Head { codecs: lines, ..good }),
        ("random.row_id", Head { tokens: 256, chunk: 128, drawn: transformed(16, false), ..gradients }),
        ("random.wgrad.len", Head { tokens: 256, chunk: 128, drawn: transformed(24, true), ..gradients }),
        ("random.wgrad.len", Head { tokens: 40, chunk: 128, drawn: transformed(16, true), ..gradients }),
        ("chunk", Head { chunk: 3, ..good }),
        ("chunk", Head { chunk: 0, ..good }),
        ("shards", Head { shards: 5, ..good }),
        ("chunk", Head { chunk: 64, ..gradients }),
        ("tokens of a shard", Head { chunk: 128, ..gradients }),
    ] {
        pair.check_refused(&bad, |e| matches!(e, Error::Shape { argument: a, .. } if *a == argument));
    }
}

/// Codecs with E4M3 for all operands.
fn all_of(rule: ScaleRule) -> HeadCodecs {
    let codec = Some(codec(Format::E4m3, rule, Rounding::NearestEven));
    HeadCodecs { fprop_x: codec, dgrad_dy: codec, wgrad_dy: codec, wgrad_x: codec }
}

/// Codecs of formats whose codes are decoded before the GEMM: for all operands, or only for row blocks if a column would have a single
/// scale.
fn lowered() -> Vec<HeadCodecs> {
    let all = |format, rule| {
        let codec = Some(codec(format, rule, Rounding::NearestEven));
        HeadCodecs { fprop_x: codec, dgrad_dy: codec, wgrad_dy: codec, wgrad_x: codec }
    };
    let lines = all(Format::E4m3Row, ScaleRule::Amax);
    vec![
        all(Format::Mxfp8E4m3, ScaleRule::Rceil),
        all(Format::Mxfp4, ScaleRule::Rceil),
        all(Format::Nvfp4, ScaleRule::Amax),
        all(Format::Nvfp4In128, ScaleRule::Amax),
        all(Format::Hif4, ScaleRule::Amax),
        HeadCodecs { wgrad_dy: None, wgrad_x: None, ..lines },
    ]
}

/// GEMMs of two formats, including the weight's: all multiplied as FP8; as BF16 or F32 with a plain operand; and each GEMM differently.
fn two_formats() -> [(HeadCodecs, [Option<Codec>; 2]); 3] {
    use Format::{E4m3, Mxfp4, Mxfp6E2m3, Mxfp8E4m3, Mxfp8E5m2};
    let of = |format| Some(codec(format, ScaleRule::Rceil, Rounding::NearestEven));
    let codecs = |fprop_x, dgrad_dy, wgrad_dy, wgrad_x| HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x };
    [
        (codecs(of(Mxfp4), of(Mxfp6E2m3), of(E4m3), of(Mxfp4)), [of(E4m3), of(E4m3)]),
        (codecs(None, None, of(Mxfp8E4m3), None), [of(Mxfp8E4m3), of(Mxfp4)]),
        (codecs(of(E4m3), of(Mxfp8E5m2), None, of(E4m3)), [None, of(Mxfp4)]),
    ]
}

/// Tests FP8 operands in all GEMMs or in some. Shards are split, several per chunk, or end inside a block. Widths and vocabularies end
/// inside a block, or do not fit tensor cores. Tokens are also F32, whose gradients are not rounded.
fn quantized<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let (powers, floats) = (all_of(ScaleRule::Rceil), all_of(ScaleRule::Amax));
    let mixed = HeadCodecs { wgrad_dy: powers.wgrad_dy, wgrad_x: powers.wgrad_x, ..floats };
    let rows = HeadCodecs { wgrad_dy: None, wgrad_x: None, ..powers };
    let columns = HeadCodecs { fprop_x: None, dgrad_dy: None, ..powers };
    let grads = [
        Some((DType::F32, false)),
        Some((DType::F32, true)),
        Some((DType::Bf16, false)),
        Some((DType::Bf16, true)),
        None,
    ];
    let sizes = [
        (512, 128, 256, 2, 128),
        (512, 64, 520, 4, 256),
        (300, 64, 384, 1, 128),
        (256, 72, 200, 1, 512),
        (128, 20, 33, 1, 128),
    ];
    let values = ExactLogits;
    for (i, (tokens, d, vocab, shards, chunk)) in sizes.into_iter().enumerate() {
        for (j, codecs) in [powers, floats, mixed, rows, columns].into_iter().enumerate() {
            let grad = grads[(i + j) % grads.len()];
            let dtype = if i == j { DType::F32 } else { DType::Bf16 };
            pair.check(&Head {
                tokens,
                d,
                vocab,
                shards,
                chunk,
                dtype,
                codecs,
                grad,
                values,
                weights: None,
                drawn: None,
            });
        }
    }
    // These logits are as large as those of a model.
    for grad in grads {
        let (tokens, d, vocab, shards, chunk) = (256, 128, 1024, 1, 128);
        let (dtype, codecs, values) = (DType::Bf16, powers, Of(Input::Normal));
        pair.check(&Head {
            tokens,
            d,
            vocab,
            shards,
            chunk,
            dtype,
            codecs,
            grad,
            values,
            weights: None,
            drawn: None,
        });
    }
    let sizes = [(512, 64, 264, 2, 128), (256, 72, 75, 1, 128)];
    for (i, codecs) in lowered().into_iter().enumerate() {
        for (j, (tokens, d, vocab, shards, chunk)) in sizes.into_iter().enumerate() {
            let (grad, dtype) = (grads[(i + j) % 4], if j == 0 { DType::F32 } else { DType::Bf16 });
            pair.check(&Head {
                tokens,
                d,
                vocab,
                shards,
                chunk,
                dtype,
                codecs,
                grad,
                values,
                weights: None,
                drawn: None,
            });
        }
    }
    for (i, (codecs, weights)) in two_formats().into_iter().enumerate() {
        for (j, (tokens, d, vocab, shards, chunk)) in sizes.into_iter().enumerate() {
            let (grad, dtype) = (grads[(i + j) % 4], if j == 0 { DType::F32 } else { DType::Bf16 });
            let weights = Some(weights);
            pair.check(&Head {
                tokens,
                d,
                vocab,
                shards,
                chunk,
                dtype,
                codecs,
                grad,
                values,
                weights,
                drawn: None,
            });
        }
    }
    if !pair.strict {
        return;
    }
    // NaN and infinities reach the losses, the gradients and the counts.
    let (grad, values) = (Some((DType::F32, false)), Of(Input::NonFinite));
    let (tokens, d, vocab, shards, chunk, dtype) = (128, 64, 64, 1, 128, DType::Bf16);
    pair.check(&Head {
        tokens,
        d,
        vocab,
        shards,
        chunk,
        dtype,
        codecs: powers,
        grad,
        values,
        weights: None,
        drawn: None,
    });
}

/// Tests random bits and transforms: in all products, in some, of rows with and without ids; in chunks of several shards, of one shard and
/// of a part of a shard.
fn drawn<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let all = |format, rule, rounding| {
        let codec = Some(codec(format, rule, rounding));
        HeadCodecs { fprop_x: codec, dgrad_dy: codec, wgrad_dy: codec, wgrad_x: codec }
    };
    let mxfp4 = all(Format::Mxfp4, ScaleRule::Rceil, Rounding::Stochastic);
    let nearest = all(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven);
    let e4m3 = all(Format::E4m3, ScaleRule::Rceil, Rounding::Stochastic);
    let nvfp4 = all(Format::Nvfp4In128, ScaleRule::Amax, Rounding::Stochastic);
    let mixed = HeadCodecs { dgrad_dy: mxfp4.dgrad_dy, wgrad_dy: mxfp4.wgrad_dy, ..nearest };
    let rows = HeadCodecs { wgrad_dy: None, wgrad_x: None, ..e4m3 };
    let none = [None; 3];
    let cases = [
        (mxfp4, none, ExactLogits),
        (e4m3, none, ExactLogits),
        (nvfp4, [None, None, Some(128)], ExactLogits),
        (mixed, [None, Some(64), Some(32)], ExactLogits),
        (nearest, [None, Some(16), Some(128)], ExactLogits),
        (rows, [None, Some(128), None], ExactLogits),
        (mxfp4, [Some(64), Some(128), Some(64)], Of(Input::Normal)),
        (nearest, [Some(32), None, Some(16)], Of(Input::Normal)),
    ];
    // With ids, several shards; without, one.
    let sizes = [(512, 64, 256, 4, 256, true), (768, 128, 384, 2, 128, true), (384, 64, 256, 1, 256, false)];
    let grads = [Some((DType::F32, false)), Some((DType::F32, true)), Some((DType::Bf16, true)), None];
    for (i, (codecs, transforms, values)) in cases.into_iter().enumerate() {
        for (j, (tokens, d, vocab, shards, chunk, ids)) in sizes.into_iter().enumerate() {
            let grad = grads[(i + j) % grads.len()];
            let dtype = if (i + j) % 5 == 0 { DType::F32 } else { DType::Bf16 };
            let (weights, drawn) = (None, Some(Drawn { transforms, ids }));
            pair.check(&Head {
                tokens,
                d,
                vocab,
                shards,
                chunk,
                dtype,
                codecs,
                grad,
                values,
                weights,
                drawn,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_core::formats::ScalePlane;

    /// Checks that the scales of x and of the weight are powers of two, that every format changes x, and that every partial sum of a logit
    /// fits the 13 bits that an FP8 tensor core accumulates.
    #[test]
    fn exact_logits_are_exact() {
        let codecs = [all_of(ScaleRule::Rceil), all_of(ScaleRule::Amax)].into_iter().chain(lowered());
        for codecs in codecs {
            let (tokens, d, vocab) = (64, 128, 64);
            let head = Head {
                tokens,
                d,
                vocab,
                shards: 1,
                chunk: 128,
                dtype: DType::Bf16,
                codecs,
                grad: None,
                values: ExactLogits,
                weights: None,
                drawn: None,
            };
            let codec = codecs.fprop_x.unwrap();
            let (x, w) = (head.x(), head.w());
            for (values, rows, axis) in [(&x, tokens, BlockAxis::Row), (&w, vocab, BlockAxis::Row)] {
                let q = HostBlock::quantize(codec, axis, values, rows, d, 1);
                let plane = ScalePlane { kind: codec.scale_kind(), bytes: &q.scales };
                for i in 0..plane.len() {
                    let scale = plane.kind.multiplier(plane.get(i), 0, codec.format().spec().block.min(d));
                    assert_eq!(scale.to_bits() << 9, 0, "{codec:?}: a scale of {scale} is no power of two");
                }
            }
            assert!(x.iter().any(|x| x % 2.0 != 0.0), "odd numbers of five bits are none of the elements'");
            // Every format rounds x to even numbers, or to multiples of four or more.
            let even = |x: f32| (x / 2.0).round() * 2.0;
            for (x, w) in x.chunks(d).flat_map(|x| w.chunks(d).map(move |w| (x, w))) {
                let mut sum = 0.0f32;
                for (x, w) in x.iter().zip(w) {
                    sum += even(*x) / 2.0 * (w * 256.0);
                    assert!(sum.abs() < 4096.0, "{sum}");
                }
                assert!(sum.abs() * 2.0 / 256.0 < 20.0, "a logit that leaves nothing to the others");
            }
        }
    }
}
