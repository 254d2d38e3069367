"""The rows of the exactness bench: what users write, one row per optimizer, wrapper, freeze and model."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import exact_models as models
import jax
import jax.numpy as jnp
import optax
from exact_models import Model
from optax import contrib

# Makes an optimizer; each of its schedules goes through the function that it gets.
Made = Callable[[Callable[[optax.Schedule], optax.Schedule]], optax.GradientTransformation]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model and an optimizer, and how a plain loop calls the optimizer."""

    name: str
    model: Model = models.PLAIN
    tx: Made = lambda at: optax.sgd(0.1, momentum=0.9)
    trainable: Callable[[Any], Any] | None = None
    extra: tuple[str, ...] = ()
    """Arguments that `update` needs besides gradients, state and parameters: `value`."""
    decays: tuple[float | None, ...] = ()
    """Share that each of Adam's second moments, or Lion's momenta, keeps per base step, in order."""


def _alone(name: str, tx: Callable[[], optax.GradientTransformation], **options: Any) -> Row:
    return Row(name=name, tx=lambda at: tx(), **options)


WAVE = optax.cosine_decay_schedule(0.05, 12)
RISE = optax.warmup_cosine_decay_schedule(0.0, 0.02, 4, 12)


UP_ONLY = {"up": {"kernel": True, "bias": True}, "down": {"kernel": False}}


def up_or_down(params: Any) -> Any:
    """Return a label for every leaf: the first layer, the second."""
    return {name: jax.tree.map(lambda _, n=name: n, part) for name, part in params.items()}


def is_down(params: Any) -> Any:
    return jax.tree.map(lambda label: label == "down", up_or_down(params))


def is_up(params: Any) -> Any:
    return jax.tree.map(lambda label: label == "up", up_or_down(params))


OF_OPTAX = (
    _alone("sgd", lambda: optax.sgd(0.1)),
    _alone("momentum", lambda: optax.sgd(0.05, momentum=0.9, nesterov=True)),
    _alone("adam", lambda: optax.adam(0.01), decays=(0.999,)),
    _alone("adamw", lambda: optax.adamw(0.01, b2=0.95, weight_decay=0.1), decays=(0.95,)),
    _alone("nadamw", lambda: optax.nadamw(0.01), decays=(0.999,)),
    _alone("adamax", lambda: optax.adamaxw(0.01)),
    _alone("amsgrad", lambda: optax.amsgrad(0.01)),
    _alone("adabelief", lambda: optax.adabelief(0.01)),
    _alone("adadelta", lambda: optax.adadelta(1.0)),
    _alone("adafactor", lambda: optax.adafactor(0.01, min_dim_size_to_factor=16)),
    _alone("adagrad", lambda: optax.adagrad(0.1)),
    _alone("adan", lambda: optax.adan(0.01)),
    _alone("fromage", lambda: optax.fromage(0.01)),
    _alone("lamb", lambda: optax.lamb(0.01), decays=(0.999,)),
    _alone("lars", lambda: optax.lars(0.1)),
    _alone("lbfgs, no search", lambda: optax.lbfgs(0.05, memory_size=3, linesearch=None)),
    _alone("lion", lambda: optax.lion(0.002), decays=(0.99,)),
    _alone("noisy_sgd", lambda: optax.noisy_sgd(0.05, eta=1e-4)),
    _alone("novograd", lambda: optax.novograd(0.01)),
    _alone("optimistic sgd", lambda: optax.optimistic_gradient_descent(0.05)),
    _alone("optimistic adam", lambda: optax.optimistic_adam_v2(0.01), decays=(0.999,)),
    _alone("polyak_sgd", lambda: optax.polyak_sgd(0.5), extra=("value",)),
    _alone("radam", lambda: optax.radam(0.01), decays=(0.999,)),
    _alone("rmsprop", lambda: optax.rmsprop(0.01, centered=True, momentum=0.9)),
    _alone("rprop", lambda: optax.rprop(0.01)),
    _alone("sign_sgd", lambda: optax.sign_sgd(0.002)),
    _alone("signum", lambda: optax.signum(0.002)),
    _alone("sm3", lambda: optax.sm3(0.05)),
    _alone("yogi", lambda: optax.yogi(0.01)),
)

