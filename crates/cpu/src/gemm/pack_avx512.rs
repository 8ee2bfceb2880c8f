//! Packing of sixteen rows by sixteen units at a time with AVX-512.

use super::super::operand::{Data, OperandView};
use super::{PanelRows, SLACK, decode};
use std::arch::x86_64::*;
use std::ops::Range;

/// An array of `body` for the constants `i` = 0 … 15, unrolled by hand. With any loop, even one that only fills an array, the compiler
/// would spill the registers to memory.
macro_rules! sixteen {
    ($i:ident => $body:expr) => { sixteen!(@ $i $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15) };
    (@ $i:ident $body:expr, $($literal:literal)+) => {
        [$({
            const $i: usize = $literal;
            $body
        }),+]
    };
}

/// A reader of a source with a contiguous contraction, sixteen units at a time.
trait RowReader {
    /// Number of elements in one unit.
    const PER_UNIT: usize;
    /// Reads the sixteen units that start at element `at`.
    ///
    /// # Safety
    /// The machine has AVX-512 F, BW and VL, and the elements exist.
    unsafe fn read(&self, at: usize) -> __m512i;
    /// Reads the last `left` elements (fewer than sixteen units) from element `at` on, and zero-extends them.
    ///
    /// # Safety
    /// The requirements of [`RowReader::read`].
    unsafe fn read_last(&self, at: usize, left: usize) -> __m512i;
}

/// A mask with the lowest `bits` bits set; all 32 bits if `bits` is at least 32.
fn low_bits(bits: usize) -> u32 {
    if bits >= 32 { u32::MAX } else { (1 << bits) - 1 }
}

struct F32Rows(*const f32);
struct Bf16Rows(*const u16);
struct Fp8Rows {
    codes: *const u8,
    /// The 128 magnitudes as four registers of 32 words.
    table: [__m512i; 4],
}
struct Fp4Rows {
    codes: *const u8,
    table: __m512i,
}

impl RowReader for F32Rows {
    const PER_UNIT: usize = 1;
    #[inline(always)]
    unsafe fn read(&self, at: usize) -> __m512i {
        // SAFETY: the caller guarantees that the elements exist.
        unsafe { _mm512_loadu_epi32(self.0.add(at).cast()) }
    }
    #[inline(always)]
    unsafe fn read_last(&self, at: usize, left: usize) -> __m512i {
        // SAFETY: masked lanes are not accessed; the others exist.
        unsafe { _mm512_maskz_loadu_epi32(low_bits(left) as u16, self.0.add(at).cast()) }
    }
}

impl RowReader for Bf16Rows {
    const PER_UNIT: usize = 2;
    #[inline(always)]
    unsafe fn read(&self, at: usize) -> __m512i {
        // SAFETY: the caller guarantees that the elements exist.
        unsafe { _mm512_loadu_epi16(self.0.add(at).cast()) }
    }
    #[inline(always)]
    unsafe fn read_last(&self, at: usize, left: usize) -> __m512i {
        // SAFETY: masked lanes are not accessed; the others exist.
        unsafe { _mm512_maskz_loadu_epi16(low_bits(left), self.0.add(at).cast()) }
    }
}

impl RowReader for Fp8Rows {
    const PER_UNIT: usize = 2;
    #[inline(always)]
    unsafe fn read(&self, at: usize) -> __m512i {
        // SAFETY: the caller guarantees that the elements exist.
        unsafe { self.decode(_mm256_loadu_epi8(self.codes.add(at).cast())) }
    }
    #[inline(always)]
    unsafe fn read_last(&self, at: usize, left: usize) -> __m512i {
        // SAFETY: masked lanes are not accessed; the others exist. Code 0 decodes to 0.
        unsafe { self.decode(_mm256_maskz_loadu_epi8(low_bits(left), self.codes.add(at).cast())) }
    }
}

impl Fp8Rows {
    #[inline(always)]
    unsafe fn decode(&self, codes: __m256i) -> __m512i {
        // SAFETY: the block uses only registers, and the reader's caller guarantees the instructions.
        unsafe {
            let codes = _mm512_cvtepi8_epi16(codes);
            // Bits 0 … 5 choose among 64 words, and bit 6 chooses a half of the table; bit 15 is the sign.
            let low = _mm512_permutex2var_epi16(self.table[0], codes, self.table[1]);
            let high = _mm512_permutex2var_epi16(self.table[2], codes, self.table[3]);
            let upper_half = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
            let magnitude = _mm512_mask_blend_epi16(upper_half, low, high);
            _mm512_or_si512(magnitude, _mm512_and_si512(codes, _mm512_set1_epi16(i16::MIN)))
        }
    }
}

