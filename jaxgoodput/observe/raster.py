"""A canvas of pixels: lines, rectangles, marks, a 5x7 font, and PNG. Numpy and zlib only.

What the dashboard's pictures are drawn with where matplotlib is not installed. Coordinates are (x,
y) in pixels from the upper left; colours are (red, green, blue) in 0..255.
"""

import struct
import zlib
from typing import TypeAlias

import numpy as np

Colour = tuple[int, int, int]
Pixels: TypeAlias = float | int  # the type checker of the tests tells the two apart

WHITE: Colour = (255, 255, 255)
BLACK: Colour = (32, 33, 36)
GREY: Colour = (150, 155, 160)
PALE: Colour = (228, 230, 233)

GLYPH_WIDTH = 6  # 5 columns and a gap
GLYPH_HEIGHT = 7

# Five columns a glyph, bit 0 at the top.
_GLYPHS = {
    " ": "0000000000", "%": "2313086462", "(": "001c224100", ")": "0041221c00",
    "+": "08083e0808", ",": "0050300000", "-": "0808080808", ".": "0060600000",
    "/": "2010080402", "0": "3e5149453e", "1": "00427f4000", "2": "4261514946",
    "3": "2141454b31", "4": "1814127f10", "5": "2745454539", "6": "3c4a494930",
    "7": "0171090503", "8": "3649494936", "9": "064949291e", ":": "0036360000",
    "=": "1414141414", "<": "0814224100", ">": "0041221408", "_": "4040404040",
    "a": "2054545478", "b": "7f48444438", "c": "3844444420", "d": "384444487f",
    "e": "3854545418", "f": "087e090102", "g": "0c5252523e", "h": "7f08040478",
    "i": "00447d4000", "j": "2040443d00", "k": "7f10284400", "l": "00417f4000",
    "m": "7c04180478", "n": "7c08040478", "o": "3844444438", "p": "7c14141408",
    "q": "081414187c", "r": "7c08040408", "s": "4854545420", "t": "043f444020",
    "u": "3c4040207c", "v": "1c2040201c", "w": "3c4030403c", "x": "4428102844",
    "y": "0c5050503c", "z": "4464544c44",
}  # fmt: skip
_UNKNOWN = "7f4141417f"  # a box


def text_width(text: str, scale: int = 1) -> int:
    """Pixels that `text` takes along its direction."""
    return max(len(text) * GLYPH_WIDTH - 1, 0) * scale


