// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The bicubic filter of one axis in fixed point.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ovis {

constexpr int kPrecisionBits = 22;
constexpr int32_t kRounding = 1 << (kPrecisionBits - 1);

// Which input samples make up each output sample, and with which coefficients.
struct Taps {
  int in = 0;
  int out = 0;
  std::vector<int> first;            // [out]
  std::vector<int> count;            // [out], at least 1
  std::vector<std::size_t> offset;        // [out], of the first coefficient
  std::vector<int32_t> coefficients;  // 22 fractional bits
};

// Coefficients as Pillow computes them: in double, normalised to a sum of 1, then
// rounded to fixed point. `first` never decreases.
Taps make_taps(int in, int out);

}  // namespace ovis
