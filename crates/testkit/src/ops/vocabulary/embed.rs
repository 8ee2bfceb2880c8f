use crate::case::{Case, Outputs, Pads, in_place};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use nibble_core::ops::{Embed, EmbedBackward};
use nibble_core::{Agreement, DType, Kernels, Result, Tensor};

#[derive(Debug, Clone, Copy)]
struct Tokens {
    tokens: usize,
    vocab: usize,
    d: usize,
    dtype: DType,
    input: Input,
    shards: usize,
    /// The largest id.
    max_id: i32,
}

impl Tokens {
    fn ids<B: Kernels>(&self, b: &B) -> Result<B::Buf<i32>> {
        let bits = stream("ids");
        // The distribution is similar to Zipf's: the product of two uniform numbers repeats small ids often. The first id is the largest.
        let id = |t: u64| (bits.f32_at(2 * t) * bits.f32_at(2 * t + 1) * (self.max_id + 1) as f32) as i32;
        let ids: Vec<i32> =
            (0..self.tokens as u64).map(|t| if t == 0 { self.max_id } else { id(t) }).collect();
        b.upload(&ids)
    }

    fn all() -> impl Iterator<Item = Tokens> {
        let sizes = [(1, 1, 1, 1), (8, 3, 33, 4), (260, 50, 128, 4), (128, 300, 320, 2), (900, 3, 72, 2)];
        PLAIN.into_iter().flat_map(move |dtype| {
            Input::ALL.into_iter().flat_map(move |input| {
                sizes.into_iter().map(move |(tokens, vocab, d, shards)| Tokens {
                    tokens,
                    vocab,
                    d,
                    dtype,
                    input,
                    shards,
                    max_id: vocab as i32 - 1,
                })
            })
        })
    }

    /// Cases with a single id in many chunks, and with vocabularies of many more ids than tokens, whose sort needs several digits.
    fn large() -> impl Iterator<Item = Tokens> {
        let sizes = [
            (4500, 1, 40, 1),
            (4100, 1, 5, 4),
            (4096, 32_768, 8, 1),
            (8192, 20_000, 4, 4),
            (300, 40, 2048, 2),
        ];
        PLAIN.into_iter().flat_map(move |dtype| {
            sizes.into_iter().map(move |(tokens, vocab, d, shards)| Tokens {
                tokens,
                vocab,
                d,
                dtype,
                input: Input::Normal,
                shards,
                max_id: vocab as i32 - 1,
            })
        })
    }

    /// Cases with ids past the vocabulary, and with negative ids.
    fn outside() -> [Self; 2] {
        let good = Tokens {
            tokens: 40,
            vocab: 9,
            d: 8,
            dtype: DType::F32,
            input: Input::Normal,
            shards: 2,
            max_id: 12,
        };
        [good, Tokens { max_id: -40, ..good }]
    }
}

#[derive(Debug)]
struct Forward(Tokens);

impl<B: Kernels> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        Embed::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Tokens { vocab, d, dtype, input, .. } = self.0;
        let table = Tensor::from_f32(b, &input.values(&stream("table"), vocab * d), vocab, d)?;
        let mut out = Outputs::default();
        let made = Embed { table: &table, ids: &self.0.ids(b)?, dtype }.run(b)?;
        out.tensor(b, "x", &made.x)?;
        out.buf(b, "bad_ids", &made.bad_ids, None)?;
        Ok(out)
    }
}

/// The conformance test of [`Embed`], including ids outside the vocabulary.
pub fn embed<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Tokens::all()
        .chain(Tokens::large())
        .chain(Tokens::outside())
        .for_each(|tokens| pair.check(&Forward(tokens)));
}

#[derive(Debug)]
struct Backward(Tokens);

impl<B: Kernels> Case<B> for Backward {
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

/// The conformance test of [`EmbedBackward`], including ids outside the vocabulary.
pub fn embed_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Tokens::all()
        .chain(Tokens::large())
        .chain(Tokens::outside())
        .for_each(|tokens| pair.check(&Backward(tokens)));
}
