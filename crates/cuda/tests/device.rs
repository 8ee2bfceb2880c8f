//! Memory on a GPU. Without one: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

mod gpu;

use gpu::device;
use nibble_core::Backend;
use nibble_cuda::Cuda;
use nibble_cuda::backend::Buf;

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

#[test]
fn events_time_what_lies_between_them() {
    let Some(device) = device("events") else { return };
    let first = device.event().unwrap();
    // No Hopper fills 7 TB/s.
    device.filled::<u8>(256 << 20, 1).unwrap();
    let second = device.event().unwrap();
    device.filled::<u8>(2 << 30, 2).unwrap();
    let third = device.event().unwrap();
    // The last first: it waits for all of them.
    let whole = third.elapsed_ms(&first).unwrap();
    let (short, long) = (second.elapsed_ms(&first).unwrap(), third.elapsed_ms(&second).unwrap());
    assert!(short > 0.03 && long > 0.3, "{short} ms, then {long} ms");
    assert!((whole - (short + long)).abs() < 0.01, "{whole} ms in all, of {short} and {long}");
}