class Canvas:
    """An RGB picture that is drawn on in place; what falls outside is cut off."""

    def __init__(self, width: int, height: int, background: Colour = WHITE):
        self.pixels = np.full((height, width, 3), background, np.uint8)

    @property
    def width(self) -> int:
        """Pixels across."""
        return self.pixels.shape[1]

    @property
    def height(self) -> int:
        """Pixels down."""
        return self.pixels.shape[0]

    def rectangle(self, x0: Pixels, y0: Pixels, x1: Pixels, y1: Pixels, colour: Colour) -> None:
        """Fill the pixels x0 <= x < x1, y0 <= y < y1."""
        columns = slice(max(round(x0), 0), max(round(x1), 0))
        self.pixels[max(round(y0), 0) : max(round(y1), 0), columns] = colour

    def frame(
        self, x0: Pixels, y0: Pixels, x1: Pixels, y1: Pixels, colour: Colour, width: int = 1
    ) -> None:
        """The border of that rectangle, drawn inwards."""
        self.rectangle(x0, y0, x1, y0 + width, colour)
        self.rectangle(x0, y1 - width, x1, y1, colour)
        self.rectangle(x0, y0, x0 + width, y1, colour)
        self.rectangle(x1 - width, y0, x1, y1, colour)

    def line(
        self,
        x0: Pixels,
        y0: Pixels,
        x1: Pixels,
        y1: Pixels,
        colour: Colour,
        *,
        width: int = 1,
        dash: int = 0,
    ) -> None:
        """A straight line, smoothed at its edges; `dash` > 0 leaves gaps of that many pixels."""
        length = float(np.hypot(x1 - x0, y1 - y0))
        if not np.isfinite(length):
            return
        pad = width + 1
        left, right = int(min(x0, x1)) - pad, int(max(x0, x1)) + pad + 1
        top, bottom = int(min(y0, y1)) - pad, int(max(y0, y1)) + pad + 1
        left, top = max(left, 0), max(top, 0)
        right, bottom = min(right, self.width), min(bottom, self.height)
        if left >= right or top >= bottom:
            return
        x, y = np.arange(left, right)[None, :], np.arange(top, bottom)[:, None]
        if length == 0.0:
            along, distance = np.zeros((1, 1)), np.hypot(x - x0, y - y0)
        else:
            unit_x, unit_y = (x1 - x0) / length, (y1 - y0) / length
            along = np.clip((x - x0) * unit_x + (y - y0) * unit_y, 0.0, length)
            distance = np.hypot(x - x0 - along * unit_x, y - y0 - along * unit_y)
        cover = np.clip(width / 2 + 0.5 - distance, 0.0, 1.0)
        if dash:
            cover = np.where((along / dash).astype(int) % 2, 0.0, cover)
        self._blend(left, top, cover, colour)

    def disc(self, x: Pixels, y: Pixels, radius: Pixels, colour: Colour) -> None:
        """A filled circle, smoothed at its edge."""
        left, top = max(int(x - radius) - 1, 0), max(int(y - radius) - 1, 0)
        right, bottom = min(int(x + radius) + 2, self.width), min(int(y + radius) + 2, self.height)
        if left >= right or top >= bottom:
            return
        across, down = np.arange(left, right)[None, :], np.arange(top, bottom)[:, None]
        cover = np.clip(radius + 0.5 - np.hypot(across - x, down - y), 0.0, 1.0)
        self._blend(left, top, cover, colour)

    def text(
        self,
        x: Pixels,
        y: Pixels,
        text: str,
        colour: Colour = BLACK,
        *,
        scale: int = 1,
        align: str = "left",
        upward: bool = False,
    ) -> None:
        """Letters whose middle line runs through (x, y); `align` is left, centre or right of x.

        Lower case, digits and a few signs. `upward` turns the text a quarter to the left.
        """
        if not text:
            return
        columns = []
        for character in text.lower():
            columns += [*bytes.fromhex(_GLYPHS.get(character, _UNKNOWN)), 0]
        bits = np.array(columns[:-1], np.uint8)
        # One more row than the glyphs: bit 7 is never set.
        mask = ((bits[None, :] >> np.arange(GLYPH_HEIGHT)[:, None]) & 1).astype(bool)
        mask = mask.repeat(scale, axis=0).repeat(scale, axis=1)
        along = {"left": 0.0, "centre": 0.5, "right": 1.0}[align] * mask.shape[1]
        if upward:
            mask = np.rot90(mask)
            left, top = round(x - mask.shape[1] / 2), round(y + along - mask.shape[0])
        else:
            left, top = round(x - along), round(y - mask.shape[0] / 2)
        x0, y0 = max(left, 0), max(top, 0)
        x1, y1 = min(left + mask.shape[1], self.width), min(top + mask.shape[0], self.height)
        if x0 < x1 and y0 < y1:
            visible = mask[y0 - top : y1 - top, x0 - left : x1 - left]
            self.pixels[y0:y1, x0:x1][visible] = colour

    def _blend(self, left: int, top: int, cover: np.ndarray, colour: Colour) -> None:
        height, width = cover.shape
        region = self.pixels[top : top + height, left : left + width]
        weight = cover[..., None]
        region[...] = np.round(region * (1 - weight) + np.array(colour) * weight)


def encode_png(pixels: np.ndarray) -> bytes:
    """The picture as the bytes of a PNG file; `pixels` is uint8 [height, width, 3].

    Raises:
      ValueError: another shape or dtype.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"A picture is uint8 [height, width, 3], got {pixels.dtype} {list(pixels.shape)}: "
            "drop the alpha channel and scale to 0..255 first."
        )
    height, width, _ = pixels.shape
    # Filter 2 (difference to the row above) on all rows but the first: flat areas become zeros.
    rows = pixels.reshape(height, width * 3)
    filtered = np.empty((height, width * 3 + 1), np.uint8)
    filtered[:, 0] = 2
    filtered[0, 1:] = rows[0]
    filtered[1:, 1:] = rows[1:] - rows[:-1]
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(filtered.tobytes(), 6))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
