//! The experts of one rank under a recipe: two grouped products with SwiGLU between, and their backward passes.
//! r expert-sorted rows, d model, f ffn, l experts of this rank.

use super::{MoeShape, Plan};
use crate::cx::{Cx, Place, emit};
use crate::layers::{Input, wgrad_x};
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Placement};
use crate::record::Conversion;
use nibble_core::ops::{Emit, GroupedGemm, Planes, Swiglu, SwigluBackward};
use nibble_core::recipe::{LayerKind, Precision, Section, Site};
use nibble_core::{DType, Error, LayerKernels, Operand, Result, Tensor};

/// Stacked expert weights.
#[derive(Debug, Clone)]
pub struct Experts<B: LayerKernels> {
    /// Its name, `model.layers.3.mlp.experts`.
    pub name: String,
    /// Gate and up projections: `[l · 2f, d]`, each expert's gate rows before its up rows.
    pub gate_up: Param<B>,
    /// Down projections: `[l · d, f]`.
    pub down: Param<B>,
    /// Where the recipe does not say how to keep the second product's input, keep it if the forward pass has the very bits that
    /// wgrad takes, instead of making it again from h: it has not where h is kept in another format, since then wgrad's is
    /// made of that.
    pub keep_a: bool,
}

/// What the experts keep: their input and the first product's output, as the recipe says.
#[derive(Debug)]
pub struct ExpertsSaved<B: LayerKernels> {
    layer: String,
    /// `[r, d]`; none where it is made again from what the layer was given ([`Experts::kept_input`]).
    pub x: Option<Operand<B>>,
    /// `[r, 2f]`.
    pub h: Operand<B>,
    /// `[r, f]` as the recipe keeps it, or, where the recipe does not, as the second product's wgrad takes it; none where it
    /// is made again from h.
    pub a: Option<Operand<B>>,
}

impl<B: LayerKernels> Saved for ExpertsSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        if let Some(x) = &self.x {
            ledger.operand(&self.layer, "x", x);
        }
        ledger.operand(&self.layer, "h", &self.h);
        if let Some(a) = &self.a {
            ledger.operand(&self.layer, "a", a);
        }
    }
}

impl<B: LayerKernels> Experts<B> {
    /// Random weights: each expert's are a function of its global number.
    pub fn new(cx: &Cx<'_, B>, name: &str, shape: MoeShape, std: f32, out_std: f32) -> Result<Self> {
        let local = shape.experts / cx.mesh.ep.world();
        let param = |part: &str, n: usize, k: usize, std: f32| {
            let (size, rank) = ((local * n, k), cx.mesh.ep.rank());
            Param::normal(cx.b, cx.seed, format!("{name}.{part}"), size, std, Placement::Experts(local), rank)
        };
        Ok(Self {
            name: name.to_owned(),
            gate_up: param("gate_up_proj", 2 * shape.ffn, shape.d_model, std)?,
            down: param("down_proj", shape.d_model, shape.ffn, out_std)?,
            keep_a: false,
        })
    }

    /// Makes the weights' copies for this step.
    pub fn prepare(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        let section = cx.section(LayerKind::Expert, &self.name);
        self.gate_up.prepare(cx, &section)?;
        self.down.prepare(cx, &section)
    }

    /// Its parameters, in canonical order.
    pub fn params(&mut self) -> Vec<&mut Param<B>> {
        vec![&mut self.gate_up, &mut self.down]
    }

    /// x as fprop multiplies it and as the backward pass keeps it, from the rows that arrived.
    pub(super) fn input(
        &self,
        cx: &Cx<'_, B>,
        section: &Section,
        x_rd: Operand<B>,
        plan: &Plan<B>,
    ) -> Result<(Operand<B>, Operand<B>)> {
        let groups = Some(&plan.map.groups);
        if let Operand::Plain(x) = &x_rd {
            let input = Input::new(cx, (&self.name, &self.gate_up.name), section, x, groups)?;
            return Ok((input.fprop, input.saved));
        }
        let fprop = self.fprop_input(cx, section, &x_rd, Some(plan))?;
        let (origin, to) = (section.at(Site::DispatchFwd), section.at(Site::SavedX));
        let saved = match cx.training {
            true => cx.converted(self.x(), &x_rd, origin, to, groups)?,
            false => fprop.clone(),
        };
        Ok((fprop, saved))
    }

    /// What [`Experts::forward`] keeps of the rows that arrived, for a backward pass that has none.
    pub fn kept_input(
        &self,
        cx: &Cx<'_, B>,
        section: &Section,
        x_rd: &Operand<B>,
        plan: &Plan<B>,
    ) -> Result<Operand<B>> {
        let (origin, to) = (section.at(Site::DispatchFwd), section.at(Site::SavedX));
        cx.converted(self.x(), x_rd, origin, to, Some(&plan.map.groups))
    }

