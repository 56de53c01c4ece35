// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Random jobs through every set of kernels, against plain loops over the same
// filter coefficients (which the Python tests compare with Pillow). Built with
// the address and undefined-behaviour sanitizers: every buffer is exactly as
// large as the interface says, so one byte read or written beside it ends the
// run.
//
//   python csrc/ovis/build.py --fuzzer DIRECTORY
//   DIRECTORY/ovis_tiler_fuzzer [--seconds=N] [--seed=N]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../filter.h"
#include "../sweep.h"
#include "../tiler.h"

namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  int between(int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(engine_);
  }

  // Small lengths as often as large ones: edges matter there.
  int length() {
    const int limits[] = {3, 9, 40, 150, 600};
    return between(1, limits[between(0, 4)]);
  }

 private:
  std::mt19937_64 engine_;
};

struct Image {
  int width, height;
  std::vector<uint8_t> bytes;  // 3 a pixel
};

void filter_axis(const ovis::Taps& taps, const uint8_t* in, size_t in_step,
                 uint8_t* out, size_t out_step) {
  const int32_t* coefficient = taps.coefficients.data();
  for (int i = 0; i < taps.out; ++i) {
    int64_t sum = ovis::kRounding;
    for (int j = taps.first[i]; j < taps.last[i]; ++j) {
      sum += int64_t{in[j * in_step]} * *coefficient++;
    }
    const int64_t value = sum >> ovis::kPrecisionBits;
    out[i * out_step] = static_cast<uint8_t>(value < 0     ? 0
                                             : value > 255 ? 255
                                                           : value);
  }
}

Image resize_width(const Image& image, int width) {
  Image result{width, image.height,
               std::vector<uint8_t>(3 * width * image.height)};
  const ovis::Taps taps = ovis::make_taps(image.width, width);
  for (int y = 0; y < image.height; ++y) {
    for (int c = 0; c < 3; ++c) {
      filter_axis(taps, &image.bytes[3 * y * image.width + c], 3,
                  &result.bytes[3 * y * width + c], 3);
    }
  }
  return result;
}

Image resize_height(const Image& image, int height) {
  Image result{image.width, height,
               std::vector<uint8_t>(3 * image.width * height)};
  const ovis::Taps taps = ovis::make_taps(image.height, height);
  for (int x = 0; x < 3 * image.width; ++x) {
    filter_axis(taps, &image.bytes[x], 3 * image.width, &result.bytes[x],
                3 * image.width);
  }
  return result;
}

Image resize(const Image& image, int width, int height) {
  return ovis::vertical_first(image.width, image.height, width, height)
             ? resize_width(resize_height(image, height), width)
             : resize_height(resize_width(image, width), height);
}

struct Case {
  Image image;
  int bytes_per_pixel, gap, threads;
  std::vector<ovis_tiler_job> jobs;  // without the place of the result
};

Case make_case(Random& random) {
  Case test;
  Image& image = test.image;
  image.width = random.length();
  image.height = random.length();
  image.bytes.resize(3 * image.width * image.height);
  const int kind = random.between(0, 2);
  for (uint8_t& byte : image.bytes) {
    byte = static_cast<uint8_t>(kind == 0   ? random.between(0, 255)
                                : kind == 1 ? 255 * random.between(0, 1)
                                            : 255);
  }
  test.bytes_per_pixel = random.between(3, 4);
  test.gap = random.between(0, 1) * random.between(0, 20);
  test.threads = random.between(1, 3);
  for (int i = random.between(1, 3); i > 0; --i) {
    ovis_tiler_job job{};
    if (random.between(0, 1)) {
      job.left = random.between(0, image.width - 1);
      job.top = random.between(0, image.height - 1);
    }
    job.width = random.between(1, image.width - job.left);
    job.height = random.between(1, image.height - job.top);
    job.out_width = random.between(0, 5) ? random.length() : job.width;
    job.out_height = random.between(0, 5) ? random.length() : job.height;
    test.jobs.push_back(job);
  }
  return test;
}

Image crop(const Image& image, const ovis_tiler_job& job) {
  Image result{job.width, job.height, {}};
  for (int y = 0; y < job.height; ++y) {
    const uint8_t* row =
        &image.bytes[3 * ((job.top + y) * image.width + job.left)];
    result.bytes.insert(result.bytes.end(), row, row + 3 * job.width);
  }
  return result;
}

