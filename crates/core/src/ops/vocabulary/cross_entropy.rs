use crate::error::expect_eq;
use crate::ops::Control;
use crate::{Agreement, Backend, DType, Error, Result, Tensor};

/// Cross-entropy in nats, of each token and summed over each shard, and the gradient of scale · Σ loss, where scale is [`Control::LOSS_SCALE`], with
/// respect to the logits.
///
/// Of a row z with target y: e_i = exp(z_i − max z), s = Σ e, loss = log s + (max z − z_y),
/// dz_i = scale · (e_i / s − \[i = y\]). A NaN is passed over as maximum and returns through its exponential.
///
/// s is a sum over 1024 lanes: element i goes to lane i mod 1024, each lane in order from 0, and the lanes are closed by
/// the halving tree 512, 256, …, 1 (lane l with lane l + 512, and so on). Lanes past the vocabulary are zeros; as no e is
/// −0, skipping them changes no bit.
///
/// A target that is negative is not counted: loss 0, gradient 0. One at or past the vocabulary is treated the same, and
/// is counted as a bad id: whoever needs to know reads the count when waiting costs nothing.
#[derive(Debug)]
pub struct CrossEntropy<'a, B: Backend> {
    /// `[t, vocab]`, F32.
    pub logits: &'a Tensor<B>,
    /// The right token of each row.
    pub targets: &'a B::Buf<i32>,
    /// The factor of the gradient is its [`Control::LOSS_SCALE`].
    pub control: &'a B::Buf<f32>,
    /// Number of shards; rows are divided evenly among them.
    pub shards: usize,
    /// Type of the gradient; none if it is not needed.
    pub grad: Option<DType>,
}

/// The result of [`CrossEntropy`].
#[derive(Debug, Clone)]
pub struct CrossEntropyOut<B: Backend> {
    /// Nats of each row, `t` values.
    pub loss: B::Buf<f32>,
    /// Nats of each shard, summed in F64: chunks of [`CrossEntropy::CHUNK`] tokens over 16 lanes in token order, each
    /// closed by the tree 8, 4, 2, 1; then the chunks' sums by the tree over neighbours ((0+1)+(2+3))…, in which an odd
    /// one out passes up unchanged. `shards` values.
    pub shard_nats: B::Buf<f64>,
    /// How many targets lie at or past the vocabulary: one value.
    pub bad_ids: B::Buf<u64>,
    /// `[t, vocab]`, if asked for.
    pub dlogits: Option<Tensor<B>>,
}

impl<B: Backend> CrossEntropy<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Tokens of a chunk of a shard's sum: what one cta sums.
    pub const CHUNK: usize = 4096;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "cross_entropy";
        expect_eq(OP, "targets.len()", B::len(self.targets), self.logits.rows)?;
        expect_eq(OP, "control.len()", B::len(self.control), Control::LEN)?;
        expect_eq(OP, "type of logits", self.logits.dtype(), DType::F32)?;
        check_shards(OP, self.logits.rows, self.shards)
    }

    /// Its result, yet to be written but for the count of bad ids, which is zero. For checked arguments.
    pub fn result(&self, b: &B) -> Result<CrossEntropyOut<B>> {
        let (tokens, vocab) = self.logits.shape();
        let (loss, bad_ids) = (b.alloc(tokens)?, b.counters(1)?);
        let dlogits = self.grad.map(|dtype| Tensor::unwritten(b, dtype, tokens, vocab)).transpose()?;
        Ok(CrossEntropyOut { loss, shard_nats: b.alloc(self.shards)?, bad_ids, dlogits })
    }
}

/// Shards that divide the tokens.
pub(in crate::ops) fn check_shards(op: &'static str, tokens: usize, shards: usize) -> Result<()> {
    if shards == 0 || !tokens.is_multiple_of(shards) {
        return Err(Error::shape(op, "shards", shards, format!("a divisor of the {tokens} tokens")));
    }
    Ok(())
}

/// Reads a count of bad ids from the device, waiting for the operation that made it.
///
/// # Errors
/// [`Error::Shape`] naming operation and argument unless it is zero.
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
