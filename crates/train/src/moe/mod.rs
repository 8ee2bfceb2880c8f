//! The mixture-of-experts layer: router → dispatch → permute → experts → unpermute → combine.
//!
//! Legend: t tokens of this rank, r expert-sorted rows (padding included), d model, f ffn, e experts, l experts of this
//! rank, k top-k.

mod exchange;
mod experts;
mod router;

pub use exchange::{Exchange, Plan};
pub use experts::{Experts, ExpertsSaved};
pub use router::{Router, RouterSaved};

use crate::cx::{Cx, Pass};
use crate::ledger::{Ledger, Saved};
use crate::param::Param;
use nibble_core::ops::{Planes, Routing};
use nibble_core::recipe::{Kind, Precision, Section, Site};
use nibble_core::{DType, LayerKernels, Occupancy, Operand, Result, Tensor};

/// Sizes of a mixture-of-experts layer.
#[derive(Debug, Clone, Copy)]
pub struct MoeShape {
    /// Model width.
    pub d_model: usize,
    /// Width inside an expert.
    pub ffn: usize,
    /// Experts over all ranks.
    pub experts: usize,
    /// Experts a token.
    pub top_k: usize,
    /// Divide the gate weights by their sum.
    pub normalize: bool,
    /// Factor of the load-balancing loss.
    pub aux_coef: f32,
    /// Factor of the z-loss.
    pub z_coef: f32,
}

/// Router and experts of one decoder layer.
#[derive(Debug, Clone)]
pub struct Moe<B: LayerKernels> {
    /// Its name, `model.layers.3.mlp`.
    pub name: String,
    /// The router.
    pub router: Router<B>,
    /// This rank's experts.
    pub experts: Experts<B>,
    /// Make the experts' input again in the backward pass, from the layer's, instead of keeping it: it has a row for each
    /// expert of a token. On one rank alone, where nobody needs to be asked for it, and unless its rounding is stochastic.
    /// What fprop multiplies is then converted, and counted, once a token and not once a row.
    pub remake_x: bool,
}

/// What the layer keeps. The router's input is not here: the caller hands it in again.
#[derive(Debug)]
pub struct MoeSaved<B: LayerKernels> {
    router: RouterSaved<B>,
    plan: Plan<B>,
    experts: ExpertsSaved<B>,
}

impl<B: LayerKernels> MoeSaved<B> {
    /// What the router chose.
    pub fn routing(&self) -> &Routing<B> {
        &self.router.routing
    }

    /// Tokens·slots that chose each expert, for each shard of this rank: `[local shards · e]`.
    pub fn load(&self) -> &B::Buf<i32> {
        &self.router.routing.load
    }

    /// Load-balancing loss and z-loss of each shard of this rank.
    pub fn losses(&self) -> &B::Buf<f32> {
        &self.router.routing.losses
    }

    /// Whether every row found its place on this rank.
    pub fn occupancy(&self) -> &Occupancy<B> {
        &self.plan.map.occupancy
    }
}

impl<B: LayerKernels> Saved for MoeSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.router.ledger(ledger);
        self.plan.ledger(ledger);
        self.experts.ledger(ledger);
    }
}

