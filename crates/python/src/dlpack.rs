//! Tensors of PyTorch as borrowed memory, and Nibble's buffers as tensors of PyTorch, by DLPack's C exchange table.
//!
//! The table is an attribute of the tensor type (`__dlpack_c_exchange_api__`). Its functions make views without synchronising, name the
//! stream on which PyTorch works now, and allocate from PyTorch's allocator. The structures are those of `dlpack.h`, version 1.3:
//! <https://dmlc.github.io/dlpack/latest/c_api.html>.

use crate::element::{DataType, Element};
use crate::home::{DeviceId, Home};
use nibble_core::{Error, Lent, Plain, Result};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

/// The major version of DLPack whose structures these are.
const MAJOR: u32 = 1;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DeviceId,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    flags: u64,
    tensor: DlTensor,
}

type SetError = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char);

/// `DLPackExchangeAPI`.
#[repr(C)]
struct Table {
    version: Version,
    previous: *const Table,
    allocate: unsafe extern "C" fn(*mut DlTensor, *mut *mut Managed, *mut c_void, SetError) -> c_int,
    from_object: unsafe extern "C" fn(*mut c_void, *mut *mut Managed) -> c_int,
    to_object: unsafe extern "C" fn(*mut Managed, *mut *mut c_void) -> c_int,
    borrow_object: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
    current_stream: unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int,
}

/// The tensor type of PyTorch and its exchange table.
struct Exchange {
    tensor: Py<PyType>,
    table: &'static Table,
}

// SAFETY: the table is constant, its functions may be called from any thread, and a Python object is only used with the interpreter's lock.
unsafe impl Send for Exchange {}
// SAFETY: as for `Send`.
unsafe impl Sync for Exchange {}

static EXCHANGE: OnceLock<Exchange> = OnceLock::new();

/// Takes the exchange table of PyTorch's tensor type. All other functions need it.
///
/// # Errors
/// `TypeError` if the type has none (PyTorch before 2.11), or one of another major version of DLPack.
#[pyfunction]
pub fn use_tensors_of(tensor: &Bound<'_, PyType>) -> PyResult<()> {
    let capsule = tensor.getattr("__dlpack_c_exchange_api__").map_err(|_| {
        PyTypeError::new_err(
            "this PyTorch has no `__dlpack_c_exchange_api__`; nibble needs PyTorch 2.11 or later",
        )
    })?;
    let capsule = capsule.cast_into::<PyCapsule>().map_err(PyErr::from)?;
    let table = capsule.pointer_checked(Some(c"dlpack_exchange_api"))?;
    // SAFETY: a capsule of this name holds a table that lives as long as the process, as DLPack states.
    let table = unsafe { table.cast::<Table>().as_ref() };
    if table.version.major != MAJOR {
        let Version { major, minor } = table.version;
        let why = format!("PyTorch's exchange table is of DLPack {major}.{minor}; nibble needs {MAJOR}.x");
        return Err(PyTypeError::new_err(why));
    }
    // A second call names the same type.
    let _ = EXCHANGE.set(Exchange { tensor: tensor.clone().unbind(), table });
    Ok(())
}

fn exchange() -> PyResult<&'static Exchange> {
    EXCHANGE
        .get()
        .ok_or_else(|| PyRuntimeError::new_err("import nibble.torch before its native part is used"))
}

/// A tensor of PyTorch, which lives at least as long as this handle.
pub struct Foreign {
    managed: NonNull<Managed>,
}

// SAFETY: a managed tensor may be read and deleted on any thread, as DLPack states.
unsafe impl Send for Foreign {}
// SAFETY: nothing is written through a shared handle.
unsafe impl Sync for Foreign {}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: the handle owns the managed tensor, which is deleted once.
        unsafe {
            if let Some(delete) = self.managed.as_ref().deleter {
                delete(self.managed.as_ptr());
            }
        }
    }
}

