# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Deterministic test images.  Integer numpy arithmetic only.

Every pixel is a function of (kind, width, height, seed, mode) through the raw
64-bit stream of numpy's PCG64 bit generator (whose stream numpy guarantees to
be stable) and integer operations, so an image does not depend on the Pillow or
numpy version.  No PIL conversion, drawing or resampling is used to build one.

    make_image(kind, width, height, seed, mode="RGB") -> PIL.Image.Image

kinds : noise_blocks, text, gradient, noise, flat
modes : RGB RGBA RGBX L LA P PA 1 CMYK YCbCr HSV I I;16 F
"""

import numpy as np
from PIL import Image

KINDS = ("noise_blocks", "text", "gradient", "noise", "flat")

# 5x7 glyphs, one row per string character group (own drawing)
_G = {
    "0": "01110100011001110101110011000101110",
    "1": "00100011000010000100001000010001110",
    "2": "01110100010000100110010001000011111",
    "3": "11111000100010000010000011000101110",
    "4": "00010001100101010010111110001000010",
    "5": "11111100001111000001000011000101110",
    "6": "00110010001000011110100011000101110",
    "7": "11111000010001000100010000100001000",
    "8": "01110100011000101110100011000101110",
    "9": "01110100011000101111000010001001100",
    "A": "01110100011000111111100011000110001",
    "E": "11111100001000011110100001000011111",
    "H": "10001100011000111111100011000110001",
    "N": "10001110011010110011100011000110001",
    "O": "01110100011000110001100011000101110",
    "T": "11111001000010000100001000010000100",
    "V": "10001100011000110001100010101000100",
    "-": "00000000000000011111000000000000000",
}
_WORDS = ["OVAHNT", "NET", "HOT", "TEN", "HAVE", "OVEN", "NOTE", "TEA", "HEAT", "EVE"]


def _raw(seed, n):
    """N bytes of the raw PCG64 stream as uint8."""
    words = np.random.PCG64(seed).random_raw((n + 7) // 8)
    words = np.atleast_1d(np.asarray(words, dtype=np.uint64)).astype("<u8")
    return np.frombuffer(words.tobytes(), dtype=np.uint8)[:n]


def _grad(w, h):
    gx = (np.arange(w, dtype=np.int64) * 255 // max(1, w - 1))[None, :]
    gy = (np.arange(h, dtype=np.int64) * 255 // max(1, h - 1))[:, None]
    return np.broadcast_to(gx, (h, w)), np.broadcast_to(gy, (h, w))


def _planes(kind, w, h, seed):
    """(h, w, 4) uint8"""
    gx, gy = _grad(w, h)
    if kind == "gradient":
        a = np.stack([gx, gy, (gx + gy + seed * 17) % 256, 255 - (gx + gy) // 2], -1)
        return a.astype(np.uint8)
    if kind == "noise":
        return _raw(seed, h * w * 4).reshape(h, w, 4)
    if kind == "flat":
        return np.broadcast_to(_raw(seed, 4), (h, w, 4)).copy()
    if kind == "noise_blocks":
        bs = max(1, min(w, h) // 6)
        ch, cw = -(-h // bs), -(-w // bs)
        coarse = _raw(seed, ch * cw * 4).reshape(ch, cw, 4)
        up = np.repeat(np.repeat(coarse, bs, 0)[:h], bs, 1)[:, :w]
        fine = _raw(seed + 1000003, h * w * 4).reshape(h, w, 4)
        out = np.empty((h, w, 4), np.uint8)
        for c, g in enumerate((gx, gy, 255 - gx, 255 - gy)):
            out[..., c] = (
                (
                    up[..., c].astype(np.int32) * 9
                    + g.astype(np.int32) * 5
                    + fine[..., c].astype(np.int32) * 2
                )
                >> 4
            ).astype(np.uint8)
        return out
    if kind == "text":
        cols = _raw(seed, 8)
        bg = (cols[:4].astype(np.int64) // 3 + 160).astype(np.uint8)
        fg = (cols[4:].astype(np.int64) // 3).astype(np.uint8)
        a = np.broadcast_to(bg, (h, w, 4)).copy()
        scale = max(1, min(w // 40, h // 16))
        pick = _raw(seed + 7, 4096)
        y, k = scale, 0
        while y + 7 * scale <= h:
            x = scale
            while True:
                b = int(pick[k % 4096])
                k += 1
                s = (
                    _WORDS[b % len(_WORDS)] if b & 64 else str(int(b) * 37 + seed % 10)
                ) + " "
                if x + 6 * scale * (len(s) - 1) > w:
                    break
                for chx in s:
                    if chx in _G:
                        m = (
                            np.frombuffer(_G[chx].encode(), np.uint8).reshape(7, 5)
                            == 49
                        )
                        m = np.repeat(np.repeat(m, scale, 0), scale, 1)
                        a[y : y + 7 * scale, x : x + 5 * scale][m] = fg
                    x += 6 * scale
            y += 9 * scale
        return a
    raise ValueError(kind)


def make_image(kind, width, height, seed, mode="RGB"):
    w, h = int(width), int(height)
    p = _planes(kind, w, h, int(seed))
    size = (w, h)
    by = lambda arr: np.ascontiguousarray(arr).tobytes()
    if mode in ("RGB", "YCbCr", "HSV"):
        return Image.frombytes(mode, size, by(p[..., :3]))
    if mode in ("RGBA", "CMYK", "RGBX"):
        return Image.frombytes(mode, size, by(p))
    if mode == "L":
        return Image.frombytes("L", size, by(p[..., 0]))
    if mode == "LA":
        return Image.frombytes("LA", size, by(p[..., [0, 3]]))
    if mode in ("P", "PA"):
        idx = p[..., 0] // 4
        pal = _raw(int(seed) + 99, 768).tolist()
        im = Image.frombytes(
            mode, size, by(idx) if mode == "P" else by(np.stack([idx, p[..., 3]], -1))
        )
        im.putpalette(pal)
        return im
    if mode == "1":
        return Image.frombytes("1", size, by(np.packbits(p[..., 0] > 127, axis=1)))
    if mode == "I;16":
        v = p[..., 0].astype("<u2") * 256 + p[..., 1]
        return Image.frombytes("I;16", size, by(v.astype("<u2")))
    if mode == "I":
        v = p[..., 0].astype("<i4") * 2 - 100
        return Image.frombytes("I", size, by(v.astype("<i4")))
    if mode == "F":
        v = (p[..., 0].astype("<i4") * 2 - 100).astype("<f4") / np.float32(2)
        return Image.frombytes("F", size, by(v.astype("<f4")))
    raise ValueError(mode)


def pixel_sha256(im):
    import hashlib

    return hashlib.sha256(im.tobytes()).hexdigest()
