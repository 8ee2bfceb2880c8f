//! Weights: the F32 master, its gradient, and the copies the products multiply with.

mod codes;
mod slices;

pub use slices::Slices;

use crate::cx::{Cx, Shards};
use crate::delayed::Spans;
use crate::spec::{Init, ParamSpec, Part};
use nibble_core::formats::{Purpose, Stream, fnv1a32};
use nibble_core::ops::{Counts, Emitted, GroupedWgrad, InitNormal, Planes, Quantize, SumShards, Transpose};
use nibble_core::recipe::{Section, Site};
use nibble_core::{Comm, DType, Data, Error, Groups, Kernels, Mesh, Operand, Result, Tensor};

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
    /// Matrices on this rank.
    pub fn stack(self) -> usize {
        match self {
            Self::Replicated => 1,
            Self::Experts(local) => local,
        }
    }

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
    /// F32: the rows of [`Param::slices`] that this rank keeps.
    pub master: Tensor<B>,
    /// Which rank keeps which rows, of the ranks that hold the same values.
    pub slices: Slices,
    /// What the backward passes of a step add up to.
    pub gradient: Gradient<B>,
    /// What AdamW remembers; none in a model that is not trained.
    pub moments: Option<Moments<B>>,
    /// Where it lives.
    pub placement: Placement,
    /// Whether weight decay applies (matrices, but not norms).
    pub decays: bool,
    shadow: Option<Shadow<B>>,
    /// All rows, for passes that take them as they are, where this rank keeps some of them alone.
    whole: Option<Tensor<B>>,
}

/// First and second moment of AdamW, both F32 or both BF16, of the rows of the master.
#[derive(Debug, Clone)]
pub struct Moments<B: Kernels> {
    /// As the master.
    pub exp_avg: Tensor<B>,
    /// As the master.
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
    /// As the master; where shards and ranks meet at the end of a step, of each whole matrix of a stack one a local shard.
    values: Option<Tensor<B>>,
    /// The sum over shards and ranks, where it does not lie in `values`: as the master. For the rest of the step.
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
    /// A parameter with these values, all of them on this rank.
    pub fn new(name: impl Into<String>, master: Tensor<B>, placement: Placement) -> Self {
        let name = name.into();
        let stack = placement.stack();
        let slices = Slices::new(&name, (master.rows / stack.max(1), master.cols), stack, (0, 1));
        Self::of_slice(name, slices, master, placement)
    }

    fn of_slice(name: String, slices: Slices, master: Tensor<B>, placement: Placement) -> Self {
        Self {
            name,
            decays: slices.num_rows() > 1,
            gradient: Gradient::default(),
            moments: None,
            master,
            slices,
            placement,
            shadow: None,
            whole: None,
        }
    }

    /// The parameter of a description with its initial values: this rank's rows of them.
    ///
    /// # Errors
    /// From the backend.
    pub fn of(cx: &Cx<'_, B>, spec: &ParamSpec) -> Result<Self> {
        let ((rows, cols), Mesh { all, ep, dp }) = (spec.shape(), cx.mesh);
        let (placement, first, replicas) = match spec.experts {
            None => (Placement::Replicated, 0, all),
            Some(_) => {
                let local = spec.stack() / ep.world().max(1);
                (Placement::Experts(local), ep.rank() * local * rows, dp)
            }
        };
        let (name, place) = (spec.id.to_string(), (replicas.rank(), replicas.world()));
        let slices = Slices::new(&name, (rows, cols), placement.stack(), place);
        let mine = slices.mine();
        let master = match spec.init {
            _ if mine.is_empty() => Tensor::zeros(cx.b, DType::F32, 0, cols)?,
            Init::Ones => Tensor::from_f32(cx.b, &vec![1.0; mine.len() * cols], mine.len(), cols)?,
            Init::Normal(std) => {
                let stream = Stream::new(cx.seed, Purpose::Init, fnv1a32(&name), 0);
                let first = ((first + mine.start) * cols) as u64;
                InitNormal { stream, first, rows: mine.len(), cols, std }.run(cx.b)?
            }
        };
        Ok(Self::of_slice(name, slices, master, placement))
    }

    /// The one weight of a part, with all of which every rank computes. This rank keeps its rows of the master.
    ///
    /// # Errors
    /// [`Error::Shape`] for a part that has others; from the backend.
    pub fn only(cx: &Cx<'_, B>, part: &Part) -> Result<Self> {
        match part.weights() {
            [weight] if weight.experts.is_none() => Self::of(cx, weight),
            weights => {
                let got = format!("{} of {}", weights.len(), part.id);
                Err(Error::shape("parameter", "weights", got, "one, of no experts"))
            }
        }
    }

    /// The id of the part it belongs to, of one that has a single weight.
    pub fn layer(&self) -> &str {
        self.name.trim_end_matches(".weight")
    }

