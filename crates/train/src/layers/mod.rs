//! Layers with hand-written backward passes. A layer stores nothing between its passes: `forward` returns what `backward` needs, and
//! `backward` consumes it. There is no autograd graph, so the fields of a `Saved` struct are the complete list of saved activations.
//!
//! A [`Layer`] also says which copies of its weights a step makes ([`Layer::wanted`]), lists its parameters, and can recompute what its
//! forward pass saved ([`Layer::again`]). Attention's projections share one input: it is saved and lifted once (`shared.rs`).

mod embedding;
mod grouped_query;
mod head;
mod heads;
mod kv_cache;
mod latent;
mod linear;
mod mlp;
mod norm;
mod rope;
mod shared;

pub use embedding::{Embedding, EmbeddingSaved};
pub use grouped_query::{GroupedQuery, GroupedQuerySaved};
pub use head::{Head, HeadInput, HeadSaved};
pub use heads::{Heads, HeadsSaved, Rotation};
pub use kv_cache::{KvCache, copy_rows};
pub use latent::{Latent, LatentSaved, LatentUp, LatentUpSaved};
pub use linear::{Linear, LinearSaved};
pub use mlp::{Mlp, MlpSaved};
pub use norm::{Norm, NormSaved, Residual};
pub use rope::rope_table;

use crate::cx::Cx;
use crate::ledger::Saved;
use crate::param::{Gathering, Param, Wanted};
use crate::recompute::Scope;
use nibble_core::{Kernels, Result, Tensor};

/// A layer: forward returns its output and what backward needs; backward consumes that, adds the gradients of its
/// parameters and returns the gradient of its input. Using a `Saved` twice does not compile.
///
/// The embedding and the head do not implement this trait; they have methods of the same names with other arguments.
pub trait Layer<B: Kernels> {
    /// Its input.
    type In;
    /// Its output.
    type Out;
    /// The activations that it saves for the backward pass.
    type Saved: Saved;

    /// Its weights as its passes read them, in the order in which their copies are made.
    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>>;

    /// Makes the weights' copies for this step.
    ///
    /// # Errors
    /// From the backend and other ranks.
    fn prepare(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        Gathering::begin(cx, vec![self.wanted(cx)])?.finish_next(cx, self.params())
    }

    /// Its parameters, in canonical order.
    fn params(&mut self) -> Vec<&mut Param<B>>;

    /// Sets what later backward passes recompute. Most layers have no choice.
    fn recompute(&mut self, _scopes: &[Scope]) {}

    /// The forward pass.
    fn forward(&self, cx: &Cx<'_, B>, x: Self::In) -> Result<(Self::Out, Self::Saved)>;

    /// Recomputes what a forward pass saves. Where possible, a layer leaves out work that only its output needs.
    fn again(&self, cx: &Cx<'_, B>, x: Self::In) -> Result<Self::Saved> {
        Ok(self.forward(cx, x)?.1)
    }

    /// The backward pass: the gradient of the input, from that of the output.
    fn backward(&mut self, cx: &Cx<'_, B>, saved: Self::Saved, dy: Tensor<B>) -> Result<Tensor<B>>;
}
