// MXFP4, as kernels take it that know every format; those for it alone know E2m1.
#pragma once
#include "formats/block_format.cuh"

namespace nib {

struct Mxfp4 : MxFormat<SixteenE2m1> {};

}  // namespace nib
