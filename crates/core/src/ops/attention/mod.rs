pub(super) mod assemble_kv;
pub(super) mod windows;

pub use {assemble_kv::*, windows::*};

use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Error, Result, Tensor};

/// Softmax attention, causal or over the whole sequence, with grouped query heads: head i attends with key/value head i / (heads /
/// kv_heads).
///
/// The rows of q, k and v are the tokens of consecutive sequences of `seq_len` tokens each. A score is q·k · `scale`. Scores and sums are
/// computed in F32. The head size of the values and of the output may differ from the head size of the queries and keys. For BF16 inputs, a
/// backend may round the probabilities P to BF16 before they multiply v, because tensor cores need BF16 operands. In the backward pass, a
/// backend may round the probabilities P and the gradients dS of the scores before multiplying them; [`attention_agreement`] allows for
/// these errors.
///
/// With [`Windows`], a query attends only to some of its sequence's keys. Keys outside the window of a query do not change its result if
/// these keys and the values at their positions are finite. A backend may multiply the values of such keys by a probability of 0. If the
/// windows hide no key, the result has the same bits as without windows. On a CPU, the result for a document that is packed with others has
/// the same bits as if the document were alone in a sequence. On a GPU, the result for a packed document agrees with the result for the
/// document alone only within [`attention_agreement`], because tiles run along the whole sequence.
///
/// With sinks, the softmax denominator of head h has one more term, exp(sink_h). The term of a sink has no value vector, so the attention
/// weights of a query sum to less than 1. A sink of -∞ has no effect.
#[derive(Debug)]
pub struct Attention<'a, B: Backend> {
    /// Shape `[t, heads · head_dim]`.
    pub q: &'a Tensor<B>,
    /// Shape `[t, kv_heads · head_dim]`.
    pub k: &'a Tensor<B>,
    /// Shape `[t, kv_heads · value_dim]`.
    pub v: &'a Tensor<B>,
    /// The number of elements of one head of the queries or keys.
    pub head_dim: usize,
    /// The number of elements of one head of the values or of the output.
    pub value_dim: usize,
    /// The factor by which q·k is multiplied, finite and above 0. The factor is [`attention_scale`] unless a model defines another one.
    pub scale: f32,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Whether a causal mask hides all keys after the position of the query. Without this mask, each query sees all keys of its sequence,
    /// and there are no windows.
    pub causal: bool,
    /// Limits the keys to which each query attends; `None` if each query attends to all keys of its sequence up to its own position.
    pub windows: Option<&'a Windows<B>>,
    /// The attention sink of each query head, F32 of shape `[1, heads]`. A sink is a score that belongs to no key and is not multiplied by
    /// `scale`.
    pub sinks: Option<&'a Tensor<B>>,
}

/// The result of [`Attention`].
#[derive(Debug, Clone)]
pub struct AttentionOut<B: Backend> {
    /// The output, of shape `[t, heads · value_dim]` and the type of q.
    pub out: Tensor<B>,
    /// The log-sum-exp of the scores of each (row, head), including the term of a sink; `t · heads` values.
    pub lse: B::Buf<f32>,
}

/// The largest difference that is allowed between the results of two backends in [`Attention`] and [`AttentionBackward`], by the type of q.
///
/// For F32, the bound allows for sums in a different order. For BF16, the bound also allows for rounding the probabilities P and the score
/// gradients dS to BF16 (8 significant bits). Rounding changes each term of a sum by up to 2⁻⁹ of its value. The rounding errors of the
/// terms are independent, so the relative error of the sum is about 1e-3. If both backends round, their results differ by 2.2e-3 to 4.2e-3
/// for scores with a spread of 1 or less. This range was measured in an emulation, for normal and heavy-tailed values and up to 300 tokens.
/// The bound applies to the sums before they are rounded to the output type. A comparison of outputs adds the error of that rounding to the
/// bound, so the bound of 5e-4 becomes 4.5e-3. By contrast, a scale that is off by 1 % causes a difference of 5e-3 or more, and one key too
/// many or too few causes a difference of 0.1 or more. If a single key has nearly all of a query's probability, dq and dk are small
/// differences of large numbers, and no bound holds for dq and dk.
pub fn attention_agreement(q: DType) -> Agreement {
    match q {
        DType::F32 => Agreement::RelL2(1e-5),
        DType::Bf16 => Agreement::RelL2(5e-4),
    }
}

