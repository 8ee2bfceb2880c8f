//! Weights: the F32 master, its gradient, and the copies the products multiply with.

use crate::cx::{Cx, Shards};
use crate::delayed::Spans;
use crate::spec::{Init, ParamSpec, Part};
use nibble_core::formats::{Purpose, Stream, fnv1a32};
use nibble_core::ops::{GroupedWgrad, InitNormal, Planes, Quantize, SumShards, Transpose};
use nibble_core::recipe::{Section, Site};
use nibble_core::{Comm, DType, Data, Error, Groups, Kernels, Operand, Result, Tensor};

/// Which rows' gradients meet in a parameter, and where it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// On every rank; gradients are summed over the shards by a tree.
    Replicated,
    /// Stacked experts, divided among the ranks that do so; gradients are summed over the parts of an expert's rows by a tree. The number is how
    /// many experts are on this rank.
    Experts(usize),
}

impl Placement {
    /// Copies of each matrix's gradient that a step adds up on a rank of these shards.
    pub fn shards<B: Kernels>(self, shards: &Shards<B>) -> usize {
        match self {
            Self::Replicated => shards.local,
            Self::Experts(_) => shards.expert_parts.local,
        }
    }
}

/// A trainable tensor: the weight, its gradient, and what the optimizer remembers of it.
#[derive(Debug, Clone)]
pub struct Param<B: Kernels> {
    /// Canonical name; for stacked experts, of the stack.
    pub name: String,
    /// F32 `[rows, cols]`: this rank's part.
    pub master: Tensor<B>,
    /// What the backward passes of a step add up to.
    pub gradient: Gradient<B>,
    /// What AdamW remembers; none in a model that is not trained.
    pub moments: Option<Moments<B>>,
    /// Where it lives.
    pub placement: Placement,
    /// Whether weight decay applies (matrices, but not norms).
    pub decays: bool,
    shadow: Option<Shadow<B>>,
}

/// First and second moment of AdamW, both F32 or both BF16.
#[derive(Debug, Clone)]
pub struct Moments<B: Kernels> {
    /// `[rows, cols]`.
    pub exp_avg: Tensor<B>,
    /// `[rows, cols]`.
    pub exp_avg_sq: Tensor<B>,
}

/// How a gradient is stored, and when its shards meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientPlan {
    /// F32, or BF16: rounded once a micro-batch, added in F32.
    pub dtype: DType,
    /// Sum the shards, and the ranks, right after the one pass of a step that makes them, so that there is one gradient and
    /// not one a shard. Only where a step has one such pass: one micro-batch, and a weight that is used once.
    pub at_once: bool,
}

impl Default for GradientPlan {
    fn default() -> Self {
        Self { dtype: DType::F32, at_once: false }
    }
}

/// The gradient of a parameter. Its buffer is made once and stays where it is.
#[derive(Debug, Clone)]
pub struct Gradient<B: Kernels> {
    plan: GradientPlan,
    /// `[rows, cols]`; where shards meet at the end of a step, of each matrix of a stack one a local shard.
    values: Option<Tensor<B>>,
    /// The sum over shards and ranks, where it does not lie in `values`: `[rows, cols]`, F32. For the rest of the step.
    sum: Option<Tensor<B>>,
    /// Whether anything was written since the step began.
    written: bool,
}

impl<B: Kernels> Default for Gradient<B> {
    fn default() -> Self {
        Self { plan: GradientPlan::default(), values: None, sum: None, written: false }
    }
}

/// The copies of a weight that the products take, made once a step.
#[derive(Debug, Clone)]
struct Shadow<B: Kernels> {
    /// `[n, k]` for fprop.
    w: Operand<B>,
    /// `[k, n]` for dgrad.
    wt: Option<Operand<B>>,
}

impl<B: Kernels> Param<B> {
    /// A parameter with these values.
    pub fn new(name: impl Into<String>, master: Tensor<B>, placement: Placement) -> Self {
        Self {
            name: name.into(),
            decays: master.rows > 1,
            gradient: Gradient::default(),
            moments: None,
            master,
            placement,
            shadow: None,
        }
    }

    /// The parameter of a description with its initial values: this rank's part, of so many ranks.
    pub fn of(b: &B, seed: u64, spec: &ParamSpec, (rank, ranks): (usize, usize)) -> Result<Self> {
        let (rows, cols) = spec.shape();
        let local = spec.stack() / ranks.max(1);
        let (placement, rows) = match spec.experts {
            None => (Placement::Replicated, rows),
            Some(_) => (Placement::Experts(local), local * rows),
        };
        match spec.init {
            Init::Ones => Self::ones(b, spec.id.as_str(), cols),
            Init::Normal(std) => Self::normal(b, seed, spec.id.as_str(), (rows, cols), std, placement, rank),
        }
    }

