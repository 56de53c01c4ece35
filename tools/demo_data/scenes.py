# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Seeded pictures with a question and its answer, one function for each task.

``make_sample(task, seed)`` is all a test needs.  ``draw`` also tells what lies where
in the picture, which training uses.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from PIL import Image, ImageDraw

from .glyphs import ALPHABET, FACES, text_mask

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 30, 35),
    "orange": (245, 135, 20),
    "yellow": (245, 225, 40),
    "green": (35, 155, 60),
    "blue": (40, 75, 220),
    "purple": (140, 45, 175),
    "black": (14, 14, 14),
    "white": (242, 242, 242),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
PLACES: dict[str, tuple[float, float]] = {
    "left": (0.2, 0.5),
    "right": (0.8, 0.5),
    "top": (0.5, 0.2),
    "bottom": (0.5, 0.8),
    "centre": (0.5, 0.5),
}

# Sizes whose grid (tile side 112, max_partition 9) is the key.
LARGE = {
    (1, 2): (224, 112),
    (2, 1): (112, 224),
    (2, 2): (224, 224),
    (2, 3): (336, 224),
    (3, 3): (336, 336),
}
DETAILED = {(3, 3): (336, 336), (1, 6): (672, 112), (1, 9): (1008, 112)}

TASKS = (
    "colour",
    "shape",
    "position",
    "describe",
    "two_images",
    "detail",
    "read",
    "small_text",
)

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Item:
    """Something drawn: where it is and what it is.

    Attributes:
        name: A shape, or one character of a text.
        colour: Name of its colour; empty for characters.
        order: 1 for a text's first character; 0 for shapes.
        x: Horizontal centre, in picture pixels.
        y: Vertical centre, in picture pixels.
        size: Height of a capital, or the diameter of a shape, in picture pixels.

    """

    name: str
    colour: str
    order: int
    x: float
    y: float
    size: float


@dataclass
class Picture:
    """A picture and what was drawn in it."""

    image: Image.Image
    items: list[Item] = field(default_factory=list)


@dataclass
class Sample:
    """Pictures with a question and the only right answer."""

    pictures: list[Picture]
    question: str
    answer: str


def _polygon(shape: str, turn: float) -> list[tuple[float, float]]:
    """Corners on the unit circle's scale; y grows downwards."""
    if shape == "triangle":
        angles, radii = [-90, 30, 150], [1.0] * 3
    elif shape == "square":
        angles, radii = [-135, -45, 45, 135], [1.15] * 4
    elif shape == "star":
        angles, radii = [-90 + 36 * k for k in range(10)], [1.0, 0.42] * 5
    else:
        w = 0.3
        corners = [(w, w), (w, 1), (-w, 1), (-w, w), (-1, w), (-1, -w)]
        corners += [(-x, -y) for x, y in corners]
        return corners
    return [
        (r * math.cos(math.radians(a + turn)), r * math.sin(math.radians(a + turn)))
        for a, r in zip(angles, radii)
    ]


def _paint(image: Image.Image, mask: Image.Image, at: tuple[int, int], c: Colour):
    image.paste(c, (*at, at[0] + mask.width, at[1] + mask.height), mask)


def add_shape(
    picture: Picture, rng: Random, shape: str, colour: str, x: float, y: float, d: float
) -> None:
    """Draw a shape of diameter d around (x, y), with smooth edges."""
    fine = 4
    side = int(d) + 4
    left, top = int(x - side / 2), int(y - side / 2)
    mask = Image.new("L", (side * fine, side * fine))
    draw = ImageDraw.Draw(mask)
    cx, cy, r = (x - left) * fine, (y - top) * fine, d / 2 * fine
    if shape == "circle":
        draw.ellipse((cx - r, cy - r, cx + r, cy + r), fill=255)
    else:
        corners = _polygon(shape, rng.uniform(-8, 8))
        draw.polygon([(cx + r * px, cy + r * py) for px, py in corners], fill=255)
    base = COLOURS[colour]
    c = tuple(min(255, max(0, v + rng.randint(-12, 12))) for v in base)
    _paint(picture.image, mask.reduce(fine), (left, top), (c[0], c[1], c[2]))
    picture.items.append(Item(shape, colour, 0, x, y, d))


def _muted(rng: Random) -> Colour:
    grey = rng.randint(95, 170)
    r, g, b = (grey + rng.randint(-16, 16) for _ in range(3))
    return r, g, b


def _luma(c: Colour) -> float:
    return 0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2]


def _ink_and_paper(rng: Random) -> tuple[Colour, Colour]:
    """Two random colours, far apart in brightness."""
    while True:
        a, b = (
            (rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255))
            for _ in range(2)
        )
        if abs(_luma(a) - _luma(b)) >= 95:
            return a, b