impl RowReader for Fp4Rows {
    const PER_UNIT: usize = 2;
    #[inline(always)]
    unsafe fn read(&self, at: usize) -> __m512i {
        // SAFETY: the caller guarantees that the elements exist. `at` is even, so their bytes start at at / 2.
        unsafe { self.decode(_mm_loadu_epi8(self.codes.add(at / 2).cast()), u32::MAX) }
    }
    #[inline(always)]
    unsafe fn read_last(&self, at: usize, left: usize) -> __m512i {
        // SAFETY: masked lanes are not accessed, and the others exist. An odd last code shares its byte with another code, which is masked
        // later.
        unsafe {
            let mask = low_bits(left.div_ceil(2)) as u16;
            self.decode(_mm_maskz_loadu_epi8(mask, self.codes.add(at / 2).cast()), low_bits(left))
        }
    }
}

impl Fp4Rows {
    #[inline(always)]
    unsafe fn decode(&self, bytes: __m128i, live: u32) -> __m512i {
        // SAFETY: the block uses only registers, and the reader's caller guarantees the instructions.
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(bytes);
            let nibbles = _mm512_or_si512(bytes, _mm512_slli_epi32::<12>(bytes));
            let index = _mm512_and_si512(nibbles, _mm512_set1_epi32(0x000F_000F));
            _mm512_maskz_permutexvar_epi16(live, index, self.table)
        }
    }
}

