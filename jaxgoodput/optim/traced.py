"""Traces an optimizer's update once, before training: its arguments, the leaves it moves, and its schedules.

A schedule is called with a count in the optimizer's state. optax's schedules are known by type. In a user's
own state, a lone count is one if updates follow a smooth function of it (`_acts_as_schedule`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, PyTree

from jaxgoodput._pytree import wide_dtype
from jaxgoodput.optim.constants import affected_outputs, constant_outputs

SCHEDULES = ("ScaleByScheduleState", "WrappedScheduleState", "WeightDecaySchedule")
"""Types of optax, by name, that hold the count of a schedule and nothing else."""
BY_UPDATES = {
    "MultiStepsState": "optax.MultiSteps, which changes parameters only in every k-th update",
    "ApplyEvery": "optax.apply_every, which changes parameters only in every k-th update",
    "ConditionallyTransformState": "optax.conditionally_transform, whose condition may count updates",
    "ConditionallyMaskState": "optax.conditionally_mask, whose condition may count updates",
    "SAMState": "optax.contrib.sam, which moves parameters back and forth in turns",
}
"""Wrappers that mean a number of updates, by the type of their state."""
OWN_COUNTS = {
    "ProdigyState": ("optax.contrib.prodigy", "count"),
    "DAdaptAdamWState": ("optax.contrib.dadapt_adamw", "count"),
    "MomoState": ("optax.contrib.momo", "count"),
    "MomoAdamState": ("optax.contrib.momo_adam", "count"),
    "MadgradState": ("optax.contrib.madgrad", "count"),
    "ScaleByAdemamixState": ("optax.contrib.ademamix", "count_m2"),
    "ScaleBySimplifiedAdEMAMixState": ("optax.contrib.simplified_ademamix", "t"),
    "ScheduleFreeState": ("optax.contrib.schedule_free", "step_count"),
}
"""Optimizers that call a schedule with a count of their own, by their state, with the field of the count."""
_COUNTERS = {"MultiStepsState": ("mini_step", "gradient_step"), "ApplyEvery": ("count", "")}
"""Fields that count the updates that a wrapper holds back, and lets through."""
_COUNTS_TO_ADVANCE = (0, 7, 1000)
_NUM_SUCCESSIVE = 32  # successive counts, at which a schedule seldom changes its direction
_MAX_TURNS = 4
_DISTANT = tuple(4**i for i in range(3, 11))


class UnsupportedOptimizer(ValueError):
    """Error: an update cannot be made from gradients, parameters and the loss alone."""


@dataclass(frozen=True)
class TracedUpdate:
    """An optimizer's update as JAX sees it, for parameters of given shapes."""

    tx: optax.GradientTransformationExtraArgs
    """The optimizer, which may be called with any argument, and gets the ones that it accepts."""
    params: PyTree
    """Abstract parameters."""
    state: PyTree
    """Abstract state."""
    jaxpr: ClosedJaxpr
    """The update, with inputs gradients, state, parameters and loss, and outputs updates and state."""

    @property
    def num_leaves(self) -> int:
        """Number of the parameters' leaves."""
        return len(jax.tree.leaves(self.params))

    def moves(self) -> tuple[bool, ...]:
        """Return for each leaf of the parameters whether any update may change it.

        False is proven by induction over updates: the update is 0, whatever the gradient is, if what stays as
        `init` made it in the state has not changed so far (a moment of a gradient that a mask sets to 0).
        """
        found = constant_outputs(self.jaxpr, self.lasting)
        return tuple(x is None or bool(x) for x in found[: self.num_leaves])

    @functools.cached_property
    def lasting(self) -> dict[int, Any]:
        """Values in the state that no update changes, from `init` on, by their place among the inputs."""
        made = constant_outputs(jax.make_jaxpr(self.tx.init)(self.params), {})
        known = {self.num_leaves + i: x for i, x in enumerate(made) if x is not None}
        while True:
            found = constant_outputs(self.jaxpr, known)
            stays = {at: x for at, x in known.items() if found[at] is not None and found[at] == x}
            if len(stays) == len(known):
                return known
            known = stays

    def is_needed(self, place: int) -> bool:
        """Return whether leaf `place` of the state may affect an update, or another leaf of the state."""
        at = self.num_leaves + place
        inputs = [i == at for i in range(len(self.jaxpr.in_avals))]
        outputs = affected_outputs(self.jaxpr, inputs)
        return any(outputs[:at]) or any(outputs[at + 1 :])

    def is_steady(self, place: int) -> bool:
        """Return whether leaf `place` of the state goes up by one in every update of a run."""
        at = self.num_leaves + place

        def advanced(count: int) -> bool:
            after = constant_outputs(self.jaxpr, {**self.lasting, at: count})[at]
            return after is not None and int(after) == count + 1

        largest = jnp.iinfo(self.jaxpr.in_avals[at].dtype).max
        return all(advanced(count) for count in _COUNTS_TO_ADVANCE if count < largest)


