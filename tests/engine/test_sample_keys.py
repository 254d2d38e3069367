"""A sample's key is a function of the run's key, the epoch and the index: of nothing else, and of all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.data.rows import numbered
from jaxgoodput.engine.programs.sample_keys import sample_keys

# Most pairs are close to each other or to a border of 32 bits.
EDGES = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62]
NUMBER = st.sampled_from(EDGES) | st.integers(0, 2**62)
PLACES = st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=8)


def words(places):
    epochs, indices = (np.array(x, np.int64) for x in zip(*places, strict=True))
    return jnp.asarray(numbered({"x": indices}, epochs, indices).numbers)


def bits(keys):
    return [tuple(row) for row in np.asarray(jax.random.key_data(keys)).tolist()]


# Padded to one shape, which is compiled once.
KEYS = jax.jit(sample_keys)


def keys_of(places, key):
    whole = [*places, *[(0, 0)] * (16 - len(places))]
    return bits(KEYS(key, words(whole)))[: len(places)]


@given(places=PLACES, seed=st.integers(0, 3))
def test_samples_have_equal_keys_if_epoch_and_index_are_equal_and_only_then(places, seed):
    twice = [*places, *reversed(places)]
    found = dict(zip(twice, keys_of(twice, jax.random.key(seed)), strict=True))
    assert keys_of(twice, jax.random.key(seed)) == [found[place] for place in twice]
    assert len(set(found.values())) == len(found)


@given(places=PLACES)
def test_another_seed_and_epoch_and_index_swapped_give_other_keys(places):
    swapped = [(index, epoch) for epoch, index in places if index != epoch]
    one, other = (set(keys_of(places, jax.random.key(seed))) for seed in (0, 1))
    assert not one & other
    if swapped and not set(swapped) & set(places):
        assert not one & set(keys_of(swapped, jax.random.key(0)))


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_what_is_drawn_from_a_key_does_not_depend_on_the_keys_beside_it(kind):
    """Keys of kind rbg would all draw what the first one of an array draws."""
    places = [(0, i) for i in range(6)]
    draw = jax.vmap(lambda key: jax.random.normal(key, (3,)))
    key = jax.random.key(0, impl=kind)
    together = np.asarray(draw(sample_keys(key, words(places))))
    assert len(np.unique(together)) == together.size
    alone = [draw(sample_keys(key, words([place])))[0] for place in places]
    np.testing.assert_array_equal(together, np.stack(alone))