/// The usual scale of scores, 1/√head_dim (Vaswani et al., 2017). With this scale, scores of random queries and keys have a variance of
/// one.
pub fn attention_scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

/// Queries, keys and values.
type Qkv<'a, B> = [&'a Tensor<B>; 3];

impl<'a, B: Backend> Attention<'a, B> {
    /// Causal attention with the usual scale ([`attention_scale`]) and without windows or sinks.
    pub fn new([q, k, v]: Qkv<'a, B>, (head_dim, value_dim): (usize, usize), seq_len: usize) -> Self {
        let scale = attention_scale(head_dim);
        Self { q, k, v, head_dim, value_dim, scale, seq_len, causal: true, windows: None, sinks: None }
    }

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "attention";
        check_scale(OP, self.scale)?;
        check_windows(OP, self.windows, self.causal, self.q.rows)?;
        let heads = check_qkv(OP, self.q, self.k, self.v, (self.head_dim, self.value_dim), self.seq_len)?;
        check_sinks(OP, self.sinks, heads)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<AttentionOut<B>> {
        let (tokens, heads) = (self.q.rows, self.q.cols / self.head_dim);
        let out = Tensor::unwritten(b, self.q.dtype(), tokens, heads * self.value_dim)?;
        Ok(AttentionOut { out, lse: b.alloc(tokens * heads)? })
    }
}

/// Attention of one new token, as in decoding with a KV cache. The op computes the row of [`Attention`] for the last of `len` tokens, which
/// attends to the tokens from `first` on. The result has the shape `[1, heads · value_dim]` and the type of q. The results of two backends
/// must agree within [`attention_agreement`]. On one backend, this op and [`Attention`] agree within the same bound. On a CPU, the results
/// of the two ops have the same bits except for the sign of a zero.
#[derive(Debug)]
pub struct AttentionDecode<'a, B: Backend> {
    /// Shape `[1, heads · head_dim]`.
    pub q: &'a Tensor<B>,
    /// The cached keys, of shape `[capacity, kv_heads · head_dim]`. The op does not read rows before `first` or from `len` on.
    pub k: &'a Tensor<B>,
    /// The cached values, of shape `[capacity, kv_heads · value_dim]`. The op does not read rows from `len` on.
    pub v: &'a Tensor<B>,
    /// The number of elements of one head of the queries or keys.
    pub head_dim: usize,
    /// The number of elements of one head of the values or of the output.
    pub value_dim: usize,
    /// The factor by which q·k is multiplied, finite and above 0. The factor is [`attention_scale`] unless a model defines another one.
    pub scale: f32,
    /// The index of the first token to which the query attends, which is 0 unless a sliding window hides keys.
    pub first: usize,
    /// Number of tokens so far, including the token of q.
    pub len: usize,
    /// The attention sink of each query head; see [`Attention::sinks`].
    pub sinks: Option<&'a Tensor<B>>,
}

