use super::PLAIN;
use crate::conformance::{Case, Outputs, Pads, Pair, in_place};
use crate::host::plain;
use crate::input::{Input, stream};
use nibble_core::ops::{Embed, EmbedBackward};
use nibble_core::{Agreement, DType, Error, Model, Result, Tensor};

#[derive(Debug, Clone, Copy)]
struct Tokens {
    tokens: usize,
    vocab: usize,
    d: usize,
    dtype: DType,
    input: Input,
    shards: usize,
    /// The largest id.
    max_id: usize,
}

impl Tokens {
    fn ids<B: Model>(&self, b: &B) -> Result<B::Buf<i32>> {
        let bits = stream("ids");
        // Zipf-like: the product of two uniforms repeats small ids often; the first is the largest.
        let id = |t: u64| (bits.f32_at(2 * t) * bits.f32_at(2 * t + 1) * (self.max_id + 1) as f32) as i32;
        let ids: Vec<i32> =
            (0..self.tokens as u64).map(|t| if t == 0 { self.max_id as i32 } else { id(t) }).collect();
        b.upload(&ids)
    }

    fn all() -> impl Iterator<Item = Tokens> {
        let sizes = [(1, 1, 1, 1), (8, 3, 33, 4), (260, 50, 128, 4), (128, 300, 320, 2)];
        PLAIN.into_iter().flat_map(move |dtype| {
            Input::ALL.into_iter().flat_map(move |input| {
                sizes.into_iter().map(move |(tokens, vocab, d, shards)| Tokens {
                    tokens,
                    vocab,
                    d,
                    dtype,
                    input,
                    shards,
                    max_id: vocab - 1,
                })
            })
        })
    }

    fn outside() -> Self {
        Tokens { tokens: 4, vocab: 9, d: 8, dtype: DType::F32, input: Input::Normal, shards: 1, max_id: 9 }
    }
}

#[derive(Debug)]
struct Forward(Tokens);

impl<B: Model> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        Embed::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Tokens { vocab, d, dtype, input, .. } = self.0;
        let table = Tensor::from_f32(b, &input.values(&stream("table"), vocab * d), vocab, d)?;
        let mut out = Outputs::default();
        out.tensor(b, "out", &Embed { table: &table, ids: &self.0.ids(b)?, dtype }.run(b)?)?;
        Ok(out)
    }
}

/// Conformance of [`Embed`], and the refusal of an id outside the table.
pub fn embed<A: Model, B: Model>(pair: &Pair<A, B>) {
    Tokens::all().for_each(|tokens| pair.check(&Forward(tokens)));
    let outside = Forward(Tokens::outside());
    pair.check_refused(&outside, |e| matches!(e, Error::Shape { argument: "ids", .. }));
}

#[derive(Debug)]
struct Backward(Tokens);

impl<B: Model> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        EmbedBackward::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Tokens { tokens, vocab, d, dtype, input, shards, .. } = self.0;
        let dy = plain(b, dtype, &input.values(&stream("embed.dy"), tokens * d), tokens, d)?;
        let grad = Input::Normal.values(&stream("embed.grad"), shards * vocab * d);
        let grad = Tensor::from_f32(b, &grad, shards * vocab, d)?;
        let ids = self.0.ids(b)?;
        let (grad, ()) =
            in_place(b, &grad, |grad| EmbedBackward { ids: &ids, dy: &dy, grad, shards }.run(b))?;
        let mut out = Outputs::default();
        out.tensor(b, "grad", &grad)?;
        Ok(out)
    }
}

/// Conformance of [`EmbedBackward`], and the refusal of an id outside the table.
pub fn embed_backward<A: Model, B: Model>(pair: &Pair<A, B>) {
    Tokens::all().for_each(|tokens| pair.check(&Backward(tokens)));
    let outside = Backward(Tokens::outside());
    pair.check_refused(&outside, |e| matches!(e, Error::Shape { argument: "ids", .. }));
}
