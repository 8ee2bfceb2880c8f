//! Dense linear layer Y = X·Wᵀ under a recipe. t tokens, n outputs, k inputs.

use super::Layer;
use crate::cx::{Cx, Place};
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted, Writes};
use crate::spec::Part;
use nibble_core::ops::{AddBias, AddBiasBackward, Gemm, Numbers};
use nibble_core::recipe::{LayerKind, Product, Section, Site};
use nibble_core::{DType, Groups, Kernels, Operand, Result, Tensor};

/// A linear layer has one weight.
pub(super) const WEIGHT: (LayerKind, usize) = (LayerKind::Linear, 0);

/// The input of one or several linear layers, in the forms their recipe asks for. Made once, shared by all of them.
#[derive(Debug, Clone)]
pub struct Input<B: Kernels> {
    /// What fprop multiplies.
    pub fprop: Operand<B>,
    /// What the backward pass keeps.
    pub saved: Operand<B>,
}

impl<B: Kernels> Input<B> {
    /// Makes both forms of `x_tk`, from one read where one kernel can. `layer` is by what random bits and counts know it,
    /// `linear` by what transforms' signs do; `groups` are the ragged rows of the contraction in wgrad. `numbers`: those of all products of fprop
    /// that take it, if they have the same.
    pub fn new(
        cx: &Cx<'_, B>,
        (layer, linear): (&str, &str),
        (section, numbers): (&Section, Option<Numbers>),
        x_tk: &Tensor<B>,
        groups: Option<&Groups<B>>,
    ) -> Result<Self> {
        let at = Place { layer, tensor: "x", linear };
        let pair = section.input(LayerKind::Linear, cx.activations(), cx.training);
        let x = Operand::Plain(x_tk.clone());
        let (fprop, saved) = cx.follow_both(at, &x, (&pair, [numbers, None]), groups)?;
        Ok(Self { fprop, saved })
    }
}

/// A dense linear layer, with a bias of each output or without.
#[derive(Debug, Clone)]
pub struct Linear<B: Kernels> {
    /// `[n, k]`.
    pub weight: Param<B>,
    /// `[1, n]`, added to the rounded product and rounded again.
    pub bias: Option<Param<B>>,
    /// The name by which the recipe's overrides know it.
    pub name: String,
    /// By what the signs of its products' transforms know it: its own name, or that of the layer whose projections have one input.
    pub linear: String,
    /// Type of the output.
    pub out: DType,
}

/// The input in the form the recipe keeps.
#[derive(Debug)]
pub struct LinearSaved<B: Kernels> {
    layer: String,
    /// `[t, k]`.
    pub x: Operand<B>,
}

impl<B: Kernels> Saved for LinearSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.operand(&self.layer, "x", &self.x);
    }
}

impl<B: Kernels> Linear<B> {
    /// Random weights, of which this rank keeps its rows; every rank computes with all of them. A bias is zeros. `out` is the type of
    /// the output.
    pub fn new(cx: &Cx<'_, B>, part: &Part, out: DType) -> Result<Self> {
        let (weight, bias) = Param::with_bias(cx, part)?;
        let linear = weight.layer().to_owned();
        Ok(Self { weight, bias, name: part.id.clone(), linear, out })
    }

    /// The same as one of the projections of a layer, which have one input.
    pub fn with_input_of(self, layer: &str) -> Self {
        Self { linear: layer.to_owned(), ..self }
    }

    /// Its own name, where [`Linear::name`] may be that of a layer it is a part of: no two share random bits.
    pub(super) fn site(&self) -> &str {
        self.weight.layer()
    }

    /// The precisions of this layer now.
    pub fn section(&self, cx: &Cx<'_, B>) -> Section {
        cx.section(LayerKind::Linear, &self.name)
    }