    /// Rows as they travel, as fprop multiplies them.
    pub fn fprop_input(
        &self,
        cx: &Cx<'_, B>,
        section: &Section,
        x: &Operand<B>,
        plan: Option<&Plan<B>>,
    ) -> Result<Operand<B>> {
        let (origin, to) = (section.at(Site::DispatchFwd), section.at(Site::FpropX));
        cx.converted(self.x(), x, origin, to, plan.map(|plan| &plan.map.groups))
    }

    /// The names of the first product's input.
    fn x(&self) -> Place<'_> {
        Place { layer: &self.name, tensor: "x", linear: &self.gate_up.name }
    }

    /// Those of an operand of the second product's.
    fn of_down(&self, tensor: &'static str) -> Place<'_> {
        Place { layer: &self.name, tensor, linear: &self.down.name }
    }

    /// The forward pass on expert-sorted rows that arrived.
    pub fn forward(
        &self,
        cx: &Cx<'_, B>,
        section: &Section,
        x_rd: Operand<B>,
        plan: &Plan<B>,
    ) -> Result<(Tensor<B>, ExpertsSaved<B>)> {
        let (x, kept) = self.input(cx, section, x_rd, plan)?;
        let (a, saved) = self.hidden(cx, section, x, Some(kept), plan)?;
        Ok((self.output(cx, a, plan)?, saved))
    }

    /// The forward pass up to its last product, on expert-sorted rows as fprop multiplies them: what that multiplies, and what
    /// is kept. `kept` is what the backward pass will want of the rows.
    pub(super) fn hidden(
        &self,
        cx: &Cx<'_, B>,
        section: &Section,
        x: Operand<B>,
        kept: Option<Operand<B>>,
        plan: &Plan<B>,
    ) -> Result<(Operand<B>, ExpertsSaved<B>)> {
        let groups = &plan.map.groups;
        let h_rf = GroupedGemm { x: &x, w: self.gate_up.w()?, groups, out: cx.activations() }.run(cx.b)?;
        drop(x);
        let saved_h = section.at(Site::SavedH);
        let save_h = if cx.training && saved_h.format.is_block() { Some(saved_h.codec()?) } else { None };
        let fprop = section.at(Site::FpropA);
        let second = self.second_a(cx, section);
        // What no kernel writes from one read is made of the plain tensor, under a delayed scale of one as wide as the kernel has it.
        let delayed = fprop.delayed.is_some();
        let fused = !delayed && second.is_none_or(|second| fprop.fused_with(second));
        let both = fused && second.is_some_and(|second| fprop.one_read(second));
        let a = match fused {
            true => emit(fprop, if both { Planes::Both } else { Planes::Rows }, cx.activations())?,
            false => Emit::Plain(if delayed { DType::F32 } else { cx.activations() }),
        };
        let op = Swiglu { h: &h_rf, weight: Some(&plan.gate_r), groups: Some(groups), a, save_h };
        let out = op.run(cx.b)?;
        cx.keep_counts(&self.name, "a", Conversion::Quantize, out.a.counts.as_ref());
        let h = out.h.map_or(Operand::Plain(h_rf), Operand::Block);
        let (a, kept_a) = match (second, out.a.take_rows("experts")?) {
            (Some(second), Operand::Plain(a)) if !fused => {
                let at = self.of_down("a");
                let (a, kept) = cx.forms(at, &a, fprop, second, Some(groups))?;
                (a, Some(kept))
            }
            (None, Operand::Plain(a)) if !fused => {
                (cx.form(self.of_down("a"), &a, fprop, Some(groups))?, None)
            }
            (Some(_), a) if both => (a, Some(out.a.take_cols("experts")?)),
            (second, a) => (a.clone(), second.map(|_| a)),
        };
        Ok((a, ExpertsSaved { layer: self.name.clone(), x: kept, h, a: kept_a }))
    }

    /// In what form the second product's input is kept, if it is.
    fn second_a<'s>(&self, cx: &Cx<'_, B>, section: &'s Section) -> Option<&'s Precision> {
        let (fprop, wgrad) = (section.at(Site::FpropA), section.at(Site::WgradA));
        let h_is_plain = !section.at(Site::SavedH).format.is_block();
        let has_it = self.keep_a && h_is_plain && fprop.fused_with(wgrad);
        section.kept_a().or(has_it.then_some(wgrad)).filter(|_| cx.training)
    }

    /// The last product.
    pub(super) fn output(&self, cx: &Cx<'_, B>, a_rf: Operand<B>, plan: &Plan<B>) -> Result<Tensor<B>> {
        let groups = &plan.map.groups;
        GroupedGemm { x: &a_rf, w: self.down.w()?, groups, out: cx.activations() }.run(cx.b)
    }

    /// dY as dgrad and as wgrad take it, from the rows that arrived.
    fn gradient(
        &self,
        cx: &Cx<'_, B>,
        section: &Section,
        dy_rd: Operand<B>,
        plan: &Plan<B>,
    ) -> Result<(Operand<B>, Operand<B>)> {
        let groups = Some(&plan.map.groups);
        let at = self.of_down("dy");
        let (dgrad, wgrad) = (section.at(Site::DgradDy), section.at(Site::WgradDy));
        if let Operand::Plain(dy) = &dy_rd {
            return cx.forms(at, dy, dgrad, wgrad, groups);
        }
        let origin = section.at(Site::DispatchBwd);
        let made = |to| cx.converted(at, &dy_rd, origin, to, groups);
        Ok((made(dgrad)?, made(wgrad)?))
    }

    /// The backward pass: returns dx of the expert-sorted rows and the gradient of each row's gate weight.
    pub fn backward(
        &mut self,
        cx: &Cx<'_, B>,
        section: &Section,
        saved: ExpertsSaved<B>,
        dy_rd: Operand<B>,
        plan: &Plan<B>,
    ) -> Result<(Tensor<B>, B::Buf<f32>)> {
        let groups = &plan.map.groups;
        let Some(x) = &saved.x else {
            return Err(Error::shape("experts", "saved.x", "none", "what forward kept, or that made again"));
        };
        let (dy_rows, dy_cols) = self.gradient(cx, section, dy_rd, plan)?;
        let da_rf =
            GroupedGemm { x: &dy_rows, w: self.down.wt()?, groups, out: cx.activations() }.run(cx.b)?;
        drop(dy_rows);
        let (dh_rows, dh_cols, a, dgate_r) = self.swiglu_backward(cx, section, &saved, da_rf, plan)?;
        self.down.accumulate_wgrad(cx, &dy_cols, &a, groups)?;
        let dx_rd =
            GroupedGemm { x: &dh_rows, w: self.gate_up.wt()?, groups, out: cx.activations() }.run(cx.b)?;
        let x = wgrad_x(cx, (&self.name, &self.gate_up.name), section, x, groups)?;
        self.gate_up.accumulate_wgrad(cx, &dh_cols, &x, groups)?;
        Ok((dx_rd, dgate_r))
    }

    /// dh for dgrad and for wgrad, `a` for wgrad, made again unless it was kept, and the gradient of each row's gate weight.
    ///
    /// One kernel writes them all, unless dgrad and wgrad want dh in different forms or rounded stochastically, or wgrad wants
    /// them transformed, or under a delayed scale: then it writes them in F32, and that is quantized by itself.
    #[allow(clippy::type_complexity)]
    fn swiglu_backward(
        &self,
        cx: &Cx<'_, B>,
        section: &Section,
        saved: &ExpertsSaved<B>,
        da_rf: Tensor<B>,
        plan: &Plan<B>,
    ) -> Result<(Operand<B>, Operand<B>, Operand<B>, B::Buf<f32>)> {
        let groups = &plan.map.groups;
        let (dgrad, wgrad) = (section.at(Site::DgradDh), section.at(Site::WgradDh));
        let wgrad_a = section.at(Site::WgradA);
        let plain = !dgrad.format.is_block() && !wgrad.format.is_block();
        let one_kernel = dgrad.one_read(wgrad) && !dgrad.round.is_random() && dgrad.delayed.is_none();
        let fused = plain || one_kernel;
        let dh = if fused { emit(dgrad, Planes::Both, cx.activations())? } else { Emit::Plain(DType::F32) };
        let by_itself = wgrad_a.rht.is_some() || wgrad_a.delayed.is_some();
        let a = match (&saved.a, by_itself) {
            (Some(_), _) => None,
            (None, true) => Some(Emit::Plain(DType::F32)),
            (None, false) => Some(emit(wgrad_a, Planes::Cols, cx.activations())?),
        };
        let (h, weight) = (&saved.h, Some(&plan.gate_r));
        let grads = SwigluBackward { h, da: &da_rf, weight, groups: Some(groups), dh, a }.run(cx.b)?;
        cx.keep_counts(&self.name, "dh", Conversion::Quantize, grads.dh.counts.as_ref());
        let (rows, cols) = match grads.dh.take_rows("dgrad")? {
            Operand::Plain(dh) if !fused => {
                let at = Place { tensor: "dh", ..self.x() };
                cx.forms(at, &dh, dgrad, wgrad, Some(groups))?
            }
            dh => (dh, grads.dh.take_cols("wgrad")?),
        };
        let a = match (&saved.a, grads.a) {
            (Some(a), _) if section.kept_a().is_some() => {
                let at = self.of_down("a");
                cx.converted(at, a, section.at(Site::SavedA), wgrad_a, Some(groups))?
            }
            (Some(a), _) => a.clone(),
            (None, Some(a)) => match a.take_cols("wgrad")? {
                Operand::Plain(a) => cx.form(self.of_down("a"), &a, wgrad_a, Some(groups))?,
                a => a,
            },
            (None, None) => return Err(Error::shape("experts", "a", "none", "kept or made again")),
        };
        Ok((rows, cols, a, grads.dweight))
    }
}
