"""Compares memory and communication of a compiled step with a step written by hand for the same layout.

    python benchmarks/compiled_layouts.py                    # 24 layers, about 20 minutes on two cores
    python benchmarks/compiled_layouts.py --layers 4 --only "axis 0:fsdp8"
    python benchmarks/compiled_layouts.py --rounds 5 --layers 4 --width 512 --length 256    # step times

Without `--rounds` nothing runs: every number is the compiler's. The decoder of `examples/llama_model.py`, its
layers stacked along axis 0 or axis 1 and scanned over, or in a list, each recomputed in the backward pass.
Three steps:

* ours: the engine's plain step (without statistics) of the loss as a user writes it, without constraints;
  "named" gives parameters the expert's specs as metadata, where the defaults are others.
* expert: `jax.jit` with a spec chosen by hand for every parameter, and rows constrained after the embedding
  and around every layer.
* plain: the same without any constraint.

A row gives GFLOP per device (XLA's cost analysis; the body of a loop counts once), temporaries as a part of
the model in float32, and MiB that arrive on a device by kind of collective and by type, in the optimized HLO
(again a loop once). "gathers asked for" are those in the HLO that the SPMD partitioner writes
(`xla_dump_hlo_pass_re`), because XLA:CPU computes bf16 in float32 and widens its collectives later. "scopes"
are operations that `jax.named_scope` names in the lowered text.

Expected, with 24 layers (temporaries / model; MiB gathered): ours and the expert's step agree wherever the
specs do. Axis 0 on fsdp8 in f32 0.27 and 0.27, on fsdp4.tensor2 0.23 and 0.23; bf16 0.33 and 0.33, 0.29 and
0.29, with all gathers asked for in bf16. Axis 1: ours, named and the expert
0.39, on fsdp4.tensor2 0.35. Unrolled on fsdp8: 2.08 and 2.09 in f32, where XLA:CPU keeps
what it gathered. Plain: 0.6 to 3.7 on fsdp8, with all samples computed on a part of the features. Scopes are
the same in all steps.

With `--rounds`, and a size at which a step takes 100 ms and more, the expert's step and ours take turns, one
device (our step *global* there, too) and each strategy, float32, layers along axis 0; every step is waited
for. "with statistics" is the mean of 16 steps of which one measures the noise. Expect at
most 1.02 on one device and 1.05 on eight.
"""

import collections
import dataclasses
import functools
import math
import pathlib
import re
import statistics
import sys
import tempfile
import time
from typing import Any

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "only", "", "Rows whose name, 'model:strategy:type:step', starts so; with --rounds, strategies."
)
flags.DEFINE_integer("layers", 24, "Layers of the decoder.")
flags.DEFINE_integer("width", 256, "Its width.")
flags.DEFINE_integer("length", 64, "Tokens of a window.")
flags.DEFINE_integer("windows", 2, "Windows per replica.")
flags.DEFINE_integer("rounds", 0, "Time the steps in so many turns, instead of looking at them.")

NUM_DEVICES = 8
MODELS = ("axis 0", "axis 1", "unrolled")
STRATEGIES: tuple[dict[str, Any], ...] = ({"fsdp": 8}, {"fsdp": 4, "tensor": 2})
TYPES = ("f32", "bf16")
STEPS = ("ours", "named", "expert", "plain")
COLLECTIVE = re.compile(
    r" = \(?(?P<type>\w+)\[.*? "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
SCOPES = re.compile(r'"[^"]*\b(?:attention|mlp)/[^"]*"')
MIB = 2**20


class Decoder:
    """The model in one of `MODELS`."""

    def __init__(self, kind: str):
        import llama_model

        self.kind = kind
        self.axis = MODELS.index(kind) if kind != "unrolled" else None
        self.model = llama_model
        self.shape = dataclasses.replace(
            llama_model.SHAPES["tiny"],
            width=FLAGS.width,
            hidden=3 * FLAGS.width,
            layers=FLAGS.layers,
            heads=8,
            kv_heads=4,
        )

    def init(self, key: Any) -> Any:
        """Fresh parameters."""
        import jax
        import jax.numpy as jnp

        params = self.model.init(key, self.shape)
        if self.axis is not None:
            axis = self.axis
            layers = jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), params["layers"])
        else:
            stacked = params["layers"]
            layers = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(FLAGS.layers)]
        return {**params, "layers": layers}

    def losses(self, params: Any, tokens: Any, rows: Any = lambda x: x) -> Any:
        """One for each window; `rows` constrains activations."""
        import jax
        import jax.numpy as jnp
        import optax

        def body(x: Any, layer: Any) -> tuple[Any, None]:
            return rows(self.model.decoder_layer(layer, rows(x), self.shape)), None

        body = jax.checkpoint(body)
        x, layers, axis = rows(params["embedding"][tokens[:, :-1]]), params["layers"], self.axis
        if axis is None:
            for layer in layers:
                x, _ = body(x, layer)
        else:
            # As flax does where layers are not in front.
            layers = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), layers)
            x, _ = jax.lax.scan(body, x, layers)
        logits = self.model.rms_norm(x, params["norm"]) @ params["head"]["kernel"]
        wanted = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), wanted
        ).mean(-1)

    def spec(self, name: str, strategy: Any) -> Any:
        """What an expert writes for a parameter, by its path."""
        from jax.sharding import PartitionSpec

        axes = {axis: axis if strategy.degrees[axis] > 1 else None for axis in ("fsdp", "tensor")}
        owner = name.split("/")[-2] if name.endswith("kernel") else name
        if "norm" in name:
            return PartitionSpec()
        wide = owner in ("query", "key", "value", "gate", "up", "head")
        entries = ["fsdp", "tensor"] if wide else ["tensor", "fsdp"]
        entries = [axes[entry] for entry in entries]
        if name.startswith("layers") and self.axis is not None:
            entries.insert(self.axis, None)
        return PartitionSpec(*entries)

    def specs(self, params: Any, strategy: Any) -> tuple[tuple[str, Any], ...]:
        """`spec` of every parameter, by its path."""
        import jax

        from jaxgoodput.parallel.partition import path_name

        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        return tuple((name, self.spec(name, strategy)) for name in names)


