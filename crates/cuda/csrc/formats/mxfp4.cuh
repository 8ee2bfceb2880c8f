// MXFP4 for the kernels that support all formats. Kernels for MXFP4 alone use E2m1 (e2m1.cuh).
#pragma once
#include "formats/block_format.cuh"

namespace nib {

struct Mxfp4 : MxFormat<SixteenE2m1> {};

// No specialized kernel quantizes both a weight and its transpose.
NIB_UNIT_FORMAT(Mxfp4, AnyOther, Mxfp4, NearestEven)

}  // namespace nib
