"""What is read from a compiled program, and that the batch is followed before the parameters."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from engines import DIM, make

from jaxgoodput.engine.analysis import analyse, received_by_kind
from jaxgoodput.engine.arithmetic import elementary_work, matrix_flops
from jaxgoodput.parallel.strategy import Strategy

WIDTH, LAYERS = 64, 6
SAMPLE = {"code": jax.ShapeDtypeStruct((16,), jnp.int32)}


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (4 * WIDTH, WIDTH)),
        "up": {"kernel": jax.random.normal(keys[1], (LAYERS, WIDTH, 4 * WIDTH))},
        "down": {"kernel": jax.random.normal(keys[2], (LAYERS, 4 * WIDTH, WIDTH))},
    }


def layer(x, p):
    return x + jnp.tanh(x @ p["up"]["kernel"]) @ p["down"]["kernel"], None


def loss(params, batch, key):
    """Nothing in it says how an activation is cut, and its embedding is cut over features."""
    x = params["embed"][batch["code"]]
    layers = {name: params[name] for name in ("up", "down")}
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, layers)
    return jnp.mean(x**2, axis=(1, 2))


def analysed(strategy, size=4):
    engine = make(
        loss,
        init=init,
        tx=optax.adam(1e-3),
        strategy=strategy,
        sample=SAMPLE,
        preconditioned=False,
    )
    program = engine.programs.step(engine.shape(size), measure=False)
    return analyse(program, program.compile(), engine.layout.num_devices)


MODEL_BYTES = 4 * (4 * WIDTH * WIDTH + LAYERS * 8 * WIDTH * WIDTH)


@pytest.fixture(scope="module")
def fsdp8():
    return analysed(Strategy(fsdp=8))


def test_arithmetic_counts_every_layer_of_a_scan(fsdp8):
    forward = 2 * LAYERS * 2 * (8 * 4 * 16) * WIDTH * 4 * WIDTH
    # Forward, again for the backward pass, and twice in it; but for what the last layer need not redo.
    assert fsdp8.flops == pytest.approx(4 * forward, rel=0.15)


def test_arithmetic_is_that_of_all_devices_under_every_layout(fsdp8):
    """Each replica of data parallelism traces its own part, a cut model the whole."""
    assert analysed(Strategy(data=8)).flops == pytest.approx(fsdp8.flops)


def test_fsdp_sends_the_model_and_not_its_activations(fsdp8):
    """Forward, backward, and gradients: three times the model, if the batch is followed first.

    XLA:CPU reduces with all-reduce, which counts twice, where an accelerator scatters.
    """
    sent = sum(fsdp8.traffic.values())
    assert 2 * MODEL_BYTES < sent < 4.5 * MODEL_BYTES
    assert fsdp8.bytes.arguments < 3.1 * MODEL_BYTES / 8 + 2**14
    # A larger batch sends no more.
    assert sum(analysed(Strategy(fsdp=8), size=16).traffic.values()) == pytest.approx(sent, rel=0.1)


def test_traffic_in_a_loop_counts_as_often_as_it_runs():
    text = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} all-gather(f32[2]{0} %p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
}
%condition (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}
ENTRY %main (a: f32[2]) -> f32[8] {
  %loop = (s32[], f32[8]) while(%t), condition=%condition, body=%body
  %y = f32[8]{0} all-reduce(f32[8]{0} %q), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}
"""
    assert received_by_kind(text, 8) == {"all-gather": 5 * 192, "all-reduce": 2 * 8 * 32 * 7 / 8}


def test_products_convolutions_and_branches():
    def flops(function, *shapes):
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return matrix_flops(jax.make_jaxpr(function)(*args).jaxpr)

    assert flops(jnp.dot, (3, 4), (4, 5)) == 2 * 3 * 4 * 5
    image, kernel = (2, 8, 8, 3), (3, 3, 3, 16)
    convolution = flops(
        lambda x, k: jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        image,
        kernel,
    )
    assert convolution == 2 * 2 * 8 * 8 * 16 * 3 * 3 * 3
    either = flops(
        lambda x, y: jax.lax.cond(x[0, 0] > 0, lambda: x @ y, lambda: x @ y @ y), (4, 4), (4, 4)
    )
    assert either == 2 * 2 * 4**3
    sizes = jnp.array([2, 4])
    ragged = flops(lambda x, y: jax.lax.ragged_dot(x, y, sizes), (6, 4), (2, 4, 5))
    assert ragged == 2 * 6 * 4 * 5


@pytest.mark.parametrize(
    "kind", [{}, {"replicas": 2}, {"loss_kind": "global", "replicas": 4}, {"elastic": True}]
)
def test_the_arithmetic_of_a_sample_is_known_once_its_program_is_compiled(kind):
    engine = make(**kind)
    assert math.isnan(engine.tflops_per_sample(4))
    engine.compile([4], accumulate=False)
    # A product of DIM numbers forward, and one backward.
    assert engine.tflops_per_sample(4) == pytest.approx(4 * DIM / 1e12)


def test_elementary_work_counts_loops_branches_and_what_reductions_read():
    def work(function):
        return elementary_work(jax.make_jaxpr(function)(jnp.ones((3, 4))).jaxpr)

    assert work(lambda x: jnp.sin(x) + 1) == 24
    looped = work(lambda x: jax.lax.scan(lambda y, _: (jnp.sin(y), None), x, None, length=5)[0])
    assert looped == 5 * 12
    branch = work(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(jnp.cos(x)), lambda: x))
    assert 24 <= branch <= 30  # and the choice
    assert 12 <= work(jnp.sum) <= 13
    assert work(lambda x: jax.lax.while_loop(lambda y: y[0, 0] > 0, jnp.sin, x)) == math.inf
    pair = work(lambda x: jax.lax.reduce((x, x), (0.0, 0.0), lambda a, b: (a[0], b[1]), (1,)))
    assert pair >= 2 * 12
    for costly in (jnp.sort, jnp.cumsum, lambda x: jax.random.normal(jax.random.key(0), x.shape)):
        assert work(costly) >= 20 * 12


def test_a_convolution_whose_window_is_larger_than_its_input_counts_as_a_loop():
    def work(width):
        image, window = jnp.ones((1, width, width, 2)), jnp.ones((3, 3, 2, 2))
        traced = jax.make_jaxpr(
            lambda x, w: jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )(image, window)
        return elementary_work(traced.jaxpr) / (2 * width**2)

    assert work(4) == work(3) == 1 and work(2) > 9 * 2 * 20
