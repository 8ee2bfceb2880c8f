//! Dense BF16 products by cuBLASLt: D = A·Bᵀ, F32 accumulation.

use crate::device::{Buffer, Device};
use crate::driver::failed;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use half::bf16;
use nibble_core::{Error, Result};
use std::ffi::c_void;

const OP: &str = "cublaslt gemm";
/// What NVIDIA advises for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// `CUBLAS_OP_T`, an int in the library's interface.
const OP_TRANSPOSE: i32 = 1;

fn named<T>(call: &str, result: Result<T, CublasError>) -> Result<T> {
    result.map_err(|error| failed(call, error))
}

/// A dense BF16 product of fixed sizes, with the algorithm the library advises.
#[derive(Debug)]
pub struct GemmBf16 {
    handle: sys::cublasLtHandle_t,
    desc: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algo: sys::cublasLtMatmulAlgo_t,
    workspace: Buffer<u8>,
    m: usize,
    n: usize,
    k: usize,
}

impl GemmBf16 {
    /// D `[m][n]` = A `[m][k]` · B `[n][k]`ᵀ.
    pub fn new(device: &Device, m: usize, n: usize, k: usize) -> Result<Self> {
        if !crate::probe().cublaslt {
            return Err(failed("loading cuBLASLt", "libcublasLt.so cannot be loaded"));
        }
        let workspace = device.alloc(WORKSPACE_BYTES)?;
        let bf16_type = sys::cudaDataType::CUDA_R_16BF;
        // The library is column-major: row-major D = A·Bᵀ is its Dᵀ = (Bᵀ)ᵀ · Aᵀ, with its first operand transposed.
        // SAFETY: handles are used between creation and destruction; attribute values live through the calls that read
        // them and have the sizes given. On an error some descriptors leak, a few hundred bytes once.
        unsafe {
            let handle = named("cublasLtCreate", result::create_handle())?;
            let desc = named(
                "cublasLtMatmulDescCreate",
                result::create_matmul_desc(
                    sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                    sys::cudaDataType::CUDA_R_32F,
                ),
            )?;
            let transpose = OP_TRANSPOSE;
            let workspace_bytes = WORKSPACE_BYTES;
            named(
                "cublasLtMatmulDescSetAttribute",
                result::set_matmul_desc_attribute(
                    desc,
                    sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                    (&raw const transpose).cast(),
                    size_of_val(&transpose),
                ),
            )?;
            let layout = |rows: usize, cols: usize, stride: usize| {
                let made = result::create_matrix_layout(bf16_type, rows as u64, cols as u64, stride as i64);
                named("cublasLtMatrixLayoutCreate", made)
            };
            let layouts = [layout(k, n, k)?, layout(k, m, k)?, layout(n, m, n)?];
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
            // Used no further; its loss would be a leak of a few bytes.
            let _ = result::destroy_matmul_pref(preference);
            let algo = named("cublasLtMatmulAlgoGetHeuristic", found)?.algo;
            Ok(Self { handle, desc, layouts, algo, workspace, m, n, k })
        }
    }

    /// Runs on the device's stream.
    pub fn run(&self, a: &Buffer<bf16>, b: &Buffer<bf16>, d: &mut Buffer<bf16>) -> Result<()> {
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
        let pointer = |buffer: &Buffer<bf16>| buffer.address() as *mut c_void;
        let [layout_b, layout_a, layout_d] = self.layouts;
        // SAFETY: lengths were checked against the layouts; the scalars are host values read during the call; the driver's
        // stream type and the library's are the same handle.
        let done = unsafe {
            result::matmul(
                self.handle,
                self.desc,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                pointer(b),
                layout_b,
                pointer(a),
                layout_a,
                pointer(d),
                layout_d,
                pointer(d),
                layout_d,
                &self.algo,
                self.workspace.address() as *mut c_void,
                WORKSPACE_BYTES,
                stream.cast(),
            )
        };
        named("cublasLtMatmul", done)
    }
}

impl Drop for GemmBf16 {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; the library copied what it needs for calls still running.
        unsafe {
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.desc);
            let _ = result::destroy_handle(self.handle);
        }
    }
}
