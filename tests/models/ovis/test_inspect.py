# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command which shows tiles and tokens of a picture."""

from pathlib import Path

import numpy as np
import pytest
import regex as re
from PIL import Image

from vllm.models.ovis.inspect import describe, draw_grid, main

GOLDEN = Path(__file__).parents[2] / "golden" / "ovis2"
YELLOW = (255, 255, 0)


def test_description_of_a_grid():
    text = describe(1920, 1080, 448, 256, 9)
    assert "1920 x 1080 pixels" in text
    assert "grid     2 x 4 (rows x columns; at most 9 cells" in text
    assert "left 0, top 0, right 1920, bottom 1080: 1920 x 1080 -> 448 x 252" in text
    assert "cell 8    left 1440, top 540, right 1920, bottom 1080: 480 x 540" in text
    tokens = "[256] column [256] column [256] column [256]"
    assert text.endswith(
        f"tokens   2314 = start [256] prefix {tokens} row {tokens} end"
    )


def test_description_of_one_tile():
    text = describe(31, 7, 112, 16, 9)
    assert "overview" not in text
    assert text.endswith("tokens   19 = start [16] prefix end")


def test_drawing_marks_the_borders_of_cells_only():
    image = Image.new("RGB", (1200, 900), "gray")
    drawing = np.asarray(draw_grid(image, 448, 9))
    assert drawing.shape == (900, 1200, 3)
    assert np.asarray(image).var() == 0  # The picture itself is not drawn on.
    changed = (drawing != 128).any(axis=2)
    # Grid of 2 x 3: edges of cells are at x 400, 800 and y 450.
    for x in (0, 399, 400, 799, 800, 1199):
        assert changed[:, x].all()
    for y in (0, 449, 450, 899):
        assert changed[y].all()
    for y in (300, 750):
        for x in (200, 600, 1000):
            assert not changed[y - 40 : y + 40, x - 40 : x + 40].any()
    assert (drawing == YELLOW).all(axis=2).any()


def test_small_pictures_are_enlarged():
    assert draw_grid(Image.new("RGB", (31, 7)), 112, 9).size == (31 * 14, 7 * 14)


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = Image.new("RGB", (600, 1700), "navy")
    exif = image.getexif()
    exif[0x0112] = 6
    image.save("photo.jpg", exif=exif)
    main(["photo.jpg", "--max-partition", "12"])
    output = capsys.readouterr().out
    assert "picture  1700 x 600 pixels, upright" in output
    assert "grid     2 x 4" in output
    assert output.endswith("drawing  photo.tiles.png\n")
    assert Image.open("photo.tiles.png").size == (1700, 600)


def test_command_takes_the_side_from_a_checkpoint(tmp_path, capsys):
    Image.new("RGB", (1200, 900)).save(tmp_path / "a.png")
    model = str(GOLDEN / "checkpoints" / "tiny-ovis1.6-gemma2")
    output = tmp_path / "b.png"
    main([str(tmp_path / "a.png"), "--model", model, "--output", str(output)])
    printed = capsys.readouterr().out
    assert "tiles of 104 x 104 pixels" in printed
    assert "tiles    10, of 16 tokens each" in printed
    assert output.exists()


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        ((1000, 1), [], "too thin"),
        ((10, 10), ["--max-partition", "0"], "max_partition must be .* got 0"),
        ((10, 10), ["--side", "13"], "no patch of 14 pixels fits a tile of 13"),
        ((10, 10), ["--side", "99", "--model", "x"], "not allowed with"),
        (None, [], "No such file"),
    ],
)
def test_bad_input_ends_with_a_message(tmp_path, capsys, size, options, message):
    path = tmp_path / "a.png"
    if size is not None:
        Image.new("RGB", size).save(path)
    with pytest.raises(SystemExit) as ended:
        main([str(path), "--output", str(tmp_path / "b.png"), *options])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert not (tmp_path / "b.png").exists()