@dataclass(frozen=True)
class Clocks:
    """The counts that schedules inside an optimizer are called with, by their paths in its state."""

    steady: frozenset[str]
    """Counts that advance by one in every update, so that progress may take their place."""
    held: tuple[str, ...]
    """Counts that something else in the state may hold, such as a wrapper that skips updates."""


NO_CLOCKS = Clocks(steady=frozenset(), held=())


def traced_update(tx: optax.GradientTransformation, params: PyTree) -> TracedUpdate:
    """Trace an update of `tx`; `params` may be abstract.

    Raises UnsupportedOptimizer if it needs more than gradients, parameters and the loss.
    """
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    grads = jax.tree.map(_gradient_of, params)
    state = jax.eval_shape(tx.init, params)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    for names in (("value",), ()):
        accepting = with_arguments(tx, names)

        def update(grads: PyTree, state: PyTree, params: PyTree, value: Any) -> Any:
            return accepting.update(grads, state, params, value=value)  # noqa: B023 (called at once)

        try:
            jaxpr = jax.make_jaxpr(update)(grads, state, params, loss)
        except Exception as error:
            # A link deep in a chain may refuse the loss, although the chain takes anything.
            if names and "unexpected keyword argument" in str(error):
                continue
            raise UnsupportedOptimizer(_refusal(state, error)) from error
        return TracedUpdate(tx=accepting, params=params, state=state, jaxpr=jaxpr)
    raise AssertionError("unreachable: the last attempt returns or raises")


