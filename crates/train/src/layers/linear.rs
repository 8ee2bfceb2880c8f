//! Dense linear layer Y = X·Wᵀ under a recipe. t tokens, n outputs, k inputs.

use super::Layer;
use crate::cx::{Cx, Pass};
use crate::ledger::{Ledger, Saved};
use crate::param::Param;
use nibble_core::formats::BlockAxis;
use nibble_core::ops::{Gemm, Planes};
use nibble_core::recipe::{Kind, Precision, Section, Site};
use nibble_core::{DType, Groups, LayerKernels, Operand, Result, Tensor};

/// The input of one or several linear layers, in the forms their recipe asks for. Made once, shared by all of them.
#[derive(Debug, Clone)]
pub struct Input<B: LayerKernels> {
    /// What fprop multiplies.
    pub fprop: Operand<B>,
    /// What the backward pass keeps.
    pub saved: Operand<B>,
}

impl<B: LayerKernels> Input<B> {
    /// Makes both forms of `x_tk`, from one read where one kernel can. `layer` is by what random bits, counts and the
    /// trace know it; `groups` are the ragged rows of the contraction in wgrad.
    pub fn new(
        cx: &Cx<'_, B>,
        layer: &str,
        section: &Section,
        x_tk: &Tensor<B>,
        groups: Option<&Groups<B>>,
    ) -> Result<Self> {
        let (fprop, saved) = (section.at(Site::FpropX), section.at(Site::SavedX));
        let quantize =
            |to: &Precision, planes| cx.quantize(Pass::Forward, layer, "x", x_tk, to, planes, groups);
        let rows = |to: &Precision| match to.dtype() {
            Some(dtype) => cx.cast(x_tk, dtype).map(Operand::Plain),
            None => quantize(to, Planes::Rows)?.take_rows("linear"),
        };
        if !cx.training || (saved.same_bits(fprop) && saved.round == fprop.round) {
            let fprop = rows(fprop)?;
            return Ok(Self { saved: fprop.clone(), fprop });
        }
        let one_read =
            fprop.format == saved.format && fprop.scale == saved.scale && fprop.round == saved.round;
        if one_read && fprop.format.is_block() {
            let both = quantize(fprop, Planes::Both)?;
            return Ok(Self { fprop: both.take_rows("linear")?, saved: both.take_cols("linear")? });
        }
        let by_columns = saved.format.is_block() && saved.axis == BlockAxis::Col;
        let saved =
            if by_columns { quantize(saved, Planes::Cols)?.take_cols("linear")? } else { rows(saved)? };
        Ok(Self { fprop: rows(fprop)?, saved })
    }
}

/// A dense linear layer without bias.
#[derive(Debug, Clone)]
pub struct Linear<B: LayerKernels> {
    /// `[n, k]`.
    pub weight: Param<B>,
    /// The name by which the recipe's overrides know it.
    pub name: String,
    /// Type of the output.
    pub out: DType,
    /// Which of the recipe's sections applies: `[linear]`, or that of the output head.
    pub kind: Kind,
}

/// The input in the form the recipe keeps.
#[derive(Debug)]
pub struct LinearSaved<B: LayerKernels> {
    layer: String,
    /// `[t, k]`.
    pub x: Operand<B>,
}

impl<B: LayerKernels> Saved for LinearSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.operand(&self.layer, "x", &self.x);
    }
}

impl<B: LayerKernels> Linear<B> {
    /// Its own name, where [`Linear::name`] may be that of a layer it is a part of: no two share random bits.
    pub(super) fn site(&self) -> &str {
        self.weight.name.trim_end_matches(".weight")
    }

    /// The precisions of this layer now.
    pub fn section(&self, cx: &Cx<'_, B>) -> Section {
        cx.section(self.kind, &self.name)
    }

    /// Makes the weight's copies for this step.
    pub fn prepare(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        let section = self.section(cx);
        self.weight.prepare(cx, &section)
    }