impl<'a, B: Backend> AttentionDecode<'a, B> {
    /// Attention of the last token to all `len` tokens, with the usual scale ([`attention_scale`]).
    pub fn new([q, k, v]: Qkv<'a, B>, (head_dim, value_dim): (usize, usize), len: usize) -> Self {
        Self { q, k, v, head_dim, value_dim, scale: attention_scale(head_dim), first: 0, len, sinks: None }
    }

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "attention_decode";
        let Self { q, k, v, head_dim, value_dim, scale, first, len, sinks } = self;
        check_scale(OP, *scale)?;
        expect_eq(OP, "rows of q", q.rows, 1)?;
        let heads = check_heads(OP, q, k, v, (*head_dim, *value_dim))?;
        check_sinks(OP, *sinks, heads)?;
        if !(1..=k.rows).contains(len) {
            return Err(Error::shape(OP, "len", len, format!("1 to the {} rows of k", k.rows)));
        }
        match first < len {
            true => Ok(()),
            false => Err(Error::shape(OP, "first", first, format!("below len = {len}"))),
        }
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        Tensor::unwritten(b, self.q.dtype(), 1, self.q.cols / self.head_dim * self.value_dim)
    }
}

/// The backward pass of [`Attention`], which recomputes the probabilities from q, k and lse.
#[derive(Debug)]
pub struct AttentionBackward<'a, B: Backend> {
    /// The queries of the forward pass.
    pub q: &'a Tensor<B>,
    /// The keys of the forward pass.
    pub k: &'a Tensor<B>,
    /// The values of the forward pass.
    pub v: &'a Tensor<B>,
    /// Output of the forward pass.
    pub out: &'a Tensor<B>,
    /// Log-sum-exp from the forward pass.
    pub lse: &'a B::Buf<f32>,
    /// The gradient of `out`, `[t, heads · value_dim]`.
    pub dout: &'a Tensor<B>,
    /// The number of elements of one head of the queries or keys.
    pub head_dim: usize,
    /// The number of elements of one head of the values or of the output.
    pub value_dim: usize,
    /// The factor by which q·k is multiplied, finite and above 0. The factor is [`attention_scale`] unless a model defines another one.
    pub scale: f32,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Whether the forward pass had the causal mask.
    pub causal: bool,
    /// The windows of the forward pass.
    pub windows: Option<&'a Windows<B>>,
    /// The sinks of the forward pass.
    pub sinks: Option<&'a Tensor<B>>,
}

/// The result of [`AttentionBackward`].
#[derive(Debug, Clone)]
pub struct AttentionGrads<B: Backend> {
    /// Gradient of q, with the shape and type of q.
    pub dq: Tensor<B>,
    /// Gradient of k, with the shape and type of k.
    pub dk: Tensor<B>,
    /// Gradient of v, with the shape and type of v.
    pub dv: Tensor<B>,
    /// The contribution of each row to the gradient of the sinks, -exp(sink - lse) · (out · dout), as F32 of shape `[t, heads]`; `None`
    /// without sinks. [`AddBiasBackward`](super::AddBiasBackward) sums the rows.
    pub dsinks: Option<Tensor<B>>,
}

impl<'a, B: Backend> AttentionBackward<'a, B> {
    /// The backward pass of [`Attention::new`]. `out` and `lse` are the results of the forward pass, and `dout` is the gradient of `out`.
    pub fn new(
        [q, k, v]: Qkv<'a, B>,
        (out, lse): (&'a Tensor<B>, &'a B::Buf<f32>),
        dout: &'a Tensor<B>,
        (head_dim, value_dim): (usize, usize),
        seq_len: usize,
    ) -> Self {
        let scale = attention_scale(head_dim);
        let (causal, windows, sinks) = (true, None, None);
        Self { q, k, v, out, lse, dout, head_dim, value_dim, scale, seq_len, causal, windows, sinks }
    }

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "attention_backward";
        check_scale(OP, self.scale)?;
        check_windows(OP, self.windows, self.causal, self.q.rows)?;
        let heads = check_qkv(OP, self.q, self.k, self.v, (self.head_dim, self.value_dim), self.seq_len)?;
        check_sinks(OP, self.sinks, heads)?;
        let shape = (self.q.rows, heads * self.value_dim);
        expect_eq(OP, "shape of out", self.out.shape(), shape)?;
        expect_eq(OP, "shape of dout", self.dout.shape(), shape)?;
        let types = (self.out.dtype(), self.dout.dtype());
        expect_eq(OP, "types of out and dout", types, (self.q.dtype(), self.q.dtype()))?;
        expect_eq(OP, "lse.len()", B::len(self.lse), self.q.rows * heads)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<AttentionGrads<B>> {
        let [dq, dk, dv] = [self.q, self.k, self.v].map(|x| x.unwritten_like(b));
        let (tokens, heads) = (self.q.rows, self.q.cols / self.head_dim);
        let dsinks = self.sinks.map(|_| Tensor::unwritten(b, DType::F32, tokens, heads)).transpose()?;
        Ok(AttentionGrads { dq: dq?, dk: dk?, dv: dv?, dsinks })
    }
}