    /// The one weight of a part that every rank has whole.
    ///
    /// # Errors
    /// [`Error::Shape`] for a part that has others; from the backend.
    pub fn only(b: &B, seed: u64, part: &Part) -> Result<Self> {
        match part.weights() {
            [weight] if weight.experts.is_none() => Self::of(b, seed, weight, (0, 1)),
            weights => {
                let got = format!("{} of {}", weights.len(), part.id);
                Err(Error::shape("parameter", "weights", got, "one, of which every rank has the whole"))
            }
        }
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
        Ok(Self::new(name, master, placement))
    }

    /// A norm's weight: ones.
    pub fn ones(b: &B, name: impl Into<String>, cols: usize) -> Result<Self> {
        let master = Tensor::from_f32(b, &vec![1.0; cols], 1, cols)?;
        Ok(Self::new(name, master, Placement::Replicated))
    }

    /// The id of the part it belongs to, of one that has a single weight.
    pub fn layer(&self) -> &str {
        self.name.trim_end_matches(".weight")
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
                let of = match self.placement {
                    Placement::Replicated => Spans::Whole,
                    Placement::Experts(_) => Spans::Experts,
                };
                let scales = cx.earlier_scales((&self.name, "w"), to, (of, stack))?;
                let delayed = scales.map(|(delayed, _)| delayed);
                let op =
                    Quantize { stack, delayed, ..Quantize::new(&self.master, to.codec()?, Planes::Tiles) };
                let tiles = op.run(cx.b)?;
                cx.keep_quantized(&self.name, "w", &tiles, scales);
                Shadow { w: tiles.take_rows("prepare")?, wt: tiles.cols }
            }
        });
        Ok(())
    }

    /// Drops the copies: their memory is free until the next step, and the master has no other handle.
    pub fn release(&mut self) {
        self.shadow = None;
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

    /// Runs a pass that makes this parameter's gradient. `pass` is given the matrices to write, of each matrix one a
    /// local shard, one under the other, and whether to add to what they hold.
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
        let replicas = self.replicas(cx);
        // Ranks, and a pass's own parts, are added in F32, before anything is rounded.
        let one_product = writes == Writes::Overwrites;
        let alone = shards == 1 && (dtype == DType::F32 || (replicas.world() == 1 && one_product));
        if dtype == DType::Bf16 && !one_product && !at_once {
            let got = format!("bf16 for {}, whose passes add several times", self.name);
            return Err(Error::shape("add_gradient", "gradient", got, "f32"));
        }
        if at_once && !alone {
            let (rows, cols) = (shards * self.master.rows, self.master.cols);
            let mut parts = match writes {
                Writes::Overwrites | Writes::InParts => Tensor::unwritten(cx.b, DType::F32, rows, cols)?,
                Writes::Adds => Tensor::zeros(cx.b, DType::F32, rows, cols)?,
            };
            let made = pass(&mut parts, false)?;
            return self.store_sum(cx, &parts, shards).map(|()| made);
        }
        let accumulate = self.gradient.written;
        let values = self.values(cx.b, if at_once { 1 } else { shards })?;
        if writes == Writes::Adds && !accumulate {
            clear(cx.b, values)?;
        }
        let made = pass(values, accumulate)?;
        if at_once {
            all_reduce(cx.b, replicas, values)?;
        }
        self.gradient.written = true;
        Ok(made)
    }

    /// The buffer of the gradient, made now if it is not there.
    fn values(&mut self, b: &B, parts: usize) -> Result<&mut Tensor<B>> {
        let values = match self.gradient.values.take() {
            Some(values) => values,
            None => {
                Tensor::unwritten(b, self.gradient.plan.dtype, parts * self.master.rows, self.master.cols)?
            }
        };
        Ok(self.gradient.values.insert(values))
    }

    /// Shards and ranks by one tree, into the gradient's buffer, rounded once.
    fn store_sum(&mut self, cx: &Cx<'_, B>, parts: &Tensor<B>, shards: usize) -> Result<()> {
        let (replicas, stack) = (self.replicas(cx), self.stack());
        let values = self.values(cx.b, 1)?;
        if replicas.world() == 1 || values.dtype() == DType::F32 {
            SumShards { x: parts, stack, shards, into: values }.run(cx.b)?;
            all_reduce(cx.b, replicas, values)?;
        } else {
            let mut sum = Tensor::unwritten(cx.b, DType::F32, values.rows, values.cols)?;
            SumShards { x: parts, stack, shards, into: &mut sum }.run(cx.b)?;
            all_reduce(cx.b, replicas, &mut sum)?;
            SumShards { x: &sum, stack: 1, shards: 1, into: values }.run(cx.b)?;
        }
        self.gradient.written = true;
        Ok(())
    }

    /// Copies of each matrix's gradient that a step adds up on this rank.
    fn shards(&self, cx: &Cx<'_, B>) -> usize {
        self.placement.shards(&cx.shards)
    }

    /// The ranks that hold the same values, whose gradients are one sum.
    fn replicas<'a>(&self, cx: &Cx<'a, B>) -> &'a dyn Comm<B> {
        match self.placement {
            Placement::Replicated => cx.mesh.all,
            Placement::Experts(_) => cx.mesh.dp,
        }
    }

    /// What the passes of this step have written; none before the first. Where shards have not met, of each matrix one a local shard.
    pub fn grad(&self) -> Option<&Tensor<B>> {
        let Gradient { values, written, .. } = &self.gradient;
        values.as_ref().filter(|_| *written)
    }

    /// The gradient counts as zero again; its buffer stays.
    pub fn clear_gradient(&mut self) {
        (self.gradient.written, self.gradient.sum) = (false, None);
    }

    /// Makes the gradient's buffer, for so many shards on this rank, where the backend allocates now.
    pub fn place_gradient(&mut self, b: &B, plan: GradientPlan, shards: usize) -> Result<()> {
        let parts = if plan.at_once { 1 } else { shards };
        self.gradient = Gradient { plan, ..Gradient::default() };
        self.values(b, parts).map(drop)
    }

    /// Makes the moments, both zero, where the backend allocates now.
    pub fn place_moments(&mut self, b: &B, dtype: DType) -> Result<()> {
        let (rows, cols) = self.master.shape();
        let zeros = || Tensor::zeros(b, dtype, rows, cols);
        self.moments = Some(Moments { exp_avg: zeros()?, exp_avg_sq: zeros()? });
        Ok(())
    }

    /// Brings the gradient's shards and ranks together, if that has not been done after its pass.
    pub fn reduce_gradient(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        let (shards, replicas) = (self.shards(cx), self.replicas(cx));
        let (rows, cols) = self.master.shape();
        let (GradientPlan { at_once, .. }, written) = (self.gradient.plan, self.gradient.written);
        let stack = self.stack();
        let values = self.values(cx.b, if at_once { 1 } else { shards })?;
        if !written {
            clear(cx.b, values)?;
        }
        if shards == 1 && !at_once && (values.dtype() == DType::F32 || replicas.world() == 1) {
            all_reduce(cx.b, replicas, values)?;
        } else if !at_once {
            let mut sum = Tensor::unwritten(cx.b, DType::F32, rows, cols)?;
            SumShards { x: values, stack, shards, into: &mut sum }.run(cx.b)?;
            all_reduce(cx.b, replicas, &mut sum)?;
            self.gradient.sum = Some(sum);
        }
        self.gradient.written = true;
        Ok(())
    }

    /// The sum over shards and ranks, `[rows, cols]`, after [`Param::reduce_gradient`].
    pub fn reduced(&self) -> Option<&Tensor<B>> {
        let grad = self.gradient.sum.as_ref().or(self.gradient.values.as_ref());
        grad.filter(|grad| grad.shape() == self.master.shape())
    }

    /// What [`Param::reduced`] gives, and the parts that the optimizer changes.
    ///
    /// # Errors
    /// [`Error::Shape`] before that, or without moments.
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

