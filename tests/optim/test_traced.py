"""The trace of an optimizer tells which leaves it never moves, which counts are schedules', what it takes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax

from jaxgoodput.optim.constants import constant_outputs
from jaxgoodput.optim.traced import (
    UnsupportedOptimizer,
    by_updates,
    clocks_of,
    own_counts,
    traced_update,
    with_counts_at,
)

PARAMS: dict[str, Any] = {"a": jnp.ones((3, 2)), "b": {"c": jnp.ones(2), "d": jnp.ones(())}}
NAMES = ("a", "c", "d")
SCHEDULE = optax.cosine_decay_schedule(0.1, 50)
LATE = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(0.1)], [70_001])


def tree(values) -> dict[str, Any]:
    return {"a": values[0], "b": {"c": values[1], "d": values[2]}}


def masked_by_product(tx, frozen):
    def update(updates, params):
        return jax.tree.map(lambda m, u: u * jnp.full(u.shape, 1.0 - m), frozen, updates)

    return optax.chain(tx, optax.stateless(update))


def masked_by_choice(tx, frozen):
    def update(updates, params):
        return jax.tree.map(lambda m, u: jnp.where(jnp.asarray(m), 0.0, u), frozen, updates)

    return optax.chain(tx, optax.stateless(update))


def grouped(tx, other, frozen):
    labels = jax.tree.map(lambda m: "still" if m else "moves", frozen)
    return optax.multi_transform({"moves": tx, "still": other}, labels)


# Every way to write that some leaves stay as they are.
FREEZES = {
    "set_to_zero": lambda tx, m: grouped(tx, optax.set_to_zero(), m),
    "masked": lambda tx, m: optax.chain(tx, optax.masked(optax.set_to_zero(), m)),
    "before": lambda tx, m: optax.chain(optax.masked(optax.set_to_zero(), m), tx),
    "freeze": lambda tx, m: optax.chain(tx, optax.freeze(m)),
    "selective": lambda tx, m: optax.selective_transform(tx, freeze_mask=m),
    "rate 0": lambda tx, m: grouped(tx, optax.sgd(0.0), m),
    "scale 0": lambda tx, m: optax.chain(tx, optax.masked(optax.scale(0.0), m)),
    "schedule of 0": lambda tx, m: grouped(tx, optax.sgd(optax.constant_schedule(0.0)), m),
    "decay of 0": lambda tx, m: grouped(tx, optax.adam(optax.linear_schedule(0.0, 0.0, 9)), m),
    "product": masked_by_product,
    "choice": masked_by_choice,
}
WRAPPERS = {
    "plain": lambda tx: tx,
    "clipped": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "finite": lambda tx: optax.apply_if_finite(tx, 3),
    "named": lambda tx: optax.named_chain(("first", optax.identity()), ("second", tx)),
    "steps": lambda tx: optax.MultiSteps(tx, 3).gradient_transformation(),
    "injected": lambda tx: optax.inject_hyperparams(
        lambda step: optax.chain(tx, optax.scale(step))
    )(step=1.0),
}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(SCHEDULE, weight_decay=0.1),
    "late": lambda: optax.sgd(LATE),
    "muon": lambda: optax.contrib.muon(0.1),
}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    way=st.sampled_from(sorted(FREEZES)),
    wrapper=st.sampled_from(sorted(WRAPPERS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    frozen=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_exactly_the_leaves_that_are_frozen_never_move(way, wrapper, optimizer, frozen):
    """However they are frozen; a leaf that only moves after 70,000 steps moves."""
    found = traced_update(
        WRAPPERS[wrapper](FREEZES[way](OPTIMIZERS[optimizer](), tree(frozen))), PARAMS
    )
    decays = way == "before" and optimizer == "adamw"  # weight decay moves what has no gradient
    assert found.moves() == tuple(decays or not x for x in frozen)


def test_what_is_known_of_a_trace_is_true():
    """Each constant that is found is what the function returns, for any other arguments."""

    def function(x, n, flag):
        kept = jax.lax.cond(n > 3, lambda y: (y, n), lambda y: (-y, n + 1), x)
        doubled = jax.jit(lambda y: y * 2)(n)
        looped = jax.lax.fori_loop(0, n, lambda i, y: y + 1, 0)
        zero, rows = jax.lax.scan(lambda c, y: (c * y, c + 1.0), 0.0, x)
        until = jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] * 2, c[1] + 1), (0, 0))
        first = x * 0.0, kept[1], doubled, looped, jnp.where(flag, n, n), jnp.isfinite(x).all(), x
        return *first, zero, rows, until[0], until[1]

    traced = jax.make_jaxpr(function)(jnp.ones(3), 1, True)
    for n in (0, 3, 4, 7):
        found = constant_outputs(traced, {1: n})
        for x, flag in ((jnp.arange(3.0), True), (-jnp.ones(3), False)):
            for value, real in zip(found, function(x, n, flag), strict=True):
                assert value is None or np.all(np.asarray(real) == value)
        assert [value is None for value in found] == [
            *(False, False, False, True, False, False, True),
            *(False, False, False, True),
        ]


class Count(NamedTuple):
    step: Any


class Both(NamedTuple):
    step: Any
    mean: Any


def by_count(factor, state_of: Any = Count, count_of=lambda state: state.step):
    """A user's own link, whose update is `factor(updates, count)`."""

    def update(updates, state, params=None):
        count = count_of(state)
        return factor(updates, count, params), state_of(count + 1)

    return optax.GradientTransformation(lambda params: state_of(jnp.zeros((), jnp.int32)), update)


