//! A parameter's gradient: what the passes of a step add to it, and its sum over shards and ranks.

use super::buckets::Summand;
use super::{Moments, Param};
use crate::cx::Cx;
use nibble_core::ops::{GroupedWgrad, SumShards};
use nibble_core::{DType, Data, Error, Groups, Kernels, Operand, Result, Tensor};

/// How a gradient is stored, and when its shards are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientPlan {
    /// F32, or BF16: rounded once per micro-batch, added in F32.
    pub dtype: DType,
    /// Sum the shards, and start the sum over ranks, right after the pass that computes the gradient, so that memory holds one gradient
    /// instead of one per shard. This needs a step with only one such pass: one micro-batch, and a weight that is used once.
    pub at_once: bool,
}

impl Default for GradientPlan {
    fn default() -> Self {
        Self { dtype: DType::F32, at_once: false }
    }
}

/// The gradient of a parameter. Its buffer is allocated once and does not move.
#[derive(Debug, Clone)]
pub struct Gradient<B: Kernels> {
    plan: GradientPlan,
    /// Shaped as the master; if shards and ranks are summed at the end of a step, one whole matrix per local shard and matrix of the stack.
    values: Option<Tensor<B>>,
    /// The sum over shards and ranks, if it is not in `values`: shaped as the master, for the rest of the step.
    sum: Option<Tensor<B>>,
    /// Whether anything was written since the step began.
    written: bool,
    /// Whether the sum over ranks has begun. Until it is finished, the buckets own the buffer that it goes to.
    summing: bool,
}

impl<B: Kernels> Default for Gradient<B> {
    fn default() -> Self {
        Self { plan: GradientPlan::default(), values: None, sum: None, written: false, summing: false }
    }
}

/// How a pass writes a gradient that holds nothing yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writes {
    /// It overwrites, with one product that is rounded once.
    Overwrites,
    /// It overwrites, then adds to that: F32 only.
    InParts,
    /// It always adds, so the buffer must be zero: F32 only.
    Adds,
}

/// What the optimizer reads and changes of a parameter.
#[derive(Debug)]
pub struct Optimized<'a, B: Kernels> {
    /// F32: the rows that this rank keeps.
    pub master: &'a mut Tensor<B>,
    /// The gradient of the same rows, summed over shards and ranks.
    pub grad: &'a Tensor<B>,
    /// Moments of AdamW.
    pub moments: &'a mut Moments<B>,
}

impl<B: Kernels> Param<B> {
    /// Adds dW = dYᵀ·X of each group to the gradient: groups are shards for a replicated weight, parts of experts for a stack.
    pub fn accumulate_wgrad(
        &mut self,
        cx: &Cx<'_, B>,
        dy: &Operand<B>,
        x: &Operand<B>,
        groups: &Groups<B>,
    ) -> Result<()> {
        self.add_gradient(cx, Writes::Overwrites, |grad, accumulate| {
            GroupedWgrad { dy, x, groups, grad, accumulate }.run(cx.b)
        })
    }

    /// Runs a pass that computes this parameter's gradient. `pass` gets the matrices to write, and whether to add to what they hold. There
    /// is one matrix per matrix of the parameter and local shard, stacked by rows.
    ///
    /// # Errors
    /// What `pass` returns; [`Error::Shape`] for a second pass of a step whose shards were summed after the first.
    pub fn add_gradient<R>(
        &mut self,
        cx: &Cx<'_, B>,
        writes: Writes,
        pass: impl FnOnce(&mut Tensor<B>, bool) -> Result<R>,
    ) -> Result<R> {
        let shards = self.shards(cx);
        let GradientPlan { dtype, at_once } = self.gradient.plan;
        if at_once && self.gradient.written {
            let got = format!("{} a second time in a step", self.name);
            return Err(Error::shape("add_gradient", "parameter", got, "one that is used once"));
        }
        // Sums over ranks, and over a pass's own parts, are in F32, before anything is rounded.
        let one_product = writes == Writes::Overwrites;
        let alone = shards == 1 && !self.slices.is_divided() && (dtype == DType::F32 || one_product);
        if dtype == DType::Bf16 && !one_product && !at_once {
            let got = format!("bf16 for {}, whose passes add several times", self.name);
            return Err(Error::shape("add_gradient", "gradient", got, "f32"));
        }
        if at_once && !alone {
            let (rows, cols) = self.shape();
            let rows = shards * rows;
            let mut parts = match writes {
                Writes::Overwrites | Writes::InParts => Tensor::unwritten(cx.b, DType::F32, rows, cols)?,
                Writes::Adds => Tensor::zeros(cx.b, DType::F32, rows, cols)?,
            };
            let made = pass(&mut parts, false)?;
            self.store_sum(cx, parts, shards)?;
            return Ok(made);
        }
        let accumulate = self.gradient.written;
        let values = self.values(cx.b, if at_once { 1 } else { shards })?;
        if writes == Writes::Adds && !accumulate {
            clear(cx.b, values)?;
        }
        let made = pass(values, accumulate)?;
        self.gradient.written = true;
        Ok(made)
    }

