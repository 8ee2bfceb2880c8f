// Elements of blocks: the element interface of quantize_units and dequantize_units, which convert sixteen adjacent values of a row or column
// at a time. The CPU implementation is crates/formats/src/element.rs. Each struct has the constants of an element and these functions.
//   nearest_even: encodes sixteen products x · factor, packed in the form in which they are stored; returns whether any code is non-zero.
//   decode: decodes sixteen packed codes.
// The function `spec_code` below implements every rounding mode for one value, like the CPU implementation.
//
// Hopper has instructions for E4M3 and E5M2. A narrower element with as many mantissa bits has the same codes, once its
// values are scaled so that the smallest normal numbers coincide. E2M3 is the lower part of E4M3; E3M2 and S1P2
// (multiples of 1/4) are the lower part of E5M2. The codes correspond for subnormal values too.
#pragma once
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "formats/pair_code.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kNearestEven = 0;
constexpr int kNearestAway = 1;
constexpr int kStochastic = 2;
constexpr int kDither = 3;
/// As a template argument, this value says that the rounding mode is known only at run time.
constexpr int kAnyRounding = 4;

/// Says how one value is rounded, if the rounding mode is known only at run time.
struct Decision {
    int policy;
    u32 delta_q16;
    u32 r;  // sixteen random bits
};

/// Returns the code of a value that is not NaN, for any element and rounding mode.
template <class E>
__host__ __device__ inline u32 spec_code(float y, const Decision& by) {
    union {
        float number;
        u32 bits;
    } of;
    of.number = y;
    const u32 magnitude = of.bits & 0x7FFFFFFF, negative = of.bits >> 31;
    u32 code = E::kMaxCode;
    if (magnitude < E::kMaxBits) {
        const int exponent = (magnitude >> 23) > 1 ? int(magnitude >> 23) : 1, least = 128 - E::kBias;
        const u64 significand = magnitude >> 23 == 0 ? magnitude : (magnitude & 0x7FFFFF) | 0x800000;
        const u32 base = exponent > least ? u32(exponent - least) : 0;
        const u32 below = least > exponent ? u32(least - exponent) : 0;
        const u32 shift = 23 - E::kMantissaBits + below < 60 ? 23 - E::kMantissaBits + below : 60;
        const u32 floor_code = (base << E::kMantissaBits) + u32(significand >> shift);
        const u64 rest = significand & ((u64(1) << shift) - 1);
        const u32 fraction = shift <= 32 ? u32(rest << (32 - shift)) : u32(rest >> (shift - 32));
        const bool sticky = shift > 32 && (rest & ((u64(1) << (shift - 32)) - 1)) != 0;
        bool up;
        if (by.policy == kStochastic) {
            up = by.r < fraction >> 16;
        } else if (by.policy == kNearestAway) {
            up = fraction >= 0x80000000u;
        } else {
            const long long d = by.policy == kDither ? (long long)by.delta_q16 * (2 * (long long)by.r + 1 - 65536) : 0;
            const long long t = (long long)fraction + d, half = 0x80000000ll;
            up = t > half || (t == half && (sticky || (floor_code & 1) != 0));
        }
        code = floor_code + up;
    }
    if constexpr (E::kTwosComplement) return (negative ? 0 - code : code) & 0xFF;
    return code | negative << (E::kBits - 1);
}

/// Combines two words: the bits of `a` where the mask is 1, and the bits of `b` elsewhere.
__host__ __device__ constexpr u32 choose_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }

