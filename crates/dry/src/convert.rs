//! Formats, conversions, routing and the expert layer's fused kernels, in the order in which the real operations allocate.

use crate::Dry;
use crate::memory::Buf;
use nibble_choice::quantize::QuantizeDesc;
use nibble_choice::routing::{PlanChunks, RouteSums};
use nibble_choice::swiglu::{SwigluBackwardPath, SwigluPath};
use nibble_choice::transcode::whole_cols;
use nibble_core::formats::{BlockAxis, Codec, Format, ScaleLayout, ScaleRule};
use nibble_core::ops::*;
use nibble_core::{
    Backend, BlockScaled, DType, Data, Groups, Occupancy, Operand, PermuteMap, Result, Tensor,
};

impl Dry {
    pub(crate) fn plain(&self, dtype: DType, rows: usize, cols: usize) -> Result<Tensor<Self>> {
        Tensor::unwritten(self, dtype, rows, cols)
    }

    /// The three counts of a conversion.
    fn counts(&self) -> Result<Counts<Self>> {
        self.counters(3).map(Counts)
    }

    /// Planes as kernels write them: scales of columns lie where the backend's products read them best.
    fn planes(
        &self,
        stored: (Format, ScaleRule),
        axis: BlockAxis,
        sizes: (usize, usize, usize),
    ) -> Result<BlockScaled<Self>> {
        let layout = match axis {
            BlockAxis::Col if self.is_gpu() => ScaleLayout::MnMajor,
            _ => ScaleLayout::RowMajor,
        };
        BlockScaled::unwritten(self, stored, axis, sizes, layout)
    }

    /// A result in the form asked for. Column blocks reach over the end of rows that no group has.
    fn emitted(&self, emit: Emit, rows: usize, cols: usize, least_block: usize) -> Result<Emitted<Self>> {
        let (codec, planes) = match emit {
            Emit::Plain(dtype) => {
                let rows = Some(Operand::Plain(self.plain(dtype, rows, cols)?));
                return Ok(Emitted { rows, cols: None, counts: None, found: None });
            }
            Emit::Block { codec, planes } => (codec, planes),
        };
        let stored = stored(codec);
        let capacity = rows.next_multiple_of(stored.0.column_step().max(least_block));
        let row_plane = || self.planes(stored, BlockAxis::Row, (rows, cols, 1));
        let col_plane = || self.planes(stored, BlockAxis::Col, (capacity, cols, 1));
        let (row_plane, col_plane) = match planes {
            Planes::Rows => (Some(row_plane()?), None),
            Planes::Cols => (None, Some(col_plane()?)),
            Planes::Both | Planes::Tiles => (Some(row_plane()?), Some(col_plane()?)),
        };
        let [rows, cols] = [row_plane, col_plane].map(|plane| plane.map(Operand::Block));
        Ok(Emitted { rows, cols, counts: Some(self.counts()?), found: None })
    }

    /// The two planes of stacked weights.
    fn tiles(
        &self,
        stored: (Format, ScaleRule),
        (stack, n, k): (usize, usize, usize),
    ) -> Result<[BlockScaled<Self>; 2]> {
        let plane = |rows, cols| match stored.0.spec().tiles {
            true => self.planes(stored, BlockAxis::Tile, (stack * rows, cols, stack)),
            false => self.planes(stored, BlockAxis::Row, (stack * rows, cols, 1)),
        };
        Ok([plane(n, k)?, plane(k, n)?])
    }

    /// Rows of a matrix at other places, one each of `index`.
    fn gathered(&self, rows: &Operand<Self>, count: usize) -> Result<Operand<Self>> {
        Ok(match rows {
            Operand::Plain(x) => Operand::Plain(self.plain(x.dtype(), count, x.cols)?),
            Operand::Block(x) => {
                Operand::Block(self.planes((x.format, x.rule), BlockAxis::Row, (count, x.cols, 1))?)
            }
        })
    }

