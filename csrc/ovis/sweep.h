// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// One resize: which rows are read, in which order the two passes run, what is kept.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "filter.h"
#include "kernels.h"
#include "tiler.h"

namespace ovis {

// The filter of one axis in the layout of a set of kernels: every window starts on a
// group and has the same number of groups, filled up with coefficients of 0.
struct Windows {
  int groups = 0;
  std::vector<int> starts;            // [out], in groups
  std::vector<int> first, last;       // [out], the taps within, see Taps
  std::vector<int32_t> coefficients;  // [out][groups][digits]
};

Windows make_windows(const Taps& taps, const Kernels& kernels);

// Pillow 13 runs the vertical pass first when that leaves clearly fewer samples. The
// result of the first pass is rounded to bytes, so the order is part of the result.
bool vertical_first(int width, int height, int out_width, int out_height);

// Windows of each pair of sizes, made once for all jobs of a call.
class WindowsCache {
 public:
  explicit WindowsCache(const Kernels& kernels) : kernels_(kernels) {}
  const Windows* get(int in, int out);

 private:
  const Kernels& kernels_;
  std::map<std::pair<int, int>, Windows> windows_;
};

struct Axes {
  const Windows* horizontal;
  const Windows* vertical;  // also of the vertical pass when it runs first
  const Windows* identity;  // stands in for it afterwards; nullptr otherwise
};

Axes make_axes(const ovis_tiler_job& job, WindowsCache& cache);

// Makes rows [begin, end) of a job's result. The strip must hold what they need.
void resize_band(const ovis_tiler_strip& strip, const ovis_tiler_job& job,
                 const Axes& axes, const Kernels& kernels, int begin, int end);

}  // namespace ovis
