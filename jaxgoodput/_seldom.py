"""Compiler options for programs that run seldom: it matters more how long they take to compile."""

import functools

import jax
import jax.numpy as jnp

# XLA:CPU compiles most programs in 0.6 of the time without its newer emitters of fused loops. Steps that
# measure the noise then take 0.95 to 1.4 times as long. XLA of jax 0.12 has no others.
SELDOM: dict[str, str | bool] = {"xla_cpu_use_fusion_emitters": False}


@functools.cache
def options_if_seldom() -> dict[str, str | bool] | None:
    """Return the options for a program that runs seldom on the default device; None for the usual ones."""
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(jnp.negative, compiler_options=SELDOM).lower(0.0).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return None
        raise
    return SELDOM
