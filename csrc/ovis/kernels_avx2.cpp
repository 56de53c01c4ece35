// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Two samples of 16 bits to a word. A coefficient k is split into high * 256 +
// low, both of which fit 16 bits, so that one multiply-add of pairs serves
// each.
//
// Nothing from the standard library that is not plain C may be used here: a
// function template compiled in this file could be the copy that the linker
// keeps for all, and would then run on machines without these instructions.
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

  #pragma GCC target("avx2")
  #include <immintrin.h>
  #include <string.h>

  #include "source.h"

namespace ovis {
namespace {

constexpr int kBits = 22;
constexpr int kGroup = 2;
constexpr int kDigits = 2;
constexpr int kRows = kBlockGroups * kGroup;
constexpr int kChunk = 32;             // samples of one step of a vertical pass
constexpr int kPairWords = 3 * kRows;  // of a pair of pixels in `scratch`

// Keeps a vector in a register: compilers spill accumulators of unrolled loops
// and load pixels twice otherwise, 5 to 12 % slower.
inline void keep(__m256i& vector) { __asm__("" : "+x"(vector)); }

void split(const int32_t* coefficients, int32_t* words) {
  const uint32_t first = coefficients[0], second = coefficients[1];
  words[0] =
      static_cast<int32_t>(((first >> 8) & 0xffff) | ((second >> 8) << 16));
  words[1] = static_cast<int32_t>((first & 0xff) | ((second & 0xff) << 16));
}

inline __m256i join(__m256i high, __m256i low) {
  return _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(high, 8), low),
                           kBits);
}

// Four pixels of each of eight rows, 16 bytes a row, to [pair][channel][row].
inline void transpose(const __m256i rows[4], __m256i order, int32_t* words) {
  // Bytes of one channel become neighbours, as pixels 0, 2, 1, 3.
  const __m256i a = _mm256_shuffle_epi8(rows[0], order);
  const __m256i b = _mm256_shuffle_epi8(rows[1], order);
  const __m256i c = _mm256_shuffle_epi8(rows[2], order);
  const __m256i d = _mm256_shuffle_epi8(rows[3], order);
  const __m256i ab = _mm256_unpacklo_epi32(a, b),
                cd = _mm256_unpacklo_epi32(c, d);
  const __m256i channels[3] = {
      _mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd),
      _mm256_unpacklo_epi64(_mm256_unpackhi_epi32(a, b),
                            _mm256_unpackhi_epi32(c, d))};
  const __m256i even = _mm256_set1_epi16(0xff);
  __m256i* out = reinterpret_cast<__m256i*>(words);
  for (int i = 0; i < 3; ++i) {
    _mm256_storeu_si256(out + i, _mm256_and_si256(channels[i], even));
    _mm256_storeu_si256(out + 3 + i, _mm256_srli_epi16(channels[i], 8));
  }
}

inline __m256i two_rows(const uint8_t* low, const uint8_t* high) {
  return _mm256_inserti128_si256(
      _mm256_castsi128_si256(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(low))),
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}

// Four pixels of each row to two pairs.
class Loader {
 public:
  static constexpr int kGroup = 2;
  static constexpr int kStep = 2;

  explicit Loader(int bytes_per_pixel)
      : order_(_mm256_broadcastsi128_si256(
            bytes_per_pixel == 3 ? _mm_setr_epi8(0, 6, 3, 9, 1, 7, 4, 10, 2, 8,
                                                 5, 11, -1, -1, -1, -1)
                                 : _mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2,
                                                 10, 6, 14, -1, -1, -1, -1))) {}

  void load(const uint8_t* const* rows, ptrdiff_t offset,
            int32_t* words) const {
    __m256i pairs[4];
    for (int i = 0; i < 4; ++i) {
      pairs[i] = two_rows(rows[i] + offset, rows[i + 4] + offset);
    }
    transpose(pairs, order_, words);
  }

 private:
  const __m256i order_;
};

