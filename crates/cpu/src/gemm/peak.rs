//! The peak multiply-add rate of the processor: the upper bound of every GEMM's speed.

use super::Isa;
use std::time::Instant;

/// The kinds of dot product that GEMMs use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dot {
    /// F32 fused multiply-adds.
    F32,
    /// Products of BF16 pairs, with a dedicated instruction if the machine has one. FP8 and FP4 codes also use this dot product.
    Bf16,
}

/// The best of `runs` measurements on all threads of a pool, in flops per second.
pub fn measure(pool: &rayon::ThreadPool, dot: Dot, runs: usize) -> f64 {
    // The loop takes more than a millisecond, so that the time to wake the threads is negligible.
    const ROUNDS: usize = 400_000;
    let once = || {
        let start = Instant::now();
        pool.broadcast(|_| chains(ROUNDS, dot));
        let flops = (pool.current_num_threads() * ROUNDS) as f64 * flops_per_round(dot);
        flops / start.elapsed().as_secs_f64()
    };
    (0..runs).map(|_| once()).fold(0.0, f64::max)
}

/// Number of flops of one round of twelve instructions.
fn flops_per_round(dot: Dot) -> f64 {
    match (Isa::best(), dot) {
        (Isa::Avx512Bf16, Dot::Bf16) => 12.0 * 64.0,
        (Isa::Avx512Bf16 | Isa::Avx512, _) => 12.0 * 32.0,
        (Isa::Avx2, _) => 12.0 * 16.0,
        (Isa::Portable, _) => 12.0 * 16.0,
    }
}

fn chains(rounds: usize, dot: Dot) {
    #[cfg(target_arch = "x86_64")]
    match (Isa::best(), dot) {
        // SAFETY: `Isa::best` checked that the machine has the instructions.
        (Isa::Avx512Bf16, Dot::Bf16) => return unsafe { x86::dots(rounds) },
        // SAFETY: `Isa::best` checked that the machine has the instructions.
        (Isa::Avx512Bf16 | Isa::Avx512, _) => return unsafe { x86::fmas_512(rounds) },
        // SAFETY: `Isa::best` checked that the machine has the instructions.
        (Isa::Avx2, _) => return unsafe { x86::fmas_256(rounds) },
        (Isa::Portable, _) => {}
    }
    let _ = dot;
    let (x, y) = std::hint::black_box((0.5f32, 0.25f32));
    let mut sums = [[0f32; 8]; 12];
    for _ in 0..rounds {
        sums.iter_mut().flatten().for_each(|sum| *sum = x.mul_add(y, *sum));
    }
    std::hint::black_box(sums);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    /// One instruction on twelve independent accumulators, in assembly, because the compiler would optimise intrinsics away.
    macro_rules! chains {
        ($name:ident, $instruction:literal, $register:literal, [$($i:literal)+]) => {
            /// # Safety
            /// The machine has the instruction.
            pub unsafe fn $name(rounds: usize) {
                // SAFETY: the assembly touches only the registers that it declares.
                unsafe {
                    asm!(
                        "vpxor xmm12, xmm12, xmm12",
                        "2:",
                        $(concat!($instruction, " ", $register, $i, ", ", $register, "12, ", $register, "12"),)+
                        "dec {left}",
                        "jnz 2b",
                        left = inout(reg) rounds.max(1) => _,
                        out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _,
                        out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                        out("xmm12") _,
                        options(nomem, nostack),
                    )
                }
            }
        };
    }

    chains!(dots, "vdpbf16ps", "zmm", [0 1 2 3 4 5 6 7 8 9 10 11]);
    chains!(fmas_512, "vfmadd231ps", "zmm", [0 1 2 3 4 5 6 7 8 9 10 11]);
    chains!(fmas_256, "vfmadd231ps", "ymm", [0 1 2 3 4 5 6 7 8 9 10 11]);
}
