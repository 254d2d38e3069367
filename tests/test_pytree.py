"""A packed tree is the tree: it comes back as it was, and a part of it can be replaced."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput._pytree import PackedTree, one_vector

NUMBERS = st.sampled_from([0.0, 1.5, -3.0, np.inf, -np.inf, np.nan])
LEAVES = st.lists(
    st.one_of(
        NUMBERS.map(np.float32),
        st.booleans().map(np.bool_),
        st.lists(NUMBERS, min_size=1, max_size=3).map(lambda x: np.array(x, np.float32)),
        st.just(np.ones((2, 2), np.float32)),
    ),
    min_size=1,
    max_size=6,
)


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == np.shape(b) and a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@given(leaves=LEAVES, jitted=st.booleans())
def test_a_tree_comes_back_as_it_was(leaves, jitted):
    def there_and_back(leaves):
        return dataclasses.replace(PackedTree.of(leaves)).tree

    same((jax.jit(there_and_back) if jitted else there_and_back)(leaves), leaves)


@given(leaves=LEAVES, which=st.sets(st.integers(0, 5)))
def test_only_the_leaves_that_are_new_change(leaves, which):
    """Whatever the others are: NaN and infinities stay as well."""

    @jax.jit
    def changed(packed):
        old = packed.tree
        new = [
            jnp.logical_not(x) if x.dtype == bool else jnp.full_like(x, 7.0) if i in which else x
            for i, x in enumerate(old)
        ]
        return packed.replaced(old, new)

    packed = PackedTree.of(leaves)
    expected = [
        np.logical_not(x) if x.dtype == bool else np.full_like(x, 7.0) if i in which else x
        for i, x in enumerate(leaves)
    ]
    same(changed(packed).tree, expected)


@given(leaves=LEAVES)
def test_one_vector_has_all_elements_in_order(leaves):
    expected = np.concatenate([np.ravel(x).astype(np.float32) for x in leaves])
    np.testing.assert_array_equal(one_vector(leaves, jnp.float32), expected)
