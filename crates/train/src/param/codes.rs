//! The copies of a quantized weight whose rows are sharded. Each rank quantizes its own rows, and sends its codes and scales to all ranks.
//!
//! A rank sends two copies: the weight itself, and its transpose. Both copies together need 2.06 bytes per value in MXFP8 and 1.13 in
//! HiFloat4, compared with 4 bytes in F32 and 2 bytes in BF16. In inference, the transposed copy is not sent.
//!
//! A tensor scale depends on several slices. Each rank measures its own rows (`MeasureAmax`), the maxima of all weights are gathered in one
//! collective, and every rank quantizes with the largest maximum (`Quantize::amax`), which is exact. Scales of whole rows or columns cannot
//! be computed in this way. In formats with such scales, ranks send F32 rows, and each rank quantizes all rows.

use super::planes::{PARTS, PackedRows};
use super::slices::{Piece, Slices, TILE};
use crate::cx::Cx;
use crate::record::{FoundCells, OF_FPROP};
use nibble_core::formats::Codec;
use nibble_core::ops::{
    Counts, Delayed, Emitted, Found, MeasureAmax, Planes, Quantize, Transpose, weight_planes,
};
use nibble_core::{BlockScaled, Comm, Data, Error, Kernels, LineCopy, Operand, Result, Tensor};
use std::ops::Range;

/// Whether weights with this codec are sent as codes. The codes of a slice must equal the codes of the same rows in the whole weight, in
/// both copies, so no block may cross the end of a tile. (A tensor scale follows from the largest magnitude of all slices, which is exact.)
pub(super) fn travel(codec: Codec) -> bool {
    TILE.is_multiple_of(codec.format().spec().block)
}

/// The quantized rows of a weight on this rank.
#[derive(Debug)]
pub(super) struct OfRank<B: Kernels> {
    pub codec: Codec,
    /// The quantized pieces in order. The pieces' magnitudes cover all ranks' rows, and their counts cover this rank's rows.
    pieces: Vec<Emitted<B>>,
    /// Under delayed scales: the largest magnitude of each matrix, over the rows of all ranks.
    found_amax: Option<B::Buf<f32>>,
}

