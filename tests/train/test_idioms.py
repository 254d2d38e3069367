"""Idioms of other libraries are answered with what to write instead, before the first step."""

import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from problems import config
from problems import rows as rows_of

import jaxgoodput as jg
from jaxgoodput.data.datasets import as_source
from jaxgoodput.train.start.idioms import TENSORS, advice_on
from jaxgoodput.train.task import FOREIGN

ROWS = rows_of(16)["x"]
DIM = ROWS.shape[1]


class Line(jg.Trainer):
    """A trainer whose methods are replaced one by one."""

    def init(self, key) -> Any:
        return {"w": jnp.zeros(DIM)}

    def loss(self, params, batch, key) -> Any:
        return score(params, batch) ** 2

    def optimizer(self) -> Any:
        return optax.sgd(0.1)

    def dataset(self) -> Any:
        return {"x": ROWS}


def score(params, batch):
    return batch["x"] @ params["w"] - 1


def told(folder, **methods):
    """What a trainer with these methods says, its notes included."""
    kind = type("Own", (Line,), methods)
    with pytest.raises(Exception) as raised:
        kind(config(folder, base_steps=2.0), devices=jax.devices()[:1]).fit()
    return "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])


def module(body, **arguments):
    """A linen module with a body, and the class of it."""
    body.__qualname__ = "Net.__call__"
    return type("Net", (nn.Module,), {"__call__": nn.compact(body)})(**arguments)


def applied(net, *args, **kwargs):
    """Methods of a trainer of a linen module that is called in a certain way."""

    def init(self, key):
        found = net.init({"params": key, "dropout": key}, jnp.zeros((1, DIM)), *args)
        rest = {name: found[name] for name in found if name != "params"}
        return jg.Variables(params=found["params"], model_state=rest)

    def loss_and_state(self, params, model_state, batch, key):
        out = net.apply({"params": params, **model_state}, batch["x"], **kwargs)
        return out[:, 0] ** 2, model_state

    return {"init": init, "loss_and_state": loss_and_state}


def normalised(self, x):
    return nn.Dense(1)(nn.BatchNorm(use_running_average=False)(x))


def normalised_over_replicas(self, x):
    return nn.Dense(1)(nn.BatchNorm(use_running_average=False, axis_name="replicas")(x))


def dropping(self, x):
    return nn.Dense(1)(nn.Dropout(0.1, deterministic=False)(x))


def flagged(self, x, train):
    return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(x))


def loss_of(function):
    return {"loss": lambda self, params, batch, key: function(score(params, batch))}


def kept_by(seen):
    def loss(self, params, batch, key):
        seen.append(score(params, batch).mean())
        return score(params, batch) ** 2 * seen[0]

    return loss


class Loader:
    """An iterable of batches, which does not say that they are."""

    def __iter__(self):
        return iter([{"x": ROWS[i : i + 8]} for i in (0, 8)])


def flax_state(self, key):
    return TrainState.create(apply_fn=None, params={"w": jnp.zeros(DIM)}, tx=optax.sgd(0.1))


class Layer:
    """Parameters that are a PyTree of a class of one's own, which has functions of the same names as flax."""

    def __init__(self, w):
        self.w = w

    def init(self):
        return self

    def apply(self, x):
        return x @ self.w


jax.tree_util.register_pytree_node(
    Layer, lambda x: ((x.w,), None), lambda _, leaves: Layer(*leaves)
)


