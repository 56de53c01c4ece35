// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "tiler.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.h"
#include "sweep.h"

namespace ovis {
namespace {

// Splitting a job makes its bands filter some source rows twice: not worth it
// for less.
constexpr int kLeastBandRows = 64;

const Kernels* kernels_of(int32_t instruction_set) {
  switch (instruction_set) {
    case OVIS_TILER_PORTABLE:
      return portable_kernels();
#if defined(__x86_64__)
    case OVIS_TILER_AVX2:
      return __builtin_cpu_supports("avx2") ? avx2_kernels() : nullptr;
    case OVIS_TILER_AVX512:
      return __builtin_cpu_supports("avx512f") &&
                     __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") &&
                     __builtin_cpu_supports("avx512vnni")
                 ? avx512_kernels()
                 : nullptr;
#endif
    case OVIS_TILER_BEST:
      for (int32_t set = OVIS_TILER_AVX512; set > OVIS_TILER_PORTABLE; --set) {
        if (const Kernels* kernels = kernels_of(set)) return kernels;
      }
      return portable_kernels();
    default:
      return nullptr;
  }
}

int64_t source_pixels(const ovis_tiler_job& job) {
  return int64_t{job.width} * job.height;
}

// How many bands to cut a job into. An overview costs as much as all other
// tiles together and would keep one thread busy when the others are done.
int count_bands(const ovis_tiler_job& job, int64_t all_pixels, int threads) {
  if (threads == 1) return 1;
  const int64_t shares = source_pixels(job) * 2 * threads / all_pixels;
  return static_cast<int>(std::clamp<int64_t>(
      shares, 1, std::max(job.out_height / kLeastBandRows, 1)));
}

// Threads are made anew for each call: a pool that lives on would not survive
// fork(), and starting a thread costs much less than resizing a picture that is
// worth it.
class Workers {
 public:
  ~Workers() {
    for (std::thread& thread : threads_) thread.join();
  }

  template <typename Work>
  void start(int count, const Work& work) {
    threads_.reserve(count);
    try {
      for (int i = 0; i < count; ++i) threads_.emplace_back(work);
    } catch (const std::system_error&) {
      // The caller works too, so fewer threads only make it slower.
    }
  }

 private:
  std::vector<std::thread> threads_;
};

bool is_valid(const ovis_tiler_job& job, int32_t width) {
  return job.left >= 0 && job.top >= 0 && job.width > 0 && job.height > 0 &&
         job.width <= width - job.left && job.height <= INT32_MAX - job.top &&
         job.out_width > 0 && job.out_height > 0 && job.out != nullptr;
}

}  // namespace
}  // namespace ovis

struct ovis_tiler_plan {
  ovis_tiler_plan(const ovis::Kernels& kernels, int threads)
      : windows(kernels), threads(threads) {}

  // Rows that the band furthest behind needs.
  ovis_tiler_rows needs() const {
    ovis_tiler_rows least{0, 0};
    bool found = false;
    for (const ovis::Band& band : bands) {
      if (band.done()) continue;
      const ovis_tiler_rows rows = band.needs();
      if (!found || rows.top < least.top ||
          (rows.top == least.top && rows.bottom < least.bottom)) {
        least = rows;
        found = true;
      }
    }
    return least;
  }

  ovis::WindowsCache windows;
  std::vector<ovis::Band> bands;
  int threads;
};

namespace ovis {
namespace {

void advance_all(ovis_tiler_plan& plan, const ovis_tiler_strip& strip) {
  std::vector<Band*> waiting;
  for (Band& band : plan.bands) {
    if (band.done()) continue;
    const ovis_tiler_rows rows = band.needs();
    if (rows.top >= strip.top && rows.bottom <= strip.top + strip.height) {
      waiting.push_back(&band);
    }
  }
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&] {
    try {
      for (size_t i; (i = next++) < waiting.size();) waiting[i]->advance(strip);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  };
  {
    Workers workers;
    const size_t most = std::min<size_t>(plan.threads, waiting.size());
    if (most > 1) workers.start(static_cast<int>(most) - 1, work);
    work();
  }
  if (failed) throw std::bad_alloc();
}

}  // namespace
}  // namespace ovis

int32_t ovis_tiler_interface(void) { return OVIS_TILER_INTERFACE; }

int32_t ovis_tiler_supports(int32_t instruction_set) {
  return ovis::kernels_of(instruction_set) != nullptr;
}

int32_t ovis_tiler_open(int32_t width, const ovis_tiler_job* jobs,
                        int32_t num_jobs, int32_t threads,
                        int32_t instruction_set, ovis_tiler_plan** plan,
                        ovis_tiler_rows* next) try {
  const ovis::Kernels* kernels = ovis::kernels_of(instruction_set);
  if (kernels == nullptr || threads < 1) return OVIS_TILER_BAD_ARGUMENT;
  int64_t all_pixels = 0;
  for (int32_t i = 0; i < num_jobs; ++i) {
    if (!ovis::is_valid(jobs[i], width)) return OVIS_TILER_BAD_ARGUMENT;
    all_pixels += ovis::source_pixels(jobs[i]);
  }
  auto made = std::make_unique<ovis_tiler_plan>(*kernels, threads);
  for (int32_t i = 0; i < num_jobs; ++i) {
    const ovis_tiler_job& job = jobs[i];
    const ovis::Axes axes = ovis::make_axes(job, made->windows);
    const int64_t count = ovis::count_bands(job, all_pixels, threads);
    for (int64_t band = 0; band < count; ++band) {
      const int begin = static_cast<int>(job.out_height * band / count);
      const int end = static_cast<int>(job.out_height * (band + 1) / count);
      made->bands.emplace_back(job, width, axes, *kernels, begin, end);
    }
  }
  *next = made->needs();
  *plan = made.release();
  return OVIS_TILER_OK;
} catch (const std::bad_alloc&) {
  return OVIS_TILER_OUT_OF_MEMORY;
} catch (const std::length_error&) {
  return OVIS_TILER_OUT_OF_MEMORY;
}

int32_t ovis_tiler_feed(ovis_tiler_plan* plan, const ovis_tiler_strip* strip,
                        ovis_tiler_rows* next) try {
  if (strip->data == nullptr || strip->top < 0 || strip->height < 1 ||
      strip->height > INT32_MAX - strip->top ||
      (strip->bytes_per_pixel != 3 && strip->bytes_per_pixel != 4)) {
    return OVIS_TILER_BAD_ARGUMENT;
  }
  ovis::advance_all(*plan, *strip);
  *next = plan->needs();
  return OVIS_TILER_OK;
} catch (const std::bad_alloc&) {
  return OVIS_TILER_OUT_OF_MEMORY;
} catch (const std::length_error&) {
  return OVIS_TILER_OUT_OF_MEMORY;
}

void ovis_tiler_close(ovis_tiler_plan* plan) { delete plan; }
