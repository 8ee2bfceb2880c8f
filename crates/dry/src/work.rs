//! The bytes that operations must move and the flops that they must compute, derived from shapes alone.

use crate::Dry;
use crate::memory::Buf;
use nibble_core::formats::{Format, ScaleKind};
use nibble_core::ops::*;
use nibble_core::{BlockScaled, Groups, Operand, PermuteMap, Plain, Result, Tensor, for_each_result};
use std::ops::{Add, AddAssign};

/// An issued operation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Call {
    /// The operation's name, such as `gemm`: the method of `Kernels`. An operation that another operation calls counts as part of the
    /// caller.
    pub op: &'static str,
    /// The minimum work of the operation.
    pub work: Work,
}

/// The minimum work of an operation on any backend: every operand is read once, every result is written once, and every product is
/// computed.
///
/// Scales count together with their codes; index lists with an entry per row also count. Group starts and conversion counters are too small
/// to count. A gradient that is accumulated in place is both read and written.
///
/// Only those rows of a ragged tensor that belong to a group count: tokens · `top_k` behind a router. Padding does not count, even if an
/// operation guarantees zeros there. A matrix with column blocks counts with the same fraction of its bytes. An expert's weights always
/// count, even if no row was routed to the expert.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Flops of GEMMs and attention, two per multiply-add; elementwise work is not counted.
    pub flops: Flops,
}

/// Flops, classified by the wider type of the two operands.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Flops {
    /// Flops of F32 with F32 or BF16 operands.
    pub f32: f64,
    /// Flops of BF16 operands.
    pub bf16: f64,
    /// Flops of operands in block formats, including MXFP4, because tensor cores without FP4 multiply MXFP4 as E4M3.
    pub fp8: f64,
}

impl Flops {
    /// `flops` of a GEMM with operands of these two types.
    pub(crate) fn of((a, b): (Format, Format), flops: f64) -> Self {
        let none = Self::default();
        match (a, b) {
            (Format::F32, _) | (_, Format::F32) => Self { f32: flops, ..none },
            (Format::Bf16, _) | (_, Format::Bf16) => Self { bf16: flops, ..none },
            _ => Self { fp8: flops, ..none },
        }
    }

    /// The sum of flops over all types.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.f32 + self.bf16 + self.fp8
    }
}

impl Add for Flops {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { f32: self.f32 + other.f32, bf16: self.bf16 + other.bf16, fp8: self.fp8 + other.fp8 }
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.read += other.read;
        self.written += other.written;
        self.flops = self.flops + other.flops;
    }
}

impl Work {
    /// Work that reads all bytes of these operands.
    pub(crate) fn reads(operands: &[&dyn Bytes]) -> Self {
        Self::default().and_reads(None, operands)
    }

    /// Work that reads `rows` rows of each operand.
    pub(crate) fn reads_rows(rows: Option<usize>, operands: &[&dyn Bytes]) -> Self {
        Self::default().and_reads(rows, operands)
    }

    /// Adds reads of `rows` rows of each operand; `None` means all rows.
    pub(crate) fn and_reads(mut self, rows: Option<usize>, operands: &[&dyn Bytes]) -> Self {
        self.read += operands.iter().map(|x| x.bytes_of(rows)).sum::<u64>();
        self
    }

    /// Adds in-place writes of `rows` rows of each operand.
    pub(crate) fn writes(mut self, rows: Option<usize>, operands: &[&dyn Bytes]) -> Self {
        self.written += operands.iter().map(|x| x.bytes_of(rows)).sum::<u64>();
        self
    }

    /// Adds a GEMM of matrices of these types: 2 · m · n · k flops.
    pub(crate) fn multiplies(mut self, types: (Format, Format), [m, n, k]: [usize; 3]) -> Self {
        self.flops = self.flops + Flops::of(types, 2.0 * m as f64 * n as f64 * k as f64);
        self
    }
}

/// Tensors and buffers whose bytes count.
pub(crate) trait Bytes {
    /// Bytes of `rows` rows; `None` means all rows. The count is limited to the rows that exist.
    fn bytes_of(&self, rows: Option<usize>) -> u64;
}

/// The bytes of `rows` of `all` rows, as a proportion of `bytes`.
fn share(bytes: usize, rows: Option<usize>, all: usize) -> u64 {
    match rows {
        // The result is at most `bytes`.
        Some(rows) if rows < all => (bytes as u128 * rows as u128 / all as u128) as u64,
        _ => bytes as u64,
    }
}

impl<T: Plain> Bytes for Buf<T> {
    fn bytes_of(&self, rows: Option<usize>) -> u64 {
        share(self.len() * size_of::<T>(), rows, self.len())
    }
}

