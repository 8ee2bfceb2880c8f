use super::PLAIN;
use super::quantize::codec;
use crate::conformance::{Case, Outputs, Pads, Pair, in_place};
use crate::host::{HostBlock, plain};
use crate::input::{Input, stream};
use nibble_core::formats::{BlockAxis, Codec, Format, Rounding, ScaleRule};
use nibble_core::ops::{Counts, HeadCodecs, HeadLoss, HeadLossGrad};
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
    /// Type of the weight's gradient and whether it is added to; none for losses alone.
    grad: Option<(DType, bool)>,
    input: Input,
}

impl Head {
    /// The weight `[v, d]`, and `[d, v]`.
    fn weights<B: Kernels>(&self, b: &B) -> Result<[Operand<B>; 2]> {
        let Self { d, vocab, dtype, input, codecs, .. } = *self;
        let w = input.values(&stream("head.w"), vocab * d);
        let wt: Vec<f32> = (0..d * vocab).map(|i| w[i % vocab * d + i / vocab]).collect();
        let operand = |w: &[f32], codec: Option<Codec>, rows, cols| match codec {
            None => plain(b, dtype, w, rows, cols).map(Operand::Plain),
            Some(codec) => {
                let axis = if codec.format().spec().tiles { BlockAxis::Tile } else { BlockAxis::Row };
                let tiles = HostBlock::quantize(codec, axis, w, rows, cols, 1);
                tiles.upload(b).map(Operand::Block)
            }
        };
        Ok([operand(&w, codecs.fprop_x, vocab, d)?, operand(&wt, codecs.dgrad_dy, d, vocab)?])
    }

    /// Some negative, one past the vocabulary.
    fn targets(&self) -> Vec<i32> {
        let bits = stream("head.targets");
        let target = |t: usize| match t {
            0 => self.vocab as i32,
            t => (bits.u32_at(t as u64) as usize % (self.vocab + 2)) as i32 - 2,
        };
        (0..self.tokens).map(target).collect()
    }
}

impl<B: Kernels> Case<B> for Head {
    fn agreement(&self) -> Agreement {
        if self.codecs.is_plain() {
            HeadLoss::<B>::agreement(self.dtype)
        } else {
            HeadLoss::<B>::QUANTIZED_AGREEMENT
        }
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { tokens, d, vocab, shards, chunk, dtype, codecs, input, .. } = *self;
        let x = plain(b, dtype, &input.values(&stream("head.x"), tokens * d), tokens, d)?;
        let [w, wt] = self.weights(b)?;
        let targets = b.upload(&self.targets())?;
        let mut out = Outputs::default();
        let made = match self.grad {
            None => {
                let codecs = HeadCodecs { fprop_x: codecs.fprop_x, ..HeadCodecs::default() };
                HeadLoss { x: &x, w: &w, codecs, targets: &targets, shards, chunk, grad: None }.run(b)?
            }
            Some((type_of_dw, accumulate)) => {
                let before = Input::Normal.values(&stream("head.dw"), shards * vocab * d);
                let before = plain(b, type_of_dw, &before, shards * vocab, d)?;
                let (dw, made) = in_place(b, &before, |dw| {
                    let grad = Some(HeadLossGrad { wt: &wt, scale: 0.013, dw, accumulate });
                    HeadLoss { x: &x, w: &w, codecs, targets: &targets, shards, chunk, grad }.run(b)
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
        // How many codes are not zero depends on the last bits of the logits; how many gradients are finite does not.
        if let Some(Counts(counts)) = &made.dlogits_counts {
            let non_finite = b.download(counts)?[Counts::<B>::NON_FINITE];
            out.values("non-finite blocks of dlogits", vec![non_finite]);
        }
        Ok(out)
    }
}

/// Conformance of [`HeadLoss`], and the refusal of odd chunks and of shards that do not divide the tokens.
pub fn head_loss<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let inputs = if pair.strict { &Input::ALL[..] } else { &[Input::Normal, Input::Integers][..] };
    // Several shards a chunk, one, parts of one; odd shards.
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
                let codecs = HeadCodecs::default();
                pair.check(&Head { tokens, d, vocab, shards, chunk, dtype, codecs, grad, input });
            }
        }
    }
    // What tensor cores take: shards cut into chunks that are not multiples of a tile, several shards a chunk, a large vocabulary.
    let all = [(DType::F32, false), (DType::F32, true), (DType::Bf16, false), (DType::Bf16, true)];
    for (tokens, d, vocab, shards, chunk) in
        [(200, 64, 512, 1, 48), (256, 64, 520, 4, 128), (24, 16, 32_768, 1, 8)]
    {
        for grad in all.map(Some) {
            let (dtype, input, codecs) = (DType::Bf16, Input::Normal, HeadCodecs::default());
            pair.check(&Head { tokens, d, vocab, shards, chunk, dtype, codecs, grad, input });
        }
    }
    // Rows that one, two and eight multiprocessors hold, more of them than there are such groups. A CPU has no such ways.
    let rows = if pair.strict { &[][..] } else { &[(600, 4096), (300, 32_776), (80, 151_936)][..] };
    for &(tokens, vocab) in rows {
        for grad in [None, Some((DType::Bf16, false))] {
            let (dtype, input, codecs) = (DType::Bf16, Input::Normal, HeadCodecs::default());
            pair.check(&Head { tokens, d: 16, vocab, shards: 1, chunk: tokens, dtype, codecs, grad, input });
        }
    }
    quantized(pair);
    let good = Head {
        tokens: 12,
        d: 8,
        vocab: 9,
        shards: 2,
        chunk: 4,
        dtype: DType::F32,
        codecs: HeadCodecs::default(),
        grad: None,
        input: Input::Normal,
    };
    let columns = HeadCodecs { fprop_x: None, dgrad_dy: None, ..all_of(ScaleRule::Rceil) };
    let gradients = Head { codecs: columns, grad: Some((DType::F32, false)), ..good };
    for (argument, bad) in [
        ("chunk", Head { chunk: 3, ..good }),
        ("chunk", Head { chunk: 0, ..good }),
        ("shards", Head { shards: 5, ..good }),
        ("chunk", Head { chunk: 64, ..gradients }),
        ("tokens of a shard", Head { chunk: 128, ..gradients }),
    ] {
        pair.check_refused(&bad, |e| matches!(e, Error::Shape { argument: a, .. } if *a == argument));
    }
}

