"""Fingerprints of data sets, by which a resumed run notices that its data, or their order, have changed.

A run's order of samples follows from the data set, its length, the seed (in the cursor) and
`Config.shuffle`. All of them are in a checkpoint. A resumed run keeps the seed and the shuffling of the
checkpoint, and is refused if the data set is another one.
"""

import hashlib
import inspect
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxgoodput.data.rows import add_to, leaf_name
from jaxgoodput.data.sources import ENDLESS, ArraySource, Source, is_endless
from jaxgoodput.data.streams import StreamSource

NUM_READ = 8
WHOLE_BYTES = 2**28  # arrays up to this size are digested whole, in up to 0.3 s


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What a checkpoint stores about the data set: its size, digests of its samples, and their order."""

    num_samples: int
    content: str | None = None
    """Digest of samples at fixed places; None if they differ from read to read (random augmentation)."""
    whole: str | None = None
    """Digest of all samples, in their order; None for anything but arrays of at most `WHOLE_BYTES`."""
    stated: str | None = None
    """What the data set says of its own version; None if it does not."""
    shuffle: bool | None = None
    """Whether every epoch has its own order; None if it is not known, or the data set has no end."""

    def difference(self, other: "Fingerprint") -> str | None:
        """Describe how `other` differs from this data set; None if no difference is known."""
        if self.num_samples != other.num_samples:
            return f"has {_in_words(other.num_samples)} instead of {_in_words(self.num_samples)}"
        if None not in (self.stated, other.stated) and self.stated != other.stated:
            return f"has the fingerprint {other.stated!r} instead of {self.stated!r}"
        pairs = ((self.content, other.content), (self.whole, other.whole))
        if all(None in pair or pair[0] == pair[1] for pair in pairs):
            return None
        return "holds other samples, or holds them in another order"


def fingerprint(
    source: Source,
    again: Callable[[Callable[[], Any]], Any] = lambda read: read(),
    *,
    shuffle: bool | None = None,
) -> Fingerprint:
    """Return the fingerprint of a source; `shuffle` says whether its epochs are shuffled, and becomes a part.

    Reads eight samples, one at a time and each twice. If any of them differs, as under random augmentation,
    the fingerprint holds no digest of these samples. Arrays of at most `WHOLE_BYTES` are also digested
    whole. An endless source is not read, because a stream's samples would be lost. If the user's data set
    has an attribute or a method `fingerprint`, its text or number is a part of the fingerprint. Each read is
    a call `again(read)`, which may repeat it (`readers.Attempts`). Raises what reading a sample raises.

    >>> from jaxgoodput.data.datasets import as_source
    >>> fingerprint(as_source(np.arange(10))).difference(fingerprint(as_source(np.arange(11))))
    'has 11 samples instead of 10 samples'
    """
    stated = _stated(source)
    if is_endless(source):
        return Fingerprint(num_samples=len(source), stated=stated)
    places = np.unique(np.linspace(0, len(source) - 1, NUM_READ).astype(np.int64))

    def content() -> str:
        total = hashlib.sha256()
        for place in places:
            add_to(total, again(partial(source.batch, place[None])))
        return total.hexdigest()

    once, twice = content(), content()
    return Fingerprint(
        num_samples=len(source),
        content=once if once == twice else None,
        whole=_whole(source) if type(source) is ArraySource else None,
        stated=stated,
        shuffle=shuffle,
    )


def _stated(source: Source) -> str | None:
    """Return what the user's data set has or returns as `fingerprint`; None if it has no such thing.

    A method that needs arguments is something else of that name, such as the fingerprint of a molecule.
    """
    for dataset in (source, source.dataset):
        found = getattr(dataset, "fingerprint", None)
        if callable(found):
            found = found() if _takes_nothing(found) else None
        if found is None:
            continue
        if isinstance(found, str | numbers.Integral) and not isinstance(found, bool):
            return str(found)
        raise TypeError(
            f"{type(dataset).__name__}.fingerprint is a {type(found).__name__}. It tells this data set from "
            "others when a run resumes: return a string or a whole number, or give the attribute another "
            "name."
        )
    return None


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # ValueError: a function of C that does not say what it takes
        return False
    return True


def _whole(source: ArraySource) -> str | None:
    leaves = jax.tree_util.tree_flatten_with_path(source.arrays)[0]
    if sum(leaf.nbytes for _, leaf in leaves) > WHOLE_BYTES:
        return None
    total = hashlib.sha256()
    for path, leaf in leaves:
        total.update(f"{leaf_name(path)} {leaf.dtype} {leaf.shape} ".encode())
        rows = max(1, 2**24 // max(leaf[:1].nbytes, 1))  # parts that are copied need little memory
        for first in range(0, len(leaf), rows):
            total.update(leaf[first : first + rows].tobytes())
    return total.hexdigest()


def of_stream(source: StreamSource, place: int) -> str:
    """Return a digest of the next samples of a stream, from `place` on.

    The samples must not be in use yet; they remain available for training. Raises what reading a sample
    raises.
    """
    total = hashlib.sha256()
    for index in range(place, place + source.available(place, NUM_READ)):
        add_to(total, source.batch(np.array([index])))
    return total.hexdigest()


def _in_words(num_samples: int) -> str:
    return "no end" if num_samples >= ENDLESS else f"{num_samples} samples"
