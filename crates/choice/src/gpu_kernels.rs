use crate::swiglu_path::{SwigluBackwardPath, SwigluPath};
use nibble_core::ops::{
    Counts, Dequantize, Emitted, PlanPermute, ProductArgs, Quantize, Swiglu, SwigluBackward, SwigluGrads,
    SwigluOut, Transcode, Transcoded,
};
use nibble_core::{Backend, DType, Groups, Operand, PermuteMap, Plain, Result, Tensor};
use std::ops::Range;

/// Rows of bytes that are copied to longer or shorter rows; longer rows end with zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lines {
    /// Number of rows.
    pub count: usize,
    /// Bytes of a source row.
    pub from: usize,
    /// Bytes of a target row.
    pub to: usize,
    /// Mask of the bits that count in the last byte of a source row.
    pub last: u32,
}

/// Inputs of a cross-entropy of some rows, besides the logits.
#[derive(Debug)]
pub struct TargetRows<'a, B: Backend> {
    /// The target of each row.
    pub targets: &'a B::Buf<i32>,
    /// Holds the factor of the gradient; none without a gradient.
    pub control: Option<&'a B::Buf<f32>>,
    /// Counts targets at or past the vocabulary.
    pub bad_ids: &'a B::Buf<u64>,
    /// The type of the tokens, which selects the kernel.
    pub tokens: DType,
}

/// The kernels and operations that the sequences of this crate issue. `nibble-cuda` launches them. `nibble-dry` counts their memory;
/// a kernel that only writes to its arguments does nothing there.
///
/// A sequence is a function of `nibble-choice` that calls several kernels or operations of a backend and allocates their intermediate results. It is
/// here because the order of its allocations and frees is part of the choice.
pub trait GpuKernels: Backend {
    /// Quantizes, and adds its counts to `counts`, or to new counters.
    fn quantize_counting(
        &self,
        op: Quantize<'_, Self>,
        counts: Option<&Counts<Self>>,
    ) -> Result<Emitted<Self>>;
    /// Dequantizes.
    fn decode(&self, op: Dequantize<'_, Self>) -> Result<Tensor<Self>>;
    /// Transcodes rows of whole blocks.
    fn transcode_whole_blocks(&self, op: Transcode<'_, Self>) -> Result<Transcoded<Self>>;
    /// Sorts slots by group.
    fn plan(&self, op: PlanPermute<'_, Self>) -> Result<PermuteMap<Self>>;
    /// Multiplies into D. An empty contraction gives zeros.
    fn multiply(&self, product: ProductArgs<'_, Self>, d: &mut Tensor<Self>) -> Result<()>;
    /// Sums the losses of each shard's tokens.
    fn sum_losses(&self, loss: &Self::Buf<f32>, shard_nats: &Self::Buf<f64>) -> Result<()>;

    /// Makes the handle the only one to its bytes: copies them first if another handle shares them.
    fn make_sole(&self, x: &mut Tensor<Self>) -> Result<()>;
    /// A view of some rows of a matrix.
    fn rows_of(&self, x: &Tensor<Self>, rows: Range<usize>) -> Result<Tensor<Self>>;
    /// A view of some values of a buffer.
    fn part_of<T: Plain>(&self, x: &Self::Buf<T>, range: Range<usize>) -> Result<Self::Buf<T>>;

    /// Kernel: copies rows of bytes to longer or shorter rows.
    fn recut(&self, lines: &Lines, from: &Self::Buf<u8>, to: &Self::Buf<u8>) -> Result<()>;
    /// Kernel: the first result of [`Swiglu`] on its path.
    fn swiglu_kernel(&self, op: &Swiglu<'_, Self>, path: &SwigluPath, out: &SwigluOut<Self>) -> Result<()>;
    /// Kernel: the first result of [`SwigluBackward`] on its path, from `h`, which is plain or in the form that the path reads. `parts`
    /// holds partial gradients of the gate weights.
    fn swiglu_backward_kernel(
        &self,
        op: &SwigluBackward<'_, Self>,
        path: &SwigluBackwardPath,
        h: &Operand<Self>,
        parts: Option<&Self::Buf<f32>>,
        out: &SwigluGrads<Self>,
    ) -> Result<()>;
    /// Kernel: cross-entropy of some rows, and the gradient of their logits if `dlogits` is given.
    fn target_rows(
        &self,
        rows: &TargetRows<'_, Self>,
        logits: &Tensor<Self>,
        loss: &Self::Buf<f32>,
        dlogits: Option<&Tensor<Self>>,
    ) -> Result<()>;
    /// Kernel: lists starts and lengths of groups of `each` rows that begin `apart` rows from each other.
    fn list_groups(&self, groups: &Groups<Self>, each: usize, apart: usize) -> Result<()>;
    /// Kernel: rounds a sum to a BF16 gradient, or adds it to the gradient.
    fn round_sum(&self, sum: &Tensor<Self>, grad: &Tensor<Self>, accumulate: bool) -> Result<()>;
}
