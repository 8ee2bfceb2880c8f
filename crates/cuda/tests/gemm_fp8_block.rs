//! The block-scaled product on a GPU. Without one: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

#[path = "../examples/gemm_fp8/check.rs"]
mod check;

use nibble_core::Backend;
use nibble_cuda::backend::Buf;
use nibble_cuda::ops::gemm_fp8_block::{Config, Desc, GemmFp8Block};
use nibble_cuda::{Cuda, Device, env, probe};

fn device(what: &str) -> Option<Device> {
    match probe().usable().next() {
        Some(gpu) => Some(Device::open(gpu.ordinal).unwrap()),
        None if env::require_gpu() => panic!("NIBBLE_REQUIRE_GPU=1, and no Hopper GPU:\n{}", probe()),
        None => {
            println!("skipped, {what}: no Hopper GPU");
            None
        }
    }
}

#[test]
fn right_at_every_edge_by_every_instance() {
    let Some(device) = device("the block-scaled product") else { return };
    for config in Config::ALL {
        for desc in check::SHAPES {
            check::integers_are_exact(&device, config, desc).unwrap();
            let errors = check::random_errors(&device, config, desc).unwrap();
            // Rounding to BF16 alone is 1.65e-3; the tensor cores' own sums of 128 move one output in fifteen by a unit.
            let fine =
                errors.relative_l2 < 2.5e-3 && errors.against_rounded < 1.5e-3 && errors.differing < 0.15;
            assert!(fine, "{config:?} {desc:?}: {errors:?}");
        }
        check::nan_scale_stays_in_its_row(&device, config).unwrap();
    }
    for desc in check::SHAPES {
        check::instances_agree(&device, desc).unwrap();
    }
}

#[test]
fn a_wrong_length_is_named() {
    let Some(device) = device("argument checks on device buffers") else { return };
    let desc = Desc { m: 16, n: 16, k: 128 };
    let codes = device.filled::<u8>(16 * 128, 0).unwrap();
    let scales = device.filled::<f32>(16, 0).unwrap();
    let mut d = device.filled(16 * 16, 0).unwrap();
    let short = device.filled::<u8>(16, 0).unwrap();
    let error = GemmFp8Block { desc, a: &codes, scale_a: &scales, b: &short, scale_b: &scales, d: &mut d }
        .run()
        .unwrap_err()
        .to_string();
    assert!(error.contains("`b`") && error.contains("2048"), "{error}");
}

#[test]
fn memory_is_counted() {
    let Some(device) = device("memory accounting") else { return };
    let first = device.upload(&[1.5f32, -2.0]).unwrap();
    assert_eq!(first.download().unwrap(), [1.5, -2.0]);
    let second = device.filled::<u8>(100, 7).unwrap();
    assert_eq!(device.memory().live_bytes, 108);
    drop(first);
    assert_eq!(second.download().unwrap(), [7; 100]);
    assert_eq!((device.memory().live_bytes, device.memory().peak_bytes), (100, 108));
    let mut shared = Buf::new(second);
    let kept = shared.clone();
    assert_eq!(Cuda::buffer_id(&shared), Cuda::buffer_id(&kept));
    let own = shared.make_mut().unwrap().address();
    assert_ne!(own, kept.get().address(), "a write through a shared handle makes a copy");
    assert_eq!(shared.make_mut().unwrap().address(), own, "and only then");
    assert_eq!(Cuda::on(device.clone()).download(&shared).unwrap(), [7; 100]);
    assert_ne!(Cuda::buffer_id(&shared), Cuda::buffer_id(&kept));
    assert_eq!(device.alloc::<f32>(0).unwrap().download().unwrap(), [0.0f32; 0]);
}
