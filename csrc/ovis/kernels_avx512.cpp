// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Four samples of 8 bits to a word. A coefficient k is split into
// (a * 256 + b) * 256 + c with signed bytes a, b and c, so that one dot product
// of four bytes serves each.
//
// As in kernels_avx2.cpp, nothing but plain C from the standard library.
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

  #pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni")
  // False alarms about the "undefined" vectors of GCC 12's own headers.
  #pragma GCC diagnostic ignored "-Wuninitialized"
  #pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
  #include <immintrin.h>
  #include <string.h>

  #include "source.h"

namespace ovis {
namespace {

constexpr int kBits = 22;
constexpr int kGroup = 4;
constexpr int kDigits = 3;
constexpr int kRows = kBlockGroups * kGroup;
constexpr int kChunk = 64;             // samples of one step of a vertical pass
constexpr int kQuadWords = 3 * kRows;  // of four pixels in `scratch`

void split(const int32_t* coefficients, int32_t* words) {
  int8_t digits[kDigits][kGroup];
  for (int i = 0; i < kGroup; ++i) {
    int32_t rest = coefficients[i];
    for (int d = kDigits - 1; d >= 0; --d) {
      const int8_t digit = static_cast<int8_t>(rest & 0xff);
      digits[d][i] = digit;
      rest = (rest - digit) / 256;  // exact
    }
  }
  memcpy(words, digits, sizeof(digits));
}

inline __m512i join(const __m512i sums[kDigits]) {
  const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(sums[0], 8), sums[1]);
  return _mm512_srai_epi32(
      _mm512_add_epi32(_mm512_slli_epi32(high, 8), sums[2]), kBits);
}

inline void start(__m512i sums[kDigits]) {
  sums[0] = sums[1] = _mm512_setzero_si512();
  sums[2] = _mm512_set1_epi32(1 << (kBits - 1));
}

// Four pixels of each row to one group.
class Loader {
 public:
  static constexpr int kGroup = 4;
  static constexpr int kStep = 1;

  explicit Loader(int bytes_per_pixel)
      : order_(_mm512_broadcast_i32x4(
            bytes_per_pixel == 3 ? _mm_setr_epi8(0, 3, 6, 9, 1, 4, 7, 10, 2, 5,
                                                 8, 11, -1, -1, -1, -1)
                                 : _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6,
                                                 10, 14, -1, -1, -1, -1))) {}

  void load(const uint8_t* const* rows, ptrdiff_t offset,
            int32_t* words) const {
    const __m512i a = four_rows(rows, 0, offset),
                  b = four_rows(rows, 1, offset);
    const __m512i c = four_rows(rows, 2, offset),
                  d = four_rows(rows, 3, offset);
    const __m512i ab = _mm512_unpacklo_epi32(a, b),
                  cd = _mm512_unpacklo_epi32(c, d);
    _mm512_storeu_si512(words, _mm512_unpacklo_epi64(ab, cd));
    _mm512_storeu_si512(words + kRows, _mm512_unpackhi_epi64(ab, cd));
    _mm512_storeu_si512(words + 2 * kRows,
                        _mm512_unpacklo_epi64(_mm512_unpackhi_epi32(a, b),
                                              _mm512_unpackhi_epi32(c, d)));
  }

 private:
  // Rows i, i + 4, i + 8 and i + 12.
  __m512i four_rows(const uint8_t* const* rows, int i, ptrdiff_t offset) const {
    const auto row = [&](int j) {
      return _mm_loadu_si128(
          reinterpret_cast<const __m128i*>(rows[j] + offset));
    };
    __m512i four = _mm512_castsi128_si512(row(i));
    four = _mm512_inserti32x4(four, row(i + 4), 1);
    four = _mm512_inserti32x4(four, row(i + 8), 2);
    four = _mm512_inserti32x4(four, row(i + 12), 3);
    return _mm512_shuffle_epi8(four, order_);  // RRRR GGGG BBBB of each row
  }

  const __m512i order_;
};

