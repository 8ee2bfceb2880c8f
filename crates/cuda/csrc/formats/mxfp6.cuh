// MXFP6 with E2M3 or E3M2 elements: four codes in three bytes.
#pragma once
#include "formats/block_format.cuh"

namespace nib {

struct Mxfp6E2m3 : MxFormat<E2m3> {};
struct Mxfp6E3m2 : MxFormat<E3m2> {};

NIB_UNIT_FORMAT(Mxfp6E2m3, AnyOther, Mxfp6E2m3, NearestEven, Stochastic)
NIB_UNIT_FORMAT(Mxfp6E3m2, AnyOther, Mxfp6E3m2, NearestEven, Stochastic)

}  // namespace nib
