//! Linear projections of one input. The input is converted, saved and lifted once for all projections whose recipes agree.

use super::Linear;
use crate::convert::LayerName;
use crate::cx::Cx;
use nibble_core::recipe::{Pass, SharedInput};
use nibble_core::{Groups, Kernels, Operand, Result, Tensor};

/// Projections of one input. `name` is the name of the layer to which the projections belong.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedProjections<'a, B: Kernels, const N: usize> {
    pub name: &'a str,
    pub projections: [&'a Linear<B>; N],
}

/// The operand that a projection multiplies in fprop, and the operand that is saved for the projection. In the backward pass, both are
/// wgrad's operand.
type Made<B> = (Operand<B>, Operand<B>);

impl<B: Kernels, const N: usize> SharedProjections<'_, B, N> {
    /// Returns, for each projection, the operand that fprop reads and the operand that is saved for the backward pass.
    pub fn inputs(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>) -> Result<Vec<Made<B>>> {
        self.converted(cx, (Pass::Forward, self.name), |_| Operand::Plain(x_td.clone()), cx.groups_of(x_td))
    }

    /// Converts the saved inputs to the form that each projection's wgrad reads. All projections whose recipes agree share one conversion
    /// of the inputs. The shared conversion has its own name, and therefore its own random bits if the conversion needs random bits.
    pub fn wgrad_inputs(&self, cx: &Cx<'_, B>, saved: [Operand<B>; N]) -> Result<Vec<Made<B>>> {
        let whole = format!("{}.qkv", self.name);
        self.converted(cx, (Pass::Backward, &whole), |i| saved[i].clone(), Some(&cx.shards.groups))
    }

    /// Converts the input for each projection. A conversion that all projections share has the name `whole`.
    fn converted(
        &self,
        cx: &Cx<'_, B>,
        (pass, whole): (Pass, &str),
        from: impl Fn(usize) -> Operand<B>,
        groups: Option<&Groups<B>>,
    ) -> Result<Vec<Made<B>>> {
        let plans = self.projections.map(|projection| projection.plan(cx));
        let linear = plans.iter().map(|plan| plan.linear()).collect::<Result<Vec<_>>>()?;
        let mut made: Vec<Made<B>> = Vec::with_capacity(N);
        for (i, SharedInput { conversion, like, of_all }) in
            SharedInput::of(&linear, pass).into_iter().enumerate()
        {
            let layer = if of_all { whole } else { self.projections[i].site() };
            made.push(match like {
                Some(like) => made[like].clone(),
                None => cx.convert(LayerName { layer, linear: self.name }, &from(i), &conversion, groups)?,
            });
        }
        Ok(made)
    }
}