    /// The form asked for, from a plain matrix: what a GPU does where no kernel writes the form itself.
    fn emitted_from(
        &self,
        x: Tensor<Self>,
        emit: Emit,
        groups: Option<&Groups<Self>>,
    ) -> Result<Emitted<Self>> {
        match emit {
            Emit::Plain(_) => {
                Ok(Emitted { rows: Some(Operand::Plain(x)), cols: None, counts: None, found: None })
            }
            Emit::Block { codec, planes } => {
                self.quantize(Quantize { groups, ..Quantize::new(&x, codec, planes) })
            }
        }
    }

    /// A plane of h as the kernel of `swiglu` writes it beside `a`.
    fn rows_of_h(&self, h: &Tensor<Self>, codec: Option<Codec>) -> Result<Option<BlockScaled<Self>>> {
        codec.map(|codec| self.planes(stored(codec), BlockAxis::Row, (h.rows, h.cols, 1))).transpose()
    }

    /// h quantized by itself, as the backward pass will want it.
    fn saved_h(&self, op: &Swiglu<'_, Self>) -> Result<Option<BlockScaled<Self>>> {
        let save = |codec| {
            let quantize = Quantize { groups: op.groups, ..Quantize::new(op.h, codec, Planes::Rows) };
            Ok(self.quantize(quantize)?.take_rows("swiglu")?.block("swiglu")?.clone())
        };
        op.save_h.map(save).transpose()
    }

    fn swiglu_on_gpu(&self, op: &Swiglu<'_, Self>) -> Result<SwigluOut<Self>> {
        let (rows, f) = (op.h.rows, op.h.cols / 2);
        match SwigluPath::of(op) {
            SwigluPath::Rows { save_h, .. } => {
                let h = self.rows_of_h(op.h, save_h)?;
                Ok(SwigluOut { a: self.emitted(op.a, rows, f, 1)?, h })
            }
            SwigluPath::RowsCols { .. } => {
                let a = self.emitted(op.a, rows, f, 1)?;
                Ok(SwigluOut { a, h: self.saved_h(op)? })
            }
            SwigluPath::Plain(dtype) => {
                let a = self.emitted_from(self.plain(dtype, rows, f)?, op.a, op.groups)?;
                Ok(SwigluOut { a, h: self.saved_h(op)? })
            }
        }
    }

    /// On a GPU: h and its gradient, and `a` in some form whether or not it is wanted.
    fn swiglu_backward_on_gpu(&self, op: &SwigluBackward<'_, Self>) -> Result<SwigluGrads<Self>> {
        let (rows, f) = op.da.shape();
        match SwigluBackwardPath::of(op) {
            SwigluBackwardPath::Fused { codec, parts, .. } => {
                let dh = self.emitted(op.dh, rows, 2 * f, 1)?;
                let a = self.emitted(Emit::Block { codec, planes: Planes::Cols }, rows, f, 1)?;
                let _parts: Buf<f32> = self.buf(parts)?;
                Ok(SwigluGrads { dh, a: op.a.map(|_| a), dweight: self.buf(rows)? })
            }
            SwigluBackwardPath::Plain { decoded, dh, a } => {
                let _decoded: Option<Buf<f32>> = decoded.map(|len| self.buf(len)).transpose()?;
                let (dh, a) = (self.plain(dh, rows, 2 * f)?, self.plain(a, rows, f)?);
                let dweight = self.buf(rows)?;
                let dh = self.emitted_from(dh, op.dh, op.groups)?;
                let a = op.a.map(|to| self.emitted_from(a, to, op.groups)).transpose()?;
                Ok(SwigluGrads { dh, a, dweight })
            }
        }
    }
}

/// Rows that a column's length is rounded up to besides the format's own.
fn least_block(op: &Quantize<'_, Dry>) -> usize {
    match op.hadamard {
        Some(transform) if op.planes == Planes::Cols => transform.len,
        _ => 1,
    }
}

fn stored(codec: Codec) -> (Format, ScaleRule) {
    (codec.format(), codec.rule())
}

