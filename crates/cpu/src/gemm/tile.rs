//! The register-tile kernels. A kernel multiplies a few rows of A by a few vectors of B, over one part of the contraction.
//!
//! A *unit* is 32 bits of the contraction: one F32, or two neighbouring BF16 numbers. Packed panels are `[units][width]`, so a kernel reads
//! both operands sequentially. Each accumulator of a tile is an independent sum for one output element, so the tile shape changes no bit.

#[cfg(target_arch = "x86_64")]
use super::lanes::{F256, F512};
use super::lanes::{Lanes, Portable};
use super::{DotKind, Isa};

/// Size of the largest register tile of any kernel, in F32 elements.
pub(super) const MAX_TILE: usize = 12 * 32;

/// The arguments of one kernel call.
pub(super) struct Tile {
    /// Panel of A, `[units][rows]`.
    pub a: *const u32,
    /// Panel of B, `[units][vectors · lanes]`.
    pub b: *const u32,
    /// Number of units (of 32 bits per row) of this part of the contraction.
    pub units: usize,
    /// The tile's results, row-major.
    pub out: *mut f32,
    /// Distance, in elements, from one row of `out` to the next.
    pub stride: usize,
    /// Whether the sums start at zero; otherwise they continue from the values in `out`.
    pub first: bool,
    /// For a block-scaled GEMM: the scales of A's rows and of B's columns for one block. The tile then covers one block; its dot products
    /// start at zero and are scaled and added to `out`.
    pub scales: Option<(*const f32, *const f32)>,
}

/// Runs the kernel for a tile of `rows` × `vectors`.
pub(super) type RunTile = unsafe fn(tile: &Tile, rows: usize, vectors: usize);

/// The kernels of one dot product on one instruction set.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    /// Number of F32 lanes in a vector.
    pub lanes: usize,
    /// Row counts for which a kernel exists, in ascending order.
    pub rows: &'static [usize],
    /// The kernel for any input. Exception: an emulated BF16 dot product needs inputs without subnormals whose partial sums cannot be tiny.
    pub run: RunTile,
    /// The kernel for emulated BF16 dot products whose partial sums may be tiny.
    pub run_flushing: Option<RunTile>,
}

impl Kernels {
    /// Maximum number of vectors that a kernel processes side by side.
    pub const MAX_VECTORS: usize = 2;

    pub fn of(isa: Isa, dot: DotKind) -> Self {
        match (isa, dot) {
            (Isa::Portable, DotKind::F32) => Self::plain(Portable::N, SHORT, portable_f32),
            (Isa::Portable, DotKind::Bf16) => {
                Self::emulated(Portable::N, SHORT, portable_bf16, portable_bf16_flushing)
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, DotKind::F32) => Self::plain(F256::N, SHORT, avx2_f32),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, DotKind::Bf16) => Self::emulated(F256::N, SHORT, avx2_bf16, avx2_bf16_flushing),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16, DotKind::F32) => Self::plain(F512::N, TALL, avx512_f32),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, DotKind::Bf16) => Self::emulated(F512::N, TALL, avx512_bf16, avx512_bf16_flushing),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, DotKind::Bf16) => Self::plain(F512::N, TALL, avx512_bf16_hardware),
            #[cfg(not(target_arch = "x86_64"))]
            (_, dot) => Self::of(Isa::Portable, dot),
        }
    }

    fn plain(lanes: usize, rows: &'static [usize], run: RunTile) -> Self {
        Self { lanes, rows, run, run_flushing: None }
    }

    fn emulated(lanes: usize, rows: &'static [usize], run: RunTile, flushing: RunTile) -> Self {
        Self { lanes, rows, run, run_flushing: Some(flushing) }
    }

    /// Number of rows of the tallest kernel.
    pub fn max_rows(&self) -> usize {
        // `rows` is one of the two tables below, which are not empty.
        self.rows[self.rows.len() - 1]
    }

    /// Number of rows of the kernel for `left` remaining rows: the smallest kernel that covers them, otherwise the tallest kernel.
    pub fn rows_for(&self, left: usize) -> usize {
        self.rows.iter().copied().find(|&rows| rows >= left).unwrap_or(self.max_rows())
    }

    /// Number of vectors of the kernel for `left` remaining columns.
    pub fn vectors_for(&self, left: usize) -> usize {
        left.div_ceil(self.lanes).clamp(1, Self::MAX_VECTORS)
    }
}

const SHORT: &[usize] = &[1, 2, 4];
#[cfg(target_arch = "x86_64")]
const TALL: &[usize] = &[1, 2, 4, 6, 8, 10, 12];

/// Runs `body` for `i` = 0, 1, … below the constant `n`, at most 12, unrolled by hand. Indices must be literals so that the accumulators
/// stay in registers; a loop would put the whole array in memory.
macro_rules! unrolled {
    ($i:ident < $n:ident => $body:expr) => { unrolled!(@ $i $n $body, 0 1 2 3 4 5 6 7 8 9 10 11) };
    ($i:ident < $n:ident of 2 => $body:expr) => { unrolled!(@ $i $n $body, 0 1) };
    (@ $i:ident $n:ident $body:expr, $($literal:literal)+) => {{
            $(if $literal < $n {
                const $i: usize = $literal;
                $body
            })+
    }};
}

/// How an accumulator adds one unit of the contraction.
trait Dot<V: Lanes> {
    /// # Safety
    /// The machine has the instructions of the vector and of the dot product.
    unsafe fn step(sum: V, a: V, b: V) -> V;
}

