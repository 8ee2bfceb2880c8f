//! The experts of one rank under a recipe: two grouped products with SwiGLU between, and their backward passes.
//! r expert-sorted rows, d model, f ffn, l experts of this rank.

use super::{MoeShape, Plan};
use crate::cx::{Cx, Pass, emit};
use crate::layers::linear_wgrad_x;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Placement};
use nibble_core::formats::BlockAxis;
use nibble_core::ops::{GroupedGemm, Planes, Swiglu, SwigluBackward};
use nibble_core::recipe::{From, Kind, Section, Site};
use nibble_core::{Kernels, Operand, Result, Tensor};

/// Stacked expert weights.
#[derive(Debug, Clone)]
pub struct Experts<B: Kernels> {
    /// Its name, `model.layers.3.mlp.experts`.
    pub name: String,
    /// Gate and up projections: `[l · 2f, d]`, each expert's gate rows before its up rows.
    pub gate_up: Param<B>,
    /// Down projections: `[l · d, f]`.
    pub down: Param<B>,
}

/// What the experts keep: their input and the first product's output, as the recipe says. `a` is made again from h.
#[derive(Debug)]
pub struct ExpertsSaved<B: Kernels> {
    layer: String,
    /// `[r, d]`.
    pub x: Operand<B>,
    /// `[r, 2f]`.
    pub h: Operand<B>,
}

impl<B: Kernels> Saved for ExpertsSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.operand(&self.layer, "x", &self.x);
        ledger.operand(&self.layer, "h", &self.h);
    }
}

impl<B: Kernels> Experts<B> {
    /// Random weights: each expert's are a function of its global number.
    pub fn new(cx: &Cx<'_, B>, name: &str, shape: MoeShape, std: f32, out_std: f32) -> Result<Self> {
        let local = shape.experts / cx.comm.world();
        let param = |part: &str, n: usize, k: usize, std: f32| {
            let (size, rank) = ((local * n, k), cx.comm.rank());
            Param::normal(cx.b, cx.seed, format!("{name}.{part}"), size, std, Placement::Experts(local), rank)
        };
        Ok(Self {
            name: name.to_owned(),
            gate_up: param("gate_up_proj", 2 * shape.ffn, shape.d_model, std)?,
            down: param("down_proj", shape.d_model, shape.ffn, out_std)?,
        })
    }

    /// Makes the weights' copies for this step.
    pub fn prepare(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        let section = cx.section(Kind::Expert, &self.name);
        self.gate_up.prepare(cx, &section)?;
        self.down.prepare(cx, &section)
    }

    /// Its parameters, in canonical order.
    pub fn params(&mut self) -> Vec<&mut Param<B>> {
        vec![&mut self.gate_up, &mut self.down]
    }

    /// x as fprop multiplies it and as the backward pass keeps it, from the rows that arrived.
    fn input(
        &self,
        cx: &Cx<'_, B>,
        section: &Section,
        x_rd: Operand<B>,
        plan: &Plan<B>,
    ) -> Result<(Operand<B>, Operand<B>)> {
        let (fprop, saved) = (section.at(Site::FpropX), section.at(Site::SavedX));
        let groups = Some(&plan.map.groups);
        match &x_rd {
            Operand::Block(rows) => {
                let multiplied = match fprop.same_bits(section.at(Site::DispatchFwd)) {
                    true => x_rd.clone(),
                    false => {
                        Operand::Block(cx.transcode(Pass::Forward, &self.name, "x", rows, fprop, groups)?)
                    }
                };
                debug_assert_eq!(saved.from, From::Dispatched);
                Ok((multiplied, x_rd))
            }
            Operand::Plain(x) if fprop.format.is_block() => {
                let both = saved.axis == BlockAxis::Col && cx.training;
                let planes = if both { Planes::Both } else { Planes::Rows };
                let out = cx.quantize(Pass::Forward, &self.name, "x", x, fprop, planes, groups)?;
                let rows = out.take_rows("experts")?;
                let kept = if both { out.take_cols("experts")? } else { rows.clone() };
                Ok((rows, kept))
            }
            Operand::Plain(_) => Ok((x_rd.clone(), x_rd)),
        }
    }

