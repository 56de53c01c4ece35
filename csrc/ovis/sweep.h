// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// One resize: which rows are read, in which order the two passes run, what is
// kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "filter.h"
#include "kernels.h"
#include "tiler.h"

namespace ovis {

// The filter of one axis in the layout of a set of kernels: every window starts
// on a group and has the same number of groups, filled up with coefficients of
// 0.
struct Windows {
  int groups = 0;
  std::vector<int> starts;            // [out], in groups
  std::vector<int> first, last;       // [out], see Taps
  int words = 0;                      // groups * digits
  std::vector<int32_t> coefficients;  // [out][groups][digits]

  const int32_t* at(int i) const {
    return coefficients.data() + size_t(i) * words;
  }
};

Windows make_windows(const Taps& taps, const Kernels& kernels);

// Pillow 13 runs the vertical pass first when that leaves clearly fewer
// samples. The result of the first pass is rounded to bytes, so the order is
// part of the result.
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

// Memory of a known size that starts on a cache line and holds zeros at first.
class Words {
 public:
  explicit Words(size_t count);
  int32_t* data() const { return words_.get(); }

 private:
  struct Delete {
    void operator()(int32_t* words) const;
  };
  std::unique_ptr<int32_t[], Delete> words_;
};

// Rows of the result of a job that are made one after the other, by one thread
// at a time, as the rows of the picture come in.
class Band {
 public:
  // Rows [begin, end) of the job's result.
  Band(const ovis_tiler_job& job, int picture_width, const Axes& axes,
       const Kernels& kernels, int begin, int end);

  bool done() const { return y_ == end_; }

  // Rows of the picture that the next step takes, if not done.
  ovis_tiler_rows needs() const;

  // Takes all steps that a strip is enough for.
  void advance(const ovis_tiler_strip& strip);

 private:
  struct Memory;

  int block_rows() const { return kBlockGroups * kernels_->group; }
  ovis_tiler_rows next_block() const;
  void make_block(const ovis_tiler_strip& strip);
  void make_row();
  bool is_copy() const;
  void copy_row(const ovis_tiler_strip& strip);

  ovis_tiler_job job_;
  int picture_width_;
  Axes axes_;
  const Kernels* kernels_;
  const Windows*
      second_;  // what the vertical kernel does after the horizontal pass
  int begin_, end_;
  int y_;                               // next row of the result
  int next_group_;                      // next row group of the horizontal pass
  std::vector<const int32_t*> groups_;  // of the window of a row
  std::shared_ptr<Memory> memory_;      // from the first step to the last
};

}  // namespace ovis