def scaled(updates, count, params):
    return jax.tree.map(lambda u: u * SCHEDULE(count), updates)


def decayed(updates, count, params):
    return jax.tree.map(lambda u, p: u + SCHEDULE(count) * p, updates, params)


def noisy(updates, count, params):
    key = jax.random.fold_in(jax.random.key(0), count)
    return jax.tree.map(lambda u: u + 1e-3 * jax.random.normal(key, u.shape), updates)


def seldom(updates, count, params):
    return jax.tree.map(lambda u: jnp.where(count % 3 == 2, u, 0), updates)


@pytest.mark.parametrize(
    ("link", "is_schedule"),
    [
        (by_count(scaled), True),
        (by_count(decayed), True),
        (by_count(scaled, lambda count: {"n": count}, lambda state: state["n"]), True),
        (by_count(scaled, lambda count: count, lambda state: state), True),
        (by_count(noisy), False),
        (by_count(seldom), False),
    ],
    ids=["rate", "decay", "in a dict", "bare", "random keys", "every third"],
)
def test_a_lone_count_of_the_users_is_a_schedule_if_it_acts_as_one(link, is_schedule):
    for tx, where in ((link, ""), (optax.chain(link, optax.sgd(0.1)), "[0]")):
        found = clocks_of(traced_update(tx, PARAMS))
        assert len(found.steady) == is_schedule
        assert all(path.startswith(where) for path in found.steady)
        assert not found.held


def test_a_count_beside_averages_is_for_them():
    """As in a user's own Adam, whose bias correction is a smooth function of the count, too."""

    def init(params):
        return Both(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        mean = jax.tree.map(lambda m, u: 0.9 * m + 0.1 * u, state.mean, updates)
        out = jax.tree.map(lambda m: m / (1 - 0.9 ** (state.step + 1)), mean)
        return out, Both(state.step + 1, mean)

    tx = optax.chain(optax.GradientTransformation(init, update), optax.sgd(SCHEDULE))
    assert clocks_of(traced_update(tx, PARAMS)).steady == {"[1][1].count"}


def unless_nan(tx):
    """What people write by hand: an update that holds a NaN is left out."""

    def update(updates, state, params=None):
        found, changed = tx.update(updates, state, params)
        bad = jnp.any(jnp.stack([jnp.isnan(g).any() for g in jax.tree.leaves(updates)]))
        kept = jax.tree.map(lambda new, old: jnp.where(bad, old, new), changed, state)
        return jax.tree.map(lambda u: jnp.where(bad, 0, u), found), kept

    return optax.GradientTransformation(tx.init, update)


STEADY = {
    "scale_by_schedule": (optax.sgd(SCHEDULE), 1),
    "inside of adam": (optax.adamw(SCHEDULE), 1),
    "injected": (optax.inject_hyperparams(optax.adam)(SCHEDULE, b1=SCHEDULE), 2),
    "weight decay": (optax.chain(optax.add_decayed_weights(SCHEDULE), optax.sgd(0.1)), 1),
    "groups": (grouped(optax.adam(SCHEDULE), optax.sgd(SCHEDULE), tree([True, False, True])), 2),
    "masked": (optax.masked(optax.sgd(SCHEDULE), tree([True, False, True])), 1),
    "if finite": (optax.apply_if_finite(optax.sgd(SCHEDULE), 3), 1),
    "if a number": (unless_nan(optax.sgd(SCHEDULE)), 1),
    "flat": (optax.flatten(optax.sgd(SCHEDULE)), 1),
    "muon": (optax.contrib.muon(SCHEDULE), 2),
    "schedule-free": (optax.contrib.schedule_free(optax.sgd(SCHEDULE), 0.1), 1),
}


@pytest.mark.parametrize("name", STEADY)
def test_schedules_of_optax_are_found_at_any_depth(name):
    tx, count = STEADY[name]
    found = clocks_of(traced_update(tx, PARAMS))
    if name == "weight decay":  # optax 0.2.6 never advances its count
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), PARAMS)
        count = int(tx.update(zeros, tx.init(zeros), zeros)[1][0].count)
    assert (len(found.steady), found.held) == (count, ())