impl Dry {
    pub(crate) fn quantize(&self, op: Quantize<'_, Self>) -> Result<Emitted<Self>> {
        let found = |spans| -> Result<_> { Ok(Found { amax: self.buf(spans)?, counts: self.counters(2)? }) };
        let found = op.delayed.map(|_| found(op.spans())).transpose()?;
        let emitted = match self.is_gpu() {
            true => self.quantized_on_gpu(&op)?,
            false => self.quantized_on_host(&op)?,
        };
        Ok(Emitted { found, ..emitted })
    }

    /// The planes and their counts.
    fn quantized_planes(&self, op: &Quantize<'_, Self>) -> Result<Emitted<Self>> {
        let (rows, cols) = op.x.shape();
        if op.planes != Planes::Tiles {
            return self.emitted(
                Emit::Block { codec: op.codec, planes: op.planes },
                rows,
                cols,
                least_block(op),
            );
        }
        let [upright, turned] = self.tiles(stored(op.codec), (op.stack, rows / op.stack.max(1), cols))?;
        let [rows, cols] = [upright, turned].map(|plane| Some(Operand::Block(plane)));
        Ok(Emitted { rows, cols, counts: Some(self.counts()?), found: None })
    }

    fn quantized_on_gpu(&self, op: &Quantize<'_, Self>) -> Result<Emitted<Self>> {
        let made = self.quantized_planes(op)?;
        let _held = self.hold(QuantizeDesc::of(op).temporaries())?;
        Ok(made)
    }

    /// A host makes a transform apart.
    fn quantized_on_host(&self, op: &Quantize<'_, Self>) -> Result<Emitted<Self>> {
        let (rows, cols) = op.x.shape();
        let rows = match op.planes {
            Planes::Cols => rows.next_multiple_of(least_block(op).max(op.codec.format().column_step())),
            _ => rows,
        };
        let _transformed = op.hadamard.map(|_| self.plain(DType::F32, rows, cols)).transpose()?;
        self.quantized_planes(op)
    }

    pub(crate) fn dequantize(&self, op: Dequantize<'_, Self>) -> Result<Tensor<Self>> {
        self.plain(op.dtype, op.x.rows, op.x.cols)
    }

    pub(crate) fn transcode(&self, op: Transcode<'_, Self>) -> Result<Transcoded<Self>> {
        let x = op.x;
        if self.is_gpu()
            && let Some(whole) = whole_cols(x.format, op.to, x.cols)
        {
            return self.transcode_short_blocks(op, whole);
        }
        // Only MXFP4 gets scales chosen anew.
        let rule = if op.to == Format::Mxfp4 { op.rule } else { x.rule };
        if op.axis == BlockAxis::Tile {
            let [out, transposed] =
                self.tiles((op.to, x.rule), (x.stack, x.rows / x.stack.max(1), x.cols))?;
            return Ok(Transcoded { out, transposed: Some(transposed), counts: self.counts()? });
        }
        let rows = match op.axis {
            BlockAxis::Col => x.rows.next_multiple_of(op.to.spec().block),
            BlockAxis::Row | BlockAxis::Tile => x.rows,
        };
        let mut out = self.planes((op.to, rule), op.axis, (rows, x.cols, 1))?;
        if op.axis == BlockAxis::Col {
            out.shared_cols = x.format.spec().block;
        }
        Ok(Transcoded { out, transposed: None, counts: self.counts()? })
    }

    /// On a GPU: of rows extended to whole blocks, and cut.
    fn transcode_short_blocks(&self, op: Transcode<'_, Self>, whole: usize) -> Result<Transcoded<Self>> {
        let x = op.x;
        let codes = self.buf(BlockScaled::<Self>::code_bytes(x.format, x.axis, x.rows, whole))?;
        let extended = BlockScaled { cols: whole, codes, ..x.clone() };
        let Transcoded { out, transposed, counts } = self.transcode(Transcode { x: &extended, ..op })?;
        let codes = |q: &BlockScaled<Self>, rows, cols| {
            self.buf(BlockScaled::<Self>::code_bytes(q.format, q.axis, rows, cols))
        };
        let mut cut = BlockScaled { cols: x.cols, codes: codes(&out, out.rows, x.cols)?, ..out.clone() };
        if op.axis == BlockAxis::Col {
            cut.scales = self.buf(cut.scale_bytes())?;
        }
        let turned = |q: BlockScaled<Self>| {
            let rows = q.stack * x.cols;
            Ok::<_, nibble_core::Error>(BlockScaled { rows, codes: codes(&q, rows, q.cols)?, ..q })
        };
        Ok(Transcoded { out: cut, transposed: transposed.map(turned).transpose()?, counts })
    }

