//! Vectorised, multi-threaded writing of quantized results, tile by tile. The results have the bits of `spec`.
//!
//! An op fills a tile of F32 values (read from a plain or quantized matrix, or computed) and passes the tile to a [`Sink`], which writes
//! the requested codes and scales. Threads divide strips of rows; a strip never spans two groups.

use super::drawn::Drawn;
use super::encode::{Tile, Work, encode_cols, encode_row, encode_square, fast, transpose};
use super::general::{self, Job, WORTH_A_THREAD};
use super::planes::put_counts;
use super::round::{fixed_bits, reads_bits};
use super::shared::Shared;
use super::source::ValueSource;
use super::spans::Spans;
use super::spec::{Known, Tally};
use crate::Cpu;
use crate::gemm::Isa;
use crate::ops::plain::elementwise::{round_bf16, round_f32};
use half::bf16;
use nibble_core::ops::{Counts, Emit, Emitted, Planes};
use nibble_core::{BlockScaled, Data, Error, Operand, Result, Tensor};
use nibble_formats::{Codec, Scale, ScaleKind, ScalePlaneMut};
use rayon::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Rows of a strip if the result has column blocks or 2-D blocks.
pub(crate) const STRIP_ROWS: usize = 128;
/// Columns of a tile: a multiple of every format's block.
pub(crate) const TILE_COLS: usize = 128;
/// Number of values of a strip if the result has only row blocks. Such a strip fits the L1 cache.
const ROW_STRIP_VALUES: usize = 4096;

/// Some rows of one span.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strip {
    pub row: usize,
    /// Number of valid rows; the other rows of `out_rows` are padding.
    pub rows: usize,
    pub out_rows: usize,
}

/// Whether a result has column blocks, so that strips must consist of whole blocks.
pub(crate) fn has_cols(emit: Emit) -> bool {
    matches!(emit, Emit::Block { planes: Planes::Cols | Planes::Both, .. })
}

/// Number of rows of a strip in a matrix with `cols` columns.
pub(crate) fn strip_rows(whole_blocks: bool, cols: usize) -> usize {
    if whole_blocks { STRIP_ROWS } else { (ROW_STRIP_VALUES / cols.max(1)).clamp(1, STRIP_ROWS) }
}

/// Calls `body` for every strip of at most `height` rows, multi-threaded if there are enough values. Each thread has separate `scratch`
/// memory.
pub(crate) fn for_strips<S>(
    cpu: &Cpu,
    spans: &Spans,
    (height, cols): (usize, usize),
    scratch: impl Fn() -> S + Send + Sync,
    body: impl Fn(&mut S, Strip) + Send + Sync,
) {
    let strips: Vec<Strip> = spans
        .spans
        .iter()
        .flat_map(|span| {
            (span.start..span.end).step_by(height).map(move |row| Strip {
                row,
                rows: (span.start + span.len).saturating_sub(row).min(height),
                out_rows: height.min(span.end - row),
            })
        })
        .collect();
    if cpu.pool().current_num_threads() == 1 || spans.rows * cols < WORTH_A_THREAD {
        let mut scratch = scratch();
        strips.into_iter().for_each(|strip| body(&mut scratch, strip));
    } else {
        cpu.pool().install(|| strips.into_par_iter().for_each_init(&scratch, body));
    }
}

/// A quantized tensor while it is written.
pub(crate) struct Target {
    tensor: BlockScaled<Cpu>,
    codes: Shared<u8>,
    scales: Shared<u8>,
    kind: ScaleKind,
}

impl Target {
    /// Opens a tensor for writing.
    pub fn new(mut tensor: BlockScaled<Cpu>) -> Self {
        let (codes, scales) = (Shared::of(&mut tensor.codes), Shared::of(&mut tensor.scales));
        let kind = tensor.scale_kind();
        Self { tensor, codes, scales, kind }
    }

    /// The finished tensor.
    pub fn finish(self) -> BlockScaled<Cpu> {
        self.tensor
    }

    fn bytes(&self, values: usize) -> usize {
        self.tensor.format.row_code_bytes(values)
    }

