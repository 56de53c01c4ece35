# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tiler against Pillow, byte by byte, with every instruction set there is.

Golden tiles go through it in `test_images.py`.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vllm.models.ovis import resample as module
from vllm.models.ovis.images import tile_image
from vllm.models.ovis.resample import (
    equals_pillow,
    resample,
    resize_with_pillow,
)
from vllm.models.ovis.tiler import (
    AVX2,
    AVX512,
    LIBRARY_PATH,
    PORTABLE,
    Library,
    PixelView,
    Plan,
    Target,
    keep_pictures_in_one_piece,
    resize_with_library,
)

needs_library = pytest.mark.skipif(
    not LIBRARY_PATH.exists(), reason="csrc/ovis has not been built"
)
BUILD = Path(__file__).parents[3] / "csrc" / "ovis" / "build.py"
NAMES = {PORTABLE: "portable", AVX2: "avx2", AVX512: "avx512"}
few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def library():
    return Library()


@pytest.fixture(params=list(NAMES), ids=list(NAMES.values()))
def instruction_set(request, library):
    if not library.supports(request.param):
        pytest.skip(f"no {NAMES[request.param]} here")
    return request.param


def picture(kind, width, height, seed=0):
    random = np.random.default_rng(seed)
    if kind == "noise":
        values = random.integers(0, 256, (height, width, 3), np.uint8)
    elif kind == "extremes":
        values = random.integers(0, 2, (height, width, 3), np.uint8) * np.uint8(255)
    elif kind == "flat":
        values = np.full((height, width, 3), random.integers(0, 256, 3), np.uint8)
    else:
        y, x = np.mgrid[:height, :width]
        values = np.stack([x * 3, y * 5, x + y], -1).astype(np.uint8)
    return Image.fromarray(values)


def expected_content(image, box, size):
    content = np.zeros((size[1], size[0], 3), np.uint8)
    resize_with_pillow(image, [Target(box, content)])
    return content


def content_of(library, image, box, size, **options):
    """The content, resized in the middle of a buffer whose rest must stay as it is."""
    width, height = size
    buffer = np.full((height + 2, width + 5, 3), 77, np.uint8)
    content = buffer[1:-1, 2:-3]
    resize_with_library(library, image, [Target(box, content)], **options)
    result = content.copy()
    content[:] = 77
    assert (buffer == 77).all(), "bytes outside the rectangle were written"
    return result


# Small sizes are drawn as often as large ones: edges matter there.
lengths = st.one_of(
    st.integers(1, 8), st.integers(1, 70), st.integers(1, 300), st.just(448)
)


@st.composite
def resizes(draw):
    width, height = draw(lengths), draw(lengths)
    left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    right = draw(st.integers(left + 1, width))
    bottom = draw(st.integers(top + 1, height))
    box = draw(st.sampled_from([(0, 0, width, height), (left, top, right, bottom)]))
    out_width = draw(st.one_of(lengths, st.just(box[2] - box[0])))
    out_height = draw(st.one_of(lengths, st.just(box[3] - box[1])))
    kind = draw(st.sampled_from(["noise", "extremes", "flat", "smooth"]))
    image = picture(kind, width, height, draw(st.integers(0, 99)))
    return image, box, (out_width, out_height)


@needs_library
@few
@given(case=resizes(), threads=st.integers(1, 4))
def test_equals_pillow(library, instruction_set, case, threads):
    got = content_of(library, *case, threads=threads, instruction_set=instruction_set)
    np.testing.assert_array_equal(got, expected_content(*case))


@needs_library
@few
@given(case=resizes(), strip_bytes=st.integers(1, 1 << 16))
def test_equals_pillow_from_strips(library, instruction_set, case, strip_bytes):
    with pytest.MonkeyPatch.context() as patch:
        _hide_whole_picture(patch, case[0])
        got = content_of(
            library, *case, instruction_set=instruction_set, strip_bytes=strip_bytes
        )
    np.testing.assert_array_equal(got, expected_content(*case))


@needs_library
@few
@given(case=resizes())
def test_equals_pillow_from_three_bytes(library, instruction_set, case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PixelView, "in_place", lambda image: None)
        got = content_of(library, *case, instruction_set=instruction_set)
    np.testing.assert_array_equal(got, expected_content(*case))


def _hide_whole_picture(patch, whole):
    """As if Pillow kept `whole` in several blocks of memory."""
    in_place = PixelView.in_place
    patch.setattr(
        PixelView,
        "in_place",
        lambda image: None if image is whole else in_place(image),
    )


