// MXINT8: multiples of 1/64 in two's complement.
#pragma once
#include "formats/block_format.cuh"

namespace nib {

struct Mxint8 : MxFormat<Int8> {};

NIB_UNIT_FORMAT(Mxint8, AnyOther, Mxint8, NearestEven)

}  // namespace nib