def until(step: Any, **_: Any) -> Any:
    return step < 10_000


def after(step: Any, **_: Any) -> Any:
    return step > 9


HELD = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 3),
    "skipping": lambda tx: optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, until),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, after),
    "sam": lambda tx: optax.contrib.sam(tx, optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("inner", ["sgd", "adam", "chain"])
def test_a_wrapper_that_holds_a_schedule_is_found_and_named(name, inner):
    inside = {
        "sgd": optax.sgd(SCHEDULE),
        "adam": optax.adam(SCHEDULE),
        "chain": optax.chain(optax.clip(1.0), optax.sgd(SCHEDULE)),
    }[inner]
    traced = traced_update(optax.chain(HELD[name](inside), optax.scale(1.0)), PARAMS)
    found = clocks_of(traced)
    assert (len(found.steady), len(found.held)) == (0, 1)
    (named,) = by_updates(traced)
    assert name.split(",")[0].replace("skipping", "MultiSteps") in named


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    wrapper=st.sampled_from(["MultiSteps", "as a function", "skipping", "by size", "apply_every"]),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    outer=st.sampled_from(["plain", "clipped", "finite", "named"]),
    k=st.integers(1, 3),
)
def test_a_wrapper_that_lets_every_update_through_means_no_number_of_them(
    wrapper, optimizer, outer, k
):
    """Proven by the trace, however the 1 is written; the schedule inside then goes by progress."""

    def late(step: Any) -> Any:
        return 1 + (k - 1) * (step > 5)

    large = functools.partial(optax.skip_large_updates, max_squared_norm=1.0)
    inner = optax.sgd(SCHEDULE) if optimizer == "sgd" else optax.adamw(SCHEDULE)
    made = {
        "MultiSteps": lambda: optax.MultiSteps(inner, k),
        "as a function": lambda: optax.MultiSteps(inner, late),
        "skipping": lambda: optax.MultiSteps(inner, k, should_skip_update_fn=optax.skip_not_finite),
        "by size": lambda: optax.MultiSteps(inner, k, should_skip_update_fn=large),
        "apply_every": lambda: optax.chain(inner, optax.apply_every(k)),
    }[wrapper]()
    tx = optax.GradientTransformationExtraArgs(made.init, made.update)  # type: ignore[arg-type]
    traced = traced_update(WRAPPERS[outer](tx), PARAMS)
    passes = k == 1 and wrapper != "by size"
    assert (by_updates(traced) == ()) == passes
    found = clocks_of(traced)
    is_steady = passes or wrapper == "apply_every"
    assert (len(found.steady), len(found.held)) == ((1, 0) if is_steady else (0, 1))


def test_a_users_wrapper_that_holds_a_schedule_is_found():
    inner = optax.sgd(SCHEDULE)

    def update(updates, state, params=None):
        turn, own = state
        moved, after = inner.update(updates, own, params)
        after = jax.tree.map(lambda a, b: jnp.where(turn % 2 == 1, a, b), after, own)
        return moved, (turn + 1, after)

    def init(params):
        return jnp.zeros((), jnp.int32), inner.init(params)

    tx = optax.GradientTransformation(init, update)
    found = clocks_of(traced_update(tx, PARAMS))
    assert len(found.held) == 1


