"""Fingerprints of data sets, by which a resumed run notices that its data have changed."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxgoodput.data.rows import leaf_name
from jaxgoodput.data.sources import ENDLESS, Source, StreamSource, is_endless

NUM_READ = 8


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What a checkpoint stores about the data set: its size, and a digest of a few samples."""

    num_samples: int
    content: str | None = None
    """Digest of samples at fixed places; None if they differ from read to read (random augmentation)."""

    def difference(self, other: "Fingerprint") -> str | None:
        """Describe how `other` differs from this data set; None if no difference is known."""
        if self.num_samples != other.num_samples:
            return f"has {_in_words(other.num_samples)} instead of {_in_words(self.num_samples)}"
        if None in (self.content, other.content) or self.content == other.content:
            return None
        return "holds other samples, or holds them in another order"


def fingerprint(
    source: Source, again: Callable[[Callable[[], Any]], Any] = lambda read: read()
) -> Fingerprint:
    """Return the fingerprint of a source.

    Reads eight samples, one at a time and each twice, since samples that are augmented at random cannot be
    compared. An endless source is not read, because a stream's samples would be lost. `again` makes each
    read, and may repeat it (`readers.Attempts`). Raises what reading a sample raises.

    >>> from jaxgoodput.data.sources import as_source
    >>> fingerprint(as_source(np.arange(10))).difference(fingerprint(as_source(np.arange(11))))
    'has 11 samples instead of 10 samples'
    """
    if is_endless(source):
        return Fingerprint(num_samples=len(source))
    places = np.unique(np.linspace(0, len(source) - 1, NUM_READ).astype(np.int64))

    def content() -> str:
        total = hashlib.sha256()
        for place in places:
            _add(total, again(partial(source.batch, place[None])))
        return total.hexdigest()

    once, twice = content(), content()
    return Fingerprint(num_samples=len(source), content=once if once == twice else None)


def of_stream(source: StreamSource, place: int) -> str:
    """Return a digest of the next samples of a stream, from `place` on.

    The samples must not be in use yet; they remain available for training. Raises what reading a sample
    raises.
    """
    total = hashlib.sha256()
    for index in range(place, place + source.available(place, NUM_READ)):
        _add(total, source.batch(np.array([index])))
    return total.hexdigest()


def _add(total: Any, rows: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(rows)[0]:
        leaf = np.asarray(leaf)
        total.update(f"{leaf_name(path)} {leaf.dtype} {leaf.shape} ".encode())
        total.update(leaf.tobytes())


def _in_words(num_samples: int) -> str:
    return "no end" if num_samples >= ENDLESS else f"{num_samples} samples"