/// Packs sixteen codes, which are one per byte, into the form in which they are stored.
template <int kBits>
__device__ __forceinline__ void pack_sixteen(const u32 (&bytes)[4], u32 (&words)[kBits / 2]) {
    if constexpr (kBits == 8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = bytes[i];
    } else if constexpr (kBits == 4) {
        u32 half[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) half[i] = bytes[i] | bytes[i] >> 4;  // two codes each, in bytes 0 and 2
        words[0] = __byte_perm(half[0], half[1], 0x6420);
        words[1] = __byte_perm(half[2], half[3], 0x6420);
    } else {
        static_assert(kBits == 6, "codes have 4, 6 or 8 bits");
        u32 part[4];  // 24 bits each; multiplied, not shifted, because the pipe of the shifts is the busy one
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = __dp4a(bytes[i], 0x40010000u, 0u) * 4096 + __dp4a(bytes[i], 0x00004001u, 0u);
        words[0] = part[0] | part[1] << 24;
        words[1] = part[1] >> 8 | part[2] << 16;
        words[2] = part[2] >> 16 | part[3] << 8;
    }
}

/// Unpacks what `pack_sixteen` has packed.
template <int kBits>
__device__ __forceinline__ void unpack_sixteen(const u32 (&words)[kBits / 2], u32 (&bytes)[4]) {
    if constexpr (kBits == 8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) bytes[i] = words[i];
    } else if constexpr (kBits == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 even = words[i] & 0x0F0F0F0F, odd = words[i] >> 4 & 0x0F0F0F0F;
            bytes[2 * i] = __byte_perm(even, odd, 0x5140);
            bytes[2 * i + 1] = __byte_perm(even, odd, 0x7362);
        }
    } else {
        const u32 part[4] = {words[0], __funnelshift_r(words[0], words[1], 24), __funnelshift_r(words[1], words[2], 16), words[2] >> 8};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 twelve = choose_bits(0xFFF, part[i], part[i] << 4);
            bytes[i] = (twelve & 0x003F003F) | (twelve << 2 & 0x3F003F00);
        }
    }
}

/// The factor that maps the element's smallest normal number to the smallest normal F32 number.
template <class E>
__host__ __device__ constexpr float to_code() {
    float to_code = 0x1p-126f;
    for (int i = 1; i < E::kBias; ++i) to_code *= 2.0f;
    return to_code;
}

/// Encodes sixteen products x · factor. A product is rounded up in magnitude if and only if sixteen random bits are less
/// than the first sixteen bits of the fraction; rounding.cuh explains the method. There are kFactors factors, each for 16 /
/// kFactors adjacent values. `rounded_up(i, one, bits)` adds to `bits` the complement of value i's random bits, times `one`.
template <class E, int kFactors, class RoundedUp>
__device__ __forceinline__ bool stochastic_codes(const float (&x)[16], const float (&factor)[kFactors], u32 (&words)[E::kBits / 2],
                                                 const RoundedUp& rounded_up) {
    constexpr float kToCode = to_code<E>();
    u32 bytes[4], any = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 code[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float v = fminf(__fmul_rn(fabsf(x[4 * i + j]), factor[(4 * i + j) * kFactors / 16]), E::kMax);
            code[j] = rounded_up(4 * i + j, 1u << (7 - E::kMantissaBits), __float_as_uint(__fmul_rz(v, kToCode))) >> (23 - E::kMantissaBits);
        }
        bytes[i] = (code[3] * 256 + code[2]) * 65536 + (code[1] * 256 + code[0]);
        any |= bytes[i];
        // Each value's sign bit moves to its position in the code.
        const u32 low = __byte_perm(__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]), 0x0073);
        const u32 high = __byte_perm(__float_as_uint(x[4 * i + 2]), __float_as_uint(x[4 * i + 3]), 0x0073);
        const u32 signs = __byte_perm(low, high, 0x5410) & 0x80808080;
        bytes[i] |= signs >> (8 - E::kBits);
    }
    pack_sixteen<E::kBits>(bytes, words);
    return any != 0;
}

/// Decodes four FP8 codes. The conversion goes through F16, which can represent every value of both FP8 formats.
template <bool kE5m2>
__device__ __forceinline__ void decode_bytes(u32 four, float* value) {
    const u32 low = kE5m2 ? __byte_perm(four, 0, 0x1404) : ptx::f16x2_from_e4m3x2(ptx::low_u16(four));
    const u32 high = kE5m2 ? __byte_perm(four, 0, 0x3424) : ptx::f16x2_from_e4m3x2(ptx::high_u16(four));
    const float2 a = ptx::f32x2_from_f16x2(low), b = ptx::f32x2_from_f16x2(high);
    value[0] = a.x;
    value[1] = a.y;
    value[2] = b.x;
    value[3] = b.y;
}