impl Bytes for Tensor<Dry> {
    fn bytes_of(&self, rows: Option<usize>) -> u64 {
        share(self.bytes(), rows, self.rows)
    }
}

impl Bytes for BlockScaled<Dry> {
    /// Bytes by format, without the padding of a layout.
    fn bytes_of(&self, rows: Option<usize>) -> u64 {
        let Self { axis, rows: all, cols, stack, .. } = *self;
        let of = |format, kind: ScaleKind| Self::num_scales(format, axis, all, cols, stack) * kind.bytes();
        let scales = match self.taken {
            Taken::AsIs => of(self.format, self.scale_kind()),
            Taken::Lifted => of(Format::LIFTED.0, Format::LIFTED.0.scale_kind(Format::LIFTED.1)),
            // No GEMM reads the scales of decoded operands.
            Taken::Decoded => 0,
        };
        let tensor_scale = self.tensor_scale.as_ref().map_or(0, |s| size_of::<f32>() * s.len());
        share(self.codes.len() + scales + tensor_scale, rows, self.rows)
    }
}

impl Bytes for Operand<Dry> {
    fn bytes_of(&self, rows: Option<usize>) -> u64 {
        match self {
            Self::Plain(x) => x.bytes_of(rows),
            Self::Block(x) => x.bytes_of(rows),
        }
    }
}

impl Bytes for EntrySource<'_, Dry> {
    fn bytes_of(&self, rows: Option<usize>) -> u64 {
        match self {
            Self::U64(x) => x.bytes_of(rows),
            Self::I32(x) => x.bytes_of(rows),
            Self::F32(x) => x.bytes_of(rows),
            Self::F64(x) => x.bytes_of(rows),
            Self::Largest(x) => x.bytes_of(rows),
            Self::Occupancy(x) => x.found.bytes_of(rows),
        }
    }
}

impl<X: Bytes> Bytes for Option<X> {
    fn bytes_of(&self, rows: Option<usize>) -> u64 {
        self.as_ref().map_or(0, |x| x.bytes_of(rows))
    }
}

impl<X: Bytes + ?Sized> Bytes for &X {
    fn bytes_of(&self, rows: Option<usize>) -> u64 {
        (**self).bytes_of(rows)
    }
}

impl Bytes for () {
    fn bytes_of(&self, _: Option<usize>) -> u64 {
        0
    }
}

/// Handles one field of a result, by its kind in the list of results; counters are too small to count.
macro_rules! part {
    (counts, $x:expr, $rows:ident) => {
        0
    };
    (counter, $x:expr, $rows:ident) => {
        0
    };
    (plain, $x:expr, $rows:ident) => {
        0
    };
    ($kind:ident $(($of:ident))?, $x:expr, $rows:ident) => {
        $x.bytes_of($rows)
    };
}

macro_rules! results {
    ($($out:ident { $($name:ident: $kind:ident $(($of:ident))?),+ })+) => {
        $(impl Bytes for $out<Dry> {
            #[allow(unused_variables)] // unused if a result has only counters
            fn bytes_of(&self, rows: Option<usize>) -> u64 {
                0 $(+ part!($kind $(($of))?, self.$name, rows))+
            }
        })+
    };
}

for_each_result! { [results] }

impl Bytes for Positions<Dry> {
    fn bytes_of(&self, rows: Option<usize>) -> u64 {
        self.starts.bytes_of(rows)
    }
}

/// The bytes are too few to count: see [`Work`].
impl Bytes for Groups<Dry> {
    fn bytes_of(&self, _: Option<usize>) -> u64 {
        0
    }
}

impl Bytes for PermuteMap<Dry> {
    fn bytes_of(&self, _: Option<usize>) -> u64 {
        let rows = Some(self.num_slots);
        let of_rows: [&dyn Bytes; 3] = [&self.groups.row_id, &self.source_row, &self.row_slot];
        of_rows.iter().map(|x| x.bytes_of(rows)).sum::<u64>() + self.slot_row.bytes_of(None)
    }
}

/// Number of rows that belong to a group, if it is known: for shards, and for groups from [`PlanPermute`].
pub(crate) fn rows_of(groups: &Groups<Dry>) -> Option<usize> {
    match groups.rows_each {
        Some(each) => Some(each * groups.num_groups),
        None => groups.len.known().map(|lengths| lengths.iter().map(|&len| len as usize).sum()),
    }
}

impl Dry {
    /// Runs `work` and returns the operations that it issued, in order, with the minimum work of each.
    ///
    /// # Errors
    /// The error of `work`. If calls are nested, the outer call does not get the operations of the inner call.
    pub fn counted<R, E>(&self, work: impl FnOnce() -> Result<R, E>) -> Result<(R, Vec<Call>), E> {
        self.inner.calls.collect(work)
    }
}
