//! The CPU code of [`MeasureLift`], which lifts row by row and keeps only the counts.

use crate::ops::convert::transcode::count_lift;
use crate::{Buf, Cpu};
use nibble_core::Result;
use nibble_core::ops::MeasureLift;

/// Counts what the lift of an operand changes; see [`MeasureLift`].
pub(crate) fn measure_lift(cpu: &Cpu, op: MeasureLift<'_, Cpu>) -> Result<Buf<u64>> {
    let mut counts = op.result(cpu)?;
    let row_id = op.groups.map(|groups| groups.row_id.as_slice());
    let matrices = op.has_squares().then_some(op.stack);
    let found = count_lift(cpu, op.x, matrices, |row| row_id.is_none_or(|ids| ids[row] >= 0))?;
    counts.as_mut_slice().copy_from_slice(&found);
    Ok(counts)
}