    fn blocks(&self, values: usize) -> usize {
        self.tensor.format.scales_per_row(values)
    }

    /// The codes of `width` columns of a row, starting at column `col`; `col` is a multiple of the block.
    ///
    /// # Safety
    /// No other thread writes these codes.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn row_codes(&self, row: usize, col: usize, width: usize) -> &mut [u8] {
        let start = row * self.bytes(self.tensor.cols) + self.bytes(col);
        // SAFETY: `self` owns the tensor and does not access it before `finish`; the caller guarantees that no other thread writes the
        // range.
        unsafe { self.codes.slice_mut(start, self.bytes(width)) }
    }

    /// The scales of `width` columns of a row, starting at column `col`.
    ///
    /// # Safety
    /// The requirements of [`row_codes`](Self::row_codes).
    pub unsafe fn row_scales(&self, row: usize, col: usize, width: usize) -> ScalePlaneMut<'_> {
        let start = row * self.blocks(self.tensor.cols) + self.blocks(col);
        // SAFETY: the caller guarantees that no other thread writes these scales.
        unsafe { self.records(start, self.blocks(width)) }
    }

    /// `len` scale records, starting at record `start`.
    ///
    /// # Safety
    /// The requirements of [`row_codes`](Self::row_codes).
    unsafe fn records(&self, start: usize, len: usize) -> ScalePlaneMut<'_> {
        let bytes = self.kind.bytes();
        // SAFETY: the caller guarantees that no other thread writes these scales.
        ScalePlaneMut { kind: self.kind, bytes: unsafe { self.scales.slice_mut(start * bytes, len * bytes) } }
    }

    /// Writes zeros to a row of padding.
    ///
    /// # Safety
    /// The requirements of [`row_codes`](Self::row_codes).
    pub unsafe fn clear_row(&self, row: usize, col: usize, width: usize) {
        // SAFETY: the caller guarantees that no other thread writes this row.
        unsafe {
            self.row_codes(row, col, width).fill(0);
            self.row_scales(row, col, width).fill(self.kind.least());
        }
    }

    /// Writes codes `[width][bytes]` to the stored columns `col`.., starting at row `row`.
    ///
    /// # Safety
    /// No other thread writes these rows of these columns.
    pub unsafe fn put_columns(&self, (row, col, width): (usize, usize, usize), codes: &[u8]) {
        let bytes = codes.len() / width.max(1);
        if bytes == 0 {
            return;
        }
        let line_bytes = self.bytes(self.tensor.rows);
        for (i, codes) in codes.chunks_exact(bytes).enumerate() {
            let start = (col + i) * line_bytes + self.bytes(row);
            // SAFETY: the caller guarantees exclusive access, and `self` does not access the tensor before `finish`.
            unsafe { self.codes.slice_mut(start, bytes) }.copy_from_slice(codes);
        }
    }

    /// Writes scales `[blocks][width]` of columns `col`..; the first block starts at row `row`.
    ///
    /// # Safety
    /// The requirements of [`put_columns`](Self::put_columns).
    pub unsafe fn put_column_scales(&self, (row, col, width): (usize, usize, usize), scales: &[Scale]) {
        let (per_line, blocks) = (self.blocks(self.tensor.rows), scales.len() / width.max(1));
        for i in 0..width {
            let start = (col + i) * per_line + self.blocks(row);
            // SAFETY: the caller guarantees that no other thread writes these scales.
            let mut line = unsafe { self.records(start, blocks) };
            for b in 0..blocks {
                line.set(b, scales[b * width + i]);
            }
        }
    }
}

/// A plain result while it is written.
enum Plain {
    F32(Tensor<Cpu>, Shared<f32>),
    Bf16(Tensor<Cpu>, Shared<bf16>),
    /// F32 values that are quantized after all of them are written.
    Staged(Vec<f32>, Shared<f32>),
}

impl Plain {
    fn new(mut x: Tensor<Cpu>) -> Self {
        match &mut x.data {
            Data::F32(values) => {
                let shared = Shared::of(values);
                Self::F32(x, shared)
            }
            Data::Bf16(values) => {
                let shared = Shared::of(values);
                Self::Bf16(x, shared)
            }
        }
    }

