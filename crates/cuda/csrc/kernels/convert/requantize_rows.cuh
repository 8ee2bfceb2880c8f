// Converts E4M3 rows to MXFP4 rows. The result is bit-identical to quantizing the decoded values f32(code · scale).
//
// row_id[rows] (null: all rows are valid): negative ids mark padding rows, which become zeros. If counts[3] is not null, the kernel adds three numbers to it:
// source blocks with a non-zero code, source blocks in which a value changed, and source blocks with a NaN or infinity.
//
// requantize_rows<Scale, kRule>: reads codes [rows][cols] and scales [rows][ceil(cols / 128)], which are E8M0 bytes (Scale = u8) or F32 (Scale = float).
//   Writes codes [rows][cols / 2] and E8M0 scales [rows][cols / 32]; cols % 32 == 0. kRule is a scale rule of formats/e8m0.cuh except the F32 rule.
//   256 threads per CTA. A warp converts a segment of 2048 columns at a time; a row has segments = ceil(cols / 2048), and `by_segments`
//   divides by it. Any grid size gives correct results; ceil(rows · segments / 8) CTAs, but at most 16 per SM, are fastest. If all rows
//   are valid and cols % 128 == 0, the launch may pass x as one row of less than 2^30 values. Buffers are 16-byte aligned.
//
// Each lane encodes a whole target block.
//
// Speed in % of the bandwidth limit of quantize.cuh, with E8M0 scales: 84 % at 32768 x 7168, 59
// % at 4096 x 7168. The integer units limit the speed, because they are busy 71 % of the time.
#pragma once
#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/e8m0.cuh"
#include "math/reduce.cuh"
#include "ptx/global.cuh"
#include "ptx/packed.cuh"

namespace nib {

constexpr int kRequantizeThreads = 256;
constexpr int kRequantizeChunks = 2;
constexpr int kRequantizeChunkCols = 1024;

__device__ __forceinline__ float scale_value(u8 byte) { return e8m0_decode(byte); }
__device__ __forceinline__ float scale_value(float scale) { return scale; }

/// The magnitudes of 32 E4M3 codes, as pairs of F16 values.
struct Magnitudes32 {
    u32 pair[16];

    __device__ __forceinline__ explicit Magnitudes32(const u32 (&words)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 four = words[i] & 0x7F7F7F7F;
            pair[2 * i] = ptx::f16x2_from_e4m3x2(ptx::low_u16(four));
            pair[2 * i + 1] = ptx::f16x2_from_e4m3x2(ptx::high_u16(four));
        }
    }

    /// Returns the largest magnitude, or NaN if any magnitude is NaN.
    __device__ __forceinline__ float largest() const {
        u32 two = pair[0];
#pragma unroll
        for (int i = 1; i < 15; i += 2) two = ptx::max_u16x2(ptx::max_u16x2(two, pair[i]), pair[i + 1]);
        two = ptx::max_u16x2(two, pair[15]);
        return ptx::f32x2_from_f16x2(max(two & 0xFFFF, two >> 16)).x;
    }
};

/// Packs eight four-bit codes, from their magnitudes and from the signs of the eight E4M3 codes in `low` and `high`.
__device__ __forceinline__ u32 with_signs(u32 magnitudes, u32 low, u32 high) {
    const u32 even = __byte_perm(low, high, 0x6420), odd = __byte_perm(low, high, 0x7531);
    return magnitudes | (even >> 4 & 0x08080808) | (odd & 0x80808080);
}

/// Encodes magnitudes after multiplying them by 2^octaves, with octaves from -8 to 11; the largest product is below 8.
struct ByOctaves {
    u32 factor;       // 2^octaves as a pair of equal F16 values
    u32 fine_factor;  // 2^(octaves - 14) as a pair of equal F16 values; this factor maps E2M1's smallest normal number to F16's

    __device__ __forceinline__ explicit ByOctaves(int octaves) {
        factor = u32(octaves + 15) * 0x04000400;
        fine_factor = (octaves >= 0 ? u32(octaves + 1) << 10 : 0x400u >> -octaves) * 0x00010001;
    }