/// What the optimizer reads and changes of a parameter.
#[derive(Debug)]
pub struct Optimized<'a, B: Kernels> {
    /// F32 `[rows, cols]`.
    pub master: &'a mut Tensor<B>,
    /// Summed over shards and ranks, `[rows, cols]`.
    pub grad: &'a Tensor<B>,
    /// AdamW's.
    pub moments: &'a mut Moments<B>,
}

/// What a pass does with a gradient that holds nothing yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writes {
    /// It can overwrite, with one product, rounded once.
    Overwrites,
    /// It can overwrite, and adds to that: F32 alone.
    InParts,
    /// It always adds: what is there must be zero. F32 alone.
    Adds,
}

fn clear<B: Kernels>(b: &B, x: &mut Tensor<B>) -> Result<()> {
    match &mut x.data {
        Data::F32(values) => b.clear(values),
        Data::Bf16(values) => b.clear(values),
    }
}

/// The sum over these ranks by a tree, in place. F32.
fn all_reduce<B: Kernels>(b: &B, ranks: &dyn Comm<B>, x: &mut Tensor<B>) -> Result<()> {
    match &mut x.data {
        Data::F32(values) => ranks.all_reduce_tree(b, values),
        Data::Bf16(_) if ranks.world() == 1 => Ok(()),
        Data::Bf16(_) => Err(Error::shape("all_reduce", "gradient", "bf16", "f32")),
    }
}