# What is written, and what is said.
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "pmean over an axis of pmap": (
        loss_of(lambda x: jax.lax.pmean(x**2, "batch")),
        "axis 'batch' is one of pmap",
    ),
    "a module's axis_name": (
        applied(module(normalised_over_replicas), mutable=["batch_stats"]),
        "Take axis_name= out of the model",
    ),
    "pmap": (
        {
            "loss": lambda self, params, batch, key: jax.pmap(lambda x: x @ params["w"])(
                batch["x"][None]
            )[0]
        },
        "Leave it out: the run puts the batch on all devices",
    ),
    "mutable= forgotten": (applied(module(normalised)), "mutable=['batch_stats']"),
    "rngs= forgotten": (applied(module(dropping)), "rngs={'dropout': key}"),
    "a setting of dropout": (
        applied(module(lambda self, x: nn.Dropout(0.1)(x))),
        "train_kwargs={'deterministic': False}",
    ),
    "a flag of training": (
        applied(module(flagged), False),
        "from_linen(module, train_kwargs={'train': True}, predict_kwargs={'train': False})",
    ),
    "item()": (loss_of(lambda x: x * x.sum().item()), "Loss.of(losses, name=value)"),
    "float()": (loss_of(lambda x: x * float(x.sum())), "Loss.of(losses, name=value)"),
    "int()": (loss_of(lambda x: x * int(x.sum())), "Loss.of(losses, name=value)"),
    "if": (loss_of(lambda x: x**2 if x.mean() > 3 else x), "jnp.where"),
    "a list indexed by a value": (
        loss_of(lambda x: x * [1.0, 2.0][x.argmax()]),
        "jnp.take of an array",
    ),
    "rows chosen by a value": (loss_of(lambda x: x[x > 0]), "weights that are 0"),
    "a shape from a value": (loss_of(lambda x: x + jnp.unique(x).sum()), "a size="),
    "np of a traced value": (
        loss_of(lambda x: jnp.asarray(np.square(x))),
        "Use jnp in place of np",
    ),
    "a value that is kept": ({"loss": kept_by([])}, "Return it: numbers to look at"),
    "a tuple, as with has_aux": (
        loss_of(lambda x: (x**2, {"accuracy": x})),
        "Loss.of(losses, name=value)",
    ),
    "a dict": (loss_of(lambda x: {"loss": x**2}), "Loss.of(losses, name=value)"),
    "gradients": (
        loss_of(lambda x: jax.value_and_grad(lambda y: (y**2).sum())(x)),
        "no gradients: the run takes them",
    ),
    "nothing": (loss_of(lambda x: None), "got NoneType"),
    "a count of hits": (loss_of(lambda x: (x > 0).astype(jnp.int32)), "has no gradient"),
    "hits": (loss_of(lambda x: x > 0), "has no gradient"),
    "a loss of batches": (
        {"dataset": lambda self: Loader(), "loss": lambda self, p, b, key: b["x"] @ p["w"]},
        "jaxgoodput.stream(data, batched=True)",
    ),
    "lookahead": (
        {"optimizer": lambda self: optax.lookahead(optax.sgd(0.1), 5, 0.5)},
        "Config.ema keeps an average",
    ),
    "an optimizer that is not called": ({"optimizer": lambda self: optax.adam}, "optax.adam(1e-3)"),
    "a learning rate as optimizer": ({"optimizer": lambda self: 1e-3}, "optax.adam(1e-3)"),
    "an optimizer and a schedule": (
        {"optimizer": lambda self: (optax.sgd(0.1), optax.constant_schedule(0.1))},
        "must return an optax.GradientTransformation; got tuple",
    ),
    "a module as parameters": (
        {"init": lambda self, key: nn.Dense(1)},
        "return module.init(key, x)",
    ),
    "flax's collections": (
        {
            "init": lambda self, key: {
                "params": {"w": jnp.zeros(DIM)},
                "batch_stats": {"m": jnp.zeros(2)},
            }
        },
        "(params, batch_stats), all of which would be trained",
    ),
    "flax's TrainState": ({"init": flax_state}, "return its params"),
    "an old key as parameter": (
        {"init": lambda self, key: {"w": jnp.zeros(DIM), "key": jax.random.PRNGKey(0)}},
        "Put counters into model_state",
    ),
    "a generator": ({"dataset": lambda self: (one for one in [ROWS])}, "can be read once only"),
    "strings": ({"dataset": lambda self: {"x": ROWS, "s": np.array(["a"] * 16)}}, "Turn text into"),
    "metrics that are an average": (
        {
            "eval_dataset": lambda self: {"x": ROWS},
            "metrics": lambda self, params, batch: {"off": score(params, batch).mean()},
        },
        "Return one value (or row) per sample",
    ),
    "metrics without a name": (
        {
            "eval_dataset": lambda self: {"x": ROWS},
            "metrics_with_state": lambda self, params, model_state, batch: score(params, batch),
        },
        "must return arrays by name",
    ),
    "a loader of held-out batches": (
        {
            "eval_dataset": lambda self: Loader(),
            "metrics": lambda self, params, batch: {"off": score(params, batch)},
        },
        "the data set that a loader reads (loader.dataset)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_it_is_told_what_to_write_instead(tmp_path, name):
    methods, said = ERRORS[name]
    assert said in told(tmp_path, **methods)


@pytest.mark.parametrize("name", TENSORS)
def test_methods_of_other_tensors_have_their_counterpart(name):
    with pytest.raises(AttributeError) as raised:
        jax.eval_shape(lambda x: getattr(x, name)(), jnp.zeros(3))
    assert TENSORS[name] in (advice_on(raised.value) or "")


@pytest.mark.parametrize("missing", FOREIGN)
def test_methods_of_other_trainers_are_named_where_ours_is_missing(tmp_path, missing):
    for name in FOREIGN[missing]:
        kind: Any = type("Foreign", (jg.Trainer,), {name: lambda self, *args: None})
        for ours in ("init", "loss", "optimizer", "dataset"):
            if ours != missing:
                setattr(kind, ours, getattr(Line, ours))
        kind.eval_dataset = lambda self: {"x": ROWS}
        with pytest.raises(TypeError, match=f"does not call {name}: {missing} has its part"):
            kind(config(tmp_path, epochs=1)).fit()


def test_data_and_epochs_are_no_arguments_of_fit(tmp_path):
    trainer: Any = Line(config(tmp_path, epochs=1))
    for call in (lambda: trainer.fit(ROWS, ROWS), lambda: trainer.fit(epochs=3)):
        with pytest.raises(TypeError, match="data come from dataset.*Config.epochs"):
            call()
    settings: Any = {"workdir": str(tmp_path)}
    unchecked = inspect.unwrap(jg.Trainer.__init__)  # without the types that tests look at
    with pytest.raises(TypeError, match="takes a jaxgoodput.Config; got dict"):
        unchecked(trainer, settings)


def test_columns_are_no_samples():
    pandas = pytest.importorskip("pandas")
    kind = type("Frame", (pandas.DataFrame,), {})
    for frame in (pandas.DataFrame({"x": [1.0]}), kind({"x": [1.0]})):
        with pytest.raises(TypeError, match="has columns.*columns as arrays"):
            as_source(frame)
    with pytest.raises(TypeError, match="return a tuple.*pad them to one shape"):
        as_source([ROWS, ROWS[:, 0]])
    assert len(as_source([ROWS, ROWS])) == 2, "these may be two samples"
    with pytest.raises(TypeError, match="takes them apart.*loader.dataset"):
        as_source(Batched())


class Batched:
    """A loader with a batch size, as torch's."""

    batch_size = 8

    def __iter__(self):
        return iter([ROWS])


def test_settings_of_other_libraries_are_refused_by_the_right_name():
    limits = jg.BatchLimits(base=8, max=8)
    anyhow: Any = jg.Config
    for settings, said in (
        ({"batch": 32}, r"batch=BatchLimits\(base="),
        ({"batch_size": 32}, "did you mean batch"),
        ({"batch": limits, "num_epochs": 3}, "did you mean epochs"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            anyhow(workdir="unused", base_steps=3, **settings)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such thing"),
        TypeError("Net.augment() missing 1 required positional argument: 'train'"),
        AttributeError("DynamicJaxprTracer has no attribute shpae"),
        AttributeError("'Net' object has no attribute 'numpy'"),
    ],
    ids=str,
)
def test_an_error_that_means_something_else_has_no_note(error):
    assert advice_on(error) is None


def test_parameters_may_be_of_any_class_that_is_a_tree(tmp_path):
    class Own(Line):
        def init(self, key):
            return Layer(jnp.zeros(DIM))

        def loss(self, params, batch, key):
            return (params.apply(batch["x"]) - 1) ** 2

    assert Own(config(tmp_path, base_steps=2.0)).fit().params.w.any()
