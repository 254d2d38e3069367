"""Programs that take a state and its random key apart.

No step changes the key. As a typed key it would keep JAX from dispatching a program from C++, which costs the
host several times as much.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding
from jaxtyping import Array, PyTree

from jaxgoodput.engine.programs.program import Program, shardings_of
from jaxgoodput.engine.state import TrainState


class Keyless:
    """Builds programs of functions from a state to the next one, which take and return it without its key.

    `state` is abstract, with shardings; `sharding` is the key's.
    """

    def __init__(self, state: TrainState, sharding: Sharding):
        data = jax.eval_shape(jax.random.key_data, state.key)
        self._state = dataclasses.replace(state, key=None)
        self._data = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
        found = []
        # JAX says it of keys, concrete ones or inside a trace, but not of their types.
        jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), state.key)
        self._impl = found[0]

    def program(
        self,
        function: Callable[..., tuple[Any, ...]],
        donate: tuple[int, ...],
        inputs: tuple[PyTree, ...],
        out: tuple[PyTree, ...],
        *,
        is_seldom: bool = False,
    ) -> Program:
        """Build the program from (state, key, inputs) to (state, results); call it with a `KeylessCaller`.

        `function` goes from (state, inputs) to (state, results), its state with the key. `out` has the
        shardings of the results, and `donate` counts the program's own arguments.
        """

        def run(state: TrainState, data: Array, *inputs: PyTree) -> tuple[Any, ...]:
            key = jax.random.wrap_key_data(data, impl=self._impl)
            state, *results = function(dataclasses.replace(state, key=key), *inputs)
            return dataclasses.replace(state, key=None), *results

        arguments = (self._state, self._data, *inputs)
        return Program(run, donate, arguments, (shardings_of(self._state), *out), is_seldom)


class KeylessCaller:
    """Calls executables of `Keyless`, with states that have their key. Remembers the newest key's data."""

    def __init__(self):
        self._newest: tuple[Array, Array] | None = None

    def __call__(self, run: Callable[..., Any], state: TrainState, *inputs: Any) -> tuple[Any, ...]:
        """Return the next state, with the same key, and the other results."""
        newest = self._newest  # another thread may replace it meanwhile, to rehearse a size
        if newest is None or newest[0] is not state.key:
            newest = self._newest = state.key, jax.random.key_data(state.key)
        new, *results = run(dataclasses.replace(state, key=None), newest[1], *inputs)
        return dataclasses.replace(new, key=state.key), *results
