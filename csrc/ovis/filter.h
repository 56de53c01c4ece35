// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The bicubic filter of one axis in fixed point.
#pragma once

#include <cstdint>
#include <vector>

namespace ovis {

constexpr int kPrecisionBits = 22;
constexpr int32_t kRounding = 1 << (kPrecisionBits - 1);

// Which input samples make up each output sample, and with which coefficients.
struct Taps {
  int in = 0;
  int out = 0;
  std::vector<int> first;  // [out], never decreases
  std::vector<int> last;   // [out], one behind the last; never decreases
  std::vector<int32_t>
      coefficients;  // of all, one after the other; 22 fractional bits
};

// Coefficients as Pillow computes them: in double, normalised to a sum of 1,
// then rounded to fixed point.
Taps make_taps(int in, int out);

}  // namespace ovis
