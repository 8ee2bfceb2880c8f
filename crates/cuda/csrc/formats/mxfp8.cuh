// MXFP8 of either element.
#pragma once
#include "formats/block_format.cuh"

namespace nib {

struct Mxfp8E4m3 : MxFormat<WholeE4m3> {};
struct Mxfp8E5m2 : MxFormat<WholeE5m2> {};

}  // namespace nib
