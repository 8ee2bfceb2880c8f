// MXFP4 for the kernels of all formats. Kernels for MXFP4 alone use E2m1 (e2m1.cuh).
#pragma once
#include "formats/block_format.cuh"

namespace nib {

struct Mxfp4 : MxFormat<SixteenE2m1> {};

// Quantizing a weight both as it is and transposed has no specialized kernel.
NIB_UNIT_FORMAT(Mxfp4, AnyOther, Mxfp4, NearestEven)

}  // namespace nib
