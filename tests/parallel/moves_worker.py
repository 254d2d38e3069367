"""The script that `test_move_processes.py` starts: moves over the devices of several processes.

Prints `routes=` and `moved=`, the pairs that arrived bitwise, and `refused=`, why other devices are not.
"""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxgoodput
from jaxgoodput._jax import listen_for_compilations
from jaxgoodput.parallel.move import Move
from jaxgoodput.parallel.once import Once
from jaxgoodput.parallel.strategy import Strategy

PAIRS = (
    (Strategy(data=4), Strategy(fsdp=4)),
    (Strategy(fsdp=4), Strategy(tensor=4)),
    (Strategy(data=2, tensor=2), Strategy(fsdp=2, tensor=2)),
    (Strategy(fsdp=2, tensor=2), Strategy(data=2, fsdp=2)),
    (Strategy(fsdp=4), Strategy(data=4)),
)
SPECS = {"w": P("fsdp", "tensor"), "v": P("tensor", "fsdp"), "b": P("fsdp"), "count": P()}


def host(number):
    """Values of leaf `number`, the same in every process."""
    rng = np.random.default_rng(number)
    shapes = {"w": (16, 32), "v": (16, 32), "b": (32,), "count": ()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def shardings(layout):
    return {name: layout.sharding(spec) for name, spec in SPECS.items()}


def placed(tree, layout):
    return {
        name: jax.make_array_from_callback(x.shape, layout.sharding(SPECS[name]), x.__getitem__)
        for name, x in tree.items()
    }


def main():
    jaxgoodput.initialize()
    devices, programs, routes = jax.devices(), Once(), []
    moved = 0
    for number, (old, new) in enumerate(PAIRS):
        tree = host(number)
        state = placed(tree, old.on(devices))
        target = shardings(new.on(devices))
        move = Move.compile(state, target, programs=programs)
        compiled = []
        undo = listen_for_compilations(compiled.append)
        result = move(state)
        undo()
        same = all(x.is_deleted() for x in state.values()) and not compiled
        for name, x in result.items():
            same &= x.sharding == target[name]
            for shard in x.addressable_shards:
                same &= np.array_equal(np.asarray(shard.data), tree[name][shard.index])
        moved += same
        routes += sorted(group.plan.route for group in move.groups)
    print(f"moved={moved}", flush=True)
    print(f"routes={','.join(routes)}", flush=True)
    try:
        whole = placed(host(0), Strategy(fsdp=4).on(devices))
        Move.compile(whole, shardings(Strategy(fsdp=2).on(devices[:2])))
    except ValueError as error:
        print(f"refused={error}", flush=True)


if __name__ == "__main__":
    main()
