// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What an instruction set has to provide. All of them run the same sweep
// (sweep.h) over the same layout and differ in how many samples one 32-bit word
// holds.
//
// A *group* is `group` neighbouring samples along the filtered axis (pixels of
// a row, or rows of a column) in one 32-bit word: 1 of 32 bits, 2 of 16 or 4
// of 8. A coefficient of 22 fractional bits is written as `digits` small
// integers, so that one multiply-add takes a whole group; the digits' sums are
// put together at the end. All sums are exact modulo 2^32 and the result fits,
// so every set gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ovis {

// A horizontal pass makes this many row groups at a time.
constexpr int kBlockGroups = 4;
constexpr int kMaxBlockRows = kBlockGroups * 4;

// A vertical pass may read so many words beyond the last sample of a row group.
constexpr int kPaddingWords = 64;

// Row groups and `scratch` start on one: a load across two costs twice as much.
constexpr int kCacheLine = 64;

struct HorizontalBlock {
  // [4 * group], first pixel of the box in each row
  const uint8_t* const* rows;
  int bytes_per_pixel;          // 3 or 4
  ptrdiff_t readable;           // bytes that may be read from each pointer on
  const int* starts;            // [out_width], first group of each window
  const int32_t* coefficients;  // [out_width][groups][digits]
  int groups;                   // in each window
  int out_width;
  int32_t* scratch;    // [scratch_groups][3][4 * group], on a cache line
  int scratch_groups;  // at least groups + kLeastAhead
  // [4], a row group each: [out_width * 3] words and padding
  int32_t* const* out;
};

// Pixels are brought into `scratch` some way ahead of their use.
constexpr int kLeastAhead = 4;

struct Kernels {
  const char* name;
  int group;
  int digits;
  // Splits the coefficients of a group into digits, a word each.
  void (*split)(const int32_t* coefficients, int32_t* words);
  // Filters 4 * group rows and leaves their bytes as 4 row groups.
  void (*horizontal)(const HorizontalBlock& block);
  // Filters row groups; `windows` holds `groups` of them, `samples` words each.
  void (*vertical)(const int32_t* const* windows, const int32_t* coefficients,
                   int groups, int samples, uint8_t* out);
  // The same from rows of bytes; `rows` holds `groups * group` of them.
  void (*vertical_bytes)(const uint8_t* const* rows,
                         const int32_t* coefficients, int groups, int samples,
                         uint8_t* out);
};

// Each returns nullptr where the build has no such instructions.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace ovis