def _small_size(rng: Random) -> tuple[int, int]:
    """A size of one tile."""
    long, short = rng.randint(72, 116), rng.uniform(0.6, 1.0)
    w, h = long, max(48, int(long * short))
    return (w, h) if rng.random() < 0.6 else (h, w)


def _jittered(rng: Random, size: tuple[int, int]) -> tuple[int, int]:
    return size[0] + rng.randint(-2, 2), size[1] + rng.randint(-2, 2)


def _blank(rng: Random, large: float = 0.3) -> Picture:
    if rng.random() < large:
        size = _jittered(rng, rng.choice(list(LARGE.values())))
    else:
        size = _small_size(rng)
    return Picture(Image.new("RGB", size, _muted(rng)))


def _scene(rng: Random, large: float = 0.3) -> tuple[Picture, str, str]:
    """One shape anywhere; returns the picture, the shape and its colour."""
    picture = _blank(rng, large)
    w, h = picture.image.size
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    d = min(w, h) * rng.uniform(0.34, 0.8)
    x = rng.uniform(d / 2 + 1, w - d / 2 - 1)
    y = rng.uniform(d / 2 + 1, h - d / 2 - 1)
    add_shape(picture, rng, shape, colour, x, y, d)
    return picture, shape, colour


def _placed(rng: Random) -> tuple[Picture, str, str, str]:
    picture = _blank(rng)
    w, h = picture.image.size
    place, (fx, fy) = rng.choice(list(PLACES.items()))
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    d = min(w, h) * rng.uniform(0.24, 0.36)
    x = min(max((fx + rng.uniform(-0.06, 0.06)) * w, d / 2 + 1), w - d / 2 - 1)
    y = min(max((fy + rng.uniform(-0.06, 0.06)) * h, d / 2 + 1), h - d / 2 - 1)
    add_shape(picture, rng, shape, colour, x, y, d)
    return picture, shape, colour, place


def draw_colour(rng: Random, heldout: bool) -> Sample:
    picture, _, colour = _scene(rng)
    return Sample([picture], "What colour is the shape?", colour)


def draw_shape(rng: Random, heldout: bool) -> Sample:
    picture, shape, _ = _scene(rng)
    return Sample([picture], "What shape is it?", shape)


def draw_position(rng: Random, heldout: bool) -> Sample:
    picture, _, _, place = _placed(rng)
    return Sample([picture], "Where is the shape?", place)


def draw_describe(rng: Random, heldout: bool) -> Sample:
    picture, shape, colour, place = _placed(rng)
    answer = f"{colour} {shape}, {place}"
    return Sample([picture], "Describe the picture.", answer)


def draw_two_images(rng: Random, heldout: bool) -> Sample:
    large = rng.choice([(0.0, 0.0), (0.0, 0.0), (0.0, 1.0), (1.0, 0.0)])
    scenes = []
    for share in large:
        if share:
            size = _jittered(rng, LARGE[(2, 2)])
            picture = Picture(Image.new("RGB", size, _muted(rng)))
            shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
            d = 224 * rng.uniform(0.34, 0.8)
            x, y = (rng.uniform(d / 2 + 2, s - d / 2 - 2) for s in size)
            add_shape(picture, rng, shape, colour, x, y, d)
            scenes.append((picture, shape, colour))
        else:
            scenes.append(_scene(rng, large=0.0))
    pictures = [s[0] for s in scenes]
    k = rng.randrange(2)
    kind = rng.randrange(3)
    if kind == 2 and scenes[0][1] != scenes[1][1]:
        question = f"Which image shows the {scenes[k][1]}?"
        return Sample(pictures, question, f"image {k + 1}")
    if kind == 1:
        return Sample(pictures, f"What shape is in image {k + 1}?", scenes[k][1])
    return Sample(pictures, f"What colour is the shape in image {k + 1}?", scenes[k][2])


