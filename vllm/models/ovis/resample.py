# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Resize boxes of a picture into the rectangles of a tile buffer.

The work is done by the library of `csrc/ovis` where it has been built and gives the
same bytes as the installed Pillow, which is tried once per process on a few pictures;
else by Pillow itself. Which bytes are right is Pillow's to say: the authors prepare
pictures with it, and its releases differ (13 changed the order of the two passes for
tall pictures).
"""

import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from .tiling import Box

logger = logging.getLogger(__name__)

LIBRARY_PATH = Path(__file__).with_name("libovis_tiler.so")

# Instruction sets of csrc/ovis/tiler.h.
BEST, PORTABLE, AVX2, AVX512 = -1, 0, 1, 2

_INTERFACE = 2
_OUT_OF_MEMORY = 2

# Pillow hands out large pictures in pieces only. Pieces of this size stay in the cache
# between being copied and being read, and their memory is used again for the next.
_STRIP_BYTES = 4 << 20


def resample(
    image: Image.Image,
    boxes: Sequence[Box],
    rectangles: npt.NDArray[np.int32],
    pixels: npt.NDArray[np.uint8],
    threads: int = 1,
) -> None:
    """Resize boxes of an RGB picture into rectangles of a tile buffer, bicubic.

    Equals Pillow's `crop` and `resize` on 8 bits in every byte (authors' behaviour,
    every golden case with an image). The interpreter lock is released meanwhile if the
    library does the work.

    Args:
        image: Picture in mode RGB.
        boxes: Left, top, right, bottom of each tile in the picture.
        rectangles: int32 `[tiles, 4]`: top, left, height, width of the place in the
            tile to write to.
        pixels: uint8 `[tiles, side, side, 3]`, C order, written to inside the
            rectangles only.
        threads: Most threads at work, the caller's included. Servers have as many
            callers as processors, hence one.

    Raises:
        ValueError: The picture is not RGB, or a box or rectangle does not lie inside
            its picture or tile.

    """
    targets = _targets(image, boxes, rectangles, pixels)
    library = _library_if_equal()
    if library is None:
        resample_with_pillow(image, targets)
    else:
        resample_with_library(library, image, targets, threads)


@dataclass(frozen=True)
class Target:
    """One box of a picture and the array that takes its resized content.

    Attributes:
        box: Left, top, right, bottom in the picture.
        content: uint8 `[height, width, 3]`, pixels of a row next to each other.

    """

    box: Box
    content: npt.NDArray[np.uint8]


def _targets(
    image: Image.Image,
    boxes: Sequence[Box],
    rectangles: npt.NDArray[np.int32],
    pixels: npt.NDArray[np.uint8],
) -> list[Target]:
    if image.mode != "RGB":
        raise ValueError(f"the picture must have mode RGB, got {image.mode}")
    if pixels.dtype != np.uint8 or not pixels.flags.c_contiguous:
        raise ValueError(f"pixels must be uint8 in C order, got {pixels.dtype}")
    targets = []
    for tile, box, rectangle in zip(pixels, boxes, rectangles.tolist(), strict=True):
        left, top, right, bottom = box
        if not (0 <= left < right <= image.width and 0 <= top < bottom <= image.height):
            raise ValueError(
                f"box {box} must be inside the picture of {image.width}x{image.height} "
                "pixels and have pixels"
            )
        y, x, height, width = rectangle
        content = tile[y : y + height, x : x + width]
        if (
            min(rectangle) < 0
            or content.shape != (height, width, 3)
            or not content.size
        ):
            raise ValueError(
                f"rectangle {rectangle} (top, left, height, width) must be inside the "
                f"tile of shape {list(tile.shape)} and have pixels"
            )
        targets.append(Target(box, content))
    return targets


def resample_with_pillow(image: Image.Image, targets: Sequence[Target]) -> None:
    """What `resample` does, by Pillow."""
    for target in targets:
        # Cropped first: `resize(box=...)` would let the filter see outside the tile.
        whole = target.box == (0, 0, *image.size)
        content = image if whole else image.crop(target.box)
        height, width = target.content.shape[:2]
        content = content.resize((width, height), Image.Resampling.BICUBIC)
        target.content[:] = np.asarray(content)


class _Strip(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("top", ctypes.c_int32),
        ("height", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("bytes_per_pixel", ctypes.c_int32),
    ]


class _Job(ctypes.Structure):
    _fields_ = [
        ("left", ctypes.c_int32),
        ("top", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("height", ctypes.c_int32),
        ("out_width", ctypes.c_int32),
        ("out_height", ctypes.c_int32),
        ("begin", ctypes.c_int32),
        ("end", ctypes.c_int32),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
    ]


class Library:
    """The functions of `csrc/ovis/tiler.h`.

    Args:
        path: The shared library.

    Raises:
        OSError: It is not there, cannot be loaded, or belongs to another version of
            this module.

    """

    def __init__(self, path: Path = LIBRARY_PATH):
        functions = ctypes.CDLL(str(path))
        try:
            interface = functions.ovis_tiler_interface()
            self._supports = functions.ovis_tiler_supports
            self._needed_rows = functions.ovis_tiler_needed_rows
            self._resize = functions.ovis_tiler_resize
        except AttributeError as error:
            raise OSError(f"{path} is not the tiler: {error}") from error
        if interface != _INTERFACE:
            raise OSError(
                f"{path} has interface {interface}, this module needs {_INTERFACE}; "
                "build it again"
            )
        self._supports.argtypes = [ctypes.c_int32]
        self._needed_rows.argtypes = [ctypes.c_int32] * 2 + [ctypes.c_void_p] * 2
        self._resize.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int32] * 3

    def supports(self, instruction_set: int) -> bool:
        """Whether build and machine have an instruction set."""
        return bool(self._supports(instruction_set))

    def needed_rows(
        self, height: int, out_height: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """First row, and row behind the last, that each row of a result needs."""
        first = np.empty(out_height, np.int32)
        last = np.empty(out_height, np.int32)
        _check(
            self._needed_rows(height, out_height, first.ctypes.data, last.ctypes.data)
        )
        return first, last

    def resize(
        self,
        strip: _Strip,
        jobs: Sequence[_Job],
        threads: int = 1,
        instruction_set: int = BEST,
    ) -> None:
        """Do jobs with the rows of a strip, whose memory the caller keeps alive."""
        array = (_Job * len(jobs))(*jobs)
        _check(
            self._resize(
                ctypes.byref(strip), array, len(jobs), threads, instruction_set
            )
        )


def _check(code: int) -> None:
    if code == _OUT_OF_MEMORY:
        raise MemoryError("not enough memory to resize a picture")
    if code:
        raise ValueError("the tiler refused its arguments")


def resample_with_library(
    library: Library,
    image: Image.Image,
    targets: Sequence[Target],
    threads: int = 1,
    instruction_set: int = BEST,
    strip_bytes: int = _STRIP_BYTES,
) -> None:
    """What `resample` does, by the library.

    Args:
        library: The library.
        image: As for `resample`.
        targets: As for `resample`.
        threads: As for `resample`.
        instruction_set: One that the library supports.
        strip_bytes: How much of a picture to copy at a time, where Pillow does not let
            it be read in place.

    """
    jobs = [_job(target) for target in targets]
    whole = _PixelView.in_place(image)
    if whole is not None:
        library.resize(whole.strip(top=0), jobs, threads, instruction_set)
        return
    rows = max(strip_bytes // (4 * image.width), 1)
    for top, bottom, ready in _plan_strips(library, jobs, rows):
        piece = image.crop((0, top, image.width, bottom))
        # No view of the piece either: this Pillow has no such interface.
        view = _PixelView.in_place(piece) or _PixelView.of_copy(piece)
        library.resize(view.strip(top), ready, threads, instruction_set)


def _job(target: Target) -> _Job:
    left, top, right, bottom = target.box
    height, width = target.content.shape[:2]
    return _Job(
        *(left, top, right - left, bottom - top, width, height, 0, height),
        target.content.ctypes.data,
        target.content.strides[0],
    )


def _plan_strips(
    library: Library, jobs: Sequence[_Job], rows: int
) -> Iterator[tuple[int, int, list[_Job]]]:
    """Cut a picture into strips of about `rows` rows that overlap as filters need.

    Yields:
        Top and bottom of a strip, and the jobs that can go on with it, whose `begin`
        and `end` are set to the rows of their results that it is enough for.

    """
    needs = [library.needed_rows(job.height, job.out_height) for job in jobs]
    for job in jobs:
        job.end = 0
    while True:
        waiting = [
            (job.top + int(first[job.end]), job.top + int(last[job.end]))
            for job, (first, last) in zip(jobs, needs)
            if job.end < job.out_height
        ]
        if not waiting:
            return
        # At least the next row of the uppermost job, however many rows that needs.
        top, bottom = min(waiting)
        bottom = max(bottom, top + rows)
        ready, reached = [], 0
        for job, (_, last) in zip(jobs, needs):
            end = int(np.searchsorted(last, bottom - job.top, side="right"))
            if end > job.end:
                job.begin, job.end = job.end, end
                ready.append(job)
                reached = max(reached, job.top + int(last[end - 1]))
        yield top, reached, ready


class _ArrowArray(ctypes.Structure):
    pass


_ArrowArray._fields_ = [
    *[(name, ctypes.c_int64) for name in ("length", "null_count", "offset")],
    *[(name, ctypes.c_int64) for name in ("n_buffers", "n_children")],
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    *[(name, ctypes.c_void_p) for name in ("dictionary", "release", "private_data")],
]


class _ArrowSchema(ctypes.Structure):
    # Only its beginning is looked at.
    _fields_ = [("format", ctypes.c_char_p)]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True)
class _PixelView:
    """Where the bytes of an RGB picture are, and what keeps them there."""

    data: int
    width: int
    height: int
    bytes_per_pixel: int
    owner: object

    @classmethod
    def in_place(cls, image: Image.Image) -> "_PixelView | None":
        """The picture's own memory, or None if Pillow does not show it as one piece.

        Pillow lays RGB out in four bytes a pixel and shows it by the Arrow protocol.
        """
        try:
            owner = image.__arrow_c_array__()
        except (AttributeError, ValueError):
            return None
        schema = _ArrowSchema.from_address(_capsule_pointer(owner[0], b"arrow_schema"))
        array = _ArrowArray.from_address(_capsule_pointer(owner[1], b"arrow_array"))
        if (
            schema.format != b"+w:4"
            or array.length != image.width * image.height
            or array.n_children != 1
        ):
            return None
        values = array.children[0].contents
        if values.n_buffers != 2 or values.length != 4 * array.length:
            return None
        data = values.buffers[1] + values.offset + 4 * array.offset
        return cls(data, image.width, image.height, 4, owner)

    @classmethod
    def of_copy(cls, image: Image.Image) -> "_PixelView":
        """A copy in three bytes a pixel."""
        array = np.ascontiguousarray(image)
        return cls(array.ctypes.data, image.width, image.height, 3, array)

    def strip(self, top: int) -> _Strip:
        """The view as rows of a picture from row `top` on."""
        stride = self.width * self.bytes_per_pixel
        return _Strip(
            self.data, stride, top, self.height, self.width, self.bytes_per_pixel
        )


# Size of a picture, a box in it, and the size to resize to: enlarging, reducing, tall
# (vertical pass first), unchanged in one axis or both, and one pixel.
_PROBES = (
    ((61, 47), (0, 0, 61, 47), (112, 86)),
    ((223, 181), (0, 0, 223, 181), (56, 45)),
    ((223, 181), (40, 21, 211, 180), (56, 52)),
    ((67, 301), (0, 0, 67, 301), (12, 56)),
    ((67, 301), (3, 7, 63, 291), (11, 56)),
    ((56, 90), (0, 0, 56, 90), (56, 33)),
    ((56, 40), (8, 4, 56, 36), (48, 32)),
    ((33, 1), (0, 0, 33, 1), (56, 1)),
)


def equals_pillow(library: Library, instruction_set: int = BEST) -> bool:
    """Try whether the library gives the same bytes as the installed Pillow."""
    random = np.random.default_rng(0)
    for (width, height), box, (out_width, out_height) in _PROBES:
        # Extremes make the clipping and the rounding of both passes matter.
        values = random.integers(0, 256, (height, width, 3), np.uint8)
        values[::3] = np.where(values[::3] < 128, 0, 255)
        image = Image.fromarray(values)
        expected = np.zeros((out_height, out_width, 3), np.uint8)
        resample_with_pillow(image, [Target(box, expected)])
        got = np.zeros_like(expected)
        resample_with_library(
            library, image, [Target(box, got)], instruction_set=instruction_set
        )
        if not np.array_equal(got, expected):
            return False
    return True


_lock = threading.Lock()
_checked = False
_library: Library | None = None


def _library_if_equal() -> Library | None:
    """The library, or None if Pillow is to be used; decided once per process."""
    global _checked, _library
    if not _checked:
        with _lock:
            if not _checked:
                _library = _load_library(LIBRARY_PATH)
                _checked = True
    return _library


def _load_library(path: Path) -> Library | None:
    try:
        library = Library(path)
        reason = None if equals_pillow(library) else "it differs from this Pillow"
    except (OSError, ValueError) as error:
        reason = str(error)
    if reason is None:
        return library
    logger.warning(
        "Pictures are resized by Pillow, not by the faster tiler: %s", reason
    )
    return None
