//! A parameter's gradient: the contributions of a step's passes, and their sum over shards and ranks.

use super::buckets::Summand;
use super::{Moments, Param};
use crate::cx::Cx;
use nibble_core::ops::{GroupedWgrad, SumShards};
use nibble_core::{DType, Data, Error, Groups, Kernels, Operand, Result, Tensor};

/// The data type of a gradient, and the time at which the gradients of the shards are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientPlan {
    /// The type of the stored gradient: F32 or BF16. A BF16 gradient is rounded once per micro-batch and accumulated in F32.
    pub dtype: DType,
    /// Whether to sum the shards, and start the sum over ranks, right after the pass that computes the gradient. If so, memory holds one
    /// gradient instead of one gradient per shard. If `at_once` is true, a step must have only one such pass: one micro-batch, and a weight
    /// that is used once.
    pub at_once: bool,
}

impl Default for GradientPlan {
    fn default() -> Self {
        Self { dtype: DType::F32, at_once: false }
    }
}

/// The gradient of a parameter. The buffer of the gradient is allocated once and does not move.
#[derive(Debug, Clone)]
pub struct Gradient<B: Kernels> {
    plan: GradientPlan,
    /// The gradient, with the shape of the master. If shards and ranks are summed at the end of a step, there is one whole matrix for each
    /// local shard and each matrix of the stack.
    values: Option<Tensor<B>>,
    /// The sum over shards and ranks for the rest of the step, with the shape of the master; `None` if the sum is in `values`.
    sum: Option<Tensor<B>>,
    /// Whether a pass has written the gradient since the step began.
    written: bool,
    /// Whether the sum over ranks has started. Until the sum is finished, the buckets own the buffer that receives it.
    summing: bool,
}

impl<B: Kernels> Default for Gradient<B> {
    fn default() -> Self {
        Self { plan: GradientPlan::default(), values: None, sum: None, written: false, summing: false }
    }
}

/// How a pass writes to a gradient buffer that has no contents yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writes {
    /// The pass overwrites the gradient with the result of one GEMM, which is rounded once.
    Overwrites,
    /// The pass overwrites the gradient, then adds to it. The gradient must be F32.
    InParts,
    /// The pass always adds to the gradient, so the buffer must be zero first. The gradient must be F32.
    Adds,
}

/// The tensors of a parameter that the optimizer reads and changes.
#[derive(Debug)]
pub struct Optimized<'a, B: Kernels> {
    /// The F32 master weight, with the rows that this rank stores.
    pub master: &'a mut Tensor<B>,
    /// The gradient of the rows of `master`, summed over shards and ranks.
    pub grad: &'a Tensor<B>,
    /// AdamW's moments of the rows of `master`.
    pub moments: &'a mut Moments<B>,
}

impl<B: Kernels> Param<B> {
    /// Adds the weight gradient dW = dYᵀ·X of each group of rows to the accumulated gradient. The groups are shards if every rank holds the
    /// weight, and parts of experts if the weight is a stack of experts.
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

    /// Runs a pass that computes this parameter's gradient. `pass` gets the matrices to write, and a flag that says whether to add to their
    /// contents. There is one matrix for each matrix of the parameter and each local shard, stacked by rows.
    ///
    /// # Errors
    /// Returns the errors of `pass`, and [`Error::Shape`] for a second pass of a step whose shards were summed after the first pass.
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
        // Sums over ranks, and over a pass's own parts, are computed in F32 before the result is rounded.
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

    /// The buffer of the gradient. If there is no buffer, it is allocated now.
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

    /// Sums the shards by a tree into the gradient's buffer, and rounds the sum once. On several ranks, starts the sum over ranks.
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

    /// Sums the shards, and puts the sum into a bucket, which is summed over ranks. This rank's rows of the result are written to `into`.
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

    /// The gradient that this step's passes have written; `None` before the first pass, and while the sum over ranks is in flight. Before
    /// the shards are summed, the gradient consists of one matrix per shard.
    pub fn grad(&self) -> Option<&Tensor<B>> {
        let Gradient { values, written, .. } = &self.gradient;
        values.as_ref().filter(|_| *written)
    }

    /// Marks the gradient as zero. The buffer stays allocated, unless a sum over ranks is in flight.
    pub fn clear_gradient(&mut self) {
        let Gradient { sum, written, summing, .. } = &mut self.gradient;
        (*sum, *written, *summing) = (None, false, false);
    }

    /// Allocates the gradient's buffer for `shards` shards on this rank, in the backend's current arena.
    pub fn place_gradient(&mut self, b: &B, plan: GradientPlan, shards: usize) -> Result<()> {
        self.gradient = Gradient { plan, ..Gradient::default() };
        self.values(b, shards).map(drop)
    }

    /// Sums the gradient over shards and ranks; if this sum was already started after the gradient's pass, waits for its end. Each rank
    /// gets the sum of those rows that the rank stores. [`reduce_gradients`] does the same for several weights.
    ///
    /// # Errors
    /// Returns the errors of the backend and other ranks.
    pub fn reduce_gradient(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        self.begin_reduction(cx)?;
        self.finish_reduction(cx)
    }

    /// Sums the shards, and starts the sum over ranks if it has not been started.
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

    /// Waits for the sum over ranks, if the sum has been started. All ranks that hold the same weights must wait for these weights in the
    /// same order.
    ///
    /// # Errors
    /// Returns the errors of the backend and other ranks.
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

    /// The gradient summed over shards and ranks, with the shape of the master; available after [`Param::reduce_gradient`].
    pub fn reduced(&self) -> Option<&Tensor<B>> {
        let grad = self.gradient.sum.as_ref().or(self.gradient.values.as_ref());
        grad.filter(|grad| grad.shape() == self.master.shape())
    }

    /// The summed gradient ([`Param::reduced`]), together with the tensors that the optimizer changes.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] before [`Param::reduce_gradient`], or without moments.
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

/// Calls [`Param::reduce_gradient`] for all of these parameters. Sums over ranks are sent together. Sums that have not been started yet are
/// started in the order of `params`.
///
/// # Errors
/// Returns the errors of the backend and other ranks.
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
