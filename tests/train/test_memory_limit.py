"""A run that reaches a limit of memory ends with a sentence on what did not fit, not with tracebacks."""

import errno
import os
import re
import subprocess
import sys

import jax
import pytest
from compilations import JOBS

from jaxgoodput.engine.memory import OutOfMemory, host_bytes, shortage_in
from jaxgoodput.parallel.move import MoveDoesNotFit
from jaxgoodput.train.control import explained

PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp, numpy as np, optax
import jaxgoodput as jg

WHERE, FOLDER = sys.argv[1:]
ROOM, LARGE = 3 * 2**29, 2**32  # bytes that may be added, and that are


def large(x):  # a product in between that no compiler can leave out
    return (jnp.tanh(x[:, :1] @ jnp.ones((1, LARGE // 64))) @ jnp.ones((LARGE // 64, 1)))[:, 0]


class Samples:
    num_read = 0

    def __len__(self):
        return 256

    def __getitem__(self, index):
        self.num_read += 1
        if WHERE == "samples" and self.num_read > 100:  # in training, not in looking at what there is
            np.ones(LARGE, np.uint8)
        return {"x": np.full(4, index, np.float32)}


class Net(jg.Trainer):
    def init(self, key):
        return {"w": jnp.zeros(LARGE // 4 if WHERE == "state" else 4)}

    def loss(self, params, batch, key):
        losses = jnp.sum((params["w"][:4] - batch["x"]) ** 2, axis=-1)
        return losses + large(batch["x"] + params["w"][:4]) if WHERE == "step" else losses

    def optimizer(self):
        return optax.sgd(0.1)

    def dataset(self):
        return Samples()

    def eval_dataset(self):
        return {"x": np.ones((16, 4), np.float32)}

    def metrics(self, params, batch):
        return {"error": large(batch["x"]) if WHERE == "evaluation" else batch["x"][:, 0]}


jax.jit(jnp.sum)(jnp.ones(8)).block_until_ready()
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + ROOM
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
Net(
    jg.Config(
        workdir=FOLDER,
        batch=jg.BatchLimits(base=16, max=16),
        policy="fixed",
        epochs=1,
        execution=jg.Execution(memory_bytes=2**40, background_compile=False),
        reporting=jg.Reporting(tensorboard=False, progress=False),
        saving=jg.Saving(every_base_steps=1),
    )
).fit()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "where, what",
    [
        ("state", "the start of the run"),
        ("step", "the start of the run"),  # where a step is rehearsed
        ("samples", "step .* or the next one .batches of 16 samples, 16 per replica"),
        ("evaluation", "step .* or the next one"),
    ],
)
def test_a_limit_of_memory_is_a_sentence(tmp_path, where, what):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, str(script), where, str(tmp_path / "run")],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **JOBS},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = ended.stderr.strip().splitlines()
    assert ended.returncode == 1, ended.stderr
    assert lines[-1].startswith("jaxgoodput.engine.memory.OutOfMemory: "), ended.stderr
    said = lines[-1].partition(": ")[2]
    assert re.match(f"{what}.* did not fit into memory .*BatchLimits.micro", said), said
    assert ended.stderr.count("Traceback") == 1 and "/jax/_src/" not in ended.stderr, ended.stderr
    assert len(lines) < 40, ended.stderr


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


DEVICE = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\nmore")
DRIVER = jax.errors.JaxRuntimeError(
    "INTERNAL: cuGraphInstantiate: CUDA_ERROR_OUT_OF_MEMORY: out of memory"
)


@pytest.mark.parametrize(
    "error, says",
    [
        (DEVICE, "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."),
        (MemoryError(), "the host has no memory left"),
        (MemoryError("8 bytes"), "8 bytes"),
        (caused(RuntimeError("sample 3 cannot be read"), MemoryError("8 bytes")), "8 bytes"),
        (DRIVER, "INTERNAL: cuGraphInstantiate: CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
        (jax.errors.JaxRuntimeError("INTERNAL: something else"), None),
        (jax.errors.JaxRuntimeError("INTERNAL: callback:\nout_of_memory.py\nKeyError: 1"), None),
        (ValueError("RESOURCE_EXHAUSTED is a word"), None),
        (ValueError("RESOURCE_EXHAUSTED: a/b: OS error 28: No space left on device"), None),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (MoveDoesNotFit("this says it already"), None),
        (OutOfMemory("this says it already"), None),
    ],
)
def test_a_shortage_is_told_from_other_errors(error, says):
    assert shortage_in(error) == says
    told = explained(error, "step 3")
    if says is None:
        assert told is error
    else:
        assert isinstance(told, OutOfMemory) and f"step 3 did not fit into memory ({says})" in str(
            told
        )


WAYS = """
import resource, sys
import jax, jax.numpy as jnp, numpy as np
from jaxgoodput.engine.memory import shortage_in

ROOM, LARGE = 2**29, 2**30  # bytes that may be added, and that are


def large(x):
    return jnp.tanh(x[:, :1] @ jnp.ones((1, LARGE // 64))) @ jnp.ones((LARGE // 64, 1))


def read(x):
    return np.ones(LARGE, np.uint8)[:4]


def on_host(x):
    return jax.pure_callback(read, jax.ShapeDtypeStruct((4,), np.uint8), x)


x, square, part = jnp.ones((16, 4)), jnp.ones((5000, 5000)), jnp.copy(jnp.ones(ROOM // 8))
step = jax.jit(large).lower(x).compile()
back = jax.jit(on_host).lower(x).compile()
factors = jax.jit(jnp.linalg.svd).lower(square).compile()
host = np.zeros(LARGE, np.uint8)
ways = {
    "a result": lambda: jnp.zeros(LARGE // 4),
    "temporaries": lambda: step(x),
    "a step after one that failed": lambda: jnp.sum(step(x) + 1),
    "from the host": lambda: jax.device_put(host, may_alias=False),
    "a copy": lambda: [jnp.copy(part) for _ in range(9)],
    "to the host": lambda: [np.array(part) for _ in range(9)],
    "a callback": lambda: back(x),
    "a library": lambda: factors(square),
    "a file": lambda: np.memmap(sys.argv[1], mode="w+", shape=LARGE),
}
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + ROOM
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for name, way in ways.items():
    try:
        jax.block_until_ready(way())
        print(name, "fits")
    except Exception as error:
        if shortage_in(error) is None:
            print(name, "raises", type(error).__name__, error)
"""


@pytest.mark.slow
def test_every_way_in_which_memory_runs_out_is_known(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", WAYS, str(tmp_path / "large")],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **JOBS},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_the_memory_of_the_host_is_at_most_what_it_has():
    assert 0 < host_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
