//! How one body of safe, branch-free Rust becomes one function an instruction set.
//!
//! Elementwise code needs no intrinsics: compiled with the right target features the compiler vectorises it, and since
//! every lane does the same IEEE operations in the same order the bits are those of the scalar build.

/// Defines `fn name(isa: Isa, args)`: the `#[inline(always)]` function `body` compiled for each instruction set, picked
/// at run time.
///
/// ```ignore
/// per_isa!(fn add_rows = add_rows_body(a: &[f32], b: &[f32], out: &mut [f32]));
/// ```
macro_rules! per_isa {
    ($vis:vis fn $name:ident = $body:path; ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?) => {
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(isa: $crate::gemm::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                match isa {
                    // SAFETY: an `Isa` above `Portable` is only ever put into a `Cpu` after `is_supported` said that
                    // this machine has these features.
                    $crate::gemm::Isa::Avx512 | $crate::gemm::Isa::Avx512Bf16 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::gemm::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::gemm::Isa::Portable => {}
                }
            }
            let _ = isa;
            $body($($arg),*)
        }
    };
}
pub(crate) use per_isa;
