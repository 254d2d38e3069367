"""How long a training step takes: Pollux's model with seven parameters, and one more for the optimizer.

A step runs `num_micro_batches` micro-batches on every replica. All but the last only compute; the
last one also synchronises, partly hidden behind its computation; the optimizer then runs once:

    last = (compute^overlap + sync^overlap)^(1/overlap)
    step = (num_micro_batches - 1) * compute + last + update_s

Every function takes Python numbers, numpy arrays (float64 in, float64 out) or JAX arrays and tracers, and
broadcasts. Source: Qiao et al., "Pollux", OSDI 2021, equations 8-11. `update_s` is our addition; 0 gives the
published model.
"""

from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxgoodput._pytree import struct

# A number, a numpy array or a JAX array (tracers included) of any one shape that broadcasts. In JSON, a
# number.
Numeric: TypeAlias = Annotated[Any, float]

NO_SYNC_S = 1e-8  # synchronisation time of a single replica: Pollux's stand-in for zero


@struct
class PerfParams:
    """The cost of a step; scalars, or arrays of one shape. NaN means never measured.

    The published symbols are in brackets.
    """

    compute_base: Numeric
    """[alpha_c] Seconds per micro-batch, whatever its size."""
    compute_per_sample: Numeric
    """[beta_c] Seconds per sample of a micro-batch."""
    intra_base: Numeric
    """[alpha_r] Seconds per step to synchronise two replicas on one node."""
    intra_per_replica: Numeric
    """[beta_r] Additional seconds per step for each replica beyond the second, on one node."""
    inter_base: Numeric
    """[alpha_n] Seconds per step to synchronise two replicas on two nodes."""
    inter_per_replica: Numeric
    """[beta_n] Additional seconds per step for each replica beyond the second, on several nodes."""
    overlap: Numeric
    """[gamma] Overlap of computing and synchronising: 1 for none, 10 for nearly all."""
    update_s: Numeric = 0.0
    """Seconds per step of the optimizer's own pass; 0 gives the published model."""


@struct
class Feeding:
    """Time to prepare a batch while another one trains, such as reading table rows: a line in its size."""

    base_s: Numeric
    """Seconds per batch."""
    per_sample_s: Numeric
    """Seconds per sample of the global batch."""


@struct
class Placement:
    """The nodes and replicas that one job runs on: scalars, or arrays of one shape."""

    num_nodes: Numeric
    """Number of nodes, at least 1."""
    num_replicas: Numeric
    """Number of replicas over all nodes, at least `num_nodes`."""


def namespace(*values: Any) -> Any:
    """Return `jax.numpy` if any leaf of `values` is a JAX array or tracer, else `numpy`."""
    is_jax = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values))
    return jnp if is_jax else np


def compute_time(perf: PerfParams, micro_batch_size: Numeric) -> Numeric:
    """Return the seconds of one micro-batch on its own, forward and backward.

    `micro_batch_size` is in samples per replica.
    """
    return perf.compute_base + perf.compute_per_sample * micro_batch_size


def feeding_time(feeding: Feeding, global_batch_size: Numeric) -> Numeric:
    """Return the seconds to prepare one batch, during the step of the batch before."""
    return feeding.base_s + feeding.per_sample_s * global_batch_size


def sync_time(perf: PerfParams, placement: Placement) -> Numeric:
    """Return the seconds to average the gradients over the replicas, hidden or not.

    One replica takes `NO_SYNC_S`; several take the intra-node or the inter-node time.
    """
    xp = namespace(perf, placement)
    nodes, replicas = placement.num_nodes, placement.num_replicas
    # The published code never lets this be zero; the floor is kept so that results agree to the bit.
    beyond_two = xp.maximum(xp.asarray(replicas) - 2, 1e-8)
    inter = perf.inter_base + perf.inter_per_replica * beyond_two
    intra = perf.intra_base + perf.intra_per_replica * beyond_two
    alone = NO_SYNC_S + NO_SYNC_S * beyond_two
    return xp.where(xp.asarray(nodes) > 1, inter, xp.where(xp.asarray(replicas) > 1, intra, alone))


def last_micro_batch_time(
    perf: PerfParams, placement: Placement, micro_batch_size: Numeric
) -> Numeric:
    """Return the seconds of the micro-batch that also synchronises: a p-norm of two times, p = overlap."""
    xp = namespace(perf, placement, micro_batch_size)
    log_compute = xp.log(compute_time(perf, micro_batch_size))
    log_sync = xp.log(sync_time(perf, placement))
    # Computed in log space, because a time of microseconds to the tenth power leaves the range of float32.
    # numpy's logaddexp would warn about the NaN that stands for an unknown link.
    longer = xp.maximum(log_compute, log_sync)
    apart = xp.abs(log_compute - log_sync)
    return xp.exp(longer + xp.log1p(xp.exp(-perf.overlap * apart)) / perf.overlap)


def step_time(
    perf: PerfParams,
    placement: Placement,
    micro_batch_size: Numeric,
    num_micro_batches: Numeric = 1,
) -> Numeric:
    """Return the seconds of one whole step of `num_micro_batches` >= 1 micro-batches per replica.

    NaN if the placement needs a link that was never measured.

    >>> perf = PerfParams(compute_base=0.1, compute_per_sample=0.01, intra_base=0.05,
    ...     intra_per_replica=0.0, inter_base=float("nan"), inter_per_replica=float("nan"),
    ...     overlap=1.0, update_s=0.02)
    >>> round(float(step_time(perf, Placement(num_nodes=1, num_replicas=2), 10, 3)), 6)
    0.67
    """
    alone = compute_time(perf, micro_batch_size)
    last = last_micro_batch_time(perf, placement, micro_batch_size)
    return (num_micro_batches - 1) * alone + last + perf.update_s