@given(count=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_only_the_counts_of_schedules_are_set(count):
    tx = optax.adamw(SCHEDULE)
    clocks = clocks_of(traced_update(tx, PARAMS))
    state: Any = tx.init(PARAMS)
    placed: Any = with_counts_at(state, clocks.steady, jnp.asarray(count))
    assert int(optax.tree.get(placed[2], "count")) == count
    jax.tree.map(np.testing.assert_array_equal, placed[0], state[0])


# -- arguments ---------------------------------------------------------------------------------------


def _takes_the_loss(updates, state, params=None, *, value):
    return updates, state


takes_the_loss: Any = _takes_the_loss


def plateau():
    return optax.contrib.reduce_on_plateau()


@pytest.mark.parametrize(
    "tx",
    [
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
        optax.chain(optax.clip(1.0), optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))),
        optax.chain(optax.sgd(0.1), plateau()),
        optax.polyak_sgd(),
        optax.GradientTransformationExtraArgs(
            optax.sgd(0.1).init, lambda updates, state, params=None: (updates, state)
        ),
        optax.GradientTransformationExtraArgs(optax.sgd(0.1).init, takes_the_loss),
    ],
    ids=["sam", "sam in a chain", "plateau", "polyak", "takes none", "takes the loss"],
)
def test_an_optimizer_gets_the_arguments_that_it_accepts(tx):
    traced = traced_update(tx, PARAMS)
    state = traced.tx.init(PARAMS)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    traced.tx.update(grads, state, PARAMS, value=jnp.ones(()), other="ignored")


@pytest.mark.parametrize(
    ("tx", "advice"),
    [
        (optax.lookahead(optax.sgd(0.1), 5, 0.5), "Config.ema"),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True), "opaque_mode=False"),
        (
            optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0),
            "one gradient per sample",
        ),
        (optax.lbfgs(), "line search"),
        (optax.contrib.sophia(0.1), "Hessian"),
        (
            optax.chain(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), plateau()),
            "missing|must be provided",
        ),
    ],
    ids=["lookahead", "opaque sam", "dpsgd", "lbfgs", "sophia", "contradiction"],
)
def test_what_needs_more_is_refused_by_a_sentence(tx, advice):
    with pytest.raises(UnsupportedOptimizer, match=advice) as refusal:
        traced_update(tx, PARAMS)
    assert "asks for more than gradients, parameters and the loss" in str(refusal.value)


def test_an_error_of_an_optimizers_own_is_quoted():
    def update(updates, state, params=None):
        raise RuntimeError("never on a Monday")

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(
        UnsupportedOptimizer, match=r"cannot make an update .*never on a Monday.*tx\.update"
    ):
        traced_update(tx, PARAMS)


FOLDED_TYPES = ["float32", "float16", "bfloat16", "int32", "uint32"]
FOLDED_OPERATIONS = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "max": lax.max,
    "min": lax.min,
    "pow": lambda x, y: lax.pow(x, y) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    "cubed": lambda x, y: lax.integer_pow(x, 3),
    "square": lambda x, y: lax.square(x),
    "sign": lambda x, y: lax.sign(x),
    "clamp": lambda x, y: lax.clamp(y, x, y),
    "less": lax.lt,
    "equal": lax.eq,
    "floor": lambda x, y: lax.floor(x) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    "mean": lambda x, y: (x / y).astype(x.dtype),
}


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(FOLDED_TYPES),
    name=st.sampled_from(list(FOLDED_OPERATIONS)),
    x=st.integers(0, 5),
    y=st.integers(1, 5),
)
@example(dtype="bfloat16", name="div", x=1, y=2)
@example(dtype="bfloat16", name="rem", x=5, y=2)
@example(dtype="bfloat16", name="pow", x=3, y=2)
def test_constants_are_computed_as_jax_does_in_every_type(dtype, name, x, y):
    function = FOLDED_OPERATIONS[name]
    inputs = [jnp.full(3, value, dtype) for value in (x, y)]
    (found,) = constant_outputs(jax.make_jaxpr(function)(*inputs), {0: x, 1: y})
    real = np.asarray(function(*inputs))
    assert found is not None and found.dtype == real.dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float64), real.astype(np.float64)[0], rtol=2 * _precision(dtype)
    )