    pub(crate) fn cast(&self, op: Cast<'_, Self>) -> Result<Tensor<Self>> {
        self.plain(op.dtype, op.x.rows, op.x.cols)
    }

    pub(crate) fn transpose(&self, op: Transpose<'_, Self>) -> Result<Tensor<Self>> {
        self.plain(op.x.dtype(), op.stack * op.x.cols, op.x.rows / op.stack.max(1))
    }

    pub(crate) fn add(&self, op: Add<'_, Self>) -> Result<Tensor<Self>> {
        self.plain(op.a.dtype(), op.a.rows, op.a.cols)
    }

    pub(crate) fn sum_shards(&self, op: SumShards<'_, Self>) -> Result<()> {
        self.make_tensor_mut(op.into)
    }

    pub(crate) fn route(&self, op: Route<'_, Self>) -> Result<Routing<Self>> {
        let (tokens, experts) = op.logits.shape();
        let (probs, log_sum_exp) = (self.plain(DType::F32, tokens, experts)?, self.buf(tokens)?);
        let (expert, weight) = (self.buf(tokens * op.top_k)?, self.buf(tokens * op.top_k)?);
        let (load, losses) = (self.buf(op.shards * experts)?, self.buf(2 * op.shards)?);
        self.while_on_gpu(RouteSums::new::<Self>(tokens, op.shards, experts).temporaries())?;
        Ok(Routing { expert, weight, probs, log_sum_exp, load, losses })
    }

    pub(crate) fn route_backward(&self, op: RouteBackward<'_, Self>) -> Result<Tensor<Self>> {
        let (tokens, experts) = op.routing.probs.shape();
        self.plain(DType::F32, tokens, experts)
    }

    pub(crate) fn plan_permute(&self, op: PlanPermute<'_, Self>) -> Result<PermuteMap<Self>> {
        let _counts = self.hold_on_gpu([PlanChunks::new(Self::len(op.expert), op.num_groups).temporary()])?;
        // As long as each other: their sum is what is known.
        let lengths = |g| op.num_slots / op.num_groups + usize::from(g < op.num_slots % op.num_groups);
        let lengths: Vec<i32> = (0..op.num_groups).map(|g| lengths(g) as i32).collect();
        let (start, len) = (self.buf(op.num_groups + 1)?, self.buf_of(&lengths)?);
        let (row_id, source_row, row_slot) =
            (self.buf(op.capacity)?, self.buf(op.capacity)?, self.buf(op.capacity)?);
        let slot_row = self.buf(op.num_slots)?;
        let &PlanPermute { num_groups, align, capacity, num_slots, .. } = &op;
        let groups = Groups { start, len, row_id, num_groups, align, capacity, rows_each: None };
        let occupancy = Occupancy { found: self.buf(2)?, num_slots, capacity };
        Ok(PermuteMap { groups, source_row, row_slot, num_slots, slot_row, occupancy })
    }

    pub(crate) fn permute(&self, op: Permute<'_, Self>) -> Result<Operand<Self>> {
        self.gathered(op.rows, op.map.groups.capacity)
    }

    pub(crate) fn unpermute(&self, op: Unpermute<'_, Self>) -> Result<Operand<Self>> {
        self.gathered(op.rows, op.map.num_slots)
    }

    pub(crate) fn gather_scalars(&self, op: GatherScalars<'_, Self>) -> Result<Buf<f32>> {
        self.buf(Self::len(op.index))
    }

    pub(crate) fn tile_scales(&self, op: TileScales<'_, Self>) -> Result<Buf<u8>> {
        self.buf(op.matrix.tiled_len(Self::len(op.starts).saturating_sub(1)))
    }

