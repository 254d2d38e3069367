"""Programs that find lost values: of a whole state, and of a part of its large leaves between two saves.

A lost value was finite when the run began and is not any more (`lost_values`). A step checks the updates of
small leaves before it applies them (`engine.step`). Checking all would write every update to memory. So the
whole state is checked when it is saved, and parts of the large leaves once in `GLANCE_EVERY` steps.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.programs.families import Programs
from jaxgoodput.engine.programs.program import Program
from jaxgoodput.engine.programs.rows import RowPrograms
from jaxgoodput.engine.state import TrainState, host_copy, split
from jaxgoodput.engine.step import SMALL
from jaxgoodput.parallel.strategy import Layout
from jaxgoodput.train.checkpoints.meta import CheckpointMeta
from jaxgoodput.train.start.lost_values import (
    Origin,
    any_lost,
    any_not_finite,
    floats,
    how_bad_on_host,
    num_lost,
)

# Large leaves are checked in so many parts, one at each check. A step passes over its parameters at least
# five times, so that a check costs less than a thousandth of the steps since the one before.
GLANCE_EVERY, NUM_PARTS = 100, 4
# A step reads few rows of a table, so the part of its slots does not grow with the table up to some size.
SLOT_PART_BYTES, MOST_SLOT_PARTS = 2**21, 256
# Equal leaves that one reduction takes: it compiles in a fraction of the time, and they still fuse on GPUs.
MOST_ALIKE = 32


@dataclass(frozen=True)
class ValueChecks:
    """Checks the values of a run's states; `origin` has the values that were not finite when it began."""

    origin: Origin
    _codes: dict[Layout, Mapping[str, Array]] = field(default_factory=dict, init=False)
    # Places of the large leaves among the parameters: finding them takes longer than a small step.
    _places: dict[Layout, Sequence[int]] = field(default_factory=dict, init=False)

    def compile(self, engine: Engine) -> None:
        """Compile the programs of an engine."""
        engine.compile_program(partial(lost_program, engine.programs, self._began))
        for program in self._glances(engine):
            engine.compile_program(program)
        self._codes_on(engine)
        large = large_leaves(engine.programs)
        named, _ = jax.tree_util.tree_flatten_with_path(engine.programs.abstract_state().params)
        paths = [f".params{jax.tree_util.keystr(path)}" for path, _ in named]
        self._places[engine.layout] = [i for i, path in enumerate(paths) if path in large]

    def lost(self, engine: Engine, state: TrainState) -> dict[str, int]:
        """Return how many values of a state are lost, by path; good leaves are left out. Waits for it.

        If the state spans processes, all of them call this together.
        """
        leaves, codes = floats(state), self._codes_on(engine)
        run = engine.compiled(lost_program, engine.programs, self._began)
        flags = jax.device_get(run(leaves, codes))
        groups = alike(floats(engine.programs.abstract_state()), self._began)
        pairs = zip(groups, flags, strict=True)
        suspects = {path for group, is_bad in pairs if is_bad for path in group}
        # In the order of the state, which messages keep: parameters come first.
        counts = [(p, num_lost(x, codes.get(p))) for p, x in leaves.items() if p in suspects]
        return {path: int(count) for path, count in jax.device_get(counts) if count}

    def glance(
        self, engine: Engine, state: TrainState, slots: Mapping[str, Array]
    ) -> tuple[Array, ...]:
        """Start the check of the parts whose turn it is; returns whether values are lost, on the device.

        Nothing waits, and nothing is compiled: what is not compiled yet is left out.
        """
        programs, found = engine.programs, []
        run = engine.compiled.peek(glance_program, programs, self._began)
        if run is not None:
            params, codes = jax.tree.leaves(state.params), self._codes_on(engine)
            found.append(run(state.step, [params[i] for i in self._places[engine.layout]], codes))
        if slots and (run := engine.compiled.peek(slot_program, programs)) is not None:
            found.append(run(state.step, dict(slots)))
        return tuple(found)

    def _glances(self, engine: Engine) -> list[partial[Program]]:
        programs, found = engine.programs, []
        if large_leaves(programs):
            found.append(partial(glance_program, programs, self._began))
        if isinstance(programs, RowPrograms):
            found.append(partial(slot_program, programs))
        return found

    @cached_property
    def _began(self) -> tuple[str, ...]:
        return tuple(sorted(self.origin.codes))

    def _codes_on(self, engine: Engine) -> Mapping[str, Array]:
        """Return the codes of leaves that did not begin finite, on the shardings of these leaves."""
        if engine.layout not in self._codes:
            leaves = floats(engine.abstract_state()) if self.origin.codes else {}
            self._codes[engine.layout] = {
                path: jax.make_array_from_callback(
                    x.shape, leaves[path].sharding, lambda index, x=x: x[index]
                )
                for path, x in self.origin.codes.items()
            }
        return self._codes[engine.layout]


def origin_of(engine: Engine, state: TrainState, meta: CheckpointMeta | None) -> Origin:
    """Return which values of a run's first state were not finite; `meta` is of what it resumes from, if so.

    Processes whose state spans them call this together.
    """
    if meta is None:
        lost = ValueChecks(Origin()).lost(engine, state)
        leaves = floats(state)
        return Origin({path: how_bad_on_host(np.asarray(host_copy(leaves[path]))) for path in lost})
    shapes = {path: kind.shape for path, kind in meta.leaves.items()}
    codes = dict(Origin.unpacked(meta.began, shapes).codes)
    # An average that this run has added began as a copy of the parameters.
    for path in floats(state).keys() - meta.leaves.keys():
        source = ".params" + path.removeprefix(".ema")
        if source in codes:
            codes[path] = codes[source]
    return Origin(codes)


