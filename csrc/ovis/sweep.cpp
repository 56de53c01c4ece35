// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "sweep.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace ovis {
namespace {

constexpr int kChannels = 3;
constexpr int kMostBytesPerPixel = 4;

// Groups of pixels in `scratch` beside those of a window: enough to make
// sliding rare, few enough for the first-level cache.
constexpr int kAheadPixels = 128;

size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int power_of_two(int at_least) {
  int value = 1;
  while (value < at_least) value *= 2;
  return value;
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
  windows.words = windows.groups * kernels.digits;
  windows.coefficients.resize(size_t(taps.out) * windows.words);
  std::vector<int32_t> padded(size_t(windows.groups) * group);
  const int32_t* coefficients = taps.coefficients.data();
  int32_t* words = windows.coefficients.data();
  for (int i = 0; i < taps.out; ++i) {
    // Moved to the left at the end of the axis, so that no window leaves it.
    const int start = std::min(taps.first[i] / group, total - windows.groups);
    windows.starts[i] = start;
    std::fill(padded.begin(), padded.end(), 0);
    const int count = taps.last[i] - taps.first[i];
    std::copy_n(coefficients, count,
                padded.begin() + (taps.first[i] - start * group));
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

Words::Words(size_t count)
    : words_(new (std::align_val_t(kCacheLine)) int32_t[count]()) {}

void Words::Delete::operator()(int32_t* words) const {
  operator delete[](words, std::align_val_t(kCacheLine));
}

// What a band needs between its first and its last step.
struct Band::Memory {
  Memory(size_t samples, int ring_groups, size_t scratch_words,
         size_t first_pass_bytes)
      : ring_stride(round_up(samples, kCacheLine / sizeof(int32_t)) +
                    kPaddingWords),
        ring_mask(power_of_two(ring_groups) - 1),
        ring(ring_stride * (size_t(ring_mask) + 1)),
        scratch(scratch_words),
        first_pass(first_pass_bytes) {}

  // Row groups that the horizontal pass has made and the vertical pass still
  // needs.
  int32_t* row_group(int index) const {
    return ring.data() + ring_stride * (index & ring_mask);
  }

  const size_t ring_stride;
  const int ring_mask;
  const Words ring;
  const Words scratch;
  std::vector<uint8_t>
      first_pass;  // rows of a block if the vertical pass runs first
};

Band::Band(const ovis_tiler_job& job, int picture_width, const Axes& axes,
           const Kernels& kernels, int begin, int end)
    : job_(job),
      picture_width_(picture_width),
      axes_(axes),
      kernels_(&kernels),
      second_(axes.identity ? axes.identity : axes.vertical),
      begin_(begin),
      end_(end),
      y_(begin),
      next_group_(second_->starts[begin] / kBlockGroups * kBlockGroups) {}

// Rows that the next block is made of, as the horizontal pass counts them.
// Others stand in for those that do not influence the band, as they only meet
// coefficients of 0.
ovis_tiler_rows Band::next_block() const {
  const int top = next_group_ * kernels_->group;
  const int bottom = std::min(top + block_rows(), second_->last[end_ - 1]);
  return {std::min(std::max(top, second_->first[begin_]), bottom - 1), bottom};
}

ovis_tiler_rows Band::needs() const {
  if (is_copy()) return {job_.top + y_, job_.top + y_ + 1};
  ovis_tiler_rows rows = next_block();
  if (axes_.identity != nullptr) {
    rows = {axes_.vertical->first[rows.top],
            axes_.vertical->last[rows.bottom - 1]};
  }
  return {job_.top + rows.top, job_.top + rows.bottom};
}

void Band::advance(const ovis_tiler_strip& strip) {
  while (!done()) {
    const bool has_groups =
        !is_copy() && second_->starts[y_] + second_->groups <= next_group_;
    if (has_groups) {
      make_row();
      ++y_;
      continue;
    }
    const ovis_tiler_rows rows = needs();
    if (rows.top < strip.top || rows.bottom > strip.top + strip.height) return;
    if (is_copy()) {
      copy_row(strip);
      ++y_;
    } else {
      make_block(strip);
    }
  }
  memory_.reset();
}

// Both passes would leave every byte as it is.
bool Band::is_copy() const {
  return job_.width == job_.out_width && job_.height == job_.out_height;
}

void Band::copy_row(const ovis_tiler_strip& strip) {
  const int bytes_per_pixel = strip.bytes_per_pixel;
  const uint8_t* in = strip.data + ptrdiff_t{job_.left} * bytes_per_pixel +
                      (ptrdiff_t{job_.top} + y_ - strip.top) * strip.row_stride;
  uint8_t* out = job_.out + y_ * job_.out_stride;
  // Four bytes at a time, of which the next pixel takes the last back.
  for (int x = 0; x + 1 < job_.width; ++x) {
    std::memcpy(out + ptrdiff_t{x} * kChannels, in, kMostBytesPerPixel);
    in += bytes_per_pixel;
  }
  std::memcpy(out + (ptrdiff_t{job_.width} - 1) * kChannels, in, kChannels);
}

void Band::make_block(const ovis_tiler_strip& strip) {
  const int group = kernels_->group;
  const int bytes_per_pixel = strip.bytes_per_pixel;
  const Windows& horizontal = *axes_.horizontal;
  const int scratch_groups =
      horizontal.groups + std::max(kAheadPixels / group, kLeastAhead);
  const ptrdiff_t row_bytes = ptrdiff_t{job_.width} * bytes_per_pixel;
  if (memory_ == nullptr) {
    memory_ = std::make_shared<Memory>(
        size_t(job_.out_width) * kChannels, second_->groups + kBlockGroups,
        size_t(scratch_groups) * kChannels * block_rows(),
        axes_.identity ? size_t(job_.width) * kMostBytesPerPixel * block_rows()
                       : 0);
  }
  const uint8_t* corner = strip.data + ptrdiff_t{job_.left} * bytes_per_pixel +
                          (ptrdiff_t{job_.top} - strip.top) * strip.row_stride;
  const auto row = [&](int y) { return corner + y * strip.row_stride; };

  const int top = next_group_ * group;
  const int first = next_block().top, last = next_block().bottom - 1;
  const uint8_t* rows[kMaxBlockRows];
  ptrdiff_t readable = ptrdiff_t{picture_width_ - job_.left} * bytes_per_pixel;
  if (axes_.identity == nullptr) {
    for (int i = 0; i < block_rows(); ++i) {
      rows[i] = row(std::clamp(top + i, first, last));
    }
  } else {
    const Windows& vertical = *axes_.vertical;
    std::vector<const uint8_t*> taps(size_t(vertical.groups) * group);
    for (int y = first; y <= last; ++y) {
      for (size_t i = 0; i < taps.size(); ++i) {
        const int tap = vertical.starts[y] * group + static_cast<int>(i);
        taps[i] = row(std::clamp(tap, vertical.first[y], vertical.last[y] - 1));
      }
      kernels_->vertical_bytes(
          taps.data(), vertical.at(y), vertical.groups,
          static_cast<int>(row_bytes),
          memory_->first_pass.data() + (y - first) * row_bytes);
    }
    for (int i = 0; i < block_rows(); ++i) {
      rows[i] = memory_->first_pass.data() +
                (std::clamp(top + i, first, last) - first) * row_bytes;
    }
    readable = row_bytes;
  }

  int32_t* made[kBlockGroups];
  for (int i = 0; i < kBlockGroups; ++i)
    made[i] = memory_->row_group(next_group_ + i);
  kernels_->horizontal(
      {rows, bytes_per_pixel, readable, horizontal.starts.data(),
       horizontal.coefficients.data(), horizontal.groups, job_.out_width,
       memory_->scratch.data(), scratch_groups, made});
  next_group_ += kBlockGroups;
}

void Band::make_row() {
  const Windows& vertical = *second_;
  const int start = vertical.starts[y_];
  groups_.resize(vertical.groups);
  for (int j = 0; j < vertical.groups; ++j)
    groups_[j] = memory_->row_group(start + j);
  kernels_->vertical(groups_.data(), vertical.at(y_), vertical.groups,
                     job_.out_width * kChannels,
                     job_.out + y_ * job_.out_stride);
}

}  // namespace ovis
