# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Orientation of decoded pictures: turned where EXIF says so, else left alone."""

import io

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from vllm.multimodal.image import normalize_image


def reread(exif: Image.Exif | bytes | None) -> Image.Image:
    """A picture of 3 x 2 pixels, as it comes from a file with this EXIF block."""
    picture = Image.frombytes("RGB", (3, 2), bytes(range(18)))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", **({} if exif is None else {"exif": exif}))
    return Image.open(buffer)


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


@pytest.mark.parametrize("exif", [None, oriented(1), b"Exif\0\0damaged"])
def test_upright_picture_is_not_copied(exif):
    image = reread(exif)
    assert normalize_image(image) is image


@pytest.mark.parametrize("orientation", range(2, 9))
def test_turned_picture_is_made_upright(orientation):
    image = reread(oriented(orientation))
    upright = normalize_image(image)
    wanted = ImageOps.exif_transpose(image)
    assert np.array_equal(np.asarray(upright), np.asarray(wanted))
    assert not np.array_equal(np.asarray(upright), np.asarray(reread(None)))
    assert ExifTags.Base.Orientation not in upright.getexif()
