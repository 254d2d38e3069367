"""Flax models as pure functions do what the modules themselves do, in either mode."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgoodput import from_linen, from_nnx
from jaxgoodput.parallel.partition import param_specs, path_name
from jaxgoodput.parallel.strategy import Strategy

FEATURES = 6
LAYERS = 4
NO_STACK: Any = "no stack"  # None is a name that a stacked dimension may have
KERNEL = nn.initializers.lecun_normal()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(FEATURES)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.norm = nnx.BatchNorm(FEATURES, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


def linen():
    return from_linen(Linen(), train_kwargs={"train": True}, predict_kwargs={"train": False})


def of_nnx():
    return from_nnx(lambda rngs: Nnx(rngs))


@pytest.fixture(params=[linen, of_nnx], ids=["linen", "nnx"])
def model(request):
    return request.param()


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.normal(size=(32, FEATURES)), jnp.float32)


def test_training_moves_the_statistics_and_prediction_uses_them(model, key, x):
    made = model.init(key, x)
    assert len(jax.tree.leaves(made.params)) == 4  # two weights and two biases or scales
    before = jax.tree.leaves(made.model_state)
    out, after = jax.jit(model.train)(made.params, made.model_state, key, x)
    assert out.shape == (32, FEATURES)
    assert jax.tree.structure(after) == jax.tree.structure(made.model_state)
    moved = [np.any(a != b) for a, b in zip(before, jax.tree.leaves(after), strict=True)]
    assert len(moved) == 2 and all(moved)  # the running mean and variance
    predict = jax.jit(model.predict)
    first, again = (predict(made.params, after, x) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != predict(made.params, made.model_state, x))


def test_dropout_follows_the_key(model, key, x):
    made = model.init(key, x)
    train = jax.jit(model.train)
    out = train(made.params, made.model_state, key, x)[0]
    np.testing.assert_array_equal(out, train(made.params, made.model_state, key, x)[0])
    other = train(made.params, made.model_state, jax.random.key(7), x)[0]
    dropped = np.asarray(out == 0)
    assert 0.3 < dropped.mean() < 0.7 and np.any(dropped != np.asarray(other == 0))


def test_gradients_reach_every_parameter(model, key, x):
    made = model.init(key, x)

    def loss(params):
        return jnp.sum(model.train(params, made.model_state, key, x)[0] ** 3)

    grads = jax.tree.leaves(jax.grad(loss)(made.params))
    # A bias before a normalisation has none: the mean takes it away.
    assert sum(float(jnp.max(jnp.abs(g))) > 1e-3 for g in grads) == 3


def test_an_nnx_model_predicts_what_the_module_does(key, x):
    module = Nnx(nnx.Rngs(key))
    model = of_nnx()
    made = model.init(key, x)
    module.eval()
    np.testing.assert_allclose(
        model.predict(made.params, made.model_state, x), module(x), rtol=1e-6
    )


# -- partitioning metadata -------------------------------------------------------------------------


class LinenBlock(nn.Module):
    """One layer; `partition` is a way of flax to name the dimensions of its kernel, or None."""

    partition: Any
    names: tuple

    @nn.compact
    def __call__(self, x, _=None):
        init = KERNEL if self.partition is None else self.partition(KERNEL, self.names)
        return jnp.tanh(nn.Dense(FEATURES, kernel_init=init)(x)), None


class LinenNet(nn.Module):
    partition: Any
    names: tuple = ("fsdp", "tensor")
    stack: Any = NO_STACK  # the name of the stacked dimension

    @nn.compact
    def __call__(self, x):
        block = LinenBlock
        if self.stack != NO_STACK:
            block = nn.scan(
                LinenBlock,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=LAYERS,
                metadata_params={nn.PARTITION_NAME: self.stack},
            )
        return block(self.partition, self.names, name="block")(x, None)[0]


def linen_net(partition=nn.with_partitioning, names=("fsdp", "tensor"), stack=NO_STACK, axes=None):
    return from_linen(LinenNet(partition, names, stack), axes=axes)


class NnxNet(nnx.Module):
    def __init__(self, rngs, names, stack):
        init = KERNEL if names is None else nnx.with_partitioning(KERNEL, names)

        def layer(rngs):
            return nnx.Linear(FEATURES, FEATURES, kernel_init=init, rngs=rngs)

        self.stack = stack
        if stack == NO_STACK:
            self.block = layer(rngs)
        else:
            metadata = {nnx.PARTITION_NAME: stack}
            many = nnx.vmap(layer, in_axes=0, out_axes=0, transform_metadata=metadata)
            self.block = nnx.split_rngs(splits=LAYERS)(many)(rngs)

    def __call__(self, x):
        if self.stack == NO_STACK:
            return jnp.tanh(self.block(x))
        forward = nnx.scan(
            lambda layer, x: jnp.tanh(layer(x)),
            in_axes=(0, nnx.Carry),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: self.stack},
        )
        return forward(self.block, x)


def nnx_net(names=("fsdp", "tensor"), stack=NO_STACK, axes=None):
    return from_nnx(lambda rngs: NnxNet(rngs, names, stack), axes=axes)


LOGICAL = {"names": ("embed", "mlp"), "axes": {"embed": "fsdp", "mlp": "tensor"}}
STACKED = {"names": ("embed", "mlp"), "axes": {"embed": None, "mlp": "tensor", "layers": None}}
WITH_SPECS = {
    "linen": (linen_net(), P("fsdp", "tensor")),
    "linen, whole": (linen_net(names=(None, None)), P(None, None)),
    "linen, logical": (linen_net(nn.with_logical_partitioning, **LOGICAL), P("fsdp", "tensor")),
    "linen, logical without the word": (linen_net(**LOGICAL), P("fsdp", "tensor")),
    "linen, its own rules": (
        linen_net(
            lambda init, names: nn.with_logical_partitioning(
                init, names, rules=(("embed", "model"), ("mlp", "fsdp"), ("mlp", "tensor"))
            ),
            names=("embed", "mlp"),
            axes={"model": "tensor"},
        ),
        P("tensor", "fsdp"),
    ),
    "linen, tuples": (
        linen_net(names=(("data", "fsdp"), None), axes={"data": None}),
        P("fsdp", None),
    ),
    "linen, own names mapped": (linen_net(axes={"fsdp": None}), P(None, "tensor")),
    "linen, stack without name": (linen_net(stack=None), P(None, "fsdp", "tensor")),
    "linen, stack": (
        linen_net(nn.with_logical_partitioning, stack="layers", **STACKED),
        P(None, None, "tensor"),
    ),
    "nnx": (nnx_net(), P("fsdp", "tensor")),
    "nnx, logical": (nnx_net(**LOGICAL), P("fsdp", "tensor")),
    "nnx, stack without name": (nnx_net(stack=None), P(None, "fsdp", "tensor")),
    "nnx, stack": (nnx_net(stack="layers", **STACKED), P(None, None, "tensor")),
}


@pytest.mark.parametrize("model, spec", WITH_SPECS.values(), ids=WITH_SPECS)
def test_metadata_becomes_specs_and_leaves_the_parameters(model, spec, key, x):
    made = model.init(key, x)
    ((name, found),) = made.specs
    assert found == spec
    kernels = {
        path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(made.params)
    }
    assert isinstance(kernels[name], jax.Array) and kernels[name].ndim == len(spec)
    assert jax.eval_shape(model.init, key, x).specs == made.specs
    again = jax.jit(model.init)(key, x)
    assert jax.tree.structure(again) == jax.tree.structure(made) and again.specs == made.specs


PLAIN = {
    "linen": (linen_net(), linen_net(None)),
    "linen, stack": (linen_net(stack=None), linen_net(None, stack=None)),
    "nnx": (nnx_net(), nnx_net(None)),
    "nnx, stack": (nnx_net(stack=None), nnx_net(None, stack=None)),
}


@pytest.mark.parametrize("model, plain", PLAIN.values(), ids=PLAIN)
def test_a_model_with_metadata_computes_what_one_without_does(model, plain, key, x):
    made, expected = model.init(key, x), plain.init(key, x)
    assert expected.specs == ()
    jax.tree.map(np.testing.assert_array_equal, made.params, expected.params)
    out, _ = jax.jit(model.train)(made.params, made.model_state, key, x)
    same, _ = jax.jit(plain.train)(expected.params, expected.model_state, key, x)
    np.testing.assert_array_equal(out, same)
    predicted = jax.jit(model.predict)(made.params, made.model_state, x)
    np.testing.assert_array_equal(predicted, out)


@pytest.mark.parametrize("model", [linen_net(), nnx_net()], ids=["linen", "nnx"])
def test_parameters_are_placed_as_the_metadata_says(model, key, x):
    layout = Strategy(data=2, fsdp=2, tensor=2).on(jax.devices())
    blank = jax.eval_shape(model.init, key, x)
    found = param_specs(layout, blank.params, blank.specs)
    made = jax.jit(model.init, out_shardings=found.shardings(blank))(key, x)
    ((name, _),) = blank.specs
    for path, leaf in jax.tree_util.tree_leaves_with_path(made.params):
        # The bias goes with the outputs of its kernel.
        expected = P("fsdp", "tensor") if path_name(path) == name else P("tensor")
        assert leaf.sharding.spec == expected
    whole = model.predict(jax.device_get(made.params), {}, x)
    np.testing.assert_allclose(model.predict(made.params, {}, x), whole, rtol=1e-5, atol=1e-6)


def test_a_box_without_names_says_nothing(key, x):
    model = linen_net(lambda init, _: nn.with_partitioning(init, None))  # pyright: ignore[reportArgumentType]
    made = model.init(key, x)
    assert made.specs == () and all(isinstance(y, jax.Array) for y in jax.tree.leaves(made.params))


class Variable(nnx.Module):
    def __init__(self, **metadata):
        self.weight = nnx.Param(jnp.ones((4, 8)), **metadata)
        self.rest = nnx.BatchStat(jnp.ones(4), out_sharding=("unknown",))

    def __call__(self, x):
        return x @ self.weight


def test_an_nnx_variable_may_carry_a_spec_a_sharding_or_rules(key):
    layout = Strategy(fsdp=2).on(jax.devices()[:2])
    rules = (("in", "tensor"), ("tensor", "fsdp"))  # a rule's result is not looked up again
    cases = (
        {"out_sharding": P("tensor")},
        {"out_sharding": NamedSharding(layout.mesh, P("tensor"))},
        {"out_sharding": ("in",), "sharding_rules": rules},
    )
    for metadata in cases:
        model = from_nnx(lambda rngs, metadata=metadata: Variable(**metadata))
        assert model.init(key).specs == (("weight", P("tensor")),)
        # A mutable state is not cut: the names of its dimensions are nobody's business.
        assert model.init(key).model_state["rest"].shape == (4,)
    assert from_nnx(lambda rngs: Variable()).init(key).specs == ()


@pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning")
def test_the_old_name_of_the_metadata_is_understood(key):
    model = from_nnx(lambda rngs: Variable(sharding=(None, "fsdp")))
    assert model.init(key).specs == (("weight", P(None, "fsdp")),)


@pytest.mark.parametrize("net", [linen_net, nnx_net])
@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"names": ("embed", "mlp"), "axes": {"mlp": "tensor"}},
            r"block.*kernel calls a dimension 'embed'.*neither.*Map it in axes=\{'embed': 'tensor'\}.*None",
        ),
        (
            {"names": ("fsdp", "fsdp")},
            "block.*kernel, .*each axis can split only one dim.*to None in axes",
        ),
        (
            {"names": (("fsdp", "tensor"), None)},
            r"becomes \[\['fsdp', 'tensor'\], \[\]\].*each dimension only over one axis",
        ),
        ({"stack": "layers"}, r"'layers', which is neither.*Map it in axes=\{'layers'"),
    ],
    ids=["unknown", "twice", "two", "stack"],
)
def test_metadata_that_means_nothing_is_refused_with_its_remedy(net, settings, message, key, x):
    with pytest.raises(ValueError, match=message):
        net(**settings).init(key, x)


@pytest.mark.parametrize("net", [linen_net, nnx_net])
def test_an_axis_that_no_mesh_has_is_refused(net):
    with pytest.raises(
        ValueError, match="maps 'mlp' to 'model'; it must be 'fsdp', 'tensor', or None"
    ):
        net(axes={"mlp": "model"})


class Heads(nn.Module):
    """A projection into heads and back, as attention has it, with metadata of the real dimensions."""

    @nn.compact
    def __call__(self, x):
        into = nn.with_logical_partitioning(KERNEL, ("embed", "heads", "kv"))
        y = nn.DenseGeneral((2, 3), kernel_init=into)(x)
        y = with_logical_constraint(jnp.tanh(y), ("batch", "heads", "kv"))
        out = nn.with_partitioning(KERNEL, ("tensor", None, "fsdp"))
        return nn.DenseGeneral(FEATURES, axis=(-2, -1), kernel_init=out)(y)


def in_mesh(run, *arguments):
    """What `run` makes of the arguments where a mesh is set, and its program."""
    layout = Strategy(fsdp=2, tensor=2).on(jax.devices()[:4])

    @jax.jit
    def traced(*arguments):
        rules = nn.logical_axis_rules(layout.strategy.logical_rules)
        with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh), rules:
            return run(*arguments)

    arguments = jax.device_put(arguments, layout.replicated)
    return traced(*arguments), traced.lower(*arguments).as_text()


def test_a_dense_general_with_metadata_under_a_mesh(key, x):
    model = from_linen(Heads(), axes={"embed": "fsdp", "heads": "tensor", "kv": None})
    made = model.init(key, x)
    expected: Any = Heads().apply({"params": made.params}, x)
    for run in (lambda p, x: model.train(p, {}, key, x)[0], lambda p, x: model.predict(p, {}, x)):
        found, text = in_mesh(run, made.params, x)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        # The module's own constraint is kept, and metadata adds none.
        assert text.count("sharding_constraint") == 1


def test_flax_still_needs_a_dense_general_without_a_mesh(key, x):
    """Where this fails, flax issue 3676 is solved: remove `_dense_without_mesh`."""
    params = nn.unbox(Heads().init(key, x))
    with pytest.raises(ValueError, match="incompatible with its sharding annotation"):
        in_mesh(Heads().apply, params, x)


@pytest.mark.parametrize("stack", [NO_STACK, "layers"])
def test_metadata_of_nnx_constrains_nothing_under_a_mesh(key, x, stack):
    """It says where parameters lie; a constraint would have the loss run globally everywhere."""
    model = nnx_net(stack=stack, **STACKED)
    made = model.init(key)
    found, text = in_mesh(lambda p, x: model.train(p, made.model_state, key, x)[0], made.params, x)
    expected = model.predict(made.params, made.model_state, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert "sharding_constraint" not in text


# -- values that a call sows ---------------------------------------------------------------------------


class Sowing(nn.Module):
    """Sows one number and one value per sample, and has a running mean."""

    options: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        self.sow("losses", "size", jnp.mean(x**2), **(self.options or {}))
        self.sow("per_sample", "size", jnp.mean(x**2, axis=-1))
        self.sow("intermediates", "x", x)
        return x


class NnxSowing(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(FEATURES, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.inner(x))
        self.sow(nnx.Intermediate, "size", jnp.mean(x**2))
        return x


SUMS = {"reduce_fn": jnp.add, "init_fn": lambda: 0.0}


@pytest.mark.parametrize("options", [{}, SUMS], ids=["default", "reduce_fn"])
def test_what_linen_sows_belongs_to_one_call(key, x, options):
    module = Sowing(options=options)
    model = from_linen(module, sown=("losses",) if options else ())
    variables = model.init(key, x[:1])
    assert set(variables.model_state) == {"batch_stats"}
    state: Any = variables.model_state
    for _ in range(3):
        out, found = model.train(variables.params, state, key, x)
        wanted, others = module.apply(
            {"params": variables.params, **state},
            x,
            mutable=["losses", "per_sample", "batch_stats"],
        )
        np.testing.assert_array_equal(out, wanted)
        for name in ("losses", "per_sample", "batch_stats"):
            assert jax.tree.all(jax.tree.map(np.array_equal, found[name], others[name]))
        state = found.kept
        assert set(state) == {"batch_stats"}


def test_what_nnx_sows_belongs_to_one_call(key, x):
    model = from_nnx(NnxSowing, sown=(nnx.Intermediate,))
    variables = model.init(key)
    state: Any = variables.model_state
    for _ in range(3):
        out, found = model.train(variables.params, state, key, x)
        np.testing.assert_allclose(found["size"][0], np.mean(np.asarray(out) ** 2), rtol=1e-6)
        state = found.kept
        assert jax.tree.structure(state) == jax.tree.structure(variables.model_state)


def test_state_that_only_training_makes_is_refused(key, x):
    class Late(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            if train:
                self.variable("late", "count", lambda: jnp.zeros(()))
            return nn.Dense(4)(x)

    model = from_linen(Late(), train_kwargs={"train": True}, predict_kwargs={"train": False})
    variables = model.init(key, x)
    with pytest.raises(ValueError, match="the collection 'late' in training"):
        model.train(variables.params, variables.model_state, key, x)
