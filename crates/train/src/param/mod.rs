//! Weights: the F32 master, its gradient, its moments, and the copies that GEMMs read.
//!
//! State is sharded among the ranks that hold the same values (`slices.rs`): masters and moments of dense weights among all ranks, and
//! those of an expert among the ranks that have the expert. A rank therefore holds about 12 bytes × all parameters / ranks, or 8 with BF16
//! moments. This sharding is ZeRO stage 1. With one micro-batch per step it is also stage 2, except for a tied embedding: the sum of a
//! gradient over ranks starts in the backward pass, and a rank then stores only its own rows of the gradient. With several micro-batches,
//! the gradients of all rows stay in memory until the end of the step.
//!
//! ```text
//!               gradients, F32                    masters, moments                copies for products
//! every rank    its parts of all rows   ─►   its rows: AdamW          ─►    all rows, as narrow as they are read
//!                begin_reduce_scatter_tree                   begin_all_gather_parts
//! ```
//!
//! `buckets.rs` sums gradients over ranks during the backward pass. `gathering.rs` gathers the rows of weights during the forward pass.

mod buckets;
mod codes;
mod gathering;
mod gradient;
mod placement;
mod planes;
mod shipment;
mod slices;

pub use buckets::Buckets;
pub use gathering::{Gathering, Wanted};
pub use gradient::{Gradient, GradientPlan, Optimized, Writes, reduce_gradients};
pub use placement::Placement;
pub use slices::Slices;

use crate::convert::EarlierScales;
use crate::cx::{CopiesFor, Cx};
use crate::record::{FoundCells, OF_DGRAD, OF_FPROP};
use crate::shards::Spans;
use crate::spec::{Init, ParamSpec, Part, Update};
use codes::OfRank;
use gathering::{Copies, ProductCopies};
use nibble_core::formats::{BlockAxis, Codec, Purpose, Stream, fnv1a32};
use nibble_core::ops::{Counts, Dequantize, Emitted, InitNormal, Planes, Quantize, Random, Transpose};
use nibble_core::recipe::{By, Precision, WeightPlan};
use nibble_core::{BlockScaled, Comm, DType, Error, Kernels, Mesh, Operand, Result, Tensor};
use shipment::{Cargo, Rows, Shipment, Whole};
use std::borrow::Cow;

/// A trainable tensor: the weight, its gradient, and its optimizer state.
#[derive(Debug, Clone)]
pub struct Param<B: Kernels> {
    /// The canonical name. For stacked experts, this is the name of the stack.
    pub name: String,
    /// The F32 master weight: only the rows of [`Param::slices`] that this rank stores.
    pub master: Tensor<B>,
    /// The rows that each rank stores, among the ranks that share the same values.
    pub slices: Slices,
    /// The gradient to which the backward passes of a step add.
    pub gradient: Gradient<B>,
    /// AdamW's moments; `None` in a model that is not trained.
    pub moments: Option<Moments<B>>,
    /// How the parameter is placed on the ranks.
    pub placement: Placement,
    /// Whether weight decay applies to the parameter: true for matrices, false for norms.
    pub decays: bool,
    /// The rule by which a step changes the parameter.
    pub update: Update,
    shadow: Option<Shadow<B>>,
    /// All rows, for passes that read the rows directly. `None` if this rank's master has all rows.
    whole: Option<Tensor<B>>,
    /// The index of the parameter's first element in the stack over all ranks. Because of this index, random bits do not depend on the
    /// sharding of the stack.
    first: u64,
}

/// AdamW's first and second moments, both F32 or both BF16, for the rows of the master that this rank stores.
#[derive(Debug, Clone)]
pub struct Moments<B: Kernels> {
    /// The first moment, with the shape of the master.
    pub exp_avg: Tensor<B>,
    /// The second moment, with the shape of the master.
    pub exp_avg_sq: Tensor<B>,
}

/// The copies of a weight that GEMMs read, which are created once per step.
#[derive(Debug, Clone)]
struct Shadow<B: Kernels> {
    /// The copy for fprop, `[n, k]`; `None` if only the backward pass runs.
    w: Option<Operand<B>>,
    /// The copy for dgrad, `[k, n]`.
    wt: Option<Turned<B>>,
}

