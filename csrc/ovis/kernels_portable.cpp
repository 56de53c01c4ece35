// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Plain loops with one sample to a word, in a shape that compilers vectorise on any
// machine with 32-bit multiplication in vectors (NEON among them).
#include <algorithm>

#include "filter.h"
#include "kernels.h"

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

void horizontal(const HorizontalBlock& block) {
  // scratch: [pixel][channel][row], so that one coefficient serves 12 neighbours.
  constexpr int kStep = kChannels * kRows;
  for (int row = 0; row < kRows; ++row) {
    const uint8_t* pixel = block.rows[row];
    int32_t* word = block.scratch + row;
    for (int x = 0; x < block.width; ++x) {
      for (int c = 0; c < kChannels; ++c) word[c * kRows] = pixel[c];
      pixel += block.bytes_per_pixel;
      word += kStep;
    }
  }
  const int32_t* coefficients = block.coefficients;
  for (int x = 0; x < block.out_width; ++x) {
    const int32_t* words = block.scratch + size_t{kStep} * block.starts[x];
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
