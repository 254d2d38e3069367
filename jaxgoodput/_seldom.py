"""Compiler options for programs that run seldom: it matters more how long they take to compile."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

# XLA:CPU compiles most programs in 0.6 of the time without its newer emitters of fused loops. Steps that
# measure the noise then take 0.95 to 1.4 times as long. XLA of jax 0.12 has no others.
OLD_EMITTERS: Mapping[str, Any] = {"xla_cpu_use_fusion_emitters": False}
# Unoptimised machine code as well: another third of the time to compile, a quarter in all. Loops take 2 to 4
# times as long, 0.3 ns more for each addition; matrix products are not affected.
UNOPTIMISED: Mapping[str, Any] = {"xla_backend_optimization_level": 0}
SMALL = 1e8  # additions of a program that takes 30 ms longer without optimisation


def options_if_seldom(work: float = math.inf) -> dict[str, Any] | None:
    """Return the options for a program that runs seldom on the default device; None for the usual ones.

    `work` is how many additions take as long as the program's loops.
    """
    if jax.default_backend() != "cpu":
        return None
    options = dict(OLD_EMITTERS) if _knows_old_emitters() else {}
    if work <= SMALL:
        options |= UNOPTIMISED
    return options or None


@functools.cache
def _knows_old_emitters() -> bool:
    try:
        jax.jit(jnp.negative, compiler_options=dict(OLD_EMITTERS)).lower(0.0).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True
