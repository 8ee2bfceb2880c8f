//! Weights: the F32 master, its gradient, and the copies the products multiply with.

use crate::cx::Cx;
use nibble_core::formats::{Purpose, Stream, fnv1a32};
use nibble_core::ops::{GroupedWgrad, InitNormal, Planes, Quantize, SumShards, Transpose};
use nibble_core::recipe::{Section, Site};
use nibble_core::{DType, Data, Error, Groups, Kernels, LayerKernels, Operand, Result, Tensor};

/// Which rows' gradients meet in a parameter, and where it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// On every rank; gradients are summed over the shards by a tree.
    Replicated,
    /// Stacked experts, divided among the ranks; each expert sees all its rows in global order. The number is how many
    /// are on this rank.
    Experts(usize),
}

/// A trainable tensor.
#[derive(Debug, Clone)]
pub struct Param<B: LayerKernels> {
    /// Canonical name; for stacked experts, of the stack.
    pub name: String,
    /// F32 `[rows, cols]`: this rank's part.
    pub master: Tensor<B>,
    /// F32 gradient: `[local shards · rows, cols]` while it is being accumulated, `[rows, cols]` once reduced. None
    /// stands for zero.
    pub grad: Option<Tensor<B>>,
    /// First moment of AdamW.
    pub exp_avg: Tensor<B>,
    /// Second moment of AdamW.
    pub exp_avg_sq: Tensor<B>,
    /// Where it lives.
    pub placement: Placement,
    /// Whether weight decay applies (matrices, but not norms).
    pub decays: bool,
    shadow: Option<Shadow<B>>,
}

/// The copies of a weight that the products take, made once a step.
#[derive(Debug, Clone)]
struct Shadow<B: LayerKernels> {
    /// `[n, k]` for fprop.
    w: Operand<B>,
    /// `[k, n]` for dgrad.
    wt: Option<Operand<B>>,
}

impl<B: LayerKernels> Param<B> {
    /// A parameter with these values.
    pub fn new(b: &B, name: impl Into<String>, master: Tensor<B>, placement: Placement) -> Result<Self> {
        let (rows, cols) = master.shape();
        Ok(Self {
            name: name.into(),
            grad: None,
            exp_avg: Tensor::zeros(b, DType::F32, rows, cols)?,
            exp_avg_sq: Tensor::zeros(b, DType::F32, rows, cols)?,
            master,
            placement,
            decays: rows > 1,
            shadow: None,
        })
    }

    /// A matrix of normal numbers; each element a function of (seed, name, its index in the whole tensor).
    pub fn normal(
        b: &B,
        seed: u64,
        name: impl Into<String>,
        (rows, cols): (usize, usize),
        std: f32,
        placement: Placement,
        rank: usize,
    ) -> Result<Self> {
        let name = name.into();
        let stream = Stream::new(seed, Purpose::Init, fnv1a32(&name), 0);
        let first = match placement {
            Placement::Replicated => 0,
            Placement::Experts(_) => (rank * rows * cols) as u64,
        };
        let master = InitNormal { stream, first, rows, cols, std }.run(b)?;
        Self::new(b, name, master, placement)
    }

    /// A norm's weight: ones.
    pub fn ones(b: &B, name: impl Into<String>, cols: usize) -> Result<Self> {
        let master = Tensor::from_f32(b, &vec![1.0; cols], 1, cols)?;
        Self::new(b, name, master, Placement::Replicated)
    }

    /// Matrices stacked in it.
    pub fn stack(&self) -> usize {
        match self.placement {
            Placement::Replicated => 1,
            Placement::Experts(local) => local,
        }
    }

    /// Makes the copies the products take: quantized or cast, and transposed for dgrad.
    pub fn prepare(&mut self, cx: &Cx<'_, B>, section: &Section) -> Result<()> {
        let to = section.at(Site::FpropW);
        let stack = self.stack();
        self.shadow = Some(match to.dtype() {
            Some(dtype) => {
                let w = cx.cast(&self.master, dtype)?;
                let wt = match cx.training {
                    true => Some(Operand::Plain(Transpose { x: &w, stack }.run(cx.b)?)),
                    false => None,
                };
                Shadow { w: Operand::Plain(w), wt }
            }
            None => {
                let op = Quantize { stack, ..Quantize::new(&self.master, to.codec()?, Planes::Tiles) };
                let tiles = op.run(cx.b)?;
                cx.keep_counts(&self.name, "w", tiles.counts.as_ref());
                Shadow { w: tiles.take_rows("prepare")?, wt: tiles.cols }
            }
        });
        Ok(())
    }

