//! Typed launches: the arguments are checked against the sizes the cubin declares, before the driver reads them.

pub mod tensor_map;

use crate::Cuda;
use crate::compile::jit::KernelSpec;
use crate::device::buffer::Buffer;
use crate::device::{Device, Module};
use crate::driver::{check, named};
use crate::launch::tensor_map::TensorMap;
use bytemuck::Pod;
use cudarc::driver::{result, sys};
use nibble_core::ops::{Hadamard, Random};
use nibble_core::{Error, Result};
use nibble_formats::{Codec, Rounding, Stream, hadamard};
use std::ffi::c_void;
use std::sync::Arc;

const OP: &str = "launch";

/// A value that a kernel takes by value.
///
/// # Safety
/// `bytes` must be readable at `pointer` for as long as `self` is borrowed.
pub unsafe trait KernelArg {
    /// Where the value lies on the host.
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
plain_args!(i32, u32, u64, f32, f64, TensorMap, Divider, StreamArg, RoundingArg, HadamardArg, DecodeArg);

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

/// The device's `Divider` (csrc/math/reduce.cuh): n / d for n below 2^31 by a multiplication.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Divider {
    magic: u32,
    shift: u32,
}

impl Divider {
    /// Divides by `d`. A `d` of 0 counts as 1. From 2^31 on the quotient is 0, since no `n` reaches that.
    pub fn by(d: u32) -> Self {
        let d = d.clamp(1, 1 << 31);
        let shift = d.next_power_of_two().trailing_zeros();
        Self { magic: (1u64 << (31 + shift)).div_ceil(u64::from(d)) as u32, shift }
    }
}

/// The device's `Stream` (csrc/math/philox.cuh). The keys of all rounds are computed here, once for each launch.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamArg {
    keys: [[u32; 2]; 10],
    purpose: u32,
    site: u32,
    step: u32,
}

impl StreamArg {
    /// For kernels that draw nothing.
    pub(crate) const NONE: Self = Self { keys: [[0; 2]; 10], purpose: 0, site: 0, step: 0 };

    /// The same random bits as `stream`.
    pub fn new(stream: &Stream) -> Self {
        let mut keys = [[stream.seed as u32, (stream.seed >> 32) as u32]; 10];
        for round in 1..keys.len() {
            let [low, high] = keys[round - 1];
            keys[round] = [low.wrapping_add(0x9E37_79B9), high.wrapping_add(0xBB67_AE85)];
        }
        Self { keys, purpose: (stream.purpose as u32) << 16, site: stream.site, step: stream.step }
    }
}

/// The device's `RoundingArg` (csrc/formats/rounding.cuh): what a rounding needs beside its kind, which is a template
/// argument.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundingArg {
    stream: StreamArg,
    delta_q16: u32,
    /// The address of the step on the device; 0: the step is the stream's.
    step_at: u64,
    first: u64,
}

impl RoundingArg {
    /// Only codecs that draw read `random`; an operation's checks let them in only with a stream.
    pub fn new(codec: Codec, random: Option<Random<'_, Cuda>>) -> Self {
        let unused = Stream::new(0, nibble_formats::Purpose::Rounding, 0, 0);
        let Random { stream, step, first } = random.unwrap_or(unused.into());
        let stream = codec.drawn_from(stream);
        let delta_q16 = match codec.rounding() {
            Rounding::Dither { delta_q16 } => u32::from(delta_q16),
            Rounding::NearestEven | Rounding::NearestAway | Rounding::Stochastic => 0,
        };
        let step_at = step.map_or(0, |step| step.get().address());
        Self { stream: StreamArg::new(&stream), delta_q16, step_at, first }
    }

    /// The policy's name on the device, for [`TemplateArg::Type`](crate::compile::jit::TemplateArg::Type).
    pub fn policy(rounding: Rounding) -> &'static str {
        match rounding {
            Rounding::NearestEven => "nib::NearestEven",
            Rounding::NearestAway => "nib::NearestAway",
            Rounding::Stochastic => "nib::Stochastic",
            Rounding::Dither { .. } => "nib::Dither",
        }
    }
}

/// The device's `HadamardArg` (csrc/math/hadamard.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HadamardArg {
    stream: StreamArg,
    len: u32,
    factor: f32,
    /// The address of the step on the device; 0: the step is the stream's.
    step_at: u64,
}

impl HadamardArg {
    /// No transform.
    pub(crate) const NONE: Self = Self { stream: StreamArg::NONE, len: 0, factor: 1.0, step_at: 0 };

    /// # Errors
    /// [`Error::Format`] for a length that is not one of a transform's.
    pub fn new(transform: &Hadamard<'_, Cuda>) -> Result<Self> {
        let factor = hadamard::inv_sqrt_len(transform.len)?;
        let step_at = transform.step.map_or(0, |step| step.get().address());
        Ok(Self { stream: StreamArg::new(&transform.signs), len: transform.len as u32, factor, step_at })
    }
}