    fn staged(len: usize) -> Self {
        let mut values = vec![0.0; len];
        let shared = Shared::of_values(&mut values);
        Self::Staged(values, shared)
    }

    /// Writes `x` to the `len` elements that start at `start`, and zeros after the end of `x`.
    ///
    /// # Safety
    /// No other thread writes these elements.
    unsafe fn put(&self, isa: Isa, start: usize, len: usize, x: &[f32]) {
        // SAFETY: the enum owns the buffer and does not otherwise access it; the caller guarantees that no other thread writes the
        // elements.
        unsafe {
            match self {
                Self::F32(_, out) | Self::Staged(_, out) => {
                    let out = out.slice_mut(start, len);
                    round_f32(isa, x, out);
                    out[x.len()..].fill(0.0);
                }
                Self::Bf16(_, out) => {
                    let out = out.slice_mut(start, len);
                    round_bf16(isa, x, out);
                    out[x.len()..].fill(bf16::ZERO);
                }
            }
        }
    }
}

/// Reusable scratch memory of [`Sink::write`].
#[derive(Default)]
pub(crate) struct SinkWork {
    work: Work,
    turned: Vec<u8>,
    bits: Vec<u16>,
}

/// A result in the requested form (plain or quantized) while it is written.
pub(crate) struct Sink<'a> {
    cols: usize,
    spans: &'a Spans<'a>,
    codec: Option<Codec>,
    random: Option<Drawn>,
    plain: Option<Plain>,
    /// Codec and destination of values that are quantized at the end.
    staged: Option<(Codec, Emitted<Cpu>)>,
    row_plane: Option<Target>,
    col_plane: Option<Target>,
    counts: Option<Counts<Cpu>>,
    tally: [AtomicU64; 3],
}

impl<'a> Sink<'a> {
    /// Creates a sink for a result `[rows of spans, cols]` in buffers that the operation has allocated.
    pub fn new(
        spans: &'a Spans<'a>,
        cols: usize,
        (emit, made): (Emit, Emitted<Cpu>),
        random: Option<Drawn>,
    ) -> Self {
        let mut sink = Self {
            cols,
            spans,
            codec: None,
            random,
            plain: None,
            staged: None,
            row_plane: None,
            col_plane: None,
            counts: None,
            tally: Default::default(),
        };
        match emit {
            // The largest magnitude of a row, column or tensor is known only after all of it is written.
            Emit::Block { codec, .. } if fast(codec.format()).is_none() => {
                (sink.plain, sink.staged) = (Some(Plain::staged(spans.rows * cols)), Some((codec, made)));
            }
            _ => {
                let Emitted { rows, cols, counts, .. } = made;
                if let Emit::Block { codec, .. } = emit {
                    (sink.codec, sink.counts) = (Some(codec), counts);
                }
                match rows {
                    Some(Operand::Plain(x)) => sink.plain = Some(Plain::new(x)),
                    Some(Operand::Block(plane)) => sink.row_plane = Some(Target::new(plane)),
                    None => {}
                }
                if let Some(Operand::Block(plane)) = cols {
                    sink.col_plane = Some(Target::new(plane));
                }
            }
        }
        sink
    }

