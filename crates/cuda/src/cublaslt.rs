//! Dense GEMMs by cuBLASLt, as a reference: D = A·Bᵀ of BF16, or of E4M3 with one scale per tensor; D is BF16.

use crate::driver::failed;
use crate::{Buffer, Device};
use bytemuck::Pod;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasLtMatmulDescAttributes_t as Attribute};
use half::bf16;
use nibble_core::{Error, Result};
use std::ffi::c_void;
use std::marker::PhantomData;

const OP: &str = "cublaslt gemm";
/// The workspace size that NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The value of `CUBLAS_OP_T`, which is an int in the library's interface.
const OP_TRANSPOSE: i32 = 1;

fn named<T>(call: &str, result: Result<T, CublasError>) -> Result<T> {
    result.map_err(|error| failed(call, error))
}

/// Sets an attribute of a GEMM.
///
/// # Safety
/// `desc` must be alive, and `V` must be the attribute's type.
unsafe fn set<V: Copy>(desc: sys::cublasLtMatmulDesc_t, attribute: Attribute, value: V) -> Result<()> {
    // SAFETY: the caller guarantees `desc` and `V`; the value lives through the call, which copies
    // it.
    let done = unsafe {
        result::set_matmul_desc_attribute(desc, attribute, (&raw const value).cast(), size_of::<V>())
    };
    named("cublasLtMatmulDescSetAttribute", done)
}

/// The element type of A and B.
pub trait Element: Pod {
    /// Whether the element type is E4M3.
    const IS_FP8: bool;
}

impl Element for bf16 {
    const IS_FP8: bool = false;
}

/// An E4M3 code.
impl Element for u8 {
    const IS_FP8: bool = true;
}

/// A dense GEMM of fixed sizes in cuBLASLt, with the algorithm that the library recommends. Sums are in F32. For E4M3 the tensor cores
/// compute the sums with fewer bits ("fast accumulation"), and A and B have one scale each, which is 1.
#[derive(Debug)]
pub struct Gemm<T: Element> {
    handle: sys::cublasLtHandle_t,
    desc: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algo: sys::cublasLtMatmulAlgo_t,
    workspace: Buffer<u8>,
    /// The scales of A and B, which every call reads; `None` for BF16.
    _scales: [Option<Buffer<f32>>; 2],
    element: PhantomData<T>,
    m: usize,
    n: usize,
    k: usize,
}

impl<T: Element> Gemm<T> {
    /// Prepares D `[m][n]` = A `[m][k]` · B `[n][k]`ᵀ.
    pub fn new(device: &Device, m: usize, n: usize, k: usize) -> Result<Self> {
        crate::probe().cublaslt.clone().map_err(|why| failed("loading cuBLASLt", why))?;
        let workspace = device.alloc(WORKSPACE_BYTES)?;
        let scale = || if T::IS_FP8 { device.upload(&[1.0f32]).map(Some) } else { Ok(None) };
        let scales = [scale()?, scale()?];
        let bf16_type = sys::cudaDataType::CUDA_R_16BF;
        let element = if T::IS_FP8 { sys::cudaDataType::CUDA_R_8F_E4M3 } else { bf16_type };
        // The library is column-major: row-major D = A·Bᵀ is its Dᵀ = (Bᵀ)ᵀ · Aᵀ, with its first operand transposed.
        // SAFETY: handles are used only between creation and destruction; attribute values live through the calls that
        // read them and have the given sizes. On an error some descriptors leak, which costs a few hundred bytes once.
        unsafe {
            let handle = named("cublasLtCreate", result::create_handle())?;
            let desc = named(
                "cublasLtMatmulDescCreate",
                result::create_matmul_desc(
                    sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                    sys::cudaDataType::CUDA_R_32F,
                ),
            )?;
            let workspace_bytes = WORKSPACE_BYTES;
            set(desc, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, OP_TRANSPOSE)?;
            if let [Some(a), Some(b)] = &scales {
                set(desc, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b.address())?;
                set(desc, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a.address())?;
                set(desc, Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, 1i8)?;
            }
            let layout = |element, rows: usize, cols: usize, stride: usize| {
                let made = result::create_matrix_layout(element, rows as u64, cols as u64, stride as i64);
                named("cublasLtMatrixLayoutCreate", made)
            };
            let layouts = [layout(element, k, n, k)?, layout(element, k, m, k)?, layout(bf16_type, n, m, n)?];
            let preference = named("cublasLtMatmulPreferenceCreate", result::create_matmul_pref())?;
            named(
                "cublasLtMatmulPreferenceSetAttribute",
                result::set_matmul_pref_attribute(
                    preference,
                    sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                    (&raw const workspace_bytes).cast(),
                    size_of::<usize>(),
                ),
            )?;
            let [b, a, d] = layouts;
            let found = result::get_matmul_algo_heuristic(handle, desc, b, a, d, d, preference);
            // The preference is not used again, so a failure only leaks a few bytes.
            let _ = result::destroy_matmul_pref(preference);
            let algo = named("cublasLtMatmulAlgoGetHeuristic", found)?.algo;
            Ok(Self {
                handle,
                desc,
                layouts,
                algo,
                workspace,
                _scales: scales,
                element: PhantomData,
                m,
                n,
                k,
            })
        }
    }

    /// Issues the GEMM on the device's stream.
    pub fn run(&self, a: &Buffer<T>, b: &Buffer<T>, d: &mut Buffer<bf16>) -> Result<()> {
        let Self { m, n, k, .. } = *self;
        for (argument, got, expected) in [("a", a.len(), m * k), ("b", b.len(), n * k), ("d", d.len(), m * n)]
        {
            if got != expected {
                return Err(Error::shape(
                    OP,
                    argument,
                    format!("{got} values"),
                    format!("{expected} values"),
                ));
            }
        }
        let stream = self.workspace.device().stream()?;
        let (one, zero) = (1.0f32, 0.0f32);
        let pointer = |address: u64| address as *mut c_void;
        let (a, b, d) = (pointer(a.address()), pointer(b.address()), pointer(d.address()));
        let [layout_b, layout_a, layout_d] = self.layouts;
        // SAFETY: lengths were checked against the layouts; the scalars are host values read during the call; the driver's
        // stream type and the library's are the same handle.
        let done = unsafe {
            result::matmul(
                self.handle,
                self.desc,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                b,
                layout_b,
                a,
                layout_a,
                d,
                layout_d,
                d,
                layout_d,
                &self.algo,
                pointer(self.workspace.address()),
                WORKSPACE_BYTES,
                stream.cast(),
            )
        };
        named("cublasLtMatmul", done)
    }
}

impl<T: Element> Drop for Gemm<T> {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed once; the library has copied what its running calls need.
        unsafe {
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.desc);
            let _ = result::destroy_handle(self.handle);
        }
    }
}
