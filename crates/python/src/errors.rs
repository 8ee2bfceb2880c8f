//! Nibble's errors as Python's exceptions, with Nibble's text.

use nibble_core::Error;
use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::{PyErr, PyResult};

/// The exception for an error: `ValueError` for an argument, `NotImplementedError` for a combination without a kernel, `MemoryError`, and
/// `RuntimeError` for what the device reports.
fn raised(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Shape { .. } | Error::Capacity { .. } => PyValueError::new_err(text),
        Error::Unsupported { .. } => PyNotImplementedError::new_err(text),
        Error::OutOfMemory { .. } => PyMemoryError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    }
}

/// The result, with Nibble's error as an exception.
///
/// # Errors
/// `ValueError` for an argument, `NotImplementedError` for a combination without a kernel, `MemoryError`, and `RuntimeError` for what the
/// device reports.
pub fn or_raised<T>(done: nibble_core::Result<T>) -> PyResult<T> {
    done.map_err(raised)
}
