//! Layers with hand-written backward passes. A layer gives back what its backward pass needs, and keeps nothing.

mod embedding;
mod grouped_query;
mod head;
mod heads;
mod linear;
mod mlp;
mod norm;

pub use embedding::{Embedding, EmbeddingSaved};
pub use grouped_query::{GroupedQuery, GroupedQuerySaved, KvCache, copy_rows, rope_table};
pub use head::{Head, HeadInput, HeadSaved};
pub use heads::{Heads, HeadsSaved, Rotation};
pub(crate) use linear::wgrad_x;
pub use linear::{Input, Linear, LinearSaved};
pub use mlp::{Mlp, MlpSaved};
pub use norm::{Norm, NormSaved, Residual};

use crate::cx::Cx;
use crate::ledger::Saved;
use crate::param::Param;
use crate::recompute::Scope;
use nibble_core::{Kernels, Result, Tensor};

/// A layer: forward returns its output and what backward needs; backward consumes that, adds the gradients of its
/// parameters and returns the gradient of its input. Using a `Saved` twice does not compile.
///
/// The embedding and the head have the same parts with other arguments: each says why.
pub trait Layer<B: Kernels> {
    /// What it takes.
    type In;
    /// What it gives.
    type Out;
    /// What it keeps for backward.
    type Saved: Saved;

    /// Makes the weights' copies for this step. A layer whose weight is taken as it is makes none.
    fn prepare(&mut self, _cx: &Cx<'_, B>) -> Result<()> {
        Ok(())
    }

    /// Its parameters, in canonical order.
    fn params(&mut self) -> Vec<&mut Param<B>>;

    /// Says what the backward passes to come make again. Most layers have no choice.
    fn recompute(&mut self, _scopes: &[Scope]) {}

    /// The forward pass.
    fn forward(&self, cx: &Cx<'_, B>, x: Self::In) -> Result<(Self::Out, Self::Saved)>;

    /// What a forward pass keeps, made again. A layer that can do it leaves out what only its output needs.
    fn again(&self, cx: &Cx<'_, B>, x: Self::In) -> Result<Self::Saved> {
        Ok(self.forward(cx, x)?.1)
    }

    /// The backward pass: the gradient of the input, from that of the output.
    fn backward(&mut self, cx: &Cx<'_, B>, saved: Self::Saved, dy: Tensor<B>) -> Result<Tensor<B>>;
}
