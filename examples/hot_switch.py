r"""python examples/hot_switch.py

One batch under two parallel layouts. A byte-level transformer reads functions of Python's standard library:
half of them have fewer than 260 bytes, some 16,000 (cut off at `--longest`). Every update contains short and
long ones. The same update is computed in four ways:

  best single strategy, padded    every function padded to the longest, under one strategy
  best single strategy, grouped   functions grouped by length, each group padded to its own length
  mixed                           short groups under data parallelism, long ones under another strategy
  mixed, without switching        the same, with a copy of the state on both layouts

Expect on two CPU cores with 8 virtual devices, in three to four minutes: "mixed" has at least 1.2 times the
tokens per second of the first row (2.1 was measured); the losses of all rows agree to 1e-5 at every update;
nothing compiles during the measurement. Virtual devices share the cores, so a second strategy cannot gain
anything over the second row there (1.00 was measured). If there are several accelerators, they are all used
(`JAX_PLATFORMS=cpu` prevents this).

Each kind of plan is first tried with several strategies on other functions, and the fastest of each kind
becomes a row. Rows take turns at every update. "Without switching" keeps the state on each layout, and the
clock stops while gradients and state move between them; it runs for the start, every micro-batch, each
layout's reduction and the update.

    python examples/hot_switch.py --larger

trains a model whose parameters and Adam moments exceed one device's memory, sharded over all devices (FSDP).
The limit is the accelerator's memory, or `--memory_mib` (64 on a CPU, where nothing enforces it). XLA's
analysis of the compiled step gives the memory that a step needs. Expect a loss below 4 nats per byte after 20
steps.
"""

import bisect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import byte_model
import corpora
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jaxgoodput as jg

_DOCUMENTS = flags.DEFINE_integer("documents", 48, "Functions per update.")
_UPDATES = flags.DEFINE_integer("updates", 6, "Measured updates of each row.")
_LONGEST = flags.DEFINE_integer("longest", 1024, "Bytes at which functions are cut off.")
_NUM_GROUPS = flags.DEFINE_integer("num_groups", 3, "Lengths that functions are padded to.")
_DIM = flags.DEFINE_integer("dim", 64, "Width of the model; a multiple of 8.")
_NUM_LAYERS = flags.DEFINE_integer("num_layers", 2, "Layers of the model.")
_TENSOR = flags.DEFINE_list("tensor", [], "Degrees of tensor parallelism; none: half the devices.")
_STAGES = flags.DEFINE_list("stages", ["2"], "Stages of pipelines, where they divide the layers.")
_LARGER = flags.DEFINE_bool("larger", False, "Train a model larger than one device instead.")
_MEMORY_MIB = flags.DEFINE_integer("memory_mib", None, "Memory of a device, for --larger.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps of --larger.")

PADDED, GROUPED, MIXED = "single, padded", "single, grouped", "mixed"
WITHOUT_SWITCHING = "mixed, without switching"
MOST_LOSS_DIFFERENCE = 1e-5
TRIAL_UPDATES = 2
LARGER_LAYERS, LARGER_LENGTH = 8, 256

Documents = Sequence[np.ndarray]  # each is uint8 [length]


# -- plans -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Functions up to a length, the strategy that computes them, and the rows of one replica."""

    length: int
    strategy: jg.Strategy
    micro_batch_size: int

    @property
    def num_rows(self) -> int:
        """Return the functions in one micro-batch, over all replicas."""
        return self.strategy.num_replicas * self.micro_batch_size

    @property
    def shape(self) -> jg.SampleShape:
        """Return the shape of a micro-batch."""
        sample = byte_model.sample(self.length)
        return jg.SampleShape.of(sample, micro_batch_size=self.micro_batch_size)


