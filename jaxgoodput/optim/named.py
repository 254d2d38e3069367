"""Named updates: several optimizers, each of which moves the part of the parameters with its name.

`named` makes one `AdaptiveOptimizer` of one for each part. Every part keeps its own state of `adaptive`: its
noise, its gain, its progress, and the limit on the growth of the gain. All parts move in every update, or
they take turns. Between its turns a part stays as it is, to the bit: parameters, optimizer and statistics.

One batch serves all parts, so its worth is a mean over them. Losses of different parts have different units,
so their signals cannot be added up. Instead each part counts by its share of the updates: its signal and
noise are divided by its signal and multiplied by that share. The joint statistics are an ordinary
`Adaptation`, from which the batch is chosen as for a single optimizer.

Progress is joint, too: an update is worth the same base steps for all parts, apart from the share that the
growth of a part's own gain holds back. Schedules of a part follow the progress of its own updates, which at a
fixed batch is their number, as in a loop by hand. Two parts in equal turns thus stay together when the batch
grows, even if one of them has more noise.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from jaxgoodput._pytree import PackedTree, struct, wide_dtype
from jaxgoodput.goodput.efficiency import GradGroups
from jaxgoodput.optim import noise as noises
from jaxgoodput.optim.adaptation import (
    Adaptation,
    AdaptiveState,
    Findings,
    NoiseReadout,
    added,
    passed_over,
    watched,
    whole,
)
from jaxgoodput.optim.adaptive import AdaptiveOptimizer, UpdateDecision, as_one
from jaxgoodput.optim.learning_rate import adascale
from jaxgoodput.optim.noise import NoiseSample, NoiseState


@dataclass(frozen=True)
class InTurns:
    """Optimizers that take turns: an update moves the part of the parameters with one name.

    Return it from `Trainer.optimizer` instead of a plain dict, whose optimizers all move in every update. The
    turns follow the order of `optimizers`. For five updates of a critic before each one of a generator, write
    `InTurns({"critic": tx, "generator": other}, {"critic": 5})`.

    Raises ValueError if there are fewer than two optimizers, or if a count is not at least 1.
    """

    optimizers: Mapping[str, optax.GradientTransformation]
    """Optimizers by the name of the part, the key of the parameters, that they move."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Updates in a row for each name, 1 unless given."""

    def __post_init__(self):
        if len(self.optimizers) < 2:
            raise ValueError(
                f"InTurns got {len(self.optimizers)} optimizers, and turns take at least two. Return a "
                "single optimizer as it is."
            )
        for name, count in self.counts.items():
            if name not in self.optimizers:
                raise ValueError(
                    f"InTurns counts updates of {name!r}, and its optimizers are "
                    f"{', '.join(map(repr, self.optimizers))}. Use one of these names."
                )
            if not (isinstance(count, int) and not isinstance(count, bool) and count >= 1):
                raise ValueError(
                    f"InTurns.counts[{name!r}] is {count!r}. It is a number of updates in a row, an integer "
                    "of at least 1."
                )

    @property
    def cycle(self) -> tuple[str, ...]:
        """Names of the parts that move in successive updates, from the first one until they repeat."""
        return tuple(name for name in self.optimizers for _ in range(self.counts.get(name, 1)))


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Which of the named parts move in an update."""

    names: tuple[str, ...]
    """Names of all parts, sorted."""
    cycle: tuple[str, ...] = ()
    """Names of the parts that move in successive updates; (): all of them move in each."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the updates that each part takes; they add up to 1."""
        return tuple((self.cycle or self.names).count(x) / self.period for x in self.names)

    @property
    def period(self) -> int:
        """Updates until the turns repeat; without turns, the number of parts."""
        return len(self.cycle or self.names)

    def at(self, step: Any) -> Array:
        """Return the index of the part that moves in the update after `step` others. A traced int32."""
        order = jnp.asarray([self.names.index(name) for name in self.cycle], jnp.int32)
        return order[jnp.asarray(step, jnp.int32) % len(self.cycle)]

    def moves(self, index: int, turn: Array | None) -> Array | None:
        """Return whether the part with this index moves, a bool; None if all parts always do."""
        return None if turn is None else turn == index