    /// Returns eight codes without signs, rounded to nearest even. kExceeds: magnitudes above 6 may occur, and
    /// saturate. E2m1::encode_within uses the same method. 1536 is an F16 number whose last mantissa bit is worth 1.
    template <bool kExceeds>
    __device__ __forceinline__ u32 encode(const u32* pair) const {
        constexpr u32 kFar = 0x66006600;
        const u32 twice = factor + 0x04000400, half = factor - 0x04000400;
        u32 code[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 halves = ptx::fma_f16x2(pair[i], twice, kFar), ones = ptx::fma_f16x2(pair[i], factor, kFar + 0x00020002);
            const u32 twos = ptx::fma_f16x2(pair[i], half, kFar + 0x00040004);
            code[i] = ptx::min_u16x2(ptx::min_u16x2(halves, ones), twos);
            if constexpr (kExceeds) code[i] = ptx::min_u16x2(code[i], kFar + 0x00070007);
        }
        const u32 a = code[1] * 256 + code[0], b = code[3] * 256 + code[2];
        return __byte_perm(a, b, 0x7632) * 16 + __byte_perm(a, b, 0x5410) - (kFar + 0x66666660);
    }

    /// A quick test of the first eight values, for values up to 6. Returns true if E2M1 cannot represent
    /// at least one of them. If the result is false, the caller has yet to test the other values.
    __device__ __forceinline__ bool few_lose(const u32 (&pair)[16]) const {
        u32 lost = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) lost |= ptx::mul_f16x2(pair[i], fine_factor) & 0x01FF01FF;
        return lost != 0;
    }
    /// Returns whether E2M1 cannot represent at least one of the 32 values.
    __device__ __forceinline__ bool loses(uint4, uint4, const Magnitudes32& magnitudes) const {
        u32 lost = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const u32 value = ptx::mul_f16x2(magnitudes.pair[i], fine_factor);
            // A value that became zero in F16 is also not representable in E2M1.
            lost |= (value & 0x01FF01FF) | (ptx::min_u16x2(magnitudes.pair[i], 0x00010001) ^ ptx::min_u16x2(value, 0x00010001));
        }
        return lost != 0;
    }
};

/// Encodes the values f32(magnitude · scale) under a target scale, in F32.
struct ByScales {
    float scale, inverse;

    template <bool kExceeds>
    __device__ __forceinline__ u32 encode(const u32* pair) const {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(value(pair, i), inverse);
        return E2m1::magnitudes<kExceeds>(v);
    }

    __device__ __forceinline__ bool few_lose(const u32 (&pair)[16]) const {
        u32 lost = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) lost |= __float_as_uint(__fmul_rn(value(pair, i), inverse)) & kBelow;
        return lost != 0;
    }
    /// This function is not inlined, so that its registers do not add to the kernel's registers.
    __device__ __noinline__ static bool loses(uint4 a, uint4 b, float scale, float inverse) {
        const u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        const Magnitudes32 magnitudes(words);
        bool lost = false;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const float x = ByScales{scale, inverse}.value(magnitudes.pair, i), v = __fmul_rn(x, inverse);
            lost |= (__float_as_uint(v) & kBelow) != 0 || (v < 1 && v != 0.5f && x != 0);
        }
        return lost;
    }
    __device__ __forceinline__ bool loses(uint4 a, uint4 b, const Magnitudes32&) const { return loses(a, b, scale, inverse); }

private:
    static constexpr u32 kBelow = 0x3FFFFF;  // E2M1 has one mantissa bit, down to 1/2

    __device__ __forceinline__ float value(const u32* pair, int i) const {
        const float2 two = ptx::f32x2_from_f16x2(pair[i / 2]);
        return __fmul_rn(i % 2 ? two.y : two.x, scale);
    }
};

__device__ __forceinline__ ByOctaves conversion(u8 scale, const BlockScale<u8>& to) {
    // The value of `octaves` has no effect in a block of zeros or in a block with a NaN.
    return ByOctaves(max(min(int(scale) - int(to.stored), 11), -8));
}
__device__ __forceinline__ ByScales conversion(float scale, const BlockScale<u8>& to) { return {scale, to.inverse}; }

