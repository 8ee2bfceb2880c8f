//! A question that every rank asks itself, and one answer for all.

use crate::error::Result;
use nibble_core::{Comm, Kernels};

/// Whether it is so on any rank.
pub(super) fn any_rank<B: Kernels>(b: &B, comm: &dyn Comm<B>, here: bool) -> Result<bool> {
    if comm.world() == 1 {
        return Ok(here);
    }
    let all = comm.all_gather(b, &b.upload(&[f32::from(u8::from(here))])?)?;
    let all = b.download(&all)?;
    comm.check()?;
    Ok(all.contains(&1.0))
}
