"""What is computed once for leaves that are treated alike is what each of them gets in a loop of optax's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.optim.folded import FoldedUpdate
from jaxgoodput.optim.traced import clocks_of, traced_update

SCHEDULE = optax.linear_schedule(0.1, 0.0, 20)


def by_place(updates: Any, params: Any) -> Any:
    return [x * i for i, x in enumerate(updates)]


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(SCHEDULE, momentum=0.9),
    "adamw": lambda: optax.adamw(SCHEDULE, weight_decay=0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "lamb": lambda: optax.lamb(0.1),
    "muon": lambda: optax.contrib.muon(0.1),
    # Without noise, because random numbers are taken to be the ones in the middle.
    "keyed": lambda: optax.chain(optax.add_noise(0.0, 0.5, 0), optax.sgd(0.1)),
    "prodigy": lambda: optax.contrib.prodigy(),
    "steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(SCHEDULE),
    "half": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "by place": lambda: optax.stateless(by_place),
}


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    first=st.sampled_from(sorted(OPTIMIZERS)),
    second=st.sampled_from(["", "sgd", "adamw", "muon"]),
    kinds=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    entries=st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3),
)
@jax.numpy_rank_promotion("allow")
def test_each_leaf_has_the_update_and_the_state_of_its_class(first, second, kinds, entries):
    shapes = [(2, 3), (3,), (3, 2)]
    params = [jnp.full(shapes[kind], 0.2) for kind in kinds]
    tx = OPTIMIZERS[first]()
    if second and first != "by place":
        labels = ["first" if i % 2 else "second" for i in range(len(kinds))]
        tx = optax.multi_transform({"first": tx, "second": OPTIMIZERS[second]()}, labels)
    traced = traced_update(tx, params)
    folded = FoldedUpdate.of(traced, frozenset())

    @jax.jit
    def both(state: Any, own: Any, entry: Any) -> Any:
        def gradient(x):
            return jnp.full(x.shape, entry, x.dtype)

        grads = jax.tree.map(gradient, params)
        updates, state = traced.tx.update(grads, state, params, value=jnp.ones(()))
        moved, own = folded.update(gradient, own, 0.2, 0)
        return updates, state, moved, own

    # Of a constant matrix, all singular values but one are rounding, which Muon's five iterations multiply by
    # 3.4445 each. It depends on how the compiler orders the sums.
    rounding = 5e-4 if "muon" in (first, second) else 1e-5
    state, own = tx.init(params), folded.init(0.2)
    for entry in entries:
        updates, state, moved, own = both(state, own, entry)
        for update, at in zip(updates, folded.leaf_classes, strict=True):
            np.testing.assert_allclose(moved[at], update, rtol=rounding, atol=1e-7)
        for leaf, at in zip(jax.tree.leaves(state), folded.state_classes, strict=True):
            assert own[at].dtype == leaf.dtype
            np.testing.assert_allclose(plain(own[at]), plain(leaf), rtol=1e-5, atol=1e-7)


def plain(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x.astype(jnp.float32)


@pytest.mark.parametrize("name", ["adamw", "clipped", "muon"])
def test_many_leaves_are_as_few_as_their_kinds(name):
    def classes(num_layers):
        params = [{"w": jnp.ones((3, 2)), "b": jnp.ones(2)} for _ in range(num_layers)]
        folded = FoldedUpdate.of(traced_update(OPTIMIZERS[name](), params), frozenset())
        return len(set(folded.leaf_classes)), len(set(folded.state_classes))

    assert classes(1) == classes(20) and classes(20)[0] == 2


def test_leaves_that_random_numbers_part_are_not_one():
    params = [jnp.ones((3,))] * 4
    folded = FoldedUpdate.of(traced_update(OPTIMIZERS["keyed"](), params), frozenset())
    assert len(set(folded.leaf_classes)) == 4


def test_schedules_are_held_at_the_count_that_is_asked_for():
    traced = traced_update(optax.sgd(SCHEDULE), [jnp.ones(())])
    folded = FoldedUpdate.of(traced, clocks_of(traced).steady)
    for count in (0, 5, 15):
        state = folded.init(0.0)
        for _ in range(2):
            (moved,), state = folded.update(lambda x: jnp.ones(x.shape), state, 0.0, count)
            assert np.asarray(moved).item() == pytest.approx(-np.asarray(SCHEDULE(count)).item())
