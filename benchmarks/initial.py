"""Measures a start with the weights of another run: peak memory, and size of the compilation cache.

    python benchmarks/initial.py [--megabytes 400]

Each row is a process of its own that trains matrices of so many megabytes under Adam for a few steps and
saves: from scratch; with the checkpoint of that run as `initial=`; with the same parameters as a tree from
`jg.load`; and, as one had to before there was `initial=`, with an `init` that returns the loaded arrays,
which makes them constants of its program. The peak is that of the process's resident memory. On a CPU, where
the devices' memory is the host's, a tree stays beside the state for as long as its owner holds it.
"""

import argparse
import pathlib
import resource
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.train.checkpoints.saved import load
from jaxgoodput.train.config import Config, Execution, Reporting
from jaxgoodput.train.trainer import Trainer

WIDTH, NUM_LEAVES = 256, 4
WAYS = {
    "scratch": "from scratch",
    "workdir": "initial=workdir",
    "tree": "initial=jg.load(workdir)[0]",
    "constants": "init() returns jg.load(workdir)[0]",
}


class Matrices(Trainer):
    """Regression on rows of wide matrices."""

    def __init__(self, config: Config, num_rows: int, *, constants=None, **options):
        super().__init__(config, **options)
        self._num_rows = num_rows
        self._constants = constants

    def init(self, key):
        if self._constants is not None:
            return jax.tree.map(jnp.asarray, self._constants)
        keys = jax.random.split(key, NUM_LEAVES)
        return [jax.random.normal(k, (self._num_rows, WIDTH)) * 1e-3 for k in keys]

    def loss(self, params, batch, key):
        found = sum(matrix[batch["row"]] for matrix in params)
        return jnp.mean((found - batch["y"]) ** 2, axis=-1)

    def optimizer(self):
        return optax.adam(1e-3)

    def dataset(self):
        rng = np.random.default_rng(0)
        return {
            "row": rng.integers(0, self._num_rows, 256).astype(np.int32),
            "y": rng.normal(size=(256, WIDTH)).astype(np.float32),
        }


def train(way: str, folder: pathlib.Path, num_rows: int) -> None:
    """One run, in this process; prints its peak in MB."""
    jax.config.update("jax_platforms", "cpu")
    source = str(folder / "scratch")
    options = {}
    if way == "workdir":
        options["initial"] = source
    elif way == "tree":
        options["initial"] = load(source)[0]
    elif way == "constants":
        options["constants"] = load(source)[0]
    config = Config(
        workdir=str(folder / way),
        batch=BatchLimits(base=32, max=32, micro=(32, 32), sizes=(32,)),
        epochs=1,
        policy="fixed",
        execution=Execution(compilation_cache=str(folder / f"cache_{way}")),
        reporting=Reporting(tensorboard=False, progress=False),
    )
    Matrices(config, num_rows, **options).fit()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=400, help="of the parameters")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_rows = args.megabytes * 10**6 // (4 * WIDTH * NUM_LEAVES)
    if args.child:
        train(args.child[0], pathlib.Path(args.child[1]), num_rows)
        return
    with tempfile.TemporaryDirectory(prefix="jaxgoodput-initial-") as name:
        folder, scratch = pathlib.Path(name), None
        print(f"{'':36}  peak MB  over scratch  cache MB")
        for way in dict.fromkeys(["scratch", *args.ways]):
            command = [sys.executable, __file__, "--megabytes", str(args.megabytes)]
            done = subprocess.run(
                [*command, "--child", way, name], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(f"{way} ended with {done.returncode}:\n{done.stderr[-2000:]}")
            peak = float(done.stdout.split()[-1])
            scratch = scratch or peak
            cache = sum(
                p.stat().st_size for p in (folder / f"cache_{way}").rglob("*") if p.is_file()
            )
            print(
                f"{WAYS[way]:36}  {peak:7.0f}  {peak / scratch:12.2f}  {cache / 1e6:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
