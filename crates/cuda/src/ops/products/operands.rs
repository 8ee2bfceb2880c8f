//! Shared code of the GEMM kernels: how operands, scales and groups are passed, and the types of D.

use crate::{Buffer, Cuda, Device};
use half::bf16;
use nibble_core::formats::layout::mn_major_stride;
use nibble_core::formats::{BlockAxis, Element, ScaleKind, ScaleLayout, WHOLE_LINE};
use nibble_core::ops::{Ragged, Stored};
use nibble_core::{BlockScaled, DType, Data, Error, Groups, Operand, Plain, Result, Tensor};
use std::fmt;

/// How an operand's values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// Plain values of this type.
    Plain(DType),
    /// One-byte codes of this element.
    Codes(Element),
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => write!(f, "{dtype}"),
            Self::Codes(element) => write!(f, "codes of {element}"),
        }
    }
}

/// An operand as the GEMM kernels read it: its values and their scales.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    pub(super) values: Values,
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) device: &'a Device,
    /// The scales of the operand's blocks.
    pub(super) scales: Option<StridedScales<'a>>,
    /// The tensor scale of each row of the matrix.
    pub(super) tensor_scale: Option<&'a Buffer<f32>>,
}

impl<'a> Matrix<'a> {
    fn new<T: Plain>(values: Values, buffer: &'a Buffer<T>) -> Self {
        let (address, len, device) = (buffer.address(), buffer.len(), buffer.device());
        Self { values, address, len, device, scales: None, tensor_scale: None }
    }

    /// An operand of F32 values `[rows][k]`; with [`Ragged::Contraction`], `[k][rows]`.
    pub fn f32(values: &'a Buffer<f32>) -> Self {
        Self::new(Values::Plain(DType::F32), values)
    }

    /// An operand of BF16 values, with the shape of [`Matrix::f32`].
    pub fn bf16(values: &'a Buffer<bf16>) -> Self {
        Self::new(Values::Plain(DType::Bf16), values)
    }

    /// An operand of FP8 codes `[rows][k]` and their scales.
    pub fn codes(element: Element, codes: &'a Buffer<u8>, scales: StridedScales<'a>) -> Self {
        Self { scales: Some(scales), ..Self::new(Values::Codes(element), codes) }
    }

    /// Adds the operand's tensor scales, one per row of the matrix, if there are any.
    #[must_use]
    pub fn times(self, tensor_scale: Option<&'a Buffer<f32>>) -> Self {
        Self { tensor_scale, ..self }
    }

    /// Takes an operand that was converted for the GEMM.
    pub(super) fn of(op: &'static str, x: &'a Operand<Cuda>) -> Result<Self> {
        match x {
            Operand::Plain(Tensor { data: Data::F32(values), .. }) => Ok(Self::f32(values.get())),
            Operand::Plain(Tensor { data: Data::Bf16(values), .. }) => Ok(Self::bf16(values.get())),
            Operand::Block(q) => {
                let why = "it is to be decoded first";
                let element = Stored::block(q).fp8().ok_or_else(|| Error::unsupported(op, q.format, why))?;
                Ok(Self::codes(element, q.codes.get(), scales(op, q)?))
            }
        }
    }
}

/// The layout of a quantized operand's scales.
fn scales<'a>(op: &'static str, q: &'a BlockScaled<Cuda>) -> Result<StridedScales<'a>> {
    if let Some(of_rows) = &q.tensor_scale {
        // There is one scale per row of the matrix. Row codes share a scale within a row. Column codes share a scale within a
        // block, because a block ends where its group ends.
        let values = ScaleValues::f32(of_rows.get());
        return Ok(match q.axis {
            BlockAxis::Col => StridedScales { values, row_stride: 0, block_stride: q.format.spec().block },
            BlockAxis::Row | BlockAxis::Tile => StridedScales { values, row_stride: 1, block_stride: 0 },
        });
    }
    let (values, bytes) = (ScaleValues::of(q.scale_kind(), q.scales.get()), q.scale_kind().bytes());
    let (rows, blocks) = q.shape_of_scales();
    if q.format.record_len(q.axis) == WHOLE_LINE {
        return Ok(StridedScales { values, row_stride: 1, block_stride: 0 });
    }
    match q.scale_layout {
        ScaleLayout::RowMajor => Ok(StridedScales::row_major(values, blocks)),
        ScaleLayout::MnMajor => {
            Ok(StridedScales { values, row_stride: 1, block_stride: mn_major_stride(rows, bytes) })
        }
        layout => Err(Error::unsupported(
            op,
            q.format,
            format!("its scales are {layout}; row-major or mn-major here"),
        )),
    }
}