// kGroups is the number of groups in a window, or 0 if only known at run time.
template <int kGroups>
void horizontal_of(const HorizontalBlock& block) {
  Source<Loader> source(block, Loader(block.bytes_per_pixel));
  // Copies, see Source.
  const int* const starts = block.starts;
  const int groups = kGroups ? kGroups : block.groups;
  const int out_width = block.out_width;
  int32_t* const out[kBlockGroups] = {block.out[0], block.out[1], block.out[2],
                                      block.out[3]};
  const int32_t* coefficients = block.coefficients;
  for (int x = 0; x < out_width; ++x) {
    const int32_t* words = source.window(starts[x], groups);
    __m512i sums[3][kDigits];
    for (int c = 0; c < 3; ++c) start(sums[c]);
  #pragma GCC unroll 16
    for (int j = 0; j < groups; ++j) {
      for (int c = 0; c < 3; ++c) {
        const __m512i pixels = _mm512_loadu_si512(words + c * kRows);
        for (int d = 0; d < kDigits; ++d) {
          sums[c][d] = _mm512_dpbusd_epi32(sums[c][d], pixels,
                                           _mm512_set1_epi32(coefficients[d]));
        }
      }
      words += kQuadWords;
      coefficients += kDigits;
    }
    // Lane i of the bytes is row group i: a word each of R, G, B and B again.
    const __m512i blue = join(sums[2]);
    const __m512i bytes =
        _mm512_packus_epi16(_mm512_packs_epi32(join(sums[0]), join(sums[1])),
                            _mm512_packs_epi32(blue, blue));
    // The fourth word is overwritten by the next pixel or lies in the padding.
    const auto store = [&out, x](int group, __m128i lane) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out[group] + 3 * x), lane);
    };
    store(0, _mm512_castsi512_si128(bytes));
    store(1, _mm512_extracti32x4_epi32(bytes, 1));
    store(2, _mm512_extracti32x4_epi32(bytes, 2));
    store(3, _mm512_extracti32x4_epi32(bytes, 3));
  }
}

void horizontal(const HorizontalBlock& block) {
  switch (block.groups) {
    case 1:
      return horizontal_of<1>(block);
    case 2:
      return horizontal_of<2>(block);
    case 3:
      return horizontal_of<3>(block);
    case 4:
      return horizontal_of<4>(block);
    case 5:
      return horizontal_of<5>(block);
    case 6:
      return horizontal_of<6>(block);
    default:
      return horizontal_of<0>(block);
  }
}

// 64 samples of a row. `load(group, words)` gives 4 vectors of words.
template <typename Load>
inline __m512i filter_chunk(const Load& load, const int32_t* coefficients,
                            int groups) {
  __m512i sums[4][kDigits];
  for (int i = 0; i < 4; ++i) start(sums[i]);
  for (int j = 0; j < groups; ++j) {
    __m512i samples[4];
    load(j, samples);
    for (int d = 0; d < kDigits; ++d) {
      const __m512i k = _mm512_set1_epi32(coefficients[kDigits * j + d]);
      for (int i = 0; i < 4; ++i) {
        sums[i][d] = _mm512_dpbusd_epi32(sums[i][d], samples[i], k);
      }
    }
  }
  return _mm512_packus_epi16(_mm512_packs_epi32(join(sums[0]), join(sums[1])),
                             _mm512_packs_epi32(join(sums[2]), join(sums[3])));
}

inline __mmask64 first_bytes(int count) {
  return count >= kChunk ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
}

void vertical(const int32_t* const* windows, const int32_t* coefficients,
              int groups, int samples, uint8_t* out) {
  const __m512i in_order =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int begin = 0; begin < samples; begin += kChunk) {
    const auto load = [&](int j, __m512i words[4]) {
      for (int i = 0; i < 4; ++i) {
        words[i] = _mm512_loadu_si512(windows[j] + begin + 16 * i);
      }
    };
    const __m512i bytes = _mm512_permutexvar_epi32(
        in_order, filter_chunk(load, coefficients, groups));
    _mm512_mask_storeu_epi8(out + begin, first_bytes(samples - begin), bytes);
  }
}

void vertical_bytes(const uint8_t* const* rows, const int32_t* coefficients,
                    int groups, int samples, uint8_t* out) {
  for (int begin = 0; begin < samples; begin += kChunk) {
    const __mmask64 mask = first_bytes(samples - begin);
    const auto load = [&](int j, __m512i words[4]) {
      const auto row = [&](int i) {
        return _mm512_maskz_loadu_epi8(mask, rows[kGroup * j + i] + begin);
      };
      const __m512i a = row(0), b = row(1), c = row(2), d = row(3);
      const __m512i ab_low = _mm512_unpacklo_epi8(a, b);
      const __m512i ab_high = _mm512_unpackhi_epi8(a, b);
      const __m512i cd_low = _mm512_unpacklo_epi8(c, d);
      const __m512i cd_high = _mm512_unpackhi_epi8(c, d);
      words[0] = _mm512_unpacklo_epi16(ab_low, cd_low);
      words[1] = _mm512_unpackhi_epi16(ab_low, cd_low);
      words[2] = _mm512_unpacklo_epi16(ab_high, cd_high);
      words[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
    };
    _mm512_mask_storeu_epi8(out + begin, mask,
                            filter_chunk(load, coefficients, groups));
  }
}

constexpr Kernels kKernels = {"avx512",   kGroup,   kDigits,       split,
                              horizontal, vertical, vertical_bytes};

}  // namespace

const Kernels* avx512_kernels() { return &kKernels; }

}  // namespace ovis

#else

namespace ovis {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace ovis

#endif
