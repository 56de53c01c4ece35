// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Bicubic resizing of boxes of an 8-bit RGB picture, equal bit for bit to
// Pillow 13's crop() followed by resize(BICUBIC). Plain C, so that one library
// serves every interpreter. Any number of threads may call it, each with a plan
// of its own.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OVIS_TILER_EXPORT __attribute__((visibility("default")))

// Raised with every change of the structures or functions below.
#define OVIS_TILER_INTERFACE 3

// One box of the picture and where its resized content goes.
typedef struct {
  int32_t left, top, width, height;  // box, inside the picture, in pixels
  int32_t out_width, out_height;     // size to resize to, in pixels
  uint8_t* out;        // first byte of the result, 3 bytes a pixel
  int64_t out_stride;  // bytes from row to row of the result
} ovis_tiler_job;

// Consecutive rows of the picture. A strip need not hold all of them, because
// Pillow keeps large pictures in several blocks of memory and hands them out
// piece by piece.
typedef struct {
  const uint8_t* data;      // first byte of row `top`
  int64_t row_stride;       // bytes from row to row
  int32_t top, height;      // rows of the picture that are here
  int32_t bytes_per_pixel;  // 3, or 4 of which the last is ignored
} ovis_tiler_strip;

// Rows [top, bottom) that the next strip must hold; it may hold more. When
// everything is done, both are 0.
typedef struct {
  int32_t top, bottom;
} ovis_tiler_rows;

typedef struct ovis_tiler_plan ovis_tiler_plan;

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

// Plans all jobs on a picture `width` pixels wide. At most `threads` will work
// on it, the caller among them. `plan` is for ovis_tiler_feed and must be
// closed.
OVIS_TILER_EXPORT int32_t ovis_tiler_open(int32_t width,
                                          const ovis_tiler_job* jobs,
                                          int32_t num_jobs, int32_t threads,
                                          int32_t instruction_set,
                                          ovis_tiler_plan** plan,
                                          ovis_tiler_rows* next);

// Does as much of the plan as a strip is enough for. Reads only bytes of the
// strip, writes only the out_width * 3 bytes of each of the out_height rows of
// each job.
OVIS_TILER_EXPORT int32_t ovis_tiler_feed(ovis_tiler_plan* plan,
                                          const ovis_tiler_strip* strip,
                                          ovis_tiler_rows* next);

OVIS_TILER_EXPORT void ovis_tiler_close(ovis_tiler_plan* plan);

#ifdef __cplusplus
}
#endif
