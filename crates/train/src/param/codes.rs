//! The copies of a quantized weight of which every rank keeps some rows: each quantizes its own, and codes and scales go to all.

use super::slices::{Piece, Slices, TILE};
use crate::cx::Cx;
use crate::record::FoundCells;
use nibble_core::formats::{BlockAxis, Codec};
use nibble_core::ops::{
    Counts, Delayed, Emitted, Found, MeasureAmax, Planes, Quantize, Transpose, weight_planes,
};
use nibble_core::{BlockScaled, Comm, Data, Error, Kernels, Lines, Operand, Result, Tensor};
use std::ops::Range;

/// Whether the codes of a slice are those of the same rows of the whole weight, in both copies: no block reaches over the end of a tile. (A scale of
/// the tensor follows from the largest magnitude of all slices, which is exact.)
pub(super) fn travel(codec: Codec) -> bool {
    TILE.is_multiple_of(codec.format().spec().block)
}

/// A weight's rows on this rank, quantized.
pub(super) struct OfRank<B: Kernels> {
    /// One after the other. What was found of them is of all ranks' rows, but for its counts.
    pieces: Vec<Emitted<B>>,
    /// Of each matrix the largest magnitude of all ranks' rows, where scales are those of earlier steps.
    found_amax: Option<B::Buf<f32>>,
}

impl<B: Kernels> OfRank<B> {
    /// Of this rank's rows of the master; `delayed`: the scales of all matrices.
    pub fn new(
        b: &B,
        replicas: &dyn Comm<B>,
        (slices, master): (&Slices, &Tensor<B>),
        codec: Codec,
        delayed: Option<Delayed<'_, B>>,
    ) -> Result<Self> {
        let has_scale = codec.scale_kind().has_tensor_scale();
        let amax = has_scale.then(|| largest(b, replicas, (slices, master), codec)).transpose()?;
        let quantize = |(piece, rows): (Piece, Range<usize>)| {
            let (x, stack) = (rows_of(b, master, rows)?, piece.matrices);
            let of_piece = amax.as_ref().map(|amax| {
                let mut of_piece = b.alloc(stack)?;
                b.copy(amax, piece.first..piece.first + stack, &mut of_piece, 0).map(|()| of_piece)
            });
            let of_piece = of_piece.transpose()?;
            let delayed = delayed.map(|all| Delayed { first: all.first + piece.first * all.stride, ..all });
            let op = Quantize::new(&x, codec, Planes::Tiles);
            let made = Quantize { stack, delayed, amax: of_piece.as_ref(), ..op }.run(b)?;
            let found = made.found.zip(amax.clone()).map(|(found, amax)| Found { amax, ..found });
            Ok(Emitted { found, ..made })
        };
        let pieces = own_pieces(slices).map(quantize).collect::<Result<_>>()?;
        Ok(Self { pieces, found_amax: amax.filter(|_| delayed.is_some()) })
    }

