// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// How a horizontal pass gets at its pixels.
#pragma once

#include <string.h>

#include "kernels.h"

namespace ovis {

// A window of pixel groups that slides over a block of rows. Groups are brought
// into `scratch` just ahead of their use, so that they are still in the
// first-level cache.
//
// Loader is a type of the file that uses it, with
//   kGroup, kStep    pixels in a group, and groups that one load makes
//   load(rows, offset, words)
//                    reads 16 bytes from each row and writes kStep groups
//
// Fields are copies: for all the compiler knows, what is written to the block's
// memory might change the block itself, which it would read again each time.
template <typename Loader>
class Source {
 public:
  Source(const HorizontalBlock& block, const Loader& loader)
      : loader_(loader),
        group_bytes_(ptrdiff_t{Loader::kGroup} * block.bytes_per_pixel),
        readable_(block.readable),
        scratch_(block.scratch),
        scratch_groups_(block.scratch_groups) {
    memcpy(rows_, block.rows, sizeof(rows_));
  }

  // `count` groups from `first` on; `first` must not decrease.
  const int32_t* window(int first, int count) {
    if (made_ < first + count) make(first, first + count);
    return scratch_ + ptrdiff_t{first - base_} * kGroupWords;
  }

 private:
  static constexpr int kRows = kBlockGroups * Loader::kGroup;
  static constexpr int kGroupWords = 3 * kRows;

  void make(int first, int end) {
    while (made_ < end) {
      if (made_ + Loader::kStep - base_ > scratch_groups_) {
        const int kept = made_ - first;
        memmove(scratch_, scratch_ + ptrdiff_t{first - base_} * kGroupWords,
                size_t(kept) * kGroupWords * sizeof(int32_t));
        base_ = first;
      }
      load(made_ * group_bytes_,
           scratch_ + ptrdiff_t{made_ - base_} * kGroupWords);
      made_ += Loader::kStep;
    }
  }

  void load(ptrdiff_t offset, int32_t* words) {
    const ptrdiff_t left = readable_ - offset;
    if (left >= 16) return loader_.load(rows_, offset, words);
    uint8_t copies[kRows][16] = {};
    const uint8_t* rows[kRows];
    for (int i = 0; i < kRows; ++i) {
      memcpy(copies[i], rows_[i] + offset, left);
      rows[i] = copies[i];
    }
    loader_.load(rows, 0, words);
  }

  const Loader loader_;
  const uint8_t* rows_[kRows];
  const ptrdiff_t group_bytes_;
  const ptrdiff_t readable_;
  int32_t* const scratch_;
  const int scratch_groups_;
  int base_ = 0;  // group at the start of scratch
  int made_ = 0;  // groups before it have been made
};

}  // namespace ovis
