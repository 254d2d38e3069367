"""A program, as `jax.jit` needs it, and the shape of the micro-batches that it is made for."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxgoodput._jax import set_priorities
from jaxgoodput._seldom import options_if_seldom
from jaxgoodput.engine.arithmetic import elementary_work
from jaxgoodput.parallel.strategy import DATA_AXIS, FSDP_AXIS, MODEL_AXES

# The order in which the partitioner follows shardings: batches first (their rows are cut over DATA_AXIS),
# then parameters.
PRIORITIES = {axis: 1 for axis in MODEL_AXES} | {FSDP_AXIS: 2}


@dataclass(frozen=True)
class SampleShape:
    """What a micro-batch looks like: samples per replica, and the shapes and types of one sample.

    >>> SampleShape.of(np.zeros((28, 28)), micro_batch_size=4).batch(8).shape
    (8, 28, 28)
    """

    micro_batch_size: int
    """Samples per replica."""
    structure: Hashable
    """Tree structure of one sample."""
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]
    """Shape and type of each leaf of one sample."""

    @classmethod
    def of(cls, sample: PyTree, *, micro_batch_size: int) -> "SampleShape":
        """Return the shape of micro-batches of `sample`, which is an array tree without a batch axis."""
        leaves, structure = jax.tree.flatten(sample)
        return cls(micro_batch_size, structure, tuple((tuple(x.shape), x.dtype) for x in leaves))

    @classmethod
    def of_batch(cls, batch: PyTree, *, micro_batch_size: int) -> "SampleShape":
        """Return the shape of the micro-batches of `batch`, whose leaves have a leading axis."""
        leaves, structure = jax.tree.flatten(batch)
        found = tuple((tuple(x.shape[1:]), x.dtype) for x in leaves)
        return cls(micro_batch_size, structure, found)

    def batch(self, num_samples: int) -> PyTree:
        """Return an abstract batch of `num_samples` samples, without shardings."""
        made = [jax.ShapeDtypeStruct((num_samples, *shape), dtype) for shape, dtype in self.leaves]
        return jax.tree.unflatten(self.structure, made)


@dataclass(frozen=True)
class Program:
    """What `jax.jit` needs to know to compile an executable ahead."""

    function: Callable[..., PyTree]
    """Pure function to compile."""
    donate: tuple[int, ...]
    """Positions of the arguments that the program takes over."""
    arguments: tuple[PyTree, ...]
    """Abstract arguments, with shardings."""
    out: PyTree
    """Shardings of the results; may be a prefix of their tree."""
    is_seldom: bool = False
    """Whether it runs so seldom that it should rather compile fast; see `options_if_seldom`."""

    @cached_property
    def traced(self) -> jax.stages.Traced:
        """The program as JAX has traced it."""
        jitted = jax.jit(self.function, donate_argnums=self.donate, out_shardings=self.out)
        return jitted.trace(*self.arguments)

    def lower(self, platform: str | None = None) -> jax.stages.Lowered:
        """Lower the program so that the compiler follows the batch before it follows the parameters.

        Otherwise every device may compute all samples on its part of the features and sum activations,
        instead of gathering a layer: 5 times the bytes, for a transformer on fsdp 8. `platform`, such as
        "cuda", lowers for other devices than the layout's; such a program can be inspected, but not compiled.
        """
        platforms = None if platform is None else (platform,)
        lowered = self.traced.lower(lowering_platforms=platforms)
        set_priorities(lowered, PRIORITIES, first=DATA_AXIS)
        return lowered

    def compile(self, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
        """Compile the executable on this thread; `options` are the compiler's own."""
        lowered = self.lower()
        if options is not None:
            return lowered.compile(compiler_options=dict(options))
        return self.compiled(lowered)

    def compiled(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile what `lower` has returned."""
        options = seldom_options(self.traced) if self.is_seldom else None
        return lowered.compile(compiler_options=options)


def seldom_options(traced: jax.stages.Traced) -> dict[str, Any] | None:
    """Return the compiler's options for a traced program that runs seldom; see `options_if_seldom`."""
    return options_if_seldom(elementary_work(traced.jaxpr.jaxpr))


def shardings_of(tree: PyTree) -> PyTree:
    """Return the shardings of a tree's leaves."""
    return jax.tree.map(lambda x: x.sharding, tree)