    /// The weight as fprop takes it.
    ///
    /// # Errors
    /// [`Error::Shape`] before [`Param::prepare`].
    pub fn w(&self) -> Result<&Operand<B>> {
        self.shadow.as_ref().map(|s| &s.w).ok_or_else(|| self.unprepared())
    }

    /// The weight as dgrad takes it.
    ///
    /// # Errors
    /// [`Error::Shape`] before [`Param::prepare`].
    pub fn wt(&self) -> Result<&Operand<B>> {
        self.shadow.as_ref().and_then(|s| s.wt.as_ref()).ok_or_else(|| self.unprepared())
    }

    fn unprepared(&self) -> Error {
        Error::shape(
            "product",
            "weight",
            format!("{} without its copies", self.name),
            "prepare() once a step",
        )
    }

    /// Adds dW = dYᵀ·X of each group to the gradient, which the first one writes: groups are shards for a replicated
    /// weight, experts for a stack.
    pub fn accumulate_wgrad(
        &mut self,
        cx: &Cx<'_, B>,
        dy: &Operand<B>,
        x: &Operand<B>,
        groups: &Groups<B>,
    ) -> Result<()> {
        self.add_to_grad(cx, groups.num_groups, |_, grad, accumulate| {
            GroupedWgrad { dy, x, groups, grad, accumulate }.run(cx.b)
        })
    }

    /// Runs an operation that adds to the gradients of so many groups, or overwrites them where there are none yet (the last
    /// argument is false).
    pub fn add_to_grad<R>(
        &mut self,
        cx: &Cx<'_, B>,
        groups: usize,
        op: impl FnOnce(&Self, &mut Tensor<B>, bool) -> Result<R>,
    ) -> Result<R> {
        let rows = groups * (self.master.rows / self.stack());
        let accumulate = self.grad.is_some();
        let mut grad = match self.grad.take() {
            Some(grad) => grad,
            None => Tensor::new(Data::F32(cx.b.alloc(rows * self.master.cols)?), rows, self.master.cols)?,
        };
        let done = op(self, &mut grad, accumulate);
        // What a failed operation did not write is no gradient.
        if done.is_ok() || accumulate {
            self.grad = Some(grad);
        }
        done
    }

    /// The gradient to accumulate into, one copy a local shard, zeros at first.
    pub fn shard_grads(&mut self, cx: &Cx<'_, B>) -> Result<&mut Tensor<B>> {
        let grad = match self.grad.take() {
            Some(grad) => grad,
            None => {
                let rows = cx.shards.local * self.master.rows;
                Tensor::zeros(cx.b, DType::F32, rows, self.master.cols)?
            }
        };
        Ok(self.grad.insert(grad))
    }
}

impl<B: Kernels> Param<B> {
    /// Sums the gradient over this rank's shards and over the ranks by one tree, in place.
    pub fn reduce_grad(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        let (rows, cols) = self.master.shape();
        let grad = match self.grad.take() {
            Some(grad) => grad,
            None => Tensor::zeros(cx.b, DType::F32, rows, cols)?,
        };
        self.grad = Some(match self.placement {
            Placement::Experts(_) => grad,
            Placement::Replicated => {
                let shards = grad.rows / rows;
                let sum = if shards > 1 { SumShards { x: &grad, shards }.run(cx.b)? } else { grad };
                match sum.data {
                    Data::F32(mut values) => {
                        cx.comm.all_reduce_tree(cx.b, &mut values)?;
                        Tensor::new(Data::F32(values), rows, cols)?
                    }
                    Data::Bf16(_) => return Err(Error::shape("reduce_grad", "grad", "bf16", "f32")),
                }
            }
        });
        Ok(())
    }
}
