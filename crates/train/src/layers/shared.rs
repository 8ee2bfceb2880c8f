//! Linear projections of one input. The input is converted, saved and lifted once for all projections whose recipes agree.

use super::Linear;
use crate::convert::LayerName;
use crate::cx::Cx;
use nibble_core::recipe::{Pass, SharedInput};
use nibble_core::{Groups, Kernels, Operand, Result, Tensor};

/// Projections of one input. `name` is that of the layer to which they belong.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedProjections<'a, B: Kernels, const N: usize> {
    pub name: &'a str,
    pub projections: [&'a Linear<B>; N],
}

/// What a projection multiplies, and what is saved for it; in the backward pass wgrad's operand, twice.
type Made<B> = (Operand<B>, Operand<B>);

impl<B: Kernels, const N: usize> SharedProjections<'_, B, N> {
    /// What each projection multiplies, and what is saved for it.
    pub fn inputs(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>) -> Result<Vec<Made<B>>> {
        self.converted(cx, (Pass::Forward, self.name), |_| Operand::Plain(x_td.clone()), cx.groups_of(x_td))
    }

    /// The saved inputs as each projection's wgrad reads them, lifted once for all whose recipes agree. The common lift has a name of its
    /// own, and so random bits of its own if it needs any.
    pub fn wgrad_inputs(&self, cx: &Cx<'_, B>, saved: [Operand<B>; N]) -> Result<Vec<Made<B>>> {
        let whole = format!("{}.qkv", self.name);
        self.converted(cx, (Pass::Backward, &whole), |i| saved[i].clone(), Some(&cx.shards.groups))
    }

    /// What all projections share goes by the name `whole`.
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