/// Packs a panel with AVX-512; see [`super::panel`].
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL; the elements `k` of the panel's rows lie within the operand's slice.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn panel(from: &OperandView, panel: &PanelRows, k: Range<usize>, to: &mut [u32]) {
    let per_unit = if let Data::F32(_) = from.data { 1 } else { 2 };
    assert!(
        to.len() >= k.len().div_ceil(per_unit) * panel.width + SLACK,
        "the panel's buffer lacks its slack"
    );
    // SAFETY: the caller guarantees the instructions and the elements; the length of `to` was checked above.
    unsafe {
        match (from.data, from.transposed) {
            (Data::F32(x), false) => rows(&F32Rows(x.as_ptr()), from, panel, k, to),
            (Data::Bf16(x), false) => rows(&Bf16Rows(x.as_ptr().cast()), from, panel, k, to),
            (Data::E4m3(x), _) => rows(&fp8_rows(x, &decode::E4M3), from, panel, k, to),
            (Data::E5m2(x), _) => rows(&fp8_rows(x, &decode::E5M2), from, panel, k, to),
            (Data::E2m1(x), _) => {
                let table = _mm512_castsi256_si512(_mm256_loadu_si256(decode::E2M1.as_ptr().cast()));
                rows(&Fp4Rows { codes: x.as_ptr(), table }, from, panel, k, to);
            }
            (Data::F32(x), true) => f32_columns(x.as_ptr(), from, panel, k, to),
            (Data::Bf16(x), true) => bf16_columns(x.as_ptr().cast(), from, panel, k, to),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn fp8_rows(codes: &[u8], table: &[u16; 128]) -> Fp8Rows {
    let words = table.as_ptr();
    // SAFETY: four registers of 32 words cover exactly the table.
    let table = unsafe { [0, 32, 64, 96].map(|i| _mm512_loadu_si512(words.add(i).cast())) };
    Fp8Rows { codes: codes.as_ptr(), table }
}

/// Packs by transposing blocks of 16 rows × 16 units. A panel narrower than 16 is stored in whole vectors; each store overwrites the excess
/// of the previous store.
///
/// # Safety
/// The requirements of [`panel`]; `to` is longer than the panel by `SLACK` units.
#[inline(always)]
unsafe fn rows<R: RowReader>(
    from: &R,
    view: &OperandView,
    panel: &PanelRows,
    k: Range<usize>,
    to: &mut [u32],
) {
    let units = k.len().div_ceil(R::PER_UNIT);
    for first_lane in (0..panel.width).step_by(16) {
        // Lanes past the last row repeat the last row; their results are ignored.
        let row_at =
            |i: usize| view.offset + (panel.first + (first_lane + i).min(panel.rows - 1)) * view.stride;
        for unit in (0..units).step_by(16) {
            let k0 = k.start + unit * R::PER_UNIT;
            let left = k.end - k0;
            // SAFETY: the panel's rows and the elements below k.end exist. The stores end at most SLACK units past the panel, because the
            // last store of this group of lanes starts within the panel.
            unsafe {
                let block = if left >= 16 * R::PER_UNIT {
                    sixteen!(I => from.read(row_at(I) + k0))
                } else {
                    sixteen!(I => from.read_last(row_at(I) + k0, left))
                };
                let block = transpose(block);
                let lanes = to.as_mut_ptr().add(unit * panel.width + first_lane);
                let left = units - unit;
                if left >= 16 {
                    sixteen!(I => _mm512_storeu_si512(lanes.add(I * panel.width).cast(), block[I]));
                } else {
                    sixteen!(I => if I < left {
                        _mm512_storeu_si512(lanes.add(I * panel.width).cast(), block[I]);
                    });
                }
            }
        }
    }
}

/// Transposes a 16 × 16 matrix of words.
#[inline(always)]
unsafe fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    // SAFETY: the block only shuffles registers, and the caller has AVX-512 F.
    unsafe {
        let s = sixteen!(I => match I % 2 {
            0 => _mm512_unpacklo_epi32(r[I], r[I | 1]),
            _ => _mm512_unpackhi_epi32(r[I & !1], r[I]),
        });
        let t = sixteen!(I => {
            const PAIR: usize = I / 4 * 4 + I % 4 / 2;
            match I % 2 {
                0 => _mm512_unpacklo_epi64(s[PAIR], s[PAIR + 2]),
                _ => _mm512_unpackhi_epi64(s[PAIR], s[PAIR + 2]),
            }
        });
        // t[4i + c] holds, in its quarter q, rows 4i .. 4i + 4 of column 4q + c. The quarters are gathered in two steps: first the even or
        // odd quarters of the upper and lower eight rows, then all quarters.
        sixteen!(I => {
            const Q: usize = I / 4;
            const C: usize = I % 4;
            let (x, y) = match Q % 2 {
                0 => (_mm512_shuffle_i32x4::<0x88>(t[C], t[4 + C]), _mm512_shuffle_i32x4::<0x88>(t[8 + C], t[12 + C])),
                _ => (_mm512_shuffle_i32x4::<0xDD>(t[C], t[4 + C]), _mm512_shuffle_i32x4::<0xDD>(t[8 + C], t[12 + C])),
            };
            match Q / 2 {
                0 => _mm512_shuffle_i32x4::<0x88>(x, y),
                _ => _mm512_shuffle_i32x4::<0xDD>(x, y),
            }
        })
    }
}

/// # Safety
/// The requirements of [`rows`].
#[inline(always)]
unsafe fn f32_columns(
    from: *const f32,
    view: &OperandView,
    panel: &PanelRows,
    k: Range<usize>,
    to: &mut [u32],
) {
    for lane in (0..panel.width).step_by(16) {
        let live = low_bits(panel.rows.saturating_sub(lane)) as u16;
        let stored = low_bits(panel.width - lane) as u16;
        for (unit, k) in k.clone().enumerate() {
            let at = view.offset + k * view.stride + panel.first + lane;
            // SAFETY: masked lanes are not accessed; the others exist, in the source and in the panel.
            unsafe {
                let x = _mm512_maskz_loadu_epi32(live, from.wrapping_add(at).cast());
                _mm512_mask_storeu_epi32(to.as_mut_ptr().add(unit * panel.width + lane).cast(), stored, x);
            }
        }
    }
}

/// # Safety
/// The requirements of [`rows`].
#[inline(always)]
unsafe fn bf16_columns(
    from: *const u16,
    view: &OperandView,
    panel: &PanelRows,
    k: Range<usize>,
    to: &mut [u32],
) {
    for lane in (0..panel.width).step_by(16) {
        let live = low_bits(panel.rows.saturating_sub(lane)) as u16;
        let stored = low_bits(panel.width - lane) as u16;
        for (unit, k0) in k.clone().step_by(2).enumerate() {
            let odd_live = if k0 + 1 < k.end { live } else { 0 };
            let at = view.offset + k0 * view.stride + panel.first + lane;
            // SAFETY: masked lanes are not accessed; the others exist, in the source and in the panel.
            unsafe {
                let even = _mm256_maskz_loadu_epi16(live, from.wrapping_add(at).cast());
                let odd = _mm256_maskz_loadu_epi16(odd_live, from.wrapping_add(at + view.stride).cast());
                let odd = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd));
                let x = _mm512_or_si512(_mm512_cvtepu16_epi32(even), odd);
                _mm512_mask_storeu_epi32(to.as_mut_ptr().add(unit * panel.width + lane).cast(), stored, x);
            }
        }
    }
}
