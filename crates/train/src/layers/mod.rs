//! Layers with hand-written backward passes. A layer gives back what its backward pass needs, and keeps nothing.

mod attention;
mod head;
mod heads;
mod linear;
mod mlp;
mod norm;

pub use attention::{Attention, AttentionSaved, AttentionShape, KvCache, copy_rows, rope_table};
pub use head::{HeadInput, HeadSaved};
pub use heads::{Heads, HeadsSaved, Rotation};
pub(crate) use linear::wgrad_x;
pub use linear::{Input, Linear, LinearSaved};
pub use mlp::{Mlp, MlpSaved};
pub use norm::{Norm, NormSaved, Residual};

use crate::cx::Cx;
use crate::ledger::Saved;
use nibble_core::{Kernels, Result};

/// A layer: forward returns its output and what backward needs; backward consumes that, adds the gradients of its
/// parameters and returns the gradient of its input. Using a `Saved` twice does not compile.
pub trait Layer<B: Kernels> {
    /// What it takes.
    type In;
    /// What it gives.
    type Out;
    /// What it keeps for backward.
    type Saved: Saved;

    /// The forward pass.
    fn forward(&self, cx: &Cx<'_, B>, x: Self::In) -> Result<(Self::Out, Self::Saved)>;

    /// The backward pass.
    fn backward(&mut self, cx: &Cx<'_, B>, saved: Self::Saved, dy: Self::Out) -> Result<Self::In>;
}
