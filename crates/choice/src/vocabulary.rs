//! Embedding gradients and losses on a GPU: the sort of tokens by id, and the sum of losses by shard.

use crate::{GpuKernels, Temporary};
use nibble_core::ops::{CrossEntropy, EmbedBackward, PlanPermute};
use nibble_core::{Backend, Error, Result};

/// Maximum number of bits of a radix digit: `plan_permute` takes at most 2^`DIGIT_BITS` groups.
pub const DIGIT_BITS: u32 = 12;
/// Number of words of a task of `embed_backward`.
pub const TASK_WORDS: usize = 4;

/// A radix digit by which `embed_backward` sorts tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digit {
    /// Index of the digit's lowest bit.
    pub shift: u32,
    /// Number of values of the digit.
    pub values: usize,
}

/// The radix digits, lowest first, that distinguish `keys` keys and one value past the last key. For each digit, one `plan_permute` sorts
/// the tokens.
pub fn digits(keys: u32) -> impl Iterator<Item = Digit> {
    let bits = (32 - keys.leading_zeros()).max(1);
    let each = bits.div_ceil(bits.div_ceil(DIGIT_BITS));
    (0..bits).step_by(each as usize).map(move |shift| {
        let top = keys >> shift;
        Digit { shift, values: top.min((1 << each) - 1) as usize + 1 }
    })
}

/// A stable radix sort of the tokens by `keys` keys, one plan per digit. `list(digit, order, values, tokens)` writes each token's value of
/// the digit in the order `order`. Without an `order`, `list` writes the values in token order, and also writes the unsorted tokens.
pub fn sorted_tokens<B: GpuKernels>(
    b: &B,
    tokens: usize,
    keys: u32,
    mut list: impl FnMut(Digit, Option<&B::Buf<i32>>, &B::Buf<i32>, &B::Buf<i32>) -> Result<()>,
) -> Result<B::Buf<i32>> {
    let mut order = None;
    for digit in digits(keys) {
        let (values, as_they_are) = (b.alloc(tokens)?, b.alloc(tokens)?);
        list(digit, order.as_ref(), &values, &as_they_are)?;
        // Each token is a slot of its value's group, so the plan's rows list the tokens in the order of their values.
        let plan = PlanPermute {
            expert: &values,
            token_id: &order.unwrap_or(as_they_are),
            top_k: 1,
            num_slots: tokens,
            num_groups: digit.values,
            align: 1,
            capacity: tokens,
        };
        order = Some(b.plan(plan)?.groups.row_id);
    }
    order.ok_or_else(|| Error::shape("embed_backward", "rows of grad", keys, "at least one id"))
}

/// The sizes of the sums that `embed_backward` computes after it has sorted the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmbedTasks {
    /// Maximum number of runs of tokens with one id that take several chunks. A run of several chunks has more tokens than a chunk.
    pub most_runs: usize,
    /// Number of rows of partial sums: two rows per 64 tokens, so that every run of several chunks has its own rows.
    pub rows: usize,
}

impl EmbedTasks {
    /// The sizes for an operation; `None` if there is nothing to add.
    pub fn of<B: Backend>(op: &EmbedBackward<'_, B>) -> Option<Self> {
        let ((tokens, d), rows) = (op.dy.shape(), op.grad.rows);
        (tokens * d * rows > 0).then(|| Self::new::<B>(tokens))
    }

    /// The sizes for `tokens` tokens.
    pub const fn new<B: Backend>(tokens: usize) -> Self {
        Self { most_runs: tokens.div_ceil(EmbedBackward::<B>::CHUNK), rows: tokens.div_ceil(32) }
    }

    /// Temporary memory for `tokens` rows of `d` columns, in order: tasks of chunks, tasks of runs, partial sums. Two counters are
    /// allocated separately.
    pub const fn temporaries(&self, tokens: usize, d: usize) -> [Temporary; 3] {
        [
            Temporary::new("chunks", TASK_WORDS * tokens * size_of::<i32>()),
            Temporary::new("runs", TASK_WORDS * self.most_runs * size_of::<i32>()),
            Temporary::new("sums of chunks", self.rows * d * size_of::<f32>()),
        ]
    }
}

/// Number of chunks of a shard's losses; each chunk is summed separately.
pub const fn chunks_of_losses<B: Backend>(tokens: usize, shards: usize) -> usize {
    (tokens / if shards == 0 { 1 } else { shards }).div_ceil(CrossEntropy::<B>::CHUNK)
}

/// Temporary memory of the sums of losses by shard.
pub const fn losses_temporary<B: Backend>(tokens: usize, shards: usize) -> Temporary {
    Temporary::new("sums of losses", shards * chunks_of_losses::<B>(tokens, shards) * size_of::<f64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_of_an_embedding_s_gradient_are_counted_by_hand() {
        let tasks = EmbedTasks { most_runs: 3, rows: 5 };
        let bytes = tasks.temporaries(100, 64).map(|temporary| temporary.bytes);
        // A word and an F32 value have four bytes each; there are five rows of partial sums.
        assert_eq!(bytes, [TASK_WORDS * 100 * 4, TASK_WORDS * 3 * 4, 5 * 64 * 4]);
    }

    #[test]
    fn digits_tell_all_keys_apart_and_are_few_enough_for_a_plan() {
        let listed = |keys| digits(keys).map(|digit| (digit.shift, digit.values)).collect::<Vec<_>>();
        assert_eq!(listed(1), [(0, 2)]);
        assert_eq!(listed(12), [(0, 13)]);
        assert_eq!(listed(4095), [(0, 4096)]);
        assert_eq!(listed(4096), [(0, 128), (7, 33)]);
        assert_eq!(listed(4 * 151_936), [(0, 1024), (10, 594)]);
        for keys in [2, 7000, 4 * 50_257, 16 * 262_144, 64 * 20_000_000] {
            let digits = listed(keys);
            assert!(digits.iter().all(|&(_, values)| values <= 1 << DIGIT_BITS), "{digits:?}");
            let (top, values) = digits[digits.len() - 1];
            assert_eq!((keys >> top) as usize + 1, values, "{digits:?}");
            for pair in digits.windows(2) {
                assert_eq!(1usize << (pair[1].0 - pair[0].0), pair[0].1, "{digits:?}");
            }
        }
    }
}
