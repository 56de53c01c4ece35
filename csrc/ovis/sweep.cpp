// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "sweep.h"

#include <algorithm>

namespace ovis {
namespace {

constexpr int kChannels = 3;

int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Row groups that the horizontal pass has made and the vertical pass still needs.
class Ring {
 public:
  Ring(int groups, int words)
      : stride_(round_up(words, 16) + kPaddingWords), mask_(1) {
    while (mask_ < groups) mask_ *= 2;
    words_.resize(stride_ * mask_);
    --mask_;
  }

  int32_t* operator[](int group) {
    return words_.data() + stride_ * (group & mask_);
  }

 private:
  size_t stride_;
  int mask_;
  std::vector<int32_t> words_;
};

// A box of which some rows are here: of a strip, or the result of a first pass.
struct Box {
  const uint8_t* data;  // first pixel of row `first_row`
  ptrdiff_t stride;
  int first_row, last_row;
  int width;
  int bytes_per_pixel;
  ptrdiff_t readable;  // bytes from the start of each row on

  // A group may reach out to rows that are not here, but only meets coefficients of 0
  // there: any other row will do.
  const uint8_t* row(int y) const {
    return data + stride * (std::clamp(y, first_row, last_row) - first_row);
  }
};

// Horizontal pass, then vertical pass, for rows [begin, end) of the result.
void horizontal_then_vertical(const Box& box, const Windows& horizontal,
                              const Windows& vertical, const Kernels& kernels,
                              int begin, int end, uint8_t* out,
                              int64_t out_stride) {
  const int block_rows = kBlockGroups * kernels.group;
  const int out_width = static_cast<int>(horizontal.starts.size());
  const int samples = out_width * kChannels;
  const size_t window_words = size_t(vertical.groups) * kernels.digits;

  Ring ring(vertical.groups + kBlockGroups, samples);
  std::vector<int32_t> scratch(size_t(round_up(box.width, 4)) * 12);
  std::vector<const int32_t*> window(vertical.groups);
  const uint8_t* rows[kMaxBlockRows];
  int32_t* made[kBlockGroups];

  HorizontalBlock block;
  block.rows = rows;
  block.bytes_per_pixel = box.bytes_per_pixel;
  block.width = box.width;
  block.readable = box.readable;
  block.starts = horizontal.starts.data();
  block.coefficients = horizontal.coefficients.data();
  block.groups = horizontal.groups;
  block.out_width = out_width;
  block.scratch = scratch.data();
  block.out = made;

  int next_group = vertical.starts[begin] / kBlockGroups * kBlockGroups;
  for (int y = begin; y < end; ++y) {
    const int first = vertical.starts[y];
    while (next_group < first + vertical.groups) {
      for (int i = 0; i < block_rows; ++i) {
        rows[i] = box.row(next_group * kernels.group + i);
      }
      for (int i = 0; i < kBlockGroups; ++i) made[i] = ring[next_group + i];
      kernels.horizontal(block);
      next_group += kBlockGroups;
    }
    for (int j = 0; j < vertical.groups; ++j) window[j] = ring[first + j];
    kernels.vertical(window.data(), vertical.coefficients.data() + y * window_words,
                     vertical.groups, samples, out + y * out_stride);
  }
}

// Vertical pass alone, for rows [begin, end) of the result.
void vertical_only(const Box& box, const Windows& vertical, const Kernels& kernels,
                   int begin, int end, uint8_t* out, size_t out_stride) {
  const int count = vertical.groups * kernels.group;
  const size_t window_words = size_t(vertical.groups) * kernels.digits;
  std::vector<const uint8_t*> rows(count);
  for (int y = begin; y < end; ++y) {
    const int first = vertical.starts[y] * kernels.group;
    for (int i = 0; i < count; ++i) {
      rows[i] = box.row(first + i);
    }
    kernels.vertical_bytes(
        rows.data(), vertical.coefficients.data() + y * window_words,
        vertical.groups, box.width * box.bytes_per_pixel, out);
    out += out_stride;
  }
}

}  // namespace

Windows make_windows(const Taps& taps, const Kernels& kernels) {
  const int group = kernels.group;
  Windows windows;
  for (int i = 0; i < taps.out; ++i) {
    const int last = (taps.last[i] - 1) / group;
    windows.groups = std::max(windows.groups, last - taps.first[i] / group + 1);
  }
  const int total = (taps.in + group - 1) / group;
  windows.starts.resize(taps.out);
  windows.first = taps.first;
  windows.last = taps.last;
  windows.coefficients.resize(size_t(taps.out) * windows.groups * kernels.digits);
  std::vector<int32_t> padded(size_t(windows.groups) * group);
  const int32_t* coefficients = taps.coefficients.data();
  int32_t* words = windows.coefficients.data();
  for (int i = 0; i < taps.out; ++i) {
    // Moved to the left at the end of the axis, so that no window leaves it.
    const int start = std::min(taps.first[i] / group, total - windows.groups);
    windows.starts[i] = start;
    std::fill(padded.begin(), padded.end(), 0);
    const int count = taps.last[i] - taps.first[i];
    std::copy_n(coefficients, count, padded.begin() + (taps.first[i] - start * group));
    coefficients += count;
    for (int j = 0; j < windows.groups; ++j) {
      kernels.split(padded.data() + j * group, words);
      words += kernels.digits;
    }
  }
  return windows;
}

bool vertical_first(int width, int height, int out_width, int out_height) {
  const int64_t fewer_rows = int64_t{height} - out_height;
  const int64_t fewer_columns = int64_t{width} - out_width;
  return fewer_rows > 0 && fewer_rows > 2 * fewer_columns;
}

const Windows* WindowsCache::get(int in, int out) {
  const auto [entry, is_new] = windows_.try_emplace({in, out});
  if (is_new) entry->second = make_windows(make_taps(in, out), kernels_);
  return &entry->second;
}

Axes make_axes(const ovis_tiler_job& job, WindowsCache& cache) {
  Axes axes;
  axes.horizontal = cache.get(job.width, job.out_width);
  axes.vertical = cache.get(job.height, job.out_height);
  axes.identity =
      vertical_first(job.width, job.height, job.out_width, job.out_height)
          ? cache.get(job.out_height, job.out_height)
          : nullptr;
  return axes;
}

void resize_band(const ovis_tiler_strip& strip, const ovis_tiler_job& job,
                 const Axes& axes, const Kernels& kernels, int begin, int end) {
  const int bytes_per_pixel = strip.bytes_per_pixel;
  const ptrdiff_t left = ptrdiff_t{job.left} * bytes_per_pixel;
  const int first_row = axes.vertical->first[begin];
  const Box box{strip.data + left +
                    strip.row_stride * (ptrdiff_t{job.top} + first_row - strip.top),
                strip.row_stride,
                first_row,
                axes.vertical->last[end - 1] - 1,
                job.width,
                bytes_per_pixel,
                ptrdiff_t{strip.width} * bytes_per_pixel - left};
  if (axes.identity == nullptr) {
    horizontal_then_vertical(box, *axes.horizontal, *axes.vertical, kernels, begin,
                             end, job.out, job.out_stride);
    return;
  }
  const ptrdiff_t stride = ptrdiff_t{box.width} * bytes_per_pixel;
  std::vector<uint8_t> bytes(stride * (end - begin));
  vertical_only(box, *axes.vertical, kernels, begin, end, bytes.data(), stride);
  const Box middle{bytes.data(), stride,          begin, end - 1,
                   job.width,    bytes_per_pixel, stride};
  horizontal_then_vertical(middle, *axes.horizontal, *axes.identity, kernels, begin,
                           end, job.out, job.out_stride);
}

}  // namespace ovis
