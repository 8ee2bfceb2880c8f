//! Runs `init_normal` on a GPU (`csrc/kernels/step/init_normal.cuh`).

use crate::Cuda;
use crate::compile::jit::KernelSpec;
use crate::launch::{Launch, StreamArg};
use crate::ops::Instance;
use crate::ops::planes::plain_arg;
use nibble_core::ops::InitNormal;
use nibble_core::{Result, Tensor};

const THREADS: u32 = 256;

/// Runs [`InitNormal`] on the GPU.
pub(crate) fn init_normal(cuda: &Cuda, op: InitNormal) -> Result<Tensor<Cuda>> {
    op.check()?;
    let len = op.rows * op.cols;
    let (device, out) = (cuda.device(), op.result(cuda)?);
    if len > 0 {
        let launch = launch(op.first, len as u64, device.info().num_sms);
        let kernel = device.kernel(&spec())?;
        let (stream, len) = (StreamArg::new(&op.stream), len as u64);
        // SAFETY: the kernel writes the `len` values of `out`.
        unsafe { kernel.launch(launch, &[plain_arg(&out).0, &stream, &op.first, &len, &op.std]) }?;
    }
    Ok(out)
}

/// One thread per four elements, which share a block of random bits; but at most as many CTAs as run at once.
fn launch(first: u64, len: u64, num_sms: u32) -> Launch {
    let quads = (first % 4 + len).div_ceil(4);
    let ctas = quads.div_ceil(u64::from(THREADS)).min(u64::from(32 * num_sms));
    Launch { ctas: ctas as u32, threads: THREADS, cluster: 1, shared_bytes: 0 }
}

fn spec() -> KernelSpec {
    KernelSpec { source: "kernels/step/init_normal.cuh", name: "nib::init_normal", args: Vec::new() }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    vec![Instance { spec: spec(), shared_bytes: 0 }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_before_the_first_share_its_block() {
        assert_eq!(launch(3, 1, 132).ctas, 1);
        assert_eq!(launch(0, 1024, 132).ctas, 1);
        assert_eq!(launch(3, 1022, 132).ctas, 2);
        assert_eq!(launch(0, 1 << 40, 132).ctas, 32 * 132);
    }
}
