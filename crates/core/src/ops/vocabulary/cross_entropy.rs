use crate::error::expect_eq;
use crate::ops::Control;
use crate::{Agreement, Backend, DType, Error, Result, Tensor};

/// Computes the cross-entropy in nats of each token, its sum over each shard, and the gradient of scale · Σ loss with respect to the
/// logits, where scale is [`Control::LOSS_SCALE`].
///
/// For a row z with target y: e_i = exp(z_i − max z), s = Σ e, loss = log s + (max z − z_y), dz_i = scale · (e_i / s − \[i = y\]). The
/// maximum ignores a NaN, but the exponential of the NaN still makes the loss NaN.
///
/// s is a sum over 1024 lanes: element i goes to lane i mod 1024. Each lane sums in order from 0, and the lanes are reduced by the halving
/// tree 512, 256, …, 1 (lane l with lane l + 512, and so on). Lanes past the vocabulary hold zeros. No e is −0, so a backend may skip lanes
/// of zeros without changing a bit of the sum.
///
/// A row with a negative target has loss 0 and gradient 0. A row whose target is at or past the end of the vocabulary also has loss 0 and
/// gradient 0, and its target is counted as a bad id. A caller reads the count of bad ids when waiting for the device costs nothing.
#[derive(Debug)]
pub struct CrossEntropy<'a, B: Backend> {
    /// Shape `[t, vocab]`, F32.
    pub logits: &'a Tensor<B>,
    /// The target of each row.
    pub targets: &'a B::Buf<i32>,
    /// The step's scalars; [`Control::LOSS_SCALE`] is the factor of the gradient.
    pub control: &'a B::Buf<f32>,
    /// Number of shards; rows are divided evenly among them.
    pub shards: usize,
    /// Type of the gradient; `None` to compute only the losses.
    pub grad: Option<DType>,
}

/// The result of [`CrossEntropy`].
#[derive(Debug, Clone)]
pub struct CrossEntropyOut<B: Backend> {
    /// Loss of each row in nats: `t` values.
    pub loss: B::Buf<f32>,
    /// Loss of each shard in nats, summed in F64. A chunk of [`CrossEntropy::CHUNK`] tokens is summed over 16 lanes in token order, and the
    /// lanes are reduced by the tree 8, 4, 2, 1. The sums of chunks are added by the tree over neighbours ((0+1)+(2+3))…, in which an odd
    /// sum moves up unchanged. `shards` values.
    pub shard_nats: B::Buf<f64>,
    /// Number of targets at or past the end of the vocabulary: one value.
    pub bad_ids: B::Buf<u64>,
    /// Gradient of the logits `[t, vocab]`, if requested.
    pub dlogits: Option<Tensor<B>>,
}

impl<B: Backend> CrossEntropy<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Number of tokens of a chunk in a shard's sum; one CTA sums a chunk.
    pub const CHUNK: usize = 4096;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "cross_entropy";
        expect_eq(OP, "targets.len()", B::len(self.targets), self.logits.rows)?;
        expect_eq(OP, "control.len()", B::len(self.control), Control::LEN)?;
        expect_eq(OP, "type of logits", self.logits.dtype(), DType::F32)?;
        check_shards(OP, self.logits.rows, self.shards)
    }

    /// Allocates the result, with a zeroed count of bad ids. Call `check` first.
    pub fn result(&self, b: &B) -> Result<CrossEntropyOut<B>> {
        let (tokens, vocab) = self.logits.shape();
        let (loss, bad_ids) = (b.alloc(tokens)?, b.counters(1)?);
        let dlogits = self.grad.map(|dtype| Tensor::unwritten(b, dtype, tokens, vocab)).transpose()?;
        Ok(CrossEntropyOut { loss, shard_nats: b.alloc(self.shards)?, bad_ids, dlogits })
    }
}

/// Checks that the shards divide the tokens.
pub(in crate::ops) fn check_shards(op: &'static str, tokens: usize, shards: usize) -> Result<()> {
    if shards == 0 || !tokens.is_multiple_of(shards) {
        return Err(Error::shape(op, "shards", shards, format!("a divisor of the {tokens} tokens")));
    }
    Ok(())
}

/// Reads a count of bad ids from the device; waits for the operation that counts them.
///
/// # Errors
/// [`Error::Shape`] that names the operation and the argument, unless the count is zero.
pub fn verify_ids<B: Backend>(
    b: &B,
    op: &'static str,
    argument: &'static str,
    bad_ids: &B::Buf<u64>,
    vocab: usize,
) -> Result<()> {
    match b.download(bad_ids)?.iter().sum::<u64>() {
        0 => Ok(()),
        bad => {
            let got =
                format!("outside the vocabulary in {bad} {}", if bad == 1 { "place" } else { "places" });
            Err(Error::shape(op, argument, got, format!("tokens below {vocab}")))
        }
    }
}
