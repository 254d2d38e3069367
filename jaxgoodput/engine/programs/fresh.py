"""`FreshStates`: programs that make a state on a layout, or a part of one, from nothing."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxgoodput.engine import step as pure
from jaxgoodput.engine.programs.program import Program, shardings_of
from jaxgoodput.engine.state import TrainState
from jaxgoodput.parallel import partition as rules
from jaxgoodput.parallel.strategy import Layout, in_mesh


class FreshStates:
    """Builds the programs that make a state; no device ever holds more than its part of it.

    `state` is abstract, with the shardings of `layout`.
    """

    def __init__(self, problem: pure.Problem, layout: Layout, state: TrainState):
        self.problem = problem
        self.layout = layout
        self.state = state

    def init(self, given: tuple[str, ...] = ()) -> Program:
        """Build the program from a key and the leaves named in `given`, which it takes over, to a state."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.layout.replicated)
        leaves = rules.leaves_by_name(self.state.variables)
        # The model's own constraints hold in `init`, however the loss runs.
        make = in_mesh(self.problem.init, self.layout.mesh.abstract_mesh, self.layout.strategy)
        problem = dataclasses.replace(self.problem, init=make)

        def run(key: Array, *values: Array) -> TrainState:
            return pure.init_state(problem, key, dict(zip(given, values, strict=True)))

        arguments = (key, *(leaves[name] for name in given))
        donate = tuple(range(1, len(arguments)))
        return Program(run, donate, arguments, shardings_of(self.state), is_seldom=True)

    def average(self) -> Program:
        """Build the program from parameters to an average that starts at them."""
        run = partial(pure.first_average, self.problem)
        return Program(run, (), (self.state.params,), shardings_of(self.state.ema), is_seldom=True)

    def zeros(self) -> Program:
        """Build the program that makes a throw-away state of zeros."""

        def zero(s: jax.ShapeDtypeStruct) -> Array:
            if jnp.issubdtype(s.dtype, jax.dtypes.prng_key):
                return jnp.broadcast_to(jax.random.key(0), s.shape)
            return jnp.zeros(s.shape, s.dtype)

        make = partial(jax.tree.map, zero, self.state)
        return Program(make, (), (), shardings_of(self.state), is_seldom=True)