    /// Matrices stacked in it.
    pub fn stack(&self) -> usize {
        self.placement.stack()
    }

    /// Rows and columns of all slices together.
    pub fn shape(&self) -> (usize, usize) {
        (self.slices.num_rows(), self.slices.cols())
    }

    /// All rows of the master, or of what is kept of each row beside it, of which this rank has `mine`: from every rank that keeps some.
    ///
    /// # Errors
    /// From the backend and other ranks.
    pub fn gathered(&self, b: &B, mesh: Mesh<'_, B>, mine: &Tensor<B>) -> Result<Tensor<B>> {
        let (rows, cols) = self.shape();
        if !self.slices.is_divided() {
            return Ok(mine.clone());
        }
        let (bytes, of_value) = match &mine.data {
            Data::F32(values) => (b.reinterpret(values)?, size_of::<f32>()),
            Data::Bf16(values) => (b.reinterpret(values)?, size_of::<u16>()),
        };
        let mut all = b.alloc::<u8>(rows * cols * of_value)?;
        self.replicas(mesh).all_gather_parts(b, &bytes, &self.slices.bytes(of_value), &mut all)?;
        let data = match &mine.data {
            Data::F32(_) => Data::F32(b.reinterpret(&all)?),
            Data::Bf16(_) => Data::Bf16(b.reinterpret(&all)?),
        };
        Tensor::new(data, rows, cols)
    }

    /// Makes all rows there for passes that take them as they are.
    ///
    /// # Errors
    /// From the backend and other ranks.
    pub fn prepare_plain(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        if self.slices.is_divided() && self.whole.is_none() {
            self.whole = Some(self.gathered(cx.b, cx.mesh, &self.master)?);
        }
        Ok(())
    }

    /// The weight, all of it, F32.
    ///
    /// # Errors
    /// [`Error::Shape`] before [`Param::prepare_plain`].
    pub fn plain(&self) -> Result<&Tensor<B>> {
        match self.slices.is_divided() {
            false => Ok(&self.master),
            true => self.whole.as_ref().ok_or_else(|| self.unprepared()),
        }
    }

    /// Makes the copies the products take: quantized or cast, and transposed for dgrad. Of rows that several ranks keep, what travels is as
    /// narrow as it is read, where it can be made of a rank's own rows: a cast, or codes whose scales are those of blocks.
    ///
    /// # Errors
    /// From the backend and other ranks.
    pub fn prepare(&mut self, cx: &Cx<'_, B>, section: &Section) -> Result<()> {
        let to = section.at(Site::FpropW);
        let stack = self.stack();
        self.shadow = Some(match to.dtype() {
            Some(dtype) => {
                // As narrow as it is read.
                let w = self.gathered(cx.b, cx.mesh, &cx.cast(&self.master, dtype)?)?;
                let wt = match cx.training {
                    true => Some(Operand::Plain(Transpose { x: &w, stack }.run(cx.b)?)),
                    false => None,
                };
                Shadow { w: Operand::Plain(w), wt }
            }
            None if self.slices.is_divided() && self.whole.is_none() && codes::travel(to.codec()?) => {
                let codec = to.codec()?;
                let mine = codes::OfRank::new(cx.b, &self.slices, &self.master, codec)?;
                mine.keep_counts(cx, &self.name)?;
                let (w, wt) = mine.gathered(cx, self.replicas(cx.mesh), &self.slices, codec)?;
                Shadow { w, wt }
            }
            None => {
                let of = match self.placement {
                    Placement::Replicated => Spans::Whole,
                    Placement::Experts(_) => Spans::Experts,
                };
                let scales = cx.earlier_scales((&self.name, "w"), to, (of, stack))?;
                let delayed = scales.map(|(delayed, _)| delayed);
                let whole = match &self.whole {
                    Some(whole) => whole.clone(),
                    None => self.gathered(cx.b, cx.mesh, &self.master)?,
                };
                let op = Quantize { stack, delayed, ..Quantize::new(&whole, to.codec()?, Planes::Tiles) };
                let tiles = op.run(cx.b)?;
                // Every rank that has the weight finds the same: the first one's blocks count.
                let counts = match self.replicas(cx.mesh).rank() {
                    0 => tiles.counts.clone(),
                    _ => Some(Counts::zeros(cx.b)?),
                };
                cx.keep_quantized(&self.name, "w", &Emitted { counts, ..tiles.clone() }, scales);
                Shadow { w: tiles.take_rows("prepare")?, wt: tiles.cols }
            }
        });
        Ok(())
    }