/// The name of [`Ragged`] on the device.
pub(super) const fn ragged_name(ragged: Ragged) -> &'static str {
    match ragged {
        Ragged::Rows => "nib::Ragged::kRows",
        Ragged::Contraction => "nib::Ragged::kContraction",
    }
}

/// The values of a matrix of scales, which are F32 or powers of two (E8M0).
#[derive(Debug, Clone, Copy)]
pub struct ScaleValues<'a> {
    address: u64,
    len: usize,
    device: &'a Device,
    is_f32: bool,
}

impl<'a> ScaleValues<'a> {
    /// F32 scales.
    pub fn f32(values: &'a Buffer<f32>) -> Self {
        Self { address: values.address(), len: values.len(), device: values.device(), is_f32: true }
    }

    /// E8M0 scales.
    pub fn e8m0(values: &'a Buffer<u8>) -> Self {
        Self { address: values.address(), len: values.len(), device: values.device(), is_f32: false }
    }

    /// A buffer of scales of this kind, which is F32 or E8M0.
    pub(super) fn of(kind: ScaleKind, plane: &'a Buffer<u8>) -> Self {
        let is_f32 = kind == ScaleKind::F32;
        Self { len: plane.len() / kind.bytes().max(1), is_f32, ..Self::e8m0(plane) }
    }

    /// Whether the scales are F32.
    pub(super) const fn is_f32(&self) -> bool {
        self.is_f32
    }
}

/// A matrix of scales: the scale of a row and a block along the contraction is at `row · row_stride + block ·
/// block_stride`.
#[derive(Debug, Clone, Copy)]
pub struct StridedScales<'a> {
    /// The buffer of scales.
    pub values: ScaleValues<'a>,
    /// Number of scales from one row to the next.
    pub row_stride: usize,
    /// Number of scales from one block along the contraction to the next.
    pub block_stride: usize,
}

impl<'a> StridedScales<'a> {
    /// Dense scales `[rows][blocks]`.
    pub const fn row_major(values: ScaleValues<'a>, blocks: usize) -> Self {
        Self { values, row_stride: blocks, block_stride: 1 }
    }

    fn len(&self) -> usize {
        self.values.len
    }

    pub(crate) fn device(&self) -> &'a Device {
        self.values.device
    }

    /// Checks that the buffer contains the scales of these rows and blocks.
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

/// Mirrors the device struct `Scales`.
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
    /// Stands for a plain operand, which has no scales.
    pub(crate) const NONE: Self = Self { values: 0, row_stride: 0, block_stride: 0, is_f32: 0, pad: 0 };
}

/// Mirrors the device struct `Groups`.
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
    /// The sizes were already checked to fit.
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

/// D on the device, borrowed mutably. D is overwritten, or added to with one F32 addition per element, which a BF16 D
/// rounds once.
#[derive(Debug)]
pub struct Target<'a> {
    pub(super) dtype: DType,
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) device: &'a Device,
    pub(super) accumulate: bool,
}

impl<'a> Target<'a> {
    fn new<T: Plain>(dtype: DType, values: &'a mut Buffer<T>, accumulate: bool) -> Self {
        let values: &'a Buffer<T> = values;
        Self { dtype, address: values.address(), len: values.len(), device: values.device(), accumulate }
    }

    /// A D of F32 values.
    pub fn f32(values: &'a mut Buffer<f32>, accumulate: bool) -> Self {
        Self::new(DType::F32, values, accumulate)
    }

    /// A D of BF16 values.
    pub fn bf16(values: &'a mut Buffer<bf16>, accumulate: bool) -> Self {
        Self::new(DType::Bf16, values, accumulate)
    }

    /// A tensor that has no other handle, or a caller's part of a tensor, as D.
    pub(crate) fn of(d: &'a mut Tensor<Cuda>, accumulate: bool) -> Self {
        match &mut d.data {
            Data::F32(values) => Self::f32(values.in_place(), accumulate),
            Data::Bf16(values) => Self::bf16(values.in_place(), accumulate),
        }
    }
}

/// The starts and lengths of groups, on the device.
#[derive(Debug, Clone, Copy)]
pub struct GroupBuffers<'a> {
    /// The first row of each group, and the end of the last group's padding; all are multiples of
    /// 128.
    pub start: &'a Buffer<i32>,
    /// The number of rows of each group.
    pub len: &'a Buffer<i32>,
}

impl<'a> GroupBuffers<'a> {
    /// The starts and lengths of these groups.
    pub(super) fn of(groups: &'a Groups<Cuda>) -> Self {
        Self { start: groups.start.get(), len: groups.len.get() }
    }
}

/// Returns an error that names the argument unless both buffers are on one device.
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
