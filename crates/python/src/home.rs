//! Backends whose buffers may be PyTorch's memory, and their devices.

use crate::rows;
use nibble_core::{Kernels, Lent, Plain, Result};
use nibble_cpu::Cpu;
use nibble_cuda::Cuda;
use nibble_train::shards::Shards;

/// A device: its kind, and its number among devices of the kind.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceId {
    /// [`DeviceId::CPU`] or [`DeviceId::CUDA`]; other kinds are refused.
    pub kind: i32,
    /// The number of the device.
    pub number: i32,
}

impl DeviceId {
    /// The host.
    pub const CPU: i32 = 1;
    /// A GPU of NVIDIA.
    pub const CUDA: i32 = 2;
}

/// A backend whose buffers may be PyTorch's memory.
pub trait Home: Kernels {
    /// A buffer of borrowed memory.
    fn borrow<T: Plain>(&self, lent: Lent) -> Result<Self::Buf<T>>;
    /// The device of the backend's buffers.
    fn device_id(&self) -> DeviceId;
    /// This many rows as one shard, of which `before` such shards lie on earlier ranks.
    fn shards(&self, rows: usize, before: usize) -> Result<Shards<Self>>;
}

impl Home for Cpu {
    fn borrow<T: Plain>(&self, lent: Lent) -> Result<Self::Buf<T>> {
        Cpu::borrow(self, lent)
    }

    fn device_id(&self) -> DeviceId {
        DeviceId { kind: DeviceId::CPU, number: 0 }
    }

    fn shards(&self, rows: usize, before: usize) -> Result<Shards<Self>> {
        Shards::new(self, 1, rows, before)
    }
}

impl Home for Cuda {
    fn borrow<T: Plain>(&self, lent: Lent) -> Result<Self::Buf<T>> {
        Cuda::borrow(self, lent)
    }

    fn device_id(&self) -> DeviceId {
        DeviceId { kind: DeviceId::CUDA, number: self.device().info().ordinal as i32 }
    }

    fn shards(&self, rows: usize, before: usize) -> Result<Shards<Self>> {
        rows::on_gpu(self, rows, before)
    }
}