OF_CONTRIB = (
    _alone("acprop", lambda: contrib.acprop(0.01)),
    _alone("ademamix", lambda: contrib.ademamix(0.01)),
    _alone("adopt", lambda: contrib.adopt(0.01)),
    _alone("cocob", lambda: contrib.cocob()),
    _alone("dadapt_adamw", lambda: contrib.dadapt_adamw()),
    _alone("dog", lambda: contrib.dog(init_step=("distance", 0.01))),
    _alone("dowg", lambda: contrib.dowg(init_estim_sq_dist=1e-3)),
    _alone("dpsgd", lambda: contrib.dpsgd(0.05, 1.0, 0.1, seed=0)),
    _alone("galore", lambda: contrib.galore(0.01, rank=4), decays=(0.999,)),
    _alone("madgrad", lambda: contrib.madgrad(0.01)),
    _alone("mechanize", lambda: contrib.mechanize(optax.sgd(0.1), s_init=0.1)),
    _alone("momo", lambda: contrib.momo(0.5), extra=("value",)),
    _alone("momo_adam", lambda: contrib.momo_adam(0.02), extra=("value",)),
    _alone("muon", lambda: contrib.muon(0.01), decays=(0.999,)),
    _alone("normalize", lambda: optax.chain(contrib.normalize(), optax.sgd(0.05))),
    _alone("prodigy", lambda: contrib.prodigy(estim_lr0=1e-3)),
    _alone(
        "reduce_on_plateau",
        lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(patience=1, cooldown=1)),
        extra=("value",),
    ),
    _alone("sam", lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)),
    _alone("schedule_free", lambda: contrib.schedule_free_sgd(0.1)),
    _alone("schedule_free_adamw", lambda: contrib.schedule_free_adamw(0.02)),
    _alone("simplified_ademamix", lambda: contrib.simplified_ademamix(1e-3)),
    _alone("sophia", lambda: contrib.sophia(0.01)),
    _alone(
        "split_real_and_imaginary",
        lambda: contrib.split_real_and_imaginary(optax.adam(0.01)),
        decays=(0.999,),
    ),
)

WRAPPED = (
    Row(name="schedule", tx=lambda at: optax.sgd(at(WAVE), momentum=0.9)),
    Row(name="warm-up, adamw", tx=lambda at: optax.adamw(at(RISE)), decays=(0.999,)),
    Row(
        name="inject_hyperparams",
        tx=lambda at: optax.inject_hyperparams(optax.adam)(learning_rate=at(WAVE), b2=0.99),
        decays=(0.99,),
    ),
    Row(
        name="MultiSteps",
        tx=lambda at: optax.MultiSteps(optax.sgd(at(WAVE)), 2).gradient_transformation(),
    ),
    Row(name="apply_every", tx=lambda at: optax.chain(optax.sgd(at(WAVE)), optax.apply_every(2))),
    Row(
        name="masked",
        tx=lambda at: optax.chain(
            optax.masked(
                optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
            ),
            optax.sgd(at(WAVE)),
        ),
    ),
    Row(
        name="multi_transform",
        tx=lambda at: optax.multi_transform(
            {"up": optax.sgd(at(WAVE)), "down": optax.adam(at(RISE))}, up_or_down
        ),
        decays=(0.999,),
    ),
    Row(name="apply_if_finite", tx=lambda at: optax.apply_if_finite(optax.sgd(at(WAVE)), 3)),
    Row(
        name="skip_large_updates",
        tx=lambda at: optax.MultiSteps(
            optax.sgd(at(WAVE)),
            1,
            should_skip_update_fn=functools.partial(
                optax.skip_large_updates, max_squared_norm=100.0
            ),
        ).gradient_transformation(),
    ),
    _alone("lookahead", lambda: optax.lookahead(optax.sgd(0.1), 5, 0.5)),
    Row(name="flatten", tx=lambda at: optax.flatten(optax.adam(at(WAVE))), decays=(0.999,)),
    Row(name="clip", tx=lambda at: optax.chain(optax.clip(1e-3), optax.sgd(at(WAVE)))),
    Row(
        name="clip_by_global_norm",
        tx=lambda at: optax.chain(optax.clip_by_global_norm(0.05), optax.adam(at(WAVE))),
        decays=(0.999,),
    ),
    Row(
        name="clip_by_block_rms",
        tx=lambda at: optax.chain(optax.sgd(at(WAVE)), optax.clip_by_block_rms(1e-4)),
    ),
    Row(
        name="adaptive_grad_clip",
        tx=lambda at: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(at(WAVE))),
    ),
    Row(name="centralize", tx=lambda at: optax.chain(optax.centralize(), optax.sgd(at(WAVE)))),
    Row(name="ema of updates", tx=lambda at: optax.chain(optax.ema(0.9), optax.sgd(at(WAVE)))),
    Row(
        name="add_noise",
        tx=lambda at: optax.chain(
            optax.add_noise(1e-3, 0.55, jax.random.key(3)), optax.sgd(at(WAVE))
        ),
    ),
    Row(
        name="conditionally_transform",
        tx=lambda at: optax.chain(
            optax.sgd(at(WAVE)),
            optax.conditionally_transform(
                optax.scale(0.5), lambda step, **_: jnp.asarray(step) >= 4
            ),
        ),
    ),
    Row(
        name="named_chain",
        tx=lambda at: optax.named_chain(
            ("clip", optax.clip_by_global_norm(0.1)), ("sgd", optax.sgd(at(WAVE)))
        ),
    ),
    Row(
        name="scheduled weight decay",
        tx=lambda at: optax.chain(
            optax.scale_by_adam(b2=0.99),
            optax.add_decayed_weights(at(optax.linear_schedule(0.1, 0.0, 8))),
            optax.scale_by_learning_rate(at(WAVE)),
        ),
        decays=(0.99,),
    ),
)


