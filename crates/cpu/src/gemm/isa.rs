use super::GemmError;

/// The instruction set of a GEMM. The results of all instruction sets have the same bits, so instruction sets differ only in speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, which the compiler vectorises where the target has a fused multiply-add.
    Portable,
    /// x86-64 with AVX2 and FMA: 8 lanes; two FMAs per pair emulate the BF16 dot product.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL: 16 lanes; two FMAs per pair emulate the BF16 dot product.
    Avx512,
    /// AVX-512 with `vdpbf16ps`, the instruction that defines the BF16 dot product.
    Avx512Bf16,
}

impl Isa {
    /// All instruction sets, slowest first.
    pub const ALL: [Isa; 4] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];

    /// The fastest instruction set of this machine.
    pub fn best() -> Self {
        // `Portable` is supported everywhere, so the search always finds one.
        Self::ALL.into_iter().rev().find(|isa| isa.is_supported()).unwrap_or(Isa::Portable)
    }

    /// Whether this machine supports the instruction set.
    pub fn is_supported(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = || {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
            };
            match self {
                Isa::Portable => true,
                Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
                Isa::Avx512 => avx512(),
                Isa::Avx512Bf16 => avx512() && is_x86_feature_detected!("avx512bf16"),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Isa::Portable
        }
    }

    pub(super) fn checked(self) -> Result<Self, GemmError> {
        if self.is_supported() {
            Ok(self)
        } else {
            Err(GemmError::new(
                "isa",
                format!("{self:?}"),
                format!("one this machine has, at most {:?}", Self::best()),
            ))
        }
    }
}
