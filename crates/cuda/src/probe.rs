//! Finds the CUDA driver, libraries and GPUs of this machine. A probe never fails and never panics.

use crate::compile::jit::Nvrtc;
use crate::driver::symbols;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{result, sys};
use std::fmt;
use std::sync::OnceLock;

/// Properties of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    /// The driver's number for this GPU.
    pub ordinal: usize,
    /// The GPU's name, as the driver reports it.
    pub name: String,
    /// The GPU's unique id: `GPU-`, and 32 hexadecimal digits in five parts.
    pub uuid: String,
    /// Compute capability, (9, 0) for Hopper.
    pub compute_capability: (u32, u32),
    /// The number of streaming multiprocessors.
    pub num_sms: u32,
    /// Device memory in bytes.
    pub memory_bytes: usize,
    /// L2 cache in bytes.
    pub l2_bytes: usize,
    /// The most dynamic shared memory that a CTA may request, in bytes.
    pub shared_bytes_per_cta: usize,
}

/// The result of [`probe`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// The newest CUDA version that the driver supports, such as (13, 0); or why no driver can be used.
    pub driver: Result<(u32, u32), String>,
    /// NVRTC's version, or why it cannot be used.
    pub nvrtc: Result<(u32, u32), String>,
    /// `Ok` if cuBLASLt can be used; otherwise the reason why not.
    pub cublaslt: Result<(), String>,
    /// The GPUs, in the order of the driver.
    pub gpus: Vec<GpuInfo>,
}

impl Probe {
    /// The GPUs that can run these kernels: Hopper, compute capability 9.0.
    pub fn usable(&self) -> impl Iterator<Item = &GpuInfo> {
        self.gpus.iter().filter(|gpu| gpu.compute_capability == (9, 0))
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.driver {
            Ok((major, minor)) => writeln!(f, "CUDA driver: {major}.{minor}")?,
            Err(why) => writeln!(f, "CUDA driver: unusable: {why}")?,
        }
        match &self.nvrtc {
            Ok((major, minor)) => writeln!(f, "NVRTC: {major}.{minor}")?,
            Err(why) => writeln!(f, "NVRTC: unusable: {why}")?,
        }
        match &self.cublaslt {
            Ok(()) => write!(f, "cuBLASLt: present")?,
            Err(why) => write!(f, "cuBLASLt: unusable: {why}")?,
        }
        for gpu in &self.gpus {
            let (major, minor) = gpu.compute_capability;
            write!(
                f,
                "\nGPU {}: {}, compute capability {major}.{minor}, {} SMs, {:.1} GiB, L2 {} MiB, {} KiB shared memory a cta",
                gpu.ordinal,
                gpu.name,
                gpu.num_sms,
                gpu.memory_bytes as f64 / (1u64 << 30) as f64,
                gpu.l2_bytes >> 20,
                gpu.shared_bytes_per_cta >> 10,
            )?;
        }
        Ok(())
    }
}

/// Probes the machine once; later calls return the same result.
pub fn probe() -> &'static Probe {
    static PROBE: OnceLock<Probe> = OnceLock::new();
    PROBE.get_or_init(|| {
        let driver = driver_version();
        let gpus = if driver.is_ok() { gpus() } else { Vec::new() };
        Probe { driver, nvrtc: Nvrtc::found().map(|nvrtc| nvrtc.version), cublaslt: cublaslt(), gpus }
    })
}

fn cublaslt() -> Result<(), String> {
    use cudarc::cublaslt::sys;
    // SAFETY: loading a library runs its initialisers; those of cuBLASLt are safe to run.
    if !unsafe { sys::is_culib_present() } {
        return Err("libcublasLt.so cannot be loaded".into());
    }
    // SAFETY: the library was just found, so loading it is safe.
    symbols::missing("libcublasLt.so", unsafe { sys::culib() }, symbols::CUBLASLT)
}

/// The oldest CUDA version that a driver must support: 12.8 introduced `cuEventElapsedTime_v2`. The next newest
/// function that this crate calls is `cuFuncGetParamInfo`, from 12.4.
const OLDEST_DRIVER: (u32, u32) = (12, 8);