    /// Keeps what was counted and found of them.
    pub fn keep_counts(
        &self,
        cx: &Cx<'_, B>,
        name: &str,
        scales: Option<(Delayed<'_, B>, FoundCells)>,
    ) -> Result<()> {
        // No other rank has these rows.
        let scales = scales.map(|(delayed, cells)| (delayed, FoundCells { is_counted: true, ..cells }));
        self.counted(cx.b)?.iter().for_each(|made| cx.keep_quantized(name, "w", made, scales));
        Ok(())
    }

    /// What counts and finds; for a rank that has no rows, zeros, since all ranks count at the same sites.
    fn counted(&self, b: &B) -> Result<Vec<Emitted<B>>> {
        if !self.pieces.is_empty() {
            return Ok(self.pieces.clone());
        }
        let found = |amax| Ok::<_, Error>(Found { amax, counts: b.counters(2)? });
        let found = self.found_amax.clone().map(found).transpose()?;
        Ok(vec![Emitted { rows: None, cols: None, counts: Some(Counts::zeros(b)?), found }])
    }

    /// The weight as it stands, and transposed if a backward pass will follow, on every rank of `replicas`.
    pub fn gathered(
        self,
        cx: &Cx<'_, B>,
        replicas: &dyn Comm<B>,
        slices: &Slices,
        codec: Codec,
    ) -> Result<(Operand<B>, Option<Operand<B>>)> {
        let b = cx.b;
        let (rows, cols, stack) = (slices.num_rows(), slices.cols(), slices.stack());
        let mut whole = weight_planes(b, (codec.format(), codec.rule()), (rows, cols, stack))?.to_vec();
        // Nobody reads the other.
        whole.truncate(if cx.training { 2 } else { 1 });
        // In this order: what the one copy has, then the other.
        let planes: Vec<[PlaneBytes; PARTS]> = [upright, transposed]
            .iter()
            .zip(&whole)
            .map(|(plane, made)| plane(codec, made.axis, (slices.matrix_rows(), cols)))
            .collect();
        let places = Places::of(slices, planes.as_flattened());

        let mut mine = b.alloc::<u8>(places.of_rank(slices.rank()).len())?;
        let mut at = 0;
        for (number, plane) in planes.as_flattened().iter().enumerate() {
            for (piece, made) in slices.pieces(slices.rank()).iter().zip(&self.pieces) {
                let copy = if number < PARTS { &made.rows } else { &made.cols };
                let copy = copy.as_ref().ok_or_else(|| Error::shape("prepare", "planes", "one", "both"))?;
                let bytes = plane.bytes_of(piece);
                if bytes > 0 {
                    b.copy(&part(b, copy.block("prepare")?, number % PARTS)?, 0..bytes, &mut mine, at)?;
                }
                at += bytes;
            }
        }
        drop(self);
        let staged = b.alloc::<u8>(places.bytes)?;
        let staged = replicas.begin_all_gather_parts(b, mine, &places.parts(), staged)?.wait(b)?;
        for (number, plane) in planes.as_flattened().iter().enumerate() {
            let fill = |to: &mut B::Buf<u8>| {
                let mut pieces = places.all.iter().filter(|place| place.plane == number);
                pieces.try_for_each(|place| plane.put(b, &staged, slices.matrix_rows(), place, to))
            };
            let BlockScaled { codes, scales, tensor_scale, .. } = &mut whole[number / PARTS];
            match number % PARTS {
                0 => fill(codes)?,
                1 => fill(scales)?,
                _ => {
                    let Some(of_rows) = tensor_scale.take() else { continue };
                    let mut bytes = b.reinterpret(&of_rows)?;
                    // Else the bytes were shared, and copied before they are written.
                    drop(of_rows);
                    fill(&mut bytes)?;
                    *tensor_scale = Some(b.reinterpret(&bytes)?);
                }
            }
        }
        let mut whole = whole.into_iter().map(Operand::Block);
        let w = whole.next().ok_or_else(|| Error::shape("prepare", "planes", "none", "one or both"))?;
        Ok((w, whole.next()))
    }
}

/// This rank's pieces, and which rows of its slice each is.
fn own_pieces(slices: &Slices) -> impl Iterator<Item = (Piece, Range<usize>)> {
    let mut at = 0;
    slices.pieces(slices.rank()).into_iter().map(move |piece| {
        let rows = at..at + piece.matrices * piece.rows.len();
        at = rows.end;
        (piece, rows)
    })
}

/// Of each matrix the largest magnitude, of all ranks' rows: the same on every rank.
fn largest<B: Kernels>(
    b: &B,
    replicas: &dyn Comm<B>,
    (slices, master): (&Slices, &Tensor<B>),
    codec: Codec,
) -> Result<B::Buf<f32>> {
    let stack = slices.stack();
    // Of a matrix of which this rank has no rows, 0.
    let mut mine = b.zeros(stack)?;
    for (piece, rows) in own_pieces(slices) {
        let x = rows_of(b, master, rows)?;
        let amax = MeasureAmax { x: &x, codec, stack: piece.matrices }.run(b)?;
        b.copy(&amax, 0..piece.matrices, &mut mine, piece.first)?;
    }
    // The ranks' magnitudes of a matrix, one after the other, are a matrix themselves.
    let of_ranks = Tensor::new(Data::F32(replicas.all_gather(b, &mine)?), slices.ranks(), stack)?;
    let of_matrices = Transpose { x: &of_ranks, stack: 1 }.run(b)?;
    MeasureAmax { x: &of_matrices, codec, stack }.run(b)
}

/// Some rows of a tensor; all of them share its buffer.
fn rows_of<B: Kernels>(b: &B, x: &Tensor<B>, rows: Range<usize>) -> Result<Tensor<B>> {
    if rows == (0..x.rows) {
        return Ok(x.clone());
    }
    let mut part = Tensor::unwritten(b, x.dtype(), rows.len(), x.cols)?;
    let values = rows.start * x.cols..rows.end * x.cols;
    match (&x.data, &mut part.data) {
        (Data::F32(from), Data::F32(to)) => b.copy(from, values, to, 0)?,
        (Data::Bf16(from), Data::Bf16(to)) => b.copy(from, values, to, 0)?,
        _ => return Err(Error::shape("prepare", "type of the part", part.dtype(), x.dtype())),
    }
    Ok(part)
}

/// Parts of a copy: codes, scales, and a scale of the tensor for each row.
const PARTS: usize = 3;

/// A part's bytes.
fn part<B: Kernels>(b: &B, x: &BlockScaled<B>, number: usize) -> Result<B::Buf<u8>> {
    match number {
        0 => Ok(x.codes.clone()),
        1 => Ok(x.scales.clone()),
        _ => {
            let none = || Error::shape("prepare", "scales of the tensor", "none", "one a row");
            b.reinterpret(x.tensor_scale.as_ref().ok_or_else(none)?)
        }
    }
}

/// How a plane's bytes lie: of each matrix so many lines, and in each of these the rows of the weight one after the other.
#[derive(Debug, Clone, Copy)]
struct PlaneBytes {
    /// Of a matrix.
    lines: usize,
    /// Rows that have bits together.
    each: usize,
    /// As many of a line.
    bits: usize,
}

/// The parts of the weight as it stands: a matrix, of so many rows and columns, is one line.
fn upright(codec: Codec, axis: BlockAxis, (_, cols): (usize, usize)) -> [PlaneBytes; PARTS] {
    let (format, record) = (codec.format(), codec.scale_kind().bytes());
    let each = if axis == BlockAxis::Tile { format.spec().block } else { 1 };
    [
        PlaneBytes { lines: 1, each: 1, bits: 8 * format.row_code_bytes(cols) },
        PlaneBytes { lines: 1, each, bits: 8 * record * format.scales_per_row(cols) },
        PlaneBytes { lines: 1, each: 1, bits: tensor_scale_bits(codec) },
    ]
}

/// The same transposed: a line for each column, or row of tiles. The scales of the tensor, the same for all columns, are with a matrix's first row.
fn transposed(codec: Codec, axis: BlockAxis, (rows, cols): (usize, usize)) -> [PlaneBytes; PARTS] {
    let (format, record) = (codec.format(), codec.scale_kind().bytes());
    let lines = if axis == BlockAxis::Tile { format.scales_per_row(cols) } else { cols };
    [
        PlaneBytes { lines: cols, each: 1, bits: format.spec().code_bits as usize },
        PlaneBytes { lines, each: format.spec().block, bits: 8 * record },
        PlaneBytes { lines: 1, each: rows.max(1), bits: cols * tensor_scale_bits(codec) },
    ]
}

/// Of a row of a copy.
fn tensor_scale_bits(codec: Codec) -> usize {
    if codec.scale_kind().has_tensor_scale() { 8 * size_of::<f32>() } else { 0 }
}

impl PlaneBytes {
    /// Where in a line a row begins that is the first of a tile, or of the next matrix.
    fn at(&self, row: usize) -> usize {
        (row.div_ceil(self.each) * self.bits).div_ceil(8)
    }