/// The transposed weight that dgrad reads.
#[derive(Debug, Clone)]
enum Turned<B: Kernels> {
    /// A copy that exists until the end of the step.
    There(Operand<B>),
    /// A copy that is decoded to this type from fprop's copy whenever a backward pass needs it ([`WeightPlan::decoded`]). The decoding
    /// costs passes over one weight in each micro-batch, and saves the memory of all transposed weights.
    Decoded(DType),
}

impl<B: Kernels> Param<B> {
    /// Creates a parameter with these values. This rank stores all values of the parameter.
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
            update: Update::Gradient,
            gradient: Gradient::default(),
            moments: None,
            master,
            slices,
            placement,
            shadow: None,
            whole: None,
            first: 0,
        }
    }

    /// Creates a parameter from its description, with the initial values of this rank's rows.
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn of(cx: &Cx<'_, B>, spec: &ParamSpec) -> Result<Self> {
        let ((rows, cols), Mesh { all, ep, dp }) = (spec.shape(), cx.mesh);
        let (placement, first, replicas) = match spec.experts {
            None => (Placement::Replicated, 0, all),
            Some(_) => {
                let local = spec.stack() / ep.world().max(1);
                (Placement::Experts(local), (ep.rank() * local * rows * cols) as u64, dp)
            }
        };
        let (name, place) = match spec.update {
            Update::Gradient | Update::Never => (spec.id.to_string(), (replicas.rank(), replicas.world())),
            Update::Load => (spec.id.to_string(), (0, 1)),
        };
        let slices = Slices::new(&name, (rows, cols), placement.stack(), place);
        let mine = slices.mine();
        let master = match spec.init {
            _ if mine.is_empty() => Tensor::zeros(cx.b, DType::F32, 0, cols)?,
            Init::Zeros => Tensor::zeros(cx.b, DType::F32, mine.len(), cols)?,
            Init::Ones => Tensor::from_f32(cx.b, &vec![1.0; mine.len() * cols], mine.len(), cols)?,
            Init::Normal(std) => {
                let stream = Stream::new(cx.seed, Purpose::Init, fnv1a32(&name), 0);
                let first = first + (mine.start * cols) as u64;
                InitNormal { stream, first, rows: mine.len(), cols, std }.run(cx.b)?
            }
        };
        Ok(Self { update: spec.update, first, ..Self::of_slice(name, slices, master, placement) })
    }

    /// Whether the parameter has a gradient and moments.
    pub fn has_gradient(&self) -> bool {
        self.update == Update::Gradient
    }

    /// The weight of a part that has exactly one weight. Every rank computes with all rows of the weight, but stores only its own rows of
    /// the master.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] for a part with several weights, and passes on errors of the backend.
    pub fn only(cx: &Cx<'_, B>, part: &Part) -> Result<Self> {
        match part.weights() {
            [weight] if weight.experts.is_none() => Self::of(cx, weight),
            weights => {
                let got = format!("{} of {}", weights.len(), part.id);
                Err(Error::shape("parameter", "weights", got, "one, of no experts"))
            }
        }
    }

    /// The weight of a part that has one weight, and the part's bias if there is one.
    ///
    /// # Errors
    /// Returns the errors of [`Param::only`].
    pub fn with_bias(cx: &Cx<'_, B>, part: &Part) -> Result<(Self, Option<Self>)> {
        match part.weights() {
            [weight, bias] if bias.shape().0 == 1 && weight.experts.is_none() => {
                Ok((Self::of(cx, weight)?, Some(Self::of(cx, bias)?)))
            }
            _ => Ok((Self::only(cx, part)?, None)),
        }
    }

    /// The id of the part to which the weight belongs.
    pub fn layer(&self) -> &str {
        self.name.trim_end_matches(".weight")
    }

    /// Number of matrices that are stacked in the parameter on this rank.
    pub fn stack(&self) -> usize {
        self.placement.stack()
    }

    /// Numbers of rows and columns of the parameter, with the slices of all ranks together.
    pub fn shape(&self) -> (usize, usize) {
        (self.slices.num_rows(), self.slices.cols())
    }

    /// Gathers all rows of the master, or of a tensor with the same rows, from all ranks that store rows. `mine` contains this rank's rows.
    ///
    /// # Errors
    /// Returns the errors of the backend and other ranks.
    pub fn gathered(&self, b: &B, mesh: Mesh<'_, B>, mine: &Tensor<B>) -> Result<Tensor<B>> {
        if !self.slices.is_divided() {
            return Ok(mine.clone());
        }
        let cargo = vec![Cargo { slices: self.slices.clone(), rows: Rows::Plain(mine.clone()) }];
        match Shipment::begin(b, self.replicas(mesh), false, cargo)?.wait(b)?.pop() {
            Some(Whole::Plain(all)) => Ok(all),
            _ => Err(Error::Defect { place: "parameter", what: "rows come otherwise than they were sent" }),
        }
    }

    /// Requests all rows, for passes that read the rows directly through [`Param::plain`].
    pub fn as_it_is(&self) -> Wanted<'_, B> {
        Wanted { param: self, copies: Copies::AsItIs }
    }

    /// Requests the copies that GEMMs read under this plan ([`Param::w`] and [`Param::wt`]): quantized or cast, and transposed for dgrad.
    /// If possible, a rank casts or quantizes its own rows before it sends them. Rows cannot be quantized before sending if one scale
    /// covers a whole row or column. If one scale covers the whole tensor, the largest magnitude is first computed over all ranks.
    ///
    /// `linear` is the name of the layer, which seeds the random signs of Hadamard transforms.
    pub fn for_products(&self, plan: &WeightPlan, linear: &str) -> Wanted<'_, B> {
        let to = ProductCopies { plan: *plan, linear: fnv1a32(linear) };
        Wanted { param: self, copies: Copies::Products(to) }
    }

    /// All rows of the weight, in F32.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if this rank does not have all rows yet.
    pub fn plain(&self) -> Result<&Tensor<B>> {
        match self.slices.is_divided() {
            false => Ok(&self.master),
            true => self.whole.as_ref().ok_or_else(|| self.unprepared()),
        }
    }

    /// Creates the copies that GEMMs read, from all rows in F32 or in the type of the copies.
    fn products(&self, cx: &Cx<'_, B>, to: &ProductCopies, whole: &Tensor<B>) -> Result<Shadow<B>> {
        if !to.plan.is_one {
            return self.each_by_itself(cx, to, whole);
        }
        let Some(dtype) = to.plan.w.dtype() else { return self.quantized(cx, &to.plan.w, whole) };
        let w = cx.cast(whole, dtype)?;
        let wt = match cx.copies_for_dgrad() {
            true => Some(Turned::There(Operand::Plain(self.turned(cx, &w)?))),
            false => None,
        };
        Ok(Shadow { w: Some(Operand::Plain(w)), wt })
    }

    /// The transpose of each matrix.
    fn turned(&self, cx: &Cx<'_, B>, x: &Tensor<B>) -> Result<Tensor<B>> {
        Transpose { x, stack: self.stack() }.run(cx.b)
    }

    /// The transpose of each matrix, dequantized.
    fn decoded(&self, cx: &Cx<'_, B>, x: &BlockScaled<B>) -> Result<Tensor<B>> {
        self.turned(cx, &Dequantize { x, dtype: cx.activations() }.run(cx.b)?)
    }

    /// Creates the copies if each copy is quantized separately.
    fn each_by_itself(&self, cx: &Cx<'_, B>, to: &ProductCopies, whole: &Tensor<B>) -> Result<Shadow<B>> {
        let is_source = to.plan.decoded.is_some() || to.plan.wt.by == By::Requantize;
        let w = (is_source || cx.copies != CopiesFor::Backward)
            .then(|| self.copy(cx, (OF_FPROP, to.linear), &to.plan.w, whole))
            .transpose()?;
        if !cx.copies_for_dgrad() {
            return Ok(Shadow { w, wt: None });
        }
        if let Some(dtype) = to.plan.decoded {
            return Ok(Shadow { w, wt: Some(Turned::Decoded(dtype)) });
        }
        let wt = match (to.plan.wt.by, &w) {
            (By::Requantize, Some(Operand::Block(w))) => self.decoded(cx, w)?,
            _ => self.turned(cx, whole)?,
        };
        let wt = self.copy(cx, (OF_DGRAD, to.linear), &to.plan.wt, &wt)?;
        Ok(Shadow { w, wt: Some(Turned::There(wt)) })
    }

    /// Creates one copy of a weight or of its transpose. The copy is cast, or quantized in 2-D blocks or in blocks along its rows.
    fn copy(
        &self,
        cx: &Cx<'_, B>,
        (name, linear): (&'static str, u32),
        to: &Precision,
        x: &Tensor<B>,
    ) -> Result<Operand<B>> {
        if let Some(dtype) = to.dtype() {
            return cx.cast(x, dtype).map(Operand::Plain);
        }
        let is_square = to.axis == BlockAxis::Tile && (to.format.spec().tiles || to.scaling.is_square());
        let planes = if is_square { Planes::Tiles } else { Planes::Rows };
        let hadamard = to.rht.map(|transform| cx.hadamard(&transform, linear));
        let random = self.random(cx, name, to);
        let op = Quantize { stack: self.stack(), random, hadamard, ..Quantize::new(x, to.codec()?, planes) };
        let made = op.run(cx.b)?;
        self.keep_counts_once(cx, name, &made, None)?;
        if self.replicas(cx.mesh).rank() == 0 {
            cx.measure_transformed(x, [&made.rows, &None], None, hadamard.as_ref())?;
        }
        made.take_rows("prepare")
    }

    /// The random bits of a copy. A matrix and its transpose have the same number of elements, so `first` is the same for both.
    fn random<'c>(&self, cx: &'c Cx<'_, B>, name: &str, to: &Precision) -> Option<Random<'c, B>> {
        cx.random(&self.name, name, to).map(|random| Random { first: self.first, ..random })
    }

    /// Keeps the counts and magnitudes of all rows. Every rank that has the weight finds the same values, so only the first rank's blocks
    /// count.
    fn keep_counts_once(
        &self,
        cx: &Cx<'_, B>,
        name: &'static str,
        made: &Emitted<B>,
        cells: Option<FoundCells>,
    ) -> Result<()> {
        let counts = match self.replicas(cx.mesh).rank() {
            0 => made.counts.clone(),
            _ => Some(Counts::zeros(cx.b)?),
        };
        cx.keep_quantized(&self.name, name, &Emitted { counts, ..made.clone() }, cells);
        Ok(())
    }

    /// Quantizes all rows, and keeps the counts and magnitudes.
    fn quantized(&self, cx: &Cx<'_, B>, to: &Precision, whole: &Tensor<B>) -> Result<Shadow<B>> {
        let (stack, codec, scales) = (self.stack(), to.codec()?, self.earlier_scales(cx, to)?);
        let delayed = scales.as_ref().map(|scales| scales.delayed);
        let random = self.random(cx, OF_FPROP, to);
        let op = Quantize { stack, delayed, random, ..Quantize::new(whole, codec, Planes::Tiles) };
        let tiles = op.run(cx.b)?;
        self.keep_counts_once(cx, OF_FPROP, &tiles, scales.map(|scales| scales.cells))?;
        if self.replicas(cx.mesh).rank() == 0 {
            // Only one copy is measured, because the other copy is its transpose.
            cx.measure(whole, [&tiles.rows, &None], None)?;
        }
        Ok(Shadow { w: Some(tiles.take_rows("prepare")?), wt: tiles.cols.map(Turned::There) })
    }

    /// Quantizes this rank's rows, and keeps the counts and magnitudes. For tensor scales, `amax` contains the largest magnitude of each
    /// matrix over all ranks' rows.
    fn own_codes(
        &self,
        cx: &Cx<'_, B>,
        to: &Precision,
        codec: Codec,
        amax: Option<B::Buf<f32>>,
    ) -> Result<OfRank<B>> {
        let scales = self.earlier_scales(cx, to)?;
        let delayed = scales.as_ref().map(|scales| scales.delayed);
        let mine = OfRank::new(cx.b, (&self.slices, &self.master), codec, delayed, amax)?;
        mine.keep_counts(cx, &self.name, scales.map(|scales| scales.cells))?;
        Ok(mine)
    }

    /// The weight's delayed scales, if the recipe has delayed scales.
    fn earlier_scales<'c>(&self, cx: &'c Cx<'_, B>, to: &Precision) -> Result<Option<EarlierScales<'c, B>>> {
        let of = match self.placement {
            Placement::Replicated => Spans::Whole,
            Placement::Experts(_) => Spans::Experts,
        };
        cx.earlier_scales(&format!("{}.{OF_FPROP}", self.name), to, of, self.stack())
    }

    /// Stores the weight's copies, which are created from the received rows of all ranks.
    fn take(&mut self, cx: &Cx<'_, B>, copies: Copies, whole: Whole<B>) -> Result<()> {
        match (copies, whole) {
            (Copies::AsItIs, Whole::Plain(whole)) => self.whole = Some(whole),
            (Copies::Products(to), Whole::Plain(whole)) => {
                self.shadow = Some(self.products(cx, &to, &whole)?);
            }
            (Copies::Products(_), Whole::Codes(w, wt)) => {
                self.shadow = Some(Shadow { w: Some(w), wt: wt.map(Turned::There) });
            }
            (Copies::AsItIs, Whole::Codes(..)) => {
                return Err(Error::Defect { place: "parameter", what: "its rows have come as codes" });
            }
        }
        Ok(())
    }

    /// Drops the copies. After this call, the memory of the copies is free until the next step, and no copy shares the master's buffer.
    pub fn release(&mut self) {
        (self.shadow, self.whole) = (None, None);
    }

    /// The copy of the weight that fprop reads.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if the copies do not exist yet ([`Param::for_products`] creates them).
    pub fn w(&self) -> Result<&Operand<B>> {
        self.shadow.as_ref().and_then(|s| s.w.as_ref()).ok_or_else(|| self.unprepared())
    }

    /// The copy of the weight that dgrad reads. If the copy must be decoded, the decoded tensor exists only as long as the returned value.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if the copies do not exist yet ([`Param::for_products`] creates them). Passes on errors of the backend.
    pub fn wt(&self, cx: &Cx<'_, B>) -> Result<Cow<'_, Operand<B>>> {
        let Some(Shadow { w, wt: Some(wt) }) = &self.shadow else { return Err(self.unprepared()) };
        match wt {
            Turned::There(wt) => Ok(Cow::Borrowed(wt)),
            Turned::Decoded(dtype) => {
                let w = w.as_ref().ok_or_else(|| self.unprepared())?;
                let wt = self.decoded(cx, w.block("dgrad")?)?;
                Ok(Cow::Owned(Operand::Plain(cx.cast(&wt, *dtype)?)))
            }
        }
    }

    /// The copies that exist: the weight for fprop unless that is the master itself, and its transpose for dgrad unless dgrad decodes it
    /// from the former.
    pub fn copies(&self) -> [Option<Operand<B>>; 2] {
        let Some(Shadow { w, wt }) = &self.shadow else { return [None, None] };
        let master = self.master.buffer_id();
        let w = w.as_ref().filter(|w| !matches!(w, Operand::Plain(w) if w.buffer_id() == master));
        let there = |wt: &Turned<B>| if let Turned::There(wt) = wt { Some(wt.clone()) } else { None };
        [w.cloned(), wt.as_ref().and_then(there)]
    }

    /// Takes copies that [`Param::copies`] gave earlier, under the same plan and for the same values of the weight. Without the first copy,
    /// fprop reads the master.
    pub fn take_copies(&mut self, plan: &WeightPlan, [w, wt]: [Option<Operand<B>>; 2]) {
        let w = w.unwrap_or_else(|| Operand::Plain(self.master.clone()));
        let decoded = plan.decoded.filter(|_| !plan.is_one).map(Turned::Decoded);
        self.shadow = Some(Shadow { w: Some(w), wt: wt.map(Turned::There).or(decoded) });
    }

    fn unprepared(&self) -> Error {
        Error::shape(
            "product",
            "weight",
            format!("{} without its copies", self.name),
            "prepare() once a step",
        )
    }

    /// Number of copies of each matrix's gradient that a step sums on this rank.
    fn shards(&self, cx: &Cx<'_, B>) -> usize {
        self.placement.shards(&cx.shards)
    }

    /// The ranks that hold the same values and sum their gradients.
    pub fn replicas<'a>(&self, mesh: Mesh<'a, B>) -> &'a dyn Comm<B> {
        match self.placement {
            Placement::Replicated => mesh.all,
            Placement::Experts(_) => mesh.dp,
        }
    }

    /// Allocates both moments in the backend's current arena, with zeros.
    pub fn place_moments(&mut self, b: &B, dtype: DType) -> Result<()> {
        let (rows, cols) = self.master.shape();
        let zeros = || Tensor::zeros(b, dtype, rows, cols);
        self.moments = Some(Moments { exp_avg: zeros()?, exp_avg_sq: zeros()? });
        Ok(())
    }
}
