//! Formats, conversions, routing and the expert layer's fused kernels, in the order in which the real operations allocate.

use crate::Dry;
use crate::memory::Buf;
use nibble_choice::swiglu::{SwigluBackwardPath, SwigluPath};
use nibble_core::formats::WHOLE_LINE;
use nibble_core::formats::{BlockAxis, Codec, Format, Rounding, ScaleKind, ScaleLayout, ScaleRule};
use nibble_core::ops::*;
use nibble_core::{
    Backend, BlockScaled, DType, Data, Groups, Occupancy, Operand, PermuteMap, Result, Tensor,
};

/// Rows and columns of a tile of the GPU's fused kernels.
const TILE: usize = 128;
/// Values of a block of MXFP4, of which a GPU's kernels take whole ones.
const MXFP4_BLOCK: usize = 32;
/// Slots that a GPU's plan of rows takes together at least, and chunks of them at most unless there are millions.
const PLAN_CHUNK: usize = 2048;
const PLAN_CHUNKS: usize = 256;

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

    /// What a GPU measures before it encodes under a scale for a line or for a tensor: of each row a group (4 bytes), or of each line its
    /// largest magnitude and whether it has a non-zero code (5), of columns within each group. What it has a number a group of is too little to count.
    fn measured(&self, op: &Quantize<'_, Self>) -> Result<Option<Buf<u8>>> {
        let (rows, cols) = op.x.shape();
        // Of columns for each group, and for rows of none.
        let spans = op.groups.map_or(1, |groups| groups.num_groups + 1);
        let (rows, cols) = match op.planes {
            Planes::Rows => (rows, 0),
            Planes::Cols => (0, spans * cols),
            Planes::Both => (rows, spans * cols),
            Planes::Tiles => (rows, op.stack * cols),
        };
        let by_line = op.codec.format().spec().block == WHOLE_LINE;
        let grouped = op.codec.scale_kind().has_tensor_scale() && op.groups.is_some();
        let span_of_row = if cols != 0 && op.groups.is_some() { 4 * op.x.rows } else { 0 };
        let bytes = if by_line { 5 * (rows + cols) + span_of_row } else { 4 * op.x.rows };
        (self.is_gpu() && (by_line || grouped)).then(|| self.buf(bytes)).transpose()
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

/// Whether a GPU has kernels for just this: of numbers of `input`, in `rows` of them that are not yet `transformed` where a transform is wanted.
/// The others go through the general one, and a transform is then a matrix of its own.
fn has_fast_kernels(op: &Quantize<'_, Dry>, input: DType, rows: usize, transformed: bool) -> bool {
    let (codec, cols) = (op.codec, op.x.cols);
    let (format, spec) = (codec.format(), codec.format().spec());
    let of_recipes = has_own_kernels(format) && codec.scale_kind() == ScaleKind::E8M0;
    let transforms = op.hadamard.is_some() && !transformed;
    let rounds = match codec.rounding() {
        Rounding::NearestEven if transforms => input == DType::Bf16 && of_recipes,
        Rounding::NearestEven => has_own_kernels(format) || is_mxfp8(format),
        Rounding::Stochastic => input == DType::Bf16 && of_recipes,
        _ => false,
    };
    let (by_rows, by_cols) = (op.planes != Planes::Cols, op.planes != Planes::Rows);
    let ends_short = by_rows && !cols.is_multiple_of(spec.block)
        || by_cols && !rows.is_multiple_of(format.column_step().max(least_block(op)));
    let whole_lines = match op.planes {
        Planes::Rows => !transforms || cols.is_multiple_of(TILE),
        Planes::Both if spec.block == 32 => cols.is_multiple_of(32),
        _ => true,
    };
    rounds && cols.is_multiple_of(8) && whole_lines && (spec.code_bits == 8 || !ends_short)
}

/// Rows that a column's length is rounded up to besides the format's own.
fn least_block(op: &Quantize<'_, Dry>) -> usize {
    match op.hadamard {
        Some(transform) if op.planes == Planes::Cols => transform.len,
        _ => 1,
    }
}

fn is_mxfp8(format: Format) -> bool {
    matches!(format, Format::Mxfp8E4m3 | Format::Mxfp8E5m2)
}

/// Whether a GPU has kernels for this format alone.
fn has_own_kernels(format: Format) -> bool {
    matches!(format, Format::Mxfp4 | Format::E4m3)
}

fn stored(codec: Codec) -> (Format, ScaleRule) {
    (codec.format(), codec.rule())
}

impl Dry {
    pub(crate) fn quantize(&self, op: Quantize<'_, Self>) -> Result<Emitted<Self>> {
        let spans = op.delayed.map(|_| op.spans());
        let emitted = self.quantized(op)?;
        let found = |spans| -> Result<_> { Ok(Found { amax: self.buf(spans)?, counts: self.counters(2)? }) };
        Ok(Emitted { found: spans.map(found).transpose()?, ..emitted })
    }

    /// The planes and their counts.
    fn quantized(&self, op: Quantize<'_, Self>) -> Result<Emitted<Self>> {
        let (rows, cols) = op.x.shape();
        if op.planes == Planes::Tiles {
            let n = rows / op.stack.max(1);
            let [upright, turned] = self.tiles(stored(op.codec), (op.stack, n, cols))?;
            let [rows, cols] = [upright, turned].map(|plane| Some(Operand::Block(plane)));
            let _measured = self.measured(&op)?;
            return Ok(Emitted { rows, cols, counts: Some(self.counts()?), found: None });
        }
        let emit = Emit::Block { codec: op.codec, planes: op.planes };
        let emitted = || self.emitted(emit, rows, cols, least_block(&op));
        let is_fused = self.is_gpu() && has_fast_kernels(&op, op.x.dtype(), rows, false);
        let apart = op.hadamard.is_some() && !is_fused;
        let transformed_rows = match op.planes {
            Planes::Cols => rows.next_multiple_of(least_block(&op).max(op.codec.format().column_step())),
            _ => rows,
        };
        let transformed = || self.plain(DType::F32, transformed_rows, cols);
        if !self.is_gpu() {
            let _transformed = apart.then(transformed).transpose()?;
            return emitted();
        }
        let out = emitted()?;
        let is_fast = is_fused || apart && has_fast_kernels(&op, DType::F32, transformed_rows, true);
        // The general kernel makes the transform itself, unless whole lines of it are to be measured first.
        let as_it_reads =
            !is_fast && op.planes == Planes::Cols && op.codec.format().spec().block != WHOLE_LINE;
        let _transformed = (apart && !as_it_reads).then(transformed).transpose()?;
        let _measured = self.measured(&op)?;
        let (block, bytes) = (op.codec.format().spec().block, op.codec.scale_kind().bytes());
        let is_mx = op.codec.scale_kind() == ScaleKind::E8M0 && block == 32;
        if op.planes == Planes::Both && !is_fast && is_mx && cols.is_multiple_of(TILE) {
            // The rows' scales by words, before they come to their places.
            let _by_word: Buf<u8> = self.buf(rows.next_multiple_of(TILE) * cols / block)?;
        }
        if op.planes == Planes::Both && is_fast {
            // The rows' scales by columns, before they come to their places.
            let _by_block: Buf<u8> =
                self.buf(cols.next_multiple_of(TILE) / block * rows.next_multiple_of(TILE) * bytes)?;
        }
        Ok(out)
    }

    pub(crate) fn dequantize(&self, op: Dequantize<'_, Self>) -> Result<Tensor<Self>> {
        self.plain(op.dtype, op.x.rows, op.x.cols)
    }

    pub(crate) fn transcode(&self, op: Transcode<'_, Self>) -> Result<Transcoded<Self>> {
        let x = op.x;
        let whole = x.cols.next_multiple_of(MXFP4_BLOCK);
        if self.is_gpu() && whole != x.cols && [x.format, op.to].contains(&Format::Mxfp4) {
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
        if self.is_gpu() {
            let chunks = op.shards * (tokens / op.shards).div_ceil(Route::<Self>::CHUNK);
            let _sums: (Buf<f32>, Buf<f32>, Buf<i32>) =
                (self.buf(chunks * experts)?, self.buf(chunks)?, self.buf(chunks * experts)?);
            let _products: Buf<f64> = self.buf(op.shards * experts)?;
        }
        Ok(Routing { expert, weight, probs, log_sum_exp, load, losses })
    }

    pub(crate) fn route_backward(&self, op: RouteBackward<'_, Self>) -> Result<Tensor<Self>> {
        let (tokens, experts) = op.routing.probs.shape();
        self.plain(DType::F32, tokens, experts)
    }

    pub(crate) fn plan_permute(&self, op: PlanPermute<'_, Self>) -> Result<PermuteMap<Self>> {
        // Slots of each group in each chunk of slots, of 16 bits.
        let counts = Self::len(op.expert).div_ceil(PLAN_CHUNK).min(PLAN_CHUNKS) * op.num_groups;
        let _counts: Option<Buf<u8>> = self.is_gpu().then(|| self.buf(2 * counts)).transpose()?;
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