    /// Of each line what a piece has.
    fn width(&self, piece: &Piece) -> usize {
        self.at(piece.rows.end) - self.at(piece.rows.start)
    }

    fn bytes_of(&self, piece: &Piece) -> usize {
        piece.matrices * self.lines * self.width(piece)
    }

    /// Copies a piece to its place among matrices of so many rows.
    fn put<B: Kernels>(
        &self,
        b: &B,
        staged: &B::Buf<u8>,
        matrix_rows: usize,
        Place { piece, at, .. }: &Place,
        to: &mut B::Buf<u8>,
    ) -> Result<()> {
        let at = *at;
        let (line, width) = (self.at(matrix_rows), self.width(piece));
        let first = piece.first * self.lines * line + self.at(piece.rows.start);
        let lines = piece.matrices * self.lines;
        if width == 0 {
            return Ok(());
        }
        if lines == 1 || width == line {
            return b.copy(staged, at..at + lines * width, to, first);
        }
        let (from, into) = (Lines { first: at, stride: width }, Lines { first, stride: line });
        b.copy_lines((staged, from), (to, into), (lines, width))
    }
}

/// Where the pieces of all ranks lie as they come: rank by rank, of each its planes.
struct Places {
    all: Vec<Place>,
    /// Where each rank's begin.
    starts: Vec<usize>,
    bytes: usize,
}

/// One piece of a plane.
struct Place {
    /// Number of the plane.
    plane: usize,
    piece: Piece,
    /// Its first byte, of all that come.
    at: usize,
}

impl Places {
    fn of(slices: &Slices, planes: &[PlaneBytes]) -> Self {
        let (mut all, mut starts, mut bytes) = (Vec::new(), Vec::new(), 0);
        for rank in 0..slices.ranks() {
            starts.push(bytes);
            for (number, plane) in planes.iter().enumerate() {
                for piece in slices.pieces(rank) {
                    let at = bytes;
                    bytes += plane.bytes_of(&piece);
                    all.push(Place { plane: number, piece, at });
                }
            }
        }
        Self { all, starts, bytes }
    }

