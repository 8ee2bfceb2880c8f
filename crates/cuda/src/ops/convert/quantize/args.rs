//! Host-side arguments of the `quantize` kernels.

use super::config::{OP, QuantizeDesc, QuantizePath, RowScales, transpose_ctas, transpose_spec};
use crate::launch::{Divider, HadamardArg, KernelArg, Launch, plain_args};
use crate::ops::planes::{plain_address, plain_arg};
use crate::{Buffer, Cuda, Device};
use nibble_core::formats::ScaleKind;
use nibble_core::ops::{Emitted, Found, Hadamard, Quantize};
use nibble_core::{BlockScaled, DType, Error, Operand, Result};

/// The matrix and its groups, as kernel arguments.
#[derive(Clone, Copy)]
pub(super) struct MatrixArgs<'a> {
    pub(super) x: &'a dyn KernelArg,
    pub(super) address: u64,
    pub(super) row_id: Option<&'a Buffer<i32>>,
    pub(super) start: Option<&'a Buffer<i32>>,
    pub(super) num_groups: i32,
    /// A row is valid if the id at `row & id_mask` is not negative.
    pub(super) id_mask: i32,
    /// The transform that the kernels apply as they read the matrix.
    pub(super) transform: Option<Transform>,
}

/// Mirrors the device struct `TransformArg` (csrc/pieces/convert/transformed_columns.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TransformArg {
    pub(super) start: u64,
    pub(super) num_groups: i32,
    pub(super) rows: i32,
    pub(super) hadamard: HadamardArg,
}
plain_args!(TransformArg);

impl TransformArg {
    /// Stands for no transform.
    pub(super) const NONE: Self = Self { start: 0, num_groups: 0, rows: 0, hadamard: HadamardArg::NONE };

    pub(super) fn new(
        source: &MatrixArgs<'_>,
        desc: &QuantizeDesc,
        transform: &Hadamard<'_, Cuda>,
    ) -> Result<Self> {
        let hadamard = HadamardArg::new(transform)?;
        let start = source.start.map_or(0, Buffer::address);
        Ok(Self { start, num_groups: source.num_groups, rows: desc.rows as i32, hadamard })
    }
}

/// A transform of a matrix with elements of type `input`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transform {
    pub(super) arg: TransformArg,
    pub(super) input: DType,
}

impl<'a> MatrixArgs<'a> {
    pub(super) fn of(op: &Quantize<'a, Cuda>) -> Self {
        Self {
            x: plain_arg(op.x).0,
            address: plain_address(op.x),
            row_id: op.groups.map(|groups| groups.row_id.get()),
            start: op.groups.map(|groups| groups.start.get()),
            num_groups: op.groups.map_or(0, |groups| groups.num_groups as i32),
            id_mask: -1,
            transform: None,
        }
    }
}

/// Mirrors the device struct `FoldedRows` (csrc/pieces/convert/row_quantizer.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct FoldedRows {
    row_id: u64,
    by_cols: Divider,
    cols: u32,
    pad: u32,
}
plain_args!(FoldedRows);

impl FoldedRows {
    /// Describes rows of `cols` columns. Without ids, the rows are not folded into one row, or all
    /// of them are valid.
    pub(super) fn of(row_id: Option<&Buffer<i32>>, cols: usize) -> Self {
        let row_id = row_id.map_or(0, Buffer::address);
        Self { row_id, by_cols: Divider::by(cols as u32), cols: cols as u32, pad: 0 }
    }
}

/// The outputs of a launch.
pub(super) struct Planned<'a> {
    pub(super) rows: Option<&'a BlockScaled<Cuda>>,
    pub(super) cols: Option<&'a BlockScaled<Cuda>>,
    pub(super) counts: &'a Buffer<u64>,
    /// The magnitudes that were found, under delayed scales (computed in earlier steps).
    pub(super) found: Option<&'a Found<Cuda>>,
}

impl<'a> Planned<'a> {
    pub(super) fn of(made: &'a Emitted<Cuda>) -> Result<Self> {
        let block =
            |plane: &'a Option<Operand<Cuda>>| plane.as_ref().map(|plane| plane.block(OP)).transpose();
        let counts = made.counts.as_ref().ok_or_else(|| Error::shape(OP, "counts", "none", "three"))?;
        let (rows, cols) = (block(&made.rows)?, block(&made.cols)?);
        Ok(Self { rows, cols, counts: counts.0.get(), found: made.found.as_ref() })
    }
}

/// Row scales in the order in which a kernel writes them, in which the scales of adjacent rows are
/// contiguous.
pub(super) struct ByBlock {
    pub(super) plane: RowScales,
    pub(super) scales: Buffer<u8>,
}

impl ByBlock {
    /// Allocates a buffer if the path writes row scales block by block.
    pub(super) fn new(device: &Device, path: &QuantizePath) -> Result<Option<Self>> {
        let new = |plane: RowScales| Ok(Self { plane, scales: device.alloc(plane.total_bytes())? });
        path.row_scales().map(new).transpose()
    }

    /// Transposes the scales into their final order.
    pub(super) fn transpose(
        &self,
        device: &Device,
        kind: ScaleKind,
        row_scales: &dyn KernelArg,
    ) -> Result<()> {
        let RowScales { lines, blocks, stride, .. } = self.plane;
        let [lines, blocks, stride] = [lines, blocks, stride].map(|value| value as i32);
        let launch =
            Launch { ctas: transpose_ctas(&self.plane) as u32, threads: 256, cluster: 1, shared_bytes: 0 };
        // SAFETY: both buffers have the lengths that follow from the same sizes, nothing else writes them, and the CTAs cover them.
        // The kernel waits for earlier kernels before its first load.
        unsafe {
            device
                .kernel(&transpose_spec(kind))?
                .launch_early(launch, &[&self.scales, row_scales, &lines, &blocks, &stride])
        }
    }
}
