use crate::error::expect_eq;
use crate::ops::Control;
use crate::{Agreement, Backend, DType, Error, Result, Tensor};

/// Computes the cross-entropy of each token in nats, the sum over each shard, and the gradient of scale · Σ loss with respect to the
/// logits. The factor scale is [`Control::LOSS_SCALE`].
///
/// For a row z with target y: e_i = exp(z_i − max z), s = Σ e, loss = log s + (max z − z_y), dz_i = scale · (e_i / s − \[i = y\]). The
/// maximum ignores NaNs. A NaN among the logits still makes the loss NaN, because its exponential is NaN.
///
/// The sum s is divided into 1024 partial sums (lanes): element i is added to lane i mod 1024. Each lane starts at 0 and adds its elements
/// in order. A tree then reduces the lanes: it adds lane l + 512 to lane l, then lane l + 256 to lane l, and so on down to a distance of 1.
/// If the vocabulary has fewer than 1024 entries, the remaining lanes are zeros. A backend may skip lanes of zeros without changing a bit
/// of the sum, because no exponential is −0.
///
/// A row with a negative target has loss 0 and gradient 0. If the target of a row is at or past the end of the vocabulary, the row also has
/// loss 0 and gradient 0, and the op counts the target as a bad id. A caller should read the number of bad ids at a time when waiting for
/// the device costs nothing.
#[derive(Debug)]
pub struct CrossEntropy<'a, B: Backend> {
    /// Shape `[t, vocab]`, F32.
    pub logits: &'a Tensor<B>,
    /// The token id that is the target of each row.
    pub targets: &'a B::Buf<i32>,
    /// The buffer of [`Control`]. The op multiplies the gradient by its element [`Control::LOSS_SCALE`].
    pub control: &'a B::Buf<f32>,
    /// The number of shards, among which the rows are divided evenly.
    pub shards: usize,
    /// The type of the gradient of the logits; `None` to compute only the losses.
    pub grad: Option<DType>,
}

/// The result of [`CrossEntropy`].
#[derive(Debug, Clone)]
pub struct CrossEntropyOut<B: Backend> {
    /// The loss of each row in nats; `t` values.
    pub loss: B::Buf<f32>,
    /// The sum of the losses of each shard in nats, computed in F64. The sum of a chunk of [`CrossEntropy::CHUNK`] tokens is divided into
    /// 16 lanes, which add their tokens in order. A tree then adds the lanes at the distances 8, 4, 2 and 1. The sums of the chunks are
    /// added pairwise, as ((0+1)+(2+3))…; a sum without a neighbour moves up to the next level of this tree unchanged. `shards` values.
    pub shard_nats: B::Buf<f64>,
    /// The number of targets at or past the end of the vocabulary, as a buffer of one value.
    pub bad_ids: B::Buf<u64>,
    /// Gradient of the logits `[t, vocab]`, if requested.
    pub dlogits: Option<Tensor<B>>,
}

impl<B: Backend> CrossEntropy<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// The number of tokens of a chunk when the losses of a shard are summed. One CTA sums one chunk.
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

/// Reads the number of bad ids from the device, after waiting for the operation that counts bad ids.
///
/// # Errors
/// [`Error::Shape`] if there is a bad id. The error names the operation and its argument.
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
