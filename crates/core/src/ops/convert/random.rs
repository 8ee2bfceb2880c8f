//! What a quantization takes of random streams: random bits, and transforms with random signs.

use crate::{Backend, Error, Result};
use nibble_formats::{Purpose, Stream, hadamard};

/// A random Hadamard transform along the contraction, which is applied in F32 before the quantization. Each run of `len` values x is
/// multiplied by random signs and then by H/√len ([`hadamard::rht`]). Both operands of a product must have the same transform, because only
/// then do the two transforms cancel.
#[derive(Debug)]
pub struct Hadamard<'a, B: Backend> {
    /// The number of consecutive values that are transformed together: 16, 32, 64 or 128.
    pub len: usize,
    /// The stream of random signs. A sign depends on the position along the contraction, counted from the start of the group. The stream's
    /// purpose is `Sign`, and its seed and site are those of the linear layer. The stream's step is 0 if the signs are the same in all
    /// steps, or if the step is in the device buffer `step`.
    pub signs: Stream,
    /// A device buffer whose first value is the number of the step, if the signs change from step to step.
    pub step: Option<&'a B::Buf<u32>>,
    /// The position that the first value of each group has in the whole group. The position is above 0 if a matrix has a part of a longer
    /// group that does not start at the group's first row. The position is a multiple of `len`, and along rows it is 0.
    pub first: u64,
}

impl<B: Backend> Clone for Hadamard<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Hadamard<'_, B> {}

impl<B: Backend> Hadamard<'_, B> {
    /// The usual number of consecutive values that are transformed together.
    pub const DEFAULT_LEN: usize = 64;

    /// The default transform of the linear layer `site`.
    pub const fn new(seed: u64, site: u32) -> Self {
        let signs = Stream::new(seed, Purpose::Sign, site, 0);
        Self { len: Self::DEFAULT_LEN, signs, step: None, first: 0 }
    }

    /// Checks the length, the purpose of the stream, and that the buffer of the step is not empty. `arguments` are the names of these three
    /// arguments in errors.
    pub(crate) fn check(&self, op: &'static str, arguments: [&'static str; 3]) -> Result<()> {
        let [of_len, of_purpose, of_step] = arguments;
        if !hadamard::LENGTHS.contains(&self.len) {
            return Err(Error::shape(op, of_len, self.len, "16, 32, 64 or 128"));
        }
        if self.signs.purpose != Purpose::Sign {
            return Err(Error::shape(op, of_purpose, format!("{:?}", self.signs.purpose), "Sign"));
        }
        check_step::<B>(op, of_step, self.step)
    }
}

/// The random bits of each element for stochastic rounding, which are a function of the seed, the tensor (the `site` of the stream), and
/// the step.
#[derive(Debug)]
pub struct Random<'a, B: Backend> {
    /// The stream that gives the seed, the purpose and the site, and also the step if `step` is `None`.
    pub stream: Stream,
    /// A device buffer whose first value is the number of the step. The operation reads the step from this buffer when it runs, so that
    /// each replay of recorded work uses other random bits. The step in this buffer replaces the step of `stream`.
    pub step: Option<&'a B::Buf<u32>>,
    /// The index that the first element of this tensor has in the whole tensor, a multiple of the row length. The index is above 0 if this
    /// tensor is a shard of the whole tensor that does not start at its first row.
    pub first: u64,
}

impl<B: Backend> Clone for Random<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Random<'_, B> {}

impl<B: Backend> From<Stream> for Random<'_, B> {
    /// Random bits for a whole tensor, at the stream's own step.
    fn from(stream: Stream) -> Self {
        Self { stream, step: None, first: 0 }
    }
}

/// Checks that a buffer on the device that should contain the number of the step is not empty.
pub(crate) fn check_step<B: Backend>(
    op: &'static str,
    argument: &'static str,
    step: Option<&B::Buf<u32>>,
) -> Result<()> {
    match step {
        Some(step) if B::len(step) == 0 => Err(Error::shape(op, argument, "an empty buffer", "the step")),
        _ => Ok(()),
    }
}