/// The device's `DecodeArg` (csrc/kernels/convert/dequantize.cuh): what the codes are, and which line of scales a line
/// of codes has.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DecodeArg {
    pub is_f32: u32,
    pub is_e5m2: u32,
    pub line_stride: u32,
    pub block_stride: u32,
    pub tile_lines: u32,
    pub matrix_lines: u32,
    pub matrix_tiles: u32,
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
    /// What all launches of an instance have in common: threads, cluster, shared memory.
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
    /// When the kernels before it are done.
    InOrder,
    /// As soon as the CTAs of the kernel before it leave room.
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
    /// The kernel must stay within the buffers it is given, which live until the stream has passed it (dropping them later is
    /// enough), and no other stream may be writing them.
    pub unsafe fn launch(&self, launch: Launch, args: &[&dyn KernelArg]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.issue(launch, Start::InOrder, args) }
    }

    /// The same, but the kernel may start while the one issued just before it still runs, which hides the time of its
    /// launch (programmatic dependent launch).
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
    /// cluster lies within one group of multiprocessors (GPC), and some groups have fewer multiprocessors than others.
    pub fn max_clusters(&self, launch: Launch) -> Result<u32> {
        launch.check(self.device.info().shared_bytes_per_cta)?;
        if let Some(&(_, clusters)) =
            self.module.max_clusters.get().filter(|(shape, _)| *shape == launch.cta_shape())
        {
            return Ok(clusters);
        }
        let mut clusters = 0;
        let code = self.configured(launch, Start::InOrder, |config| {
            // The question is about the whole device. It names no stream, since that one may be recording.
            let config = sys::CUlaunchConfig { hStream: std::ptr::null_mut(), ..*config };
            // SAFETY: writes one int; launches nothing.
            unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, self.module.function, &config) }
        })?;
        self.checked("cuOccupancyMaxActiveClusters", launch, code)?;
        let clusters = clusters.max(1) as u32;
        // An instance is launched with one shape. Should there be a second, the driver is asked about it each time.
        let _ = self.module.max_clusters.set((launch.cta_shape(), clusters));
        Ok(clusters)
    }

    /// Names a failed call. The text is made only on failure, because it costs as much as the launch.
    fn checked(&self, call: &str, launch: Launch, code: sys::CUresult) -> Result<()> {
        match code {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            _ => check(&format!("{call}({}, {launch:?})", self.spec), code),
        }
    }

    /// Hands the driver's form of a launch to a call.
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
    use nibble_formats::{Correction, Format, Purpose, ScaleRule, Scaling};
    use std::mem::offset_of;

    #[test]
    fn keys_are_those_of_the_rounds_of_philox() {
        let stream = Stream::new(0x0123_4567_89AB_CDEF, nibble_formats::Purpose::Init, 0xDEAD_BEEF, 77);
        let (arg, q) = (StreamArg::new(&stream), 0x1234_5678_9ABC_u64);
        let mut c = [q as u32, (q >> 32) as u32 | arg.purpose, arg.site, arg.step];
        for [low, high] in arg.keys {
            let (p0, p1) = (u64::from(c[0]) * 0xD251_1F53, u64::from(c[2]) * 0xCD9E_8D57);
            c = [(p1 >> 32) as u32 ^ c[1] ^ low, p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ high, p0 as u32];
        }
        assert_eq!(c, stream.block(q));
    }

    #[test]
    fn quotients_are_exact_for_every_divisor() {
        let divide = |n: u32, d| {
            let Divider { magic, shift } = Divider::by(d);
            ((u64::from(n) * u64::from(magic)) >> (31 + shift)) as u32
        };
        for d in [1, 2, 3, 7, 128, 7168, 65_537, (1 << 30) + 1, (1 << 31) - 1, 1 << 31, u32::MAX] {
            for n in [0, 1, 6, 7, 127, 128, 7167, 7168, 65_536, 1 << 30, (1 << 31) - 2, (1 << 31) - 1] {
                assert_eq!(divide(n, d), n / d, "{n} / {d}");
            }
        }
        assert_eq!(divide(5, 0), 5);
    }

    #[test]
    fn every_rounding_has_its_policy_on_the_device() {
        let sources = crate::compile::source::Sources::embedded();
        let text = sources.text("formats/rounding.cuh").unwrap();
        for rounding in Rounding::PLAIN.into_iter().chain([Rounding::Dither { delta_q16: 5 }]) {
            let name = RoundingArg::policy(rounding).strip_prefix("nib::").unwrap();
            assert!(text.contains(&format!("struct {name} {{")), "{name}");
        }
        let codec = |rounding| Codec::new(Format::Nvfp4, ScaleRule::TensorAmax, rounding).unwrap();
        assert_eq!(RoundingArg::new(codec(Rounding::Dither { delta_q16: 5 }), None).delta_q16, 5);
        let scaling = Scaling { correction: Correction::MsEden, ..Scaling::default() };
        let corrected = RoundingArg::new(codec(Rounding::NearestEven).with(scaling).unwrap(), None);
        assert_eq!(corrected.stream.purpose, (Purpose::Scale as u32) << 16);
        // As the compiler lays the device's struct out: nothing between the fields.
        let offsets = [
            offset_of!(RoundingArg, delta_q16),
            offset_of!(RoundingArg, step_at),
            offset_of!(RoundingArg, first),
        ];
        assert_eq!((offsets, size_of::<RoundingArg>()), ([92, 96, 104], 112));
    }

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
