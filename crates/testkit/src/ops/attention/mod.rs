pub(super) mod assemble_kv;
pub(super) mod windows;

pub use {assemble_kv::*, windows::*};

use crate::case::{Case, Outputs, Pads, after_rounding_to_bf16};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use crate::windows::Hiding;
use nibble_core::ops::{
    Attention, AttentionBackward, AttentionDecode, AttentionOut, Windows, attention_agreement,
    attention_scale,
};
use nibble_core::{Agreement, DType, Kernels, Result, Tensor};

/// Magnitudes of the sink scores.
#[derive(Debug, Clone, Copy)]
enum Sinks {
    /// Sinks about as large as the scores.
    Usual,
    /// Alternating sinks: negligible, nearly the whole sum, and comparable to one term of it.
    Extreme,
}

#[derive(Debug, Clone, Copy)]
struct Heads {
    sequences: usize,
    seq_len: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    scale: f32,
    causal: bool,
    hiding: Option<Hiding>,
    sinks: Option<Sinks>,
    /// Whether keys and values of every other document are 1e4; the results of those documents are not compared. (With larger values, the
    /// rounding error of the scores would overflow an exponential. The documents' sums would not be finite, and only finite values are
    /// allowed outside a window.)
    poisoned: bool,
    dtype: DType,
    input: Input,
    strict: bool,
}

impl Heads {
    /// A case with the default scale and without windows. Sizes: sequences, tokens per sequence, heads, key/value heads, head dim, value
    /// dim.
    fn of(
        (sequences, seq_len, heads, kv_heads, head_dim, value_dim): (
            usize,
            usize,
            usize,
            usize,
            usize,
            usize,
        ),
        dtype: DType,
        strict: bool,
    ) -> Self {
        let (scale, input) = (attention_scale(head_dim), Input::Normal);
        let (hiding, sinks, poisoned) = (None, None, false);
        Self {
            sequences,
            seq_len,
            heads,
            kv_heads,
            head_dim,
            value_dim,
            scale,
            causal: true,
            hiding,
            sinks,
            poisoned,
            dtype,
            input,
            strict,
        }
    }

    fn dims(&self) -> (usize, usize) {
        (self.head_dim, self.value_dim)
    }

    /// A tensor with rows of `heads` heads of `dim` elements.
    fn tensor<B: Kernels>(&self, b: &B, name: &str, heads: usize, dim: usize) -> Result<Tensor<B>> {
        let (rows, cols) = (self.sequences * self.seq_len, heads * dim);
        plain(b, self.dtype, &self.input.values(&stream(name), rows * cols), rows, cols)
    }

    fn qkv<B: Kernels>(&self, b: &B) -> Result<[Tensor<B>; 3]> {
        Ok([
            self.tensor(b, "attention.q", self.heads, self.head_dim)?,
            self.keys(b, "attention.k", self.head_dim)?,
            self.keys(b, "attention.v", self.value_dim)?,
        ])
    }

    /// A tensor of keys or values.
    fn keys<B: Kernels>(&self, b: &B, name: &str, dim: usize) -> Result<Tensor<B>> {
        let (rows, cols) = (self.sequences * self.seq_len, self.kv_heads * dim);
        let mut values = self.input.values(&stream(name), rows * cols);
        for (row, compared) in values.chunks_exact_mut(cols).zip(self.compared_rows()) {
            if !compared {
                row.iter_mut().for_each(|x| *x = 1e4f32.copysign(*x));
            }
        }
        plain(b, self.dtype, &values, rows, cols)
    }

    /// For each token, whether it is outside the poisoned documents.
    fn compared_rows(&self) -> Vec<bool> {
        let numbers =
            self.hiding.map_or_else(Vec::new, |hiding| hiding.numbers(self.sequences, self.seq_len));
        match self.poisoned {
            true => {
                let (mut last, mut compared) = (None, false);
                let of = |number| {
                    compared ^= last.replace(number) != Some(number);
                    compared
                };
                numbers.into_iter().map(of).collect()
            }
            false => vec![true; self.sequences * self.seq_len],
        }
    }

    fn windows<B: Kernels>(&self, b: &B) -> Result<Option<Windows<B>>> {
        self.hiding.map(|hiding| hiding.upload(b, self.sequences, self.seq_len)).transpose()
    }

