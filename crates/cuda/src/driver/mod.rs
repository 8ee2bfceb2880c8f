//! Converts the driver's return codes to this workspace's errors.

pub(crate) mod symbols;

use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUresult};
use nibble_core::{Error, Result};
use std::ffi::CStr;

/// An [`Error::Device`] for a call that has no return code.
pub(crate) fn failed(call: impl Into<String>, why: impl ToString) -> Error {
    Error::Device { call: call.into(), why: why.to_string() }
}

/// The driver's name and explanation for one of its codes.
pub(crate) fn describe(code: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: both calls accept any code and write a pointer to a static string, or leave null for an unknown code. A
    // `code` exists only if the driver library was loaded.
    unsafe {
        if sys::cuGetErrorString(code, &mut text) != CUresult::CUDA_SUCCESS || text.is_null() {
            return format!("{code:?}");
        }
        format!("{code:?}: {}", CStr::from_ptr(text).to_string_lossy())
    }
}

/// `Ok` for success; otherwise an error with the failed call and the reason.
pub(crate) fn check(call: &str, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failed(call, describe(code))) }
}

/// Adds the name of the call to a `cudarc` result.
pub(crate) fn named<T>(call: &str, result: Result<T, DriverError>) -> Result<T> {
    result.map_err(|error| failed(call, describe(error.0)))
}
