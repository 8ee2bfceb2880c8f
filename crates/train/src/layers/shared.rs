//! Linear layers that are parts of one and have the same input: it is converted, kept and lifted once for all whose recipes agree.

use super::linear::WEIGHT;
use super::{Input, Linear, wgrad_x};
use crate::cx::Cx;
use nibble_core::ops::Numbers;
use nibble_core::recipe::{Product, Section, Site};
use nibble_core::{Kernels, Operand, Result, Tensor};

/// What a projection takes.
struct InputOf {
    /// The name of what is made.
    name: String,
    /// An earlier projection that takes the same.
    like: Option<usize>,
    section: Section,
    /// Those of the product of all that take it, if they have the same.
    numbers: Option<Numbers>,
}

/// Projections of one input. `name` is that of the layer that they are parts of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shared<'a, B: Kernels, const N: usize> {
    pub name: &'a str,
    pub projections: [&'a Linear<B>; N],
}

impl<B: Kernels, const N: usize> Shared<'_, B, N> {
    /// Which projections take the same input of this product, since their recipes agree at these sites. What all take has the name of the whole.
    fn sharing(&self, cx: &Cx<'_, B>, product: Product, sites: &[Site], whole: &str) -> Vec<InputOf> {
        let sections = self.projections.map(|projection| projection.section(cx));
        let agree = |i: usize, j: usize| sites.iter().all(|s| sections[i].at(*s) == sections[j].at(*s));
        let all = (1..N).all(|i| agree(0, i));
        let numbers = sections.map(|section| cx.numbers(&section, WEIGHT, product));
        let of = |i: usize| InputOf {
            name: if all { whole } else { self.projections[i].site() }.to_owned(),
            like: (0..i).find(|j| agree(*j, i)),
            section: sections[i],
            numbers: numbers[i].filter(|_| (0..N).all(|j| !agree(i, j) || numbers[j] == numbers[i])),
        };
        (0..N).map(of).collect()
    }

    /// What each projection multiplies, and what is kept for it.
    pub fn inputs(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>) -> Result<Vec<Input<B>>> {
        let groups = cx.groups_of(x_td);
        let mut inputs: Vec<Input<B>> = Vec::with_capacity(N);
        for of in self.sharing(cx, Product::Fprop, &[Site::FpropX, Site::SavedX], self.name) {
            inputs.push(match of.like {
                Some(like) => inputs[like].clone(),
                None => Input::new(cx, (&of.name, self.name), (&of.section, of.numbers), x_td, groups)?,
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
        let sharing = self.sharing(cx, Product::Wgrad, &sites, &whole);
        for (saved, of) in saved.iter().zip(sharing) {
            inputs.push(match of.like {
                Some(like) => inputs[like].clone(),
                None => {
                    let names = (of.name.as_str(), self.name);
                    wgrad_x(cx, names, (&of.section, of.numbers), saved, &cx.shards.groups)?
                }
            });
        }
        Ok(inputs)
    }
}
