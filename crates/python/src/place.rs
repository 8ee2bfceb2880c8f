//! The backend of a tensor's device. On a GPU it works on PyTorch's current stream and allocates from PyTorch's allocator.

use crate::dlpack::{self, Foreign};
use crate::element::Element;
use crate::errors::or_raised;
use crate::home::{DeviceId, Home};
use nibble_core::{DType, Data, Lent, Result, Tensor};
use nibble_cpu::Cpu;
use nibble_cuda::{Allocator, Cuda, Device, Given, Jit};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The backend of a device.
#[derive(Clone)]
pub enum Place {
    /// The host.
    Cpu(Cpu),
    /// A GPU, on one stream.
    Cuda(Cuda),
}

/// Runs an expression with the backend of a [`Place`], whichever it is.
#[macro_export]
macro_rules! on {
    ($place:expr, $b:ident => $body:expr) => {
        match $place {
            $crate::place::Place::Cpu($b) => $body,
            $crate::place::Place::Cuda($b) => $body,
        }
    };
}

/// The backends opened so far: of the host, and of each GPU and stream.
#[derive(Default)]
struct Opened {
    cpu: Option<Cpu>,
    cuda: HashMap<(i32, u64), Cuda>,
}

static OPENED: OnceLock<Mutex<Opened>> = OnceLock::new();

/// PyTorch's allocator of one GPU.
#[derive(Debug)]
struct OfTorch(DeviceId);

impl Allocator for OfTorch {
    fn alloc(&self, bytes: usize) -> Result<Lent> {
        dlpack::allocate(self.0, bytes)
    }
}

/// The backend of a device, on the stream on which PyTorch works now.
///
/// # Errors
/// `ValueError` for a device other than a CPU or a GPU of NVIDIA; `RuntimeError` if the GPU is no Hopper GPU, or there is no NVRTC.
pub fn of(py: Python<'_>, device: DeviceId) -> PyResult<Place> {
    let mut opened = OPENED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    match device.kind {
        DeviceId::CPU => {
            if opened.cpu.is_none() {
                opened.cpu = Some(or_raised(Cpu::new(threads()?))?);
            }
            opened.cpu.clone().map(Place::Cpu).ok_or_else(|| PyValueError::new_err("no CPU backend"))
        }
        DeviceId::CUDA => {
            let stream = dlpack::current_stream(py, device)?;
            if let Some(cuda) = opened.cuda.get(&(device.number, stream)) {
                return Ok(Place::Cuda(cuda.clone()));
            }
            // SAFETY: PyTorch's streams live as long as the process.
            let given = unsafe { Given::new(stream, Arc::new(OfTorch(device))) };
            let beside = opened.cuda.iter().find(|((number, _), _)| *number == device.number);
            let made = match beside {
                Some((_, other)) => other.device().reopened_on(given),
                None => Jit::from_env().and_then(|jit| {
                    Device::on_stream(usize::try_from(device.number).unwrap_or(usize::MAX), given, jit)
                }),
            };
            let cuda = Cuda::on(or_raised(made)?);
            opened.cuda.insert((device.number, stream), cuda.clone());
            Ok(Place::Cuda(cuda))
        }
        kind => Err(PyValueError::new_err(format!(
            "a tensor is on a device of DLPack's kind {kind}; nibble computes on CPUs and on NVIDIA's GPUs"
        ))),
    }
}

/// The number of threads on the CPU: `NIBBLE_THREADS`, or 0 for one per core.
fn threads() -> PyResult<usize> {
    const NAME: &str = "NIBBLE_THREADS";
    match std::env::var(NAME) {
        Ok(text) => {
            text.parse().map_err(|_| PyValueError::new_err(format!("{NAME} is `{text}`, expected a number")))
        }
        Err(_) => Ok(0),
    }
}

/// The tensors of a call, which must all be on one device.
pub struct Tensors {
    device: DeviceId,
}

impl Tensors {
    /// A call whose first tensor is this one. Returns also the backend of its device.
    ///
    /// # Errors
    /// The errors of [`of`].
    pub fn beside(py: Python<'_>, first: &Foreign) -> PyResult<(Self, Place)> {
        let device = first.device();
        Ok((Self { device }, of(py, device)?))
    }

    /// A tensor of any of these element types.
    ///
    /// # Errors
    /// `TypeError` for another element type, `ValueError` on another device; both name the argument.
    pub fn take(&self, x: &Foreign, argument: &str, expected: &[Element]) -> PyResult<Element> {
        if x.device() != self.device {
            return Err(PyValueError::new_err(format!(
                "`{argument}` is on another device than the first tensor"
            )));
        }
        let element = Element::of(x.dtype()).filter(|element| expected.contains(element));
        element.ok_or_else(|| {
            let names: Vec<_> = expected.iter().map(|element| element.name()).collect();
            let got = type_of(x);
            PyTypeError::new_err(format!("`{argument}` is {got}, expected {}", names.join(" or ")))
        })
    }

    /// The tensor of a step's number, if there is one.
    ///
    /// # Errors
    /// The errors of [`Tensors::take`]; `ValueError` unless it has one value.
    pub fn time(&self, time: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Foreign>> {
        let Some(time) = time else { return Ok(None) };
        let time = Foreign::of(time, "time")?;
        self.take(&time, "time", &[Element::I32])?;
        if time.len() != 1 {
            return Err(PyValueError::new_err(format!("`time` has {} values, expected one", time.len())));
        }
        Ok(Some(time))
    }
}

/// A tensor's element type in words.
fn type_of(x: &Foreign) -> String {
    let dtype = x.dtype();
    let other = || match (dtype.code, dtype.bits) {
        (2, bits @ (16 | 64)) => format!("float{bits}"),
        (code, bits) => format!("of {bits} bits (DLPack's type {code})"),
    };
    Element::of(dtype).map_or_else(other, |element| element.name().to_owned())
}

/// A plain tensor of borrowed memory, as a matrix `[rows, cols]`.
///
/// # Errors
/// [`nibble_core::Error::Shape`] unless the tensor has `rows · cols` elements.
pub fn matrix<B: Home>(
    b: &B,
    x: Foreign,
    element: Element,
    (rows, cols): (usize, usize),
) -> Result<Tensor<B>> {
    let data = match element {
        Element::Bf16 => Data::Bf16(b.borrow(x.lent())?),
        _ => Data::F32(b.borrow(x.lent())?),
    };
    Tensor::new(data, rows, cols)
}

/// A plain tensor as a tensor of PyTorch.
///
/// # Errors
/// The error that PyTorch raised.
pub fn exported<B: Home>(py: Python<'_>, b: &B, x: Tensor<B>, shape: &[usize]) -> PyResult<Py<PyAny>> {
    let element = x.dtype().into();
    match x.data {
        Data::F32(buf) => dlpack::export::<B, f32>(py, (b, buf), element, shape),
        Data::Bf16(buf) => dlpack::export::<B, half::bf16>(py, (b, buf), element, shape),
    }
}

/// The type of a plain tensor.
pub const fn plain(element: Element) -> DType {
    match element {
        Element::Bf16 => DType::Bf16,
        _ => DType::F32,
    }
}