def our_engine(decoder: Decoder, strategy: Any, dtype: Any, *, named: bool = False) -> Any:
    """The engine of the loss as a user writes it."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxgoodput.engine.engine import Engines
    from jaxgoodput.engine.state import Variables
    from jaxgoodput.engine.step import Problem
    from jaxgoodput.optim import learning_rate as rules
    from jaxgoodput.optim.adaptive import adaptive

    def init(key: Any) -> Any:
        params = decoder.init(key)
        specs = decoder.specs(params, strategy) if named else ()
        return Variables(params=params, model_state=(), specs=specs)

    base = strategy.num_replicas * FLAGS.windows
    problem = Problem(
        init=init,
        loss_and_state=lambda p, state, batch, key: (decoder.losses(p, batch), state),
        tx=adaptive(optax.adam(1e-3), rules.none, base_batch_size=base),
        base_batch_size=base,
        compute_dtype=dtype,
    )
    sample = jax.ShapeDtypeStruct((FLAGS.length + 1,), jnp.int32)
    return Engines(problem, sample, loss="global").on(layout_of(strategy))


def layout_of(strategy: Any) -> Any:
    """A strategy on as many devices as it takes."""
    import jax

    return strategy.on(jax.devices()[: math.prod(strategy.degrees.values())])


def lowered_ours(decoder: Decoder, strategy: Any, dtype: Any, *, named: bool) -> Any:
    """The engine's plain step."""
    engine = our_engine(decoder, strategy, dtype, named=named)
    return engine.programs.step(engine.shape(FLAGS.windows), measure=False).lower()


def lowered_by_hand(decoder: Decoder, strategy: Any, dtype: Any, *, constrained: bool) -> Any:
    """A step that an expert writes."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxgoodput.parallel.partition import param_specs

    layout = layout_of(strategy)
    tx = optax.adam(1e-3)
    params = jax.eval_shape(decoder.init, jax.random.key(0))
    found = param_specs(layout, params, decoder.specs(params, strategy))
    over = NamedSharding(layout.mesh, PartitionSpec("fsdp"))

    def rows(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, over) if constrained else x

    def loss(params: Any, tokens: Any) -> Any:
        if dtype is not None:
            params = jax.tree.map(lambda x: x.astype(dtype), params)
        return decoder.losses(params, tokens, rows).mean()

    def step(params: Any, opt_state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    state = found.placed(params), found.placed(jax.eval_shape(tx.init, params))
    batch = jax.ShapeDtypeStruct(
        (strategy.num_replicas * FLAGS.windows, FLAGS.length + 1), jnp.int32, sharding=over
    )
    out = (*jax.tree.map(lambda x: x.sharding, state), layout.replicated)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out).lower(*state, batch)


def traffic(text: str) -> dict[str, float]:
    """'kind type' -> MiB that arrive on a device."""
    from jaxgoodput.parallel.collectives import received_bytes

    found: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        told = COLLECTIVE.search(line)
        if told is not None and not told["type"].startswith(("pred", "s", "u")):
            found[f"{told['kind']} {told['type']}"] += received_bytes(line, NUM_DEVICES)
    return {name: arrived / NUM_DEVICES / MIB for name, arrived in found.items()}


def measure(lowered: Any) -> dict[str, Any]:
    """One row."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning|shardy"}
        compiled = lowered.compile(compiler_options=options)
        after = sorted(pathlib.Path(folder).glob("*.after_spmd-partitioning*.txt"))
        partitioned = after[0].read_text() if after else ""
    cost = compiled.cost_analysis()
    return {
        "gflop": cost["flops"] / 1e9,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "sent": traffic(compiled.as_text()),
        "asked": {k: v for k, v in traffic(partitioned).items() if k.startswith("all-gather")},
        "scopes": len(SCOPES.findall(lowered.as_text(debug_info=True))),
    }