/// Converts the driver's version number to a CUDA version: 13000 is 13.0. Returns an error if a driver function is missing, because
/// `cudarc` would panic.
fn spoken(number: u32) -> Result<(u32, u32), String> {
    let version = (number / 1000, number % 1000 / 10);
    if version >= OLDEST_DRIVER {
        return Ok(version);
    }
    let ((major, minor), (oldest_major, oldest_minor)) = (version, OLDEST_DRIVER);
    Err(format!(
        "the driver speaks CUDA {major}.{minor}, and {oldest_major}.{oldest_minor} or newer is needed: install a newer driver"
    ))
}

/// Whether `libcuda` can be loaded, has every function that is called, and is new enough; otherwise every other call into `cudarc::driver`
/// panics.
fn driver_version() -> Result<(u32, u32), String> {
    // SAFETY: loading the driver library runs its initialisers, which are safe to run.
    if !unsafe { sys::is_culib_present() } {
        return Err("libcuda.so cannot be loaded".into());
    }
    // SAFETY: the library was just found, so loading it is safe.
    let library = unsafe { sys::culib() };
    // A driver that is too old may lack functions; its version is a clearer error than the names of
    // these functions.
    symbols::missing("libcuda.so", library, symbols::DRIVER_VERSION)?;
    let mut version = 0;
    // SAFETY: the call writes one int.
    let code = unsafe { sys::cuDriverGetVersion(&mut version) };
    crate::driver::check("cuDriverGetVersion", code).map_err(|error| error.to_string())?;
    let version = spoken(version.max(0) as u32)?;
    symbols::missing("libcuda.so", library, symbols::DRIVER)?;
    result::init().map_err(|error| crate::driver::describe(error.0))?;
    Ok(version)
}

fn gpus() -> Vec<GpuInfo> {
    let count = result::device::get_count().unwrap_or(0).max(0) as usize;
    (0..count).filter_map(|ordinal| gpu(ordinal).ok()).collect()
}

fn gpu(ordinal: usize) -> Result<GpuInfo, cudarc::driver::DriverError> {
    let device = result::device::get(ordinal as i32)?;
    // SAFETY: `device` came from `device::get`.
    let attribute = |which| unsafe { result::device::get_attribute(device, which) };
    Ok(GpuInfo {
        ordinal,
        name: result::device::get_name(device)?,
        uuid: uuid(result::device::get_uuid(device)?.bytes.map(|byte| byte as u8)),
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        ),
        num_sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        // SAFETY: `device` came from `device::get`.
        memory_bytes: unsafe { result::device::total_mem(device)? },
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        shared_bytes_per_cta: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
            as usize,
    })
}

/// Formats a UUID as NVIDIA's tools do.
fn uuid(bytes: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (i, byte) in bytes.into_iter().enumerate() {
        let dash = if matches!(i, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
        text += &format!("{dash}{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_in_five_parts() {
        let bytes = std::array::from_fn(|i| 16 * i as u8 + 1);
        assert_eq!(uuid(bytes), "GPU-01112131-4151-6171-8191-a1b1c1d1e1f1");
    }

    #[test]
    fn a_driver_that_lacks_a_call_is_refused_with_what_is_there_and_what_is_needed() {
        assert_eq!([12080, 12090, 13000, 13020].map(spoken), [(12, 8), (12, 9), (13, 0), (13, 2)].map(Ok));
        for (number, speaks) in
            [(12070, "CUDA 12.7"), (12040, "CUDA 12.4"), (11080, "CUDA 11.8"), (0, "CUDA 0.0")]
        {
            let why = spoken(number).unwrap_err();
            assert!(why.contains(speaks) && why.contains("12.8 or newer"), "{why}");
        }
    }

    #[test]
    fn what_cannot_be_used_is_said_with_its_reason() {
        let found = Probe {
            driver: spoken(12040),
            nvrtc: Err("no library".into()),
            cublaslt: Err("no library either".into()),
            gpus: Vec::new(),
        };
        assert!(found.usable().next().is_none());
        let text = found.to_string();
        assert!(text.contains("CUDA driver: unusable: the driver speaks CUDA 12.4"), "{text}");
        assert!(text.contains("NVRTC: unusable: no library\n"), "{text}");
    }
}
