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
from collections.abc import Sequence
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

_INTERFACE = 3
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


class _Job(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int32) for name in ("left", "top", "width", "height")],
        *[(name, ctypes.c_int32) for name in ("out_width", "out_height")],
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
    ]


class _Strip(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        *[(name, ctypes.c_int32) for name in ("top", "height", "bytes_per_pixel")],
    ]


class _Rows(ctypes.Structure):
    _fields_ = [("top", ctypes.c_int32), ("bottom", ctypes.c_int32)]


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
            self.open = functions.ovis_tiler_open
            self.feed = functions.ovis_tiler_feed
            self.close = functions.ovis_tiler_close
        except AttributeError as error:
            raise OSError(f"{path} is not the tiler: {error}") from error
        if interface != _INTERFACE:
            raise OSError(
                f"{path} has interface {interface}, this module needs {_INTERFACE}; "
                "build it again"
            )
        self._supports.argtypes = [ctypes.c_int32]
        self.open.argtypes = [
            *(ctypes.c_int32, ctypes.POINTER(_Job), ctypes.c_int32),
            *(ctypes.c_int32, ctypes.c_int32),
            *(ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(_Rows)),
        ]
        self.feed.argtypes = [
            *(ctypes.c_void_p, ctypes.POINTER(_Strip), ctypes.POINTER(_Rows))
        ]
        self.close.argtypes = [ctypes.c_void_p]
        self.close.restype = None

    def supports(self, instruction_set: int) -> bool:
        """Whether build and machine have an instruction set."""
        return bool(self._supports(instruction_set))


class Plan:
    """A picture on its way through the library; a context manager.

    Attributes:
        next: Rows `(top, bottom)` of the picture that the next strip must hold, None
            when all is done.

    Args:
        library: The library.
        width: Width of the picture in pixels.
        targets: What is to be made.
        threads: Most threads at work.
        instruction_set: One that the library supports.

    """

    def __init__(
        self,
        library: Library,
        width: int,
        targets: Sequence[Target],
        threads: int = 1,
        instruction_set: int = BEST,
    ):
        self._library = library
        self._handle = ctypes.c_void_p()
        self._next = _Rows()
        jobs = (_Job * len(targets))(*[_job(target) for target in targets])
        # The jobs hold addresses only.
        self._targets = targets
        _check(
            library.open(
                *(width, jobs, len(jobs), threads, instruction_set),
                *(ctypes.byref(self._handle), ctypes.byref(self._next)),
            )
        )

    def __enter__(self) -> "Plan":
        return self

    def __exit__(self, *_: object) -> None:
        self._library.close(self._handle)
        self._handle = ctypes.c_void_p()

    @property
    def next(self) -> tuple[int, int] | None:
        rows = self._next
        return (rows.top, rows.bottom) if rows.bottom else None

    def feed(self, view: "_PixelView", top: int) -> None:
        """Do what can be done with rows of the picture from row `top` on."""
        strip = _Strip(
            *(view.data, view.width * view.bytes_per_pixel),
            *(top, view.height, view.bytes_per_pixel),
        )
        _check(
            self._library.feed(
                self._handle, ctypes.byref(strip), ctypes.byref(self._next)
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
    with Plan(library, image.width, targets, threads, instruction_set) as plan:
        whole = _PixelView.in_place(image)
        if whole is not None:
            plan.feed(whole, top=0)
        least_rows = max(strip_bytes // (4 * image.width), 1)
        while plan.next is not None:
            top, bottom = plan.next
            bottom = min(max(bottom, top + least_rows), image.height)
            piece = image.crop((0, top, image.width, bottom))
            # No view of the piece either: this Pillow has no such interface.
            view = _PixelView.in_place(piece) or _PixelView.of_copy(piece)
            plan.feed(view, top)
            # Before the next is made, which may then take the same memory.
            del piece, view


def _job(target: Target) -> _Job:
    left, top, right, bottom = target.box
    height, width = target.content.shape[:2]
    return _Job(
        *(left, top, right - left, bottom - top, width, height),
        target.content.ctypes.data,
        target.content.strides[0],
    )


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
