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
