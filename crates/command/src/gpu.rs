//! Opens the GPU for a command that needs a GPU.

use crate::error::{Error, Result};
use nibble_cuda::{Cuda, probe};

/// Opens the first GPU that supports the kernels, after checking that kernels can be compiled.
///
/// # Errors
/// Returns a usage error if there is no such GPU; the error says what was found. `otherwise` says what to do without a GPU.
pub fn open(otherwise: &str) -> Result<Cuda> {
    match probe().usable().next().filter(|_| probe().nvrtc.is_ok()) {
        Some(gpu) => Ok(Cuda::new(gpu.ordinal)?),
        None => Err(Error::usage(format!(
            "this needs a Hopper GPU, and there is none to use here; {otherwise}\n{}",
            probe()
        ))),
    }
}
