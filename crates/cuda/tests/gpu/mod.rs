//! The GPU of the tests.

use nibble_cuda::{Device, env, probe};

/// Opens the first usable GPU. Where there is none: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.
pub fn device(what: &str) -> Option<Device> {
    match probe().usable().next() {
        Some(gpu) => Some(Device::open(gpu.ordinal).expect("a usable GPU")),
        None if env::require_gpu() => panic!("NIBBLE_REQUIRE_GPU=1, and no Hopper GPU:\n{}", probe()),
        None => {
            nibble_testkit::skip(&format!("{what}: no Hopper GPU"));
            None
        }
    }
}