impl Foreign {
    /// A view of a tensor.
    ///
    /// # Errors
    /// `TypeError` if the object is no tensor; `ValueError`, which names the argument, if its elements are not contiguous.
    pub fn of(object: &Bound<'_, PyAny>, argument: &str) -> PyResult<Self> {
        let exchange = exchange()?;
        if !object.is_instance(exchange.tensor.bind(object.py()))? {
            let got = object.get_type().name()?;
            return Err(PyTypeError::new_err(format!("`{argument}` is a {got}, expected a torch.Tensor")));
        }
        let mut managed = std::ptr::null_mut();
        // SAFETY: the object is a tensor of the type whose table this is, and the interpreter's lock is held.
        let code = unsafe { (exchange.table.from_object)(object.as_ptr().cast(), &raw mut managed) };
        let managed = NonNull::new(managed).filter(|_| code == 0).ok_or_else(|| PyErr::fetch(object.py()))?;
        let tensor = Self { managed };
        if !tensor.is_contiguous() {
            let (shape, strides) = (tensor.shape(), tensor.strides());
            return Err(PyValueError::new_err(format!(
                "`{argument}` has shape {shape:?} and strides {strides:?}, expected a contiguous tensor: call `.contiguous()`"
            )));
        }
        Ok(tensor)
    }

    fn tensor(&self) -> &DlTensor {
        // SAFETY: the handle owns the managed tensor.
        unsafe { &self.managed.as_ref().tensor }
    }

    /// The device.
    pub fn device(&self) -> DeviceId {
        self.tensor().device
    }

    /// The element type.
    pub fn dtype(&self) -> DataType {
        self.tensor().dtype
    }

    /// The length of each dimension.
    pub fn shape(&self) -> &[i64] {
        self.numbers(self.tensor().shape)
    }

    fn strides(&self) -> &[i64] {
        self.numbers(self.tensor().strides)
    }

    fn numbers(&self, of: *const i64) -> &[i64] {
        let count = usize::try_from(self.tensor().ndim).unwrap_or(0);
        // SAFETY: where the pointer is not null, it points to a number for each dimension, which live as long as the tensor.
        if of.is_null() { &[] } else { unsafe { std::slice::from_raw_parts(of, count) } }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        // The tensor exists, so its number of elements is no larger than the address space.
        self.shape().iter().product::<i64>() as usize
    }

    fn is_contiguous(&self) -> bool {
        let (shape, strides) = (self.shape(), self.strides());
        if strides.is_empty() || shape.contains(&0) {
            return true;
        }
        let mut expected = 1;
        shape.iter().zip(strides).rev().all(|(len, stride)| {
            let fits = *len == 1 || *stride == expected;
            expected *= len;
            fits
        })
    }

    /// The address of the first element.
    pub fn address(&self) -> u64 {
        self.tensor().data as u64 + self.tensor().byte_offset
    }

    /// The tensor's memory, for reading. The tensor lives until the memory is given back.
    pub fn lent(self) -> Lent {
        let (address, bytes, owner) = self.memory();
        // SAFETY: as `memory` says. Callers do not change a tensor while an operation that they called reads it.
        unsafe { Lent::new(address, bytes, owner) }
    }

    /// The tensor's memory, which operations may write to. Nobody else uses the tensor.
    pub fn lent_writable(self) -> Lent {
        let (address, bytes, owner) = self.memory();
        // SAFETY: as `memory` says, and only the borrower uses the tensor.
        unsafe { Lent::writable(address, bytes, owner) }
    }

    /// Address, length in bytes, and owner of the tensor's memory. The elements are contiguous, so these are its bytes, and the handle keeps
    /// them alive. PyTorch's allocator frees them in the order of the stream.
    fn memory(self) -> (u64, usize, Arc<Self>) {
        let bytes = self.len() * usize::from(self.dtype().bits) / 8;
        (self.address(), bytes, Arc::new(self))
    }
}

/// The stream on which PyTorch issues work to a GPU now, on this thread.
///
/// # Errors
/// The error that PyTorch raised.
pub fn current_stream(py: Python<'_>, device: DeviceId) -> PyResult<u64> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: the call writes one pointer.
    let code = unsafe { (exchange()?.table.current_stream)(device.kind, device.number, &raw mut stream) };
    if code == 0 { Ok(stream as u64) } else { Err(PyErr::fetch(py)) }
}