    /// The sink scores `[1, heads]`.
    fn sinks<B: Kernels>(&self, b: &B) -> Result<Option<Tensor<B>>> {
        let Some(sinks) = self.sinks else { return Ok(None) };
        let values = match sinks {
            Sinks::Usual => Input::Normal.values(&stream("attention.sinks"), self.heads),
            Sinks::Extreme => [-1e30, 80.0, 0.0].into_iter().cycle().take(self.heads).collect(),
        };
        Tensor::from_f32(b, &values, 1, self.heads).map(Some)
    }

    /// Records the rows that are compared.
    fn note<B: Kernels>(&self, out: &mut Outputs, b: &B, name: &str, x: &Tensor<B>) -> Result<()> {
        if !self.poisoned {
            return out.tensor(b, name, x);
        }
        let values = x.to_f32_vec(b)?;
        let rows = values.chunks_exact(x.cols).zip(self.compared_rows()).filter(|(_, compared)| *compared);
        let rows: Vec<f32> = rows.flat_map(|(row, _)| row).copied().collect();
        // The rows are cast to the tensor's own type, because the tolerance includes that rounding.
        out.tensor(b, name, &plain(b, x.dtype(), &rows, rows.len() / x.cols, x.cols)?)
    }

    fn forward<B: Kernels>(
        &self,
        b: &B,
        [q, k, v]: &[Tensor<B>; 3],
        (windows, sinks): (Option<&Windows<B>>, Option<&Tensor<B>>),
    ) -> Result<AttentionOut<B>> {
        let Self { scale, seq_len, causal, .. } = *self;
        Attention { scale, causal, windows, sinks, ..Attention::new([q, k, v], self.dims(), seq_len) }.run(b)
    }
}

#[derive(Debug)]
struct Forward(Heads);

impl<B: Kernels> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        attention_agreement(self.0.dtype)
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (windows, sinks) = (self.0.windows(b)?, self.0.sinks(b)?);
        let made = self.0.forward(b, &self.0.qkv(b)?, (windows.as_ref(), sinks.as_ref()))?;
        let mut out = Outputs::default();
        self.0.note(&mut out, b, "out", &made.out)?;
        out.buf(b, "lse", &made.lse, Some(&self.0.compared_rows()))?;
        Ok(out)
    }
}

#[derive(Debug)]
struct Backward(Heads);

impl<B: Kernels> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        attention_agreement(self.0.dtype)
    }

    /// `dsinks` is F32 and linear in `out`, which each backend has rounded to its type. Products of `out` cancel in a row's sum, so the
    /// error of `dsinks` may be slightly larger than that of `out`.
    fn owed(&self, result: &str) -> Agreement {
        match (result, Case::<B>::agreement(self)) {
            ("dsinks", Agreement::RelL2(max)) if self.0.dtype == DType::Bf16 => {
                Agreement::RelL2(1.5 * after_rounding_to_bf16(max))
            }
            (_, agreement) => agreement,
        }
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Heads { value_dim, scale, seq_len, heads, causal, .. } = self.0;
        let qkv = self.0.qkv(b)?;
        let (windows, sinks) = (self.0.windows(b)?, self.0.sinks(b)?);
        let (windows, sinks) = (windows.as_ref(), sinks.as_ref());
        let made = self.0.forward(b, &qkv, (windows, sinks))?;
        let dout = self.0.tensor(b, "attention.dout", heads, value_dim)?;
        let [q, k, v] = &qkv;
        let of = (&made.out, &made.lse);
        let op = AttentionBackward::new([q, k, v], of, &dout, self.0.dims(), seq_len);
        let grads = AttentionBackward { scale, causal, windows, sinks, ..op }.run(b)?;
        let mut out = Outputs::default();
        self.0.note(&mut out, b, "dv", &grads.dv)?;
        if let Some(dsinks) = &grads.dsinks {
            self.0.note(&mut out, b, "dsinks", dsinks)?;
        }
        // With a single key, dP − delta is 0 up to rounding errors. Rounding errors agree only if sums have the same order.
        let one_key = seq_len == 1 || self.0.hiding.is_some_and(|hiding| hiding.window == Some(1));
        if !one_key || self.0.strict {
            self.0.note(&mut out, b, "dq", &grads.dq)?;
            self.0.note(&mut out, b, "dk", &grads.dk)?;
        }
        Ok(out)
    }
}

