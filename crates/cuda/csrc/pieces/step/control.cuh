// Indices into `Control` of crates/core/src/ops/step/mod.rs.
#pragma once

namespace nib {

enum { kLr, kBias1, kBias2, kLossScale, kGradScale, kStop };
// The number of leading values that the host sets.
enum { kFromHost = 4 };

}  // namespace nib
