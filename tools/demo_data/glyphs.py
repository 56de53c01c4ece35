# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Short strings as coverage masks, in four faces.

Three come from the outline font that Pillow carries in its code, the fourth is a dot
matrix of our own.  No font file is read, so a picture depends on Pillow alone.
"""

from functools import cache, lru_cache

from PIL import Image, ImageDraw, ImageFont

ALPHABET = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"
"""Digits and capitals; I and O are left out, they look like 1 and 0."""

FACES = ("regular", "bold", "italic", "pixel")

CAP_HEIGHT = 0.70  # Of the scalable font, as a share of its size.
SLANT = 0.22

# 5 x 7 dots, row by row from the top; own drawing.
DOTS = {
    "0": "01110 10001 10011 10101 11001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00110 01000 10000 11111",
    "3": "11110 00001 00001 01110 00001 00001 11110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
    "A": "01110 10001 10001 11111 10001 10001 10001",
    "B": "11110 10001 10001 11110 10001 10001 11110",
    "C": "01110 10001 10000 10000 10000 10001 01110",
    "D": "11110 10001 10001 10001 10001 10001 11110",
    "E": "11111 10000 10000 11110 10000 10000 11111",
    "F": "11111 10000 10000 11110 10000 10000 10000",
    "G": "01110 10001 10000 10111 10001 10001 01110",
    "H": "10001 10001 10001 11111 10001 10001 10001",
    "J": "00111 00010 00010 00010 00010 10010 01100",
    "K": "10001 10010 10100 11000 10100 10010 10001",
    "L": "10000 10000 10000 10000 10000 10000 11111",
    "M": "10001 11011 10101 10101 10001 10001 10001",
    "N": "10001 11001 10101 10011 10001 10001 10001",
    "P": "11110 10001 10001 11110 10000 10000 10000",
    "Q": "01110 10001 10001 10001 10101 10010 01101",
    "R": "11110 10001 10001 11110 10100 10010 10001",
    "S": "01111 10000 10000 01110 00001 00001 11110",
    "T": "11111 00100 00100 00100 00100 00100 00100",
    "U": "10001 10001 10001 10001 10001 10001 01110",
    "V": "10001 10001 10001 10001 10001 01010 00100",
    "W": "10001 10001 10001 10101 10101 11011 10001",
    "X": "10001 10001 01010 00100 01010 10001 10001",
    "Y": "10001 10001 01010 00100 00100 00100 00100",
    "Z": "11111 00001 00010 00100 01000 10000 11111",
}
PIXEL_CAP = 7

TextMask = tuple[Image.Image, list[float]]


@lru_cache(maxsize=256)
def _outline_font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


@cache
def _dots(char: str) -> Image.Image:
    bits = DOTS[char].replace(" ", "")
    return Image.frombytes("L", (5, 7), bytes(255 * int(bit) for bit in bits))


def _outline(text: str, cap: float, tracking: float, bold: bool) -> TextMask:
    size = max(6, round(cap / CAP_HEIGHT))
    font = _outline_font(size)
    stroke = size * 0.035 if bold else 0.0
    advances = [font.getlength(c) + tracking * size + stroke for c in text]
    pad = 2 + int(stroke)
    top = round(size * 0.74) + pad
    mask = Image.new("L", (int(sum(advances)) + 2 * pad + 1, top + size // 8 + pad))
    draw, x, centres = ImageDraw.Draw(mask), float(pad), []
    for char, advance in zip(text, advances):
        draw.text((x, top), char, fill=255, font=font, anchor="ls", stroke_width=stroke)
        centres.append(x + (advance - tracking * size) / 2)
        x += advance
    return mask, centres


def _pixel(text: str, cap: float, tracking: float) -> TextMask:
    step = 6 + round(tracking * 10)
    small = Image.new("L", (step * len(text) + 1, 9))
    for k, char in enumerate(text):
        small.paste(_dots(char), (1 + k * step, 1))
    scale = cap / PIXEL_CAP
    width, height = round(small.width * scale), round(9 * scale)
    # Enlarged in two steps: whole pixels first, so that the corners stay square.
    whole = int(scale) + 1
    large = small.resize((small.width * whole, 9 * whole), Image.Resampling.NEAREST)
    mask = large.resize((width, height), Image.Resampling.BICUBIC)
    return mask, [(1 + k * step + 2.5) * scale for k in range(len(text))]


def text_mask(text: str, face: str, cap: float, tracking: float = 0.06) -> TextMask:
    """Draw a string as a mask.

    Args:
        text: Characters of ALPHABET.
        face: One of FACES.
        cap: Height of a capital in pixels; met to about one pixel.
        tracking: Extra space between characters, as a share of the font size.

    Returns:
        An "L" mask cut to its ink, and the horizontal centre of each character in it.

    Raises:
        ValueError: Unknown face.

    """
    if face not in FACES:
        raise ValueError(f"face must be one of {FACES}, got {face!r}")
    if face == "pixel":
        mask, centres = _pixel(text, cap, tracking)
    else:
        mask, centres = _outline(text, cap, tracking, bold=face == "bold")
    if face == "italic":
        lean = SLANT * mask.height
        mask = mask.transform(
            (mask.width + int(lean) + 1, mask.height),
            Image.Transform.AFFINE,
            (1, SLANT, -lean, 0, 1, 0),
            Image.Resampling.BICUBIC,
        )
        centres = [c + lean / 2 for c in centres]
    box = mask.getbbox() or (0, 0, 1, 1)
    return mask.crop(box), [c - box[0] for c in centres]