/// An element that is E4M3 (E5M2 with kE5m2), or that equals the lower part of E4M3 with values `unit()` times as large.
template <int kBits_, int kBias_, int kEmax_, u32 kMaxBits_, u32 kMaxCode_, bool kE5m2>
struct PartOfFp8 {
    static constexpr int kBits = kBits_, kMantissaBits = kE5m2 ? 2 : 3, kBias = kBias_, kEmax = kEmax_;
    static constexpr u32 kMaxBits = kMaxBits_, kMaxCode = kMaxCode_;
    static constexpr bool kTwosComplement = false;
    static constexpr u32 kMagnitude = 0x01010101u * ((1u << (kBits - 1)) - 1);

    /// 2 to the power of the difference between the exponent biases.
    __host__ __device__ static constexpr float unit() {
        float unit = 1.0f;
        for (int i = kBias; i < (kE5m2 ? 15 : 7); ++i) unit *= 2.0f;
        return unit;
    }

    /// kWithin: no product exceeds the largest element. For six-bit elements the factor is a power of two, so a
    /// division by unit() is exact.
    template <bool kWithin>
    __device__ __forceinline__ static bool nearest_even(const float (&x)[16], float factor, u32 (&words)[kBits / 2]) {
        if constexpr (kBits != 8) factor = __fmul_rn(factor, 1.0f / unit());
        u32 bytes[4], any = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                v[j] = __fmul_rn(x[4 * i + j], factor);
                // The conversion to E4M3 or E5M2 itself saturates.
                if constexpr (kBits != 8 && !kWithin) v[j] = ptx::clamp_magnitude(v[j], kMax / unit());
            }
            const u16 low = kE5m2 ? ptx::e5m2x2_from_f32(v[0], v[1]) : ptx::e4m3x2_from_f32(v[0], v[1]);
            const u16 high = kE5m2 ? ptx::e5m2x2_from_f32(v[2], v[3]) : ptx::e4m3x2_from_f32(v[2], v[3]);
            bytes[i] = ptx::pack_u16(low, high);
            any |= bytes[i];
            // Moves the sign from bit 7 of a byte down to the code's highest bit.
            if constexpr (kBits != 8) bytes[i] ^= ptx::byte_perm_signs(bytes[i], 0, 0xBA98) & 0x01010101u * (0x80 | 1u << (kBits - 1));
        }
        pack_sixteen<kBits>(bytes, words);
        return any & (kBits == 8 ? 0x7F7F7F7F : kMagnitude);
    }

    __device__ __forceinline__ static void decode(const u32 (&words)[kBits / 2], float (&value)[16]) {
        u32 bytes[4];
        unpack_sixteen<kBits>(words, bytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 four = bytes[i];
            if constexpr (kBits != 8) four = (four & kMagnitude) | (four & (0x01010101u << (kBits - 1))) << (8 - kBits);
            decode_bytes<kE5m2>(four, value + 4 * i);
            if constexpr (kBits != 8) {
#pragma unroll
                for (int j = 0; j < 4; ++j) value[4 * i + j] = __fmul_rn(value[4 * i + j], unit());
            }
        }
    }

    /// The largest element.
    static constexpr float kMax = kMaxCode == 0x7E ? 448.0f : kMaxCode == 0x7B ? 57344.0f : kE5m2 ? 28.0f : 7.5f;
};

using WholeE4m3 = PartOfFp8<8, 7, 8, 0x43E00000, 0x7E, false>;
using WholeE5m2 = PartOfFp8<8, 15, 15, 0x47600000, 0x7B, true>;
using E2m3 = PartOfFp8<6, 1, 2, 0x40F00000, 0x1F, false>;
using E3m2 = PartOfFp8<6, 3, 4, 0x41E00000, 0x1F, true>;

