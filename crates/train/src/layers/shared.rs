//! Linear layers that are parts of one and have the same input: it is converted, kept and lifted once for all whose recipes agree.

use super::{Input, Linear, wgrad_x};
use crate::cx::Cx;
use nibble_core::recipe::{Section, Site};
use nibble_core::{Kernels, Operand, Result, Tensor};

/// Projections of one input. `name` is that of the layer that they are parts of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shared<'a, B: Kernels, const N: usize> {
    pub name: &'a str,
    pub projections: [&'a Linear<B>; N],
}

impl<B: Kernels, const N: usize> Shared<'_, B, N> {
    /// Which projections take the same input, since their recipes agree at these sites: for each of them its
    /// section, an earlier one with the same, if there is one, and the name of what is made: that of the whole where all agree.
    fn sharing(&self, cx: &Cx<'_, B>, sites: &[Site], whole: &str) -> Vec<(String, Option<usize>, Section)> {
        let sections = self.projections.map(|projection| projection.section(cx));
        let agree = |i: usize, j: usize| sites.iter().all(|s| sections[i].at(*s) == sections[j].at(*s));
        let all = (1..N).all(|i| agree(0, i));
        let of = |i: usize| {
            let name = if all { whole } else { self.projections[i].site() };
            (name.to_owned(), (0..i).find(|j| agree(*j, i)), sections[i])
        };
        (0..N).map(of).collect()
    }

    /// What each projection multiplies, and what is kept for it.
    pub fn inputs(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>) -> Result<Vec<Input<B>>> {
        let groups = cx.groups_of(x_td);
        let mut inputs: Vec<Input<B>> = Vec::with_capacity(N);
        for (layer, like, section) in self.sharing(cx, &[Site::FpropX, Site::SavedX], self.name) {
            inputs.push(match like {
                Some(like) => inputs[like].clone(),
                None => Input::new(cx, (&layer, self.name), &section, x_td, groups)?,
            });
        }
        Ok(inputs)
    }

    /// What is kept for each of them, as its wgrad takes it: one lift for all whose recipes agree. It has a name of its own, and so random bits,
    /// should it draw any.
    pub fn wgrad_inputs(&self, cx: &Cx<'_, B>, saved: [Operand<B>; N]) -> Result<Vec<Operand<B>>> {
        let whole = format!("{}.qkv", self.name);
        let mut inputs: Vec<Operand<B>> = Vec::with_capacity(N);
        let sites = [Site::FpropX, Site::SavedX, Site::WgradX];
        let sharing = self.sharing(cx, &sites, &whole);
        for (saved, (layer, like, section)) in saved.iter().zip(sharing) {
            inputs.push(match like {
                Some(like) => inputs[like].clone(),
                None => wgrad_x(cx, (&layer, self.name), &section, saved, &cx.shards.groups)?,
            });
        }
        Ok(inputs)
    }
}