    /// Writes a strip's columns, starting at `col`; the tile holds the strip's valid rows. `col` is a multiple of the row block's length,
    /// and each combination of strip and columns is written once.
    pub fn write(&self, isa: Isa, memory: &mut SinkWork, strip: Strip, tile: Tile, col: usize) {
        debug_assert_eq!(tile.rows, strip.rows);
        let plane_rows = strip.out_rows.min(self.spans.rows - strip.row.min(self.spans.rows));
        if let Some(plain) = &self.plain {
            for i in 0..plane_rows {
                let x = if i < tile.rows { tile.row(i) } else { &[] };
                let start = (strip.row + i) * self.cols + col;
                // SAFETY: strips have disjoint rows, and each of their columns is written once.
                unsafe { plain.put(isa, start, tile.width, x) };
            }
        }
        let Some(codec) = self.codec else { return };
        let SinkWork { work, turned, bits } = memory;
        fill_bits(isa, bits, codec, self.random, self.spans, self.cols, (strip.row, tile, col));
        let mut tally = Tally::default();
        if let Some(out) = &self.row_plane {
            for i in 0..plane_rows {
                let row = strip.row + i;
                // SAFETY: strips have disjoint rows, and each of their columns is written once.
                unsafe {
                    if i < tile.rows {
                        let bits = bits.get(i * tile.width..).unwrap_or(&[]);
                        let codes = out.row_codes(row, col, tile.width);
                        let mut scales = out.row_scales(row, col, tile.width);
                        encode_row(isa, codec, tile.row(i), bits, codes, &mut scales, &mut tally);
                    } else {
                        out.clear_row(row, col, tile.width);
                    }
                }
            }
        }
        if let Some(out) = &self.col_plane {
            let mut col_tally = Tally::default();
            encode_cols(isa, codec, tile, bits, strip.out_rows, work, &mut col_tally);
            transpose(isa, &work.codes, work.codes.len() / tile.width.max(1), tile.width, turned);
            let place = (strip.row, col, tile.width);
            // SAFETY: strips have disjoint rows, and each of their columns is written once.
            unsafe {
                out.put_columns(place, turned);
                out.put_column_scales(place, &work.scales);
            }
            if self.row_plane.is_none() {
                tally = col_tally;
            }
        }
        add_tally(&self.tally, tally);
    }

    /// Returns the result after every strip is written.
    pub fn finish(self, cpu: &Cpu) -> Result<Emitted<Cpu>> {
        let plain = match self.plain {
            Some(Plain::Staged(values, _)) => {
                let Some((codec, made)) = self.staged else { unreachable!("staged with its codec") };
                let x = (ValueSource::F32(&values, self.cols), self.cols);
                return Ok(general::emit(
                    cpu,
                    &Job::new(cpu, x, codec, self.random, self.spans, Known::default()),
                    made,
                ));
            }
            Some(Plain::F32(x, _) | Plain::Bf16(x, _)) => Some(Operand::Plain(x)),
            None => None,
        };
        let block = |target: Option<Target>| target.map(|t| Operand::Block(t.finish()));
        let mut counts = self.counts;
        put_counts(&mut counts, counted(&self.tally));
        Ok(Emitted {
            rows: plain.or(block(self.row_plane)),
            cols: block(self.col_plane),
            counts,
            found: None,
        })
    }
}

/// Adds one tile's counts to the sums. Integer sums do not depend on the order.
pub(crate) fn add_tally(sum: &[AtomicU64; 3], tally: Tally) {
    for (sum, count) in sum.iter().zip(tally) {
        if count != 0 {
            sum.fetch_add(count, Ordering::Relaxed);
        }
    }
}

/// The sums of the counts of all tiles.
pub(crate) fn counted(sum: &[AtomicU64; 3]) -> Tally {
    sum.each_ref().map(|count| count.load(Ordering::Relaxed))
}

/// The random bits `[rows][width]` that the codec's rounding reads for a tile at (row, col); empty for nearest-even rounding.
fn fill_bits(
    isa: Isa,
    bits: &mut Vec<u16>,
    codec: Codec,
    random: Option<Drawn>,
    spans: &Spans,
    cols: usize,
    (row, tile, col): (usize, Tile, usize),
) {
    bits.clear();
    if !reads_bits(codec.rounding()) {
        return;
    }
    bits.resize(tile.rows * tile.width, fixed_bits(codec.rounding()).unwrap_or(0));
    let (true, Some(drawn)) = (codec.rounding().is_random(), random) else { return };
    for (i, bits) in bits.chunks_exact_mut(tile.width.max(1)).enumerate() {
        drawn.fill(isa, spans.row_index(row + i) * cols as u64 + col as u64, bits);
    }
}

/// Stacked matrices in 2-D blocks while they are written, both as they are and transposed.
pub(crate) struct SquareTarget {
    /// Number of rows and columns of one matrix.
    shape: (usize, usize),
    upright: Target,
    turned: Target,
}

