use crate::swiglu_path::{SwigluBackwardPath, SwigluPath};
use nibble_core::ops::{
    Counts, Dequantize, Emitted, PlanPermute, ProductArgs, Quantize, Swiglu, SwigluBackward, SwigluGrads,
    SwigluOut, Transcode, Transcoded,
};
use nibble_core::{Backend, DType, Groups, Operand, PermuteMap, Plain, Result, Tensor};
use std::ops::Range;

/// Lines of bytes that are copied to longer or shorter ones; what a longer one has more is zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lines {
    /// How many.
    pub count: usize,
    /// Bytes of a line before.
    pub from: usize,
    /// And after.
    pub to: usize,
    /// The bits that count of the last byte of a line before.
    pub last: u32,
}

/// Some rows of a cross-entropy, by their targets.
#[derive(Debug)]
pub struct TargetRows<'a, B: Backend> {
    /// The target of each row.
    pub targets: &'a B::Buf<i32>,
    /// What has the factor of the gradient; none where there is none.
    pub control: Option<&'a B::Buf<f32>>,
    /// Counts targets at or past the vocabulary.
    pub bad_ids: &'a B::Buf<u64>,
    /// The type of the tokens, by which the kernel is chosen.
    pub tokens: DType,
}

/// What the sequences of this crate are made of. `nibble-cuda` launches it. `nibble-dry` counts its memory: for a kernel that only writes what
/// it is given there is nothing to do.
///
/// A sequence is a function of this crate that issues several kernels or operations and makes what they need in between. It is here because the
/// order in which it takes and drops memory is part of the choice.
pub trait GpuKernels: Backend {
    /// Quantizes, with what it counts added to `counts`, or to counts of its own.
    fn quantize_counting(
        &self,
        op: Quantize<'_, Self>,
        counts: Option<&Counts<Self>>,
    ) -> Result<Emitted<Self>>;
    /// Decodes.
    fn decode(&self, op: Dequantize<'_, Self>) -> Result<Tensor<Self>>;
    /// Converts rows that are whole blocks.
    fn transcode_whole_blocks(&self, op: Transcode<'_, Self>) -> Result<Transcoded<Self>>;
    /// Sorts.
    fn plan(&self, op: PlanPermute<'_, Self>) -> Result<PermuteMap<Self>>;
    /// Multiplies into D. Products of nothing are zeros.
    fn multiply(&self, product: ProductArgs<'_, Self>, d: &mut Tensor<Self>) -> Result<()>;
    /// The losses of each shard from those of its tokens.
    fn sum_losses(&self, loss: &Self::Buf<f32>, shard_nats: &Self::Buf<f64>) -> Result<()>;

    /// A handle of its own to the tensor's bytes: copied first, if another one shares them.
    fn make_sole(&self, x: &mut Tensor<Self>) -> Result<()>;
    /// Some rows of a matrix, where they lie.
    fn rows_of(&self, x: &Tensor<Self>, rows: Range<usize>) -> Result<Tensor<Self>>;
    /// Some values of a buffer, where they lie.
    fn part_of<T: Plain>(&self, x: &Self::Buf<T>, range: Range<usize>) -> Result<Self::Buf<T>>;

    /// Kernel: lines of bytes to longer or shorter ones.
    fn recut(&self, lines: &Lines, from: &Self::Buf<u8>, to: &Self::Buf<u8>) -> Result<()>;
    /// Kernel: the first result of [`Swiglu`] by its path.
    fn swiglu_kernel(&self, op: &Swiglu<'_, Self>, path: &SwigluPath, out: &SwigluOut<Self>) -> Result<()>;
    /// Kernel: the first result of [`SwigluBackward`] by its path, from `h`, which is plain or as the path reads it. `parts` are of the gate
    /// weights' gradients.
    fn swiglu_backward_kernel(
        &self,
        op: &SwigluBackward<'_, Self>,
        path: &SwigluBackwardPath,
        h: &Operand<Self>,
        parts: Option<&Self::Buf<f32>>,
        out: &SwigluGrads<Self>,
    ) -> Result<()>;
    /// Kernel: cross-entropy of some rows, and the gradient of their logits where there is a place for it.
    fn target_rows(
        &self,
        rows: &TargetRows<'_, Self>,
        logits: &Tensor<Self>,
        loss: &Self::Buf<f32>,
        dlogits: Option<&Tensor<Self>>,
    ) -> Result<()>;
    /// Kernel: starts and lengths of groups of `each` rows that begin `apart` rows from each other.
    fn list_groups(&self, groups: &Groups<Self>, each: usize, apart: usize) -> Result<()>;
    /// Kernel: rounds a sum to a BF16 gradient, or adds it there.
    fn round_sum(&self, sum: &Tensor<Self>, grad: &Tensor<Self>, accumulate: bool) -> Result<()>;
}