    /// The forward pass up to its product: what fprop multiplies, and what is kept.
    pub fn input(&self, cx: &Cx<'_, B>, x_tk: &Tensor<B>) -> Result<(Operand<B>, LinearSaved<B>)> {
        let groups = cx.training.then_some(&cx.shards.groups);
        let x = Input::new(cx, self.site(), &self.section(cx), x_tk, groups)?;
        Ok((x.fprop, LinearSaved { layer: self.site().to_owned(), x: x.saved }))
    }

    /// Y, from an input that other layers may share.
    pub fn product(&self, cx: &Cx<'_, B>, x: &Operand<B>) -> Result<Tensor<B>> {
        Gemm { a: x, b: self.weight.w()?, out: self.out }.run(cx.b)
    }

    /// dX, and the weight's gradient, from an input that other layers may share, as wgrad takes it.
    pub fn gradients(&mut self, cx: &Cx<'_, B>, x: &Operand<B>, dy_tn: &Tensor<B>) -> Result<Tensor<B>> {
        let section = self.section(cx);
        let groups = &cx.shards.groups;
        let (rows, cols) = gradient_operands(cx, self.site(), "dy", &section, dy_tn, groups)?;
        let dx_tk = Gemm { a: &rows, b: self.weight.wt()?, out: cx.activations() }.run(cx.b)?;
        self.weight.accumulate_wgrad(cx, &cols, x, groups)?;
        Ok(dx_tk)
    }
}

impl<B: LayerKernels> Layer<B> for Linear<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = LinearSaved<B>;

    fn forward(&self, cx: &Cx<'_, B>, x_tk: Tensor<B>) -> Result<(Tensor<B>, LinearSaved<B>)> {
        let (x, saved) = self.input(cx, &x_tk)?;
        Ok((self.product(cx, &x)?, saved))
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: LinearSaved<B>, dy_tn: Tensor<B>) -> Result<Tensor<B>> {
        let x = wgrad_x(cx, self.site(), &self.section(cx), &saved.x, &cx.shards.groups)?;
        drop(saved);
        self.gradients(cx, &x, &dy_tn)
    }
}

/// Whether one kernel can make dY's rows for dgrad and its columns for wgrad.
pub(crate) fn one_read(section: &Section) -> bool {
    let (dgrad, wgrad) = (section.at(Site::DgradDy), section.at(Site::WgradDy));
    dgrad.format == wgrad.format && dgrad.scale == wgrad.scale && dgrad.round == wgrad.round
}

/// The plain gradient `dY` (`tensor` is its name) as dgrad and as wgrad take it.
pub(crate) fn gradient_operands<B: LayerKernels>(
    cx: &Cx<'_, B>,
    layer: &str,
    tensor: &'static str,
    section: &Section,
    dy_tn: &Tensor<B>,
    groups: &Groups<B>,
) -> Result<(Operand<B>, Operand<B>)> {
    let (dgrad, wgrad) = (section.at(Site::DgradDy), section.at(Site::WgradDy));
    let quantize = |to, planes| cx.quantize(Pass::Backward, layer, tensor, dy_tn, to, planes, Some(groups));
    match (dgrad.dtype(), wgrad.dtype()) {
        (None, None) if one_read(section) => {
            let both = quantize(dgrad, Planes::Both)?;
            Ok((both.take_rows("dgrad")?, both.take_cols("wgrad")?))
        }
        (dgrad_type, wgrad_type) => {
            let rows = match dgrad_type {
                Some(dtype) => Operand::Plain(cx.cast(dy_tn, dtype)?),
                None => quantize(dgrad, Planes::Rows)?.take_rows("dgrad")?,
            };
            let cols = match wgrad_type {
                Some(dtype) => Operand::Plain(cx.cast(dy_tn, dtype)?),
                None => quantize(wgrad, Planes::Cols)?.take_cols("wgrad")?,
            };
            Ok((rows, cols))
        }
    }
}

/// The saved input as wgrad takes it.
pub(crate) fn wgrad_x<B: LayerKernels>(
    cx: &Cx<'_, B>,
    layer: &str,
    section: &Section,
    saved: &Operand<B>,
    groups: &Groups<B>,
) -> Result<Operand<B>> {
    let (origin, to) = (section.at(Site::SavedX), section.at(Site::WgradX));
    cx.converted(Pass::Backward, layer, "x", saved, origin, to, Some(groups))
}
