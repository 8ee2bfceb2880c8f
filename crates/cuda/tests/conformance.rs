//! Every conversion on the GPU against the CPU. Without a GPU: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

use nibble_cpu::Cpu;
use nibble_cuda::{Cuda, Device, env, probe};
use nibble_testkit::{Pair, conformance};
use std::sync::OnceLock;

/// One device for all tests: kernels are compiled once.
fn cuda() -> Option<Cuda> {
    static CUDA: OnceLock<Option<Cuda>> = OnceLock::new();
    let open = || match probe().usable().next() {
        Some(gpu) => Some(Cuda::on(Device::open(gpu.ordinal).expect("a usable GPU"))),
        None if env::require_gpu() => panic!("NIBBLE_REQUIRE_GPU=1, and no Hopper GPU:\n{}", probe()),
        None => None,
    };
    CUDA.get_or_init(open).clone()
}

fn pair() -> Option<Pair<Cpu, Cuda>> {
    Some(Pair::new(Cpu::new(0).expect("the CPU"), cuda()?))
}

conformance!(convert, pair(), Convert);
conformance!(products, pair(), Products);