def with_arguments(
    tx: optax.GradientTransformation, names: tuple[str, ...]
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` with an update that may be called with any argument, and passes on those in `names`."""
    inner = optax.with_extra_args_support(tx)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        given = {name: extra[name] for name in names if name in extra}
        return inner.update(updates, state, params, **given)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def clocks_of(traced: TracedUpdate) -> Clocks:
    """Return the counts that the schedules of an optimizer are called with."""
    steady, held = set(), []
    for place, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(traced.state)):
        if leaf.shape or not jnp.issubdtype(leaf.dtype, jnp.integer):
            continue
        nodes, name = _nodes_along(traced.state, path), jax.tree_util.keystr(path)
        is_known = _is_schedule(nodes, path)
        if not (is_known or _is_lone_count(nodes)):
            continue
        if not traced.is_steady(place):
            # What no update ever advances is no clock: weight decay by a schedule, in optax 0.2.6.
            if is_known and traced.num_leaves + place not in traced.lasting:
                held.append(name)
        elif is_known or _acts_as_schedule(traced, name):
            steady.add(name)
    return Clocks(steady=frozenset(steady), held=tuple(held))


def with_counts_at(state: PyTree, paths: frozenset[str], count: Array) -> PyTree:
    """Return an optimizer's state with the counts at `paths` set to `count`."""
    if not paths:
        return state

    def placed(path: Any, leaf: Any) -> Any:
        if jax.tree_util.keystr(path) not in paths:
            return leaf
        return count.astype(jnp.asarray(leaf).dtype)

    return jax.tree_util.tree_map_with_path(placed, state)


def own_counts(traced: TracedUpdate) -> tuple[str, ...]:
    """Return the optimizers in an update whose own schedules can only go by updates.

    An optimizer whose count affects nothing but itself has no schedule: the rate is a constant. Others may
    have one, or need the count for a sum.
    """
    found: dict[str, None] = {}

    def note(node: Any) -> bool:
        if _is_of_optax(node) and type(node).__name__ in OWN_COUNTS:
            name, field = OWN_COUNTS[type(node).__name__]
            place = getattr(node, field, None)  # None in a version of optax that names it otherwise
            if place is None or traced.is_needed(place):
                found[name] = None
        return False

    jax.tree.leaves(_numbered(traced.state), is_leaf=note)
    return tuple(found)


def by_updates(traced: TracedUpdate) -> tuple[str, ...]:
    """Return the wrappers in an optimizer that mean a number of updates, each with what it does.

    A wrapper that lets every update through (`optax.MultiSteps(tx, 1)`) means none.
    """
    found: dict[str, None] = {}

    def note(node: Any) -> bool:
        kind = type(node).__name__
        if _is_of_optax(node) and kind in BY_UPDATES and not _lets_all_through(traced, node):
            found[BY_UPDATES[kind]] = None
        return False

    jax.tree.leaves(_numbered(traced.state), is_leaf=note)
    return tuple(found)


def _numbered(state: PyTree) -> PyTree:
    """Return a state with the place of each leaf instead of it."""
    leaves, structure = jax.tree.flatten(state)
    return structure.unflatten(range(len(leaves)))


def _lets_all_through(traced: TracedUpdate, numbered: Any) -> bool:
    """Return whether a wrapper, whose state holds the places of its leaves, acts in every update of a run.

    Its count of what it holds back then stays at 0, and the one of what it lets through never stands still.
    """
    of_held, of_passed = _COUNTERS.get(type(numbered).__name__, ("", ""))
    held, passed = (getattr(numbered, name, None) for name in (of_held, of_passed))
    if held is None:
        return False
    stays = traced.lasting.get(traced.num_leaves + held)
    return stays is not None and not stays and (passed is None or traced.is_steady(passed))


def small(params: PyTree, value: float) -> PyTree:
    """Return a tree like `params` whose leaves hold only `value`, in the rank that masks may ask for."""
    return jax.tree.map(lambda x: jnp.full((1,) * len(x.shape), value, x.dtype), params)


def _gradient_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype))


def _is_of_optax(node: Any) -> bool:
    return type(node).__module__.partition(".")[0] == "optax"


def _nodes_along(state: PyTree, path: tuple[Any, ...]) -> list[Any]:
    """Return the containers from the whole state to the one that holds the leaf at `path`."""
    nodes = [state]
    for key in path[:-1]:
        if isinstance(key, jax.tree_util.GetAttrKey):
            nodes.append(getattr(nodes[-1], key.name))
        elif isinstance(key, jax.tree_util.SequenceKey):
            nodes.append(nodes[-1][key.idx])
        elif isinstance(key, jax.tree_util.DictKey):
            nodes.append(nodes[-1][key.key])
        else:  # a node of the user's whose children have no names
            children = jax.tree.leaves(nodes[-1], is_leaf=_other_than(nodes[-1]))
            nodes.append(children[key.key])
    return nodes


def _other_than(node: Any) -> Callable[[Any], bool]:
    return lambda x: x is not node


def _is_schedule(nodes: list[Any], path: tuple[Any, ...]) -> bool:
    """Return whether a count belongs to a schedule of optax, or to one that optax injects."""
    if _is_of_optax(nodes[-1]) and type(nodes[-1]).__name__ in SCHEDULES:
        return True
    return any(
        isinstance(node, optax.InjectStatefulHyperparamsState)
        and getattr(key, "name", None) == "hyperparams_states"
        for node, key in zip(nodes, path, strict=False)
    )


def _is_lone_count(nodes: list[Any]) -> bool:
    """Return whether a user's container holds a count, and beside it only states of optax."""
    *_, holder = nodes
    if _is_of_optax(holder):
        return False
    parts = jax.tree.leaves(holder, is_leaf=_is_of_optax)
    return sum(not _is_of_optax(x) for x in parts) == 1


def _acts_as_schedule(traced: TracedUpdate, path: str) -> bool:
    """Return whether the count at `path` enters the update as a smooth function of it.

    The updates u(count) then differ by multiples of one direction: f(count) g for a learning rate, f(count) p
    for weight decay. A count that makes random keys has several directions, or turns at nearly every step,
    like a count that lets every k-th update through.
    """
    start = small(traced.params, 0.1)

    def gradients(turn: int) -> PyTree:
        leaves, structure = jax.tree.flatten(start)
        sizes = [1e-3 / len(leaves) * (1 + i % 3 + turn) for i in range(len(leaves))]
        made = [
            jnp.full(x.shape, s, _gradient_of(x).dtype) for x, s in zip(leaves, sizes, strict=True)
        ]
        return jax.tree.unflatten(structure, made)

    def updates(count: Array) -> Array:
        state, found = traced.tx.init(start), []
        for turn in range(2):
            state = with_counts_at(state, frozenset([path]), count)
            moved, state = traced.tx.update(gradients(turn), state, start, value=jnp.ones(()))
            found += [jnp.sum(jnp.real(x)) for x in jax.tree.leaves(moved)]
        return jnp.stack(found)

    counts = jnp.array([*range(_NUM_SUCCESSIVE), *_DISTANT], jnp.int32)
    try:
        found = np.asarray(jax.jit(jax.vmap(updates))(counts), np.float64)
    except Exception as error:  # a user's own link may raise anything
        logging.info("cannot try the count %s in the optimizer's state: %r", path, error)
        return False
    size = np.abs(found).max()
    directions, sizes, _ = np.linalg.svd(found - found[-1], full_matrices=False)
    if sizes[0] <= 1e-5 * size:
        return False  # what it does, it does not do to updates
    steps = np.diff(directions[:_NUM_SUCCESSIVE, 0] * sizes[0])
    steps = steps[np.abs(steps) > 1e-5 * size]
    turns = int(np.sum(steps[1:] * steps[:-1] < 0))
    is_schedule = bool(sizes[1:].max(initial=0) <= 1e-3 * sizes[0]) and turns <= _MAX_TURNS
    if not is_schedule:
        logging.info(
            "the count %s in the optimizer's state is not the argument of a schedule, so it counts updates.",
            path,
        )
    return is_schedule


def _refusal(state: PyTree, error: Exception) -> str:
    """Return a sentence on an update that cannot be made, with what to use instead."""
    kinds: set[str] = set()
    jax.tree.leaves(state, is_leaf=lambda node: kinds.add(type(node).__name__) or False)
    said = f"{type(error).__name__}: {str(error).strip().splitlines()[0].rstrip('.') if str(error) else ''}"
    if "LookaheadState" in kinds:
        advice = (
            "optax.lookahead needs parameters of its own kind, LookaheadParams, and gradients of half of "
            "them. Leave it out; Config.ema keeps an average of the parameters"
        )
    elif "SAMState" in kinds:
        advice = (
            "optax.contrib.sam with opaque_mode=True computes gradients of its own. Use opaque_mode=False "
            'with Config.policy "fixed"'
        )
    elif "DifferentiallyPrivateAggregateState" in kinds:
        advice = (
            "optax.contrib.differentially_private_aggregate needs one gradient per sample, and gets their "
            "mean. Leave that link out"
        )
    elif any(words in str(error) for words in ("missing", "must be provided")):
        advice = "A line search (lbfgs) or a Hessian (sophia) is not supported: leave that link out"
    else:
        return (
            f"optimizer() cannot make an update from gradients, parameters and the loss: {said}. It must "
            "work in a loop of optax's own: updates, state = tx.update(grads, tx.init(params), params)."
        )
    return (
        "optimizer() has a link that asks for more than gradients, parameters and the loss: "
        f"{said}. {advice}."
    )
