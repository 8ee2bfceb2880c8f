//! The functions of NVIDIA's libraries that this crate calls. `cudarc` looks up a function on its first call, and panics if the library
//! lacks it. So a library is used only after [`missing`] has looked up all of its functions; a test compares these lists with the calls
//! in the sources.

use libloading::Library;

/// A call as this crate's sources write it, and the library function behind it.
type Call = (&'static str, &'static str);

/// The functions of `libcuda` that are needed to read its version.
pub(crate) const DRIVER_VERSION: &[Call] =
    &[("sys::cuDriverGetVersion", "cuDriverGetVersion"), ("sys::cuGetErrorString", "cuGetErrorString")];

/// All functions of `libcuda`.
pub(crate) const DRIVER: &[Call] = &[
    ("result::init", "cuInit"),
    ("result::device::get", "cuDeviceGet"),
    ("result::device::get_attribute", "cuDeviceGetAttribute"),
    ("result::device::get_count", "cuDeviceGetCount"),
    ("result::device::get_name", "cuDeviceGetName"),
    ("result::device::get_uuid", "cuDeviceGetUuid_v2"),
    ("result::device::total_mem", "cuDeviceTotalMem_v2"),
    ("result::primary_ctx::retain", "cuDevicePrimaryCtxRetain"),
    ("result::primary_ctx::release", "cuDevicePrimaryCtxRelease_v2"),
    ("result::ctx::set_current", "cuCtxSetCurrent"),
    ("result::event::create", "cuEventCreate"),
    ("result::event::destroy", "cuEventDestroy_v2"),
    ("result::event::elapsed", "cuEventElapsedTime_v2"),
    ("result::event::query", "cuEventQuery"),
    ("result::event::record", "cuEventRecord"),
    ("result::event::synchronize", "cuEventSynchronize"),
    ("result::stream::begin_capture", "cuStreamBeginCapture_v2"),
    ("result::stream::create", "cuStreamCreate"),
    ("result::stream::destroy", "cuStreamDestroy_v2"),
    ("result::stream::is_capturing", "cuStreamIsCapturing"),
    ("result::stream::synchronize", "cuStreamSynchronize"),
    ("result::stream::wait_event", "cuStreamWaitEvent"),
    ("result::graph::instantiate", "cuGraphInstantiateWithFlags"),
    ("result::graph::launch", "cuGraphLaunch"),
    ("result::graph::destroy", "cuGraphDestroy"),
    ("result::graph::exec_destroy", "cuGraphExecDestroy"),
    ("result::module::load_data", "cuModuleLoadData"),
    ("result::module::get_function", "cuModuleGetFunction"),
    ("result::module::unload", "cuModuleUnload"),
    ("result::function::set_function_attribute", "cuFuncSetAttribute"),
    ("result::device::get_default_mem_pool", "cuDeviceGetDefaultMemPool"),
    ("result::mem_pool::create", "cuMemPoolCreate"),
    ("result::mem_pool::destroy", "cuMemPoolDestroy"),
    ("result::mem_pool::set_attribute", "cuMemPoolSetAttribute"),
    ("result::mem_pool::alloc_async", "cuMemAllocFromPoolAsync"),
    ("result::free_async", "cuMemFreeAsync"),
    ("result::malloc_host", "cuMemHostAlloc"),
    ("result::free_host", "cuMemFreeHost"),
    ("result::mem_get_info", "cuMemGetInfo_v2"),
    ("result::memcpy_dtod_async", "cuMemcpyDtoDAsync_v2"),
    ("result::memset_d8_async", "cuMemsetD8Async"),
    ("sys::cuCtxGetStreamPriorityRange", "cuCtxGetStreamPriorityRange"),
    ("sys::cuDriverGetVersion", "cuDriverGetVersion"),
    ("sys::cuFuncGetParamInfo", "cuFuncGetParamInfo"),
    ("sys::cuGetErrorString", "cuGetErrorString"),
    ("sys::cuLaunchKernelEx", "cuLaunchKernelEx"),
    ("sys::cuMemAddressFree", "cuMemAddressFree"),
    ("sys::cuMemAddressReserve", "cuMemAddressReserve"),
    ("sys::cuMemCreate", "cuMemCreate"),
    ("sys::cuMemGetAllocationGranularity", "cuMemGetAllocationGranularity"),
    ("sys::cuMemMap", "cuMemMap"),
    ("sys::cuMemRelease", "cuMemRelease"),
    ("sys::cuMemSetAccess", "cuMemSetAccess"),
    ("sys::cuMemUnmap", "cuMemUnmap"),
    ("sys::cuMemcpy2DAsync_v2", "cuMemcpy2DAsync_v2"),
    ("sys::cuMemcpyDtoHAsync_v2", "cuMemcpyDtoHAsync_v2"),
    ("sys::cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync_v2"),
    ("sys::cuOccupancyMaxActiveClusters", "cuOccupancyMaxActiveClusters"),
    ("sys::cuPointerGetAttribute", "cuPointerGetAttribute"),
    ("sys::cuStreamCreateWithPriority", "cuStreamCreateWithPriority"),
    ("sys::cuStreamEndCapture", "cuStreamEndCapture"),
    ("sys::cuTensorMapEncodeTiled", "cuTensorMapEncodeTiled"),
];

