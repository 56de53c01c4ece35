# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tiles and normalised pixels: golden hashes, modes, orientation, refusals."""

import hashlib
import importlib.util
import json
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL import __version__ as pillow_version

from vllm.models.ovis.images import (
    from_array,
    normalization_table,
    normalize,
    tile_image,
    to_rgb,
)
from vllm.multimodal.image import convert_image_mode

GOLDEN = Path(__file__).parents[2] / "golden" / "ovis2"

# Where we differ on purpose, the reference's pixels are those of the picture after
# Pillow's own conversion, which drops alpha and clips 16-bit grey.
CONVERTED_FIRST = {"RGBA", "LA", "PA", "I;16"}
# Cases in which the reference mistakes three rows for three channels, or fails on one.
ROWS_TAKEN_FOR_CHANNELS = {"size_1x1", "size_3x3", "size_1x3", "size_3x1", "size_50x3"}


def load_make_image():
    spec = importlib.util.spec_from_file_location("ovis_images", GOLDEN / "images.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_image


make_image = load_make_image()


@cache
def checkpoint_settings(checkpoint):
    path = GOLDEN / "checkpoints" / checkpoint / "preprocessor_config.json"
    config = json.loads(path.read_text())
    side = config.get("crop_size", config["size"])["height"]
    return side, normalization_table(config["image_mean"], config["image_std"])


def golden_images():
    for case in json.loads((GOLDEN / "cases.json").read_text()):
        pairs = zip(case["images"], case["expected"].get("images", []))
        for index, (image, expected) in enumerate(pairs):
            name = f"{case['checkpoint']}-{case['name']}-{index}"
            yield pytest.param(case, image, expected, id=name)


@pytest.mark.skipif(
    int(pillow_version.split(".")[0]) < 13,
    reason="the golden hashes follow the pass order of Pillow 13",
)
@pytest.mark.parametrize(("case", "image", "expected"), list(golden_images()))
def test_golden_pixels(case, image, expected):
    side, table = checkpoint_settings(case["checkpoint"])
    source = make_image(
        image["kind"], image["w"], image["h"], image["seed"], image["mode"]
    )
    digest = hashlib.sha256(source.tobytes()).hexdigest()
    assert digest == image["source_sha256"]
    if image["mode"] in CONVERTED_FIRST:
        source = source.convert("RGB")

    if case["name"] in ROWS_TAKEN_FOR_CHANNELS:
        tiled = tile_image(source, side, case["max_partition"])
        content = source.resize(
            tuple(tiled.rectangles[0, :1:-1]), Image.Resampling.BICUBIC
        )
        top, left, height, width = tiled.rectangles[0]
        tile = tiled.pixels[0, top : top + height, left : left + width]
        assert np.array_equal(tile, np.asarray(content))
        return
    if "exception" in expected:
        with pytest.raises(ValueError, match="too thin"):
            tile_image(source, side, case["max_partition"])
        return
    tiled = tile_image(source, side, case["max_partition"])
    pixels = normalize(tiled.pixels, tiled.rectangles, table)
    assert list(tiled.grid) == expected["grid"]
    assert list(pixels.shape) == expected["pixel_values"]["shape"]
    hashes = [
        hashlib.sha256(tile.astype("<f4").tobytes()).hexdigest() for tile in pixels
    ]
    assert hashes == expected["tile_sha256"]
    whole = hashlib.sha256(pixels.astype("<f4").tobytes()).hexdigest()
    assert whole == expected["pixel_values"]["sha256"]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "I;16"])
def test_deliberate_differences_are_real(mode):
    """These modes must not fall back silently to what the reference does."""
    image = make_image("noise_blocks", 40, 30, 5, mode)
    dropped = np.asarray(image.convert("RGB"))
    assert not np.array_equal(np.asarray(to_rgb(image)), dropped)


def test_layout_of_the_buffers():
    tiled = tile_image(make_image("noise", 640, 480, 1), 112)
    assert tiled.grid == (3, 3)
    assert tiled.pixels.shape == (10, 112, 112, 3)
    assert tiled.pixels.dtype == np.uint8 and tiled.pixels.flags.c_contiguous
    assert tiled.rectangles.dtype == np.int32 and tiled.rectangles.shape == (10, 4)
    assert tiled.rectangles[0].tolist() == [14, 0, 84, 112]
    outside = tiled.pixels.copy()
    for tile, (top, left, height, width) in zip(outside, tiled.rectangles):
        tile[top : top + height, left : left + width] = 0
    assert not outside.any()
    assert tiled.pixels[:, 56, 56].any()


def test_padding_is_zero_after_normalisation_and_black_is_not():
    table = normalization_table([0.5] * 3, [0.5] * 3)
    tiled = tile_image(Image.new("RGB", (224, 112)), 112, max_partition=1)
    pixels = normalize(tiled.pixels, tiled.rectangles, table)
    top, left, height, width = tiled.rectangles[0]
    assert (pixels[0, :, top : top + height, left : left + width] == -1).all()
    assert (pixels[0, :, :top] == 0).all() and (pixels[0, :, top + height :] == 0).all()


def test_rgb_is_not_copied():
    image = Image.new("RGB", (4, 4))
    assert to_rgb(image) is image


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_alpha_equals_the_engine(mode):
    image = make_image("noise", 37, 23, 5, mode)
    engine = convert_image_mode(image, "RGB")
    assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(engine))