/// E2M1 with any scale, whether the scale is a power of two or not.
struct SixteenE2m1 {
    static constexpr float kMax = 6.0f;
    static constexpr int kBits = 4, kMantissaBits = 1, kBias = 1, kEmax = 2;
    static constexpr u32 kMaxBits = 0x40C00000, kMaxCode = 7;
    static constexpr bool kTwosComplement = false;

    template <bool kWithin>
    __device__ __forceinline__ static bool nearest_even(const float (&x)[16], float factor, u32 (&words)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            F32::Eight eight;
#pragma unroll
            for (int j = 0; j < 8; ++j) eight.number[j] = x[8 * i + j];
            words[i] = E2m1::encode<!kWithin>(eight, factor);
        }
        return (words[0] | words[1]) & E2m1::kMagnitudes;
    }

    __device__ __forceinline__ static void decode(const u32 (&words)[2], float (&value)[16]) {
        // The upper bytes of F16 numbers: kSmall holds 0, 0.5, 1, 1.5, and kLarge holds 2, 3, 4, 6. A code without
        // its sign selects one byte of kSmall or kLarge.
        constexpr u32 kSmall = 0x3E3C3800, kLarge = 0x46444240;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 eight = words[i], magnitudes = eight & 0x77777777, even_signs = eight << 4;
            const u32 low = __byte_perm(kSmall, kLarge, magnitudes), high = __byte_perm(kSmall, kLarge, magnitudes >> 16);
            decode_bytes<true>(low | (__byte_perm(even_signs, eight, 0x5140) & 0x80808080), value + 8 * i);
            decode_bytes<true>(high | (__byte_perm(even_signs, eight, 0x7362) & 0x80808080), value + 8 * i + 4);
        }
    }
};

/// Multiples of 1/64 in two's complement.
struct Int8 {
    static constexpr int kBits = 8, kMantissaBits = 6, kBias = 1, kEmax = 0;
    static constexpr u32 kMaxBits = 0x3FFE0000, kMaxCode = 0x7F;
    static constexpr bool kTwosComplement = true;

    static constexpr float kMax = 127.0f / 64.0f;

    template <bool kWithin>
    __device__ __forceinline__ static bool nearest_even(const float (&x)[16], float factor, u32 (&words)[4]) {
        u32 any = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 of[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float v = __fmul_rn(x[4 * i + j], factor);
                of[j] = __float_as_uint(__fmaf_rn(kWithin ? v : ptx::clamp_magnitude(v, kMax), 64.0f, 0x1.8p23f));
            }
            words[i] = __byte_perm(__byte_perm(of[0], of[1], 0x0040), __byte_perm(of[2], of[3], 0x0040), 0x5410);
            any |= words[i];
        }
        return any;
    }

    __device__ __forceinline__ static void decode(const u32 (&words)[4], float (&value)[16]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 biased = words[i] ^ 0x80808080;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float whole = __fadd_rn(__uint_as_float(__byte_perm(biased, 0x4B000000, 0x7540 | j)), -(0x1p23f + 128.0f));
                value[4 * i + j] = __fmul_rn(whole, 1.0f / 64.0f);
            }
        }
    }
};

/// Sign-magnitude numbers in multiples of 1/4, at most 1.75.
struct S1p2 {
    static constexpr float kMax = 1.75f;
    static constexpr int kBits = 4, kMantissaBits = 2, kBias = 1, kEmax = 0;
    static constexpr u32 kMaxBits = 0x3FE00000, kMaxCode = 7;
    static constexpr bool kTwosComplement = false;