struct F32Dot;
struct EmulatedDot;
struct FlushingDot;

impl<V: Lanes> Dot<V> for F32Dot {
    #[inline(always)]
    unsafe fn step(sum: V, a: V, b: V) -> V {
        // SAFETY: the caller guarantees the instructions.
        unsafe { a.fma(b, sum) }
    }
}

impl<V: Lanes> Dot<V> for EmulatedDot {
    #[inline(always)]
    unsafe fn step(sum: V, a: V, b: V) -> V {
        // SAFETY: the caller guarantees the instructions.
        unsafe { a.even().fma(b.even(), a.odd().fma(b.odd(), sum)) }
    }
}

impl<V: Lanes> Dot<V> for FlushingDot {
    #[inline(always)]
    unsafe fn step(sum: V, a: V, b: V) -> V {
        // SAFETY: the caller guarantees the instructions.
        unsafe { a.even().fma_ftz(b.even(), a.odd().fma_ftz(b.odd(), sum)) }
    }
}

#[cfg(target_arch = "x86_64")]
struct HardwareDot;

#[cfg(target_arch = "x86_64")]
impl Dot<F512> for HardwareDot {
    #[inline(always)]
    unsafe fn step(sum: F512, a: F512, b: F512) -> F512 {
        // SAFETY: the caller guarantees the instructions.
        unsafe { F512::dot_bf16(sum, a, b) }
    }
}

/// # Safety
/// The machine has the instructions. `tile`'s panels and scales are readable. The results of `tile` are writable for `R` rows and `C`
/// vectors, and initialised unless `tile.first`.
#[inline(always)]
unsafe fn run<V: Lanes, D: Dot<V>, const R: usize, const C: usize>(tile: &Tile) {
    // SAFETY: the caller guarantees exactly these ranges; the offsets stay within R rows, C vectors and `units` units.
    unsafe {
        let mut acc = [[V::zero(); C]; R];
        if tile.scales.is_none() && !tile.first {
            unrolled!(I < R => unrolled!(J < C of 2 => {
                acc[I][J] = V::load(tile.out.add(I * tile.stride + J * V::N));
            }));
        }
        let (mut a, mut b) = (tile.a.cast::<f32>(), tile.b.cast::<f32>());
        for _ in 0..tile.units {
            let mut y = [V::zero(); C];
            unrolled!(J < C of 2 => y[J] = V::load(b.add(J * V::N)));
            unrolled!(I < R => {
                let x = V::splat(*a.add(I));
                unrolled!(J < C of 2 => acc[I][J] = D::step(acc[I][J], x, y[J]));
            });
            a = a.add(R);
            b = b.add(C * V::N);
        }
        match tile.scales {
            None => unrolled!(I < R => unrolled!(J < C of 2 => {
                acc[I][J].store(tile.out.add(I * tile.stride + J * V::N));
            })),
            Some((sa, sb)) => {
                unrolled!(I < R => unrolled!(J < C of 2 => {
                    let out = tile.out.add(I * tile.stride + J * V::N);
                    let total = if tile.first { V::zero() } else { V::load(out) };
                    let scale = V::splat(*sa.add(I)).mul(V::load(sb.add(J * V::N)));
                    acc[I][J].fma(scale, total).store(out);
                }))
            }
        }
    }
}

/// Defines a [`RunTile`]: all tile shapes of one dot product on one instruction set.
macro_rules! kernels {
    ($name:ident, $lanes:ty, $dot:ty, [$($rows:literal)+] $(, $feature:literal)?) => {
        /// # Safety
        /// The requirements of [`run`]; `rows` is one of the shapes listed here, and `vectors` is 1 or 2.
        $(#[target_feature(enable = $feature)])?
        pub(super) unsafe fn $name(tile: &Tile, rows: usize, vectors: usize) {
            // SAFETY: the caller guarantees the requirements of `run`.
            unsafe {
                match (rows, vectors) {
                    $(
                        ($rows, 1) => run::<$lanes, $dot, $rows, 1>(tile),
                        ($rows, 2) => run::<$lanes, $dot, $rows, 2>(tile),
                    )+
                    _ => unreachable!("no kernel of {rows} rows and {vectors} vectors"),
                }
            }
        }
    };
}

kernels!(portable_f32, Portable, F32Dot, [1 2 4]);
kernels!(portable_bf16, Portable, EmulatedDot, [1 2 4]);
kernels!(portable_bf16_flushing, Portable, FlushingDot, [1 2 4]);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    kernels!(avx2_f32, F256, F32Dot, [1 2 4], "avx2,fma");
    kernels!(avx2_bf16, F256, EmulatedDot, [1 2 4], "avx2,fma");
    kernels!(avx2_bf16_flushing, F256, FlushingDot, [1 2 4], "avx2,fma");
    kernels!(avx512_f32, F512, F32Dot, [1 2 4 6 8 10 12], "avx512f,avx512bw,avx512dq,avx512vl,fma");
    kernels!(avx512_bf16, F512, EmulatedDot, [1 2 4 6 8 10 12], "avx512f,avx512bw,avx512dq,avx512vl,fma");
    kernels!(avx512_bf16_flushing, F512, FlushingDot, [1 2 4 6 8 10 12], "avx512f,avx512bw,avx512dq,avx512vl,fma");
    kernels!(
        avx512_bf16_hardware,
        F512,
        HardwareDot,
        [1 2 4 6 8 10 12],
        "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma"
    );
}
#[cfg(target_arch = "x86_64")]
use x86::*;