    /// The forward pass up to its product: what fprop multiplies, and what is kept.
    pub fn input(&self, cx: &Cx<'_, B>, x_tk: &Tensor<B>) -> Result<(Operand<B>, LinearSaved<B>)> {
        let groups = cx.groups_of(x_tk);
        let section = self.section(cx);
        let numbers = cx.numbers(&section, WEIGHT, Product::Fprop);
        let x = Input::new(cx, (self.site(), &self.linear), (&section, numbers), x_tk, groups)?;
        Ok((x.fprop, LinearSaved { layer: self.site().to_owned(), x: x.saved }))
    }

    /// Y, from an input that other layers may share.
    pub fn product(&self, cx: &Cx<'_, B>, x: &Operand<B>) -> Result<Tensor<B>> {
        let mut y = Gemm { a: x, b: self.weight.w()?, out: self.out }.run(cx.b)?;
        if let Some(bias) = &self.bias {
            AddBias { x: &mut y, bias: bias.plain()? }.run(cx.b)?;
        }
        Ok(y)
    }

    /// dX, and the gradients of weight and bias, from an input that other layers may share, as wgrad takes it.
    pub fn gradients(&mut self, cx: &Cx<'_, B>, x: &Operand<B>, dy_tn: &Tensor<B>) -> Result<Tensor<B>> {
        let section = self.section(cx);
        let groups = &cx.shards.groups;
        let at = Place { layer: self.site(), tensor: "dy", linear: &self.linear };
        let pair = section.gradient(LayerKind::Linear, cx.activations());
        let only_for = [Product::Dgrad, Product::Wgrad].map(|product| cx.numbers(&section, WEIGHT, product));
        let dy = Operand::Plain(dy_tn.clone());
        let (rows, cols) = cx.follow_both(at, &dy, (&pair, only_for), Some(groups))?;
        let dx_tk = Gemm { a: &rows, b: self.weight.wt(cx)?.as_ref(), out: cx.activations() }.run(cx.b)?;
        self.weight.accumulate_wgrad(cx, &cols, x, groups)?;
        if let Some(bias) = &mut self.bias {
            bias.add_gradient(cx, Writes::Adds, |dbias, _| AddBiasBackward { dy: dy_tn, dbias }.run(cx.b))?;
        }
        Ok(dx_tk)
    }
}

impl<B: Kernels> Layer<B> for Linear<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = LinearSaved<B>;

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        let bias = self.bias.iter().map(Param::as_it_is);
        [self.weight.for_products(&self.section(cx), &self.linear)].into_iter().chain(bias).collect()
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        [&mut self.weight].into_iter().chain(&mut self.bias).collect()
    }

    fn forward(&self, cx: &Cx<'_, B>, x_tk: Tensor<B>) -> Result<(Tensor<B>, LinearSaved<B>)> {
        let (x, saved) = self.input(cx, &x_tk)?;
        Ok((self.product(cx, &x)?, saved))
    }

    fn again(&self, cx: &Cx<'_, B>, x_tk: Tensor<B>) -> Result<LinearSaved<B>> {
        Ok(self.input(cx, &x_tk)?.1)
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: LinearSaved<B>, dy_tn: Tensor<B>) -> Result<Tensor<B>> {
        let names = (self.site(), self.linear.as_str());
        let section = self.section(cx);
        let numbers = cx.numbers(&section, WEIGHT, Product::Wgrad);
        let x = wgrad_x(cx, names, (&section, numbers), &saved.x, &cx.shards.groups)?;
        drop(saved);
        self.gradients(cx, &x, &dy_tn)
    }
}

/// The saved input as wgrad takes it. `layer`, `linear` and, for wgrad, `numbers` as in [`Input::new`].
pub(crate) fn wgrad_x<B: Kernels>(
    cx: &Cx<'_, B>,
    (layer, linear): (&str, &str),
    (section, numbers): (&Section, Option<Numbers>),
    saved: &Operand<B>,
    groups: &Groups<B>,
) -> Result<Operand<B>> {
    let route = section.route(LayerKind::Linear, Site::WgradX, cx.activations());
    cx.follow(Place { layer, tensor: "x", linear }, saved, (&route, numbers), Some(groups))
}
