//! Typed launches: the arguments are checked against the sizes that the cubin declares, before the driver reads them.

mod args;
pub mod tensor_map;

pub(crate) use args::DecodeArg;
pub use args::{Divider, HadamardArg, RoundingArg, StreamArg};

use crate::compile::jit::KernelSpec;
use crate::device::buffer::Buffer;
use crate::device::{Device, Module};
use crate::driver::{check, named};
use crate::launch::tensor_map::TensorMap;
use bytemuck::Pod;
use cudarc::driver::{result, sys};
use nibble_core::{Error, Result};
use std::ffi::c_void;
use std::sync::Arc;

const OP: &str = "launch";

/// A value that a kernel takes by value.
///
/// # Safety
/// `bytes` must be readable at `pointer` for as long as `self` is borrowed.
pub unsafe trait KernelArg {
    /// The value's address on the host.
    fn pointer(&self) -> *const c_void;
    /// Its size.
    fn bytes(&self) -> usize;
}

macro_rules! plain_args {
    ($($t:ty),*) => {$(
        // SAFETY: the value itself.
        unsafe impl $crate::launch::KernelArg for $t {
            fn pointer(&self) -> *const std::ffi::c_void {
                std::ptr::from_ref(self).cast()
            }
            fn bytes(&self) -> usize {
                size_of::<$t>()
            }
        }
    )*};
}
pub(crate) use plain_args;
plain_args!(i32, u32, u64, f32, f64, TensorMap);

/// An absent buffer is passed as a null pointer.
// SAFETY: the address field lives in the buffer, the null in static memory.
unsafe impl<T: Pod> KernelArg for Option<&Buffer<T>> {
    fn pointer(&self) -> *const c_void {
        static NULL: u64 = 0;
        std::ptr::from_ref(self.map_or(&NULL, |buffer| buffer.address_ref())).cast()
    }
    fn bytes(&self) -> usize {
        size_of::<u64>()
    }
}

/// A buffer is passed as its device address.
// SAFETY: the address field lives in the buffer.
unsafe impl<T: Pod> KernelArg for Buffer<T> {
    fn pointer(&self) -> *const c_void {
        std::ptr::from_ref(self.address_ref()).cast()
    }
    fn bytes(&self) -> usize {
        size_of::<u64>()
    }
}

/// The shape of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// CTAs of the grid; a multiple of `cluster`.
    pub ctas: u32,
    /// Threads of a CTA.
    pub threads: u32,
    /// CTAs of a cluster; 1 for none.
    pub cluster: u32,
    /// Dynamic shared memory of a CTA, in bytes.
    pub shared_bytes: usize,
}

impl Launch {
    /// The part of the shape that all launches of an instance share: threads, cluster, shared memory.
    fn cta_shape(&self) -> (u32, u32, usize) {
        (self.threads, self.cluster, self.shared_bytes)
    }

    fn check(&self, shared_bytes_per_cta: usize) -> Result<()> {
        if self.ctas == 0 || self.cluster == 0 || !self.ctas.is_multiple_of(self.cluster) {
            let got = format!("{} ctas in clusters of {}", self.ctas, self.cluster);
            return Err(Error::shape(OP, "ctas", got, "a positive multiple of the cluster"));
        }
        if !(1..=8).contains(&self.cluster) {
            return Err(Error::shape(OP, "cluster", self.cluster, "1 to 8"));
        }
        if !(1..=1024).contains(&self.threads) {
            return Err(Error::shape(OP, "threads", self.threads, "1 to 1024"));
        }
        if self.shared_bytes > shared_bytes_per_cta {
            let most = format!("at most {shared_bytes_per_cta} bytes");
            return Err(Error::shape(OP, "shared_bytes", self.shared_bytes, most));
        }
        Ok(())
    }
}

/// When a kernel starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    /// When the preceding kernels are done.
    InOrder,
    /// As soon as the CTAs of the preceding kernel leave resources.
    Early,
}

/// A loaded kernel.
pub struct Kernel {
    spec: KernelSpec,
    module: Arc<Module>,
    device: Device,
}

impl Device {
    /// The kernel, compiled and loaded if this is its first use.
    ///
    /// # Errors
    /// [`Error::Jit`] where it does not compile or load.
    pub fn kernel(&self, spec: &KernelSpec) -> Result<Kernel> {
        Ok(Kernel { spec: spec.clone(), module: self.module(spec)?, device: self.clone() })
    }
}