/// E4M3 everywhere.
fn all_of(rule: ScaleRule) -> HeadCodecs {
    let codec = Some(codec(Format::E4m3, rule, Rounding::NearestEven));
    HeadCodecs { fprop_x: codec, dgrad_dy: codec, wgrad_dy: codec, wgrad_x: codec }
}

/// Formats whose codes are multiplied as other numbers: everywhere, and by rows alone where a column would have one scale.
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
        all(Format::Hif4, ScaleRule::Amax),
        HeadCodecs { wgrad_dy: None, wgrad_x: None, ..lines },
    ]
}

/// Operands in FP8: all of them and those of some products; shards that are cut and several a chunk, and one that ends inside a
/// block; widths and vocabularies that do, and such as no tensor core takes.
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
    for (i, (tokens, d, vocab, shards, chunk)) in sizes.into_iter().enumerate() {
        for (j, codecs) in [powers, floats, mixed, rows, columns].into_iter().enumerate() {
            let grad = grads[(i + j) % grads.len()];
            let (dtype, input) = (if (i, j) == (0, 0) { DType::F32 } else { DType::Bf16 }, Input::Normal);
            pair.check(&Head { tokens, d, vocab, shards, chunk, dtype, codecs, grad, input });
        }
    }
    for grad in grads {
        let (dtype, codecs, input) = (DType::Bf16, powers, Input::Normal);
        pair.check(&Head {
            tokens: 256,
            d: 128,
            vocab: 1024,
            shards: 1,
            chunk: 128,
            dtype,
            codecs,
            grad,
            input,
        });
    }
    let sizes = [(512, 64, 264, 2, 128), (256, 72, 75, 1, 128)];
    for (i, codecs) in lowered().into_iter().enumerate() {
        for (j, (tokens, d, vocab, shards, chunk)) in sizes.into_iter().enumerate() {
            let (grad, dtype, input) = (grads[(i + j) % grads.len()], DType::Bf16, Input::Normal);
            pair.check(&Head { tokens, d, vocab, shards, chunk, dtype, codecs, grad, input });
        }
    }
    if !pair.strict {
        return;
    }
    // NaN and infinities reach the losses, the gradients and the counts.
    let (grad, input) = (Some((DType::F32, false)), Input::NonFinite);
    let (tokens, d, vocab, shards, chunk, dtype) = (128, 64, 64, 1, 128, DType::Bf16);
    pair.check(&Head { tokens, d, vocab, shards, chunk, dtype, codecs: powers, grad, input });
}