def _cell_of(
    rng: Random, size: tuple[int, int], grid: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Left, top, width and height of a random cell of a picture."""
    rows, cols = grid
    w, h = size[0] // cols, size[1] // rows
    return rng.randrange(cols) * w, rng.randrange(rows) * h, w, h


def _detailed(rng: Random) -> tuple[Picture, tuple[int, int]]:
    grid, size = rng.choice(list(DETAILED.items()))
    return Picture(Image.new("RGB", _jittered(rng, size), _muted(rng))), grid


def draw_detail(rng: Random, heldout: bool) -> Sample:
    picture, grid = _detailed(rng)
    size = picture.image.size
    big = min(size) * rng.uniform(0.4, 0.7)
    bx, by = (rng.uniform(big / 2 + 2, s - big / 2 - 2) for s in size)
    add_shape(picture, rng, rng.choice(SHAPES), rng.choice(list(COLOURS)), bx, by, big)
    d = rng.uniform(11.5, 13) if grid == (3, 3) else rng.uniform(13, 17)
    shape = rng.choice(SHAPES)
    while True:
        left, top, w, h = _cell_of(rng, size, grid)
        x = left + rng.uniform(d, w - d)
        y = top + rng.uniform(d, h - d)
        if math.hypot(x - bx, y - by) > big / 2 * 1.1 + d + 3:
            break
    add_shape(picture, rng, shape, rng.choice(list(COLOURS)), x, y, d)
    return Sample([picture], "What shape is the small mark?", shape)


def is_heldout(text: str) -> bool:
    """Whether a string is kept out of training: a tenth of all strings."""
    return zlib.crc32(text.encode()) % 10 == 0


def _string(rng: Random, low: int, high: int, heldout: bool) -> str:
    length = rng.randint(low, high)
    # Two characters or fewer are too few to hold any out.
    while True:
        text = "".join(rng.choice(ALPHABET) for _ in range(length))
        if length <= 2 or is_heldout(text) == heldout:
            return text


def add_text(
    picture: Picture,
    rng: Random,
    text: str,
    cap: float,
    ink: Colour,
    area: tuple[float, float, float, float],
) -> bool:
    """Write a text at a random place of an area (left, top, width, height).

    Returns:
        Whether it fitted; nothing is drawn if not.

    """
    mask, centres = text_mask(
        text, rng.choice(FACES), cap, tracking=rng.uniform(0.02, 0.16)
    )
    left, top, width, height = area
    room_x, room_y = width - mask.width - 4, height - mask.height - 4
    if room_x < 0 or room_y < 0:
        return False
    x = int(left + 2 + rng.uniform(0, room_x))
    y = int(top + 2 + rng.uniform(0, room_y))
    _paint(picture.image, mask, (x, y), ink)
    for k, (char, centre) in enumerate(zip(text, centres)):
        item = Item(char, "", k + 1, x + centre, y + mask.height / 2, mask.height)
        picture.items.append(item)
    return True


def draw_read(rng: Random, heldout: bool) -> Sample:
    text = _string(rng, 3 if heldout else 1, 5, heldout)
    if rng.random() < 0.25:
        grid = rng.choice([(1, 2), (2, 2), (3, 3)])
        size = _jittered(rng, LARGE[grid])
    else:
        width = rng.randint(84, 116)
        size = (width, rng.randint(40, width))
    shrink = max(1.0, max(size) / 112)
    ink, paper = _ink_and_paper(rng)
    picture = Picture(Image.new("RGB", size, paper))
    # The largest that fits, or any smaller one that is legible in the overview.
    most = min(size[1] * 0.7, size[0] / (len(text) * 0.85 + 0.3))
    low = 13.5 * shrink
    cap = rng.uniform(low, max(low, min(most, 46 * shrink)))
    while not add_text(picture, rng, text, cap, ink, (0, 0, *size)):
        cap *= 0.93
    return Sample([picture], "Read the text.", text)


def draw_small_text(rng: Random, heldout: bool) -> Sample:
    grid, size = rng.choice(list(DETAILED.items()))
    size = _jittered(rng, size)
    ink, paper = _ink_and_paper(rng)
    picture = Picture(Image.new("RGB", size, paper))
    text = _string(rng, 3, 4, heldout)
    cap = rng.uniform(13, 14.5) if grid == (3, 3) else rng.uniform(13, 19)
    while not add_text(picture, rng, text, cap, ink, _cell_of(rng, size, grid)):
        cap *= 0.93
    return Sample([picture], "Read the small text.", text)


_DRAW: dict[str, Callable[[Random, bool], Sample]] = {
    "colour": draw_colour,
    "shape": draw_shape,
    "position": draw_position,
    "describe": draw_describe,
    "two_images": draw_two_images,
    "detail": draw_detail,
    "read": draw_read,
    "small_text": draw_small_text,
}


def draw(task: str, seed: int, heldout: bool = True) -> Sample:
    """Draw a sample with everything training wants to know about it.

    Args:
        task: One of TASKS.
        seed: Any integer; the same seed gives the same sample.
        heldout: Take strings that training never sees, or only those it may see.

    Raises:
        ValueError: Unknown task.

    """
    if task not in _DRAW:
        raise ValueError(f"task must be one of {TASKS}, got {task!r}")
    return _DRAW[task](Random(f"{task}/{seed}/{heldout}"), heldout)


def make_sample(task: str, seed: int) -> tuple[list[Image.Image], str, str]:
    """A held-out sample: (RGB pictures, question, answer)."""
    sample = draw(task, seed)
    return [p.image for p in sample.pictures], sample.question, sample.answer