/// The functions of `libnvrtc`.
pub(crate) const NVRTC: &[Call] = &[
    ("result::destroy_program", "nvrtcDestroyProgram"),
    ("sys::nvrtcAddNameExpression", "nvrtcAddNameExpression"),
    ("sys::nvrtcCompileProgram", "nvrtcCompileProgram"),
    ("sys::nvrtcCreateProgram", "nvrtcCreateProgram"),
    ("sys::nvrtcGetCUBIN", "nvrtcGetCUBIN"),
    ("sys::nvrtcGetCUBINSize", "nvrtcGetCUBINSize"),
    ("sys::nvrtcGetLoweredName", "nvrtcGetLoweredName"),
    ("sys::nvrtcGetProgramLog", "nvrtcGetProgramLog"),
    ("sys::nvrtcGetProgramLogSize", "nvrtcGetProgramLogSize"),
    ("sys::nvrtcVersion", "nvrtcVersion"),
];

/// The functions of `libcublasLt`.
pub(crate) const CUBLASLT: &[Call] = &[
    ("result::create_handle", "cublasLtCreate"),
    ("result::destroy_handle", "cublasLtDestroy"),
    ("result::create_matmul_desc", "cublasLtMatmulDescCreate"),
    ("result::set_matmul_desc_attribute", "cublasLtMatmulDescSetAttribute"),
    ("result::destroy_matmul_desc", "cublasLtMatmulDescDestroy"),
    ("result::create_matmul_pref", "cublasLtMatmulPreferenceCreate"),
    ("result::set_matmul_pref_attribute", "cublasLtMatmulPreferenceSetAttribute"),
    ("result::destroy_matmul_pref", "cublasLtMatmulPreferenceDestroy"),
    ("result::create_matrix_layout", "cublasLtMatrixLayoutCreate"),
    ("result::destroy_matrix_layout", "cublasLtMatrixLayoutDestroy"),
    ("result::get_matmul_algo_heuristic", "cublasLtMatmulAlgoGetHeuristic"),
    ("result::matmul", "cublasLtMatmul"),
];

/// Checks that a library has all of these functions.
///
/// # Errors
/// The error is a sentence with the names of missing functions.
pub(crate) fn missing(name: &str, library: &Library, calls: &[Call]) -> Result<(), String> {
    // SAFETY: the address is looked up but never used.
    let is_there = |symbol: &str| unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_ok();
    let lacks: Vec<_> = calls.iter().map(|(_, symbol)| *symbol).filter(|symbol| !is_there(symbol)).collect();
    let (first, more) = match lacks[..] {
        [] => return Ok(()),
        [one] => (one, String::new()),
        [first, ..] => (first, format!(" and {} more of the functions that are called", lacks.len() - 1)),
    };
    Err(format!("{name} lacks {first}{more}: it is too old, or no library of NVIDIA's; install a newer one"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// Collects the sources of this crate.
    fn sources(folder: &Path, all: &mut Vec<String>) {
        for entry in folder.read_dir().unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, all);
            } else if !path.ends_with("symbols.rs") {
                all.push(std::fs::read_to_string(&path).unwrap());
            }
        }
    }

    /// Finds calls such as `result::event::create` and `sys::cuInit` in a text.
    fn calls(text: &str) -> impl Iterator<Item = &str> {
        let path = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        let words = text.split(move |c: char| !path(c));
        words.filter(|word| {
            let name = word.rsplit("::").next().unwrap();
            let functions = ["cu", "nvrtc", "cublasLt"];
            let of_sys = word.starts_with("sys::")
                && word.matches("::").count() == 1
                && functions
                    .iter()
                    .any(|f| name.strip_prefix(f).is_some_and(|n| n.starts_with(char::is_uppercase)))
                && !name.ends_with("_t")
                && !["CUresult"].contains(&name);
            let of_result = word.starts_with("result::") && name.starts_with(char::is_lowercase);
            of_sys || of_result
        })
    }

    #[test]
    fn the_lists_are_what_the_sources_call() {
        let mut all = Vec::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut all);
        let called: BTreeSet<_> = all.iter().flat_map(|text| calls(text)).collect();
        let types = ["sys::nvrtcProgram", "sys::nvrtcResult"];
        let called: BTreeSet<_> = called.into_iter().filter(|call| !types.contains(call)).collect();
        let listed: BTreeSet<_> = [DRIVER, NVRTC, CUBLASLT].concat().iter().map(|(call, _)| *call).collect();
        assert_eq!(called, listed);
    }
}
