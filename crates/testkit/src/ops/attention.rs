use super::PLAIN;
use crate::case::{Case, Outputs, Pads};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::pair::Pair;
use nibble_core::ops::{
    Attention, AttentionBackward, AttentionDecode, AttentionOut, attention_agreement, attention_scale,
};
use nibble_core::{Agreement, DType, Kernels, Result, Tensor};

#[derive(Debug, Clone, Copy)]
struct Heads {
    sequences: usize,
    seq_len: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    scale: f32,
    dtype: DType,
    input: Input,
    strict: bool,
}

impl Heads {
    /// Rows of `heads` heads of `dim` elements.
    fn tensor<B: Kernels>(&self, b: &B, name: &str, heads: usize, dim: usize) -> Result<Tensor<B>> {
        let (rows, cols) = (self.sequences * self.seq_len, heads * dim);
        plain(b, self.dtype, &self.input.values(&stream(name), rows * cols), rows, cols)
    }

    fn qkv<B: Kernels>(&self, b: &B) -> Result<[Tensor<B>; 3]> {
        Ok([
            self.tensor(b, "attention.q", self.heads, self.head_dim)?,
            self.tensor(b, "attention.k", self.kv_heads, self.head_dim)?,
            self.tensor(b, "attention.v", self.kv_heads, self.value_dim)?,
        ])
    }

    fn forward<B: Kernels>(&self, b: &B, [q, k, v]: &[Tensor<B>; 3]) -> Result<AttentionOut<B>> {
        let Self { head_dim, value_dim, scale, seq_len, .. } = *self;
        Attention { q, k, v, head_dim, value_dim, scale, seq_len }.run(b)
    }
}

#[derive(Debug)]
struct Forward(Heads);

impl<B: Kernels> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        attention_agreement(self.0.dtype)
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let made = self.0.forward(b, &self.0.qkv(b)?)?;
        let mut out = Outputs::default();
        out.tensor(b, "out", &made.out)?;
        out.buf(b, "lse", &made.lse, None)?;
        Ok(out)
    }
}

#[derive(Debug)]
struct Backward(Heads);

impl<B: Kernels> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        attention_agreement(self.0.dtype)
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Heads { head_dim, value_dim, scale, seq_len, heads, .. } = self.0;
        let qkv = self.0.qkv(b)?;
        let made = self.0.forward(b, &qkv)?;
        let dout = self.0.tensor(b, "attention.dout", heads, value_dim)?;
        let [q, k, v] = &qkv;
        let AttentionOut { out, lse } = &made;
        let grads = AttentionBackward { q, k, v, out, lse, dout: &dout, head_dim, value_dim, scale, seq_len }
            .run(b)?;
        let mut out = Outputs::default();
        out.tensor(b, "dv", &grads.dv)?;
        // Of one key dP - delta is 0 but for what rounding leaves, which only the same order of sums makes the same.
        if self.0.seq_len > 1 || self.0.strict {
            out.tensor(b, "dq", &grads.dq)?;
            out.tensor(b, "dk", &grads.dk)?;
        }
        Ok(out)
    }
}

/// One query or many, one head or groups of them, values of queries' size or of another; lengths around the vectors' width on a CPU and
/// around whole tiles on a GPU, whose kernels for heads of 64, of 128, and of 192 with values of 128 are others.
fn cases(strict: bool) -> Vec<Heads> {
    let mut cases = Vec::new();
    let shapes = [
        (1, 1, 1, 1, 8, 8),
        (3, 17, 4, 2, 16, 16),
        (2, 65, 6, 1, 32, 32),
        (1, 130, 2, 2, 64, 64),
        (2, 33, 3, 3, 20, 20),
        (3, 1, 2, 1, 128, 128),
        (2, 200, 8, 1, 128, 128),
        (3, 200, 3, 3, 64, 64),
        (2, 256, 2, 1, 128, 128),
        (1, 385, 4, 1, 64, 64),
        (2, 40, 2, 1, 200, 200),
        (2, 19, 4, 2, 24, 16),
        (1, 66, 2, 1, 8, 40),
        (2, 45, 2, 2, 64, 128),
        (1, 70, 3, 1, 128, 64),
        (3, 1, 2, 1, 192, 128),
        (2, 64, 2, 2, 192, 128),
        (2, 200, 6, 2, 192, 128),
        (1, 385, 3, 1, 192, 128),
        (2, 512, 2, 1, 192, 128),
    ];
    // Scales of a model's own. Larger ones than the usual would spread the scores, and loosen what backends owe each other.
    let scaled = [
        (2, 33, 4, 2, 16, 16, 0.15),
        (1, 70, 2, 1, 64, 64, 0.06),
        (2, 130, 2, 1, 128, 128, 0.05),
        (1, 150, 2, 2, 192, 128, 0.05),
    ];
    let usual = shapes.map(|(s, l, h, g, c, u)| (s, l, h, g, c, u, attention_scale(c)));
    for (sequences, seq_len, heads, kv_heads, head_dim, value_dim, scale) in usual.into_iter().chain(scaled) {
        for dtype in PLAIN {
            let input = Input::Normal;
            let heads = Heads {
                sequences,
                seq_len,
                heads,
                kv_heads,
                head_dim,
                value_dim,
                scale,
                dtype,
                input,
                strict,
            };
            cases.push(heads);
            // Scores of ±hundreds: the softmax is all but one-hot, and what is left is rounding.
            let hard = [Input::Zeros, Input::HeavyTailed, Input::NonFinite, Input::ExtremeExponents];
            let hard = hard.into_iter().filter(|_| strict && seq_len < 200);
            cases.extend(hard.map(|input| Heads { input, ..heads }));
        }
    }
    cases
}

/// Conformance of [`Attention`].
pub fn attention<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    cases(pair.strict).into_iter().for_each(|heads| pair.check(&Forward(heads)));
}

/// One query against the first rows of a cache.
#[derive(Debug)]
struct Decode {
    heads: Heads,
    len: usize,
}

impl<B: Kernels> Case<B> for Decode {
    fn agreement(&self) -> Agreement {
        attention_agreement(self.heads.dtype)
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let [_, k, v] = self.heads.qkv(b)?;
        let one = Heads { sequences: 1, seq_len: 1, ..self.heads };
        let Heads { head_dim, value_dim, scale, .. } = one;
        let q = one.tensor(b, "attention.q", one.heads, head_dim)?;
        let made =
            AttentionDecode { q: &q, k: &k, v: &v, head_dim, value_dim, scale, len: self.len }.run(b)?;
        let mut out = Outputs::default();
        out.tensor(b, "out", &made)?;
        Ok(out)
    }
}

/// Conformance of [`AttentionDecode`].
pub fn attention_decode<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for heads in cases(pair.strict) {
        let heads = Heads { sequences: 1, ..heads };
        let all = heads.seq_len;
        let mut lens = vec![1, all.div_ceil(2), all - all / 9, all];
        lens.dedup();
        lens.into_iter().for_each(|len| pair.check(&Decode { heads, len }));
    }
}

/// Conformance of [`AttentionBackward`].
pub fn attention_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    cases(pair.strict).into_iter().for_each(|heads| pair.check(&Backward(heads)));
}
