//! Typed launches: the arguments are checked against the sizes that the cubin declares before the driver reads them.

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
use std::sync::{Arc, PoisonError};

const OP: &str = "launch";

/// An argument that a kernel takes by value.
///
/// # Safety
/// `bytes` must be readable at `pointer` for as long as `self` is borrowed.
pub unsafe trait KernelArg {
    /// The value's address on the host.
    fn pointer(&self) -> *const c_void;
    /// The value's size in bytes.
    fn bytes(&self) -> usize;
}

macro_rules! plain_args {
    ($($t:ty),*) => {$(
        // SAFETY: the pointer and the size are those of the value itself.
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
// SAFETY: the address field lives in the buffer, and the null pointer in static memory.
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
    /// The number of CTAs in the grid, which must be a multiple of `cluster`.
    pub ctas: u32,
    /// Number of threads per CTA.
    pub threads: u32,
    /// Number of CTAs per cluster; 1 if there are no clusters.
    pub cluster: u32,
    /// Dynamic shared memory per CTA, in bytes.
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

/// When a kernel may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    /// After the preceding kernels are complete.
    InOrder,
    /// As soon as the CTAs of the preceding kernel leave resources free.
    Early,
}

/// A loaded kernel.
pub struct Kernel {
    spec: KernelSpec,
    module: Arc<Module>,
    device: Device,
}

impl Device {
    /// Returns a kernel, which is compiled and loaded on its first use.
    ///
    /// # Errors
    /// [`Error::Jit`] if the kernel does not compile or load.
    pub fn kernel(&self, spec: &KernelSpec) -> Result<Kernel> {
        Ok(Kernel { spec: spec.clone(), module: self.module(spec)?, device: self.clone() })
    }
}

impl Kernel {
    /// Issues the kernel on the device's stream.
    ///
    /// # Safety
    /// The kernel must not access memory outside the buffers that it is given. The kernel's buffers must live until the
    /// stream has passed the kernel (dropping them later in stream order is enough), and no other stream may write to them
    /// meanwhile.
    pub unsafe fn launch(&self, launch: Launch, args: &[&dyn KernelArg]) -> Result<()> {
        // SAFETY: the caller guarantees the conditions.
        unsafe { self.issue(launch, Start::InOrder, args) }
    }

    /// Issues the kernel like [`Kernel::launch`], but the kernel may start while the preceding kernel still runs, which hides its launch
    /// latency (programmatic dependent launch).
    ///
    /// # Safety
    /// The caller must meet the same conditions as for [`Kernel::launch`]. In addition, every thread of the kernel must call
    /// `ptx::grid_wait` before it reads or writes memory that earlier kernels read or write.
    pub unsafe fn launch_early(&self, launch: Launch, args: &[&dyn KernelArg]) -> Result<()> {
        // SAFETY: the caller guarantees the conditions.
        unsafe { self.issue(launch, Start::Early, args) }
    }

    /// # Safety
    /// The conditions are those of `launch` or of `launch_early`, depending on `start`.
    unsafe fn issue(&self, launch: Launch, start: Start, args: &[&dyn KernelArg]) -> Result<()> {
        launch.check(self.device.info().shared_bytes_per_cta)?;
        let sizes: Vec<_> = args.iter().map(|arg| arg.bytes()).collect();
        if sizes != self.module.param_bytes {
            let got = format!("{sizes:?} bytes");
            let expected = format!("{:?} for {}", self.module.param_bytes, self.spec);
            return Err(Error::shape(OP, "args", got, expected));
        }
        let mut pointers: Vec<*mut c_void> = args.iter().map(|arg| arg.pointer().cast_mut()).collect();
        // SAFETY: there are as many pointers as the kernel has parameters, each to a value of the parameter's size; the
        // driver copies the values during the call. The caller guarantees what the kernel accesses.
        let code = self.configured(launch, start, |config| unsafe {
            sys::cuLaunchKernelEx(config, self.module.function, pointers.as_mut_ptr(), std::ptr::null_mut())
        })?;
        self.device.note_launch(self.spec.name);
        self.checked("cuLaunchKernelEx", launch, code)
    }

    /// The number of clusters of this shape that the device can run at the same time. This number may be less than the number of SMs
    /// divided by the CTAs per cluster, because a cluster runs within one group of SMs (GPC) and some groups are smaller than others.
    pub fn max_clusters(&self, launch: Launch) -> Result<u32> {
        launch.check(self.device.info().shared_bytes_per_cta)?;
        if let Some(&(_, clusters)) =
            self.module.max_clusters.get().filter(|(shape, _)| *shape == launch.cta_shape())
        {
            return Ok(clusters);
        }
        let mut clusters = 0;
        let code = self.configured(launch, Start::InOrder, |config| {
            // The query concerns the whole device. No stream is passed, because the stream may be
            // capturing.
            let config = sys::CUlaunchConfig { hStream: std::ptr::null_mut(), ..*config };
            // SAFETY: the call writes one int and launches nothing.
            unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, self.module.function, &config) }
        })?;
        self.checked("cuOccupancyMaxActiveClusters", launch, code)?;
        let clusters = clusters.max(1) as u32;
        // An instance is usually launched with one shape. For other shapes the driver is queried each
        // time.
        let _ = self.module.max_clusters.set((launch.cta_shape(), clusters));
        Ok(clusters)
    }

    /// Adds a name to the error of a failed call. The text is formatted only on failure, because formatting costs
    /// as much as the launch.
    fn checked(&self, call: &str, launch: Launch, code: sys::CUresult) -> Result<()> {
        match code {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            _ => check(&format!("{call}({}, {launch:?})", self.spec), code),
        }
    }

    /// Calls `call` with the launch in the form that the driver takes.
    fn configured(
        &self,
        launch: Launch,
        start: Start,
        call: impl FnOnce(&sys::CUlaunchConfig) -> sys::CUresult,
    ) -> Result<sys::CUresult> {
        let stream = self.device.stream()?;
        let shared = i32::try_from(launch.shared_bytes)
            .map_err(|_| Error::shape(OP, "shared_bytes", launch.shared_bytes, "below 2^31"))?;
        // Locked until the driver knows it, so that no other thread lowers the driver's limit below what is noted.
        let mut most = self.module.shared_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if *most < shared {
            // SAFETY: the function belongs to `module`, and the value is below the device's limit.
            named("cuFuncSetAttribute(dynamic shared memory)", unsafe {
                result::function::set_function_attribute(
                    self.module.function,
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared,
                )
            })?;
            *most = shared;
        }
        drop(most);
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
