// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Plain loops with one sample to a word, in a shape that compilers vectorise on
// any machine with 32-bit multiplication in vectors (NEON among them).
#include <algorithm>

#include "filter.h"
#include "kernels.h"
#include "source.h"

namespace ovis {
namespace {

constexpr int kRows = kBlockGroups;
constexpr int kChannels = 3;

int32_t to_byte(int32_t sum) {
  return std::clamp(sum >> kPrecisionBits, 0, 255);
}

void split(const int32_t* coefficients, int32_t* words) {
  words[0] = coefficients[0];
}

// One pixel at a time: 3 or 4 bytes, of which the source promises 16.
struct Loader {
  static constexpr int kGroup = 1;
  static constexpr int kStep = 1;

  void load(const uint8_t* const* rows, ptrdiff_t offset,
            int32_t* words) const {
    for (int row = 0; row < kRows; ++row) {
      for (int c = 0; c < kChannels; ++c) {
        words[c * kRows + row] = rows[row][offset + c];
      }
    }
  }
};

void horizontal(const HorizontalBlock& block) {
  constexpr int kStep =
      kChannels * kRows;  // neighbours that one coefficient serves
  Source<Loader> source(block, Loader{});
  const int32_t* coefficients = block.coefficients;
  for (int x = 0; x < block.out_width; ++x) {
    const int32_t* words = source.window(block.starts[x], block.groups);
    int32_t sums[kStep];
    for (int32_t& sum : sums) sum = kRounding;
    for (int j = 0; j < block.groups; ++j) {
      for (int i = 0; i < kStep; ++i) sums[i] += words[i] * coefficients[j];
      words += kStep;
    }
    coefficients += block.groups;
    for (int row = 0; row < kRows; ++row) {
      for (int c = 0; c < kChannels; ++c) {
        block.out[row][x * kChannels + c] = to_byte(sums[c * kRows + row]);
      }
    }
  }
}

template <typename Sample>
void filter_columns(const Sample* const* rows, const int32_t* coefficients,
                    int count, int samples, uint8_t* out) {
  constexpr int kChunk = 64;
  int32_t sums[kChunk];
  for (int begin = 0; begin < samples; begin += kChunk) {
    const int size = std::min(kChunk, samples - begin);
    std::fill_n(sums, size, kRounding);
    for (int j = 0; j < count; ++j) {
      const Sample* row = rows[j] + begin;
      for (int i = 0; i < size; ++i) sums[i] += row[i] * coefficients[j];
    }
    for (int i = 0; i < size; ++i) out[begin + i] = to_byte(sums[i]);
  }
}

constexpr Kernels kKernels = {
    "portable",
    /*group=*/1,
    /*digits=*/1,
    split,
    horizontal,
    filter_columns<int32_t>,
    filter_columns<uint8_t>,
};

}  // namespace

const Kernels* portable_kernels() { return &kKernels; }

}  // namespace ovis
