// A unit: 64 adjacent values of a line, which one lane converts.
#pragma once

namespace nib {

constexpr int kUnit = 64;

}  // namespace nib