/// Memory of PyTorch's allocator on a GPU, for work on the current stream.
///
/// # Errors
/// [`Error::OutOfMemory`] with PyTorch's message.
pub fn allocate(device: DeviceId, bytes: usize) -> Result<Lent> {
    let refused = |why: String| Error::OutOfMemory { place: "PyTorch's allocator".into(), bytes, why };
    let table = exchange().map_err(|error| refused(error.to_string()))?.table;
    let mut shape = [i64::try_from(bytes).map_err(|error| refused(error.to_string()))?];
    let mut prototype = DlTensor {
        data: std::ptr::null_mut(),
        device,
        ndim: 1,
        dtype: Element::U8.dtype(),
        shape: shape.as_mut_ptr(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let (mut managed, mut why) = (std::ptr::null_mut(), String::new());
    // SAFETY: the prototype is complete and lives during the call; `note` takes the string that it is given.
    let code =
        unsafe { (table.allocate)(&raw mut prototype, &raw mut managed, (&raw mut why).cast(), note_error) };
    match NonNull::new(managed).filter(|_| code == 0) {
        Some(managed) => {
            // PyTorch has just allocated these bytes.
            Ok(Foreign { managed }.lent_writable())
        }
        None => Err(refused(why)),
    }
}

/// Notes an error of the allocator in the string to which `context` points.
unsafe extern "C" fn note_error(context: *mut c_void, kind: *const c_char, message: *const c_char) {
    // SAFETY: the context is the string of `allocate`, and both texts end with a zero byte.
    unsafe {
        let text =
            |of: *const c_char| if of.is_null() { "".into() } else { CStr::from_ptr(of).to_string_lossy() };
        *context.cast::<String>() = format!("{}: {}", text(kind), text(message));
    }
}

/// A buffer that has become a tensor of PyTorch.
struct Exported {
    managed: Managed,
    shape: Vec<i64>,
    strides: Vec<i64>,
    /// Keeps the memory alive.
    _buffer: Box<dyn Send>,
}

unsafe extern "C" fn delete_exported(managed: *mut Managed) {
    // SAFETY: the context is the box that `export` leaked, and PyTorch calls this once.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Exported>()) });
}

/// A buffer as a tensor of PyTorch that shares its memory. The caller has no other handle of the buffer that it uses later.
///
/// # Errors
/// The error that PyTorch raised.
pub fn export<B: Home, T: Plain>(
    py: Python<'_>,
    of: (&B, B::Buf<T>),
    element: Element,
    shape: &[usize],
) -> PyResult<Py<PyAny>> {
    export_strided::<B, T>(py, of, element, (shape, None))
}

/// [`export`] of elements that lie at these strides; `None` means one after the other. All of them lie in the buffer.
///
/// # Errors
/// The error that PyTorch raised.
pub fn export_strided<B: Home, T: Plain>(
    py: Python<'_>,
    (b, buf): (&B, B::Buf<T>),
    element: Element,
    (shape, strides): (&[usize], Option<&[usize]>),
) -> PyResult<Py<PyAny>> {
    let shape: Vec<i64> = shape.iter().map(|len| *len as i64).collect();
    let strides = strides.map(|strides| strides.iter().map(|stride| *stride as i64).collect());
    let strides = strides.unwrap_or_else(|| {
        let mut strides = vec![1; shape.len()];
        for at in (1..shape.len()).rev() {
            strides[at - 1] = strides[at] * shape[at].max(1);
        }
        strides
    });
    let tensor = DlTensor {
        data: B::buffer_id(&buf) as *mut c_void,
        device: b.device_id(),
        ndim: shape.len() as i32,
        dtype: element.dtype(),
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let table = exchange()?.table;
    let version = Version { major: MAJOR, minor: table.version.minor };
    let managed =
        Managed { version, context: std::ptr::null_mut(), deleter: Some(delete_exported), flags: 0, tensor };
    let exported = Box::leak(Box::new(Exported { managed, shape, strides, _buffer: Box::new(buf) }));
    exported.managed.tensor.shape = exported.shape.as_mut_ptr();
    exported.managed.tensor.strides = exported.strides.as_mut_ptr();
    let whole: *mut Exported = exported;
    // SAFETY: the box was just leaked; `delete_exported` takes it back.
    let managed = unsafe {
        (*whole).managed.context = whole.cast();
        &raw mut (*whole).managed
    };
    let mut object = std::ptr::null_mut();
    // SAFETY: the managed tensor is complete, and the interpreter's lock is held.
    let code = unsafe { (table.to_object)(managed, &raw mut object) };
    if code != 0 || object.is_null() {
        // SAFETY: PyTorch did not take the tensor.
        unsafe { delete_exported(managed) };
        return Err(PyErr::fetch(py));
    }
    // SAFETY: the call returned a new reference.
    Ok(unsafe { Bound::from_owned_ptr(py, object.cast()) }.unbind())
}