impl Kernel {
    /// Issues the kernel on the device's stream.
    ///
    /// # Safety
    /// The kernel must stay within the buffers it is given. They live until the stream has passed the kernel (dropping them
    /// later is enough), and no other stream may be writing them.
    pub unsafe fn launch(&self, launch: Launch, args: &[&dyn KernelArg]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.issue(launch, Start::InOrder, args) }
    }

    /// As [`Kernel::launch`], but the kernel may start while the preceding kernel still runs, which hides its launch
    /// latency (programmatic dependent launch).
    ///
    /// # Safety
    /// As for [`Kernel::launch`]; and every thread of the kernel calls `ptx::grid_wait` before it reads or writes memory that earlier kernels read or write.
    pub unsafe fn launch_early(&self, launch: Launch, args: &[&dyn KernelArg]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.issue(launch, Start::Early, args) }
    }

    /// # Safety
    /// As for `launch` or `launch_early`, by `start`.
    unsafe fn issue(&self, launch: Launch, start: Start, args: &[&dyn KernelArg]) -> Result<()> {
        launch.check(self.device.info().shared_bytes_per_cta)?;
        let sizes: Vec<_> = args.iter().map(|arg| arg.bytes()).collect();
        if sizes != self.module.param_bytes {
            let got = format!("{sizes:?} bytes");
            let expected = format!("{:?} for {}", self.module.param_bytes, self.spec);
            return Err(Error::shape(OP, "args", got, expected));
        }
        let mut pointers: Vec<*mut c_void> = args.iter().map(|arg| arg.pointer().cast_mut()).collect();
        // SAFETY: as many pointers as the kernel has parameters, each to a value of its size; the driver copies them during
        // the call. What the kernel does is the caller's promise.
        let code = self.configured(launch, start, |config| unsafe {
            sys::cuLaunchKernelEx(config, self.module.function, pointers.as_mut_ptr(), std::ptr::null_mut())
        })?;
        self.device.note_launch(self.spec.name);
        self.checked("cuLaunchKernelEx", launch, code)
    }

    /// How many clusters of this shape the device holds at once. That may be fewer than multiprocessors / CTAs: a
    /// cluster lies within one group of multiprocessors (GPC), and some groups are smaller than others.
    pub fn max_clusters(&self, launch: Launch) -> Result<u32> {
        launch.check(self.device.info().shared_bytes_per_cta)?;
        if let Some(&(_, clusters)) =
            self.module.max_clusters.get().filter(|(shape, _)| *shape == launch.cta_shape())
        {
            return Ok(clusters);
        }
        let mut clusters = 0;
        let code = self.configured(launch, Start::InOrder, |config| {
            // The query is about the whole device. It names no stream, since the stream may be capturing.
            let config = sys::CUlaunchConfig { hStream: std::ptr::null_mut(), ..*config };
            // SAFETY: writes one int; launches nothing.
            unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, self.module.function, &config) }
        })?;
        self.checked("cuOccupancyMaxActiveClusters", launch, code)?;
        let clusters = clusters.max(1) as u32;
        // An instance is launched with one shape. For any further shape, the driver is asked each time.
        let _ = self.module.max_clusters.set((launch.cta_shape(), clusters));
        Ok(clusters)
    }

    /// Names a failed call. The text is formatted only on failure, because formatting costs as much as the launch.
    fn checked(&self, call: &str, launch: Launch, code: sys::CUresult) -> Result<()> {
        match code {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            _ => check(&format!("{call}({}, {launch:?})", self.spec), code),
        }
    }

    /// Calls `call` with the driver's form of a launch.
    fn configured(
        &self,
        launch: Launch,
        start: Start,
        call: impl FnOnce(&sys::CUlaunchConfig) -> sys::CUresult,
    ) -> Result<sys::CUresult> {
        let stream = self.device.stream()?;
        let shared = i32::try_from(launch.shared_bytes)
            .map_err(|_| Error::shape(OP, "shared_bytes", launch.shared_bytes, "below 2^31"))?;
        // SAFETY: the function lives in `module`; the value is below the device's limit.
        named("cuFuncSetAttribute(dynamic shared memory)", unsafe {
            result::function::set_function_attribute(
                self.module.function,
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                shared,
            )
        })?;
        use sys::CUlaunchAttributeID as Id;
        // SAFETY: an attribute is plain data, for which zeros are valid.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        attributes[0].id = Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[0].value.clusterDim =
            sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: launch.cluster, y: 1, z: 1 };
        attributes[1].id = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[1].value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: launch.ctas,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared as u32,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: if start == Start::Early { 2 } else { 1 },
        };
        Ok(call(&config))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_of_a_launch_is_checked_and_named() {
        let good = Launch { ctas: 132, threads: 384, cluster: 2, shared_bytes: 200_000 };
        good.check(232_448).unwrap();
        let bad = [
            (Launch { ctas: 131, ..good }, "ctas"),
            (Launch { ctas: 0, ..good }, "ctas"),
            (Launch { cluster: 0, ..good }, "ctas"),
            (Launch { cluster: 11, ..good }, "cluster"),
            (Launch { threads: 1025, ..good }, "threads"),
            (Launch { shared_bytes: 232_449, ..good }, "shared_bytes"),
        ];
        for (launch, argument) in bad {
            let error = launch.check(232_448).expect_err(argument).to_string();
            assert!(error.contains(&format!("`{argument}`")), "{argument}: {error}");
        }
    }
}
