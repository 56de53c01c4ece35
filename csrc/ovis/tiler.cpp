// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "tiler.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.h"
#include "sweep.h"

namespace ovis {
namespace {

// Splitting a job makes its bands filter some source rows twice: not worth it for less.
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

// Part of a job that one thread does at a time.
struct Band {
  const ovis_tiler_job* job;
  const Axes* axes;
  int begin, end;
};

// What a job costs: the source pixels that its rows need, nearly.
int64_t cost(const ovis_tiler_job& job) {
  return int64_t{job.width} * job.height * (job.end - job.begin) / job.out_height + 1;
}

std::vector<Band> make_bands(const ovis_tiler_job* jobs, const std::vector<Axes>& axes,
                             int threads) {
  int64_t total = 0;
  for (size_t i = 0; i < axes.size(); ++i) total += cost(jobs[i]);
  std::vector<Band> bands;
  for (size_t i = 0; i < axes.size(); ++i) {
    const int rows = jobs[i].end - jobs[i].begin;
    if (rows == 0) continue;
    // An overview costs as much as all other tiles together: cut to even shares.
    const int64_t shares = threads == 1 ? 1 : cost(jobs[i]) * 2 * threads / total;
    const int64_t parts =
        std::clamp<int64_t>(shares, 1, std::max(rows / kLeastBandRows, 1));
    const auto edge = [&](int64_t part) {
      return jobs[i].begin + static_cast<int>(rows * part / parts);
    };
    for (int64_t part = 0; part < parts; ++part) {
      bands.push_back({&jobs[i], &axes[i], edge(part), edge(part + 1)});
    }
  }
  return bands;
}

// Threads are made anew for each call: a pool that lives on would not survive fork(),
// and starting a thread costs much less than resizing a picture that is worth it.
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

void resize_all(const ovis_tiler_strip& strip, const std::vector<Band>& bands,
                int threads, const Kernels& kernels) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&] {
    try {
      for (size_t i; (i = next++) < bands.size();) {
        const Band& band = bands[i];
        resize_band(strip, *band.job, *band.axes, kernels, band.begin, band.end);
      }
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  };
  {
    Workers workers;
    workers.start(static_cast<int>(std::min<size_t>(threads, bands.size())) - 1, work);
    work();
  }
  if (failed) throw std::bad_alloc();
}

bool is_valid(const ovis_tiler_strip& strip) {
  return strip.data != nullptr && strip.top >= 0 && strip.height > 0 &&
         strip.width > 0 && (strip.bytes_per_pixel == 3 || strip.bytes_per_pixel == 4);
}

bool is_valid(const ovis_tiler_job& job, const ovis_tiler_strip& strip) {
  return job.left >= 0 && job.top >= 0 && job.width > 0 && job.height > 0 &&
         job.width <= strip.width - job.left && job.out_width > 0 &&
         job.out_height > 0 && job.out != nullptr && job.begin >= 0 &&
         job.begin <= job.end && job.end <= job.out_height;
}

bool has_rows(const ovis_tiler_strip& strip, const ovis_tiler_job& job,
              const Windows& vertical) {
  if (job.begin == job.end) return true;
  const int64_t top = int64_t{job.top} - strip.top;
  return top + vertical.first[job.begin] >= 0 &&
         top + vertical.last[job.end - 1] <= strip.height;
}

}  // namespace
}  // namespace ovis

int32_t ovis_tiler_interface(void) { return OVIS_TILER_INTERFACE; }

int32_t ovis_tiler_supports(int32_t instruction_set) {
  return ovis::kernels_of(instruction_set) != nullptr;
}

int32_t ovis_tiler_needed_rows(int32_t height, int32_t out_height, int32_t* first,
                               int32_t* last) try {
  if (height < 1 || out_height < 1) return OVIS_TILER_BAD_ARGUMENT;
  const ovis::Taps taps = ovis::make_taps(height, out_height);
  std::copy(taps.first.begin(), taps.first.end(), first);
  std::copy(taps.last.begin(), taps.last.end(), last);
  return OVIS_TILER_OK;
} catch (const std::bad_alloc&) {
  return OVIS_TILER_OUT_OF_MEMORY;
}

int32_t ovis_tiler_resize(const ovis_tiler_strip* strip, const ovis_tiler_job* jobs,
                          int32_t num_jobs, int32_t threads,
                          int32_t instruction_set) try {
  const ovis::Kernels* kernels = ovis::kernels_of(instruction_set);
  if (kernels == nullptr || threads < 1 || !ovis::is_valid(*strip)) {
    return OVIS_TILER_BAD_ARGUMENT;
  }
  ovis::WindowsCache cache(*kernels);
  std::vector<ovis::Axes> axes;
  for (int32_t i = 0; i < num_jobs; ++i) {
    if (!ovis::is_valid(jobs[i], *strip)) return OVIS_TILER_BAD_ARGUMENT;
    axes.push_back(ovis::make_axes(jobs[i], cache));
    if (!ovis::has_rows(*strip, jobs[i], *axes.back().vertical)) {
      return OVIS_TILER_BAD_ARGUMENT;
    }
  }
  ovis::resize_all(*strip, ovis::make_bands(jobs, axes, threads), threads, *kernels);
  return OVIS_TILER_OK;
} catch (const std::bad_alloc&) {
  return OVIS_TILER_OUT_OF_MEMORY;
} catch (const std::length_error&) {
  return OVIS_TILER_OUT_OF_MEMORY;
}
