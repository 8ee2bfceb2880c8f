// NVFP4: E2M1 in blocks of 16 under an E4M3 scale, under an F32 scale of the tensor or by itself. The twin of crates/formats/src/nvfp4.rs.
#pragma once
#include "formats/block_format.cuh"

namespace nib {

struct Nvfp4 : OneFactor<SixteenE2m1> {
    static constexpr int kBlock = 16, kPart = 16, kScaleBytes = 1;
    static constexpr bool kTensor = true, kTiles = true;
    static constexpr u32 kNan = 0x7F;

    __device__ __forceinline__ static Scaled scale(const u32 (&amax)[1], ScaleArg, TensorInverse tensor) {
        if (amax[0] >= kInfinityBits) return Scaled::nan(kNan);
        const float wanted = __fmul_rn(__uint_as_float(amax[0]), __fmul_rn(tensor.inverse, 1.0f / 6.0f));
        const u32 byte = ptx::e4m3x2_from_f32(wanted, 0.0f) & 0xFF;
        if (byte == kNan) return Scaled::nan(byte);
        // A scale of zero takes what is not zero to the largest code, which decodes as zero.
        const float value = __fmul_rn(E4m3::decode(byte), tensor.unit);
        if (value >= 0x1p-126f && value <= 0x1p125f) return {byte, reciprocal(value)};
        return {byte, fminf(__frcp_rn(value), 0x1.fffffep127f)};
    }
    __device__ __forceinline__ static float multiplier(u32 record, int) {
        return (record & 0x7F) == kNan ? __uint_as_float(kNanBits) : E4m3::decode(record);
    }
};

}  // namespace nib