    /// The forward pass on expert-sorted rows.
    pub fn forward(
        &self,
        cx: &Cx<'_, B>,
        section: &Section,
        x_rd: Operand<B>,
        plan: &Plan<B>,
    ) -> Result<(Tensor<B>, ExpertsSaved<B>)> {
        let groups = &plan.map.groups;
        let (x, x_saved) = self.input(cx, section, x_rd, plan)?;
        let h_rf = GroupedGemm { x: &x, w: self.gate_up.w()?, groups, out: cx.activations() }.run(cx.b)?;
        drop(x);
        let saved_h = section.at(Site::SavedH);
        let save_h = if cx.training && saved_h.format.is_block() { Some(saved_h.codec()?) } else { None };
        let a = emit(section.at(Site::FpropX), Planes::Rows, cx.activations())?;
        let op = Swiglu { h: &h_rf, weight: Some(&plan.gate_r), groups: Some(groups), a, save_h };
        let out = op.run(cx.b)?;
        let a = out.a.take_rows("experts")?;
        if a.format().is_block() {
            cx.note(
                Pass::Forward,
                &self.name,
                "swiglu+quantize",
                "a",
                h_rf.dtype(),
                format!("{} rows", a.format()),
            );
        }
        cx.keep_counts(&self.name, "a", out.a.counts.as_ref());
        let h = match out.h {
            Some(h) => {
                cx.note(
                    Pass::Forward,
                    &self.name,
                    "swiglu+quantize",
                    "h",
                    h_rf.dtype(),
                    format!("{} rows", h.format),
                );
                Operand::Block(h)
            }
            None => Operand::Plain(h_rf),
        };
        let y_rd = GroupedGemm { x: &a, w: self.down.w()?, groups, out: cx.activations() }.run(cx.b)?;
        Ok((y_rd, ExpertsSaved { layer: self.name.clone(), x: x_saved, h }))
    }

    /// dY as dgrad and as wgrad take it, from the rows that arrived.
    fn gradient(
        &self,
        cx: &Cx<'_, B>,
        section: &Section,
        dy_rd: Operand<B>,
        plan: &Plan<B>,
    ) -> Result<(Operand<B>, Operand<B>)> {
        let (dgrad, wgrad) = (section.at(Site::DgradDy), section.at(Site::WgradDy));
        let groups = Some(&plan.map.groups);
        match &dy_rd {
            Operand::Block(rows) => {
                let cols = cx.transcode(Pass::Backward, &self.name, "dy", rows, wgrad, groups)?;
                Ok((dy_rd, Operand::Block(cols)))
            }
            Operand::Plain(dy) if dgrad.format.is_block() => {
                let both = cx.quantize(Pass::Backward, &self.name, "dy", dy, dgrad, Planes::Both, groups)?;
                Ok((both.take_rows("experts")?, both.take_cols("experts")?))
            }
            Operand::Plain(_) => Ok((dy_rd.clone(), dy_rd)),
        }
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
        let (dy_rows, dy_cols) = self.gradient(cx, section, dy_rd, plan)?;
        let da_rf =
            GroupedGemm { x: &dy_rows, w: self.down.wt()?, groups, out: cx.activations() }.run(cx.b)?;
        drop(dy_rows);
        let op = SwigluBackward {
            h: &saved.h,
            da: &da_rf,
            weight: Some(&plan.gate_r),
            groups: Some(groups),
            dh: emit(section.at(Site::DgradDy), Planes::Both, cx.activations())?,
            a: emit(section.at(Site::WgradX), Planes::Cols, cx.activations())?,
        };
        let grads = op.run(cx.b)?;
        if section.at(Site::DgradDy).format.is_block() {
            let to = format!("{} rows and columns", section.at(Site::DgradDy).format);
            cx.note(Pass::Backward, &self.name, "swiglu_backward+quantize", "dh", da_rf.dtype(), to);
            let to = format!("{} columns", section.at(Site::WgradX).format);
            cx.note(Pass::Backward, &self.name, "swiglu_backward+quantize", "a", saved.h.format(), to);
        }
        drop(da_rf);
        cx.keep_counts(&self.name, "dh", grads.dh.counts.as_ref());
        self.down.accumulate_wgrad(cx, &dy_cols, &grads.a.take_cols("wgrad")?, groups)?;
        let dh_rows = grads.dh.take_rows("dgrad")?;
        let dx_rd =
            GroupedGemm { x: &dh_rows, w: self.gate_up.wt()?, groups, out: cx.activations() }.run(cx.b)?;
        let x = linear_wgrad_x(cx, &self.name, section, &saved.x, groups)?;
        self.gate_up.accumulate_wgrad(cx, &grads.dh.take_cols("wgrad")?, &x, groups)?;
        Ok((dx_rd, grads.dweight))
    }
}