@dataclass(frozen=True, kw_only=True)
class NamedPart:
    """One part of the parameters: its optimizer, and the leaves on which its noise is measured."""

    tx: AdaptiveOptimizer
    """Optimizer of the part alone, made by `adaptive`."""
    seen: Callable[[PyTree], PyTree]
    """Option of `adaptive` that `tx` was made with."""


@struct
class NamedDecision(UpdateDecision):
    """What an update is going to do for all parts together, and for each of them."""

    parts: Mapping[str, UpdateDecision]
    """Decision of each part. A part that does not move keeps its state, whatever its decision says."""
    turn: Any = None
    """Index of the part that moves; None: all of them do."""


def named(
    parts: Mapping[str, NamedPart], turns: Turns, *, base_batch_size: int
) -> AdaptiveOptimizer:
    """Return one optimizer of parameters that are a dict with a key for each part.

    Its `update` takes the arguments of `adaptive`, and `turn`, the index of the part that moves (`Turns.at`);
    None: all of them move. `noise` is of the seen leaves of all parts, in the order of `turns.names`, with
    one `num_groups` for each part, and `value` has one loss for each part. Its state is an `AdaptiveState`
    whose `inner` holds the `AdaptiveState` of each part by name, and whose `own` is about all parts together.
    """
    made = _Named(
        parts=MappingProxyType({name: parts[name] for name in turns.names}),
        turns=turns,
        base_batch_size=base_batch_size,
    )
    return AdaptiveOptimizer.of(made.init, made.update, made.decide, made.watched, made.skipped)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Named:
    """The arguments of `named`, and the functions that it returns."""

    parts: Mapping[str, NamedPart]
    turns: Turns
    base_batch_size: int

    def init(self, params: Any) -> Any:
        """Return the state before the first update."""
        # optax's types know only trees of arrays.
        inner: Any = {name: part.tx.init(params[name]) for name, part in self.parts.items()}
        owns = [inner[name].own.tree for name in self.parts]
        noise = noises.init_noise(sum(x.noise.current.sqr.size - 1 for x in owns))
        groups = noises.init_noise(sum(x.groups.current.sqr.size - 1 for x in owns))
        own = Adaptation.first(
            noise,
            groups,
            _findings(noise, groups),
            num_factors=sum(x.gain.size for x in owns),
            num_rules=0,
        )
        return AdaptiveState(inner=inner, own=PackedTree.of(own))

    def decide(
        self,
        updates: Any,
        state: AdaptiveState,
        *,
        global_batch_size: Any,
        noise: NoiseSample | None = None,
        biased: Any = False,
        turn: Array | None = None,
    ) -> NamedDecision:
        """Return what the update for such gradients does, apart from the leaves."""
        own = state.own.tree
        scale = jnp.asarray(global_batch_size, own.progress.dtype) / self.base_batch_size
        worth = adascale(scale, as_one(own.findings.trusted, scale))
        samples = self._samples(noise, updates)
        decided: dict[str, UpdateDecision] = {}
        for index, (name, part) in enumerate(self.parts.items()):
            old = state.inner[name]
            made = part.tx.decide(
                updates[name],
                old,
                global_batch_size=global_batch_size,
                noise=samples[name],
                biased=biased,
                worth=worth,
            )
            moves = self.turns.moves(index, turn)
            if moves is not None:
                vector = jnp.where(moves, made.own.vector, old.own.vector)
                made = dataclasses.replace(
                    made,
                    own=dataclasses.replace(made.own, vector=vector),
                    factors=jnp.where(moves, made.factors, old.own.tree.gain),
                    progressed=jnp.where(moves, made.progressed, 0),
                )
            decided[name] = made
        each = [one.progressed for one in decided.values()]
        # With turns, one part alone has made any progress.
        progressed = sum(each) if self.turns.cycle else sum(each) / len(each)
        progressed = jnp.asarray(progressed)
        progress, progress_rest = added(own.progress, own.progress_rest, progressed)
        base_batches, base_batches_rest = added(own.base_batches, own.base_batches_rest, scale)
        factors = jnp.concatenate([one.factors for one in decided.values()])
        changed = dataclasses.replace(
            own,
            progress=progress,
            progress_rest=progress_rest,
            base_batches=base_batches,
            base_batches_rest=base_batches_rest,
            gain=factors,
        )
        if noise is not None:
            changed = self._measured(changed, [one.own.tree for one in decided.values()])
        return NamedDecision(
            own=state.own.replaced(own, changed),
            factors=factors,
            count=whole(own.progress, own.progress_rest),
            done=own.progress + own.progress_rest,
            progressed=progressed,
            parts=decided,
            turn=turn,
        )

    def update(
        self,
        updates: Any,
        state: AdaptiveState,
        params: Any,
        *,
        value: Array,
        global_batch_size: Any,
        noise: NoiseSample | None = None,
        turn: Array | None = None,
        decided: NamedDecision | None = None,
    ) -> tuple[PyTree, Any]:
        """Return the updates for averaged gradients, and the new state."""
        about = {"global_batch_size": global_batch_size, "noise": noise}
        if decided is None:
            decided = self.decide(updates, state, turn=turn, **about)
        scale = jnp.asarray(global_batch_size, value.dtype) / self.base_batch_size
        moved, inner = dict(updates), {}
        for index, (name, part) in enumerate(self.parts.items()):
            one, old = decided.parts[name], state.inner[name]

            def run(index=index, name=name, part=part, one=one, old=old) -> tuple[PyTree, Any]:
                norm = jnp.sqrt(sum(map(_squared, jax.tree.leaves(updates[name]))))
                own = watched(one.own, norm, scale, one.progressed)
                return part.tx.update(
                    updates[name],
                    old,
                    params[name],
                    decided=dataclasses.replace(one, own=own),
                    value=value[index],
                    **about,
                )

            moves = self.turns.moves(index, turn)
            if moves is None:
                moved[name], inner[name] = run()
                continue
            like = jax.eval_shape(run)[0]

            def stay(like=like, old=old) -> tuple[PyTree, Any]:
                # x + -0.0 is x to the bit, also for x = -0.0.
                return jax.tree.map(lambda x: jnp.full(x.shape, -0.0, x.dtype), like), old

            moved[name], inner[name] = jax.lax.cond(moves, run, stay)
        return moved, AdaptiveState(inner=inner, own=decided.own)

    def watched(
        self, decided: UpdateDecision, inner: Any, grad_norm: Array, scale: Array
    ) -> PackedTree[Adaptation]:
        """Return what is about all parts after the update. Each part has watched its own gradient.

        The limit of any part holds for all, which is cautious: others may bear more.
        """
        del grad_norm, scale
        assert isinstance(decided, NamedDecision)
        own = decided.own.tree
        growths = [inner[name].own.tree.growth for name in self.parts]
        limits = jnp.stack([one.most_worth for one in growths])
        least = jnp.min(jnp.where(limits > 0, limits, jnp.finfo(limits.dtype).max))
        is_limited = jnp.any(limits > 0)
        # Of a part that keeps its state, the gradient exploded in an update before.
        explodes = [
            one.explodes & (True if (moves := self.turns.moves(i, decided.turn)) is None else moves)
            for i, one in enumerate(growths)
        ]
        growth = dataclasses.replace(
            own.growth,
            explodes=jnp.any(jnp.stack(explodes)),
            # So that `most_worth` is the least of the parts'.
            exploded=is_limited.astype(limits.dtype),
            worth=jnp.where(is_limited, least, 1),
        )
        return decided.own.replaced(own, dataclasses.replace(own, growth=growth))

    def skipped(self, inner: Any, scale: Array, *, turn: Array | None = None) -> dict[str, Any]:
        """Return the states of the parts after a batch that is skipped: its samples count for a turn."""
        found = {}
        for index, name in enumerate(self.parts):
            old = inner[name]
            moves = self.turns.moves(index, turn)
            counted = scale if moves is None else jnp.where(moves, scale, 0)
            found[name] = passed_over(old, counted)
        return found

    def _samples(self, noise: NoiseSample | None, updates: Any) -> dict[str, NoiseSample | None]:
        """Return the noise sample of each part."""
        if noise is None:
            return dict.fromkeys(self.parts)
        found: dict[str, NoiseSample | None] = {}
        at = 0
        for index, (name, part) in enumerate(self.parts.items()):
            own = slice(at, at := at + len(jax.tree.leaves(part.seen(updates[name]))))
            found[name] = NoiseSample(
                small_sqr=noise.small_sqr[own],
                large_sqr=noise.large_sqr[own],
                num_groups=noise.num_groups[index],
                num_samples=noise.num_samples,
                moment=None if noise.moment is None else noise.moment[own],
            )
        return found

    def _measured(self, own: Adaptation, parts: list[Adaptation]) -> Adaptation:
        """Return what is about all parts, with their statistics joined.

        What is expected of a part's signal rests on that part alone: its share is not to change with others'.
        """
        found = [part.findings for part in parts]
        factors = [
            _factor(one.trusted.sqr, share)
            for one, share in zip(found, self.turns.shares, strict=True)
        ]
        noise = noises.joined([x.noise for x in parts], factors, own.noise)
        groups = noises.joined([x.groups for x in parts], factors, own.groups)
        known = jnp.all(jnp.stack([one.trusted.known for one in found]))

        def together(moments: Sequence[Array]) -> Array:
            return jnp.concatenate([f * x for f, x in zip(factors, moments, strict=True)])

        trusted = GradGroups(
            sqr=together([one.trusted.sqr for one in found]),
            var=together([one.trusted.var for one in found]),
            known=known,
        )
        readouts = [one.readout for one in found]
        plain = _findings(noise, groups).readout
        readout = dataclasses.replace(
            plain,
            known=known,
            group_sqr=together([one.group_sqr for one in readouts]),
            group_var=together([one.group_var for one in readouts]),
            # A guess about one part makes a guess of all.
            seen_groups=jnp.min(jnp.stack([one.seen_groups for one in readouts])),
        )
        joint = Findings(readout=readout, trusted=trusted, by_label=None)
        # What an earlier run has found holds until all parts are known.
        findings = jax.tree.map(lambda new, old: jnp.where(known, new, old), joint, own.findings)
        return dataclasses.replace(own, noise=noise, groups=groups, findings=findings)


def _factor(signals: Array, share: float) -> Array:
    """Return what a part's moments are multiplied by for its signals to add up to its share."""
    signal = jnp.sum(signals)
    return jnp.where(signal > 0, share / jnp.where(signal > 0, signal, 1), 0)


def _findings(noise: NoiseState, groups: NoiseState) -> Findings:
    readout = NoiseReadout.of(noise, groups)
    return Findings(readout=readout, trusted=noises.expected_groups(groups), by_label=None)


def _squared(leaf: Any) -> Array:
    """Return the squared norm of a leaf, in single precision at least."""
    size = jnp.abs(jnp.asarray(leaf))
    return jnp.sum(jnp.square(size.astype(wide_dtype(size.dtype))))


def coprime(every: int, period: int) -> int:
    """Return the least number from `every` on that shares no divisor with `period`.

    Of steps that are so far apart, each place in a cycle of `period` steps has as many.

    >>> coprime(10, 6)
    11
    """
    while math.gcd(every, period) > 1:
        every += 1
    return every