    /// The buffer of the gradient, allocated now if there is none.
    fn values(&mut self, b: &B, shards: usize) -> Result<&mut Tensor<B>> {
        let values = self.take_values(b, shards)?;
        Ok(self.gradient.values.insert(values))
    }

    fn take_values(&mut self, b: &B, shards: usize) -> Result<Tensor<B>> {
        match self.gradient.values.take() {
            Some(values) => Ok(values),
            None => {
                let GradientPlan { dtype, at_once } = self.gradient.plan;
                let (rows, cols) = self.shape();
                let rows = if at_once { self.master.rows } else { shards * rows };
                Tensor::unwritten(b, dtype, rows, cols)
            }
        }
    }

    /// Sums the shards by a tree into the gradient's buffer, rounded once. On several ranks, begins the sum over ranks.
    fn store_sum(&mut self, cx: &Cx<'_, B>, parts: Tensor<B>, shards: usize) -> Result<()> {
        let (b, stack) = (cx.b, self.stack());
        let mut values = self.take_values(b, shards)?;
        self.gradient.written = true;
        if self.slices.is_divided() {
            return self.begin_sum_of_ranks(cx, parts, shards, values);
        }
        let stored = SumShards { x: &parts, stack, shards, into: &mut values }.run(b);
        self.gradient.values = Some(values);
        stored
    }

    /// Sums the shards, and puts the sum into the buckets to be summed over ranks. This rank's rows of the result go to `into`.
    fn begin_sum_of_ranks(
        &mut self,
        cx: &Cx<'_, B>,
        parts: Tensor<B>,
        shards: usize,
        into: Tensor<B>,
    ) -> Result<()> {
        let (b, stack, (rows, cols)) = (cx.b, self.stack(), self.shape());
        let values = match parts.data {
            Data::F32(values) if shards == 1 => values,
            _ => {
                let mut sum = Tensor::unwritten(b, DType::F32, rows, cols)?;
                SumShards { x: &parts, stack, shards, into: &mut sum }.run(b)?;
                sum.f32("gradients", "sum")?.clone()
            }
        };
        let summand = Summand { name: self.name.clone(), values, parts: self.slices.values(), into };
        self.gradient.summing = true;
        cx.buckets.borrow_mut().put((b, self.replicas(cx.mesh)), self.placement, summand)
    }

    /// The gradient that the passes of this step have written; `None` before the first pass, and while the sum over ranks is in flight.
    /// Before the shards are summed, there is one matrix per shard.
    pub fn grad(&self) -> Option<&Tensor<B>> {
        let Gradient { values, written, .. } = &self.gradient;
        values.as_ref().filter(|_| *written)
    }

    /// Makes the gradient count as zero. Its buffer stays, unless a sum over ranks is in flight.
    pub fn clear_gradient(&mut self) {
        let Gradient { sum, written, summing, .. } = &mut self.gradient;
        (*sum, *written, *summing) = (None, false, false);
    }

