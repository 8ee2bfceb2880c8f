//! Every operation on the GPU against the CPU. Without a GPU: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

use crate::gpu;

use nibble_cpu::Cpu;
use nibble_cuda::Cuda;
use nibble_testkit::{Pair, conformance};
use std::sync::OnceLock;

/// One device for all tests: kernels are compiled once.
fn cuda() -> Option<Cuda> {
    static CUDA: OnceLock<Option<Cuda>> = OnceLock::new();
    CUDA.get_or_init(|| gpu::device("conformance").map(Cuda::on)).clone()
}

fn pair() -> Option<Pair<Cpu, Cuda>> {
    Some(Pair::new(Cpu::new(0).expect("the CPU"), cuda()?))
}

conformance!(cuda, pair());
