// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Bicubic resizing of boxes of an 8-bit RGB picture, equal bit for bit to Pillow
// 13's crop() followed by resize(BICUBIC). Plain C, so that one library serves
// every interpreter; no state, so that any number of threads may call it.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OVIS_TILER_EXPORT __attribute__((visibility("default")))

// Raised with every change of the structures or functions below.
#define OVIS_TILER_INTERFACE 1

// Consecutive rows of the picture. Several strips make up one picture, because
// Pillow keeps large pictures in several blocks of memory.
typedef struct {
  const uint8_t* data;  // first byte of the first row
  int64_t row_stride;   // bytes from row to row
  int32_t rows;
} ovis_tiler_strip;

// One box of the picture and where its resized content goes.
typedef struct {
  int32_t left, top, width, height;  // box, inside the picture, in pixels
  int32_t out_width, out_height;     // size to resize to, in pixels
  uint8_t* out;                      // first byte of the result, 3 bytes a pixel
  int64_t out_stride;                // bytes from row to row of the result
} ovis_tiler_job;

enum {
  OVIS_TILER_OK = 0,
  OVIS_TILER_BAD_ARGUMENT = 1,
  OVIS_TILER_OUT_OF_MEMORY = 2,
};

// Instruction sets, slowest first; BEST is the last one that the machine has.
enum {
  OVIS_TILER_BEST = -1,
  OVIS_TILER_PORTABLE = 0,
  OVIS_TILER_AVX2 = 1,
  OVIS_TILER_AVX512 = 2,  // with VNNI and byte operations
};

OVIS_TILER_EXPORT int32_t ovis_tiler_interface(void);

// 1 if this build and this machine can run an instruction set, else 0.
OVIS_TILER_EXPORT int32_t ovis_tiler_supports(int32_t instruction_set);

// Resizes all jobs. Reads only bytes of the given rows, writes only the
// out_width * 3 bytes of each of the out_height rows of each job.
//
// width            pixels in a row of the picture
// bytes_per_pixel  3, or 4 of which the last is ignored
// threads          at most so many work, the caller among them
//
// Returns OVIS_TILER_OK, or another code after which results are undefined.
OVIS_TILER_EXPORT int32_t ovis_tiler_resize(
    const ovis_tiler_strip* strips, int32_t num_strips, int32_t width,
    int32_t bytes_per_pixel, const ovis_tiler_job* jobs, int32_t num_jobs,
    int32_t threads, int32_t instruction_set);

#ifdef __cplusplus
}
#endif