impl<B: Kernels> OfRank<B> {
    /// Quantizes this rank's rows of the master. `delayed` contains the delayed scales of all matrices. If one scale covers a whole tensor,
    /// `amax` contains the tensor's largest magnitude, as computed by [`largest`].
    pub fn new(
        b: &B,
        (slices, master): (&Slices, &Tensor<B>),
        codec: Codec,
        delayed: Option<Delayed<'_, B>>,
        amax: Option<B::Buf<f32>>,
    ) -> Result<Self> {
        let quantize = |(piece, rows): (Piece, Range<usize>)| {
            let (x, stack) = (rows_of(b, master, rows)?, piece.matrices);
            let of_piece = amax.as_ref().map(|amax| {
                if stack == B::len(amax) {
                    return Ok(amax.clone());
                }
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
        Ok(Self { codec, pieces, found_amax: amax.filter(|_| delayed.is_some()) })
    }

    /// Saves the quantization counts and the largest magnitudes of these rows for the step's record.
    pub fn keep_counts(&self, cx: &Cx<'_, B>, name: &str, cells: Option<FoundCells>) -> Result<()> {
        // This rank's values count, because no other rank has these rows.
        let cells = cells.map(|cells| FoundCells { is_counted: true, ..cells });
        self.counted(cx.b)?.iter().for_each(|made| cx.keep_quantized(name, OF_FPROP, made, cells));
        Ok(())
    }

    /// The counts and magnitudes of the pieces. A rank without rows has zero counts, because all ranks count at the same sites.
    fn counted(&self, b: &B) -> Result<Vec<Emitted<B>>> {
        if !self.pieces.is_empty() {
            return Ok(self.pieces.clone());
        }
        let found = |amax| Ok::<_, Error>(Found { amax, counts: b.counters(2)? });
        let found = self.found_amax.clone().map(found).transpose()?;
        Ok(vec![Emitted { rows: None, cols: None, counts: Some(Counts::zeros(b)?), found }])
    }

    /// The copies that write the codes into the bytes that this rank sends, starting at byte `at`. Adds the buffers that these copies read
    /// to `from`.
    pub fn pack(
        &self,
        b: &B,
        packed: &PackedRows,
        mut at: usize,
        from: &mut Vec<B::Buf<u8>>,
    ) -> Result<Vec<LineCopy>> {
        let mut copies = Vec::new();
        for (plane, piece, bytes) in packed.mine() {
            let made = self.pieces.get(piece).map(|made| if plane < PARTS { &made.rows } else { &made.cols });
            let missing = || Error::shape("prepare", "planes", "one", "both");
            let copy = made.and_then(Option::as_ref).ok_or_else(missing)?;
            if bytes > 0 {
                copies.push(LineCopy::line((from.len(), 0), (0, at), bytes));
                from.push(part(b, copy.block("prepare")?, plane % PARTS)?);
            }
            at += bytes;
        }
        Ok(copies)
    }
}

/// Assembles the whole weight from the received rows of all ranks. The result is the weight itself and, if `is_twice` is true, its
/// transpose.
pub(super) fn unpacked<B: Kernels>(
    b: &B,
    packed: &PackedRows,
    (codec, is_twice): (Codec, bool),
    (came, starts): (&B::Buf<u8>, &[usize]),
) -> Result<(Operand<B>, Option<Operand<B>>)> {
    let slices = packed.slices();
    let sizes = (slices.num_rows(), slices.cols(), slices.stack());
    let mut whole = weight_planes(b, (codec.format(), codec.rule()), sizes)?.to_vec();
    // Without a backward pass, the transposed copy is not needed.
    whole.truncate(if is_twice { 2 } else { 1 });
    // The buffers are moved out of `whole` for the writes, because a buffer with two handles would be copied.
    let (mut to, mut copies) = (Vec::new(), Vec::new());
    for (copy, whole) in whole.iter_mut().enumerate() {
        let nothing = || b.alloc(0);
        let mut parts = vec![
            std::mem::replace(&mut whole.codes, nothing()?),
            std::mem::replace(&mut whole.scales, nothing()?),
        ];
        if let Some(of_rows) = whole.tensor_scale.take() {
            parts.push(b.reinterpret(&of_rows)?);
        }
        for (number, part) in parts.into_iter().enumerate() {
            copies.extend(packed.unpack(starts, copy * PARTS + number, to.len()));
            to.push(part);
        }
    }
    b.copy_many(std::slice::from_ref(came), &mut to, &copies)?;
    let each = to.len() / whole.len().max(1);
    let mut written = to.into_iter();
    for whole in &mut whole {
        let mut parts = written.by_ref().take(each);
        let missing = || Error::Defect { place: "prepare", what: "a copy of a weight lacks a plane" };
        whole.codes = parts.next().ok_or_else(missing)?;
        whole.scales = parts.next().ok_or_else(missing)?;
        whole.tensor_scale = parts.next().map(|bytes| b.reinterpret(&bytes)).transpose()?;
    }
    let mut whole = whole.into_iter().map(Operand::Block);
    let w = whole.next().ok_or_else(|| Error::shape("prepare", "planes", "none", "one or both"))?;
    Ok((w, whole.next()))
}

/// This rank's pieces, and the rows of each piece within the slice.
fn own_pieces(slices: &Slices) -> impl Iterator<Item = (Piece, Range<usize>)> {
    let mut at = 0;
    slices.pieces(slices.rank()).into_iter().map(move |piece| {
        let rows = at..at + piece.matrices * piece.rows.len();
        at = rows.end;
        (piece, rows)
    })
}

/// The largest magnitude of each matrix over all ranks' rows, which is the same on every rank. The weights must have one codec, and share
/// one all-gather.
pub(super) fn largest<B: Kernels>(
    b: &B,
    replicas: &dyn Comm<B>,
    codec: Codec,
    weights: &[(&Slices, &Tensor<B>)],
) -> Result<Vec<B::Buf<f32>>> {
    let all: usize = weights.iter().map(|(slices, _)| slices.stack()).sum();
    // The magnitude stays 0 for a matrix of which this rank has no rows.
    let (mut mine, mut at) = (b.zeros(all)?, 0);
    for (slices, master) in weights {
        for (piece, rows) in own_pieces(slices) {
            let x = rows_of(b, master, rows)?;
            let amax = MeasureAmax { x: &x, codec, stack: piece.matrices }.run(b)?;
            b.copy(&amax, 0..piece.matrices, &mut mine, at + piece.first)?;
        }
        at += slices.stack();
    }
    // The magnitudes `[ranks, matrices]` are transposed, so that the magnitudes of each matrix form one row.
    let of_ranks = Tensor::new(Data::F32(replicas.all_gather(b, &mine)?), replicas.world(), all)?;
    let of_matrices = Transpose { x: &of_ranks, stack: 1 }.run(b)?;
    let amax = MeasureAmax { x: &of_matrices, codec, stack: all }.run(b)?;
    let mut at = 0;
    let of_weight = |(slices, _): &(&Slices, &Tensor<B>)| {
        let mut of_weight = b.alloc(slices.stack())?;
        b.copy(&amax, at..at + slices.stack(), &mut of_weight, 0)?;
        at += slices.stack();
        Ok(of_weight)
    };
    weights.iter().map(of_weight).collect()
}

/// Some rows of a tensor. If these are all rows, the result shares the tensor's buffer.
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

/// The bytes of one buffer: codes, scales, or tensor scales.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::param::shipment::{Cargo, Rows, Shipment, Whole};
    use nibble_core::Backend;
    use nibble_core::formats::{Format, Purpose, Rounding, Stream};
    use nibble_cpu::{Cpu, HostComm};

    /// Numbers of rows and columns of each matrix, and number of matrices.
    type Shape = (usize, usize, usize);

    /// The bits of a weight's copies, and the counts and magnitudes of their quantization.
    #[derive(Debug, PartialEq)]
    struct Made {
        /// Codes, scales and tensor scales of both copies.
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

    /// Normally distributed numbers. One matrix in four is zero, and unless `is_finite`, the last row of some matrices contains a NaN or an
    /// infinity.
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

    /// Delayed scales in which every second matrix expects a magnitude that some values exceed.
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
        let cpu = Cpu::new(1).unwrap();
        let comm: &dyn Comm<Cpu> = comm;
        let slices = Slices::new("w", (rows, cols), stack, (comm.rank(), comm.world()));
        let mine = slices.mine();
        let values = &all[mine.start * cols..mine.end * cols];
        let master = Tensor::from_f32(&cpu, values, mine.len(), cols).unwrap();
        let records = is_delayed.then(|| records(&cpu, stack));
        // Two weights are sent together, as the weights of a layer are.
        let weights = [(&slices, &master), (&slices, &master)];
        let amax =
            codec.scale_kind().has_tensor_scale().then(|| largest(&cpu, comm, codec, &weights).unwrap());
        let delayed = delayed(records.as_ref());
        let of_rank = |number: usize| {
            let amax = amax.as_ref().map(|amax| amax[number].clone());
            OfRank::new(&cpu, weights[number], codec, delayed, amax).unwrap()
        };
        let counted = of_rank(1).counted(&cpu).unwrap();
        let of = |rows| Cargo { slices: slices.clone(), rows };
        let cargo =
            vec![of(Rows::Plain(master.clone())), of(Rows::Codes(of_rank(0))), of(Rows::Codes(of_rank(1)))];
        let whole = Shipment::begin(&cpu, comm, true, cargo).unwrap().wait(&cpu).unwrap();
        let Ok([Whole::Plain(plain), Whole::Codes(w0, wt0), Whole::Codes(w, wt)]) = <[_; 3]>::try_from(whole)
        else {
            panic!("what was sent comes")
        };
        assert_eq!(bits(&plain.to_f32_vec(&cpu).unwrap()), bits(all));
        assert_eq!(Made::of(&[Some(w0), wt0], &counted), Made::of(&[Some(w.clone()), wt.clone()], &counted));
        Made::of(&[Some(w), wt], &counted)
    }

    /// Tests slices that end within matrices, and ranks without any rows.
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