# -- programs ----------------------------------------------------------------------------------------


def lost_program(programs: Programs, began: tuple[str, ...]) -> Program:
    """Build the check of a whole state: whether any value in each group of leaves is lost, bool `[groups]`.

    It goes from the state's floats by path, and the codes of the leaves in `began`, to a flag for each group
    of `alike`.
    """
    leaves = floats(programs.abstract_state())
    groups = alike(leaves, began)

    def run(leaves: dict[str, Array], codes: dict[str, Array]) -> Array:
        flags = [
            any_lost_in([leaves[path] for path in group], codes.get(group[0])) for group in groups
        ]
        return jnp.stack(flags)

    return Program(run, (), (leaves, _codes_like(leaves, began)), programs.layout.replicated)


def alike(leaves: Mapping[str, Any], apart: Collection[str]) -> list[list[str]]:
    """Return the paths of abstract leaves in groups of one shape, type and sharding; those in `apart` alone.

    A group has at most `MOST_ALIKE` leaves.
    """
    groups: dict[Hashable, list[str]] = {}
    for path in sorted(leaves):
        x = leaves[path]
        kind = path if path in apart else (x.shape, x.dtype, x.sharding)
        groups.setdefault(kind, []).append(path)
    starts = [(group, i) for group in groups.values() for i in range(0, len(group), MOST_ALIKE)]
    return [group[i : i + MOST_ALIKE] for group, i in starts]


def any_lost_in(leaves: Sequence[Array], began: Array | None) -> Array:
    """Return whether any value of a group of leaves is lost; with `began`, of its only leaf."""
    return any_not_finite(leaves) if began is None else any_lost(leaves[0], began)


def large_leaves(programs: Programs) -> dict[str, Any]:
    """Return the trainable parameters whose updates no step checks, abstract, by path in the state."""
    params = programs.abstract_state().params
    kept, _ = split(params, programs.problem.mask(params))
    found = {f".params{path}": leaf for path, leaf in floats(kept).items()}
    return {path: leaf for path, leaf in found.items() if leaf.size > SMALL}


def glance_program(programs: Programs, began: tuple[str, ...]) -> Program:
    """Build the check of a part of the large leaves: whether any value there is lost.

    It goes from the state's step count, which chooses the part, those leaves in order, and the codes of the
    leaves in `began`, to one bool.
    """
    large = large_leaves(programs)
    number, groups = {path: i for i, path in enumerate(large)}, alike(large, began)
    axes = {path: _uncut_axis(leaf) for path, leaf in large.items()}

    def run(step: Array, leaves: list[Array], codes: dict[str, Array]) -> Array:
        turn, found = step // GLANCE_EVERY % NUM_PARTS, jnp.zeros((), bool)
        for group in groups:
            part = partial(_part, axis=axes[group[0]], turn=turn, num_parts=NUM_PARTS)
            code = codes.get(group[0])
            parts = [part(leaves[number[path]]) for path in group]
            found |= any_lost_in(parts, None if code is None else part(code))
        return found

    codes = _codes_like(floats(programs.abstract_state()), began)
    arguments = (programs.abstract_state().step, [*large.values()], codes)
    return Program(run, (), arguments, programs.layout.replicated)


def slot_program(programs: Programs) -> Program:
    """Build the check of a part of the slots of all tables: whether any value there is not finite.

    It goes from the state's step count, which chooses the part, and the slots to one bool.
    """

    of_rows = cast(RowPrograms, programs)

    def run(step: Array, slots: dict[str, Array]) -> Array:
        found = jnp.zeros((), bool)
        for name, words in slots.items():
            num_parts = min(-(-words.size * 4 // SLOT_PART_BYTES), MOST_SLOT_PARTS)
            turn = step // GLANCE_EVERY % num_parts
            rows = of_rows.tables[name].layout.unpack(_part(words, 0, turn, num_parts))
            for x in rows.values():
                if jnp.issubdtype(x.dtype, jnp.inexact):
                    found |= any_lost(x)
        return found

    arguments = (programs.abstract_state().step, of_rows.abstract_slots())
    return Program(run, (), arguments, programs.layout.replicated)


def _codes_like(leaves: Mapping[str, Any], began: Iterable[str]) -> dict[str, Any]:
    """Return the abstract codes of the leaves in `began`."""
    return {
        path: jax.ShapeDtypeStruct(leaves[path].shape, jnp.int8, sharding=leaves[path].sharding)
        for path in began
        if path in leaves
    }


def _uncut_axis(leaf: Any) -> int | None:
    """Return the first axis that no device cuts and that has `NUM_PARTS` elements; None if there is none."""
    spec = (*leaf.sharding.spec, *[None] * leaf.ndim)
    fits = (a for a in range(leaf.ndim) if spec[a] is None and leaf.shape[a] >= NUM_PARTS)
    return next(fits, None)


def _part(x: Array, axis: int | None, turn: Array, num_parts: int) -> Array:
    """Return a part of an array along an axis, all of it for None. The last part may overlap others."""
    if axis is None:
        return x
    size = -(-x.shape[axis] // num_parts)
    return jax.lax.dynamic_slice_in_dim(x, turn * size, size, axis)