    /// Encodes sixteen products x · factor, with one factor per four values.
    /// The exact product is rounded, with ties away from zero or to even.
    template <bool kAway>
    __device__ __forceinline__ static bool nearest(const float (&x)[16], const float (&factor)[4], u32 (&words)[2]) {
        constexpr u32 kFar = 0x4B000000;  // the bits of 2^23, whose last place is worth one
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 code[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float quarters = __fmul_rn(factor[2 * i + j / 4], 4.0f), v = fabsf(x[8 * i + j]);
                // The exact sum is rounded once. A truncated
                // addition (kAway) does not cross a whole number.
                const float whole = kAway ? __fadd_rz(fminf(__fmaf_rz(v, quarters, 0.5f), 7.0f), 0x1p23f)
                                          : fminf(__fmaf_rn(v, quarters, 0x1p23f), 0x1p23f + 7.0f);
                code[j] = __float_as_uint(whole);
            }
            // Non-overlapping fields are combined by addition; their constants are subtracted at the end.
            const u32 even = (code[6] * 256 + code[4]) * 65536 + (code[2] * 256 + code[0]);
            const u32 odd = (code[7] * 256 + code[5]) * 65536 + (code[3] * 256 + code[1]);
            u32 top[4];  // the codes of elements j and j + 4, one per byte
#pragma unroll
            for (int j = 0; j < 4; ++j) top[j] = __byte_perm(__float_as_uint(x[8 * i + j]), __float_as_uint(x[8 * i + j + 4]), 0x0073);
            const u32 signs = choose_bits(0x80808080, __byte_perm(top[1], top[3], 0x5140), __byte_perm(top[0], top[2], 0x5140) >> 4);
            words[i] = choose_bits(0x77777777, odd * 16 + even - kFar * 0x11111111u, signs);
        }
        return (words[0] | words[1]) & 0x77777777;
    }

    /// Encodes eight adjacent values, two BF16 values per word. `factor` holds
    /// four times the factors, as BF16 numbers, one in each half of a word.
    template <int kRound>
    __device__ __forceinline__ static u32 eight(const u32 (&x)[4], const u32 (&factor)[4]) {
        const u32 code[4] = {whole<kRound>(x[0], factor[0]), whole<kRound>(x[1], factor[1]), whole<kRound>(x[2], factor[2]),
                             whole<kRound>(x[3], factor[3])};
        return pack_row(x, code);
    }

    /// Encodes four rows of two columns; each half of a word holds one
    /// column. `factor` holds four times the factors of the columns.
    template <int kRound>
    __device__ __forceinline__ static u32 four_rows(const u32 (&x)[4], u32 factor) {
        const u32 code[4] = {whole<kRound>(x[0], factor), whole<kRound>(x[1], factor), whole<kRound>(x[2], factor),
                             whole<kRound>(x[3], factor)};
        return pack_columns(x, code);
    }

    __device__ __forceinline__ static void decode(const u32 (&words)[2], float (&value)[16]) {
        u32 bytes[4];
        unpack_sixteen<4>(words, bytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            decode_bytes<true>((bytes[i] & 0x07070707) | (bytes[i] & 0x08080808) << 4, value + 4 * i);
#pragma unroll
            for (int j = 0; j < 4; ++j) value[4 * i + j] = __fmul_rn(value[4 * i + j], 0x1p14f);
        }
    }

private:
    /// Returns the magnitudes of two BF16 values times `factor`, rounded to integers up to 7. Adding 128 rounds the
    /// exact product once, ties to even. For ties away from zero, adding the odd number 129 rounds the product a second
    /// time. The ties of this second rounding go the other way, so the larger of both results is rounded away from zero.
    template <int kRound>
    __device__ __forceinline__ static u32 whole(u32 x, u32 factor) {
        constexpr u32 kFar = 0x43004300;  // the bits of 128, whose last place is worth one
        const u32 magnitude = ptx::magnitudes_bf16x2(x);
        u32 code = ptx::fma_bf16x2(magnitude, factor, kFar);
        if constexpr (kRound == kNearestAway) code = ptx::add_max_s16x2(ptx::fma_bf16x2(magnitude, factor, kFar + 0x00010001), 0xFFFFFFFF, code);
        return ptx::add_clamp_s16x2(code, 0xBD00BD00, 0x00070007);
    }
};

}  // namespace nib
