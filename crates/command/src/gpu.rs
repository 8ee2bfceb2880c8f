//! The GPU of a command that needs one.

use crate::error::{Error, Result};
use nibble_cuda::{Cuda, probe};

/// Opens the first GPU that supports the kernels, if they can be compiled.
///
/// # Errors
/// A usage error that says what was found, if there is no such GPU; `otherwise` says what to do without one.
pub fn open(otherwise: &str) -> Result<Cuda> {
    match probe().usable().next().filter(|_| probe().nvrtc.is_ok()) {
        Some(gpu) => Ok(Cuda::new(gpu.ordinal)?),
        None => Err(Error::usage(format!(
            "this needs a Hopper GPU, and there is none to use here; {otherwise}\n{}",
            probe()
        ))),
    }
}