def _never(params: Any) -> Any:
    """Return that only the second layer trains."""
    return is_down(params)


FROZEN = (
    Row(
        name="frozen by trainable()",
        trainable=_never,
        tx=lambda at: optax.adam(at(WAVE)),
        decays=(0.999,),
    ),
    Row(
        name="frozen by set_to_zero",
        tx=lambda at: optax.multi_transform(
            {"up": optax.set_to_zero(), "down": optax.sgd(at(WAVE), momentum=0.9)}, up_or_down
        ),
    ),
    Row(
        name="frozen by a masked set_to_zero",
        tx=lambda at: optax.chain(optax.adam(at(WAVE)), optax.masked(optax.set_to_zero(), is_up)),
        decays=(0.999,),
    ),
    Row(
        name="frozen by optax.freeze",
        tx=lambda at: optax.chain(optax.transforms.freeze(UP_ONLY), optax.sgd(at(WAVE))),
    ),
    Row(
        name="frozen by selective_transform",
        tx=lambda at: optax.transforms.selective_transform(
            optax.sgd(at(WAVE)), freeze_mask=UP_ONLY
        ),
    ),
    Row(
        name="frozen by a rate of 0",
        tx=lambda at: optax.multi_transform(
            {"up": optax.sgd(0.0), "down": optax.sgd(at(WAVE))}, up_or_down
        ),
    ),
    Row(name="frozen by stop_gradient", model=models.STOPPED, tx=lambda at: optax.sgd(at(WAVE))),
)

MODELS = (
    Row(name="mean as one number", model=models.MEAN),
    Row(name="weighted samples", model=models.WEIGHTED),
    Row(name="weights in total", model=models.WEIGHTED_IN_TOTAL),
    Row(name="dropout", model=models.DROPOUT),
    Row(name="odd tree", model=models.ODD_TREE, trainable=models.but_integers),
    Row(name="complex", model=models.COMPLEX, tx=lambda at: optax.sgd(at(WAVE))),
    Row(
        name="complex, adam",
        model=models.COMPLEX,
        tx=lambda at: contrib.split_real_and_imaginary(optax.adam(at(WAVE))),
        decays=(0.999,),
    ),
    Row(name="tied embedding", model=models.TIED),
    Row(name="scanned layers", model=models.SCANNED),
    Row(name="remat", model=models.REMAT),
    Row(name="running mean", model=models.RUNNING_MEAN),
    Row(name="linen BatchNorm", model=models.LINEN_BATCH_NORM),
    Row(name="linen Dropout, LayerNorm", model=models.LINEN_DROPOUT),
    Row(name="linen scan, remat", model=models.LINEN_STACKED),
    Row(name="nnx BatchNorm, Dropout", model=models.NNX),
    Row(name="linen sow", model=models.LINEN_SOWS),
    Row(name="linen sow with a reduce_fn", model=models.LINEN_SOWS_SUMS),
    Row(name="nnx sow", model=models.NNX_SOWS),
    Row(name="counts, declared", model=models.COUNTS),
    Row(name="counts, not declared", model=models.UNDECLARED_COUNTS),
    Row(name="mean over tokens", model=models.MEAN_OF_TOKENS),
)

ROWS = {row.name: row for row in (*OF_OPTAX, *OF_CONTRIB, *WRAPPED, *FROZEN, *MODELS)}