@pytest.mark.parametrize(("mode", "straight"), [("La", "LA"), ("RGBa", "RGBA")])
def test_premultiplied_alpha(mode, straight):
    image = make_image("noise", 20, 10, 5, straight).convert(mode)
    expected = convert_image_mode(image.convert(straight), "RGB")
    assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(expected))


def as_png(image, **options):
    buffer = BytesIO()
    image.save(buffer, "PNG", **options)
    return Image.open(buffer)


@pytest.mark.parametrize(
    ("mode", "transparent"), [("P", 0), ("L", 0), ("1", 0), ("RGB", (0, 0, 0))]
)
def test_transparent_entry_becomes_white(mode, transparent):
    image = Image.new("L", (2, 1), 0)
    image.putpixel((1, 0), 255 if mode == "1" else 100)
    image = image.convert(mode, dither=Image.Dither.NONE)
    if mode == "P":
        transparent = image.getpixel((0, 0))
    png = as_png(image, transparency=transparent)
    assert "transparency" in png.info
    rgb = to_rgb(png)
    assert rgb.mode == "RGB"
    assert rgb.getpixel((0, 0)) == (255, 255, 255)
    assert rgb.getpixel((1, 0)) == image.convert("RGB").getpixel((1, 0))


def test_transparent_sixteen_bit_grey():
    image = Image.fromarray(np.array([[300, 257 * 7]], np.uint16))
    png = as_png(image, transparency=300)
    assert png.mode == "I;16"
    assert np.asarray(to_rgb(png))[0, :, 0].tolist() == [255, 7]


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I"])
def test_sixteen_bit_grey_is_scaled(mode):
    values = np.array([[0, 128, 129, 257, 257 * 100, 65535]], np.uint16)
    raw = values.astype({"I;16B": ">u2", "I": "<i4"}.get(mode, "<u2"))
    image = Image.frombytes(mode, (6, 1), raw.tobytes())
    rgb = np.asarray(to_rgb(image))
    assert (rgb == np.array([0, 0, 1, 1, 100, 255])[:, None]).all()


def test_thirty_two_bit_grey_outside_sixteen_bits_is_clipped():
    for values in ([-1, 70, 300], [0, 70, 65536], [0, 70, 255]):
        image = Image.frombytes("I", (3, 1), np.array(values, "<i4").tobytes())
        clipped = np.clip(values, 0, 255)
        assert np.asarray(to_rgb(image))[0, :, 0].tolist() == clipped.tolist()


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV", "F", "RGBX", "I"]
)
def test_other_modes_are_pillows(mode):
    image = make_image("noise_blocks", 30, 20, 3, mode)
    expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(np.asarray(to_rgb(image)), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation):
    image = make_image("gradient", 40, 24, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = BytesIO()
    image.save(buffer, "PNG", exif=exif)
    upright = to_rgb(Image.open(buffer))
    expected = ImageOps.exif_transpose(Image.open(buffer))
    assert upright.size == ((24, 40) if orientation > 4 else (40, 24))
    assert np.array_equal(np.asarray(upright), np.asarray(expected))
    assert np.array_equal(np.asarray(upright), np.asarray(image)) == (orientation == 1)


def test_orientation_decides_the_grid():
    image = Image.new("RGB", (300, 100))
    image.getexif()[0x0112] = 6
    assert (
        tile_image(image, 112).grid
        == tile_image(Image.new("RGB", (100, 300)), 112).grid
    )
    assert tile_image(image, 112).grid == (3, 1)


def test_damaged_exif_is_ignored():
    image = make_image("gradient", 10, 8, 3)
    image.info["exif"] = b"Exif\x00\x00garbage"
    assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(image))


def test_arrays():
    channels_last = np.asarray(make_image("noise", 30, 20, 3))
    expected = tile_image(make_image("noise", 30, 20, 3), 112)
    for array in (channels_last, channels_last.transpose(2, 0, 1)):
        tiled = tile_image(array, 112)
        assert np.array_equal(tiled.pixels, expected.pixels)
    assert from_array(np.zeros((3, 9, 3), np.uint8)).size == (9, 3)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((1, 4, 4, 3), np.uint8),
    ],
)
def test_other_arrays_are_refused(array):
    with pytest.raises(ValueError, match="uint8 with shape .* got"):
        tile_image(array, 112)


@pytest.mark.parametrize("size", [(1000, 1), (1, 1000), (4000, 5), (5, 4000)])
def test_too_thin_pictures_are_refused(size):
    with pytest.raises(ValueError, match="too thin"):
        tile_image(Image.new("RGB", size), 112)


def test_empty_picture_is_refused():
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        tile_image(Image.new("RGB", (0, 5)), 112)


def test_table_follows_the_order_of_operations():
    mean, std = (
        [0.48145466, 0.4578275, 0.40821073],
        [0.26862954, 0.26130258, 0.27577711],
    )
    table = normalization_table(mean, std)
    assert table.shape == (3, 256) and table.dtype == np.float32
    rescaled = np.float32(200 * (1 / 255))
    assert table[1, 200] == (rescaled - np.float32(mean[1])) / np.float32(std[1])
    single = np.arange(256, dtype=np.float32) * np.float32(1 / 255)
    other = (single - np.float32(mean[0])) / np.float32(std[0])
    assert (table[0] != other).any()  # The order matters, so it must be kept.


@pytest.mark.parametrize(
    ("mean", "std"), [([0.5], [0.5] * 3), ([0.5] * 3, [1, 1]), ([0] * 3, [1, 0, 1])]
)
def test_bad_normalisation_is_refused(mean, std):
    with pytest.raises(ValueError, match="three values each and std must be above 0"):
        normalization_table(mean, std)
