use crate::swiglu_path::{SwigluBackwardPath, SwigluPath};
use nibble_core::ops::{
    Counts, Dequantize, Emitted, PlanPermute, ProductArgs, Quantize, Swiglu, SwigluBackward, SwigluGrads,
    SwigluOut, Transcode, Transcoded,
};
use nibble_core::{Backend, DType, Groups, Operand, PermuteMap, Plain, Result, Tensor};
use std::ops::Range;

/// A copy of rows of bytes to rows of another length. If the target rows are longer, they end with zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lines {
    /// Number of rows.
    pub count: usize,
    /// Bytes of a source row.
    pub from: usize,
    /// Bytes of a target row.
    pub to: usize,
    /// Mask of the bits of the last byte of a source row that belong to codes.
    pub last: u32,
}

/// The inputs of a cross-entropy over some rows, without the logits.
#[derive(Debug)]
pub struct TargetRows<'a, B: Backend> {
    /// The target of each row.
    pub targets: &'a B::Buf<i32>,
    /// The buffer that contains the factor of the gradient; `None` if no gradient is computed.
    pub control: Option<&'a B::Buf<f32>>,
    /// The counter of targets at or past the end of the vocabulary.
    pub bad_ids: &'a B::Buf<u64>,
    /// The type of the activations of tokens, which determines the kernel.
    pub tokens: DType,
}

/// The kernels and operations that the functions of this crate call on a GPU backend. `nibble-cuda` launches these kernels, and
/// `nibble-dry` counts the memory that they need. The implementation in `nibble-dry` does nothing for a kernel that only writes to its
/// arguments.
///
/// A sequence is a function of `nibble-choice` that calls several kernels or operations of a backend and allocates their intermediate
/// results. Such sequences are in this crate, because the order of their allocations and frees is a part of the choice of kernels.
pub trait GpuKernels: Backend {
    /// Quantizes a tensor, and adds the counts to `counts`, or to new counters.
    fn quantize_counting(
        &self,
        op: Quantize<'_, Self>,
        counts: Option<&Counts<Self>>,
    ) -> Result<Emitted<Self>>;
    /// Dequantizes a tensor.
    fn decode(&self, op: Dequantize<'_, Self>) -> Result<Tensor<Self>>;
    /// Transcodes rows of whole blocks.
    fn transcode_whole_blocks(&self, op: Transcode<'_, Self>) -> Result<Transcoded<Self>>;
    /// Sorts slots by group.
    fn plan(&self, op: PlanPermute<'_, Self>) -> Result<PermuteMap<Self>>;
    /// Computes a product into D. An empty contraction gives zeros.
    fn multiply(&self, product: ProductArgs<'_, Self>, d: &mut Tensor<Self>) -> Result<()>;
    /// Sums the losses of each shard's tokens.
    fn sum_losses(&self, loss: &Self::Buf<f32>, shard_nats: &Self::Buf<f64>) -> Result<()>;

    /// Makes the handle the only owner of its bytes. The bytes are copied if another handle shares them.
    fn make_sole(&self, x: &mut Tensor<Self>) -> Result<()>;
    /// A view of some rows of a matrix.
    fn rows_of(&self, x: &Tensor<Self>, rows: Range<usize>) -> Result<Tensor<Self>>;
    /// A view of some values of a buffer.
    fn part_of<T: Plain>(&self, x: &Self::Buf<T>, range: Range<usize>) -> Result<Self::Buf<T>>;

    /// Launches the kernel that copies rows of bytes to longer or shorter rows.
    fn recut(&self, lines: &Lines, from: &Self::Buf<u8>, to: &Self::Buf<u8>) -> Result<()>;
    /// Launches the kernel that computes the first result of [`Swiglu`] on its path.
    fn swiglu_kernel(&self, op: &Swiglu<'_, Self>, path: &SwigluPath, out: &SwigluOut<Self>) -> Result<()>;
    /// Launches the kernel that computes the first result of [`SwigluBackward`] on its path from `h`, which is plain or in the form that
    /// the path reads. `parts` holds partial gradients of the gate weights.
    fn swiglu_backward_kernel(
        &self,
        op: &SwigluBackward<'_, Self>,
        path: &SwigluBackwardPath,
        h: &Operand<Self>,
        parts: Option<&Self::Buf<f32>>,
        out: &SwigluGrads<Self>,
    ) -> Result<()>;
    /// Launches the kernel that computes the cross-entropy of some rows, and the gradient of their logits if `dlogits` is given.
    fn target_rows(
        &self,
        rows: &TargetRows<'_, Self>,
        logits: &Tensor<Self>,
        loss: &Self::Buf<f32>,
        dlogits: Option<&Tensor<Self>>,
    ) -> Result<()>;
    /// Launches the kernel that lists starts and lengths of groups of `each` rows; the starts are `apart` rows apart.
    fn list_groups(&self, groups: &Groups<Self>, each: usize, apart: usize) -> Result<()>;
    /// Launches the kernel that rounds a sum to a BF16 gradient, or adds the sum to the gradient.
    fn round_sum(&self, sum: &Tensor<Self>, grad: &Tensor<Self>, accumulate: bool) -> Result<()>;
}