// The window of one output pixel, for three channels of eight rows.
// kGroups is the number of pairs, or 0 if it is only known at run time.
template <int kGroups>
inline void filter_pixel(const int32_t* words, const int32_t* coefficients,
                         int groups, __m256i out[3]) {
  __m256i high[3], low[3];
  for (int c = 0; c < 3; ++c) {
    high[c] = _mm256_setzero_si256();
    low[c] = _mm256_set1_epi32(1 << (kBits - 1));
  }
  const int count = kGroups ? kGroups : groups;
  #pragma GCC unroll 16
  for (int j = 0; j < count; ++j) {
    const __m256i k_high = _mm256_set1_epi32(coefficients[kDigits * j]);
    const __m256i k_low = _mm256_set1_epi32(coefficients[kDigits * j + 1]);
    for (int c = 0; c < 3; ++c) {
      __m256i pixels = _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(words + j * kPairWords + c * kRows));
      keep(pixels);
      const __m256i by_high = _mm256_madd_epi16(pixels, k_high);
      high[c] = kGroups && j == 0 ? by_high  // no sum with 0
                                  : _mm256_add_epi32(high[c], by_high);
      low[c] = _mm256_add_epi32(low[c], _mm256_madd_epi16(pixels, k_low));
      keep(high[c]);
      keep(low[c]);
    }
  }
  for (int c = 0; c < 3; ++c) out[c] = join(high[c], low[c]);
}

template <int kGroups>
void horizontal_of(const HorizontalBlock& block) {
  Source<Loader> source(block, Loader(block.bytes_per_pixel));
  const __m256i white = _mm256_set1_epi16(255);
  // Copies, see Source.
  const int* const starts = block.starts;
  const int groups = kGroups ? kGroups : block.groups;
  const int out_width = block.out_width;
  int32_t* const out[kBlockGroups] = {block.out[0], block.out[1], block.out[2],
                                      block.out[3]};
  const int32_t* coefficients = block.coefficients;
  for (int x = 0; x < out_width; ++x) {
    const int32_t* words = source.window(starts[x], groups);
    __m256i sums[3];
    filter_pixel<kGroups>(words, coefficients, groups, sums);
    coefficients += groups * kDigits;
    // To bytes in 16 bits; words are row pairs then: R01 R23 G01 G23 | R45 R67
    // ...
    const __m256i rg = _mm256_shuffle_epi32(
        _mm256_min_epi16(_mm256_packus_epi32(sums[0], sums[1]), white),
        _MM_SHUFFLE(3, 1, 2, 0));
    const __m256i b = _mm256_shuffle_epi32(
        _mm256_min_epi16(_mm256_packus_epi32(sums[2], sums[2]), white),
        _MM_SHUFFLE(1, 1, 0, 0));
    const __m256i even =
        _mm256_unpacklo_epi64(rg, b);  // R01 G01 B01 - | R45 ...
    const __m256i odd =
        _mm256_unpackhi_epi64(rg, b);  // R23 G23 B23 - | R67 ...
    // The fourth word is overwritten by the next pixel or lies in the padding.
    const auto store = [&out, x](int pair, __m128i words) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out[pair] + 3 * x), words);
    };
    store(0, _mm256_castsi256_si128(even));
    store(1, _mm256_castsi256_si128(odd));
    store(2, _mm256_extracti128_si256(even, 1));
    store(3, _mm256_extracti128_si256(odd, 1));
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
    case 7:
      return horizontal_of<7>(block);
    case 8:
      return horizontal_of<8>(block);
    case 9:
      return horizontal_of<9>(block);
    case 10:
      return horizontal_of<10>(block);
    default:
      return horizontal_of<0>(block);
  }
}

inline __m256i to_bytes(const __m256i sums[4]) {
  return _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]),
                             _mm256_packs_epi32(sums[2], sums[3]));
}

