"""The layout of a row: an embedding and its optimizer state, as 32-bit words.

All tiers hold the same words, so a row that goes to the disk and comes back has the same bits, including
integer counts and bfloat16 values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

EMBEDDING = "embedding"
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Field:
    """A part of every row: `width` values of one dtype."""

    name: str
    width: int
    dtype: str = "float32"

    @property
    def num_words(self) -> int:
        """32-bit words of the field; two bfloat16 values share one."""
        return -(-self.width * jnp.dtype(self.dtype).itemsize // 4)


@dataclass(frozen=True)
class RowLayout:
    """The fields of a row, in order."""

    fields: tuple[Field, ...]

    @property
    def num_words(self) -> int:
        """32-bit words of a row, rounded up to an even number because the store counts in 64 bits."""
        return -(-sum(field.num_words for field in self.fields) // 2) * 2

    def unpack(self, words: Array) -> dict[str, Array]:
        """Return the fields of rows `uint32 [n, num_words]`, each `[n, width]`. Use this inside jit."""
        found, at = {}, 0
        for field in self.fields:
            part = words[:, at : at + field.num_words]
            at += field.num_words
            numbers = jax.lax.bitcast_convert_type(part, jnp.dtype(field.dtype))
            found[field.name] = numbers.reshape(len(words), -1)[:, : field.width]
        return found

    def pack(self, fields: Mapping[str, Array]) -> Array:
        """Return rows `uint32 [n, num_words]` from their fields: the inverse of `unpack`."""
        parts = []
        for field in self.fields:
            numbers = fields[field.name].astype(field.dtype)
            if numbers.dtype.itemsize == 2:
                numbers = jnp.pad(numbers, ((0, 0), (0, field.width % 2)))
                numbers = numbers.reshape(len(numbers), -1, 2)
            parts.append(jax.lax.bitcast_convert_type(numbers, jnp.uint32))
        words = jnp.concatenate(parts, axis=1)
        return jnp.pad(words, ((0, 0), (0, self.num_words - words.shape[1])))

    def unpack_host(self, words: UInt32[np.ndarray, "n words"]) -> dict[str, np.ndarray]:
        """Do the same as `unpack`, with NumPy arrays on the host."""
        found, at = {}, 0
        for field in self.fields:
            part = np.ascontiguousarray(words[:, at : at + field.num_words])
            at += field.num_words
            found[field.name] = part.view(jnp.dtype(field.dtype))[:, : field.width]
        return found

    def pack_host(self, fields: Mapping[str, Any], num_rows: int) -> UInt32[np.ndarray, "n words"]:
        """Do the same as `pack`, with NumPy arrays on the host. A scalar fills a whole field."""
        words = np.zeros((num_rows, self.num_words), np.uint32)
        at = 0
        for field in self.fields:
            dtype = jnp.dtype(field.dtype)
            numbers = np.zeros((num_rows, field.num_words * 4 // dtype.itemsize), dtype)
            numbers[:, : field.width] = fields[field.name]
            words[:, at : at + field.num_words] = numbers.view(np.uint32)
            at += field.num_words
        return words


def padded_size(count: int, *, least: int = 64) -> int:
    """Return the size that `count` rows are padded to: 64, 96, 128, 192, 256, ...

    There are few such sizes, so few programs are compiled.

    >>> [padded_size(n) for n in (0, 64, 65, 97, 1000)]
    [64, 64, 96, 128, 1024]
    """
    size = least
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
