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

int64_t source_pixels(const ovis_tiler_job& job) {
  return int64_t{job.width} * job.height;
}

std::vector<Band> make_bands(const ovis_tiler_job* jobs, const std::vector<Axes>& axes,
                             int threads) {
  int64_t total = 0;
  for (size_t i = 0; i < axes.size(); ++i) total += source_pixels(jobs[i]);
  std::vector<Band> bands;
  for (size_t i = 0; i < axes.size(); ++i) {
    const int height = jobs[i].out_height;
    // An overview costs as much as all other tiles together: cut to even shares.
    const int64_t shares = threads == 1 ? 1 : source_pixels(jobs[i]) * 2 * threads / total;
    const int parts = static_cast<int>(
        std::clamp<int64_t>(shares, 1, std::max(height / kLeastBandRows, 1)));
    for (int part = 0; part < parts; ++part) {
      bands.push_back({&jobs[i], &axes[i],
                       static_cast<int>(int64_t{height} * part / parts),
                       static_cast<int>(int64_t{height} * (part + 1) / parts)});
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

void resize_all(const Picture& picture, const ovis_tiler_job* jobs, int num_jobs,
                int threads, const Kernels& kernels) {
  WindowsCache cache(kernels);
  std::vector<Axes> axes;
  for (int i = 0; i < num_jobs; ++i) axes.push_back(make_axes(jobs[i], cache));
  const std::vector<Band> bands = make_bands(jobs, axes, threads);

  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&] {
    try {
      for (size_t i; (i = next++) < bands.size();) {
        const Band& band = bands[i];
        resize_band(picture, *band.job, *band.axes, kernels, band.begin, band.end);
      }
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  };
  {
    Workers workers;
    workers.start(std::min<int>(threads, bands.size()) - 1, work);
    work();
  }
  if (failed) throw std::bad_alloc();
}

Picture make_picture(const ovis_tiler_strip* strips, int num_strips, int width,
                     int bytes_per_pixel) {
  Picture picture;
  picture.width = width;
  picture.bytes_per_pixel = bytes_per_pixel;
  for (int i = 0; i < num_strips; ++i) {
    for (int32_t y = 0; y < strips[i].rows; ++y) {
      picture.rows.push_back(strips[i].data + y * strips[i].row_stride);
    }
  }
  return picture;
}

bool fits(const ovis_tiler_job& job, const Picture& picture) {
  return job.left >= 0 && job.top >= 0 && job.width > 0 && job.height > 0 &&
         job.width <= picture.width - job.left &&
         job.height <= static_cast<int64_t>(picture.rows.size()) - job.top &&
         job.out_width > 0 && job.out_height > 0 && job.out != nullptr;
}

}  // namespace
}  // namespace ovis

int32_t ovis_tiler_interface(void) { return OVIS_TILER_INTERFACE; }

int32_t ovis_tiler_supports(int32_t instruction_set) {
  return ovis::kernels_of(instruction_set) != nullptr;
}

int32_t ovis_tiler_resize(const ovis_tiler_strip* strips, int32_t num_strips,
                          int32_t width, int32_t bytes_per_pixel,
                          const ovis_tiler_job* jobs, int32_t num_jobs,
                          int32_t threads, int32_t instruction_set) try {
  const ovis::Kernels* kernels = ovis::kernels_of(instruction_set);
  if (kernels == nullptr || (bytes_per_pixel != 3 && bytes_per_pixel != 4) ||
      threads < 1) {
    return OVIS_TILER_BAD_ARGUMENT;
  }
  const ovis::Picture picture =
      ovis::make_picture(strips, num_strips, width, bytes_per_pixel);
  for (int32_t i = 0; i < num_jobs; ++i) {
    if (!ovis::fits(jobs[i], picture)) return OVIS_TILER_BAD_ARGUMENT;
  }
  ovis::resize_all(picture, jobs, num_jobs, threads, *kernels);
  return OVIS_TILER_OK;
} catch (const std::bad_alloc&) {
  return OVIS_TILER_OUT_OF_MEMORY;
} catch (const std::length_error&) {
  return OVIS_TILER_OUT_OF_MEMORY;
}
