// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "filter.h"

#include <algorithm>

// The order of operations in this file decides the last bit of a coefficient.
// It must be compiled without contraction of a product and a sum into one
// operation.

namespace ovis {
namespace {

constexpr double kSharpness = -0.5;
constexpr double kSupport = 2.0;

double cubic(double x) {
  constexpr double a = kSharpness;
  if (x < 0.0) x = -x;
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}

int32_t to_fixed_point(double weight) {
  const double scaled = weight * (1 << kPrecisionBits);
  return static_cast<int32_t>(weight < 0 ? scaled - 0.5 : scaled + 0.5);
}

}  // namespace

Taps make_taps(int in, int out) {
  Taps taps;
  taps.in = in;
  taps.out = out;
  taps.first.resize(out);
  taps.last.resize(out);

  const double scale = static_cast<double>(in) / out;
  const double filter_scale = std::max(scale, 1.0);
  const double support = kSupport * filter_scale;
  const double inverse = 1.0 / filter_scale;
  std::vector<double> weights;
  for (int i = 0; i < out; ++i) {
    const double centre = (i + 0.5) * scale;
    const int first = std::max(static_cast<int>(centre - support + 0.5), 0);
    const int last = std::min(static_cast<int>(centre + support + 0.5), in);
    weights.resize(last - first);
    double sum = 0.0;
    for (int j = 0; j < last - first; ++j) {
      weights[j] = cubic((j + first - centre + 0.5) * inverse);
      sum += weights[j];
    }
    taps.first[i] = first;
    taps.last[i] = last;
    for (const double weight : weights) {
      taps.coefficients.push_back(
          to_fixed_point(sum != 0.0 ? weight / sum : weight));
    }
  }
  return taps;
}

}  // namespace ovis