    fn of_rank(&self, rank: usize) -> Range<usize> {
        let end = self.starts.get(rank + 1).copied().unwrap_or(self.bytes);
        self.starts.get(rank).map_or(end..end, |start| *start..end)
    }

    fn parts(&self) -> Vec<Vec<Range<usize>>> {
        (0..self.starts.len()).map(|rank| vec![self.of_rank(rank)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cx::Shards;
    use nibble_core::formats::{Format, Purpose, Rounding, Stream};
    use nibble_core::{Backend, Mesh, Recipe};
    use nibble_cpu::{Cpu, HostComm};

    /// Rows and columns of each matrix, and how many there are.
    type Shape = (usize, usize, usize);

    /// Bits of a weight's copies, and what was counted and found.
    #[derive(Debug, PartialEq)]
    struct Made {
        /// Codes, scales and scales of the tensor, of both copies.
        copies: Vec<(Vec<u8>, Vec<u8>, Vec<u32>)>,
        counts: Vec<u64>,
        amax: Vec<u32>,
        found: Vec<u64>,
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
    }

    impl Made {
        fn of(copies: &[Option<Operand<Cpu>>], counted: &[Emitted<Cpu>]) -> Self {
            let copy = |copy: &Option<Operand<Cpu>>| {
                let x = copy.as_ref().unwrap().block("test").unwrap();
                let of_rows = x.tensor_scale.as_ref().map_or(Vec::new(), |scale| bits(scale.as_slice()));
                (x.codes.as_slice().to_vec(), x.scales.as_slice().to_vec(), of_rows)
            };
            let found = |made: &Emitted<Cpu>| made.found.clone();
            let mut made = Self {
                copies: copies.iter().map(copy).collect(),
                counts: vec![0; 3],
                amax: counted.iter().find_map(found).map_or(Vec::new(), |f| bits(f.amax.as_slice())),
                found: vec![0; 2],
            };
            for emitted in counted {
                let Counts(counts) = emitted.counts.as_ref().unwrap();
                add(&mut made.counts, counts.as_slice());
                if let Some(found) = &emitted.found {
                    add(&mut made.found, found.counts.as_slice());
                }
            }
            made
        }
    }

    fn add(sums: &mut [u64], counts: &[u64]) {
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }

    /// Normal numbers, but for what is not finite in the last rows of some matrices; the second is zeros.
    fn values((rows, cols, stack): Shape, is_finite: bool) -> Vec<f32> {
        let stream = Stream::new(3, Purpose::Data, 1, 0);
        let mut values: Vec<f32> = (0..(stack * rows * cols) as u64).map(|i| stream.normal_at(i)).collect();
        for (number, matrix) in values.chunks_mut(rows * cols).enumerate() {
            match number % 4 {
                1 => matrix.fill(0.0),
                3 if !is_finite => matrix[rows * cols - 1] = f32::INFINITY,
                0 if !is_finite => matrix[rows * cols - 2] = f32::NAN,
                _ => {}
            }
        }
        values
    }

    fn delayed(records: Option<&<Cpu as Backend>::Buf<f32>>) -> Option<Delayed<'_, Cpu>> {
        records.map(|records| Delayed { records, first: 1, stride: 2 })
    }

    /// Every second matrix expects a magnitude that some values exceed.
    fn records(cpu: &Cpu, stack: usize) -> <Cpu as Backend>::Buf<f32> {
        let all: Vec<f32> = (0..2 * stack + 1).map(|i| if i % 4 == 1 { 2.5 } else { 0.0 }).collect();
        cpu.upload(&all).unwrap()
    }

    fn on_one_rank(codec: Codec, (rows, cols, stack): Shape, all: &[f32], is_delayed: bool) -> Made {
        let cpu = Cpu::new(1).unwrap();
        let x = Tensor::from_f32(&cpu, all, stack * rows, cols).unwrap();
        let records = is_delayed.then(|| records(&cpu, stack));
        let delayed = delayed(records.as_ref());
        let made = Quantize { stack, delayed, ..Quantize::new(&x, codec, Planes::Tiles) }.run(&cpu).unwrap();
        Made::of(&[made.rows.clone(), made.cols.clone()], &[made])
    }

    fn on_a_rank(
        codec: Codec,
        (rows, cols, stack): Shape,
        (all, is_delayed): (&[f32], bool),
        comm: &HostComm,
    ) -> Made {
        let (cpu, recipe) = (Cpu::new(1).unwrap(), Recipe::builtin("bf16").unwrap());
        let comm: &dyn Comm<Cpu> = comm;
        let slices = Slices::new("w", (rows, cols), stack, (comm.rank(), comm.world()));
        let mine = slices.mine();
        let values = &all[mine.start * cols..mine.end * cols];
        let master = Tensor::from_f32(&cpu, values, mine.len(), cols).unwrap();
        let records = is_delayed.then(|| records(&cpu, stack));
        let of_rank = OfRank::new(&cpu, comm, (&slices, &master), codec, delayed(records.as_ref())).unwrap();
        let counted = of_rank.counted(&cpu).unwrap();
        let shards = Shards::new(&cpu, 1, 1, comm.rank()).unwrap();
        let cx = Cx { training: true, ..Cx::inference(&cpu, Mesh::new(comm), &recipe, shards, 0.0) };
        let (w, wt) = of_rank.gathered(&cx, comm, &slices, codec).unwrap();
        Made::of(&[Some(w), wt], &counted)
    }

    /// Slices that end within matrices, and ranks without any rows.
    #[test]
    fn slices_of_every_format_are_those_of_the_whole() {
        let rules = |format: Format| format.spec().rules.iter().map(move |rule| (format, *rule));
        let codecs = Format::ALL.into_iter().flat_map(rules);
        let codecs = codecs.map(|(format, rule)| Codec::new(format, rule, Rounding::NearestEven).unwrap());
        for codec in codecs.filter(|codec| travel(*codec)) {
            for (shape, ranks) in [((300, 64, 1), 2), ((256, 96, 3), 4), ((130, 48, 5), 3), ((64, 64, 1), 2)]
            {
                let of_tensor = codec.scale_kind().has_tensor_scale();
                for is_delayed in [false, true] {
                    for is_finite in [true, false] {
                        if is_delayed && !codec.format().may_be_delayed() || !is_finite && !of_tensor {
                            continue;
                        }
                        let all = values(shape, is_finite);
                        let one = on_one_rank(codec, shape, &all, is_delayed);
                        let what = format!("{codec:?}, {shape:?}, {ranks} ranks, delayed: {is_delayed}");
                        let made: Vec<Made> = std::thread::scope(|scope| {
                            let work = |comm: HostComm| on_a_rank(codec, shape, (&all, is_delayed), &comm);
                            let run = |comm| scope.spawn(move || work(comm));
                            let threads: Vec<_> = HostComm::world(ranks).into_iter().map(run).collect();
                            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
                        });
                        let (mut counts, mut found) = (vec![0; 3], vec![0; 2]);
                        for of_rank in &made {
                            assert!(of_rank.copies == one.copies, "{what}, finite: {is_finite}");
                            assert_eq!(of_rank.amax, one.amax, "{what}");
                            add(&mut counts, &of_rank.counts);
                            add(&mut found, &of_rank.found);
                        }
                        assert_eq!((counts, found), (one.counts, one.found), "{what}");
                    }
                }
            }
        }
    }
}