// Rows [top, bottom) in a buffer that ends with the last pixel.
std::vector<uint8_t> lay_out(const Case& test, int top, int bottom) {
  const int width = test.image.width;
  const int stride = width * test.bytes_per_pixel + test.gap;
  std::vector<uint8_t> bytes(stride * (bottom - top) - test.gap, 201);
  for (int y = top; y < bottom; ++y) {
    for (int x = 0; x < width; ++x) {
      memcpy(&bytes[(y - top) * stride + x * test.bytes_per_pixel],
             &test.image.bytes[3 * (y * width + x)], 3);
    }
  }
  return bytes;
}

const char* run(const Case& test, int32_t instruction_set, Random& random) {
  constexpr uint8_t kUntouched = 77;
  std::vector<ovis_tiler_job> jobs = test.jobs;
  std::vector<std::vector<uint8_t>> results;
  for (ovis_tiler_job& job : jobs) {
    job.out_stride = 3 * job.out_width + test.gap;
    results.emplace_back(job.out_stride * job.out_height - test.gap,
                         kUntouched);
    job.out = results.back().data();
  }
  ovis_tiler_plan* plan = nullptr;
  ovis_tiler_rows next;
  if (ovis_tiler_open(test.image.width, jobs.data(),
                      static_cast<int32_t>(jobs.size()), test.threads,
                      instruction_set, &plan, &next) != OVIS_TILER_OK) {
    return "the plan was refused";
  }
  // The whole picture at once, or strips with from none to many rows that
  // nobody needs.
  const int most_extra =
      random.between(0, 1) ? test.image.height : random.between(0, 40);
  while (next.bottom != 0) {
    const int top = std::max(next.top - random.between(0, most_extra), 0);
    const int bottom = std::min(next.bottom + random.between(0, most_extra),
                                test.image.height);
    const std::vector<uint8_t> bytes = lay_out(test, top, bottom);
    const ovis_tiler_strip strip{
        bytes.data(), test.image.width * test.bytes_per_pixel + test.gap, top,
        bottom - top, test.bytes_per_pixel};
    const ovis_tiler_rows before = next;
    if (ovis_tiler_feed(plan, &strip, &next) != OVIS_TILER_OK)
      return "a strip was refused";
    if (next.top == before.top && next.bottom == before.bottom)
      return "stands still";
  }
  ovis_tiler_close(plan);
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Image expected = resize(crop(test.image, jobs[i]), jobs[i].out_width,
                                  jobs[i].out_height);
    for (int y = 0; y < jobs[i].out_height; ++y) {
      const uint8_t* row = jobs[i].out + y * jobs[i].out_stride;
      const int size = 3 * jobs[i].out_width;
      if (memcmp(row, &expected.bytes[y * size], size) != 0) return "differs";
      if (y + 1 == jobs[i].out_height) break;
      for (int x = size; x < jobs[i].out_stride; ++x) {
        if (row[x] != kUntouched) return "wrote between rows";
      }
    }
  }
  return nullptr;
}

uint64_t option(int count, char** values, const char* name,
                uint64_t otherwise) {
  for (int i = 1; i < count; ++i) {
    if (std::strncmp(values[i], name, std::strlen(name)) == 0) {
      return std::strtoull(values[i] + std::strlen(name), nullptr, 10);
    }
  }
  return otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seconds = option(argc, argv, "--seconds=", 60);
  uint64_t seed = option(argc, argv, "--seed=", 0);
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  uint64_t runs = 0;
  do {
    Random random(seed);
    const Case test = make_case(random);
    for (int32_t set = OVIS_TILER_PORTABLE; set <= OVIS_TILER_AVX512; ++set) {
      if (!ovis_tiler_supports(set)) continue;
      if (const char* fault = run(test, set, random)) {
        std::printf("seed %llu, instruction set %d: %s\n",
                    static_cast<unsigned long long>(seed), set, fault);
        return 1;
      }
      ++runs;
    }
    ++seed;
  } while (std::chrono::steady_clock::now() < end);
  std::printf("%llu runs, no fault; next seed %llu\n",
              static_cast<unsigned long long>(runs),
              static_cast<unsigned long long>(seed));
  return 0;
}