impl<B: LayerKernels> Moe<B> {
    /// Random weights.
    pub fn new(cx: &Cx<'_, B>, name: &str, shape: MoeShape, std: f32, out_std: f32) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            router: Router::new(cx, &format!("{name}.gate"), shape, std)?,
            experts: Experts::new(cx, &format!("{name}.experts"), shape, std, out_std)?,
            remake_x: false,
        })
    }

    /// Makes the weights' copies for this step.
    pub fn prepare(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        self.router.prepare(cx)?;
        self.experts.prepare(cx)
    }

    /// Its parameters, in canonical order.
    pub fn params(&mut self) -> Vec<&mut Param<B>> {
        let mut params = vec![&mut self.router.weight];
        params.extend(self.experts.params());
        params
    }

    /// The forward pass. `x_td` is the normed residual stream.
    pub fn forward(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>) -> Result<(Tensor<B>, MoeSaved<B>)> {
        let section = cx.section(Kind::Expert, &self.experts.name);
        let router = self.router.forward(cx, x_td)?;
        let align = if section.has_blocks() { 128 } else { 1 };
        let exchange = self.exchange(cx);
        let plan = exchange.plan(&router.routing, align)?;
        let (y_rd, experts) = match self.remakes_x(cx, &section) {
            true => {
                // Converted once a token, then copied to its experts.
                let layer = &self.experts.name;
                let rows = outgoing(cx, Pass::Forward, layer, "x", x_td, section.at(Site::DispatchFwd))?;
                let rows = self.experts.fprop_input(cx, &section, &rows, None)?;
                let x_rd = self.dispatched(cx, Pass::Forward, "x", &rows, &plan)?;
                self.experts.forward_on(cx, &section, x_rd, None, &plan)?
            }
            false => {
                let x_rd =
                    self.arrived(cx, Pass::Forward, "x", x_td, section.at(Site::DispatchFwd), &plan)?;
                self.experts.forward(cx, &section, x_rd, &plan)?
            }
        };
        let y_td = exchange.combine(&plan, &y_rd, None)?;
        cx.note(Pass::Forward, &self.experts.name, "unpermute+combine", "y", y_rd.dtype(), y_td.dtype());
        Ok((y_td, MoeSaved { router, plan, experts }))
    }

    /// The backward pass, with the input of the forward pass made again by the caller.
    pub fn backward(
        &mut self,
        cx: &Cx<'_, B>,
        mut saved: MoeSaved<B>,
        x_td: &Tensor<B>,
        dy_td: &Tensor<B>,
    ) -> Result<Tensor<B>> {
        let section = cx.section(Kind::Expert, &self.experts.name);
        let exchange = self.exchange(cx);
        if saved.experts.x.is_none() {
            saved.experts.x = Some(cx.uncounted(|| {
                let to = section.at(Site::DispatchFwd);
                let x_rd = self.arrived(cx, Pass::Backward, "x", x_td, to, &saved.plan)?;
                self.experts.kept_input(cx, &section, &x_rd, &saved.plan)
            })?);
        }
        let to = section.at(Site::DispatchBwd);
        let dy_rd = self.arrived(cx, Pass::Backward, "dy", dy_td, to, &saved.plan)?;
        let (dx_rd, dgate_r) = self.experts.backward(cx, &section, saved.experts, dy_rd, &saved.plan)?;
        let dgate = exchange.return_scalars(&saved.plan, &dgate_r)?;
        let dx_router = self.router.backward(cx, saved.router, x_td, &dgate)?;
        let dx_td = exchange.combine(&saved.plan, &dx_rd, Some(&dx_router))?;
        cx.note(Pass::Backward, &self.experts.name, "unpermute+combine", "dx", dx_rd.dtype(), dx_td.dtype());
        Ok(dx_td)
    }

    fn exchange<'a, 'c>(&self, cx: &'a Cx<'c, B>) -> Exchange<'a, 'c, B> {
        Exchange::new(cx, self.router.shape.experts, self.router.shape.top_k)
    }

    /// Random bits are those of the sorted rows, which are made once then.
    fn remakes_x(&self, cx: &Cx<'_, B>, section: &Section) -> bool {
        let draws = |site| cx.random(&self.experts.name, "x", section.at(site).round).is_some();
        self.remake_x && cx.comm.world() == 1 && !draws(Site::FpropX) && !draws(Site::SavedX)
    }

    /// A tensor's rows as they arrive at the experts.
    fn arrived(
        &self,
        cx: &Cx<'_, B>,
        pass: Pass,
        tensor: &'static str,
        x_td: &Tensor<B>,
        to: &Precision,
        plan: &Plan<B>,
    ) -> Result<Operand<B>> {
        let rows = outgoing(cx, pass, &self.experts.name, tensor, x_td, to)?;
        self.dispatched(cx, pass, tensor, &rows, plan)
    }

    /// Rows that travel, sorted by expert where they arrive.
    fn dispatched(
        &self,
        cx: &Cx<'_, B>,
        pass: Pass,
        tensor: &'static str,
        rows: &Operand<B>,
        plan: &Plan<B>,
    ) -> Result<Operand<B>> {
        let x_rd = self.exchange(cx).dispatch(plan, rows)?;
        cx.note(pass, &self.experts.name, "dispatch+permute", tensor, rows.format(), x_rd.format());
        Ok(x_rd)
    }
}

/// Rows as they travel.
fn outgoing<B: LayerKernels>(
    cx: &Cx<'_, B>,
    pass: Pass,
    layer: &str,
    tensor: &'static str,
    x_td: &Tensor<B>,
    to: &Precision,
) -> Result<Operand<B>> {
    match to.dtype() {
        Some(DType::F32) => Ok(Operand::Plain(cx.cast(x_td, DType::F32)?)),
        Some(DType::Bf16) => Ok(Operand::Plain(cx.cast(x_td, DType::Bf16)?)),
        None => {
            // One group of all tokens gives stochastic rounding its global row numbers.
            let groups = Some(&cx.shards.groups).filter(|g| g.capacity == x_td.rows);
            cx.quantize(pass, layer, tensor, x_td, to, Planes::Rows, groups)?.take_rows("dispatch")
        }
    }
}