    pub(crate) fn untile_scales(&self, op: UntileScales<'_, Self>) -> Result<Buf<u8>> {
        self.buf(op.matrix.rows * op.matrix.cols)
    }

    pub(crate) fn combine_slots(&self, op: CombineSlots<'_, Self>) -> Result<Tensor<Self>> {
        self.plain(op.rows.dtype(), op.tokens(), op.rows.cols)
    }

    pub(crate) fn pack_rows(&self, op: PackRows<'_, Self>) -> Result<Buf<u8>> {
        self.buf(Self::len(op.index) * op.rows.row_kind().row_bytes())
    }

    pub(crate) fn unpack_rows(&self, op: UnpackRows<'_, Self>) -> Result<Operand<Self>> {
        let (kind, rows) = (op.kind, Self::len(op.bytes) / op.kind.row_bytes());
        match kind.format {
            Format::F32 => Ok(Operand::Plain(self.plain(DType::F32, rows, kind.cols)?)),
            Format::Bf16 => Ok(Operand::Plain(self.plain(DType::Bf16, rows, kind.cols)?)),
            format => {
                Ok(Operand::Block(self.planes((format, kind.rule), BlockAxis::Row, (rows, kind.cols, 1))?))
            }
        }
    }

    pub(crate) fn assign_parts(&self, op: AssignParts<'_, Self>) -> Result<Buf<i32>> {
        self.buf(Self::len(op.expert))
    }

    pub(crate) fn join_groups(&self, op: JoinGroups<'_, Self>) -> Result<Groups<Self>> {
        let num_groups = op.groups.num_groups / op.parts;
        let (start, len) = (self.buf(num_groups + 1)?, self.buf(num_groups)?);
        Ok(Groups { start, len, num_groups, rows_each: None, ..op.groups.clone() })
    }

    pub(crate) fn assign_ranks(&self, op: AssignRanks<'_, Self>) -> Result<SlotRanks<Self>> {
        let slots = Self::len(op.expert);
        Ok(SlotRanks { rank: self.buf(slots)?, first: self.buf(slots)?, counts: self.buf(2 * op.world)? })
    }

    pub(crate) fn pack_slots(&self, op: PackSlots<'_, Self>) -> Result<Buf<i32>> {
        self.buf(Self::len(op.slot) * record_words(op.top_k))
    }

    pub(crate) fn unpack_slots(&self, op: UnpackSlots<'_, Self>) -> Result<ReceivedSlots<Self>> {
        let (n, slots) = (op.records(), op.records() * op.top_k);
        Ok(ReceivedSlots { token_id: self.buf(n)?, expert: self.buf(slots)?, weight: self.buf(slots)? })
    }

    pub(crate) fn swiglu(&self, op: Swiglu<'_, Self>) -> Result<SwigluOut<Self>> {
        if self.is_gpu() {
            return self.swiglu_on_gpu(&op);
        }
        let a = self.emitted(op.a, op.h.rows, op.h.cols / 2, 1)?;
        Ok(SwigluOut { a, h: self.rows_of_h(op.h, op.save_h)? })
    }

    pub(crate) fn swiglu_backward(&self, op: SwigluBackward<'_, Self>) -> Result<SwigluGrads<Self>> {
        if self.is_gpu() {
            return self.swiglu_backward_on_gpu(&op);
        }
        let (rows, f) = op.da.shape();
        let dh = self.emitted(op.dh, rows, 2 * f, 1)?;
        let a = op.a.map(|a| self.emitted(a, rows, f, 1)).transpose()?;
        Ok(SwigluGrads { dh, a, dweight: self.buf(rows)? })
    }

    pub(crate) fn init_normal(&self, op: InitNormal) -> Result<Tensor<Self>> {
        self.plain(DType::F32, op.rows, op.cols)
    }
}

impl Dry {
    /// Room for a copy, where another handle shares what is to be written.
    pub(crate) fn make_tensor_mut(&self, x: &mut Tensor<Self>) -> Result<()> {
        match &mut x.data {
            Data::F32(values) => self.make_mut(values),
            Data::Bf16(values) => self.make_mut(values),
        }
    }
}
