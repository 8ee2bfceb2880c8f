//! Positions of rows, as kernels with rotary embeddings take them.

use crate::Cuda;
use crate::launch::{Divider, plain_args};
use crate::ops::buffer_check::BufferCheck;
use nibble_core::ops::Positions;
use nibble_core::{Result, Tensor};

/// Mirrors the device struct `Positions` (`csrc/pieces/norm/turn.cuh`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PositionsArg {
    starts: u64,
    seq_len: u32,
    by_seq_len: Divider,
    unused: u32,
}
plain_args!(PositionsArg);

impl PositionsArg {
    /// The argument for checked positions of fewer than 2^31 rows.
    pub(in crate::ops) fn new(
        buffers: &BufferCheck<'_>,
        positions: &Positions<Cuda>,
        rows: usize,
    ) -> Result<Self> {
        let starts = positions.starts.as_ref().map(|starts| buffers.values("starts", starts, rows));
        let starts = starts.transpose()?.map_or(0, |starts| starts.address());
        let seq_len = positions.seq_len as u32;
        Ok(Self { starts, seq_len, by_seq_len: Divider::by(seq_len), unused: 0 })
    }
}

/// The address of the first position's angles in the table; the operation is already checked.
pub(crate) fn angles(op: &'static str, table: &Tensor<Cuda>, positions: &Positions<Cuda>) -> Result<u64> {
    let before = positions.first * table.cols * size_of::<f32>();
    Ok(table.f32(op, "table")?.get().address() + before as u64)
}
