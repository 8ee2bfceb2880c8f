// A unit is 64 adjacent values of a row or column, which one lane converts.
#pragma once

namespace nib {

constexpr int kUnit = 64;

}  // namespace nib