    /// Allocates the gradient's buffer, for `shards` shards on this rank, in the backend's current arena.
    pub fn place_gradient(&mut self, b: &B, plan: GradientPlan, shards: usize) -> Result<()> {
        self.gradient = Gradient { plan, ..Gradient::default() };
        self.values(b, shards).map(drop)
    }

    /// Sums the gradient over shards and ranks, or finishes this sum if it was started right after the gradient's pass. Each rank gets the
    /// sum of the rows that it stores. For several weights see [`reduce_gradients`].
    ///
    /// # Errors
    /// The errors of the backend and other ranks.
    pub fn reduce_gradient(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        self.begin_reduction(cx)?;
        self.finish_reduction(cx)
    }

    /// Sums the shards, and begins the sum over ranks, unless that has begun.
    fn begin_reduction(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        let (shards, stack) = (self.shards(cx), self.stack());
        if !self.gradient.written {
            clear(cx.b, self.values(cx.b, shards)?)?;
            self.gradient.written = true;
        } else if self.gradient.summing {
            return Ok(());
        }
        if self.gradient.plan.at_once || (shards == 1 && !self.slices.is_divided()) {
            return Ok(());
        }
        let values = self.values(cx.b, shards)?.clone();
        let (rows, cols) = self.master.shape();
        let mut sum = Tensor::unwritten(cx.b, DType::F32, rows, cols)?;
        if self.slices.is_divided() {
            return self.begin_sum_of_ranks(cx, values, shards, sum);
        }
        SumShards { x: &values, stack, shards, into: &mut sum }.run(cx.b)?;
        self.gradient.sum = Some(sum);
        Ok(())
    }

    /// Waits for the sum over ranks, if it has begun. All ranks that hold a weight wait for their weights in the same order.
    ///
    /// # Errors
    /// The errors of the backend and other ranks.
    pub fn finish_reduction(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        if !self.gradient.summing {
            return Ok(());
        }
        let ranks = self.replicas(cx.mesh);
        let sum = cx.buckets.borrow_mut().take((cx.b, ranks), self.placement, &self.name)?;
        let Gradient { plan, values, sum: beside, summing, .. } = &mut self.gradient;
        *summing = false;
        *if plan.at_once { values } else { beside } = Some(sum);
        Ok(())
    }

    /// The sum over shards and ranks, shaped as the master, after [`Param::reduce_gradient`].
    pub fn reduced(&self) -> Option<&Tensor<B>> {
        let grad = self.gradient.sum.as_ref().or(self.gradient.values.as_ref());
        grad.filter(|grad| grad.shape() == self.master.shape())
    }

    /// What [`Param::reduced`] returns, with the parts that the optimizer changes.
    ///
    /// # Errors
    /// [`Error::Shape`] before [`Param::reduce_gradient`], or without moments.
    pub fn optimized(&mut self) -> Result<Optimized<'_, B>> {
        let Self { name, master, gradient, moments, .. } = self;
        let grad = gradient.sum.as_ref().or(gradient.values.as_ref());
        match (grad, moments) {
            (Some(grad), Some(moments)) if grad.shape() == master.shape() => {
                Ok(Optimized { master, grad, moments })
            }
            _ => {
                let got = format!("{name} without its summed gradient or its moments");
                Err(Error::shape("optimizer", "parameter", got, "both"))
            }
        }
    }
}

/// [`Param::reduce_gradient`] for all of these. Sums over ranks travel together; those that have not begun do so in this order.
///
/// # Errors
/// The errors of the backend and other ranks.
pub fn reduce_gradients<B: Kernels>(cx: &Cx<'_, B>, params: &mut [&mut Param<B>]) -> Result<()> {
    params.iter_mut().try_for_each(|param| param.begin_reduction(cx))?;
    cx.buckets.borrow_mut().send(cx.b, cx.mesh)?;
    params.iter_mut().try_for_each(|param| param.finish_reduction(cx))
}

fn clear<B: Kernels>(b: &B, x: &mut Tensor<B>) -> Result<()> {
    match &mut x.data {
        Data::F32(values) => b.clear(values),
        Data::Bf16(values) => b.clear(values),
    }
}
