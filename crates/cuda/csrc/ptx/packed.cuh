// Conversions between number formats, and arithmetic on two 16-bit numbers in one register.
#pragma once
#include "ptx/types.cuh"

namespace nib::ptx {

/// Returns the maximum in each of the two unsigned 16-bit halves.
__device__ __forceinline__ u32 max_u16x2(u32 a, u32 b) {
    u32 larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

/// Returns max(min(a + b, limit), 0) in each of the two signed
/// 16-bit halves, by one instruction. The sums must not overflow.
__device__ __forceinline__ u32 add_clamp_s16x2(u32 a, u32 b, u32 limit) {
    u32 clamped;
    asm("{\n"
        ".reg .b32 sum;\n"
        "add.s16x2 sum, %1, %2;\n"
        "min.relu.s16x2 %0, sum, %3;\n"
        "}"
        : "=r"(clamped)
        : "r"(a), "r"(b), "r"(limit));
    return clamped;
}

/// Returns min(a + b, c) in each of the two signed 16-bit
/// halves, by one instruction. The sums must not overflow.
__device__ __forceinline__ u32 add_min_s16x2(u32 a, u32 b, u32 c) {
    u32 smaller;
    asm("{\n"
        ".reg .b32 sum;\n"
        "add.s16x2 sum, %1, %2;\n"
        "min.s16x2 %0, sum, %3;\n"
        "}"
        : "=r"(smaller)
        : "r"(a), "r"(b), "r"(c));
    return smaller;
}

/// Returns max(a + b, c) in each of the two signed 16-bit
/// halves, by one instruction. The sums must not overflow.
__device__ __forceinline__ u32 add_max_s16x2(u32 a, u32 b, u32 c) {
    u32 larger;
    asm("{\n"
        ".reg .b32 sum;\n"
        "add.s16x2 sum, %1, %2;\n"
        "max.s16x2 %0, sum, %3;\n"
        "}"
        : "=r"(larger)
        : "r"(a), "r"(b), "r"(c));
    return larger;
}

/// Returns a · b + c of BF16 pairs, rounded once, to nearest even; subnormals are preserved.
__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

/// Returns a · b + c of F16 pairs, rounded once, to nearest even; subnormals are preserved.
__device__ __forceinline__ u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

/// Returns the larger of |a| and |b|, or NaN if either is NaN.
__device__ __forceinline__ float max_magnitude(float a, float b) {
    float larger;
    asm("{\n"
        ".reg .f32 x, y;\n"
        "abs.f32 x, %1;\n"
        "abs.f32 y, %2;\n"
        "max.NaN.f32 %0, x, y;\n"
        "}"
        : "=f"(larger)
        : "f"(a), "f"(b));
    return larger;
}

/// Returns the larger magnitude in each half of two BF16 pairs, or NaN
/// if either value is NaN. The sign bits of the result are undefined.
__device__ __forceinline__ u32 max_magnitude_bf16x2(u32 a, u32 b) {
    u32 larger;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

/// Returns the magnitudes of both values of a BF16 pair. The instruction adds zero to |x|,
/// so it does not use the pipe for integer and logic instructions. A NaN stays a NaN.
__device__ __forceinline__ u32 magnitudes_bf16x2(u32 pair) {
    u32 magnitudes;
    asm("abs.bf16x2 %0, %1;" : "=r"(magnitudes) : "r"(pair));
    return magnitudes;
}

/// Returns the minimum in each of the two unsigned 16-bit halves.
__device__ __forceinline__ u32 min_u16x2(u32 a, u32 b) {
    u32 smaller;
    asm("min.u16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
    return smaller;
}

/// Selects four bytes of two words, like __byte_perm. If the top bit of a nibble of `selector` is set, the result byte
/// is eight copies of the selected byte's sign bit.
__device__ __forceinline__ u32 byte_perm_signs(u32 a, u32 b, u32 selector) {
    u32 picked;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(a), "r"(b), "r"(selector));
    return picked;
}

/// Returns a * b + c, computed by one instruction.
__device__ __forceinline__ u32 mul_add(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

/// Returns (low half of a) · (byte 0 of b) + (high half of a) · (byte 1 of b) + c, all unsigned, by one instruction.
__device__ __forceinline__ u32 halves_mul_add(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

/// Clamps the magnitude of x to `limit`, a positive number, and keeps the sign.
__device__ __forceinline__ float clamp_magnitude(float x, float limit) {
    float clamped;
    asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(clamped) : "f"(x), "f"(limit));
    return clamped;
}

/// Clamps the magnitudes of both values of a BF16 pair.
__device__ __forceinline__ u32 clamp_magnitude_bf16x2(u32 x, u32 limit) {
    u32 clamped;
    asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(clamped) : "r"(x), "r"(limit));
    return clamped;
}

/// Converts two F32 values to F16, rounded to nearest even; `low` goes to the lower half.
__device__ __forceinline__ u32 f16x2_from_f32(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// Returns a * b of two F16 pairs, rounded to nearest even; subnormals are preserved.
__device__ __forceinline__ u32 mul_f16x2(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

/// Converts two F32 values to E4M3, rounded to nearest even, saturating at 448; NaN gives 0x7F.
/// `low` goes to the lower byte.
__device__ __forceinline__ u16 e4m3x2_from_f32(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

/// Converts two F32 values to E5M2, rounded to nearest even, saturating at 57344; NaN gives 0x7F.
/// `low` goes to the lower byte.
__device__ __forceinline__ u16 e5m2x2_from_f32(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

/// Converts two E4M3 codes to F16, exactly.
__device__ __forceinline__ u32 f16x2_from_e4m3x2(u16 pair) {
    u32 wide;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(pair));
    return wide;
}

/// Converts the lower two (with kHigh the upper two) of
/// four E4M3 codes to F16, exactly, by one instruction.
template <bool kHigh>
__device__ __forceinline__ u32 f16x2_from_e4m3x4(u32 four) {
    u32 wide;
    if constexpr (kHigh) {
        asm("{\n"
            ".reg .b16 low, high;\n"
            "mov.b32 {low, high}, %1;\n"
            "cvt.rn.f16x2.e4m3x2 %0, high;\n"
            "}"
            : "=r"(wide)
            : "r"(four));
    } else {
        asm("{\n"
            ".reg .b16 low, high;\n"
            "mov.b32 {low, high}, %1;\n"
            "cvt.rn.f16x2.e4m3x2 %0, low;\n"
            "}"
            : "=r"(wide)
            : "r"(four));
    }
    return wide;
}

/// Converts four F16 values to E4M3, rounded to nearest even, saturating; NaN gives 0x7F. The
/// conversion takes two instructions.
__device__ __forceinline__ u32 e4m3x4_from_f16x2(u32 lower, u32 upper) {
    u32 four;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(four)
        : "r"(lower), "r"(upper));
    return four;
}

/// Returns sum + |a - b| of F16 pairs. The difference and the sum
/// are each rounded to nearest even, and subnormals are preserved.
__device__ __forceinline__ u32 add_distance_f16x2(u32 sum, u32 a, u32 b) {
    u32 out;
    asm("{\n"
        ".reg .b32 d;\n"
        "sub.rn.f16x2 d, %2, %3;\n"
        "abs.f16x2 d, d;\n"
        "add.rn.f16x2 %0, %1, d;\n"
        "}"
        : "=r"(out)
        : "r"(sum), "r"(a), "r"(b));
    return out;
}

/// Converts two F16 values to F32, exactly; the lower half comes first.
__device__ __forceinline__ float2 f32x2_from_f16x2(u32 pair) {
    float2 two;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(two.x), "=f"(two.y)
        : "r"(pair));
    return two;
}

/// Packs two 16-bit values into one register.
__device__ __forceinline__ u32 pack_u16(u16 low, u16 high) {
    u32 packed;
    asm("mov.b32 %0, {%1, %2};" : "=r"(packed) : "h"(low), "h"(high));
    return packed;
}

__device__ __forceinline__ u16 low_u16(u32 pair) { return static_cast<u16>(pair); }
__device__ __forceinline__ u16 high_u16(u32 pair) { return static_cast<u16>(pair >> 16); }

/// Returns the larger number, or a NaN if either number is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

/// Returns 2^x to within two units in the last place; a NaN stays NaN, and subnormal results become 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// Returns 1 / x to within one unit in the last place, if x and 1 / x are normal.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace nib::ptx