@needs_library
@pytest.mark.parametrize(
    ("size", "out"),
    [
        ((1080, 2400), (201, 448)),
        ((336, 1008), (149, 448)),
        ((1920, 1080), (448, 252)),
        ((480, 540), (398, 448)),
        ((9000, 65), (448, 3)),
        ((4000, 1), (448, 1)),
        ((1, 4000), (1, 448)),
        ((700, 1500), (14, 30)),
        ((448, 448), (448, 448)),
    ],
)
@pytest.mark.parametrize("kind", ["noise", "extremes"])
def test_sizes_of_a_server(library, instruction_set, size, out, kind):
    case = picture(kind, *size), (0, 0, *size), out
    got = content_of(library, *case, instruction_set=instruction_set)
    np.testing.assert_array_equal(got, expected_content(*case))


@pytest.fixture
def block_size(monkeypatch):
    """Pillow's own block size, and a way to change it for one test."""
    monkeypatch.delenv("PILLOW_BLOCK_SIZE", raising=False)
    before = Image.core.get_block_size()
    Image.core.set_block_size(16 << 20)
    yield Image.core.set_block_size
    Image.core.set_block_size(before)


@needs_library
def test_large_pictures_are_kept_in_one_piece(block_size, monkeypatch):
    assert PixelView.in_place(picture("flat", 2500, 2000)) is None
    keep_pictures_in_one_piece()
    assert PixelView.in_place(picture("flat", 2500, 2000)) is not None
    block_size(1 << 20)
    monkeypatch.setenv("PILLOW_BLOCK_SIZE", "1m")
    keep_pictures_in_one_piece()
    assert PixelView.in_place(picture("flat", 2500, 2000)) is None


@needs_library
def test_picture_in_several_blocks(library, block_size):
    image = picture("noise", 2500, 2000)
    assert PixelView.in_place(image) is None
    targets = [
        Target((0, 0, 2500, 2000), np.zeros((358, 448, 3), np.uint8)),
        Target((1250, 1000, 2500, 2000), np.zeros((358, 448, 3), np.uint8)),
    ]
    resize_with_library(library, image, targets, threads=2)
    for target in targets:
        expected = expected_content(image, target.box, (448, 358))
        np.testing.assert_array_equal(target.content, expected)


@needs_library
def test_reads_a_picture_of_pillow_in_place():
    image = picture("noise", 640, 480)
    view = PixelView.in_place(image)
    assert view is not None
    bytes_there = np.ctypeslib.as_array(
        ctypes.cast(view.data, ctypes.POINTER(ctypes.c_uint8)), (480, 640, 4)
    )
    np.testing.assert_array_equal(bytes_there[..., :3], np.asarray(image))


@needs_library
def test_many_callers_at_once(library):
    cases = [
        (
            picture("noise", 300 + 17 * i, 400, seed=i),
            (0, 0, 300 + 17 * i, 400),
            (99, 97),
        )
        for i in range(16)
    ]
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(lambda case: content_of(library, *case, threads=2), cases)
        )
    for case, got in zip(cases, results):
        np.testing.assert_array_equal(got, expected_content(*case))


@needs_library
def test_self_check_sees_each_kind_of_difference(library, monkeypatch):
    assert equals_pillow(library)
    pillow = module.resize_with_pillow

    def always_horizontal_first(image, targets):
        """The order of passes before Pillow 13."""
        for target in targets:
            height, width = target.content.shape[:2]
            content = image.crop(target.box)
            content = content.resize((width, content.height), Image.Resampling.BICUBIC)
            target.content[:] = content.resize(
                (width, height), Image.Resampling.BICUBIC
            )

    monkeypatch.setattr(module, "resize_with_pillow", always_horizontal_first)
    assert not equals_pillow(library)

    def one_step_off(image, targets):
        pillow(image, targets)
        targets[0].content[0, 0, 0] ^= 1

    monkeypatch.setattr(module, "resize_with_pillow", one_step_off)
    assert not equals_pillow(library)


@pytest.fixture
def undecided(monkeypatch):
    monkeypatch.setattr(module, "_checked", False)
    monkeypatch.setattr(module, "_library", None)