/// Cases with one or many queries, with one head or groups of heads, and with value dims equal or unequal to the head dim. Lengths are
/// around a CPU's vector width and a GPU's tiles. A GPU has separate kernels for heads of 64, of 128, and of 192 with values of 128.
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
    // These scales are not the default. Scales larger than the default would spread the scores and loosen the agreement of backends.
    let scaled = [
        (2, 33, 4, 2, 16, 16, 0.15),
        (1, 70, 2, 1, 64, 64, 0.06),
        (2, 130, 2, 1, 128, 128, 0.05),
        (1, 150, 2, 2, 192, 128, 0.05),
    ];
    let usual = shapes.map(|(s, l, h, g, c, u)| (s, l, h, g, c, u, attention_scale(c)));
    for (sequences, seq_len, heads, kv_heads, head_dim, value_dim, scale) in usual.into_iter().chain(scaled) {
        for dtype in PLAIN {
            let dims = (sequences, seq_len, heads, kv_heads, head_dim, value_dim);
            let heads = Heads { scale, ..Heads::of(dims, dtype, strict) };
            cases.push(heads);
            // With scores of several hundred, the softmax is nearly one-hot, and the rest is rounding error.
            let hard = [Input::Zeros, Input::HeavyTailed, Input::NonFinite, Input::ExtremeExponents];
            let hard = hard.into_iter().filter(|_| strict && seq_len < 200);
            cases.extend(hard.map(|input| Heads { input, ..heads }));
        }
    }
    cases
}

/// Document lengths around tiles of 64 and of 128.
const DOCUMENTS: [usize; 7] = [1, 63, 64, 65, 127, 129, 200];

/// Documents and sliding windows; sequences of whole tiles and of other lengths; heads as in [`cases`].
fn windowed_cases(strict: bool) -> Vec<Heads> {
    let (uneven, window) = (Hiding::documents(&DOCUMENTS), Hiding::window);
    let both = Hiding { documents: &DOCUMENTS, window: Some(50) };
    let (own, small) = (Hiding::documents(&[385]), Hiding::documents(&[1, 2, 7, 8, 9, 15, 17, 33, 5]));
    let shapes = [
        (2, 512, 2, 1, 64, 64, uneven, true),
        (1, 449, 2, 1, 128, 128, uneven, true),
        (1, 449, 2, 2, 192, 128, uneven, true),
        (2, 150, 4, 2, 32, 32, uneven, true),
        (3, 70, 4, 2, 24, 16, small, true),
        (2, 257, 2, 1, 64, 64, small, false),
        (1, 385, 1, 1, 64, 64, own, false),
        (1, 385, 1, 1, 192, 128, window(385), false),
        (1, 200, 2, 1, 64, 64, window(1), false),
        (2, 100, 2, 1, 32, 32, window(1), false),
        (1, 400, 2, 1, 64, 64, window(17), false),
        (1, 300, 2, 1, 128, 128, window(17), false),
        (1, 130, 4, 2, 20, 20, window(17), false),
        (1, 500, 4, 2, 64, 64, window(128), false),
        (1, 520, 2, 1, 128, 128, window(128), false),
        (1, 400, 2, 1, 192, 128, window(128), false),
        (1, 200, 2, 1, 200, 200, window(90), false),
        (1, 300, 3, 1, 64, 64, both, true),
        (1, 449, 2, 1, 192, 128, both, false),
        (2, 130, 2, 2, 16, 16, both, true),
    ];
    let mut cases = Vec::new();
    for (sequences, seq_len, heads, kv_heads, head_dim, value_dim, hiding, has_others) in shapes {
        for (dtype, poisoned) in PLAIN.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
            let dims = (sequences, seq_len, heads, kv_heads, head_dim, value_dim);
            let heads = Heads { hiding: Some(hiding), poisoned, ..Heads::of(dims, dtype, strict) };
            // Two code paths of one machine must give the same bits everywhere; short sequences suffice to test this.
            if !poisoned || has_others && !(strict && seq_len >= 200) {
                cases.push(heads);
            }
            // Masked keys must not change a bit between two code paths of one machine, either.
            let hard = [Input::HeavyTailed, Input::NonFinite];
            let hard = hard.into_iter().filter(|_| strict && !poisoned && seq_len < 200);
            cases.extend(hard.map(|input| Heads { input, ..heads }));
        }
    }
    cases
}

