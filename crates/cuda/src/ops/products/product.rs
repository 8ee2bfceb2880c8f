//! What the products have in common: how scales and groups are passed, and what D may be.

use crate::{Buffer, Cuda, Device};
use half::bf16;
pub use nibble_choice::products::Ragged;
use nibble_core::formats::ScaleKind;
use nibble_core::{DType, Data, Error, Groups, Result, Tensor};

/// A product of two operands as the operations pass them; sizes as for [`GroupedDesc`](nibble_choice::products::GroupedDesc).
pub(crate) struct Product<'a> {
    pub op: &'static str,
    pub ragged: Ragged,
    pub groups: Option<&'a Groups<Cuda>>,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Of A's tensor and of B's, one a row, where operands were decoded without them; none where they have none, or hold them themselves.
    pub tensor_scales: [Option<&'a Buffer<f32>>; 2],
}

/// The device's name of [`Ragged`].
pub(super) const fn ragged_name(ragged: Ragged) -> &'static str {
    match ragged {
        Ragged::Rows => "nib::Ragged::kRows",
        Ragged::Contraction => "nib::Ragged::kContraction",
    }
}

/// The values of a matrix of scales: singles, or powers of two.
#[derive(Debug, Clone, Copy)]
pub struct ScaleValues<'a> {
    address: u64,
    len: usize,
    device: &'a Device,
    is_f32: bool,
}

impl<'a> ScaleValues<'a> {
    /// Singles.
    pub fn f32(values: &'a Buffer<f32>) -> Self {
        Self { address: values.address(), len: values.len(), device: values.device(), is_f32: true }
    }

    /// Powers of two.
    pub fn e8m0(values: &'a Buffer<u8>) -> Self {
        Self { address: values.address(), len: values.len(), device: values.device(), is_f32: false }
    }

    /// A plane of records of this kind, one of these two.
    pub(super) fn of(kind: ScaleKind, plane: &'a Buffer<u8>) -> Self {
        let is_f32 = kind == ScaleKind::F32;
        Self { len: plane.len() / kind.bytes().max(1), is_f32, ..Self::e8m0(plane) }
    }

    /// Whether they are singles.
    pub(super) const fn is_f32(&self) -> bool {
        self.is_f32
    }
}

/// A matrix of scales: that of (row, block of the contraction) lies at `row · row_stride + block · block_stride`.
#[derive(Debug, Clone, Copy)]
pub struct StridedScales<'a> {
    /// The plane.
    pub values: ScaleValues<'a>,
    /// Scales from one row to the next.
    pub row_stride: usize,
    /// Scales from one block of the contraction to the next.
    pub block_stride: usize,
}

impl<'a> StridedScales<'a> {
    /// `[rows][blocks]`, dense.
    pub const fn row_major(values: ScaleValues<'a>, blocks: usize) -> Self {
        Self { values, row_stride: blocks, block_stride: 1 }
    }

    fn len(&self) -> usize {
        self.values.len
    }

    pub(crate) fn device(&self) -> &'a Device {
        self.values.device
    }

    /// Whether it holds the scales of so many rows and blocks.
    pub(crate) fn check(
        &self,
        op: &'static str,
        argument: &'static str,
        rows: usize,
        blocks: usize,
    ) -> Result<()> {
        let last = (rows - 1)
            .saturating_mul(self.row_stride)
            .saturating_add((blocks - 1).saturating_mul(self.block_stride));
        if last < self.len() && last < u32::MAX as usize {
            return Ok(());
        }
        let got = format!("{} scales with strides {} and {}", self.len(), self.row_stride, self.block_stride);
        Err(Error::shape(op, argument, got, format!("{rows} x {blocks} scales")))
    }

    pub(crate) fn arg(&self) -> ScalesArg {
        ScalesArg {
            values: self.values.address,
            row_stride: self.row_stride as u32,
            block_stride: self.block_stride as u32,
            is_f32: self.values.is_f32.into(),
            pad: 0,
        }
    }
}

/// The device's `Scales`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ScalesArg {
    values: u64,
    row_stride: u32,
    block_stride: u32,
    is_f32: i32,
    pad: i32,
}

impl ScalesArg {
    /// A plain operand has none.
    pub(crate) const NONE: Self = Self { values: 0, row_stride: 0, block_stride: 0, is_f32: 0, pad: 0 };
}

/// The device's `Groups`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GroupsArg {
    start: u64,
    len: u64,
    count: i32,
    m: i32,
    n: i32,
    k: i32,
    band: i32,
    pad: i32,
}

impl GroupsArg {
    /// Sizes were checked to fit.
    pub(crate) fn new(
        groups: Option<GroupBuffers<'_>>,
        count: usize,
        [m, n, k]: [usize; 3],
        band: usize,
    ) -> Self {
        Self {
            start: groups.map_or(0, |groups| groups.start.address()),
            len: groups.map_or(0, |groups| groups.len.address()),
            count: count as i32,
            m: m as i32,
            n: n as i32,
            k: k as i32,
            band: band as i32,
            pad: 0,
        }
    }
}

crate::launch::plain_args!(ScalesArg, GroupsArg);

/// D on the device.
#[derive(Debug)]
pub enum Target<'a> {
    /// BF16, overwritten or added to.
    Bf16 {
        /// The values.
        values: &'a mut Buffer<bf16>,
        /// Add to what is there, one F32 addition an element, and round once.
        accumulate: bool,
    },
    /// F32, overwritten or added to.
    F32 {
        /// The values.
        values: &'a mut Buffer<f32>,
        /// Add to what is there, one F32 addition an element.
        accumulate: bool,
    },
}

/// Where the groups lie, on the device.
#[derive(Debug, Clone, Copy)]
pub struct GroupBuffers<'a> {
    /// First row of each group, and the end of the last one's padding: multiples of 128.
    pub start: &'a Buffer<i32>,
    /// Rows of each group.
    pub len: &'a Buffer<i32>,
}

impl<'a> Target<'a> {
    /// A tensor that nobody else has, or the caller's part of one.
    pub(crate) fn of(d: &'a mut Tensor<Cuda>, accumulate: bool) -> Self {
        match &mut d.data {
            Data::F32(values) => Target::F32 { values: values.in_place(), accumulate },
            Data::Bf16(values) => Target::Bf16 { values: values.in_place(), accumulate },
        }
    }
}

impl Target<'_> {
    /// What it is of, and whether it is added to.
    pub(crate) const fn result(&self) -> (DType, bool) {
        match self {
            Target::Bf16 { accumulate, .. } => (DType::Bf16, *accumulate),
            Target::F32 { accumulate, .. } => (DType::F32, *accumulate),
        }
    }

    pub(crate) fn device(&self) -> &Device {
        match self {
            Target::Bf16 { values, .. } => values.device(),
            Target::F32 { values, .. } => values.device(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Target::Bf16 { values, .. } => values.len(),
            Target::F32 { values, .. } => values.len(),
        }
    }
}

/// An error that names the argument, unless both are one device.
pub(crate) fn same_device(
    op: &'static str,
    argument: &'static str,
    on: &Device,
    device: &Device,
) -> Result<()> {
    if device.is_same(on) {
        return Ok(());
    }
    Err(Error::shape(op, argument, format!("on {on:?}"), format!("on {device:?}, where `a` is")))
}
