//! Backends whose buffers may be PyTorch's memory, and their devices.

use crate::rows;
use nibble_core::{Kernels, Lent, Operand, Plain, Result};
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

/// The copies of each weight of a layer, for the forward and for the backward pass.
pub type Copies<B> = Vec<[Option<Operand<B>>; 2]>;

/// Copies on any device, with the backend that has made them.
#[derive(Default)]
pub struct AnyCopies {
    /// On the host.
    pub cpu: Option<(Cpu, Copies<Cpu>)>,
    /// On a GPU.
    pub cuda: Option<(Cuda, Copies<Cuda>)>,
}

/// A backend whose buffers may be PyTorch's memory.
pub trait Home: Kernels {
    /// A buffer of borrowed memory.
    fn borrow<T: Plain>(&self, lent: Lent) -> Result<Self::Buf<T>>;
    /// The device of the backend's buffers.
    fn device_id(&self) -> DeviceId;
    /// This many rows as one shard, of which `before` such shards lie on earlier ranks.
    fn shards(&self, rows: usize, before: usize) -> Result<Shards<Self>>;
    /// Runs a pass of a layer. On a GPU, its temporaries share one allocation of PyTorch's from the second pass of a key on: see
    /// [`nibble_cuda::Device::pass`].
    fn pass<R>(&self, key: u64, run: impl FnOnce() -> Result<R>) -> Result<R>;
    /// The place of this backend's copies of weights.
    fn copies(of: &mut AnyCopies) -> &mut Option<(Self, Copies<Self>)>;
    /// Whether buffers of the other backend may be used on this one: whether both work on the same stream.
    fn shares_stream(&self, other: &Self) -> bool;
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

    fn pass<R>(&self, _: u64, run: impl FnOnce() -> Result<R>) -> Result<R> {
        run()
    }

    fn copies(of: &mut AnyCopies) -> &mut Option<(Self, Copies<Self>)> {
        &mut of.cpu
    }

    fn shares_stream(&self, _: &Self) -> bool {
        true
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

    fn pass<R>(&self, key: u64, run: impl FnOnce() -> Result<R>) -> Result<R> {
        self.device().pass(key, run)
    }

    fn copies(of: &mut AnyCopies) -> &mut Option<(Self, Copies<Self>)> {
        &mut of.cuda
    }

    fn shares_stream(&self, other: &Self) -> bool {
        self.device().is_same(other.device())
    }
}
