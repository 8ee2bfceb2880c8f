//! Executes the conversions of a layer's plan: a tensor is converted to the representations that GEMMs, the backward pass or other ranks
//! read. The counts of each conversion (exact, rounded and non-finite blocks) are collected for the step's record.
//!
//! `Cx::convert` converts an existing tensor. `Cx::compute` tells a fused kernel what to write, runs the kernel, and converts the kernel's
//! output.

use crate::cx::Cx;
use crate::record::{ChangeKind, CountSite, FoundCells};
use crate::shards::Spans;
use nibble_core::formats::{BlockAxis, Purpose, Stream, fnv1a32};
use nibble_core::ops::{
    Cast, Counts, Delayed, Dequantize, Emit, Emitted, Found, Hadamard, HeadLossChunk, HeadOperand,
    MeasureQuantization, Numbers, PackedRows, Planes, Quantize, QuantizePack, Random, Transcode,
};
use nibble_core::recipe::{Computed, Conversion, Pair, Precision, Route, Transform};
use nibble_core::{BlockScaled, DType, Error, Groups, Kernels, Operand, Result, RowKind, Tensor};

/// The names of a tensor that is converted (for example quantized) for a GEMM. The names of a tensor identify its quantization counts, and
/// seed the random bits for its stochastic rounding.
#[derive(Debug, Clone, Copy)]
pub struct TensorName<'a> {
    /// The layer's name.
    pub layer: &'a str,
    /// The tensor's name within the layer.
    pub tensor: &'static str,
    /// The name of the linear layer whose GEMM reads the tensor. The name of the linear layer seeds the random signs of a Hadamard
    /// transform, so both operands of wgrad get the same signs. Linear layers that read the same input share one name.
    pub linear: &'a str,
}

/// The names of a layer, from which the names of the layer's converted tensors are built.
#[derive(Debug, Clone, Copy)]
pub struct LayerName<'a> {
    /// See [`TensorName::layer`].
    pub layer: &'a str,
    /// See [`TensorName::linear`].
    pub linear: &'a str,
}

impl<'a> LayerName<'a> {
    /// Uses `layer` for both names.
    pub const fn new(layer: &'a str) -> Self {
        Self { layer, linear: layer }
    }

    /// The names of the layer's tensor `tensor`.
    pub const fn of(self, tensor: &'static str) -> TensorName<'a> {
        let Self { layer, linear } = self;
        TensorName { layer, tensor, linear }
    }
}

/// The delayed scales of a tensor's row ranges (spans), and the table cells that receive the largest magnitudes that the quantization
/// finds.
#[derive(Debug)]
pub struct EarlierScales<'a, B: Kernels> {
    /// The delayed scales.
    pub delayed: Delayed<'a, B>,
    /// The tensor's cells in the table of largest magnitudes of this step.
    pub cells: FoundCells,
}

/// Values that are quantized again, in order to measure the quantization.
#[derive(Debug)]
pub(crate) struct Again<'s, B: Kernels> {
    /// The values.
    pub x: Tensor<B>,
    /// Their place among the rows of a micro-batch.
    pub place: HeadLossChunk,
    /// The shards of the rows, if the rows have ids.
    pub groups: Option<&'s Groups<B>>,
}

