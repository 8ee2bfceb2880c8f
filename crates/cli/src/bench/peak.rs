//! What the processor reaches at nothing but multiply-adds: the floor under every product.

use nibble_cpu::gemm::Isa;
use std::hint::black_box;
use std::time::Instant;

/// The dot products that the matrix products are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dot {
    /// F32 fused multiply-adds.
    F32,
    /// Pairs of BF16, where the machine has an instruction for them; codes of eight and four bits go this way too.
    Bf16,
}

/// Independent sums: more than the latency of a multiply-add takes to hide.
const CHAINS: usize = 12;
const ROUNDS: usize = 200_000;

/// The best of several measurements on all threads of a pool, flops a second.
pub fn measure(pool: &rayon::ThreadPool, dot: Dot) -> f64 {
    let once = || {
        let start = Instant::now();
        let flops: Vec<f64> = pool.broadcast(|_| chains(dot));
        flops.iter().sum::<f64>() / start.elapsed().as_secs_f64()
    };
    (0..15).map(|_| once()).fold(0.0, f64::max)
}

/// Does the rounds on this thread and returns the number of flops done.
fn chains(dot: Dot) -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        let lanes = match (Isa::best(), dot) {
            // SAFETY: `Isa::best` names only what the machine has.
            (Isa::Avx512Bf16, Dot::Bf16) => unsafe { x86::dots() },
            // SAFETY: as above.
            (Isa::Avx512 | Isa::Avx512Bf16, _) => unsafe { x86::fmas_512() },
            // SAFETY: as above.
            (Isa::Avx2, _) => unsafe { x86::fmas_256() },
            (Isa::Portable, _) => portable(),
        };
        (2 * lanes * CHAINS * ROUNDS) as f64
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (dot, Isa::best());
        (2 * portable() * CHAINS * ROUNDS) as f64
    }
}

/// Returns the multiply-adds of one instruction, as its siblings do.
fn portable() -> usize {
    const LANES: usize = 4;
    let (x, y) = black_box(([0.5f32; LANES], [0.25f32; LANES]));
    let mut sums = [[0f32; LANES]; CHAINS];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            for lane in 0..LANES {
                sum[lane] += x[lane] * y[lane];
            }
        }
    }
    black_box(sums);
    LANES
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{CHAINS, ROUNDS, black_box};
    use std::arch::x86_64::*;

    /// # Safety
    /// The machine has avx512bf16.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub unsafe fn dots() -> usize {
        // SAFETY: any 512 bits are 32 BF16.
        let x: __m512bh = unsafe { std::mem::transmute(black_box([0x3F00u16; 32])) };
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..ROUNDS {
            sums.iter_mut().for_each(|sum| *sum = _mm512_dpbf16_ps(*sum, x, x));
        }
        black_box(sums);
        32
    }

    /// # Safety
    /// The machine has avx512f.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn fmas_512() -> usize {
        let x = _mm512_set1_ps(black_box(0.5));
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..ROUNDS {
            sums.iter_mut().for_each(|sum| *sum = _mm512_fmadd_ps(x, x, *sum));
        }
        black_box(sums);
        16
    }

    /// # Safety
    /// The machine has avx2 and fma.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn fmas_256() -> usize {
        let x = _mm256_set1_ps(black_box(0.5));
        let mut sums = [_mm256_setzero_ps(); CHAINS];
        for _ in 0..ROUNDS {
            sums.iter_mut().for_each(|sum| *sum = _mm256_fmadd_ps(x, x, *sum));
        }
        black_box(sums);
        8
    }
}
