"""Compiles the engine's step for TPU pods that need not exist, and compares it with a hand-written `jit`.

    pip install 'jaxgoodput[tpu]'
    python benchmarks/pod.py                                  # all rows, half an hour on two cores
    python benchmarks/pod.py --only "1b v5e:2x4 fsdp8"
    python benchmarks/pod.py --groups                         # slices that come and go, 5 minutes

The model is Llama's architecture (examples/llama_model.py), bfloat16 over float32 masters, Adam, 2,048 tokens
a chip. By hand means: shardings of the same specs, the batch constrained behind the embedding and behind
every layer, which is what a user of `jit` has to know; "hand, finite" is that with
`optax.apply_if_finite`, so that an update that is not finite is left out, as the engine does. "plain" is by
hand without the constraints. The engine's model has none. Expect peak bytes and bytes of collectives of at
most 1.02 of those by hand, as many asynchronous collectives, no gather of parameters in float32, and
nothing but scalars more with statistics. A row takes one to three minutes.

`--groups`: the step of an elastic job, each group a slice of v5e:2x4, for 4, 3 and 5 groups. Expect what is
done inside a group to be the same program for any number of them, and one reduction between groups.
"""

import collections
import dataclasses
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from typing import Any

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("only", "", "One row, as the table names it; empty: all.")
flags.DEFINE_bool("plain", False, "Compile the step by hand without constraints, too.")
flags.DEFINE_bool("statistics", True, "Compile the steps that measure the noise, too.")
flags.DEFINE_bool("groups", False, "The step of slices that come and go, instead.")
flags.DEFINE_bool("worker", False, "Internal: one row as JSON.")

LENGTH = 2048
# Size, topology, slices, degrees.
ROWS = (
    ("1b", "v5e:2x4", 1, {"fsdp": 8}),
    ("1b", "v5e:2x4", 1, {"fsdp": 4, "tensor": 2}),
    ("1b", "v6e:4x4", 1, {"fsdp": 16}),
    ("1b", "v5p:4x4x4", 1, {"fsdp": 32, "tensor": 2}),
    ("1b", "v5e:2x4", 2, {"data": 2, "fsdp": 8}),
    ("7b", "v5e:16x16", 1, {"fsdp": 256}),
    ("7b", "v5e:16x16", 1, {"fsdp": 64, "tensor": 4}),
)


@dataclasses.dataclass(frozen=True)
class Training:
    """What is compiled."""

    problem: Any
    sample: Any
    rows: int
    """Of a replica."""
    losses: Any
    tx: Any


def name_of(size: str, topology: str, slices: int, degrees: dict[str, int]) -> str:
    """How the table names a row."""
    strategy = ".".join(f"{axis}{degree}" for axis, degree in degrees.items())
    return f"{size} {f'{slices} x ' if slices > 1 else ''}{topology} {strategy}"