// 32 samples of a row. `load(group, words)` gives 4 vectors of pairs.
template <typename Load>
inline __m256i filter_chunk(const Load& load, const int32_t* coefficients,
                            int groups) {
  __m256i high[4], low[4];
  for (int i = 0; i < 4; ++i) {
    high[i] = _mm256_setzero_si256();
    low[i] = _mm256_set1_epi32(1 << (kBits - 1));
  }
  for (int j = 0; j < groups; ++j) {
    const __m256i k_high = _mm256_set1_epi32(coefficients[kDigits * j]);
    const __m256i k_low = _mm256_set1_epi32(coefficients[kDigits * j + 1]);
    __m256i samples[4];
    load(j, samples);
    for (int i = 0; i < 4; ++i) {
      keep(samples[i]);
      high[i] =
          _mm256_add_epi32(high[i], _mm256_madd_epi16(samples[i], k_high));
      low[i] = _mm256_add_epi32(low[i], _mm256_madd_epi16(samples[i], k_low));
      keep(high[i]);
      keep(low[i]);
    }
  }
  for (int i = 0; i < 4; ++i) high[i] = join(high[i], low[i]);
  return to_bytes(high);
}

void vertical(const int32_t* const* windows, const int32_t* coefficients,
              int groups, int samples, uint8_t* out) {
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const auto chunk = [&](int begin) {
    const auto load = [&](int j, __m256i words[4]) {
      const __m256i* group =
          reinterpret_cast<const __m256i*>(windows[j] + begin);
      for (int i = 0; i < 4; ++i) words[i] = _mm256_loadu_si256(group + i);
    };
    return _mm256_permutevar8x32_epi32(filter_chunk(load, coefficients, groups),
                                       in_order);
  };
  int begin = 0;
  for (; begin + kChunk <= samples; begin += kChunk) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + begin), chunk(begin));
  }
  if (begin < samples) {
    uint8_t bytes[kChunk];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes), chunk(begin));
    memcpy(out + begin, bytes, samples - begin);
  }
}

void vertical_bytes(const uint8_t* const* rows, const int32_t* coefficients,
                    int groups, int samples, uint8_t* out) {
  const __m256i zero = _mm256_setzero_si256();
  const auto pair_up = [zero](__m256i first, __m256i second, __m256i words[4]) {
    const __m256i low = _mm256_unpacklo_epi8(first, second);
    const __m256i high = _mm256_unpackhi_epi8(first, second);
    words[0] = _mm256_unpacklo_epi8(low, zero);
    words[1] = _mm256_unpackhi_epi8(low, zero);
    words[2] = _mm256_unpacklo_epi8(high, zero);
    words[3] = _mm256_unpackhi_epi8(high, zero);
  };
  int begin = 0;
  for (; begin + kChunk <= samples; begin += kChunk) {
    const auto load = [&](int j, __m256i words[4]) {
      const auto row = [&](int i) {
        return _mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(rows[kGroup * j + i] + begin));
      };
      pair_up(row(0), row(1), words);
    };
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + begin),
                        filter_chunk(load, coefficients, groups));
  }
  const int left = samples - begin;
  if (left > 0) {
    const auto load = [&](int j, __m256i words[4]) {
      uint8_t bytes[kGroup][kChunk] = {};
      for (int i = 0; i < kGroup; ++i) {
        memcpy(bytes[i], rows[kGroup * j + i] + begin, left);
      }
      pair_up(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes[0])),
              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes[1])),
              words);
    };
    uint8_t bytes[kChunk];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes),
                        filter_chunk(load, coefficients, groups));
    memcpy(out + begin, bytes, left);
  }
}

constexpr Kernels kKernels = {"avx2",     kGroup,   kDigits,       split,
                              horizontal, vertical, vertical_bytes};

}  // namespace

const Kernels* avx2_kernels() { return &kKernels; }

}  // namespace ovis

#else

namespace ovis {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace ovis

#endif
