"""A run of several processes that loses one value in one process, or in the part of the state that it holds.

jaxgoodput run --nproc-per-node 2 -- python certified_worker.py OUT KIND RANK
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import problems

from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.control import Diverged

LARGE, SPOILT_AT = (2, 10_000), 8
STRATEGIES = {"copies": (), "cut": (Strategy(fsdp=2),)}


class Large(problems.Mean):
    def init(self, key):
        return {**super().init(key), "large": jnp.ones(LARGE)}

    def loss(self, params, batch, key):
        return super().loss({"w": params["w"]}, batch, key) + 1e-4 * jnp.mean(params["large"])


def main():
    out, kind, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

    class Spoils(problems.InStep):
        def _dispatch(self, batch):
            super()._dispatch(batch)
            if self.now.step != SPOILT_AT:
                return
            large = self.now.state.params["large"]
            with jax.transfer_guard("allow"):
                parts = [jnp.array(x.data, copy=True) for x in large.addressable_shards]
                if jax.process_index() == rank:
                    parts = [x.at[0, 77].set(jnp.nan) for x in parts]
                large = jax.make_array_from_single_device_arrays(large.shape, large.sharding, parts)
            self.now.state.params["large"] = large

    seen = problems.Recorder(lambda e: trainer.request_save() if e.step in (3, SPOILT_AT) else None)
    settings = problems.config(out / "run", epochs=4, strategies=STRATEGIES[kind])
    hooks = [seen] if jax.process_index() == 0 else []
    trainer = Large(settings, hooks=hooks, loop=Spoils)
    try:
        trainer.fit()
    except Diverged as ended:
        found = {"said": str(ended), "safe": ended.safe_step}
        (out / f"{jax.process_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