def training(size: str, layout: Any) -> Training:
    """A Llama of this size on a layout, 2,048 tokens a chip."""
    import jax
    import jax.numpy as jnp
    import llama_model
    import optax

    from jaxgoodput import Problem, adaptive, rules

    shape = llama_model.SHAPES[size]
    rows = max(layout.num_devices // layout.num_replicas, 1)

    def losses(params: Any, tokens: Any, constrain: Any = lambda x: x) -> Any:
        def body(x: Any, layer: Any) -> tuple[Any, None]:
            return constrain(llama_model.decoder_layer(layer, x, shape)), None

        x = constrain(params["embedding"][tokens[:, :-1]])
        x, _ = jax.lax.scan(jax.checkpoint(body), x, params["layers"])
        logits = llama_model.rms_norm(x, params["norm"]) @ params["head"]["kernel"]
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(-1)

    tx = optax.adam(3e-4)
    problem = Problem(
        init=lambda key: llama_model.init(key, shape),
        loss_and_state=lambda params, state, batch, key: (losses(params, batch["tokens"]), state),
        tx=adaptive(tx, rules.adam_scale, base_batch_size=rows * layout.num_replicas),
        base_batch_size=rows * layout.num_replicas,
        compute_dtype=jnp.bfloat16,
    )
    sample = {"tokens": jax.ShapeDtypeStruct((LENGTH + 1,), jnp.int32)}
    return Training(problem, sample, rows, losses, tx)


def measure(size: str, topology: str, slices: int, degrees: dict[str, int]) -> dict[str, Any]:
    """One row, in this process."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.experimental import topologies

    from jaxgoodput import Engines, Strategy
    from jaxgoodput.engine.analysis.analysis import analyse
    from jaxgoodput.engine.programs.program import Program

    several = {} if slices == 1 else {"num_slices": slices}
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **several)
    strategy = dataclasses.replace(Strategy(), **degrees)
    layout = strategy.on(list(found.devices))
    made = training(size, layout)
    rows, losses, tx = made.rows, made.losses, made.tx
    engine = Engines(made.problem, made.sample, memory_bytes=1).on(layout)
    kinds = {"engine": False, "measured": True} if FLAGS.statistics else {"engine": False}
    programs = {
        kind: engine.programs.step(engine.shape(rows), measure=measure)
        for kind, measure in kinds.items()
    }

    def by_hand(constrain: Any, tx: Any = tx) -> Program:
        state = engine.abstract_state()
        params = state.params
        opt_state = engine.programs.param_specs.placed(jax.eval_shape(tx.init, params))

        def step(params: Any, opt_state: Any, tokens: Any) -> Any:
            def mean(params: Any) -> Any:
                params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
                return losses(params, tokens, constrain).mean()

            loss, grads = jax.value_and_grad(mean)(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        tokens = jax.ShapeDtypeStruct(
            (rows * layout.num_replicas, LENGTH + 1), jnp.int32, sharding=layout.batch_sharding
        )
        out = jax.tree.map(lambda x: x.sharding, (params, opt_state))
        return Program(step, (0, 1), (params, opt_state, tokens), (*out, layout.replicated))

    def rows_first(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, layout.batch_sharding)

    programs["by hand"] = by_hand(rows_first)
    programs["hand, finite"] = by_hand(rows_first, optax.apply_if_finite(tx, 5))
    if FLAGS.plain:
        programs["plain"] = by_hand(lambda x: x)
    row: dict[str, Any] = {}
    for kind, program in programs.items():
        # What is written by hand goes to the compiler as JAX would send it.
        hand = kind in ("by hand", "hand, finite", "plain")
        jitted = jax.jit(program.function, donate_argnums=program.donate, out_shardings=program.out)
        executable = jitted.lower(*program.arguments).compile() if hand else program.compile()
        told = analyse(program, executable, [0] * layout.num_devices)
        text = executable.as_text() or ""
        wide = [
            dims
            for dims in re.findall(r"f32\[([\d,]+)\]\S* all-gather\(", text)
            if math.prod(map(int, dims.split(","))) >= 2**16
        ]
        row[kind] = {
            "peak MiB": told.bytes.peak / 2**20,
            "sent MiB": sum(told.traffic.values()) / 2**20,
            "kinds": {kind: round(sent / 2**20) for kind, sent in told.traffic.items()},
            "async": [len(told.collectives) - len(told.exposed_collectives), len(told.collectives)],
            "TFLOP": told.flops / layout.num_devices / 1e12,
            "f32 gathers": dict(collections.Counter(wide)),
        }
    return row


def measure_groups(num_groups: int) -> dict[str, Any]:
    """The programs of a step of so many groups, in this process."""
    from jax.experimental import topologies

    from jaxgoodput import Engines, Strategy
    from jaxgoodput.engine.analysis.analysis import analyse
    from jaxgoodput.engine.programs.elastic import GroupPrograms
    from jaxgoodput.parallel.place import world_of

    found = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x4", num_slices=num_groups
    )
    slices = [[d for d in found.devices if d.slice_index == i] for i in range(num_groups)]
    layouts = [Strategy(fsdp=8).on(devices) for devices in slices]
    made = training("1b", layouts[0])
    engines = Engines(
        made.problem, made.sample, world=world_of(layouts), control_size=16, memory_bytes=1
    )
    engine = engines.on(layouts[0])
    shape, programs = engine.shape(made.rows), engine.programs
    assert isinstance(programs, GroupPrograms)
    row: dict[str, Any] = {}
    for kind, program, count in (
        ("accumulate", programs.accumulate(shape, first=True), 8),
        ("pack", programs.pack(), 8),
        ("reduce", programs.reduce(), 8 * num_groups),
        ("update", programs.update(), 8),
    ):
        executable = program.compile()
        told = analyse(program, executable, [0] * count)
        # Between slices it is the runtime that adds up, over the network between hosts.
        others = re.findall(
            r"%send\S* = \(f32\[([\d,]+)\].* is_host_transfer=true", executable.as_text() or ""
        )
        text = re.sub(r"(, metadata=\{[^}]*\}|channel_id=\d+)", "", executable.as_text() or "")
        row[kind] = {
            "peak MiB": round(told.bytes.peak / 2**20),
            "sent MiB": {name: round(sent / 2**20) for name, sent in told.traffic.items()},
            "collectives": len(told.collectives),
            "to other slices, MiB": [
                round(4 * math.prod(map(int, dims.split(","))) / 2**20) for dims in others
            ],
            "program": hashlib.sha256(text.encode()).hexdigest()[:8],
        }
    return row


def run(*options: str) -> dict[str, Any]:
    """What a worker finds. Raises RuntimeError with the last line of what it says."""
    # libtpu reads these before JAX is loaded, and compiles for chips that are not there.
    environ = {
        **os.environ,
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(
            [
                os.path.join(os.path.dirname(__file__), "..", "examples"),
                os.environ.get("PYTHONPATH", ""),
            ]
        ),
    }
    command = [sys.executable, __file__, "--worker", *options]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def main(_: list[str]) -> None:
    if FLAGS.worker and FLAGS.groups:
        print(json.dumps(measure_groups(int(FLAGS.only))))
        return
    if FLAGS.worker:
        (row,) = [r for r in ROWS if name_of(*r) == FLAGS.only]
        print(json.dumps(measure(*row)))
        return
    if FLAGS.groups:
        for num_groups in (4, 3, 5):
            print(f"{num_groups} groups of v5e:2x4, fsdp8 within, 1b")
            for kind, told in run("--groups", f"--only={num_groups}").items():
                print(f"    {kind:12}{told}", flush=True)
        return
    print(
        f"{'':36}{'peak MiB':>10}{'/ hand':>8}{'sent MiB':>10}{'/ hand':>8}{'async':>10}  by kind, MiB"
    )
    for row in ROWS:
        name = name_of(*row)
        if FLAGS.only not in ("", name):
            continue
        options = (f"--only={name}", f"--plain={FLAGS.plain}", f"--statistics={FLAGS.statistics}")
        try:
            found = run(*options)
        except RuntimeError as error:
            print(f"{name}: {error}")
            continue
        hand = found["by hand"]
        for kind, told in found.items():
            print(
                f"{name if kind == 'engine' else '':24}{kind:12}"
                f"{told['peak MiB']:10.0f}{told['peak MiB'] / hand['peak MiB']:8.3f}"
                f"{told['sent MiB']:10.0f}{told['sent MiB'] / hand['sent MiB']:8.3f}"
                f"{told['async'][0]:6d}/{told['async'][1]:<4d} {told['kinds']}"
                + (f", gathered in float32: {told['f32 gathers']}" if told["f32 gathers"] else ""),
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
