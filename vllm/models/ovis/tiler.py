# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The library of `csrc/ovis`, which resizes boxes of Pillow's pictures.

Nothing here decides whether to use it: see `resample`.
"""

import contextlib
import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from .tiling import Box

LIBRARY_PATH = Path(__file__).with_name("libovis_tiler.so")

# Instruction sets of csrc/ovis/tiler.h.
BEST, PORTABLE, AVX2, AVX512 = -1, 0, 1, 2

_INTERFACE = 3
_OUT_OF_MEMORY = 2

# Pillow hands out large pictures in pieces only. Pieces of this size stay in the cache
# between being copied and being read, and their memory is used again for the next.
_STRIP_BYTES = 4 << 20

# Largest block of memory of a picture; Pillow's own choice is 16 MB.
_BLOCK_BYTES = 1 << 30


@dataclass(frozen=True)
class Target:
    """One box of a picture and the array that takes its resized content.

    Attributes:
        box: Left, top, right, bottom in the picture.
        content: uint8 `[height, width, 3]`, pixels of a row next to each other.

    """

    box: Box
    content: npt.NDArray[np.uint8]


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

    def feed(self, view: "PixelView", top: int) -> None:
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
class PixelView:
    """Where the bytes of an RGB picture are, and what keeps them there.

    Attributes:
        data: Address of the first byte; rows follow each other without gaps.
        width: In pixels.
        height: In pixels.
        bytes_per_pixel: 3, or 4 of which the last means nothing.
        owner: Kept as long as the view, and the bytes with it.

    """

    data: int
    width: int
    height: int
    bytes_per_pixel: int
    owner: object

    @classmethod
    def in_place(cls, image: Image.Image) -> "PixelView | None":
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
    def of_copy(cls, image: Image.Image) -> "PixelView":
        """A copy in three bytes a pixel."""
        array = np.ascontiguousarray(image)
        return cls(array.ctypes.data, image.width, image.height, 3, array)


def keep_pictures_in_one_piece() -> None:
    """Have Pillow lay out the pictures of this process from now on in one block each.

    A large picture can then be read in place, which saves a third of its time. Nothing
    else depends on the layout, and no picture takes more memory. A block size that the
    user has chosen (`PILLOW_BLOCK_SIZE`) is left alone.
    """
    if "PILLOW_BLOCK_SIZE" in os.environ:
        return
    with contextlib.suppress(AttributeError, ValueError):
        Image.core.set_block_size(_BLOCK_BYTES)


def resize_with_library(
    library: Library,
    image: Image.Image,
    targets: Sequence[Target],
    threads: int = 1,
    instruction_set: int = BEST,
    strip_bytes: int = _STRIP_BYTES,
) -> None:
    """Resize boxes of an RGB picture, bicubic, with Pillow 13's bytes.

    Args:
        library: The library.
        image: Picture in mode RGB.
        targets: Boxes inside the picture, and where their content goes.
        threads: Most threads at work, the caller's included.
        instruction_set: One that the library supports.
        strip_bytes: How much of a picture to copy at a time, where Pillow does not let
            it be read in place.

    """
    with Plan(library, image.width, targets, threads, instruction_set) as plan:
        whole = PixelView.in_place(image)
        if whole is not None:
            plan.feed(whole, top=0)
        least_rows = max(strip_bytes // (4 * image.width), 1)
        while plan.next is not None:
            top, bottom = plan.next
            bottom = min(max(bottom, top + least_rows), image.height)
            piece = image.crop((0, top, image.width, bottom))
            # No view of the piece either: this Pillow has no such interface.
            view = PixelView.in_place(piece) or PixelView.of_copy(piece)
            plan.feed(view, top)
            # Before the next is made, which may then take the same memory.
            del piece, view