def _precision(dtype):
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


CALLS = {
    "jit": jax.jit,
    "nested": lambda f: jax.jit(jax.jit(f)),
    "remat": jax.checkpoint,
    "custom_jvp": lambda f: _with_rule(jax.custom_jvp(f)),
    "custom_vjp": lambda f: _with_rules(jax.custom_vjp(f)),
}


def _with_rule(f):
    f.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    return f


def _with_rules(f):
    f.defvjp(lambda x: (x, None), lambda _, g: (g,))
    return f


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_looked_into(name):
    function = CALLS[name](lambda x: x * 2 + 1)
    (found,) = constant_outputs(jax.make_jaxpr(function)(jnp.ones(3)), {0: 3})
    assert found == 7


COMBINED = {
    "sum": (lambda a, b: (a + b) * 1.0, 0.0),
    "weighted": (lambda a, b: a + 2 * b, 0.0),
    "product": (lambda a, b: a * b + a * 0, 1.0),
    "largest": (lambda a, b: lax.max(a, b) * 1.0 + 0 * a, 0.0),
}
WAYS = {
    "reduce": lambda x, start, f: lax.reduce(x, np.float32(start), f, (0,)),
    "reduce_window": lambda x, start, f: lax.reduce_window(
        x, np.float32(start), f, (3,), (3,), "VALID"
    )[0],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COMBINED)
def test_a_function_that_is_called_for_each_element_is_not_taken_for_one_call(way, name):
    """`lax.reduce` has as many inputs as its function has arguments, and calls it many times."""
    function, start = COMBINED[name]

    def update(updates, state, params=None):
        total = WAYS[way](state, start, function)
        known = WAYS[way](jnp.full(3, 2.0), start, function)
        return jax.tree.map(lambda g: g * (total - known), updates), state

    tx = optax.GradientTransformation(lambda params: jnp.full(4, 2.0)[:3], update)
    traced = traced_update(tx, PARAMS)
    assert all(traced.moves())  # unknown
    (found,) = constant_outputs(
        jax.make_jaxpr(lambda x: WAYS[way](x * 0 + 2, start, function))(jnp.ones(3)), {}
    )
    real = WAYS[way](jnp.full(3, 2.0), start, function)
    assert found is None or found == real


class ProdigyState(NamedTuple):
    """A user's own state, with a name that optax has too."""

    count: Any


WITH_OWN_COUNTS = {
    "prodigy": (optax.contrib.prodigy, True),
    "dadapt_adamw": (optax.contrib.dadapt_adamw, True),
    "momo": (optax.contrib.momo, True),
    "momo_adam": (optax.contrib.momo_adam, True),
    **({"madgrad": (optax.contrib.madgrad, True)} if hasattr(optax.contrib, "madgrad") else {}),
    "ademamix": (lambda rate: optax.contrib.ademamix(0.1, alpha=rate), False),
    "schedule_free": (lambda rate: optax.contrib.schedule_free(optax.sgd(0.1), rate), False),
}


@pytest.mark.parametrize("is_deep", [False, True], ids=["alone", "deep"])
@pytest.mark.parametrize("name", WITH_OWN_COUNTS)
def test_optimizers_with_schedules_of_their_own_are_named(name, is_deep):
    """A constant needs no name, if the trace tells it from a schedule."""
    make, needs_count_for_sums = WITH_OWN_COUNTS[name]
    for rate, is_named in ((SCHEDULE, True), (0.1, needs_count_for_sums)):
        tx = make(rate)
        if is_deep:
            tx = optax.chain(optax.clip(1.0), tx, optax.scale_by_schedule(SCHEDULE))
        expected = (f"optax.contrib.{name}",) if is_named else ()
        assert own_counts(traced_update(tx, PARAMS)) == expected


def test_a_users_own_state_is_not_taken_for_one_of_optax_by_its_name():
    tx = optax.chain(by_count(scaled, ProdigyState, lambda state: state.count), optax.sgd(0.1))
    assert own_counts(traced_update(tx, PARAMS)) == ()