def timed(decoder: Decoder, strategy: Any) -> dict[str, list[float]]:
    """Seconds of each kind of step, round by round."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    executable = lowered_by_hand(decoder, strategy, None, constrained=True).compile()
    (params_at, opt_at, tokens_at), _ = executable.input_shardings
    params = jax.jit(decoder.init, out_shardings=params_at)(jax.random.key(0))
    opt_state = jax.jit(optax.adam(1e-3).init, out_shardings=opt_at)(params)
    rows = strategy.num_replicas * FLAGS.windows
    tokens = np.random.default_rng(0).integers(0, 256, (rows, FLAGS.length + 1))
    by_hand = [params, opt_state, jax.device_put(jnp.asarray(tokens, jnp.int32), tokens_at)]

    engine = our_engine(decoder, strategy, None)
    batch, mask = jax.device_put(
        (jnp.asarray(tokens, jnp.int32), jnp.ones(rows)), engine.layout.batch_sharding
    )
    state = engine.init(jax.random.key(0))

    def expert() -> Any:
        by_hand[:2] = executable(*by_hand)[:2]
        return by_hand[:2]

    def ours(measure: bool) -> Any:
        nonlocal state
        state, metrics = engine.step(state, None, batch, mask, measure=measure)
        return state, metrics

    kinds = {
        "expert": expert,
        "plain": functools.partial(ours, False),
        "measured": functools.partial(ours, True),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(FLAGS.rounds + 1):
        for kind, step in kinds.items():
            started = time.perf_counter()
            jax.block_until_ready(step())
            if turn:  # the first one compiles
                found[kind].append(time.perf_counter() - started)
    return found


def show_times(strategies: Any) -> None:
    """Median and range of ratios within a round, for the decoder whose layers lie along axis 0."""
    print(f"{'strategy':16} {'expert ms':>9}  {'plain / expert':22} with statistics / expert")
    for strategy in strategies:
        found = timed(Decoder("axis 0"), strategy)
        rounds = list(zip(*found.values(), strict=True))
        plain = [plain / expert for expert, plain, _ in rounds]
        mixed = [(15 * plain + measured) / 16 / expert for expert, plain, measured in rounds]
        ratios = (f"{statistics.median(r):.3f} ({min(r):.3f}-{max(r):.3f})" for r in (plain, mixed))
        expert_ms = statistics.median(found["expert"]) * 1e3
        print(
            f"{strategy.name:16} {expert_ms:9.0f}  " + "   ".join(f"{r:22}" for r in ratios),
            flush=True,
        )


def shown(sent: dict[str, float], least: float) -> str:
    """Kinds that are worth a word."""
    large = {name: mib for name, mib in sorted(sent.items()) if mib >= least}
    return ", ".join(f"{name} {mib:.1f}" for name, mib in large.items()) or "-"


def main(argv):
    """Compile the rows and print the table."""
    del argv
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    import jax.numpy as jnp

    from jaxgoodput.parallel.strategy import Strategy

    if FLAGS.rounds:
        every = [Strategy(), *(Strategy(**degrees) for degrees in STRATEGIES)]
        show_times([strategy for strategy in every if strategy.name.startswith(FLAGS.only)])
        return
    header = (
        f"{'model:strategy:type:step':32} {'GFLOP':>7} {'temp/model':>10} {'scopes':>6}  "
        "MiB a device receives: gathers asked for | all that is sent"
    )
    print(header, flush=True)
    for kind in MODELS:
        decoder = Decoder(kind)
        params = jax.eval_shape(decoder.init, jax.random.key(0))
        model = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
        for degrees in STRATEGIES:
            strategy = Strategy(**degrees)
            for dtype in TYPES:
                computed = jnp.bfloat16 if dtype == "bf16" else None
                steps = {
                    "ours": functools.partial(lowered_ours, named=False),
                    "named": functools.partial(lowered_ours, named=True),
                    "expert": functools.partial(lowered_by_hand, constrained=True),
                    "plain": functools.partial(lowered_by_hand, constrained=False),
                }
                for step in STEPS:
                    name = f"{kind}:{strategy.name}:{dtype}:{step}"
                    is_default = step == "named" and kind != "axis 1"  # the same as "ours"
                    if is_default or not name.startswith(FLAGS.only):
                        continue
                    row = measure(steps[step](decoder, strategy, computed))
                    print(
                        f"{name:32} {row['gflop']:7.3f} {row['temporaries'] / model:10.3f} "
                        f"{row['scopes']:6}  {shown(row['asked'], 0.01 * model / MIB)} | "
                        f"{shown(row['sent'], 0.01 * model / MIB)}",
                        flush=True,
                    )


if __name__ == "__main__":
    app.run(main)
