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
#define OVIS_TILER_INTERFACE 2

// Consecutive rows of a picture. A strip need not hold all rows, because Pillow keeps
// large pictures in several blocks of memory and hands them out piece by piece.
typedef struct {
  const uint8_t* data;      // first byte of row `top`
  int64_t row_stride;       // bytes from row to row
  int32_t top, height;      // rows of the picture that are here
  int32_t width;            // pixels in a row
  int32_t bytes_per_pixel;  // 3, or 4 of which the last is ignored
} ovis_tiler_strip;

// One box of the picture, where its resized content goes, and which rows of the result
// to make: all, or those for which the strip holds the rows that they need.
typedef struct {
  int32_t left, top, width, height;  // box, inside the picture, in pixels
  int32_t out_width, out_height;     // size to resize to, in pixels
  int32_t begin, end;                // rows of the result to make
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

// Which rows of a box each row of its result needs: `first[i]` up to, not including,
// `last[i]`, counted from the top of the box. Neither ever decreases.
OVIS_TILER_EXPORT int32_t ovis_tiler_needed_rows(int32_t height, int32_t out_height,
                                                 int32_t* first, int32_t* last);

// Does all jobs. Reads only bytes of the strip, writes only the out_width * 3 bytes of
// rows [begin, end) of each job. At most `threads` work, the caller among them.
//
// Returns OVIS_TILER_OK, or another code after which results are undefined.
OVIS_TILER_EXPORT int32_t ovis_tiler_resize(const ovis_tiler_strip* strip,
                                            const ovis_tiler_job* jobs,
                                            int32_t num_jobs, int32_t threads,
                                            int32_t instruction_set);

#ifdef __cplusplus
}
#endif