fn check_scale(op: &'static str, scale: f32) -> Result<()> {
    match scale.is_finite() && scale > 0.0 {
        true => Ok(()),
        false => Err(Error::shape(op, "scale", scale, "a finite number above 0")),
    }
}

fn check_windows<B: Backend>(
    op: &'static str,
    windows: Option<&Windows<B>>,
    causal: bool,
    rows: usize,
) -> Result<()> {
    match windows {
        None => Ok(()),
        Some(windows) if causal => windows.check(op, rows),
        Some(_) => Err(Error::shape(op, "windows", "given", "none, because attention is not causal")),
    }
}

fn check_sinks<B: Backend>(op: &'static str, sinks: Option<&Tensor<B>>, heads: usize) -> Result<()> {
    let Some(sinks) = sinks else { return Ok(()) };
    expect_eq(op, "shape of sinks", sinks.shape(), (1, heads))?;
    expect_eq(op, "type of sinks", sinks.dtype(), DType::F32)
}

/// Returns the number of query heads. `dims` is `(head_dim, value_dim)`.
fn check_qkv<B: Backend>(
    op: &'static str,
    q: &Tensor<B>,
    k: &Tensor<B>,
    v: &Tensor<B>,
    dims: (usize, usize),
    seq_len: usize,
) -> Result<usize> {
    expect_eq(op, "rows of k", k.rows, q.rows)?;
    let heads = check_heads(op, q, k, v, dims)?;
    if seq_len == 0 || !q.rows.is_multiple_of(seq_len) {
        return Err(Error::shape(op, "rows of q", q.rows, format!("a multiple of seq_len = {seq_len}")));
    }
    Ok(heads)
}

/// Returns the number of query heads.
fn check_heads<B: Backend>(
    op: &'static str,
    q: &Tensor<B>,
    k: &Tensor<B>,
    v: &Tensor<B>,
    (head_dim, value_dim): (usize, usize),
) -> Result<usize> {
    expect_eq(op, "types of k and v", (k.dtype(), v.dtype()), (q.dtype(), q.dtype()))?;
    if head_dim == 0
        || !q.cols.is_multiple_of(head_dim)
        || !k.cols.is_multiple_of(head_dim)
        || k.cols == 0
        || !q.cols.is_multiple_of(k.cols)
    {
        let got = format!("{} and {} columns with head_dim {head_dim}", q.cols, k.cols);
        return Err(Error::shape(op, "q and k", got, "whole heads, query heads a multiple of key heads"));
    }
    if value_dim == 0 {
        return Err(Error::shape(op, "value_dim", value_dim, "at least 1"));
    }
    let heads = q.cols / head_dim;
    // There are at least as many query heads as key/value heads, so no other product overflows either.
    if heads.checked_mul(value_dim).is_none() {
        return Err(Error::shape(
            op,
            "value_dim",
            value_dim,
            format!("a row of {heads} heads that can be counted"),
        ));
    }
    expect_eq(op, "shape of v", v.shape(), (k.rows, k.cols / head_dim * value_dim))?;
    Ok(heads)
}
