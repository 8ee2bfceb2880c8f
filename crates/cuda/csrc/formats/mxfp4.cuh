// MXFP4 for the kernels that take every format. The kernels for MXFP4 alone use E2m1 (e2m1.cuh).
#pragma once
#include "formats/block_format.cuh"

namespace nib {

struct Mxfp4 : MxFormat<SixteenE2m1> {};

// Both planes of a weight have no kernel of their own.
NIB_UNIT_FORMAT(Mxfp4, AnyOther, Mxfp4, NearestEven)

}  // namespace nib