template <class Scale, int kRule>
__global__ void __launch_bounds__(kRequantizeThreads, sizeof(Scale) == 1 ? 4 : 3)
    requantize_rows(const u8* __restrict__ codes, const Scale* __restrict__ scales, u8* __restrict__ out, u8* __restrict__ out_scales,
                    u64* counts, const int* __restrict__ row_id, int rows, int cols, Divider by_segments, u32 segments) {
    constexpr bool kExceeds = rule_exceeds(kRule);
    __shared__ u32 total[3];
    const int lane = threadIdx.x % 32;
    const int sources = ceil_div(cols, E4m3::kBlock), targets = cols / E2m1::kBlock;
    const u32 tasks = u32(rows) * segments;
    Tally tally;
    for (u32 task = blockIdx.x * (kRequantizeThreads / 32) + threadIdx.x / 32; task < tasks;
         task += gridDim.x * (kRequantizeThreads / 32)) {
        const u32 row = by_segments.divide(task), segment = task - row * segments;
        const int first_col = segment * (kRequantizeChunks * kRequantizeChunkCols) + lane * E2m1::kBlock;
        const bool counted = row_id == nullptr || __ldg(row_id + row) >= 0;
        const u8* const from = codes + u64(row) * cols;
        uint4 in[kRequantizeChunks][2];
        Scale source[kRequantizeChunks];
#pragma unroll
        for (int i = 0; i < kRequantizeChunks; ++i) {
            const int col = first_col + i * kRequantizeChunkCols;
            in[i][0] = in[i][1] = {0, 0, 0, 0};
            source[i] = 0;
            if (counted && col < cols) {
                in[i][0] = __ldg(reinterpret_cast<const uint4*>(from + col));
                in[i][1] = __ldg(reinterpret_cast<const uint4*>(from + col) + 1);
                source[i] = __ldg(scales + u64(row) * sources + col / E4m3::kBlock);
            }
        }
        if (!counted) {
#pragma unroll
            for (int i = 0; i < kRequantizeChunks; ++i) {
                const int col = first_col + i * kRequantizeChunkCols;
                if (col >= cols) break;
                ptx::store_16(out + (u64(row) * cols + col) / 2, {0, 0, 0, 0});
                out_scales[u64(row) * targets + col / E2m1::kBlock] = 0;
            }
            continue;
        }
        u32 seen = 0;  // chunk i has a non-zero code (bit i), a value that changes (bit i + 8), a NaN (bit i + 16)
#pragma unroll
        for (int i = 0; i < kRequantizeChunks; ++i) {
            const int col = first_col + i * kRequantizeChunkCols;
            const u32 words[8] = {in[i][0].x, in[i][0].y, in[i][0].z, in[i][0].w, in[i][1].x, in[i][1].y, in[i][1].z, in[i][1].w};
            const Magnitudes32 magnitudes(words);
            const float largest = magnitudes.largest(), amax = __fmul_rn(largest, scale_value(source[i]));
            const auto to = block_scale<E2m1, kRule>(__float_as_uint(amax) & 0x7FFFFFFF);
            const auto by = conversion(source[i], to);
            u32 encoded[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                encoded[j] = with_signs(by.template encode<kExceeds>(magnitudes.pair + 4 * j), words[2 * j], words[2 * j + 1]);
            // In most blocks the first eight values already contain one that E2M1 cannot represent.
            bool changed = by.few_lose(magnitudes.pair) || (kExceeds && __fmul_rn(amax, to.inverse) > E2m1::kMax);
            if (!changed) changed = by.loses(in[i][0], in[i][1], magnitudes);
            if (to.is_nan()) {
#pragma unroll
                for (int j = 0; j < 4; ++j) encoded[j] = 0;
                seen |= 0x010000 << i;
            } else {
                seen |= u32(changed) << (8 + i);
            }
            seen |= u32(largest != 0) << i;
            if (col < cols) {
                ptx::store_16(out + (u64(row) * cols + col) / 2, {encoded[0], encoded[1], encoded[2], encoded[3]});
                out_scales[u64(row) * targets + col / E2m1::kBlock] = to.stored;
            }
        }
        // Four lanes share each source block.
        seen |= __shfl_xor_sync(kAllLanes, seen, 1);
        seen |= __shfl_xor_sync(kAllLanes, seen, 2);
        if (lane % 4 == 0) {
            tally.non_zero += __popc(seen & 0xFF);
            tally.inexact += __popc(seen & 0xFF00);
            tally.non_finite += __popc(seen & 0xFF0000);
        }
    }
    tally.flush(counts, total);
}

}  // namespace nib
