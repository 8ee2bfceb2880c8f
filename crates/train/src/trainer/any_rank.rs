//! A question that every rank asks itself, and one answer for all.

use crate::error::Result;
use nibble_core::{Comm, Kernels};

/// Whether it is so on any rank.
pub(super) fn any_rank<B: Kernels>(b: &B, comm: &dyn Comm<B>, here: bool) -> Result<bool> {
    Ok(largest(b, comm, u8::from(here))? != 0)
}

/// The largest of the ranks' numbers.
pub(super) fn largest<B: Kernels>(b: &B, comm: &dyn Comm<B>, here: u8) -> Result<u8> {
    if comm.world() == 1 {
        return Ok(here);
    }
    let all = comm.all_gather(b, &b.upload(&[f32::from(here)])?)?;
    let all = b.download(&all)?;
    comm.check()?;
    Ok(all.into_iter().fold(0.0, f32::max) as u8)
}
