//! Compiles one body of safe, branch-free Rust to one function per instruction set.
//!
//! Elementwise code needs no intrinsics, because the compiler vectorises it if it is compiled with the right target features. Every lane
//! does the same IEEE operations in the same order, so the bits are those of the scalar build. Sums over a row use 16 lanes in a fixed
//! order.

use crate::{Buf, Cpu};
use half::bf16;
use nibble_core::{DType, Data, Error, Plain, Result, Tensor};
use nibble_formats::math::exp;

/// Defines `fn name(isa: Isa, args)`: it calls the `#[inline(always)]` function `body`, compiled for each instruction set and selected at
/// run time.
///
/// ```text
/// per_isa!(fn add_rows = add_rows_body; (a: &[f32], b: &[f32], out: &mut [f32]));
/// per_isa!(fn scale_rows<T: Real> = scale_rows_body; (x: &[T], by: f32, out: &mut [T]));
/// ```
macro_rules! per_isa {
    ($vis:vis fn $name:ident $(<$g:ident: $bound:path>)? = $body:path; ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?) => {
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$g: $bound>)? (isa: $crate::gemm::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512 $(<$g: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2 $(<$g: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                match isa {
                    // SAFETY: an `Isa` above `Portable` is stored in a `Cpu` only after `is_supported` confirmed that this machine has
                    // these features.
                    $crate::gemm::Isa::Avx512 | $crate::gemm::Isa::Avx512Bf16 => return unsafe { avx512($($arg),*) },
                    // SAFETY: `is_supported` confirmed that this machine has these features.
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

/// A plain element type that F32 arithmetic reads and writes.
pub(crate) trait Real: Plain {
    /// The tensor type with these elements.
    const DTYPE: DType;
    /// The value as F32, which is exact.
    fn widen(self) -> f32;
    /// Rounds once, to nearest, ties to even. The code is branch-free, so that loops over it vectorise.
    fn round(x: f32) -> Self;
    /// The buffer of a tensor, if it has this type.
    fn buf(data: &Data<Cpu>) -> Option<&Buf<Self>>;
    /// The writable buffer of a tensor, if it has this type.
    fn buf_mut(data: &mut Data<Cpu>) -> Option<&mut Buf<Self>>;
    /// Wraps a buffer as a tensor's elements.
    fn data(buf: Buf<Self>) -> Data<Cpu>;

    /// The elements of a tensor of this type.
    ///
    /// # Errors
    /// [`Error::Shape`] that names `argument`, if the tensor has another type.
    fn slice<'a>(op: &'static str, argument: &'static str, t: &'a Tensor<Cpu>) -> Result<&'a [Self]> {
        match Self::buf(&t.data) {
            Some(buf) => Ok(buf.as_slice()),
            None => Err(Error::shape(op, argument, t.dtype(), Self::DTYPE)),
        }
    }

    /// The elements of a result tensor, for writing.
    ///
    /// # Errors
    /// [`Error::Shape`] that names the operation, if the tensor has another type.
    fn slice_mut<'a>(op: &'static str, t: &'a mut Tensor<Cpu>) -> Result<&'a mut [Self]> {
        let dtype = t.dtype();
        match Self::buf_mut(&mut t.data) {
            Some(buf) => Ok(buf.as_mut_slice()),
            None => Err(Error::shape(op, "type of the result", dtype, Self::DTYPE)),
        }
    }
}

impl Real for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn round(x: f32) -> Self {
        x
    }
    fn buf(data: &Data<Cpu>) -> Option<&Buf<Self>> {
        match data {
            Data::F32(buf) => Some(buf),
            Data::Bf16(_) => None,
        }
    }
    fn buf_mut(data: &mut Data<Cpu>) -> Option<&mut Buf<Self>> {
        match data {
            Data::F32(buf) => Some(buf),
            Data::Bf16(_) => None,
        }
    }
    fn data(buf: Buf<Self>) -> Data<Cpu> {
        Data::F32(buf)
    }
}

impl Real for bf16 {
    const DTYPE: DType = DType::Bf16;
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn round(x: f32) -> Self {
        let bits = x.to_bits();
        let nearest = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        Self::from_bits(if x.is_nan() { quiet } else { nearest } as u16)
    }
    fn buf(data: &Data<Cpu>) -> Option<&Buf<Self>> {
        match data {
            Data::Bf16(buf) => Some(buf),
            Data::F32(_) => None,
        }
    }
    fn buf_mut(data: &mut Data<Cpu>) -> Option<&mut Buf<Self>> {
        match data {
            Data::Bf16(buf) => Some(buf),
            Data::F32(_) => None,
        }
    }
    fn data(buf: Buf<Self>) -> Data<Cpu> {
        Data::Bf16(buf)
    }
}

/// Number of lanes of a reduction: element i of a row is added to lane i mod 16.
pub(crate) const LANES: usize = 16;

/// Reduces 16 lanes with the tree 8, 4, 2, 1.
#[inline(always)]
pub(crate) fn tree_sum<T: Copy + std::ops::Add<Output = T>>(lanes: [T; LANES]) -> T {
    tree(lanes, |a, b| a + b)
}

/// Reduces the lanes one level at a time, in arrays of the level's size, which the compiler keeps in registers.
#[inline(always)]
fn tree<T: Copy>(lanes: [T; LANES], join: impl Fn(T, T) -> T) -> T {
    let eight: [T; 8] = std::array::from_fn(|i| join(lanes[i], lanes[i + 8]));
    let four: [T; 4] = std::array::from_fn(|i| join(eight[i], eight[i + 4]));
    let two: [T; 2] = std::array::from_fn(|i| join(four[i], four[i + 2]));
    join(two[0], two[1])
}

/// Σ `a[i]·b[i]` over the 16 lanes: each lane adds its products in order by fma, and the tree reduces the lanes.
#[inline(always)]
pub(crate) fn lane_dot(a: &[impl Real], b: &[impl Real]) -> f32 {
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            lanes[i] = a[i].widen().mul_add(b[i].widen(), lanes[i]);
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_tail).zip(b_tail) {
        *lane = a.widen().mul_add(b.widen(), *lane);
    }
    tree_sum(lanes)
}

/// Replaces each x by exp(x − max). Returns the largest x, and the sum of the exponentials over 16 lanes (in order, then the tree). The
/// maximum ignores NaNs; the exponential of a NaN is NaN and so is the sum.
#[inline(always)]
pub(crate) fn softmax_terms(x: &mut [f32]) -> (f32, f32) {
    let max = lane_max(x);
    exp_less(x, max);
    (max, lane_sum(x))
}

/// The largest x, ignoring NaNs; −∞ if there are no values.
#[inline(always)]
pub(crate) fn lane_max(x: &[f32]) -> f32 {
    let larger = |x: f32, max: f32| if x > max { x } else { max };
    let (full, tail) = x.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for x in full {
        for i in 0..LANES {
            lanes[i] = larger(x[i], lanes[i]);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(tail) {
        *lane = larger(*x, *lane);
    }
    tree(lanes, larger)
}

/// Replaces each x by exp(x − max).
#[inline(always)]
pub(crate) fn exp_less(x: &mut [f32], max: f32) {
    let (full, tail) = x.as_chunks_mut::<LANES>();
    for x in full {
        for x in x {
            *x = exp(*x - max);
        }
    }
    for x in tail {
        *x = exp(*x - max);
    }
}

/// Σ x over 16 lanes: each lane adds its values in order, and the tree reduces the lanes.
#[inline(always)]
pub(crate) fn lane_sum(x: &[f32]) -> f32 {
    let (full, tail) = x.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for x in full {
        for i in 0..LANES {
            lanes[i] += x[i];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(tail) {
        *lane += *x;
    }
    tree_sum(lanes)
}

/// Sets `to`\[i\] = f(a\[i\], b\[i\]), rounded once, 16 elements at a time. With the compiler's own, longer unrolling, rows of 16 or 32
/// elements would run in its scalar remainder loop.
#[inline(always)]
pub(crate) fn map_lanes<A: Real, B: Real, T: Real>(
    a: &[A],
    b: &[B],
    to: &mut [T],
    f: impl Fn(f32, f32) -> f32,
) {
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let (to, to_tail) = to.as_chunks_mut::<LANES>();
    for ((a, b), to) in a.iter().zip(b).zip(to) {
        // The lanes are complete before the store, because the compiler cannot exclude that `to` overlaps a.
        let mut lanes = [0.0f32; LANES];
        for i in 0..LANES {
            lanes[i] = f(a[i].widen(), b[i].widen());
        }
        let mut rounded = [T::zeroed(); LANES];
        for i in 0..LANES {
            rounded[i] = T::round(lanes[i]);
        }
        *to = rounded;
    }
    for ((a, b), to) in a_tail.iter().zip(b_tail).zip(to_tail) {
        *to = T::round(f(a.widen(), b.widen()));
    }
}

/// Number of elements below which waking another thread costs more than it saves.
const WORTH_A_THREAD: usize = 16_384;

/// Number of rows of `cols` elements per task: a few tasks per thread, or one task if there are few rows.
pub(crate) fn rows_per_task(cpu: &Cpu, rows: usize, cols: usize) -> usize {
    let threads = cpu.pool().current_num_threads();
    if threads == 1 || rows * cols < WORTH_A_THREAD {
        return rows.max(1);
    }
    rows.div_ceil(4 * threads).max((WORTH_A_THREAD / 4).div_ceil(cols.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_to_bf16_is_that_of_half() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(bf16::round(x).to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
            }
            assert_eq!(bf16::from_bits(high).widen().to_bits(), u32::from(high) << 16);
        }
    }
}