@pytest.mark.parametrize("fault", ["missing", "no library", "differs"])
def test_falls_back_to_pillow_with_one_line(fault, undecided, monkeypatch, tmp_path):
    path = tmp_path / "libovis_tiler.so"
    if fault == "no library":
        path.write_text("text")
    if fault == "differs":
        if not LIBRARY_PATH.exists():
            pytest.skip("csrc/ovis has not been built")
        path = LIBRARY_PATH
        monkeypatch.setattr(module, "equals_pillow", lambda library: False)
    monkeypatch.setattr(module, "LIBRARY_PATH", path)
    image = picture("noise", 50, 40)
    rectangles = np.array([[4, 0, 8, 16]], np.int32)
    lines = []
    monkeypatch.setattr(module.logger, "warning", lambda *line: lines.append(line))
    for _ in range(3):
        pixels = np.zeros((1, 16, 16, 3), np.uint8)
        resample(image, [(0, 0, 50, 40)], rectangles, pixels)
        np.testing.assert_array_equal(
            pixels[0, 4:12], expected_content(image, (0, 0, 50, 40), (16, 8))
        )
    assert len(lines) == 1
    assert "Pillow" in lines[0][0]


@needs_library
def test_tiles_are_made_by_the_library(undecided, monkeypatch):
    """Nothing else would notice if every picture took the slow way."""
    image = picture("noise", 900, 500)
    tile_image(image, 112)
    monkeypatch.setattr(module, "resize_with_pillow", None)
    assert len(tile_image(image, 112).pixels) > 1


@needs_library
def test_threads_share_large_pictures_only(undecided, monkeypatch):
    asked = []

    def resize(library, image, targets, threads):
        asked.append(threads)

    tile_image(picture("flat", 20, 20), 112)  # The library is tried without the fake.
    monkeypatch.setattr(module, "resize_with_library", resize)
    for size in ((720, 720), (740, 740)):
        tile_image(picture("flat", *size), 112, threads=3)
    assert asked == [1, 3]


def test_refusals():
    image = picture("flat", 20, 10)
    box, rectangle = [(0, 0, 20, 10)], np.array([[0, 0, 8, 16]], np.int32)
    pixels = np.zeros((1, 16, 16, 3), np.uint8)
    with pytest.raises(ValueError, match="mode RGB, got L"):
        resample(image.convert("L"), box, rectangle, pixels)
    for outside in [(0, 0, 21, 10), (-1, 0, 20, 10), (5, 5, 5, 10)]:
        with pytest.raises(ValueError, match="box .* must be inside the picture"):
            resample(image, [outside], rectangle, pixels)
    for outside in [[9, 0, 8, 16], [0, 1, 8, 16], [0, 0, 0, 16], [-1, 0, 8, 16]]:
        with pytest.raises(ValueError, match="rectangle .* must be inside the tile"):
            resample(image, box, np.array([outside], np.int32), pixels)
    with pytest.raises(ValueError, match="pixels must be uint8"):
        resample(image, box, rectangle, pixels.astype(np.float32))


@needs_library
def test_library_does_not_read_what_is_not_there(library):
    """Strips that are not enough leave the plan where it was."""
    content = np.full((60, 20, 3), 77, np.uint8)
    view = PixelView.of_copy(picture("noise", 20, 20))
    with Plan(library, 20, [Target((0, 0, 20, 60), content)]) as plan:
        for top in (1, 30, 0):
            before = plan.next
            plan.feed(view, top)
            assert (plan.next == before) == (top != 0)
        assert plan.next is not None
    assert (content[20:] == 77).all()


@needs_library
def test_library_refuses_wrong_arguments(library):
    target = Target((0, 0, 20, 10), np.zeros((4, 4, 3), np.uint8))
    for arguments in [(19, [target]), (20, [target], 0), (20, [target], 1, 99)]:
        with pytest.raises(ValueError, match="refused"):
            Plan(library, *arguments)


@pytest.mark.skipif(
    not BUILD.exists() or shutil.which("g++") is None,
    reason="needs the source of csrc/ovis and a compiler",
)
def test_fuzzer_finds_nothing(tmp_path):
    """A short run, to keep it building; longer ones by hand (docs/tiler.md)."""
    subprocess.run([sys.executable, BUILD, "--fuzzer", tmp_path], check=True)
    # An engine in this process may have set LD_PRELOAD, before which the sanitizer's
    # own library has to come.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    result = subprocess.run(
        [tmp_path / "ovis_tiler_fuzzer", "--seconds=2"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(
    not BUILD.exists() or shutil.which("g++") is None,
    reason="needs the source of csrc/ovis and a compiler",
)
@pytest.mark.parametrize("options", [[], ["--no-cmake"]])
def test_builds_from_source(tmp_path, options):
    command = [sys.executable, BUILD, tmp_path, *options]
    subprocess.run(command, check=True, capture_output=True)
    assert equals_pillow(Library(tmp_path / LIBRARY_PATH.name))
