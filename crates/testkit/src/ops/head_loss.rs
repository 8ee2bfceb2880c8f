use super::PLAIN;
use crate::conformance::{Case, Outputs, Pads, Pair, in_place};
use crate::host::plain;
use crate::input::{Input, stream};
use nibble_core::ops::{HeadLoss, HeadLossGrad};
use nibble_core::{Agreement, DType, Error, Model, Result, Tensor};

#[derive(Debug, Clone, Copy)]
struct Head {
    tokens: usize,
    d: usize,
    vocab: usize,
    shards: usize,
    chunk: usize,
    dtype: DType,
    /// Type of the weight's gradient and whether it is added to; none for losses alone.
    grad: Option<(DType, bool)>,
    input: Input,
}

impl Head {
    /// The weight `[v, d]`, and `[d, v]`.
    fn weights<B: Model>(&self, b: &B) -> Result<[Tensor<B>; 2]> {
        let Self { d, vocab, dtype, input, .. } = *self;
        let w = input.values(&stream("head.w"), vocab * d);
        let wt: Vec<f32> = (0..d * vocab).map(|i| w[i % vocab * d + i / vocab]).collect();
        Ok([plain(b, dtype, &w, vocab, d)?, plain(b, dtype, &wt, d, vocab)?])
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

impl<B: Model> Case<B> for Head {
    fn agreement(&self) -> Agreement {
        HeadLoss::<B>::agreement(self.dtype)
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { tokens, d, vocab, shards, chunk, dtype, input, .. } = *self;
        let x = plain(b, dtype, &input.values(&stream("head.x"), tokens * d), tokens, d)?;
        let [w, wt] = self.weights(b)?;
        let targets = b.upload(&self.targets())?;
        let mut out = Outputs::default();
        let made = match self.grad {
            None => HeadLoss { x: &x, w: &w, targets: &targets, shards, chunk, grad: None }.run(b)?,
            Some((type_of_dw, accumulate)) => {
                let before = Input::Normal.values(&stream("head.dw"), shards * vocab * d);
                let before = plain(b, type_of_dw, &before, shards * vocab, d)?;
                let (dw, made) = in_place(b, &before, |dw| {
                    let grad = Some(HeadLossGrad { wt: &wt, scale: 0.013, dw, accumulate });
                    HeadLoss { x: &x, w: &w, targets: &targets, shards, chunk, grad }.run(b)
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
        Ok(out)
    }
}

/// Conformance of [`HeadLoss`], and the refusal of odd chunks and of shards that do not divide the tokens.
pub fn head_loss<A: Model, B: Model>(pair: &Pair<A, B>) {
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
                pair.check(&Head { tokens, d, vocab, shards, chunk, dtype, grad, input });
            }
        }
    }
    // What tensor cores take: shards cut into chunks that are not multiples of a tile, several shards a chunk, a large vocabulary.
    let all = [(DType::F32, false), (DType::F32, true), (DType::Bf16, false), (DType::Bf16, true)];
    for (tokens, d, vocab, shards, chunk) in
        [(200, 64, 512, 1, 48), (256, 64, 520, 4, 128), (24, 16, 32_768, 1, 8)]
    {
        for grad in all.map(Some) {
            let (dtype, input) = (DType::Bf16, Input::Normal);
            pair.check(&Head { tokens, d, vocab, shards, chunk, dtype, grad, input });
        }
    }
    // Rows that one, two and eight multiprocessors hold, more of them than there are such groups. A CPU has no such ways.
    let rows = if pair.strict { &[][..] } else { &[(600, 4096), (300, 32_776), (80, 151_936)][..] };
    for &(tokens, vocab) in rows {
        for grad in [None, Some((DType::Bf16, false))] {
            let (dtype, input) = (DType::Bf16, Input::Normal);
            pair.check(&Head { tokens, d: 16, vocab, shards: 1, chunk: tokens, dtype, grad, input });
        }
    }
    let good = Head {
        tokens: 12,
        d: 8,
        vocab: 9,
        shards: 2,
        chunk: 4,
        dtype: DType::F32,
        grad: None,
        input: Input::Normal,
    };
    for (argument, bad) in [
        ("chunk", Head { chunk: 3, ..good }),
        ("chunk", Head { chunk: 0, ..good }),
        ("shards", Head { shards: 5, ..good }),
    ] {
        pair.check_refused(&bad, |e| matches!(e, Error::Shape { argument: a, .. } if *a == argument));
    }
}