@dataclass(frozen=True)
class Plan:
    """How the updates of one row are computed. The state is on the first group's layout."""

    kind: str
    groups: tuple[Group, ...]  # by ascending length

    @property
    def home(self) -> jg.Strategy:
        return self.groups[0].strategy

    @property
    def name(self) -> str:
        longest = {group.strategy.name: group.length for group in self.groups}
        names = [f"<={length} {strategy}" for strategy, length in longest.items()]
        return ", ".join(names) if self.kind == MIXED else self.home.name

    def micro_batches(self, documents: Documents) -> list[tuple[Group, jg.lengths.PaddedRows]]:
        """Return the functions of one update, grouped and padded."""
        sizes = [len(document) for document in documents]
        split = jg.lengths.split_by_length(sizes, [group.length for group in self.groups])
        return [
            (group, rows)
            for group, indices in zip(self.groups, split, strict=True)
            for rows in jg.lengths.micro_batches(
                [documents[i] for i in indices], length=group.length, num_rows=group.num_rows
            )
        ]

    def num_positions(self, documents: Documents) -> int:
        """Return the bytes that an update computes, including padding."""
        return sum(rows.tokens.size for _, rows in self.micro_batches(documents))


def strategies_for(num_devices: int) -> tuple[jg.Strategy, ...]:
    """Return the strategies to try: data parallelism, FSDP, and the degrees of `--tensor` and `--stages`."""
    chosen = [int(degree) for degree in _TENSOR.value] or [
        min(byte_model.NUM_HEADS, max(2, num_devices // 2))
    ]
    tensor = [jg.Strategy(data=-1, tensor=degree).resolved(num_devices) for degree in chosen]
    stages = [int(degree) for degree in _STAGES.value if _NUM_LAYERS.value % int(degree) == 0]
    pipelines = [jg.Strategy(data=-1, stage=degree).resolved(num_devices) for degree in stages]
    return (jg.Strategy(data=num_devices), jg.Strategy(fsdp=num_devices), *tensor, *pipelines)


def plans_for(
    strategies: Sequence[jg.Strategy], lengths: Sequence[int], updates: Sequence[Documents]
) -> list[Plan]:
    """Return plans: every strategy padded and grouped, and the first mixed with each for the longest."""

    def groups(chosen: Sequence[jg.Strategy], lengths: Sequence[int]) -> tuple[Group, ...]:
        splits = [jg.lengths.split_by_length([len(d) for d in u], lengths) for u in updates]
        found = []
        for i, (strategy, length) in enumerate(zip(chosen, lengths, strict=True)):
            # A device holds the activations of at most one function of the longest length, or as many bytes
            # of shorter ones. Tensor parallelism shares them; a pipeline has one micro-batch per stage.
            largest = lengths[-1] * strategy.tensor // length
            size = jg.lengths.rows_per_replica(
                [-(-len(split[i]) // strategy.stage) for split in splits],
                strategy.num_replicas,
                largest=largest,
            )
            found.append(Group(length, strategy, size * strategy.stage))
        return tuple(found)

    plans = [Plan(PADDED, groups([s], lengths[-1:])) for s in strategies]
    plans += [Plan(GROUPED, groups([s] * len(lengths), lengths)) for s in strategies]
    for other in strategies[1:]:
        chosen = [strategies[0]] * (len(lengths) - 1) + [other]
        plans.append(Plan(MIXED, groups(chosen, lengths)))
    return plans


# -- training --------------------------------------------------------------------------------------


class Run:
    """The training of one plan: its state, and the seconds and loss of each update."""

    def __init__(self, name: str, plan: Plan, engine: jg.Engine, state: jg.TrainState):
        self.name, self.plan, self.engine = name, plan, engine
        devices = list(engine.layout.mesh.devices.flat)
        self.layouts = {group: group.strategy.on(devices) for group in plan.groups}
        self.engine.compile_batches(
            [(layout, group.shape) for group, layout in self.layouts.items()]
        )
        self.state = jax.tree.map(jnp.copy, state)  # updates donate the state
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def update(self, documents: Documents) -> None:
        """Compute one update, timed from the first micro-batch (already on the devices) to the new state."""
        pieces = []
        for group, rows in self.plan.micro_batches(documents):
            pieces.append((self.layouts[group], *byte_model.on_devices(rows, self.layouts[group])))
        jax.block_until_ready(pieces_arrays(pieces))
        seconds, metrics = self.timed(pieces)
        self.seconds.append(seconds)
        self.losses.append(self.engine.read(metrics)[0].loss)

    def timed(self, pieces):
        """Record the seconds and metrics of one update."""
        start = time.perf_counter()
        work = self.engine.begin(self.state)
        for layout, batch, mask in pieces:
            work = self.engine.accumulate(work, batch, mask, layout)
        self.state, metrics = self.engine.apply(self.state, work)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start, metrics

    def forget(self) -> None:
        """Forget the updates so far."""
        self.seconds, self.losses = [], []


class RunWithoutSwitching(Run):
    """The same updates with a copy of the state on every layout; the clock stops while anything moves."""

    def __init__(self, name: str, plan: Plan, engine: jg.Engine, state: jg.TrainState):
        super().__init__(name, plan, engine, state)
        self.others = [x for x in dict.fromkeys(self.layouts.values()) if x != self.engine.layout]
        self.engine.engines.compile_moves([self.engine.layout, *self.others])
        self._copy_state()

    def _copy_state(self) -> None:
        self.copies = {self.engine.layout: self.state}
        for layout in self.others:
            copy = jax.tree.map(jnp.copy, self.state)
            self.copies[layout] = self.engine.move(copy, layout)
        jax.block_until_ready(list(self.copies.values()))

    def timed(self, pieces):
        works, seconds = [], 0.0
        for layout in self.copies:
            there = self.engine.on(layout)
            start = time.perf_counter()
            work = there.begin(self.copies[layout])
            for where, batch, mask in pieces:
                if where == layout:
                    work = there.accumulate(work, batch, mask)
            if work.sums is not None:
                jax.block_until_ready(there.reduce(work))
                works.append(work)
            seconds += time.perf_counter() - start
        # Not timed: add the sums of all layouts on the first one.
        home = [self.engine.reduce(work) for work in works]
        total = home[0]
        for sums in home[1:]:
            total = jax.tree.map(jnp.add, total, sums)
        jax.block_until_ready(total)
        start = time.perf_counter()
        self.state, metrics = self.engine.update(self.state, total, works[0])
        jax.block_until_ready((self.state, metrics))
        seconds += time.perf_counter() - start
        self._copy_state()
        return seconds, metrics


def pieces_arrays(pieces):
    return [(batch, mask) for _, batch, mask in pieces]


def check_losses(runs: Sequence[Run]) -> float:
    """Return the largest difference to the first row's loss, in nats per byte. Raises if it is too large."""
    losses = np.array([run.losses for run in runs])
    largest = float(np.abs(losses - losses[0]).max())
    if not largest <= MOST_LOSS_DIFFERENCE:
        raise RuntimeError(
            f"losses of the same update differ by {largest:.2e} nats per byte between the rows, more than "
            f"{MOST_LOSS_DIFFERENCE:.0e}: {losses.tolist()}. The rows do not train alike, and their "
            "speeds must not be compared."
        )
    return largest


def compare(devices: Sequence[Any]) -> None:
    """Try the plans, measure the best of each kind in turns, and print the tables."""
    count, longest = _DOCUMENTS.value, _LONGEST.value
    every = corpora.functions(count * (TRIAL_UPDATES + _UPDATES.value), longest=longest)
    updates = [every[i : i + count] for i in range(0, len(every), count)]
    trials, measured = updates[:TRIAL_UPDATES], updates[TRIAL_UPDATES:]
    sizes = [len(document) for document in every]
    lengths = jg.lengths.best_lengths(sizes, _NUM_GROUPS.value, multiple_of=math.gcd(64, longest))
    print(
        f"{len(devices)} {devices[0].device_kind} devices; {count} functions of {min(sizes)} to "
        f"{max(sizes)} bytes per update; groups of up to {', '.join(map(str, lengths))} bytes"
    )

    start = time.perf_counter()
    strategies = strategies_for(len(devices))
    plans = plans_for(strategies, lengths, trials)
    model = byte_model.ByteModel(_DIM.value, _NUM_LAYERS.value, longest)
    family = jg.Engines(model.problem(count), byte_model.sample(longest))
    engines = {strategy: family.on(strategy.on(devices)) for strategy in strategies}
    states = {home: engine.init(jax.random.key(0)) for home, engine in engines.items()}
    candidates = [Run(p.kind, p, engines[p.home], states[p.home]) for p in plans]
    print(f"{len(plans)} plans compiled in {time.perf_counter() - start:.0f} s")
    for documents in trials:  # the first time is slow, so the second one counts
        for run in candidates:
            run.forget()
            run.update(documents)
        check_losses(candidates)
    tokens = sum(len(document) for document in trials[-1])
    print(f"\n{'tried':<16} {'strategy':<40} {'tokens/s':>9} {'real tokens':>12}")
    for run in candidates:
        positions = run.plan.num_positions(trials[-1])
        print(
            f"{run.name:<16} {run.plan.name:<40} {tokens / sum(run.seconds):9,.0f} "
            f"{tokens / positions:12.0%}"
        )

    best = {
        kind: min(
            (run for run in candidates if run.name == kind), key=lambda r: sum(r.seconds)
        ).plan
        for kind in (PADDED, GROUPED, MIXED)
    }
    del candidates
    runs = [Run(kind, p, engines[p.home], states[p.home]) for kind, p in best.items()]
    home = best[MIXED].home
    runs.append(RunWithoutSwitching(WITHOUT_SWITCHING, best[MIXED], engines[home], states[home]))
    for run in runs:
        run.update(trials[0])
        run.forget()
    compilations = []
    stop = jg.listen_for_compilations(compilations.append)
    try:
        for i, documents in enumerate(measured):
            first = i % len(runs)
            for run in runs[first:] + runs[:first]:
                run.update(documents)
    finally:
        stop()
    show(runs, np.array([sum(len(d) for d in documents) for documents in measured]))
    print(
        f"losses fell from {runs[0].losses[0]:.3f} to {runs[0].losses[-1]:.3f} nats per byte and differ by "
        f"at most {check_losses(runs):.1e} between rows; {len(compilations)} compilations while measuring"
    )


def show(runs: Sequence[Run], tokens: np.ndarray) -> None:
    """Print the table of rows: medians over the updates, with least and most in brackets."""
    print(
        f"\n{'row':<26} {'tokens/s':>9} {'(range)':<17} {'of the first':>12} {'(range)':<13} strategy"
    )
    for run in runs:
        speed = tokens / run.seconds
        # All rows compute the same functions, so ratios are taken update by update.
        ratio = np.array(runs[0].seconds) / run.seconds
        print(
            f"{run.name:<26} {np.median(speed):9,.0f} {f'({speed.min():,.0f}-{speed.max():,.0f})':<17} "
            f"{np.median(ratio):12.2f} {f'({ratio.min():.2f}-{ratio.max():.2f})':<13} {run.plan.name}"
        )
    grouped, mixed, unmoved = (np.array(run.seconds) for run in runs[1:])
    print(
        f"mixed against grouped: {np.median(grouped / mixed):.2f}; switching took "
        f"{np.median(mixed - unmoved) * 1e3:.0f} ms of {np.median(mixed) * 1e3:.0f} ms an update"
    )


# -- a model larger than a device ------------------------------------------------------------------


def memory_of(device: Any) -> tuple[int, str]:
    """Return the memory of a device in bytes, and how it is known."""
    if _MEMORY_MIB.value is not None:
        return _MEMORY_MIB.value * 2**20, "stated by --memory_mib"
    reported = (device.memory_stats() or {}).get("bytes_limit")
    if reported is not None:
        return reported, "reported by the device"
    return 64 * 2**20, "stated: virtual devices share the host's memory, and nothing enforces it"


def larger_model(limit_bytes: int, longest: int) -> tuple[byte_model.ByteModel, int]:
    """Return the narrowest model whose parameters and moments exceed the limit by a tenth, and its bytes."""

    def model(dim: int) -> byte_model.ByteModel:
        return byte_model.ByteModel(dim, LARGER_LAYERS, longest, remake=True)

    def state_bytes(dim: int) -> int:
        shapes = jax.eval_shape(model(dim).init, jax.random.key(0))
        return 3 * 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))

    dims = range(16, 2**18, 16)
    dim = dims[bisect.bisect_left(dims, 1.1 * limit_bytes, key=state_bytes)]
    return model(dim), state_bytes(dim)


def train_larger(devices: Sequence[Any]) -> None:
    """Compile a step under data parallelism and under FSDP, compare the memory they need, and train."""
    limit_bytes, source = memory_of(devices[0])
    length = LARGER_LENGTH
    model, state_bytes = larger_model(limit_bytes, length)
    print(
        f"{len(devices)} {devices[0].device_kind} devices of {_mib(limit_bytes)} ({source}); parameters "
        f"and Adam's moments: {_mib(state_bytes)}"
    )
    whole, cut = (s.on(devices) for s in (jg.Strategy(data=-1), jg.Strategy(fsdp=-1)))
    engines = jg.Engines(model.problem(len(devices)), byte_model.sample(length))
    for layout in (whole, cut):
        (step,) = engines.on(layout).training_programs(1, accumulate=False)
        engines.on(layout).compile_program(step)
        need = engines.on(layout).bytes_of(1)
        assert need is not None
        verdict = "fits" if need.peak <= limit_bytes else "does not fit"
        print(f"{layout.strategy.name:>8}: a step needs {described(need)} per device: {verdict}")
        if (need.peak <= limit_bytes) != (layout is cut):
            raise RuntimeError(
                f"under {layout.strategy.name} a step of {_mib(need.peak)} {verdict} into "
                f"{_mib(limit_bytes)}. Use more devices, or another --memory_mib."
            )

    engine = engines.on(cut)
    state = engine.init(jax.random.key(0))
    documents = corpora.functions(len(devices) * _STEPS.value, longest=length)
    batches = jg.lengths.micro_batches(documents, length=length, num_rows=len(devices))
    print("step  loss, nats per byte  seconds")
    for i, rows in enumerate(batches):
        start = time.perf_counter()
        state, metrics = engine.step(state, None, *byte_model.on_devices(rows, cut), measure=False)
        loss = engine.read(metrics)[0].loss
        jax.block_until_ready(state)
        print(f"{i + 1:4d}  {loss:19.3f}  {time.perf_counter() - start:7.2f}")


def described(need: jg.StepBytes) -> str:
    return (
        f"{_mib(need.peak)} (state and batch {_mib(need.arguments)}, temporary "
        f"{_mib(need.temporaries + need.outputs)})"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def main(_):
    # This must come before any use of a device; it has no effect on accelerators.
    jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices()
    if len(devices) < 2:
        raise app.UsageError(
            f"strategies are compared on several devices, and there is {len(devices)}: "
            f"{devices[0].device_kind}. Set JAX_PLATFORMS=cpu for 8 virtual ones."
        )
    if _LARGER.value:
        train_larger(devices)
        return
    # Losses agree to 1e-4 only if products are computed exactly; TF32 is too coarse.
    jax.config.update("jax_default_matmul_precision", "float32")
    compare(devices)


if __name__ == "__main__":
    app.run(main)