impl SquareTarget {
    /// Opens both the original and the transposed order of matrices `[n, k]` for writing.
    pub fn new([upright, turned]: [BlockScaled<Cpu>; 2], shape: (usize, usize)) -> Self {
        Self { shape, upright: Target::new(upright), turned: Target::new(turned) }
    }

    /// Writes the tile whose first element is (row of the stack, col): the codes `[rows][width]`, the transposed codes `[width][rows]`, and
    /// the scale.
    ///
    /// # Safety
    /// No other thread writes this tile.
    pub unsafe fn put(
        &self,
        (row, col): (usize, usize),
        (rows, width): (usize, usize),
        [codes, turned]: [&[u8]; 2],
        scale: Scale,
    ) {
        let (n, k) = self.shape;
        let block = self.upright.tensor.format.spec().block;
        let (matrix, first) = (row / n, row % n);
        let scale_at = (matrix * n.div_ceil(block) + first / block) * k.div_ceil(block) + col / block;
        let turned_scale_at = (matrix * k.div_ceil(block) + col / block) * n.div_ceil(block) + first / block;
        // SAFETY: tiles are disjoint in both buffers, and the caller guarantees that no other thread writes this tile.
        unsafe {
            for (i, codes) in codes.chunks_exact(width).enumerate() {
                self.upright.codes.slice_mut((row + i) * k + col, width).copy_from_slice(codes);
            }
            for (i, codes) in turned.chunks_exact(rows).enumerate() {
                let line = matrix * k + col + i;
                self.turned.codes.slice_mut(line * n + first, rows).copy_from_slice(codes);
            }
            self.upright.records(scale_at, 1).set(0, scale);
            self.turned.records(turned_scale_at, 1).set(0, scale);
        }
    }

    /// The results after every tile is written: the original matrices, and the transposed matrices.
    pub fn finish(self) -> [BlockScaled<Cpu>; 2] {
        [self.upright.finish(), self.turned.finish()]
    }
}

/// A sink that quantizes matrices in 2-D blocks.
pub(crate) struct SquareSink<'a> {
    /// The spans: one per matrix.
    spans: &'a Spans<'a>,
    codec: Codec,
    random: Option<Drawn>,
    planes: SquareTarget,
    counts: Option<Counts<Cpu>>,
    tally: [AtomicU64; 3],
}

impl<'a> SquareSink<'a> {
    /// Creates a sink for matrices `[n, k]`, in buffers that the operation has allocated.
    pub fn new(
        made: Emitted<Cpu>,
        spans: &'a Spans<'a>,
        shape: (usize, usize),
        codec: Codec,
        random: Option<Drawn>,
    ) -> Result<Self> {
        let (Some(Operand::Block(upright)), Some(Operand::Block(turned))) = (made.rows, made.cols) else {
            return Err(Error::shape("quantize", "planes of the result", "fewer", "two"));
        };
        let planes = SquareTarget::new([upright, turned], shape);
        Ok(Self { spans, codec, random, planes, counts: made.counts, tally: Default::default() })
    }

    /// Writes one tile, whose first element is (row of the stack, col).
    pub fn write(&self, isa: Isa, memory: &mut SinkWork, row: usize, tile: Tile, col: usize) {
        let SinkWork { work, turned, bits } = memory;
        let (codec, k) = (self.codec, self.planes.shape.1);
        fill_bits(isa, bits, codec, self.random, self.spans, k, (row, tile, col));
        let mut tally = Tally::default();
        encode_square(isa, codec, tile, bits, work, &mut tally);
        transpose(isa, &work.codes, tile.rows, tile.width, turned);
        let (size, codes) = ((tile.rows, tile.width), [&work.codes[..], turned]);
        // SAFETY: each tile is written once.
        unsafe { self.planes.put((row, col), size, codes, work.scales[0]) };
        add_tally(&self.tally, tally);
    }

    /// Returns the results after every tile is written.
    pub fn finish(self) -> Emitted<Cpu> {
        let [rows, cols] = self.planes.finish().map(|plane| Some(Operand::Block(plane)));
        let mut counts = self.counts;
        put_counts(&mut counts, counted(&self.tally));
        Emitted { rows, cols, counts, found: None }
    }
}
