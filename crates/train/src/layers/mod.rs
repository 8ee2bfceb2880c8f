//! Layers with hand-written backward passes. A layer stores nothing between its passes: `forward` returns the activations that `backward`
//! needs, and `backward` consumes them. There is no autograd graph, so the fields of a `Saved` struct are the complete list of saved
//! activations.
//!
//! A [`Layer`] also lists the copies of its weights that a step makes ([`Layer::wanted`]), lists its parameters, and can recompute the
//! saved activations of its forward pass ([`Layer::again`]). Attention's projections share one input, which is saved and lifted once
//! (`shared.rs`).

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

pub use embedding::{Embedding, EmbeddingSaved, Patches};
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

/// A layer. `forward` returns the output and the activations that `backward` needs. `backward` consumes these activations, adds the
/// gradients of the layer's parameters and returns the gradient of the input. `backward` takes ownership of its `Saved`, so code that uses
/// a `Saved` twice does not compile.
///
/// The embedding and the head do not implement this trait; their methods have the same names but other arguments.
pub trait Layer<B: Kernels> {
    /// The layer's input.
    type In;
    /// The layer's output.
    type Out;
    /// The activations that the layer saves for the backward pass.
    type Saved: Saved;

    /// The layer's weights in the forms that its passes read, in the order in which their copies are made.
    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>>;

    /// Makes the copies of the weights for this step.
    ///
    /// # Errors
    /// Passes on errors of the backend and of other ranks.
    fn prepare(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        Gathering::begin(cx, vec![self.wanted(cx)])?.finish_next(cx, self.params())
    }

    /// The layer's parameters, in canonical order.
    fn params(&mut self) -> Vec<&mut Param<B>>;

    /// Sets which activations later backward passes recompute. Most layers ignore this setting.
    fn recompute(&mut self, _scopes: &[Scope]) {}

    /// The forward pass.
    fn forward(&self, cx: &Cx<'_, B>, x: Self::In) -> Result<(Self::Out, Self::Saved)>;

    /// Recomputes the activations that a forward pass saves. If possible, a layer leaves out the work that only its output needs.
    fn again(&self, cx: &Cx<'_, B>, x: Self::In) -> Result<Self::Saved> {
        Ok(self.forward(cx, x)?.1)
    }

    /// The backward pass: computes the gradient of the input from the gradient of the output.
    fn backward(&mut self, cx: &Cx<'_, B>, saved: Self::Saved, dy: Tensor<B>) -> Result<Tensor<B>>;
}