    /// Drops the copies: their memory is free until the next step, and the master has no other handle.
    pub fn release(&mut self) {
        (self.shadow, self.whole) = (None, None);
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
        // Ranks, and a pass's own parts, are added in F32, before anything is rounded.
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
            return self.store_sum(cx, &parts, shards).map(|()| made);
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

    /// The buffer of the gradient, made now if it is not there.
    fn values(&mut self, b: &B, shards: usize) -> Result<&mut Tensor<B>> {
        let values = match self.gradient.values.take() {
            Some(values) => values,
            None => {
                let GradientPlan { dtype, at_once } = self.gradient.plan;
                let (rows, cols) = self.shape();
                let rows = if at_once { self.master.rows } else { shards * rows };
                Tensor::unwritten(b, dtype, rows, cols)?
            }
        };
        Ok(self.gradient.values.insert(values))
    }

    /// Shards and ranks by one tree, into the gradient's buffer, rounded once.
    fn store_sum(&mut self, cx: &Cx<'_, B>, parts: &Tensor<B>, shards: usize) -> Result<()> {
        let (b, stack) = (cx.b, self.stack());
        self.values(b, shards)?;
        // Made just now, if it was not there.
        let Some(mut values) = self.gradient.values.take() else { return Ok(()) };
        let stored = match values.dtype() {
            _ if !self.slices.is_divided() => SumShards { x: parts, stack, shards, into: &mut values }.run(b),
            DType::F32 => self.sum_of_ranks(cx, parts, shards, &mut values),
            DType::Bf16 => {
                let mut sum = Tensor::unwritten(b, DType::F32, values.rows, values.cols)?;
                self.sum_of_ranks(cx, parts, shards, &mut sum)?;
                SumShards { x: &sum, stack: 1, shards: 1, into: &mut values }.run(b)
            }
        };
        self.gradient.values = Some(values);
        self.gradient.written = true;
        stored
    }

    /// The rows that this rank keeps of the sum over shards and ranks, F32.
    fn sum_of_ranks(
        &self,
        cx: &Cx<'_, B>,
        parts: &Tensor<B>,
        shards: usize,
        into: &mut Tensor<B>,
    ) -> Result<()> {
        let (b, stack, (rows, cols)) = (cx.b, self.stack(), self.shape());
        let mut sum;
        let of_rank = match (&parts.data, shards) {
            (Data::F32(_), 1) => parts,
            _ => {
                sum = Tensor::unwritten(b, DType::F32, rows, cols)?;
                SumShards { x: parts, stack, shards, into: &mut sum }.run(b)?;
                &sum
            }
        };
        let (values, places) = (of_rank.f32("reduce_scatter_tree", "gradient")?, self.slices.values());
        match &mut into.data {
            Data::F32(into) => self.replicas(cx.mesh).reduce_scatter_tree(b, values, &places, into),
            Data::Bf16(_) => Err(Error::shape("reduce_scatter_tree", "gradient", "bf16", "f32")),
        }
    }

    /// Copies of each matrix's gradient that a step adds up on this rank.
    fn shards(&self, cx: &Cx<'_, B>) -> usize {
        self.placement.shards(&cx.shards)
    }

    /// The ranks that hold the same values, whose gradients are one sum.
    pub fn replicas<'a>(&self, mesh: Mesh<'a, B>) -> &'a dyn Comm<B> {
        match self.placement {
            Placement::Replicated => mesh.all,
            Placement::Experts(_) => mesh.dp,
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
        self.gradient = Gradient { plan, ..Gradient::default() };
        self.values(b, shards).map(drop)
    }

    /// Makes the moments, both zero, where the backend allocates now.
    pub fn place_moments(&mut self, b: &B, dtype: DType) -> Result<()> {
        let (rows, cols) = self.master.shape();
        let zeros = || Tensor::zeros(b, dtype, rows, cols);
        self.moments = Some(Moments { exp_avg: zeros()?, exp_avg_sq: zeros()? });
        Ok(())
    }

    /// Brings the gradient's shards and ranks together, if that has not been done after its pass: each rank gets the rows that it keeps.
    ///
    /// # Errors
    /// From the backend and other ranks.
    pub fn reduce_gradient(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        let (shards, stack) = (self.shards(cx), self.stack());
        let (GradientPlan { at_once, .. }, written) = (self.gradient.plan, self.gradient.written);
        let values = self.values(cx.b, shards)?;
        if !written {
            clear(cx.b, values)?;
        }
        self.gradient.written = true;
        if at_once {
            return Ok(());
        }
        let values = self.values(cx.b, shards)?.clone();
        if self.slices.is_divided() || shards > 1 {
            let (rows, cols) = self.master.shape();
            let mut sum = Tensor::unwritten(cx.b, DType::F32, rows, cols)?;
            match self.slices.is_divided() {
                true => self.sum_of_ranks(cx, &values, shards, &mut sum)?,
                false => SumShards { x: &values, stack, shards, into: &mut sum }.run(cx.b)?,
            }
            self.gradient.sum = Some(sum);
        }
        Ok(())
    }

    /// The sum over shards and ranks, as the master, after [`Param::reduce_gradient`].
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
    /// F32: the rows that this rank keeps.
    pub master: &'a mut Tensor<B>,
    /// Summed over shards and ranks, of the same rows.
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
