// MXFP8 with E4M3 or E5M2 elements.
#pragma once
#include "formats/block_format.cuh"

namespace nib {

struct Mxfp8E4m3 : MxFormat<WholeE4m3> {};
struct Mxfp8E5m2 : MxFormat<WholeE5m2> {};

NIB_UNIT_FORMAT(Mxfp8E4m3, AnyOther, Mxfp8E4m3, NearestEven)
NIB_UNIT_FORMAT(Mxfp8E5m2, AnyOther, Mxfp8E5m2, NearestEven)

}  // namespace nib