impl<B: Kernels> Cx<'_, B> {
    /// For each representation that only GEMMs read: the numbers ([`Numbers`]) that these GEMMs multiply. The numbers are `None` in a step
    /// that measures quantization, because the measurement reads codes too.
    fn numbers<To>(&self, conversion: &Conversion<To>) -> [Option<Numbers>; 2] {
        if self.measures.is_some() { [None; 2] } else { conversion.numbers() }
    }

    /// Converts a tensor to the two representations that the plan `conversion` requires. If both representations are equal, they share one
    /// buffer.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if the representation of `x` is not the one that the plan starts from, and errors of the backend.
    pub fn convert(
        &self,
        name: LayerName<'_>,
        x: &Operand<B>,
        conversion: &Conversion,
        groups: Option<&Groups<B>>,
    ) -> Result<(Operand<B>, Operand<B>)> {
        let at = name.of(conversion.tensor.name);
        self.follow_both(at, x, &conversion.to, self.numbers(conversion), groups)
    }

    fn follow_both(
        &self,
        at: TensorName<'_>,
        x: &Operand<B>,
        pair: &Pair,
        only_for: [Option<Numbers>; 2],
        groups: Option<&Groups<B>>,
    ) -> Result<(Operand<B>, Operand<B>)> {
        match pair {
            Pair::One(route) => {
                let one = self.follow(at, x, route, of_both(only_for), groups)?;
                Ok((one.clone(), one))
            }
            Pair::OneRead(to) => {
                let (x, only_for) = (x.plain("route")?, of_both(only_for));
                let both = self.quantize(at, x, to, Planes::Both, only_for, groups)?;
                Ok((both.take_rows("route")?, both.take_cols("route")?))
            }
            Pair::Two(first, second) => Ok((
                self.follow(at, x, first, only_for[0], groups)?,
                self.follow(at, x, second, only_for[1], groups)?,
            )),
            Pair::Again { through, to } => {
                let plain = Dequantize { x: x.block("route")?, dtype: *through }.run(self.b)?;
                self.follow_both(at, &Operand::Plain(plain), &Pair::requantized(to), only_for, groups)
            }
        }
    }

    /// Converts a tensor along a route. See [`Quantize::only_for`] for `only_for`.
    fn follow(
        &self,
        at: TensorName<'_>,
        x: &Operand<B>,
        route: &Route,
        only_for: Option<Numbers>,
        groups: Option<&Groups<B>>,
    ) -> Result<Operand<B>> {
        match (route, x) {
            (Route::Same, x) => Ok(x.clone()),
            (Route::Plain(dtype), Operand::Plain(x)) => self.cast(x, *dtype).map(Operand::Plain),
            (Route::Plain(dtype), Operand::Block(x)) => {
                Dequantize { x, dtype: *dtype }.run(self.b).map(Operand::Plain)
            }
            (Route::Quantize(to), Operand::Plain(x)) => self.quantized(at, x, to, only_for, groups),
            (Route::Transcode(to), Operand::Block(x)) => {
                self.transcode(at, x, to, groups).map(Operand::Block)
            }
            (Route::Requantize { through, to }, Operand::Block(x)) => {
                let plain = Dequantize { x, dtype: *through }.run(self.b)?;
                self.quantized(at, &plain, to, only_for, groups)
            }
            (Route::Quantize(_), _) => Err(Error::shape("route", at.tensor, x.format(), "plain elements")),
            (Route::Transcode(_) | Route::Requantize { .. }, _) => {
                Err(Error::shape("route", at.tensor, x.format(), "blocks"))
            }
        }
    }

    /// Runs a kernel that writes a tensor in the form that the plan requires, and converts the tensor to the plan's two representations.
    /// Also saves the kernel's quantization counts. The closure `kernel` receives the form in which to write the tensor, and returns the
    /// tensor with the kernel's other results. A step that measures quantization runs `kernel` twice, because the measurement also needs
    /// the tensor before quantization.
    ///
    /// # Errors
    /// Returns the errors of [`Precision::codec`], [`Cx::convert`] and `kernel`.
    pub fn compute<R>(
        &self,
        name: LayerName<'_>,
        conversion: &Conversion<Computed>,
        groups: Option<&Groups<B>>,
        kernel: impl Fn(Emit) -> Result<(Emitted<B>, R)>,
    ) -> Result<(Operand<B>, Operand<B>, R)> {
        let emit = self.emit(conversion)?;
        let (written, others) = kernel(emit)?;
        self.keep_counts(name.layer, conversion.tensor.name, written.counts.as_ref());
        if matches!(emit, Emit::Block { .. }) && self.measures_last() {
            // What the kernel rounds exists nowhere else.
            let computed = kernel(Emit::Plain(DType::F32))?.0.take_rows("measure_quantization")?;
            self.measure(computed.plain("measure_quantization")?, [&written.rows, &written.cols], groups)?;
        }
        let (first, second) = self.convert_computed(name, &written, conversion, groups)?;
        Ok((first, second, others))
    }

    /// The form in which a fused kernel should write a tensor that it computes: plain or quantized.
    ///
    /// # Errors
    /// The errors of [`Precision::codec`].
    pub fn emit(&self, conversion: &Conversion<Computed>) -> Result<Emit> {
        Ok(match &conversion.to {
            Computed::Plain { dtype, .. } => Emit::Plain(*dtype),
            Computed::Fused { to, planes } => match to.dtype() {
                Some(dtype) => Emit::Plain(dtype),
                None => {
                    let only_for = of_both(self.numbers(conversion));
                    Emit::Block { codec: to.codec()?, planes: *planes, only_for }
                }
            },
        })
    }

    /// Converts a tensor that a fused kernel wrote in the form of [`Cx::emit`] to the two representations of a plan.
    ///
    /// # Errors
    /// The errors of [`Cx::convert`].
    pub fn convert_computed(
        &self,
        name: LayerName<'_>,
        made: &Emitted<B>,
        conversion: &Conversion<Computed>,
        groups: Option<&Groups<B>>,
    ) -> Result<(Operand<B>, Operand<B>)> {
        let at = name.of(conversion.tensor.name);
        match &conversion.to {
            Computed::Plain { then, .. } => {
                self.follow_both(at, &made.take_rows(at.tensor)?, then, self.numbers(conversion), groups)
            }
            Computed::Fused { planes: Planes::Both, .. } => {
                Ok((made.take_rows(at.tensor)?, made.take_cols(at.tensor)?))
            }
            Computed::Fused { planes, .. } => {
                let one = match planes {
                    Planes::Cols => made.take_cols(at.tensor)?,
                    _ => made.take_rows(at.tensor)?,
                };
                Ok((one.clone(), one))
            }
        }
    }

    /// Converts a plain tensor to the precision `to`: casts the tensor, or quantizes it along the precision's block axis.
    pub fn form(
        &self,
        at: TensorName<'_>,
        x: &Tensor<B>,
        to: &Precision,
        groups: Option<&Groups<B>>,
    ) -> Result<Operand<B>> {
        self.follow(at, &Operand::Plain(x.clone()), &Route::of_plain(to), None, groups)
    }

    fn quantized(
        &self,
        at: TensorName<'_>,
        x: &Tensor<B>,
        to: &Precision,
        only_for: Option<Numbers>,
        groups: Option<&Groups<B>>,
    ) -> Result<Operand<B>> {
        match to.axis {
            BlockAxis::Col => self.quantize(at, x, to, Planes::Cols, only_for, groups)?.take_cols("route"),
            _ => self.quantize(at, x, to, Planes::Rows, only_for, groups)?.take_rows("route"),
        }
    }

    /// Quantizes a plain tensor in a separate kernel. See [`Quantize::only_for`] for `only_for`.
    pub fn quantize(
        &self,
        at: TensorName<'_>,
        x: &Tensor<B>,
        to: &Precision,
        planes: Planes,
        only_for: Option<Numbers>,
        groups: Option<&Groups<B>>,
    ) -> Result<Emitted<B>> {
        let (op, cells) = self.quantization(at, x, to, planes, groups)?;
        let transform = op.hadamard;
        let out = Quantize { only_for, ..op }.run(self.b)?;
        self.keep_quantized(at.layer, at.tensor, &out, cells);
        self.measure_transformed(x, [&out.rows, &out.cols], groups, transform.as_ref())?;
        Ok(out)
    }

    /// Quantizes the rows of a plain tensor directly into the messages that ranks exchange. `index` contains the row of `x` for each
    /// message. Each row has `top_k` slots. For each slot, `place` contains the index of the message that the row goes into; a negative
    /// value means no message.
    pub fn quantize_pack(
        &self,
        at: TensorName<'_>,
        x: &Tensor<B>,
        to: &Precision,
        groups: Option<&Groups<B>>,
        (index, place, top_k): (&B::Buf<i32>, &B::Buf<i32>, usize),
    ) -> Result<(B::Buf<u8>, RowKind)> {
        let quantization = || self.quantization(at, x, to, Planes::Rows, groups);
        let (quantize, cells) = quantization()?;
        let op = QuantizePack { quantize, index, place, top_k };
        let kind = op.kind();
        let PackedRows { bytes, counts, found } = op.run(self.b)?;
        let made = Emitted { rows: None, cols: None, counts: Some(counts), found };
        self.keep_quantized(at.layer, at.tensor, &made, cells);
        if self.measures_last() {
            let again = quantization()?.0.run(self.b)?;
            self.measure(x, [&again.rows, &None], groups)?;
        }
        Ok((bytes, kind))
    }

    /// The op that quantizes a plain tensor in a separate kernel, and the cells that receive the magnitudes found by the op.
    fn quantization<'s>(
        &'s self,
        at: TensorName<'_>,
        x: &'s Tensor<B>,
        to: &Precision,
        planes: Planes,
        groups: Option<&'s Groups<B>>,
    ) -> Result<(Quantize<'s, B>, Option<FoundCells>)> {
        let TensorName { layer, tensor, linear } = at;
        let random = self.random(layer, tensor, to);
        let hadamard = to.rht.map(|transform| self.hadamard(&transform, fnv1a32(linear)));
        let op = Quantize { groups, random, hadamard, ..Quantize::new(x, to.codec()?, planes) };
        // The host knows the number of rows of shards, but not the number of rows of experts.
        let of = match groups.is_some_and(|groups| groups.rows_each.is_none()) {
            true => Spans::ExpertParts,
            false => Spans::Shards,
        };
        let scales = self.earlier_scales(&format!("{layer}.{tensor}"), to, of, op.spans())?;
        let delayed = scales.as_ref().map(|scales| scales.delayed);
        Ok((Quantize { delayed, ..op }, scales.map(|scales| scales.cells)))
    }

    /// Whether this step measures the layer of the counts that were kept last.
    fn measures_last(&self) -> bool {
        self.measures.is_some_and(|sample| self.counted.borrow().is_measured(sample))
    }

    /// In a step that measures their layer: counts what the last kept quantization did to values that an operation quantized on the way,
    /// like `operand`. `x` makes the values, or a part of them, with the part's place among all rows.
    ///
    /// # Errors
    /// From the backend.
    pub(crate) fn measure_again<'s>(
        &'s self,
        x: impl FnOnce() -> Result<Vec<Again<'s, B>>>,
        operand: &HeadOperand<'_, B>,
    ) -> Result<()> {
        if operand.codecs() == [None; 2] || !self.measures_last() {
            return Ok(());
        }
        let mut counts = Vec::new();
        for Again { x, place, groups } in x()? {
            for op in operand.quantizations(&x, &place, groups) {
                let (groups, transform, made) = (op.groups, op.hadamard, op.run(self.b)?);
                for plane in [&made.rows, &made.cols].into_iter().flatten() {
                    counts.extend(self.measured(&x, plane, groups, transform.as_ref())?);
                }
            }
        }
        self.counted.borrow_mut().keep_measured(counts);
        Ok(())
    }

    /// In a step that measures their layer: counts what the last kept quantization did to the values, for rows and for columns.
    ///
    /// # Errors
    /// The errors of the backend.
    pub(crate) fn measure(
        &self,
        x: &Tensor<B>,
        planes: [&Option<Operand<B>>; 2],
        groups: Option<&Groups<B>>,
    ) -> Result<()> {
        self.measure_transformed(x, planes, groups, None)
    }

    /// [`Cx::measure`] of a tensor that is transformed before it is quantized. The counts of a training step leave such tensors out.
    pub(crate) fn measure_transformed(
        &self,
        x: &Tensor<B>,
        planes: [&Option<Operand<B>>; 2],
        groups: Option<&Groups<B>>,
        transform: Option<&Hadamard<'_, B>>,
    ) -> Result<()> {
        if !self.measures_last() {
            return Ok(());
        }
        let mut counts = Vec::new();
        for plane in planes.into_iter().flatten() {
            counts.extend(self.measured(x, plane, groups, transform)?);
        }
        self.counted.borrow_mut().keep_measured(counts);
        Ok(())
    }

    /// Compares the quantized tensor `plane` with `x`. Returns counts, or keeps the error if an analysis measures errors.
    fn measured(
        &self,
        x: &Tensor<B>,
        plane: &Operand<B>,
        groups: Option<&Groups<B>>,
        transform: Option<&Hadamard<'_, B>>,
    ) -> Result<Option<B::Buf<u64>>> {
        let quantized = plane.block("measure_quantization")?;
        match (&self.errors, transform) {
            (Some(_), _) => self.keep_error(x, quantized, groups, transform).map(|()| None),
            (None, Some(_)) => Ok(None),
            (None, None) => MeasureQuantization { x, quantized, groups }.run(self.b).map(Some),
        }
    }

    /// Converts a tensor quantized in row blocks to another block format or block axis.
    pub fn transcode(
        &self,
        at: TensorName<'_>,
        x: &BlockScaled<B>,
        to: &Precision,
        groups: Option<&Groups<B>>,
    ) -> Result<BlockScaled<B>> {
        let done = Transcode { x, to: to.format, axis: to.axis, rule: to.scale, groups }.run(self.b)?;
        let conversion = ChangeKind::Transcode { from: x.format, axis: to.axis };
        let site = CountSite { layer: at.layer.to_owned(), tensor: at.tensor, conversion };
        self.keep(site, Some(&done.counts), None);
        Ok(done.out)
    }

    /// Casts a plain tensor to another type. Returns `x` itself if `x` already has the type `dtype`.
    pub fn cast(&self, x: &Tensor<B>, dtype: DType) -> Result<Tensor<B>> {
        if x.dtype() == dtype { Ok(x.clone()) } else { Cast { x, dtype }.run(self.b) }
    }

    /// The random bits for stochastic rounding of a tensor; `None` if the precision rounds neither the tensor's values nor its scales
    /// stochastically. In training, the random bits depend on the step number that the device's clock counts.
    pub fn random(&self, layer: &str, tensor: &str, to: &Precision) -> Option<Random<'_, B>> {
        to.draws().then(|| self.bits(layer, tensor))
    }

    /// The random bits of a tensor. See [`Cx::random`].
    pub(crate) fn bits(&self, layer: &str, tensor: &str) -> Random<'_, B> {
        let site = fnv1a32(&format!("{layer}.{tensor}"));
        let step = if self.clock.is_some() { 0 } else { self.step as u32 };
        let stream = Stream::new(self.seed, Purpose::Rounding, site, step);
        Random { step: self.clock.as_ref(), ..stream.into() }
    }

    /// A Hadamard transform with the random signs of one linear layer. `linear` is the hash of the linear layer's name. In training, the
    /// signs depend on the step number that the device's clock counts.
    pub fn hadamard(&self, transform: &Transform, linear: u32) -> Hadamard<'_, B> {
        let step = if self.clock.is_some() { 0 } else { self.step as u32 };
        transform.hadamard(self.seed, linear, step, self.clock.as_ref())
    }

    /// The delayed scales of a tensor: one scale for each of the tensor's row ranges (spans). Returns `None` without delayed scaling, and
    /// in a pass that no backward pass follows. In inference, the quantization computes its scales from the tensor itself, and no amax
    /// history changes.
    pub fn earlier_scales(
        &self,
        name: &str,
        to: &Precision,
        of: Spans,
        spans: usize,
    ) -> Result<Option<EarlierScales<'_, B>>> {
        match (&self.delayed, to.delayed) {
            (Some(records), Some(scaling)) if self.training => {
                let (delayed, first) = records.of(name, scaling, spans)?;
                // If several ranks have the same values, only the values of the first rank count.
                let is_counted = match of {
                    Spans::Whole => self.mesh.all.rank() == 0,
                    Spans::Experts => self.mesh.dp.rank() == 0,
                    Spans::Shards | Spans::ExpertParts => true,
                };
                Ok(Some(EarlierScales { delayed, cells: FoundCells { first, is_counted } }))
            }
            _ => Ok(None),
        }
    }

    /// Saves the quantization counts of a kernel that quantizes its own result. If no backward pass follows, no counts are saved.
    pub fn keep_counts(&self, layer: &str, tensor: &'static str, counts: Option<&Counts<B>>) {
        self.keep(
            CountSite { layer: layer.to_owned(), tensor, conversion: ChangeKind::Quantize },
            counts,
            None,
        );
    }

    /// Saves the counts of a quantization. Under delayed scaling, also saves the largest magnitudes that the quantization found.
    pub fn keep_quantized(
        &self,
        layer: &str,
        tensor: &'static str,
        made: &Emitted<B>,
        cells: Option<FoundCells>,
    ) {
        let site = CountSite { layer: layer.to_owned(), tensor, conversion: ChangeKind::Quantize };
        let found = cells.and_then(|cells| Some((cells, made.found.clone()?)));
        self.keep(site, made.counts.as_ref(), found);
    }

    fn keep(&self, site: CountSite, counts: Option<&Counts<B>>, found: Option<(FoundCells, Found<B>)>) {
        if let (true, Some(counts)) = (self.training, counts) {
            self.counted.borrow_mut().keep(site, counts.clone(), found);
        }
    }

    /// Runs `work`, which recomputes results of the forward pass in the backward pass. The quantization counts of `work` are dropped.
    pub fn again<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let waiting = self.counted.borrow().waiting();
        let done = work();
        self.counted.borrow_mut().truncate(waiting);
        done
    }

    /// Runs `work` for one of `rows` equal rows, and multiplies the quantization counts of `work` by `rows`.
    pub fn counted_for<R>(&self, rows: usize, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let waiting = self.counted.borrow().waiting();
        let done = work();
        self.counted.borrow_mut().repeat(waiting, rows);
        done
    }
}

/// The numbers that both readers of a tensor multiply; `None` if the readers multiply different numbers.
fn of_both([first, second]: [Option<Numbers>; 2]) -> Option<Numbers> {
    first.filter(|_| first == second)
}