/// Cases with sinks: whole-tile and other lengths, each kind of head for which a GPU has kernels, and windows.
fn sink_cases(strict: bool) -> Vec<Heads> {
    let documents = Some(Hiding::documents(&DOCUMENTS));
    let window = |window| Some(Hiding::window(window));
    let shapes = [
        (2, 1, 3, 1, 16, 16, None),
        (2, 33, 4, 2, 20, 20, None),
        (2, 40, 3, 1, 200, 200, None),
        (2, 45, 6, 2, 24, 40, window(17)),
        (3, 200, 3, 3, 64, 64, None),
        (1, 385, 8, 2, 64, 64, None),
        (2, 200, 6, 2, 128, 128, None),
        (1, 256, 3, 3, 128, 128, None),
        (2, 200, 6, 2, 192, 128, None),
        (1, 300, 3, 3, 192, 128, None),
        (1, 400, 4, 2, 64, 64, window(128)),
        (1, 449, 3, 1, 128, 128, documents),
        (1, 449, 3, 1, 192, 128, documents),
        (2, 150, 6, 3, 32, 32, documents),
    ];
    let mut cases = Vec::new();
    for (sequences, seq_len, heads, kv_heads, head_dim, value_dim, hiding) in shapes {
        for (dtype, sinks) in
            PLAIN.into_iter().flat_map(|dtype| [(dtype, Sinks::Usual), (dtype, Sinks::Extreme)])
        {
            let dims = (sequences, seq_len, heads, kv_heads, head_dim, value_dim);
            let heads = Heads { hiding, sinks: Some(sinks), ..Heads::of(dims, dtype, strict) };
            cases.push(heads);
            let hard = [Input::HeavyTailed, Input::NonFinite];
            let hard = hard.into_iter().filter(|_| strict && seq_len < 200);
            cases.extend(hard.map(|input| Heads { input, ..heads }));
        }
    }
    cases
}

/// Cases without the causal mask: whole-tile and other lengths, each kind of head for which a GPU has kernels, and sinks.
fn full_cases(strict: bool) -> Vec<Heads> {
    let shapes = [
        (1, 1, 1, 1, 8, 8, None),
        (5, 17, 4, 4, 16, 16, None),
        (2, 16, 4, 2, 16, 16, Some(Sinks::Usual)),
        (2, 65, 6, 1, 32, 32, None),
        (3, 200, 3, 3, 64, 64, Some(Sinks::Extreme)),
        (2, 128, 8, 2, 64, 64, None),
        (2, 45, 2, 1, 24, 40, None),
        (2, 200, 4, 1, 128, 128, None),
        (1, 70, 2, 2, 192, 128, None),
        (2, 40, 2, 1, 200, 200, Some(Sinks::Usual)),
    ];
    let mut cases = Vec::new();
    for (sequences, seq_len, heads, kv_heads, head_dim, value_dim, sinks) in shapes {
        for dtype in PLAIN {
            let dims = (sequences, seq_len, heads, kv_heads, head_dim, value_dim);
            let heads = Heads { causal: false, sinks, ..Heads::of(dims, dtype, strict) };
            cases.push(heads);
            let hard = [Input::Zeros, Input::HeavyTailed, Input::NonFinite];
            let hard = hard.into_iter().filter(|_| strict && seq_len < 200);
            cases.extend(hard.map(|input| Heads { input, ..heads }));
        }
    }
    cases
}

/// All cases of attention.
fn every_case(strict: bool) -> impl Iterator<Item = Heads> {
    [cases(strict), windowed_cases(strict), sink_cases(strict), full_cases(strict)].into_iter().flatten()
}

/// The conformance test of [`Attention`].
pub fn attention<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    every_case(pair.strict).for_each(|heads| pair.check(&Forward(heads)));
}

/// One query against rows of a cache: the last that its window shows, or all.
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
        let q = one.tensor(b, "attention.q", one.heads, one.head_dim)?;
        let op = AttentionDecode::new([&q, &k, &v], one.dims(), self.len);
        let sinks = one.sinks(b)?;
        let window = self.heads.hiding.and_then(|hiding| hiding.window);
        let first = window.map_or(0, |window| self.len.saturating_sub(window));
        let made = AttentionDecode { scale: one.scale, first, sinks: sinks.as_ref(), ..op }.run(b)?;
        let mut out = Outputs::default();
        out.tensor(b, "out", &made)?;
        Ok(out)
    }
}

/// The conformance test of [`AttentionDecode`].
pub fn attention_decode<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    // A cache is of one document.
    let is_one = |heads: &Heads| heads.hiding.is_none_or(|hiding| hiding.documents.is_empty());
    let cases = every_case(pair.strict).filter(is_one);
    for heads in cases {
        let heads = Heads { sequences: 1, ..heads };
        let all = heads.seq_len;
        let mut lens = vec![1, all.div_ceil(2), all - all / 9, all];
        lens.dedup();
        lens.into_iter().for_each(|len| pair.check(&Decode { heads, len }));
    }
}

/// The conformance test of [`AttentionBackward`].
pub fn attention_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    every_case(pair.strict).for_each(|heads| pair.check(&Backward(heads)));
}
